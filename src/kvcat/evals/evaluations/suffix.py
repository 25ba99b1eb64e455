"""Score held-out text after a compressed prefix."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np

from kvcat.errors import InputError, check_least, check_one_of
from kvcat.evals.evaluation import CompressingEvaluation, PaperFigures, ReportFacts
from kvcat.evals.task import (
    Baseline,
    Prepared,
    Task,
    Values,
    check_fits,
    check_tokenizer,
    check_vocabulary,
    vocabulary,
)
from kvcat.option_types import Bos, Count, Split, Strings
from kvcat.options import SuffixSupervision
from kvcat.stats.metrics import Metric
from kvcat.text.encoder import TextEncoder, opening_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvcat.cache import CompactCache
    from kvcat.compress import Trace
    from kvcat.data import Document
    from kvcat.types import Float, Tensor


@dataclass(frozen=True, kw_only=True)
class Suffix(CompressingEvaluation):
    """Compress the prefix of held-out windows and score the suffix on the compact cache.

    The text "installed" is the Python sources of this installation. Default keep ratios: 0.05 0.1
    0.2 0.4.

    Example: kvcat eval suffix base=./base kvcat=./runs/router/export --keep 0.05 0.1 --out results
    """

    folder_option = "data"
    facts = ReportFacts(
        title="Text after a compressed prefix",
        metrics=(
            "kl",
            "nll",
            "nll_dense",
            "context_gain",
            "kl_per_gain",
            "delta_nll",
            "delta_ppl",
            "top1",
            "retention",
        ),
        example_name="window",
        method_metrics=("kl", "top1"),
        step_metrics=("kl", "delta_ppl"),
        sizes="{prefix_len} prefix and {suffix_len} suffix tokens",
    )
    new_metrics: ClassVar = {
        "delta_ppl": Metric(
            label="delta PPL",
            description="Mean over windows of exp(NLL compact) - exp(NLL dense); the paper's "
            "figure, heavy-tailed.",
            unit="perplexity",
            ratio=True,
        ),
        "delta_ppl_median": Metric(
            label="median delta PPL",
            description="Median over windows of exp(NLL compact) - exp(NLL dense).",
            unit="perplexity",
            columns=("delta_ppl",),
            function=None,
        ),
        "delta_ppl_corpus": Metric(
            label="corpus delta PPL",
            description="exp(mean NLL compact) - exp(mean NLL dense): all suffixes as one corpus.",
            unit="perplexity",
            columns=("nll", "nll_dense"),
            function=lambda nll, dense: np.exp(nll) - np.exp(dense),
        ),
        "kl": Metric(
            label="KL",
            description="KL(dense || compact) of the next-token distributions of the suffix.",
            decimals=4,
            log_scale=True,
            ratio=True,
        ),
        "kl_per_gain": Metric(
            label="KL / gain",
            description="KL per nat of context gain, of sums: a model that uses its prefix less "
            "loses less by compression; undefined if that gain is not clearly above 0.",
            unit="",
            decimals=4,
            ratio=True,
            columns=("diverged", "gained"),
            products={
                "diverged": ("kl", "num_predicted"),
                "gained": ("context_gain", "num_predicted"),
            },
            function=lambda diverged, gained: diverged / gained,
            defined_where="gained",
        ),
        "top1": Metric(
            label="top-1",
            description="Share of suffix positions whose most likely token is the same with the "
            "dense and the compact cache.",
            unit="",
            decimals=1,
            percent=True,
            lower_is_better=False,
        ),
        "retention": Metric(
            label="retention",
            description="1 - delta NLL / context gain, of sums; undefined if that gain is not "
            "clearly above 0.",
            unit="",
            decimals=1,
            percent=True,
            lower_is_better=False,
            columns=("lost", "gained"),
            products={
                "lost": ("delta_nll", "num_tokens"),
                "gained": ("context_gain", "num_predicted"),
            },
            function=lambda lost, gained: 1.0 - lost / gained,
            defined_where="gained",
        ),
    }
    paper = PaperFigures(
        metrics={"delta_ppl": "delta_ppl", "kl": "kl", "top1": "top1"},
        corpora={"wikitext-103": "WikiText-103", "pg-19": "PG-19", "arxiv": "arXiv"},
        main_corpus="FineWeb",
    )

    data: Strings = ()
    """Files, folders, hub:NAME, wikitext-103, pg-19, arxiv, fineweb-edu; by default installed."""
    split: Split = "test"
    supervision: SuffixSupervision = "suffix"
    """Text to fit caches to: scored suffix (paper), its unscored half, or repeated prefix."""
    prefix: Count = 768
    """Tokens of the compressed prefix."""
    suffix: Count = 256
    """Tokens of the scored suffix."""
    windows: Count = 64
    """Number of windows to evaluate."""
    per_document: Count = 2
    """Largest number of windows from one document."""
    bos: Bos = "auto"

    def make_task(self, tokenizer: Any, value: Any) -> "SuffixTask":
        """Windows from a corpus, in the tokens of a tokenizer.

        Raises:
            InputError: as ``corpus_documents``, ``windows_from_documents`` and ``SuffixTask``.
        """
        from kvcat.data.rows import data_name

        data = value or "installed"
        documents = corpus_documents(data, self.split, 10 * self.windows)
        opening = tuple(opening_ids(tokenizer, self.bos))
        windows = windows_from_documents(
            documents,
            tokenizer,
            prefix_len=self.prefix,
            suffix_len=self.suffix,
            limit=self.windows,
            per_document=self.per_document,
            seed=self.data_seed,
            opening=opening,
        )
        return SuffixTask(
            tuple(windows),
            f"{data_name(data)}:{self.split}",
            self.supervision,
            vocabulary(tokenizer),
            opening,
        )


SUPERVISIONS = get_args(SuffixSupervision)
CORPORA = {
    "wikitext-103": "hub:Salesforce/wikitext/wikitext-103-raw-v1@test",
    "pg-19": "hub:emozilla/pg19@test",
    "arxiv": "hub:ccdv/arxiv-summarization/document@test",
    "fineweb-edu": "hub:HuggingFaceFW/fineweb-edu/sample-10BT",
}
"""The paper's evaluation texts, by name."""

_WIKITEXT_HEADING = re.compile(r" = (?!= ).+ = \n?")


@dataclass(frozen=True)
class Window:
    """Consecutive tokens from one document, split into prefix and suffix.

    The prefix may begin with the tokens at the start of a text, such as BOS.
    """

    document: str
    name: str  # position of its first token in the document
    tokens: tuple[int, ...]
    prefix_len: int
    stratum: str = ""

    @property
    def suffix_len(self) -> int:
        """The number of tokens after the prefix."""
        return len(self.tokens) - self.prefix_len


def corpus_documents(name: str, split: Split, limit: int) -> list[tuple[str, str]]:
    """The names and texts of at most ``limit`` documents, from which windows are cut.

    Args:
        name: one of ``CORPORA``, or a source as in ``kvcat.data``. A corpus in ``CORPORA`` with a
            test split is used completely.
        split: split of any other source: train, validation or test, which are separated by a hash
            of the document's name, or all.
        limit: largest number of documents.

    Raises:
        InputError: there is no such source, or no document in that split; the Hub cannot be
            reached.
    """
    from kvcat.data import open_documents, split_documents

    source = CORPORA.get(name, name)
    has_test_split = name in CORPORA and name != "fineweb-edu"
    if not has_test_split:
        documents = split_documents(source, split, limit=limit)
        return [(document.id, document.text) for document in documents]
    if split not in ("test", "all"):
        raise InputError(f"{name} is used completely: it has no split {split!r}")
    rows = open_documents(source, text_field="article" if name == "arxiv" else "text")
    if name == "wikitext-103":
        return list(islice(_wikitext_articles(rows), limit))
    return [(row.id, row.text) for row in islice(rows, limit)]


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
    """Randomly placed windows from the documents, without overlap.

    The first windows of all documents precede the second window of any document.

    Args:
        documents: names and texts; names are unique.
        tokenizer: encodes the texts without special tokens, and only as many texts as needed.
        prefix_len: number of tokens in a prefix, including the opening.
        suffix_len: number of tokens in a suffix.
        limit: largest number of windows; None: no limit.
        per_document: largest number of windows from one document.
        seed: seed of the random order of documents and of the places.
        opening: token ids at the start of every prefix.

    Raises:
        InputError: no document is long enough, two documents share a name, or a length or count is
            out of range.
    """
    limited = {} if limit is None else {"limit": limit}
    check_least(1, prefix_len=prefix_len, per_document=per_document, **limited)
    check_least(2, suffix_len=suffix_len)
    pairs = list(documents)
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:  # records of the two could not be distinguished
            raise InputError(f"two documents share the name {name!r}")
    if prefix_len <= len(opening):
        raise InputError(
            f"a prefix of {prefix_len} tokens holds no text: {len(opening)} of them begin "
            "the window"
        )
    length = prefix_len - len(opening) + suffix_len
    longest = 0
    encoder = TextEncoder(tokenizer)
    generator = np.random.default_rng(seed)
    by_document: list[list[Window]] = []
    for index in generator.permutation(len(pairs)):
        name, text = pairs[index]
        tokens = encoder(text)
        longest = max(longest, len(tokens))
        if len(tokens) >= length:
            windows = []
            for start in _window_starts(generator, len(tokens), length, per_document):
                body = (*opening, *tokens[start : start + length])
                windows.append(Window(name, str(start), body, prefix_len))
            by_document.append(windows)
        if limit is not None and len(by_document) >= limit:
            break
    if not by_document:
        raise InputError(
            f"no document is long enough for a window of {prefix_len} + {suffix_len} tokens; "
            f"the longest of {len(pairs)} has {longest}"
        )
    in_turns = []
    for rank in range(per_document):
        in_turns += [windows[rank] for windows in by_document if rank < len(windows)]
    return in_turns[:limit]


def _window_starts(
    generator: np.random.Generator, num_tokens: int, length: int, limit: int
) -> list[int]:
    """The starts of a document's windows: it is cut into blocks at a random offset."""
    num_blocks = num_tokens // length
    offset = int(generator.integers(num_tokens - num_blocks * length + 1))
    blocks = generator.permutation(num_blocks)[:limit]
    return [offset + int(block) * length for block in blocks]


def _wikitext_articles(lines: "Iterator[Document]") -> Iterator[tuple[str, str]]:
    """The names and texts of articles, each from one first-level heading to the next.

    WikiText has one row per line.
    """
    name = ""
    text: list[str] = []
    for line in lines:
        if _WIKITEXT_HEADING.fullmatch(line.text):
            if name:
                yield name, "".join(text)
            title = line.text.strip(" =\n")
            name = f"{line.id} {title}"
            text = []
        text.append(line.text)
    if name:
        yield name, "".join(text)


@dataclass(frozen=True)
class PreparedWindows(Prepared):
    """Windows of equal lengths that are scored on one model."""

    @cached_property
    def trace(self) -> "Trace":  # pyright: ignore[reportIncompatibleVariableOverride]
        """The trace of the windows with the text to which compressors are fitted."""
        from kvcat.compress import trace
        from kvcat.compress.documents import reconstruction_of_tokens

        tokens = self._traced.input_ids
        prefix_len = self._traced.prefix_len
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
    def _traced(self) -> "Trace":
        """The trace of the windows themselves, against which caches are scored."""
        import torch

        from kvcat.compress import trace

        tokens = torch.tensor([window.tokens for window in self.batch], device=self.model.device)
        return trace(self.model, tokens, self.batch[0].prefix_len)

    @cached_property
    def _context(self) -> "dict[str, Float[Tensor, ' batch']]":
        """``nll_none`` and ``context_gain``, over the scored suffix positions that predict a token.

        ``nll_none`` is the NLL without the prefix. The gain is ``nll_none`` minus the dense NLL.
        """
        import torch

        from kvcat.models import frozen, hidden_states

        suffix = self._traced.suffix_ids
        opening = suffix.new_tensor(self.task.opening).expand(len(suffix), -1)
        ids = torch.cat([opening, suffix], dim=1)
        with torch.no_grad(), frozen(self.model):
            hidden = hidden_states(self.model, input_ids=ids, use_cache=False)
        nll_none = self._mean_nll(hidden[:, opening.shape[1] :])
        nll_dense = self._mean_nll(self._traced.hidden[:, 1:])
        return {"nll_none": nll_none, "context_gain": nll_none - nll_dense}

    def _mean_nll(
        self, hidden: "Float[Tensor, 'batch suffix hidden']"
    ) -> "Float[Tensor, ' batch']":
        """The mean NLL of the suffix tokens that scored suffix positions predict."""
        from kvcat.losses import score_positions
        from kvcat.models import output_head

        start = self.task.start
        targets = self._traced.suffix_ids[:, start + 1 :]
        scores = score_positions(output_head(self.model), hidden[:, start:-1], targets)
        return scores.nll.double().mean(1).cpu()

    def score(self, cache: "CompactCache") -> list[Values]:
        """The values of each window's suffix on the cache."""
        from kvcat.compress import compare

        start = self.task.start
        scores = compare(self._traced, cache, start=start)
        columns = {name: column.double().cpu() for name, column in vars(scores).items()}
        columns.update(self._context)
        num_predicted = self._traced.suffix_ids.shape[1] - start - 1
        # the last position of the prefix predicts the first token of the suffix
        num_scored = num_predicted + 1 if start == 0 else num_predicted
        rows = []
        for row in range(len(self.batch)):
            values = {name: float(column[row]) for name, column in columns.items()}
            values["num_tokens"] = float(num_scored)
            values["num_predicted"] = float(num_predicted)
            rows.append(values)
        return rows


@dataclass(frozen=True)
class SuffixTask(Task):
    """A task on windows, whose suffixes are scored on the compact caches of their prefixes.

    A window has the values of ``kvcat.compare`` and four others: ``nll_none``, the NLL of the
    suffix tokens from the second on without the prefix; ``context_gain``, which is ``nll_none``
    minus the dense NLL of the same tokens; ``num_tokens``, the number of tokens in the NLLs; and
    ``num_predicted``, the number of tokens in the gain.

    ``supervision`` names the text to which compressors are fitted. "suffix" is the scored text
    itself (the paper's choice). "first-half" is the first half of the suffix, in which case only
    the second half is scored. "reconstruction" is the prefix, repeated after an instruction.

    Raises:
        InputError: windows have unequal lengths, no prefix or too short a suffix, or the
            supervision is unknown.

    References: KV-CAT, appendix "Suffix perplexity under prefix KV cache compression".
    """

    examples: tuple[Window, ...]  # windows of equal lengths
    dataset: str
    supervision: str = "suffix"
    # hash of the vocabulary of the windows' tokenizer; empty: not compared
    vocabulary: str = ""
    opening: tuple[int, ...] = ()  # token ids at the start of every prefix, such as BOS
    evaluation: ClassVar[str] = "suffix"
    prepared: ClassVar[type[Prepared]] = PreparedWindows
    baselines: ClassVar[tuple[Baseline, ...]] = ()

    def __post_init__(self) -> None:
        check_one_of("supervision", self.supervision, SUPERVISIONS)
        shapes = {(window.prefix_len, window.suffix_len) for window in self.examples}
        if len(shapes) > 1:
            raise InputError(f"windows have unequal lengths (prefix, suffix): {sorted(shapes)}")
        least = 4 if self.supervision == "first-half" else 2
        for _, suffix_len in shapes:
            if suffix_len < least:
                raise InputError(
                    f"supervision {self.supervision} needs a suffix of at least {least}, not "
                    f"{suffix_len}"
                )

    @property
    def start(self) -> int:
        """The first suffix position that is scored."""
        return self.examples[0].suffix_len // 2 if self.supervision == "first-half" else 0

    def describe(self) -> Mapping[str, Any]:
        """The lengths, the supervision, and the token ids at the start of every window, if any."""
        first = self.examples[0]
        described: dict[str, Any] = {
            "prefix_len": first.prefix_len,
            "suffix_len": first.suffix_len,
            "supervision": self.supervision,
        }
        if self.opening:
            described["opening"] = list(self.opening)
        return described

    def check(self, label: str, model: "PreTrainedModel", tokenizer: Any) -> None:
        """Raise an ``InputError`` if a model has too few positions or another vocabulary."""
        import torch

        from kvcat.compress.documents import reconstruction_of_tokens

        if self.vocabulary:
            check_vocabulary(label, tokenizer, self.vocabulary)
        first = self.examples[0]
        largest = max(max(window.tokens) for window in self.examples)
        check_fits(label, model, num_tokens=len(first.tokens), largest=largest, what="windows")
        if self.supervision == "reconstruction":
            check_tokenizer(label, tokenizer, "supervision reconstruction")
            prefix = torch.tensor([first.tokens[: first.prefix_len]])
            repeated = reconstruction_of_tokens(tokenizer, prefix, self.opening).input_ids
            what = "reconstruction sequences"
            check_fits(label, model, num_tokens=repeated.shape[1], largest=0, what=what)
