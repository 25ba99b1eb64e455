"""Add the windows of a results folder of `kvcat eval suffix` to records.csv.gz.

    python runs/smollm2/add_records.py out/smollm2/suffix-books --text books --evaluated 2026-11-27
        --model control@0=control-64 router-w1@0=router-64 base=base

A label of the folder becomes the name of a model with its steps; the part of the label after the @
is the training seed (0 without one). Labels that are not named are left out. The windows must be
those of the file: 384 + 128 tokens, with caches fitted to the scored text, or to the half of the
suffix before it if the text's name ends in -first-half.
"""

import argparse
import gzip
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from records import FILE, NUM_PREDICTED, TEXTS, read

from kvcat.errors import InputError, run_script
from kvcat.evals import Record
from kvcat.evals.records import read_config, read_records

VALUES = ["kl", "nll", "nll_dense", "context_gain"]
KEY = ["text", "evaluated", "model", "seed", "method", "keep_ratio", "document", "window"]
HALF = "-first-half"
"""The end of a text's name in the file if caches were fitted to the half before the scored one."""


def check_windows(config: Mapping[str, Any], text: str) -> None:
    """Reject a results folder whose windows are not of the kind that the file holds of a text.

    Raises:
        InputError: another evaluation, length or supervision.
    """
    supervision = HALF[1:] if text.endswith(HALF) else "suffix"
    expected = {
        "evaluation": "suffix",
        "prefix_len": 384,
        "suffix_len": NUM_PREDICTED + 1,
        "supervision": supervision,
    }
    for name, wanted in expected.items():
        if config.get(name) != wanted:
            raise InputError(f"{name} of the folder is {config.get(name)!r}, not {wanted!r}")


def rows_of(
    records: list[Record], names: dict[str, str], text: str, evaluated: str
) -> pd.DataFrame:
    """Rows of the file, with values rounded to five decimals.

    Raises:
        InputError: a label has no records.
    """
    missing = set(names) - {record.model for record in records}
    if missing:
        raise InputError(f"no records of {', '.join(sorted(missing))}")
    rows = []
    for record in records:
        if record.model in names:
            place = {"text": text, "evaluated": evaluated, "model": names[record.model]}
            place["seed"] = record.model.partition("@")[2] or "0"
            rows.append(place | window_of(record))
    return pd.DataFrame(rows, columns=[*KEY, *VALUES])


def window_of(record: Record) -> dict[str, Any]:
    """The columns of a window: method, size, place and values rounded to five decimals."""
    return {
        "method": record.method_label.replace(" ", ","),  # as on the command line
        "keep_ratio": record.keep_ratio,
        "document": record.document,
        "window": record.example,
        **{name: round(record.values[name], 5) for name in VALUES},
    }


def joined(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """The old rows, then the new ones.

    Raises:
        InputError: a row is there already.
    """
    both = pd.concat([old, new], ignore_index=True)
    double = both[both.duplicated(KEY)]
    if not double.empty:
        first = double.iloc[0]
        raise InputError(
            f"{len(double)} rows are there already, such as {first['model']}@{first['seed']}, "
            f"{first['method']} at {first['keep_ratio']:g}"
        )
    return both


def write(rows: pd.DataFrame, path: Path) -> None:
    """Write the rows, compressed; equal rows give equal bytes."""
    text = io.StringIO()
    rows.to_csv(text, index=False, lineterminator="\n")
    unfinished = path.with_suffix(".partial")
    with unfinished.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as compressed:
        compressed.write(text.getvalue().encode())
    unfinished.replace(path)  # a run that is killed here loses nothing


def main() -> None:
    """Add the rows and print their number."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    in_file = [name for name, texts in TEXTS.items() if texts == (name,)]
    parser.add_argument("--text", required=True, choices=in_file)
    parser.add_argument("--evaluated", required=True, metavar="YYYY-MM-DD", help="date of the code")
    parser.add_argument("--model", nargs="+", required=True, metavar="LABEL=NAME")
    parser.add_argument("--records", type=Path, default=FILE)
    options = parser.parse_args()
    names = dict(pair.rpartition("=")[::2] for pair in options.model)
    try:
        check_windows(read_config(options.folder), options.text)
        new = rows_of(read_records(options.folder), names, options.text, options.evaluated)
        write(joined(read(options.records), new), options.records)
    except InputError as error:
        parser.error(str(error))
    print(f"{len(new)} rows added to {options.records}")


if __name__ == "__main__":
    run_script(main)
