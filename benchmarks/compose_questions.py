"""Right answers about several documents that were compressed apart.

    python benchmarks/compose_questions.py --data books.parquet --out FILE

A set is two, four or eight documents (--sizes): passages of --length tokens from different books of
the table --data, with a sentence such as "The phone number of Anna is 48213." somewhere in each.
The first document begins with the opening of a user's turn in the chat template. Every number is
asked, one question for each document: "What does the text say?", and the answer is begun, "The
phone number of Anna is". A greedy answer is right if it contains the whole number; the numbers of
the other documents are what it can be confused with.

    joint           all documents read together: the dense cache, or its compression
    apart           each document read by itself, and the caches composed with 8 seam tokens
    apart, no seam  the same without seam tokens
    apart, refit    the same with 8, and log-bias and values fitted again to all documents together
    truncated       the beginning and the end of each document, up to as many tokens as the caches
                    have slots, read together

All but the truncated text keep every slot (dense), or --keep of them by Attention Matching, fitted
to a repetition of the text ("reconstruction", as `kvcat compress` does by default) or with
--supervision self to its own queries. Intervals are Wilson's with a design effect for the
questions of one set. Every answer is written to --out when it is made; the same command
continues an interrupted run.
"""

import argparse
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from named_models import NamedModel, add_record_options, for_each_model
from questions import DIGITS, LINE, NAMES, QUESTION, right, share
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from windows import long_texts

import kvcat
from kvcat.cache import CompactCache
from kvcat.compress import Trace, slots_for
from kvcat.compress.documents import reconstruction_of_tokens
from kvcat.errors import run_script
from kvcat.evals.answers import greedy_answers
from kvcat.evals.evaluations.longbench import cut_middle
from kvcat.evals.haystacks import draws, number, shuffled
from kvcat.files import append_jsonl
from kvcat.text.template import chat_parts

SEAM = 8
CHARACTERS = 80_000  # of a book that are read
FIRST_CHARACTER = 20_000  # behind title pages and contents
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
DENSE = ("joint", "apart", "apart, no seam")
COMPACT = ("joint", "apart", "apart, no seam", "apart, refit", "truncated")


def books(path: Path, least: int) -> list[str]:
    """A part of each long book behind its first pages; there must be so many at least."""
    return [text[FIRST_CHARACTER:CHARACTERS] for text in long_texts(path, CHARACTERS, least)]


@dataclass(frozen=True)
class DocumentSet:
    """Documents with one fact each; they are the same for every condition.

    Args:
        tokenizer: with a chat template.
        books: what the passages are cut from.
        size: number of documents.
        length: tokens of each document.
        seed, index: of the set.
    """

    tokenizer: PreTrainedTokenizerBase
    books: Sequence[str]
    size: int
    length: int
    seed: str
    index: int

    @property
    def name(self) -> str:
        """The set's name in records."""
        return f"{self.size}-{self.length}-{self.seed}-{self.index}"

    @cached_property
    def facts(self) -> list[tuple[str, str]]:
        """Name and number stated in each document."""
        draw = draws(self.seed, "facts", self.size, self.length, self.index)
        return [(name, number(draw, DIGITS)) for name in shuffled(draw, NAMES)[: self.size]]

    @cached_property
    def opening(self) -> list[int]:
        """Token ids of the opening of a user's turn."""
        return self._encode(chat_parts(self.tokenizer)[0])

    @cached_property
    def documents(self) -> list[list[int]]:
        """Token ids of each document; the first has the opening of the chat template as well."""
        draw = draws(self.seed, "text", self.size, self.length, self.index)
        chosen = shuffled(draw, list(self.books))[: self.size]
        opening = self.opening
        documents = []
        for book, (name, code) in zip(chosen, self.facts, strict=True):
            sentences = SENTENCE_END.split(book)
            first = int(draw.random() * len(sentences) / 2)
            fact = f"{LINE.format(name)} {code}."
            passage = self._passage(sentences[first:], fact, draw.random())
            documents.append([*opening, *passage])
            opening = []
        return documents

    def _passage(self, sentences: Sequence[str], fact: str, place: float) -> list[int]:
        """Tokens of a passage in which the fact follows a whole sentence, ``place`` of the way."""
        num_sentences = 1
        while len(self._encode(" ".join([*sentences[:num_sentences], fact]))) < self.length:
            num_sentences += 1
        # the last sentence is cut by the length of the passage, so the fact is before it
        before = int(place * num_sentences)
        text = " ".join([*sentences[:before], fact, *sentences[before:num_sentences]])
        return self._encode(text)[: self.length]

    def _encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def questions(self) -> list[list[int]]:
        """Token ids of the question about each document, behind all of them."""
        _, between, tail = chat_parts(self.tokenizer)
        return [
            self._encode(between + QUESTION + tail + LINE.format(name)) for name, _ in self.facts
        ]

    def truncated(self, keep: float) -> list[int]:
        """Both ends of each document, as many tokens in all as the caches have slots."""
        opening = len(self.opening)
        ids = list(self.opening)
        total = sum(len(document) for document in self.documents)
        room = max(2 * self.size, slots_for(total, keep, None) - opening)
        for place, document in enumerate(self.documents):
            text = document[opening:] if place == 0 else document
            share_of_room = room * (place + 1) // self.size - room * place // self.size
            ids = [*ids, *cut_middle(text, share_of_room)]
        return ids


def caches_of(
    documents: DocumentSet,
    model: PreTrainedModel,
    cells: Sequence[tuple[str, float]],
    supervision: str,
) -> Iterator[CompactCache]:
    """The cache of each condition and keep ratio in ``cells``."""

    def traced(ids: Sequence[int]) -> Trace:
        """A text as the prefix."""
        prefix = torch.tensor([ids])
        if supervision == "self":
            return kvcat.trace(model, prefix, supervision="self")
        repeated = reconstruction_of_tokens(documents.tokenizer, prefix, documents.opening)
        return kvcat.trace(model, repeated)

    def cache_of(trace: Trace, keep: float) -> CompactCache:
        return trace.dense_cache() if keep == 1 else method(trace, keep_ratio=keep)

    @cache
    def caches_apart(keep: float) -> list[CompactCache]:
        return [cache_of(trace, keep) for trace in traces]

    method = kvcat.AttentionMatching()
    joint_trace = traced([token for document in documents.documents for token in document])
    traces = [traced(document) for document in documents.documents]
    for condition, keep in cells:
        if condition == "joint":
            yield cache_of(joint_trace, keep)
        elif condition == "truncated":
            text = torch.tensor([documents.truncated(keep)])
            yield kvcat.trace(model, text, supervision="self").dense_cache()
        else:
            seam_tokens = 0 if condition == "apart, no seam" else SEAM
            refit = joint_trace if condition == "apart, refit" else None
            yield kvcat.compose(model, caches_apart(keep), seam_tokens=seam_tokens, refit=refit)


def records_of(
    documents: DocumentSet,
    model: PreTrainedModel,
    keeps: Sequence[float],
    known: set,
    supervision: str = "reconstruction",
) -> Iterator[dict[str, Any]]:
    """A record per condition and keep ratio that is not known yet: the answers."""
    cells = [(condition, 1.0) for condition in DENSE]
    cells += [(condition, keep) for keep in keeps for condition in COMPACT]
    missing = [cell for cell in cells if (documents.name, *cell) not in known]
    if not missing:
        return
    caches = caches_of(documents, model, missing, supervision)
    for (condition, keep), compact in zip(missing, caches, strict=True):
        answers = greedy_answers(model, compact, documents.questions(), DIGITS + 2)
        yield {
            "document": documents.name,
            "size": documents.size,
            "condition": condition,
            "keep": keep,
            "slots": compact.mean_slots,
            "asked": documents.facts,
            "answers": [documents.tokenizer.decode(tokens) for tokens in answers],
        }


def report(records: Sequence[dict[str, Any]]) -> None:
    """Markdown: percent of right answers by keep ratio and condition, and number of documents; p
    of the difference to the first condition over all."""
    rows = [
        {**record, "right": float(right(answer, code))}
        for record in records
        for answer, (_, code) in zip(record["answers"], record["asked"], strict=True)
    ]
    frame = pd.DataFrame(rows)
    sizes = sorted(frame["size"].unique())
    print("\n| kept | | " + " | ".join(f"{size} documents" for size in sizes) + " | all |")
    print("|---" * (len(sizes) + 3) + "|")
    for keep in sorted(frame.keep.unique(), reverse=True):
        conditions = DENSE if keep == 1 else COMPACT
        first = frame[(frame.condition == conditions[0]) & (frame.keep == keep)]
        for condition in conditions:
            rows_of_cell = frame[(frame.condition == condition) & (frame.keep == keep)]
            reference = None if condition == conditions[0] or first.empty else first
            groups = [rows_of_cell[rows_of_cell["size"] == size] for size in sizes]
            cells = ["" if asked.empty else share(asked) for asked in groups]
            cells.append("" if rows_of_cell.empty else share(rows_of_cell, reference))
            print(f"| {100 * keep:g} % | {condition} | " + " | ".join(cells) + " |")
    asked = frame[(frame.condition == "joint") & (frame.keep == 1)]
    counts = [f"{(asked['size'] == size).sum()} about {size}" for size in sizes]
    print(f"\n{len(asked)} questions: {', '.join(counts)} documents")


def run(named: NamedModel, options: argparse.Namespace) -> None:
    """Ask one model what is not asked yet, and print its table."""
    records = named.records(options.out)
    known = {(record["document"], record["condition"], record["keep"]) for record in records}
    texts = books(options.data, max(options.sizes))
    model = named.load_for(options.out)
    sets = [
        DocumentSet(named.tokenizer, texts, size, options.length, options.seed, index)
        for index in range(options.sets)
        for size in options.sizes
    ]
    for documents in tqdm(sets, named.label):
        for made in records_of(documents, model, options.keep, known, options.supervision):
            record = {"model": named.label, **made}
            append_jsonl(options.out, record)
            records.append(record)
    print(f"\n{named.label}: {platform.machine()}, torch {torch.__version__}")
    report(records)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_record_options(parser)
    parser.add_argument("--data", type=Path, required=True, help="a table of books")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[2, 4, 8], help="documents of a set"
    )
    parser.add_argument("--sets", type=int, default=8, help="of each size")
    parser.add_argument("--length", type=int, default=192, help="tokens of a document")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.2, 0.1])
    parser.add_argument(
        "--supervision", choices=["reconstruction", "self"], default="reconstruction"
    )
    parser.add_argument("--seed", default="test", help="of the sets")
    for_each_model(parser.parse_args(), run)


if __name__ == "__main__":
    run_script(main)
