"""Suffix evaluation: a document's prefix is compressed, the text that follows is scored on the compact cache."""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcat.cache import CompactCache, fingerprint
from kvcat.compress import Trace, compare, seeded_compressor, trace
from kvcat.errors import InputError
from kvcat.evals.progress import EvalProgress
from kvcat.evals.provenance import provenance
from kvcat.evals.records import Record, ResultsFolder
from kvcat.evals.windows import Window
from kvcat.types import Float, Int, Tensor

ModelSource = tuple[PreTrainedModel, Any] | Callable[[], tuple[PreTrainedModel, Any]]
_LOGITS_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class Method:
    """A compressor to evaluate, and on how much.

    Args:
        name: of the compressor, e.g. ``attention-matching``.
        options: of the compressor where they differ from its defaults, JSON values.
        keep_ratios: those of this method, each in (0, 1]; None takes the evaluation's.
        num_windows: only the first windows; None takes all.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    keep_ratios: tuple[float, ...] | None = None
    num_windows: int | None = None


@dataclass(frozen=True)
class _Job:
    """One method at one keep ratio, with its last step if it has steps, and the number of windows it covers."""

    method: Method
    compressor: Any
    keep_ratio: float
    last_step: int | None
    num_windows: int

    def caches(self, traced: Trace) -> Iterator[tuple[int | None, CompactCache]]:
        if self.last_step is None:
            yield None, self.compressor(traced, keep_ratio=self.keep_ratio)
        else:
            yield from self.compressor.snapshots(traced, keep_ratio=self.keep_ratio)


@dataclass(frozen=True)
class _Subject:
    """A loaded model with what its records say of it."""

    label: str
    model: PreTrainedModel
    fingerprint: str
    dtype: str
    dataset: str

    def record(self, job: _Job, step: int | None, window: Window, values: dict[str, float]) -> Record:
        options = json.dumps(dict(job.method.options), sort_keys=True)
        return Record(
            self.label, self.fingerprint, self.dtype, job.method.name, options, job.keep_ratio, step,
            self.dataset, window.document, window.window, window.suffix_len, values,
        )  # fmt: skip

    def is_done(self, folder: ResultsFolder, job: _Job, batch: Sequence[Window]) -> bool:
        """A window's last step is written after its others, so its record stands for them."""
        return all(folder.done(self.record(job, job.last_step, window, {}).key) for window in batch)


def evaluate_suffix(
    models: Mapping[str, ModelSource],
    windows: Sequence[Window],
    methods: Sequence[str | Method],
    keep_ratios: Sequence[float],
    out_dir: Path,
    *,
    dataset: str,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> list[Record]:
    """Records of every model, method, keep ratio and window, also those of earlier runs into the same folder.

    Per window: ``nll``, ``nll_dense``, ``delta_nll``, ``delta_ppl``, ``kl``, ``top1`` of ``kvcat.compare``;
    ``nll_none`` of suffix tokens 2.. without the prefix; ``context_gain``, that minus the dense NLL of the same
    tokens; ``retention`` = 1 - sum(NLL lost) / sum(NLL gained by the prefix). One trace per batch serves all methods.
    A method with snapshots gives one record per snapshot. Batches are written as they finish; the same call after a
    kill does what is missing and ends with the same records.

    Args:
        models: label to (model, tokenizer), or to a function that loads them, called when their turn comes.
        windows: of equal lengths, with token ids of a vocabulary that all models share.
        methods: names of compressors, or ``Method`` for options, own keep ratios or fewer windows.
        keep_ratios: fractions kept, each in (0, 1].
        out_dir: the results folder; one configuration per folder, to which models may be added.
        dataset: name of the data set, part of every record.
        batch_size: windows per trace, at least 1.
        seed: of the compressors that draw.
        progress: show progress on standard error.

    Raises:
        InputError: nothing to evaluate, a value out of range, an unknown method, windows of unequal lengths or beyond
            the model's positions or vocabulary, tokenizers that differ, a folder of another configuration.
    """
    plan = [job for method in methods for job in _jobs(method, keep_ratios, len(windows), seed)]
    _check_request(models, windows, plan, batch_size)
    vocabularies: dict[str, str] = {}
    for label, source in models.items():
        if not callable(source):
            _check_model(label, *source, windows, vocabularies)
    config = _config(windows, plan, dataset, batch_size, seed)
    started = time.monotonic()
    batches = _batches(len(windows), batch_size, {job.num_windows for job in plan})
    total = len(models) * sum(job.num_windows for job in plan)
    with ResultsFolder(out_dir, config) as folder, EvalProgress(total, shown=progress) as bar:
        _log(out_dir, {"event": "start", **provenance()})
        seconds: dict[str, float] = defaultdict(float)
        for label, source in models.items():
            model, tokenizer = source() if callable(source) else source
            _check_model(label, model, tokenizer, windows, vocabularies)
            subject = _Subject(label, model, fingerprint(model), str(_dtype(model)).removeprefix("torch."), dataset)
            folder.add_model(label, subject.fingerprint, subject.dtype)
            for start, stop in batches:
                jobs = [job for job in plan if start < job.num_windows]
                _evaluate_batch(subject, windows[start:stop], jobs, folder, bar, seconds)
        total_seconds = time.monotonic() - started
        by_method = {name: round(spent, 2) for name, spent in seconds.items()}
        _log(out_dir, {"event": "end", "seconds": round(total_seconds, 1), "seconds_by_method": by_method})
        return folder.records


def _evaluate_batch(
    subject: _Subject,
    batch: Sequence[Window],
    jobs: Sequence[_Job],
    folder: ResultsFolder,
    bar: EvalProgress,
    seconds: dict[str, float],
) -> None:
    missing = [job for job in jobs if not subject.is_done(folder, job, batch)]
    bar.advance(len(batch) * (len(jobs) - len(missing)), f"{subject.label}: found on disk")
    if not missing:
        return
    device = next(subject.model.parameters()).device
    tokens = torch.tensor([window.tokens for window in batch], device=device)
    traced = trace(subject.model, tokens, batch[0].prefix_len)
    gain, none = _context_gain(subject.model, traced)
    for job in missing:
        begun = time.monotonic()
        found: list[tuple[int | None, list[dict[str, float]]]] = []
        for step, cache in job.caches(traced):
            found.append((step, _values(compare(traced, cache), gain, none, batch[0].suffix_len)))
        folder.append(
            subject.record(job, step, window, values[row]) for row, window in enumerate(batch) for step, values in found
        )
        seconds[job.method.name] += time.monotonic() - begun
        bar.advance(len(batch), f"{subject.label}: {job.method.name} keep {job.keep_ratio:g}")


def _values(
    scores: Any, gain: Float[Tensor, " batch"], none: Float[Tensor, " batch"], suffix_len: int
) -> list[dict[str, float]]:
    names = ("nll", "nll_dense", "delta_nll", "delta_ppl", "kl", "top1")
    columns = {name: getattr(scores, name).double().cpu() for name in names}
    lost = columns["delta_nll"] * suffix_len
    columns |= {"nll_none": none, "context_gain": gain, "retention": 1.0 - lost / (gain * (suffix_len - 1))}
    return [{name: float(column[row]) for name, column in columns.items()} for row in range(len(gain))]


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


def _jobs(method: str | Method, keep_ratios: Sequence[float], num_windows: int, seed: int) -> list[_Job]:
    method = Method(method) if isinstance(method, str) else method
    if method.num_windows is not None and method.num_windows < 1:
        raise InputError(f"{method.name}: num_windows is {method.num_windows}; it must be at least 1")
    compressor: Any = seeded_compressor(method.name, method.options, seed)
    last_step = compressor.num_steps if hasattr(compressor, "snapshots") else None
    count = min(method.num_windows or num_windows, num_windows)
    ratios = keep_ratios if method.keep_ratios is None else method.keep_ratios
    return [_Job(method, compressor, float(ratio), last_step, count) for ratio in ratios]


def _batches(num_windows: int, batch_size: int, limits: set[int]) -> list[tuple[int, int]]:
    """Bounds of the batches; every method's windows end at the end of a batch."""
    cuts = sorted({*range(0, num_windows, batch_size), *limits, num_windows})
    return list(pairwise(cuts))


def _config(
    windows: Sequence[Window], plan: Sequence[_Job], dataset: str, batch_size: int, seed: int
) -> dict[str, Any]:
    digest = hashlib.sha256()
    for window in windows:
        digest.update(json.dumps([window.document, window.window, window.tokens]).encode())
    methods: dict[str, dict[str, Any]] = {}
    for job in plan:
        key = json.dumps([job.method.name, dict(job.method.options)], sort_keys=True)
        entry = {"name": job.method.name, "options": dict(job.method.options), "num_windows": job.num_windows}
        methods.setdefault(key, {**entry, "keep_ratios": []})["keep_ratios"].append(job.keep_ratio)
    return {
        "evaluation": "suffix",
        "dataset": dataset,
        "prefix_len": windows[0].prefix_len,
        "suffix_len": windows[0].suffix_len,
        "num_windows": len(windows),
        "windows": digest.hexdigest(),
        "methods": list(methods.values()),
        "batch_size": batch_size,
        "seed": seed,
    }


def _check_request(
    models: Mapping[str, ModelSource], windows: Sequence[Window], plan: Sequence[_Job], batch_size: int
) -> None:
    for name, found in [("model", models), ("window", windows), ("method or keep ratio", plan)]:
        if not found:
            raise InputError(f"nothing to evaluate: no {name} given")
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; it must be at least 1")
    for job in plan:
        if not 0.0 < job.keep_ratio <= 1.0:
            raise InputError(f"keep ratio {job.keep_ratio:g} is outside (0, 1]")
    jobs = [(job.method.name, json.dumps(dict(job.method.options), sort_keys=True), job.keep_ratio) for job in plan]
    if len(set(jobs)) < len(jobs):
        name, _, keep = next(job for job in jobs if jobs.count(job) > 1)
        raise InputError(f"{name} at keep ratio {keep:g} is asked for twice")
    shapes = {(window.prefix_len, window.suffix_len) for window in windows}
    if len(shapes) > 1:
        raise InputError(f"windows have unequal lengths (prefix, suffix): {sorted(shapes)}")
    if len({(window.document, window.window) for window in windows}) < len(windows):
        raise InputError("two windows share document and name")


def _check_model(
    label: str, model: PreTrainedModel, tokenizer: Any, windows: Sequence[Window], vocabularies: dict[str, str]
) -> None:
    text = model.config.get_text_config()
    length, positions = len(windows[0].tokens), getattr(text, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise InputError(f"windows of {length} tokens exceed the {positions} positions of model {label!r}")
    largest = max(max(window.tokens) for window in windows)
    if largest >= text.vocab_size:
        raise InputError(f"token {largest} is outside the vocabulary of model {label!r}, {text.vocab_size} tokens")
    if tokenizer is None:
        return
    words = json.dumps(sorted(tokenizer.get_vocab().items()))
    vocabularies[label] = hashlib.sha256(words.encode()).hexdigest()
    first = next(iter(vocabularies))
    if vocabularies[first] != vocabularies[label]:
        raise InputError(f"models {first!r} and {label!r} have different tokenizers: their windows cannot be compared")


def _dtype(model: PreTrainedModel) -> torch.dtype:
    return next(model.parameters()).dtype


def _log(out_dir: Path, event: dict[str, Any]) -> None:
    with (out_dir / "provenance.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(event) + "\n")
