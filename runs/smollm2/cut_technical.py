"""Cut collections of proposals into their documents, for an evaluation on technical text.

    python runs/smollm2/cut_technical.py tech-docs.parquet tech-proposals.parquet

The input has a row for each collection (columns text, title). Python's PEPs, Rust's RFCs and
Ethereum's EIPs are cut where a document's header begins; other rows, which are books, are left out.
A document of fewer than 4,000 characters is left out too: it has no window of 512 tokens.
"""

import argparse
import re
from pathlib import Path

import pandas as pd

from kvcat.errors import InputError, run_script
from kvcat.files import atomic_write

LEAST_CHARACTERS = 4000
HEADERS = {  # the first line of every document, by the title of a collection
    "python-peps": re.compile(r"^PEP: \d+$", re.MULTILINE),
    "rust-rfcs": re.compile(r"^(?:- Feature Name: .*\n)?- Start Date: .*\n(?=- )", re.MULTILINE),
    "ethereum-eips": re.compile(r"^---\n(?=(?:eip|EIP): )", re.MULTILINE),
}


def documents(collection: str, title: str) -> list[dict[str, str]]:
    """The documents of a collection: id, title and text.

    Raises:
        InputError: no document begins anywhere.
    """
    header = HEADERS[title]
    starts = [match.start() for match in header.finditer(collection)]
    if not starts:
        raise InputError(f"no document of {title} begins with its header")
    pieces = [
        collection[start:stop]
        for start, stop in zip(starts, [*starts[1:], len(collection)], strict=True)
    ]
    return [
        {"id": f"{title}/{number:04d}", "title": title, "text": piece.strip() + "\n"}
        for number, piece in enumerate(pieces)
        if len(piece) >= LEAST_CHARACTERS
    ]


def main() -> None:
    """Write the documents and print their number by collection."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("collections", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    rows = []
    for row in pd.read_parquet(options.collections).to_dict("records"):
        if row["title"] in HEADERS:
            of_collection = documents(row["text"], row["title"])
            print(f"{row['title']}: {len(of_collection)} documents")
            rows += of_collection
    with atomic_write(options.output) as partial:
        pd.DataFrame(rows).to_parquet(partial)


if __name__ == "__main__":
    run_script(main)
