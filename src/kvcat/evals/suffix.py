"""Suffix evaluation: a document's prefix is compressed, the text that follows is scored on the compact cache."""

# ruff: noqa: ARG002 a task takes what the protocol gives

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache
from kvcat.compress import Trace, compare, trace
from kvcat.compress.documents import reconstruction_of_tokens
from kvcat.errors import InputError
from kvcat.evals.records import Record
from kvcat.evals.running import Method, ModelSource, evaluate, manifest
from kvcat.evals.task import Baseline, Example, Values
from kvcat.evals.windows import Window
from kvcat.models import logits_from_hidden
from kvcat.types import Float, Int, Tensor

SUPERVISIONS = ("suffix", "first-half", "reconstruction")
_LOGITS_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class SuffixTask:
    """Windows whose suffix is scored; values per window are those of ``kvcat.compare`` and of the context gain.

    ``nll``, ``nll_dense``, ``delta_nll``, ``delta_ppl``, ``kl``, ``top1``; ``nll_none`` of suffix tokens 2.. without
    the prefix; ``context_gain``, that minus the dense NLL of the same tokens; ``retention`` = 1 - sum(NLL lost) /
    sum(NLL gained by the prefix); ``num_tokens`` in the NLLs, ``num_predicted`` in the gain.

    Args:
        windows: of equal lengths, with token ids of a vocabulary that all models share.
        dataset: name of the data set.
        supervision: what compressors are fitted to. "suffix": all of the text that is scored, the paper's probe;
            "first-half": the first half of the suffix, of which only the second is scored; "reconstruction": the
            prefix repeated after an instruction.

    Raises:
        InputError: windows of unequal lengths, another supervision, a suffix too short to be halved.

    References: KV-CAT, appendix "Suffix perplexity under prefix KV cache compression".
    """

    windows: tuple[Window, ...]
    dataset: str
    supervision: str = "suffix"
    evaluation: str = "suffix"
    tokenized: bool = True
    baselines: tuple[Baseline, ...] = ()

    def __post_init__(self) -> None:
        shapes = {(window.prefix_len, window.suffix_len) for window in self.windows}
        if len(shapes) > 1:
            raise InputError(f"windows have unequal lengths (prefix, suffix): {sorted(shapes)}")
        if self.supervision not in SUPERVISIONS:
            raise InputError(f"supervision must be one of {', '.join(SUPERVISIONS)}, not {self.supervision!r}")
        if self.supervision == "first-half" and any(suffix < 4 for _, suffix in shapes):
            raise InputError("supervision first-half needs suffixes of at least 4 tokens")

    @property
    def examples(self) -> tuple[Window, ...]:
        """The windows."""
        return self.windows

    def describe(self) -> Mapping[str, Any]:
        """Lengths, and a hash of the windows."""
        first = self.windows[0]
        lengths = {"prefix_len": first.prefix_len, "suffix_len": first.suffix_len}
        return {**lengths, "supervision": self.supervision, "manifest": manifest(self.windows)}

    def batch_key(self, example: Example) -> Hashable:
        """All windows may share a batch."""
        return None

    def check(self, label: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Positions and vocabulary.

        Raises:
            InputError: windows too long for the model, or tokens that it does not have.
        """
        text = model.config.get_text_config()
        length, positions = len(self.windows[0].tokens), getattr(text, "max_position_embeddings", None)
        if positions is not None and length > positions:
            raise InputError(f"windows of {length} tokens exceed the {positions} positions of model {label!r}")
        if self.supervision == "reconstruction":
            if tokenizer is None:
                raise InputError(f"supervision reconstruction needs the tokenizer of model {label!r}")
            needed = reconstruction_of_tokens(tokenizer, torch.tensor([self.windows[0].tokens[: self._prefix_len]]))
            if positions is not None and needed.input_ids.shape[1] > positions:
                raise InputError(
                    f"prefixes of {self._prefix_len} tokens make reconstruction sequences of "
                    f"{needed.input_ids.shape[1]}, more than the {positions} positions of model {label!r}"
                )
        largest = max(max(window.tokens) for window in self.windows)
        if largest >= text.vocab_size:
            raise InputError(f"token {largest} is outside the vocabulary of model {label!r}, {text.vocab_size} tokens")

    def prepare(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        batch: Sequence[Window],
    ) -> "PreparedWindows":
        """The windows on a model."""
        tokens = torch.tensor([window.tokens for window in batch], device=model.device)
        return PreparedWindows(model, tokenizer, tokens, self._prefix_len, self.supervision)

    @property
    def _prefix_len(self) -> int:
        return self.windows[0].prefix_len


@dataclass(frozen=True)
class PreparedWindows:
    """Windows of equal lengths on one model."""

    model: PreTrainedModel
    tokenizer: Any
    tokens: Int[Tensor, "batch tokens"]
    prefix_len: int
    supervision: str

    @property
    def trace(self) -> Trace:
        """What compressors are fitted to."""
        return self._fitted

    @cached_property
    def _fitted(self) -> Trace:
        if self.supervision == "suffix":
            return self._traced
        if self.supervision == "first-half":
            return trace(self.model, self.tokens[:, : self.prefix_len + self._start], self.prefix_len)
        return trace(self.model, reconstruction_of_tokens(self.tokenizer, self.tokens[:, : self.prefix_len]))

    @cached_property
    def _traced(self) -> Trace:
        """The dense forward over the windows, against which caches are scored."""
        return trace(self.model, self.tokens, self.prefix_len)

    @property
    def _start(self) -> int:
        """First suffix position that is scored."""
        return (self.tokens.shape[1] - self.prefix_len) // 2 if self.supervision == "first-half" else 0

    @cached_property
    def _context(self) -> dict[str, Float[Tensor, " batch"]]:
        gain, none = _context_gain(self.model, self._traced, self._start)
        return {"nll_none": none, "context_gain": gain}

    def score(self, cache: CompactCache) -> list[Values]:
        """The suffix on the cache."""
        scores = compare(self._traced, cache, start=self._start)
        names = ("nll", "nll_dense", "delta_nll", "delta_ppl", "kl", "top1")
        columns = {name: getattr(scores, name).double().cpu() for name in names} | self._context
        predicted = self._traced.suffix_ids.shape[1] - self._start - 1
        count = predicted + (self._start == 0)
        columns["retention"] = 1.0 - columns["delta_nll"] * count / (columns["context_gain"] * predicted)
        columns |= {"num_tokens": torch.full_like(columns["nll"], count)}
        columns |= {"num_predicted": torch.full_like(columns["nll"], predicted)}
        return [{name: float(column[row]) for name, column in columns.items()} for row in range(len(self.tokens))]

    def baseline(self, baseline: Baseline) -> list[Values]:
        """There is none: dense figures stand in every record."""
        raise InputError(f"the suffix evaluation has no baseline {baseline.name!r}")


def evaluate_suffix(
    models: Mapping[str, ModelSource],
    windows: Sequence[Window],
    methods: Sequence[str | Method],
    keep_ratios: Sequence[float],
    out_dir: Path,
    *,
    dataset: str,
    **options: Any,
) -> list[Record]:
    """``evaluate`` of a ``SuffixTask`` of these windows.

    Args:
        models: as in ``evaluate``.
        windows: of equal lengths.
        methods: as in ``evaluate``.
        keep_ratios: fractions kept, each in (0, 1].
        out_dir: the results folder.
        dataset: name of the data set.
        options: further ones of ``evaluate``.
    """
    return evaluate(SuffixTask(tuple(windows), dataset), models, methods, keep_ratios, out_dir, **options)


@torch.no_grad()
def _context_gain(
    model: PreTrainedModel, traced: Trace, first: int
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """NLL without the prefix minus dense NLL, and NLL without the prefix, nats per token.

    Of the suffix tokens that suffix positions from ``first`` on predict: without the prefix the first token has no
    prediction.
    """
    suffix = traced.suffix_ids
    batch, length = suffix.shape
    vocab = model.config.get_text_config().vocab_size
    step = max(1, _LOGITS_AT_ONCE // (batch * vocab))
    dense = torch.zeros(batch, dtype=torch.float64)
    for start in range(first, length - 1, step):
        stop = min(start + step, length - 1)
        logits = logits_from_hidden(model, traced.hidden[:, start + 1 : stop + 1])
        dense += _nll_sum(logits, suffix[:, start + 1 : stop + 1])
    rows = max(1, _LOGITS_AT_ONCE // (length * vocab))
    none = torch.cat([
        _nll_sum(model(input_ids=part, use_cache=False).logits[:, first:-1], part[:, first + 1 :])
        for part in suffix.split(rows)
    ])  # fmt: skip
    return (none - dense) / (length - 1 - first), none / (length - 1 - first)


def _nll_sum(
    logits: Float[Tensor, "batch tokens vocab"], targets: Int[Tensor, "batch tokens"]
) -> Float[Tensor, " batch"]:
    losses = nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
    return losses.double().sum(1).cpu()
