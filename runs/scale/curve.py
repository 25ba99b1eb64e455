"""Gain and price of KV-CAT by tokens per parameter, from the results of every window.

    python runs/scale/curve.py                       # prints the table
    python runs/scale/curve.py --add FOLDER...       # adds results folders to the file
    python runs/scale/curve.py --has MODEL@SEED      # exit code 1 if a point is not in it

``records.csv.gz`` holds a row for every model, training seed, supervision, method, keep ratio and
window; ``scratch.csv.gz`` those of the models trained from scratch. A model's name is
FORM-TOKENS_PER_PARAMETER as in ``queue.txt``; a form with ``-kv`` at its end trains the weights of
keys and values alone, and so does its control. Supervision ``suffix``: 768 + 256 tokens, caches
fitted to the scored text as in the paper; ``reconstruction``: 384 + 128 tokens, caches made from
the text alone.

The primary cells, named before any run: KL under the paper's method and under the default at 5 % of
the slots (suffix), NLL on that default cache, and the dense loss. Figures are those of ``kvcat
report``: the model against the control after as many tokens, over documents and over the training
seeds that both have.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from kvcat.errors import InputError, run_script
from kvcat.evals import compare_models
from kvcat.evals.records import read_config, read_records

sys.path.append(str(Path(__file__).parents[1] / "smollm2"))

from add_records import VALUES, window_of, write
from records import DEFAULT, PAPER, cell_record

FILE = Path(__file__).with_name("records.csv.gz")
SCRATCH = Path(__file__).with_name("scratch.csv.gz")  # of scratch.sh
QUEUE = Path(__file__).with_name("queue.txt")
KEY = ["model", "seed", "supervision", "method", "keep_ratio", "document", "window"]
COLUMNS = {  # metric, supervision, method; at 5 % of the slots
    "dense NLL": ("nll_dense", "suffix", PAPER),
    "KL, paper's": ("kl", "suffix", PAPER),
    "KL, default": ("kl", "suffix", DEFAULT),
    "KL / gain, default": ("kl_per_gain", "suffix", DEFAULT),
    "NLL, default": ("nll", "suffix", DEFAULT),
    "KL, default, text alone": ("kl", "reconstruction", DEFAULT),
}
RATIOS = ("kl", "kl_per_gain")
KEEP_RATIO = 0.05


def rows_of(folder: Path) -> pd.DataFrame:
    """The rows of a results folder, with values rounded to five decimals."""
    supervision = read_config(folder)["supervision"]
    rows = []
    for record in read_records(folder):
        model, _, seed = record.model.partition("@")
        place = {"model": model, "seed": seed, "supervision": supervision}
        rows.append(place | window_of(record))
    return pd.DataFrame(rows, columns=[*KEY, *VALUES])


def read(path: Path = FILE) -> pd.DataFrame:
    """The results of every window; no rows if there is no file yet."""
    if not path.exists():
        return pd.DataFrame(columns=[*KEY, *VALUES])
    return pd.read_csv(path, dtype=dict.fromkeys(["window", "document", "seed"], str))


def add(folders: list[Path], path: Path) -> int:
    """Add the rows of results folders that the file does not have; returns their number."""
    old = read(path)
    new = pd.concat([rows_of(folder) for folder in folders], ignore_index=True)
    _check_windows(old, new)
    both = pd.concat([old, new], ignore_index=True) if len(old) else new
    both = both.drop_duplicates(KEY, keep="first")
    write(both, path)
    return len(both) - len(old)


def _check_windows(old: pd.DataFrame, new: pd.DataFrame) -> None:
    """Raise an ``InputError`` if new rows are of other windows: models would not be comparable.

    The texts are the installed Python sources, so that other packages give other windows.
    """
    for supervision, rows in new.groupby("supervision"):
        before = set(old.loc[old["supervision"] == supervision, "window"])
        other = set(rows["window"]) ^ before
        if before and other:
            raise InputError(
                f"{len(other)} windows of {supervision} are not those of the records: install the "
                "packages of constraints.txt and no others, or begin a new file of records"
            )


def control_of(form: str) -> str:
    """The control that a form is compared with: of those that train keys and values alone, one that
    does so too.
    """
    return "control-kv" if form.endswith("-kv") and form != "control-kv" else "control"


def compared(rows: pd.DataFrame, model: str, column: str) -> str:
    """A cell: the model against the control after as many tokens, with its 95 % interval."""
    metric, supervision, method = COLUMNS[column]
    form, _, ratio = model.rpartition("-")
    control = f"{control_of(form)}-{ratio}"
    rows = rows[(rows["supervision"] == supervision) & (rows["method"] == method)]
    rows = rows[rows["keep_ratio"] == KEEP_RATIO]
    seeds = [set(rows.loc[rows["model"] == name, "seed"]) for name in (model, control)]
    rows = rows[rows["model"].isin([model, control]) & rows["seed"].isin(seeds[0] & seeds[1])]
    if rows.empty:
        return "-"
    num_predicted = 255 if supervision == "suffix" else 127
    records = [cell_record(row, num_predicted) for row in rows.to_dict("records")]
    table = compare_models(records, control).set_index("metric")
    if metric not in table.index:  # per nat of a context gain that is not clearly above 0
        return "-"
    row = table.loc[metric]
    if metric in RATIOS:
        return f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
    return f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"


def table(rows: pd.DataFrame) -> str:
    """The table in Markdown: a row for each form and number of tokens, in the queue's order, then
    in that of the records.
    """
    lines = [line.split() for line in QUEUE.read_text().splitlines() if line[0] != "#"]
    points = [(form, ratio) for form, ratio, _, _ in lines]
    points += [tuple(model.rsplit("-", 1)) for model in rows["model"].unique() if "-" in model]
    order = [point for point in dict.fromkeys(points) if point[0] != "control"]
    printed = ["| form | tokens a parameter | seeds | " + " | ".join(COLUMNS) + " |"]
    printed.append("|---" * (3 + len(COLUMNS)) + "|")
    for form, ratio in sorted(order, key=lambda pair: float(pair[1])):
        model = f"{form}-{ratio}"
        seeds = set(rows.loc[rows["model"] == model, "seed"])
        seeds &= set(rows.loc[rows["model"] == f"{control_of(form)}-{ratio}", "seed"])
        if seeds:
            cells = [compared(rows, model, column) for column in COLUMNS]
            printed.append(f"| {form} | {ratio} | {len(seeds)} | " + " | ".join(cells) + " |")
    return "\n".join(printed)


def has(rows: pd.DataFrame, point: str) -> bool:
    """Whether the rows have both supervisions of a model and training seed, MODEL@SEED."""
    model, _, seed = point.partition("@")
    of_point = rows[(rows["model"] == model) & (rows["seed"] == seed)]
    return of_point["supervision"].nunique() == 2


def main() -> None:
    """Add rows, look for a point, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--has", metavar="MODEL@SEED")
    parser.add_argument("--records", type=Path, default=FILE)
    options = parser.parse_args()
    if options.add:
        print(f"{add(options.add, options.records)} rows added to {options.records}")
    elif options.has:
        sys.exit(not has(read(options.records), options.has))
    else:
        print(table(read(options.records)))


if __name__ == "__main__":
    run_script(main)
