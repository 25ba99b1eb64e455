"""Right answers on compact caches of models that were trained to recall, and of the base.

    PYTHONPATH=benchmarks python runs/smollm2/answers.py OUT.jsonl --model control=control-64
        attn-prefix=attn-prefix-64

adds the answers of ``benchmarks/question_set.py`` to recall.csv.gz, with those that the base gave
to the same questions; ``--choices FOLDER`` the marks of ``kvcat eval qa`` to choices.csv.gz.
``tables.py recall`` prints the tables.
"""

import argparse
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd

from kvcat.errors import InputError, run_script
from kvcat.evals.records import read_records
from kvcat.stats import holm, share, share_difference, sign_flip_p_value
from kvcat.types import Float

FILE = Path(__file__).with_name("recall.csv.gz")
CHOICES = FILE.with_name("choices.csv.gz")
OF_BASE = Path(__file__).parents[2] / "benchmarks" / "records" / "kinds.csv.gz"
MODELS = {
    "base": "base",
    "books-64": "books, next-token loss",
    "plain-64": "the same places of the books, not repeated",
    "control-64": "recalled text, next-token loss",
    "attn-prefix-64": "recalled text, `attn-prefix`, weight 1",
    "attn-prefix-w0.1-64": "recalled text, `attn-prefix`, weight .1",
}
COMPARED = [
    ("control-64", "base"),
    ("books-64", "base"),
    ("control-64", "books-64"),
    ("control-64", "plain-64"),
    ("attn-prefix-64", "control-64"),
]
"""Pairs of models whose difference the table shows, as the mean over the seeds that both have."""
DEFAULT = "attention-matching@reconstruction"
CELLS = {
    "whole cache": ("dense", 1.0),
    "10 %": (DEFAULT, 0.1),
    "5 %": (DEFAULT, 0.05),
    "no document": ("no document", 0.0),
}
SIZES = ["10 %", "5 %"]
KEY = ["model", "seed", "document", "condition", "keep", "question"]
TEXTS = dict.fromkeys(["model", "seed", "document", "condition", "kind", "asked", "answer"], str)
LEAST_GAIN = 0.5  # of the base's whole cache over no document, for a kind that counts


def table() -> str:
    """Right answers of every run, and differences between models."""
    rows = pd.read_csv(FILE, dtype=TEXTS, keep_default_na=False)
    marks = rows.pivot(
        index=["document", "kind", "question"],
        columns=["model", "seed", "condition", "keep"],
        values="right",
    ).dropna()
    base = marks["base", "0"]
    gain = (base[CELLS["whole cache"]] - base[CELLS["no document"]]).groupby("kind").mean()
    counted = gain[gain >= LEAST_GAIN].index
    marks = marks[marks.index.get_level_values("kind").isin(counted)]
    documents = marks.index.get_level_values("document").tolist()
    runs = sorted(
        {(model, seed) for model, seed, *_ in marks.columns},
        key=lambda run: (list(MODELS).index(run[0]), run[1]),
    )
    lines = [f"| right answers, % | {' | '.join(CELLS)} |", "|---" * (1 + len(CELLS)) + "|"]
    for run in runs:
        shares = [share(marks[run][cell].to_numpy(float), documents) for cell in CELLS.values()]
        cells = [f"{100 * x.value:.0f} [{100 * x.low:.0f}, {100 * x.high:.0f}]" for x in shares]
        title = MODELS[run[0]] if run[0] == "base" else f"{MODELS[run[0]]}, run {run[1]}"
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines += ["", f"| difference, points | {' | '.join(SIZES)} |", "|---" * (1 + len(SIZES)) + "|"]
    cells_of = {}
    p_values = []
    for model, other in COMPARED:
        seeds = [seed for name, seed in runs if name == model and _run(other, seed) in runs]
        for size in SIZES:
            ours = _mean_marks(marks, [(model, seed) for seed in seeds], size)
            theirs = _mean_marks(marks, [_run(other, seed) for seed in seeds], size)
            cells_of[model, other, size] = share_difference(ours, theirs, documents)
            p_values.append(sign_flip_p_value(ours, theirs, documents))
    corrected = dict(zip(cells_of, holm(np.array(p_values)), strict=True))
    for model, other in COMPARED:
        cells = []
        for size in SIZES:
            x, p_value = cells_of[model, other, size], corrected[model, other, size]
            p_text = f"p {p_value:.3f}" if p_value >= 0.0005 else "p < .001"
            interval = f"[{100 * x.low:+.1f}, {100 * x.high:+.1f}]"
            cells.append(f"{100 * x.value:+.1f} {interval}, {p_text}")
        lines.append(f"| {MODELS[model]}, over: {MODELS[other]} | {' | '.join(cells)} |")
    about = (
        f"{len(marks)} questions of {len(counted)} kinds about {len(set(documents))} documents, "
        "intervals over documents. Differences are of the means over the runs that both have; p is "
        f"after Holm's correction over these {len(p_values)}."
    )
    return "\n".join([*lines, "", *textwrap.wrap(about, 100, break_on_hyphens=False)])


def choices() -> str:
    """A sentence about multiple choice, without compression."""
    rows = pd.read_csv(CHOICES)
    marks = rows.pivot(index=["task", "example"], columns="model", values="right").dropna()
    examples = [f"{task}/{example}" for task, example in marks.index]
    base = marks["base"].to_numpy(float)
    sentences = [
        f"Multiple choice ({len(marks)} questions of {rows['task'].nunique()} sets, run 0, no "
        f"compression): the base has {100 * base.mean():.1f} % right"
    ]
    for model in MODELS:
        if model in marks and model != "base":
            x = share_difference(marks[model].to_numpy(float), base, examples)
            interval = f"[{100 * x.low:+.1f}, {100 * x.high:+.1f}]"
            sentences.append(f"{MODELS[model]}: {100 * x.value:+.1f} points {interval}")
    text = f"{'; '.join(sentences)}."
    return textwrap.fill(text, 100, break_on_hyphens=False)


def _run(model: str, seed: str) -> tuple[str, str]:
    """A run by its model and seed; the base has one for every seed."""
    return (model, "0" if model == "base" else seed)


def _mean_marks(
    marks: pd.DataFrame, runs: list[tuple[str, str]], size: str
) -> Float[np.ndarray, " questions"]:
    """The mean marks of some runs by question."""
    return np.mean([marks[run][CELLS[size]].to_numpy(float) for run in runs], axis=0)


def add(files: list[Path], names: dict[str, str], seed: str) -> None:
    """Add answers to the records, and the base's to the same questions.

    Raises:
        InputError: a label that the files, or a model that the tables, do not have.
    """
    from question_set import judged, rows_of

    from kvcat.files import read_jsonl

    new = pd.concat([rows_of(read_jsonl(file)) for file in files])
    for kind, words, known in (
        ("label", names.keys(), set(new["model"])),
        ("model", names.values(), MODELS.keys()),
    ):
        if missing := sorted(set(words) - set(known)):
            raise InputError(f"no {kind} {', '.join(missing)}: there are {', '.join(known)}")
    new = new[new["model"].isin(names)].assign(seed=seed)
    new["model"] = new["model"].map(names)
    texts = dict.fromkeys(["asked", "answer", "kind"], str)
    base = pd.read_csv(OF_BASE, dtype=texts, keep_default_na=False)
    base = base[base["document"].isin(new["document"]) & (base["model"] == "smollm2-135m")]
    cells = pd.MultiIndex.from_frame(base[["condition", "keep"]])
    base = judged(base[cells.isin(list(CELLS.values()))]).assign(model="base", seed="0")
    known = [pd.read_csv(FILE, dtype=TEXTS, keep_default_na=False)] if FILE.exists() else []
    columns = [*KEY, "kind", "asked", "answer", "right"]
    rows = pd.concat([*known, base[columns], new[columns]])
    rows = rows.drop_duplicates(KEY, keep="last").sort_values(KEY)
    rows.to_csv(FILE, index=False, compression={"method": "gzip", "mtime": 0})


def add_choices(folder: Path, names: dict[str, str]) -> None:
    """Write the marks of a results folder of `kvcat eval qa`."""
    rows = [
        {
            "model": names[record.model],
            "task": record.stratum,
            "example": record.example,
            "right": int(record.values["acc_per_char"]),
        }
        for record in read_records(folder)
        if record.model in names
    ]
    table = pd.DataFrame(rows).sort_values(["model", "task", "example"])
    table.to_csv(CHOICES, index=False, compression={"method": "gzip", "mtime": 0})


def main() -> None:
    """Add records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="OUT", help="of question_set.py")
    parser.add_argument("--choices", type=Path, metavar="FOLDER", help="of kvcat eval qa")
    parser.add_argument("--model", nargs="+", required=True, metavar="LABEL=NAME")
    parser.add_argument("--seed", default="0", help="of the training")
    options = parser.parse_args()
    names = dict(pair.split("=", 1) for pair in options.model)
    if options.files:
        add(options.files, names, options.seed)
    if options.choices:
        add_choices(options.choices, names)


if __name__ == "__main__":
    run_script(main)
