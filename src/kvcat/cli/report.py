"""``kvcat report``: tables, plots and one page from evaluation folders."""

from pathlib import Path
from typing import Literal

from kvcat.cli.options import Output, Strings, flat, labelled
from kvcat.errors import InputError


def report(
    folders: tuple[Path, ...],
    /,
    output: Output = Path("report"),
    run: Strings = (),
    paper_model: Literal["Qwen2.5-0.5B", "Qwen2.5-1.5B"] | None = None,
    title: str = "KV cache compression",
) -> None:
    """Write tables (Markdown, CSV, LaTeX), plots and one self-contained HTML page of evaluations and training runs.

    Example: kvcat report results needle --run KV-CAT=runs/router -o report

    Args:
        folders: Folders that `kvcat eval` or `kvcat train` wrote.
        output: Folder for tables, plots and report.html.
        run: LABEL=FOLDER of a training run, for its diagnostics; several may be given.
        paper_model: What the models labelled base, kvcat (kv-cat, router), rand and attn are; the paper's figures then
            stand beside ours.
        title: Title of the page.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"no folder {folder}")
    if not folders and not run:
        raise InputError("name at least one folder that `kvcat eval` or `kvcat train` wrote")
    trained = {folder.name: folder for folder in folders if (folder / "metrics.jsonl").exists()}
    named = {label: Path(folder) for label, folder in labelled(flat(run)).items()} if run else {}
    for label, folder in named.items():
        if not folder.is_dir():
            raise InputError(f"--run takes LABEL=FOLDER with a run's folder, not {label}={folder}")
    evaluated = [folder for folder in folders if folder not in trained.values()]

    from kvcat.report import write_report

    print(write_report(evaluated, output, title=title, runs=trained | named, context={}, paper_model=paper_model))
