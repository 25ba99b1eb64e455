"""Right answers on compact caches of models that were trained to recall, and of the base.

    PYTHONPATH=benchmarks python runs/smollm2/answers.py OUT.jsonl --model control=control-64
        attn-prefix=attn-prefix-64

adds the answers of ``benchmarks/question_set.py`` to recall.csv.gz, with those that the base gave
to the same questions. ``tables.py recall`` prints the table.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from kvcat.errors import run_script
from kvcat.stats import holm, share, share_difference, sign_flip_p_value

FILE = Path(__file__).with_name("recall.csv.gz")
OF_BASE = Path(__file__).parents[2] / "benchmarks" / "records" / "kinds.csv.gz"
MODELS = {
    "base": "base",
    "books-64": "books, next-token loss",
    "control-64": "recalled text, next-token loss",
    "attn-prefix-64": "recalled text, `attn-prefix`, weight 1",
    "attn-prefix-w0.1-64": "recalled text, `attn-prefix`, weight .1",
}
COMPARED = [
    ("control-64", "base"),
    ("books-64", "base"),
    ("control-64", "books-64"),
    ("attn-prefix-64", "control-64"),
]
"""Pairs of models whose difference the table shows, for every seed that both have."""
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
    """Right answers of every run, and differences between runs of one seed."""
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
        lines.append(f"| {_title(run)} | {' | '.join(cells)} |")
    lines += ["", f"| difference, points | {' | '.join(SIZES)} |", "|---" * (1 + len(SIZES)) + "|"]
    pairs = [
        (run, ("base", "0") if other == "base" else (other, run[1]))
        for model, other in COMPARED
        for run in runs
        if run[0] == model and (other == "base" or (other, run[1]) in runs)
    ]
    differences = {}
    p_values = []
    for run, other in pairs:
        for size in SIZES:
            ours, theirs = (marks[each][CELLS[size]].to_numpy(float) for each in (run, other))
            differences[run, other, size] = share_difference(ours, theirs, documents)
            p_values.append(sign_flip_p_value(ours, theirs, documents))
    corrected = dict(zip(differences, holm(np.array(p_values)), strict=True))
    for run, other in pairs:
        cells = []
        for size in SIZES:
            x, p_value = differences[run, other, size], corrected[run, other, size]
            p_text = f"p {p_value:.3f}" if p_value >= 0.0005 else "p < .001"
            interval = f"[{100 * x.low:+.1f}, {100 * x.high:+.1f}]"
            cells.append(f"{100 * x.value:+.1f} {interval}, {p_text}")
        lines.append(f"| {_title(run)}, over: {_title(other)} | {' | '.join(cells)} |")
    about = (
        f"{len(marks)} questions of {len(counted)} kinds about {len(set(documents))} documents; "
        f"p after Holm's correction over these {len(p_values)} differences."
    )
    return "\n".join([*lines, "", about])


def _title(run: tuple[str, str]) -> str:
    """What a run is called: its model's name and its seed."""
    model, seed = run
    return MODELS[model] if model == "base" else f"{MODELS[model]}, run {seed}"


def add(files: list[Path], names: dict[str, str], seed: str) -> None:
    """Add answers to the records, and the base's to the same questions."""
    from question_set import judged, rows_of

    from kvcat.files import read_jsonl

    new = pd.concat([rows_of(read_jsonl(file)) for file in files])
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


def main() -> None:
    """Add records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="OUT", help="of question_set.py")
    parser.add_argument("--model", nargs="+", required=True, metavar="LABEL=NAME")
    parser.add_argument("--seed", default="0", help="of the training")
    options = parser.parse_args()
    add(options.files, dict(pair.split("=", 1) for pair in options.model), options.seed)


if __name__ == "__main__":
    run_script(main)
