"""Suffix evaluation: a document's prefix is compressed, the text that follows is scored on the compact cache."""

# ruff: noqa: ARG002 a task takes what the protocol gives

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache
from kvcat.compress import Trace, compare, trace
from kvcat.errors import InputError
from kvcat.evals.records import Record
from kvcat.evals.running import Method, ModelSource, evaluate, manifest
from kvcat.evals.task import Baseline, Example, Values
from kvcat.evals.windows import Window
from kvcat.types import Float, Int, Tensor

Supervision = Literal["suffix", "reconstruction", "first-half"]
_LOGITS_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class SuffixTask:
    """Windows whose suffix is scored; values per window are those of ``kvcat.compare`` and of the context gain.

    ``nll``, ``nll_dense``, ``delta_nll``, ``delta_ppl``, ``kl``, ``top1``; ``nll_none`` of suffix tokens 2.. without
    the prefix; ``context_gain``, that minus the dense NLL of the same tokens; ``retention`` = 1 - sum(NLL lost) /
    sum(NLL gained by the prefix); ``num_tokens``, of the suffix.

    Args:
        windows: of equal lengths, with token ids of a vocabulary that all models share.
        dataset: name of the data set.
    """

    windows: tuple[Window, ...]
    dataset: str
    evaluation: str = "suffix"
    baselines: tuple[Baseline, ...] = ()

    def __post_init__(self) -> None:
        shapes = {(window.prefix_len, window.suffix_len) for window in self.windows}
        if len(shapes) > 1:
            raise InputError(f"windows have unequal lengths (prefix, suffix): {sorted(shapes)}")

    @property
    def examples(self) -> tuple[Window, ...]:
        """The windows."""
        return self.windows

    def describe(self) -> Mapping[str, Any]:
        """Lengths, and a hash of the windows."""
        first = self.windows[0]
        return {"prefix_len": first.prefix_len, "suffix_len": first.suffix_len, "manifest": manifest(self.windows)}

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
        return PreparedWindows(model, torch.tensor([w.tokens for w in batch], device=model.device), batch[0].prefix_len)


@dataclass(frozen=True)
class PreparedWindows:
    """Windows of equal lengths on one model."""

    model: PreTrainedModel
    tokens: Int[Tensor, "batch tokens"]
    prefix_len: int

    @property
    def trace(self) -> Trace:
        """Of the whole windows: the suffix supervises."""
        return self._traced

    @cached_property
    def _traced(self) -> Trace:
        return trace(self.model, self.tokens, self.prefix_len)

    @cached_property
    def _context(self) -> dict[str, Float[Tensor, " batch"]]:
        gain, none = _context_gain(self.model, self.trace)
        return {"nll_none": none, "context_gain": gain}

    def score(self, cache: CompactCache) -> list[Values]:
        """The suffix on the cache."""
        scores = compare(self.trace, cache)
        names = ("nll", "nll_dense", "delta_nll", "delta_ppl", "kl", "top1")
        columns = {name: getattr(scores, name).double().cpu() for name in names} | self._context
        count = self.trace.suffix_ids.shape[1]
        columns["retention"] = 1.0 - columns["delta_nll"] * count / (columns["context_gain"] * (count - 1))
        columns["num_tokens"] = torch.full_like(columns["nll"], count)
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
def _context_gain(model: PreTrainedModel, traced: Trace) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """NLL without the prefix minus dense NLL, and NLL without the prefix, of suffix tokens 2.., nats per token."""
    suffix = traced.suffix_ids
    batch, length = suffix.shape
    vocab = model.config.get_text_config().vocab_size
    step = max(1, _LOGITS_AT_ONCE // (batch * vocab))
    dense = torch.zeros(batch, dtype=torch.float64)
    for start in range(0, length - 1, step):
        stop = min(start + step, length - 1)
        dense += _nll_sum(traced.logits_at(start, stop), suffix[:, start + 1 : stop + 1])
    rows = max(1, _LOGITS_AT_ONCE // (length * vocab))
    none = torch.cat([
        _nll_sum(model(input_ids=part, use_cache=False).logits[:, :-1], part[:, 1:]) for part in suffix.split(rows)
    ])  # fmt: skip
    return (none - dense) / (length - 1), none / (length - 1)


def _nll_sum(
    logits: Float[Tensor, "batch tokens vocab"], targets: Int[Tensor, "batch tokens"]
) -> Float[Tensor, " batch"]:
    losses = nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
    return losses.double().sum(1).cpu()
