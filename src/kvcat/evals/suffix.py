"""Suffix evaluation: a document's prefix is compressed, the text that follows is scored on the compact cache."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache
from kvcat.choices import Bos, SuffixSupervision
from kvcat.compress import Trace, compare, trace
from kvcat.compress.documents import reconstruction_of_tokens
from kvcat.data import Document, Split, open_documents, split_documents
from kvcat.errors import InputError, check_least
from kvcat.evals.task import Baseline, Prepared, Task, Values, check_fits, check_vocabulary, vocabulary
from kvcat.losses import score_positions
from kvcat.models import frozen, hidden_states, output_head
from kvcat.tokenization import TextEncoder, opening_ids
from kvcat.types import Float, Tensor

SUPERVISIONS = get_args(SuffixSupervision)
CORPORA = {
    "wikitext-103": "hub:Salesforce/wikitext/wikitext-103-raw-v1@test",
    "pg-19": "hub:emozilla/pg19@test",
    "arxiv": "hub:ccdv/arxiv-summarization/document@test",
    "fineweb-edu": "hub:HuggingFaceFW/fineweb-edu/sample-10BT",
}
"""Text that the paper evaluates on, by name."""

_WIKITEXT_HEADING = re.compile(r" = (?!= ).+ = \n?")


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a single document, ``name`` the position of the first in it.

    Before them may stand what begins a text, such as a BOS token, as part of the prefix.
    """

    document: str
    name: str
    tokens: tuple[int, ...]
    prefix_len: int
    stratum: str = ""

    @property
    def suffix_len(self) -> int:
        """Tokens scored."""
        return len(self.tokens) - self.prefix_len


def make_task(
    tokenizer: PreTrainedTokenizerBase,
    data: str = "installed",
    split: Split | Literal["all"] = "test",
    *,
    prefix: int = 768,
    suffix: int = 256,
    windows: int = 64,
    per_document: int = 2,
    seed: int = 0,
    supervision: str = "suffix",
    bos: Bos = "auto",
) -> "SuffixTask":
    """As ``corpus_documents``, ``windows_from_documents`` and ``SuffixTask``, whose arguments and errors these are.

    ``bos`` says what a window begins with (``opening_ids``).
    """
    documents = corpus_documents(data, split, 10 * windows)
    opening = tuple(opening_ids(tokenizer, bos))
    chosen = windows_from_documents(
        documents,
        tokenizer,
        prefix_len=prefix,
        suffix_len=suffix,
        limit=windows,
        per_document=per_document,
        seed=seed,
        opening=opening,
    )
    return SuffixTask(
        tuple(chosen),
        f"{data_name(data)}:{split}",
        supervision,
        vocabulary(tokenizer),
        opening,
    )


def data_name(source: str) -> str:
    """What records call a source: a file by its name alone, so that results do not depend on where it lies."""
    return source if source.startswith("hub:") else Path(source).name


def corpus_documents(name: str, split: Split | Literal["all"], limit: int) -> list[tuple[str, str]]:
    """Name and text of the first documents to cut windows from, at most ``limit``.

    Args:
        name: one of ``CORPORA`` or a source as in ``kvcat.data``. A corpus that has a split for tests is used whole.
        split: of anything else: train, validation, test (held out by a hash of the document's name), or all.

    Raises:
        InputError: no such source, or no document in that split; the Hub cannot be reached.
    """
    source = CORPORA.get(name, name)
    if name not in CORPORA or name == "fineweb-edu":  # which has no split for tests
        return [(document.id, document.text) for document in split_documents(source, split, limit=limit)]
    if split not in ("test", "all"):
        raise InputError(f"{name} is used whole: it has no split {split!r}")
    rows = open_documents(source, text_field="article" if name == "arxiv" else "text")
    documents = _wikitext_articles(rows) if name == "wikitext-103" else ((row.id, row.text) for row in rows)
    return list(islice(documents, limit))


def windows_from_documents(
    documents: Iterable[tuple[str, str]],
    tokenizer: Any,
    *,
    prefix_len: int,
    suffix_len: int,
    limit: int | None = None,
    per_document: int = 1,
    seed: int = 0,
    opening: Sequence[int] = (),
) -> list[Window]:
    """Windows that do not overlap, of documents and places drawn by the seed; at most ``limit`` in all.

    Documents are pairs (name, text) of unique names, tokenised without special tokens, and only as many as
    needed. The first window of every document comes before the second of any. Every prefix begins with the token
    ids ``opening``, which count for its length.

    Raises:
        InputError: no document is long enough, two documents share a name, a length or count out of range.
    """
    check_least(1, prefix_len=prefix_len, per_document=per_document, limit=1 if limit is None else limit)
    check_least(2, suffix_len=suffix_len)
    pairs = list(documents)
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise InputError(f"two documents share the name {next(n for n in names if names.count(n) > 1)!r}")
    if prefix_len <= len(opening):
        raise InputError(f"a prefix of {prefix_len} tokens holds no text: {len(opening)} of them begin the window")
    length = prefix_len - len(opening) + suffix_len
    longest = 0
    encoder = TextEncoder(tokenizer)
    generator = np.random.default_rng(seed)
    chosen: list[list[Window]] = []
    for index in generator.permutation(len(pairs)):
        name, text = pairs[index]
        tokens = encoder(text)
        longest = max(longest, len(tokens))
        if blocks := len(tokens) // length:  # the document is cut at a random offset, blocks are drawn
            offset = int(generator.integers(len(tokens) - blocks * length + 1))
            starts = [offset + int(block) * length for block in generator.permutation(blocks)[:per_document]]
            bodies = {s: (*opening, *tokens[s : s + length]) for s in starts}
            chosen.append([Window(name, str(s), body, prefix_len) for s, body in bodies.items()])
        if limit is not None and len(chosen) >= limit:
            break
    if not chosen:
        raise InputError(
            f"no document is long enough for a window of {prefix_len} + {suffix_len} tokens; "
            f"the longest of {len(pairs)} has {longest}"
        )
    return [windows[rank] for rank in range(per_document) for windows in chosen if rank < len(windows)][:limit]


def _wikitext_articles(lines: Iterator[Document]) -> Iterator[tuple[str, str]]:
    """WikiText has a row per line: an article reaches from one heading of the first level to the next."""
    name, text = "", []
    for line in lines:
        if _WIKITEXT_HEADING.fullmatch(line.text):
            if name:
                yield name, "".join(text)
            name, text = " ".join([line.id, line.text.strip(" =\n")]), []
        text.append(line.text)
    if name:
        yield name, "".join(text)


@dataclass(frozen=True)
class PreparedWindows(Prepared):
    """Windows of equal lengths on one model."""

    @cached_property
    def trace(self) -> Trace:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What compressors are fitted to."""
        tokens, prefix_len = self._traced.input_ids, self._traced.prefix_len
        room = tokens.shape[1] - prefix_len
        if self.task.supervision == "first-half":
            seen = tokens[:, : prefix_len + self.task.start]
            return trace(self.model, seen, prefix_len, supervision="first-half", room=room)
        if self.task.supervision == "reconstruction":
            prefix = tokens[:, :prefix_len]
            sequence = reconstruction_of_tokens(self.tokenizer, prefix, self.task.opening)
            return trace(self.model, sequence, room=room)
        return self._traced

    @cached_property
    def _traced(self) -> Trace:
        """The dense forward over the windows, against which caches are scored."""
        tokens = torch.tensor([window.tokens for window in self.batch], device=self.model.device)
        return trace(self.model, tokens, self.batch[0].prefix_len)

    @cached_property
    @torch.no_grad()
    def _context(self) -> dict[str, Float[Tensor, " batch"]]:
        """NLL without the prefix, and that minus the dense NLL, of what the scored suffix positions predict."""
        suffix, start, head = self._traced.suffix_ids, self.task.start, output_head(self.model)
        opening = suffix.new_tensor(self.task.opening).expand(len(suffix), -1)
        with frozen(self.model):
            alone = hidden_states(self.model, input_ids=torch.cat([opening, suffix], dim=1), use_cache=False)
        alone = alone[:, opening.shape[1] :]
        none, dense = (
            score_positions(head, hidden[:, start:-1], suffix[:, start + 1 :]).nll.double().mean(1).cpu()
            for hidden in (alone, self._traced.hidden[:, 1:])
        )
        return {"nll_none": none, "context_gain": none - dense}

    def score(self, cache: CompactCache) -> list[Values]:
        """The suffix on the cache."""
        scores, start = compare(self._traced, cache, start=self.task.start), self.task.start
        columns = {name: column.double().cpu() for name, column in vars(scores).items()} | self._context
        predicted = self._traced.suffix_ids.shape[1] - start - 1
        count = predicted + (start == 0)
        counts = {"num_tokens": float(count), "num_predicted": float(predicted)}
        return [{n: float(own[row]) for n, own in columns.items()} | counts for row in range(len(self.batch))]


@dataclass(frozen=True)
class SuffixTask(Task):
    """Windows whose suffix is scored; values per window are those of ``kvcat.compare`` and of the context gain.

    Further ``nll_none`` of suffix tokens 2.. without the prefix; ``context_gain``, that minus the dense NLL of
    the same tokens; ``num_tokens`` in the NLLs, ``num_predicted`` in the gain.

    Compressors are fitted to the ``supervision``: "suffix", all of the text that is scored, the paper's probe;
    "first-half", the first half of the suffix, of which only the second is scored; "reconstruction", the
    prefix repeated after an instruction.

    Raises:
        InputError: windows of unequal lengths, without a prefix or with too short a suffix; another supervision.

    References: KV-CAT, appendix "Suffix perplexity under prefix KV cache compression".
    """

    examples: tuple[Window, ...]  # of equal lengths
    dataset: str
    supervision: str = "suffix"
    vocabulary: str = ""  # hash of the vocabulary of the tokenizer that made the windows; empty is not compared
    opening: tuple[int, ...] = ()  # token ids with which every prefix begins, such as a BOS token
    evaluation: ClassVar[str] = "suffix"
    prepared: ClassVar[type[Prepared]] = PreparedWindows
    baselines: ClassVar[tuple[Baseline, ...]] = ()

    def __post_init__(self) -> None:
        if self.supervision not in SUPERVISIONS:
            raise InputError(f"supervision must be one of {', '.join(SUPERVISIONS)}, not {self.supervision!r}")
        shapes = {(window.prefix_len, window.suffix_len) for window in self.examples}
        if len(shapes) > 1:
            raise InputError(f"windows have unequal lengths (prefix, suffix): {sorted(shapes)}")
        least = 4 if self.supervision == "first-half" else 2
        for _, suffix in shapes:
            if suffix < least:
                raise InputError(f"supervision {self.supervision} needs a suffix of at least {least}, not {suffix}")

    @property
    def start(self) -> int:
        """First suffix position that is scored."""
        return self.examples[0].suffix_len // 2 if self.supervision == "first-half" else 0

    def describe(self) -> Mapping[str, Any]:
        """Lengths, supervision, and the token ids that begin every window, if there are any."""
        first = self.examples[0]
        described = {
            "prefix_len": first.prefix_len,
            "suffix_len": first.suffix_len,
            "supervision": self.supervision,
        }
        return {**described, "opening": list(self.opening)} if self.opening else described

    def check(self, label: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Refuse a model with too few positions or another vocabulary."""
        if self.vocabulary:
            check_vocabulary(label, tokenizer, self.vocabulary)
        first = self.examples[0]
        largest = max(max(window.tokens) for window in self.examples)
        check_fits(label, model, num_tokens=len(first.tokens), largest=largest, what="windows")
        if self.supervision == "reconstruction":
            if tokenizer is None:
                raise InputError(f"supervision reconstruction needs the tokenizer of model {label!r}")
            prefix = torch.tensor([first.tokens[: first.prefix_len]])
            repeated = reconstruction_of_tokens(tokenizer, prefix, self.opening).input_ids
            check_fits(label, model, num_tokens=repeated.shape[1], largest=0, what="reconstruction sequences")
