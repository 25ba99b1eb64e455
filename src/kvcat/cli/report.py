"""``kvcat report``: tables, plots and one page from evaluation folders."""

from pathlib import Path
from typing import Annotated

import typer

from kvcat.errors import InputError


def report_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `kvcat eval` or `kvcat train` wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for tables, plots and report.html.")] = Path(
        "report"
    ),
    run: Annotated[
        list[str] | None,
        typer.Option(help="LABEL=FOLDER of a training run, for its diagnostics; may be given several times."),
    ] = None,
    paper_model: Annotated[
        str | None,
        typer.Option(
            help="Qwen2.5-0.5B or Qwen2.5-1.5B: what the models labelled base, kvcat (kv-cat, router), rand and attn "
            "are; the paper's figures then stand beside ours.",
            show_default="no figures of the paper",
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "KV cache compression",
) -> None:
    """Write tables (Markdown, CSV, LaTeX), plots and one self-contained HTML page of evaluations and training runs."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"no folder {folder}")
    trained = [folder for folder in folders if (folder / "metrics.jsonl").exists()]
    runs = {folder.name: folder for folder in trained} | dict(_labelled(item) for item in run or [])
    evaluated = [folder for folder in folders if folder not in trained]
    from kvcat.report import write_report

    print(write_report(evaluated, output, title=title, runs=runs, context={}, paper_model=paper_model))


def _labelled(item: str) -> tuple[str, Path]:
    label, separator, folder = item.partition("=")
    if not separator or not Path(folder).is_dir():
        raise InputError(f"--run takes LABEL=FOLDER with a run's folder, not {item!r}")
    return label, Path(folder)
