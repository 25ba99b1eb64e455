"""The command ``kvcat report``: tables, plots and a page about evaluations and training runs."""

from pathlib import Path
from typing import Literal

from kvcat import option_types as opt
from kvcat.cli.options import labelled


def report(
    folders: opt.Several[Path],
    /,
    output: opt.Output = Path("report"),
    run: opt.Strings = (),
    paper_model: opt.Unset[Literal["Qwen2.5-0.5B", "Qwen2.5-1.5B"]] = None,
    title: str = "KV cache compression",
) -> None:
    """Write a report on evaluations and training runs.

    The report has tables (Markdown, CSV, LaTeX), plots and one self-contained HTML page.

    Example: kvcat report results needle --run KV-CAT=runs/router -o report

    Args:
        folders: Output folders of `kvcat eval` or `kvcat train`, one or several.
        output: Folder for tables, plots and report.html.
        run: Training run whose diagnostics are shown, LABEL=FOLDER; may be given several times.
        paper_model: Model that base, kvcat, rand and attn derive from; adds the paper's figures.
        title: Title of the page.
    """
    from kvcat.report import write_report

    trained = [str(folder) for folder in folders if (folder / "metrics.jsonl").exists()]
    evaluated = [folder for folder in folders if str(folder) not in trained]
    items = [*trained, *opt.flat(run)]
    runs: dict[str, Path] = {}
    if items:
        runs = {label: Path(folder) for label, folder in labelled(items).items()}
    print(write_report(evaluated, output, title=title, runs=runs, paper_model=paper_model))
