"""Text to evaluate on: what the paper used, by name, or any source of documents."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kvcat.data import Document, Split, open_documents, split_documents

_HEADING = re.compile(r" = (?!= ).+ = \n?")


@dataclass(frozen=True)
class Corpus:
    """A data set of the Hub.

    Args:
        source: as in ``kvcat.data.open_documents``.
        text_field: the column that holds the text.
        lines: rows are lines, and a heading of the first level begins a document.
    """

    source: str
    text_field: str = "text"
    lines: bool = False

    def documents(self) -> Iterator[tuple[str, str]]:
        """Name and text of its documents, streamed."""
        documents = open_documents(self.source, text_field=self.text_field)
        return _articles(documents) if self.lines else ((d.id, d.text) for d in documents)


CORPORA = {
    "wikitext-103": Corpus("hub:Salesforce/wikitext/wikitext-103-raw-v1@test", lines=True),
    "pg-19": Corpus("hub:emozilla/pg19@test"),
    "arxiv": Corpus("hub:ccdv/arxiv-summarization/document@test", text_field="article"),
    "fineweb-edu": Corpus("hub:HuggingFaceFW/fineweb-edu/sample-10BT"),
}


def corpus_documents(name: str, split: Split | Literal["all"], limit: int) -> list[tuple[str, str]]:
    """Name and text of documents to cut windows from.

    Args:
        name: one of ``CORPORA``, whose split for tests is used whole, or a source as in ``kvcat.data.open_documents``.
        split: of a source: train, validation, test (held out by a hash of the document's name), or all.
        limit: the first so many of what is streamed.

    Raises:
        InputError: no such source, or no document in that split; the Hub cannot be reached.
    """
    if name in CORPORA:
        return list(islice(CORPORA[name].documents(), limit))
    return [(document.id, document.text) for document in split_documents(name, split, limit=limit)]


def _articles(lines: Iterator[Document]) -> Iterator[tuple[str, str]]:
    """Documents of WikiText: from one heading of the first level to the next."""
    name, text = "", []
    for line in lines:
        if _HEADING.fullmatch(line.text):
            if name:
                yield name, "".join(text)
            name, text = " ".join([line.id, line.text.strip(" =\n")]), []
        text.append(line.text)
    if name:
        yield name, "".join(text)
