"""Write docs/demo from the folder of a demo: python tools/demo_docs.py FOLDER.

The page holds what `make demo` found: the verdicts, the plots and one table of each part. A demo
that was stopped after its first part has a page on compression alone.
"""

import json
import shutil
import sys
import tempfile
import textwrap
from datetime import date
from pathlib import Path

from kvcat.report import Results, read_results, write_report
from kvcat.report.verdicts import compression_verdicts, training_verdicts

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "demo"
ABOUT = (
    "What `make demo` finds on `kvcat-base`, the model of a million parameters that comes with the "
    "package and knows Python sources only. kvcat {kvcat}, torch {torch}, transformers "
    "{transformers}, {cpu}, {date}; [provenance.jsonl](provenance.jsonl) has the rest. The page "
    "that the command writes has every figure. The strongest rival, KVzip, is not among the "
    "methods, because it needs kvpress: the [leaderboard](../leaderboard.md) compares it on real "
    "models."
)
COMPRESSION = (
    "Caches of {prefix_len} tokens of held-out Python source, made from these tokens alone and "
    "scored on the {suffix_len} tokens that follow."
)
TRAINING = (
    "KV-CAT and a control that saw the same tokens with the plain loss; one run of each, and the "
    "intervals do not cover variation between runs. The difference between base and control is "
    "what plain training does. Caches of {prefix_len} tokens, fitted to the {suffix_len} tokens "
    "that follow and scored on them, as in the paper."
)
NO_TRAINING = (
    "The training part of this demo was stopped before its end, so there is nothing to compare "
    "here. What training gains and costs on a real model: [results](../results.md)."
)


def wrapped(text: str) -> str:
    """Prose in lines of at most 100 columns."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def answer_lines(answers: dict[str, str]) -> list[str]:
    """A paragraph for each question."""
    lines: list[str] = []
    for question, answer in answers.items():
        lines += [wrapped(f"**{question}** {answer}"), ""]
    return lines


def tables(report: Path, pattern: str) -> list[str]:
    """The tables of a report whose names match, each with a heading of the second level."""
    files = sorted((report / "tables").glob(pattern))
    return [file.read_text(encoding="utf-8").replace("### ", "## ", 1) for file in files]


def part_page(results: Results, report: Path, about: str, plots: dict[str, str]) -> list[str]:
    """The lines of one part: what was measured, plots by file with their descriptions, a table."""
    lines = [wrapped(about.format_map(results.config)), ""]
    for name, description in plots.items():
        lines += [f"![{description}]({name})", ""]
    (overview,) = tables(report, "overview.md")
    heading, _, table = overview.partition("\n")
    caption = wrapped(f"**{heading.lstrip('# ')}**")
    return [*lines, caption, table.rstrip(), ""]


def main() -> None:
    """Replace the page by that of the demo in the folder that the command line names."""
    demo = Path(sys.argv[1])
    compression = read_results(demo / "compression")
    training = None
    if (demo / "training").exists():
        training = read_results(demo / "training")
    shutil.rmtree(TARGET, ignore_errors=True)
    TARGET.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "compression"
        write_report([compression], report)
        shutil.copy(report / "plots" / "headline.png", TARGET / "compression.png")
        written = (demo / "compression" / "records.jsonl").stat().st_mtime
        facts = {**compression.events[0], "date": date.fromtimestamp(written).isoformat()}
        page = ["# The demo", "", wrapped(ABOUT.format_map(facts)), ""]
        page += answer_lines(compression_verdicts(compression))
        plot = {"compression.png": "KL and equal next tokens against the slots kept, by method"}
        page += ["## Compression", "", *part_page(compression, report, COMPRESSION, plot)]
        events = list(compression.events)
        if training is None:
            page += ["## Training", "", wrapped(NO_TRAINING), ""]
        else:
            runs = {"KV-CAT": demo / "kv-cat", "control": demo / "control"}
            report = Path(name) / "training"
            write_report([training], report, runs=runs)
            plots = {
                "differences-KV-CAT-control.png": "KV-CAT minus control, by method",
                "training.png": "Losses and fractions kept, by training step",
            }
            for plot_name in plots:
                shutil.copy(report / "plots" / plot_name, TARGET / plot_name)
            page += ["## Training", "", *answer_lines(training_verdicts(training))]
            page += part_page(training, report, TRAINING, plots)
            events += training.events
    (TARGET / "index.md").write_text("\n".join(page), encoding="utf-8")
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (TARGET / "provenance.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
