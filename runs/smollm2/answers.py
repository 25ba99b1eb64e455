"""Right answers on compact caches of models that were trained to recall, and of the base.

    PYTHONPATH=benchmarks python runs/smollm2/answers.py OUT.jsonl --model control=control-64
        attn-prefix=attn-prefix-64

adds the answers of ``benchmarks/question_set.py`` to recall.csv.gz, with those that the base gave
to the same questions. ``tables.py recall`` prints the table.
"""

import argparse
import textwrap
from pathlib import Path

import pandas as pd

from kvcat.errors import run_script
from kvcat.stats import share, share_difference, sign_flip_p_value

FILE = Path(__file__).with_name("recall.csv.gz")
OF_BASE = Path(__file__).parents[2] / "benchmarks" / "records" / "kinds.csv.gz"
MODELS = {
    "base": "base",
    "control-64": "control: recalled text, next-token loss",
    "attn-prefix-64": "the same text, `attn-prefix`",
}
DEFAULT = "attention-matching@reconstruction"
CELLS = {
    "whole cache": ("dense", 1.0),
    "10 %": (DEFAULT, 0.1),
    "5 %": (DEFAULT, 0.05),
    "no document": ("no document", 0.0),
}
KEY = ["model", "seed", "document", "condition", "keep", "question"]
TEXTS = dict.fromkeys(["model", "seed", "document", "condition", "kind", "asked", "answer"], str)
LEAST_GAIN = 0.5  # of the base's whole cache over no document, for a kind that counts


def table() -> str:
    """Right answers of every model, and what the form adds to its control's."""
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
    lines = [f"| right answers, % | {' | '.join(CELLS)} |", "|---" * (1 + len(CELLS)) + "|"]
    for model, name in MODELS.items():
        of_model = marks[model, "0"]
        shares = [share(of_model[cell].to_numpy(float), documents) for cell in CELLS.values()]
        cells = [f"{100 * x.value:.0f} [{100 * x.low:.0f}, {100 * x.high:.0f}]" for x in shares]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    sentences = []
    first, control, form = MODELS
    for label, model, other in (("The control", control, first), ("The form", form, control)):
        differences = []
        for size in ("10 %", "5 %"):
            ours, theirs = (marks[m, "0"][CELLS[size]].to_numpy(float) for m in (model, other))
            difference = share_difference(ours, theirs, documents)
            p_value = sign_flip_p_value(ours, theirs, documents)
            p_text = f"p {p_value:.3f}" if p_value >= 0.0005 else "p < .001"
            differences.append(
                f"{100 * difference.value:+.1f} points [{100 * difference.low:+.1f}, "
                f"{100 * difference.high:+.1f}], {p_text}, at {size}"
            )
        over = MODELS[other].partition(":")[0]
        sentences.append(f"{label} over the {over}: {'; '.join(differences)}.")
    about = f"{len(marks)} questions of {len(counted)} kinds about {len(set(documents))} documents."
    text = textwrap.fill(" ".join([about, *sentences]), 100, break_on_hyphens=False)
    return "\n".join([*lines, "", text])


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
