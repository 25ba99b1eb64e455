"""Compressibility profile: the error of the best cache found for a prefix against the number of its slots.

(N, epsilon, r)-compressibility asks for a cache of r(n) slots of every prefix a that serves every suffix b alike:
|| M([a, b]) - M_{C,a}(b) || < epsilon. Here one cache is fitted to some sampled suffixes of a prefix, and its error is
taken on others. Both samples err on one side each: a better cache may exist, so the error is an upper bound on that of
the best cache on these suffixes; a worse suffix may exist, so the worst of them is a lower bound on the maximum over
all suffixes for this cache.

References: KV-CAT, section "KV Cache Compression: Problem Formulation", definition of (N, epsilon, r)-compressibility.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcat.cache import CompactCache, fingerprint
from kvcat.compress import Compressor, GradientCompression, Trace, seeded_compressor, takes_seed, trace
from kvcat.compress.compare import replay_hidden
from kvcat.compress.slot_training import joined
from kvcat.errors import InputError
from kvcat.evals.profile_checks import check_held_out, check_models, check_slots
from kvcat.evals.profile_errors import output_errors, summary_values, without_prefix
from kvcat.evals.profile_suffixes import ROLES, PrefixSuffixes, SuffixPlan, write_suffixes
from kvcat.evals.provenance import provenance
from kvcat.evals.records import Record, ResultsFolder
from kvcat.evals.runner import Method, Progress, Values
from kvcat.types import Float, Tensor

NO_CACHE, DENSE = "no-context", "dense"
"""Methods of no slot and of all of them."""

SUFFIXES_FILE = "suffixes.json"
_TOKENS_AT_ONCE = 2**15

PROFILE_METHODS = (
    Method("attention-matching"),
    Method("gradient", {"init": "attention-matching", "num_steps": 40, "lr": 0.03, "schedule": "cosine"}),
    Method("snapkv"),
    Method("h2o"),
)
"""Methods among which the best cache is looked for where no others are named."""


@dataclass(frozen=True)
class _Cell:
    """A method, with its compressor where it has one, and the slots that it makes per layer and head."""

    method: Method
    compressor: Compressor | None
    num_slots: int
    seed: int | None


def profile(
    models: Mapping[str, tuple[PreTrainedModel, Any]],
    texts: Sequence[PrefixSuffixes],
    plan: SuffixPlan,
    methods: Sequence[Method],
    slots: Sequence[int],
    out_dir: Path,
    *,
    dataset: str,
    progress: bool = True,
) -> list[Record]:
    """Records of every model, prefix, method, number of slots and kind of suffix, also those of earlier runs.

    Per record the ``MEASURES`` as mean and worst (``kl``, ``kl_worst``, ...) over all outputs of the held-out suffixes
    (``PrefixSuffixes.held_out``), ``num_outputs`` of them; the same of the suffixes for the choice and for the fit,
    where the kind has them, under ``choice_`` and ``fit_``; and ``num_slots``. Further records stand for no cache at
    all ("no-context", r(n) = 0) and, where asked for, the whole one ("dense"). A record's data set ends in ":KIND".

    A killed run continues, and models may be added: all meet the same suffixes, those that ``texts`` holds.

    Args:
        models: label to (model, tokenizer).
        texts: prefixes and their suffixes.
        plan: what these were drawn by.
        methods: compressors, with options.
        slots: numbers of slots r(n) per layer and head, each in [1, n].
        out_dir: the results folder.
        dataset: name of the text.
        progress: show progress on standard error.

    Raises:
        InputError: a number of slots outside [1, n], an unknown method, texts that a model cannot run, tokenizers that
            differ, suffixes for the choice or for the test that are all fitted to, a folder of another configuration.
    """
    check_slots(slots, plan.prefix_len)
    cells = _cells(methods, slots, plan)
    check_models(models, plan, texts)
    check_held_out(texts)
    begun, config = time.monotonic(), _config(texts, plan, methods, slots, dataset)
    with (
        ResultsFolder(out_dir, config) as folder,
        Progress(len(models) * len(texts) * len(cells), "profile", progress) as bar,
    ):
        if not (out_dir / SUFFIXES_FILE).exists():
            write_suffixes(out_dir / SUFFIXES_FILE, plan, texts)
        _log(out_dir, {"event": "start", **provenance()})
        for label, (model, _) in models.items():
            dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
            subject = _Subject(label, model, fingerprint(model), dtype, dataset)
            folder.check_model(label, subject.fingerprint, dtype)
            for text in texts:
                subject.measure(text, cells, folder, bar)
        _log(out_dir, {"event": "end", "seconds": round(time.monotonic() - begun, 1)})
        return folder.records


@dataclass(frozen=True)
class _Subject:
    """A model with what its records say of it."""

    label: str
    model: PreTrainedModel
    fingerprint: str
    dtype: str
    dataset: str

    def measure(self, text: PrefixSuffixes, cells: Sequence[_Cell], folder: ResultsFolder, bar: Progress) -> None:
        """Do what is missing of a prefix."""
        missing = [
            cell for cell in cells if not all(folder.done(self._record(text, cell, k, {}).key) for k in text.suffixes)
        ]
        bar.advance(len(cells) - len(missing), f"{self.label}: found on disk")
        prepared = _Prepared(self.model, text)
        for cell in missing:
            values = prepared.values(prepared.cache(cell))
            folder.append(
                self._record(text, cell, kind, {**own, "num_slots": float(cell.num_slots)})
                for kind, own in values.items()
            )
            bar.advance(1, f"{self.label}: {cell.method.name}, {cell.num_slots} slots")

    def _record(self, text: PrefixSuffixes, cell: _Cell, kind: str, values: Values) -> Record:
        return Record(
            self.label, self.fingerprint, self.dtype, cell.method.name,
            json.dumps(dict(cell.method.options), sort_keys=True), cell.num_slots / len(text.prefix), None, cell.seed,
            f"{self.dataset}:{kind}", "", text.document, text.name, values,
        )  # fmt: skip


@dataclass(frozen=True)
class _Prepared:
    """A prefix on a model: traces and dense outputs are made when first needed."""

    model: PreTrainedModel
    text: PrefixSuffixes

    @cached_property
    def traces(self) -> list[Trace]:
        """Dense forwards over the prefix and every suffix that caches are fitted to; the prefix is held once."""
        suffixes = self.text.every("fit")
        whole = torch.cat([torch.tensor(self.text.prefix).expand(len(suffixes), -1), suffixes], 1)
        made: list[Trace] = []
        for rows in whole.split(max(1, _TOKENS_AT_ONCE // whole.shape[1])):
            seen = trace(self.model, rows.to(self.model.device), len(self.text.prefix))
            one = made[0] if made else seen
            states = {name: [x[:1].clone() for x in getattr(one, name)] for name in ("keys", "values")}
            spread = {name: [x.expand(len(rows), -1, -1, -1) for x in own] for name, own in states.items()}
            made.append(replace(seen, **spread))
        return made

    @cached_property
    def example(self) -> Trace:
        """One prefix with the queries of all these suffixes."""
        return joined(self.traces)

    @cached_property
    def groups(self) -> dict[tuple[str, str], Tensor]:
        """Suffixes by kind and role."""
        every = {(kind, role): self.text.tokens(kind, role) for kind in self.text.suffixes for role in ROLES}
        return {group: rows for group, rows in every.items() if len(rows)}

    @cached_property
    def counted(self) -> dict[tuple[str, str], Tensor]:
        """Which outputs of these count."""
        return {(kind, role): self.text.held_out(kind, role) for kind, role in self.groups}

    @cached_property
    def dense(self) -> Float[Tensor, "suffixes positions hidden"]:
        """Representations M([a, b]) of all suffixes, group after group."""
        return self.outputs(self.example.dense_cache())

    def outputs(self, cache: CompactCache | None) -> Float[Tensor, "suffixes positions hidden"]:
        """Representations M_{C,a}(b) of all suffixes, group after group; None: without any cache."""
        rows = torch.cat(list(self.groups.values()))
        if cache is None:
            return without_prefix(self.model, rows, len(self.text.prefix))
        return replay_hidden(self.model, cache, rows.to(self.model.device))

    def cache(self, cell: _Cell) -> CompactCache | None:
        """One cache for all suffixes."""
        if cell.compressor is None:
            return self.example.dense_cache() if cell.num_slots else None
        if isinstance(cell.compressor, GradientCompression):
            return cell.compressor.shared(self.traces, num_slots=cell.num_slots)
        return cell.compressor(self.example, num_slots=cell.num_slots)

    def values(self, cache: CompactCache | None) -> dict[str, Values]:
        """Figures by kind."""
        errors = output_errors(self.model, self.dense, self.outputs(cache))
        found: dict[str, Values] = {kind: {} for kind in self.text.suffixes}
        start = 0
        for (kind, role), rows in self.groups.items():
            part = {name: all_values[start : start + len(rows)] for name, all_values in errors.items()}
            found[kind] |= summary_values(part, self.counted[kind, role], role)
            start += len(rows)
        return found


def _cells(methods: Sequence[Method], slots: Sequence[int], plan: SuffixPlan) -> list[_Cell]:
    cells = [_Cell(Method(NO_CACHE), None, 0, None)]
    known: set[str] = set()
    for method in methods:
        identity = json.dumps([method.name, dict(method.options)], sort_keys=True)
        if identity in known:
            raise InputError(f"method {method.name} is asked for twice")
        known.add(identity)
        compressor = seeded_compressor(method.name, method.options, plan.seed)
        seed = plan.seed if takes_seed(method.name, method.options) else None
        cells += [_Cell(method, compressor, count, seed) for count in sorted(slots) if count < plan.prefix_len]
    if not methods:
        raise InputError("nothing to profile: no method given")
    return cells + [_Cell(Method(DENSE), None, plan.prefix_len, None)] * (plan.prefix_len in slots)


def _config(
    texts: Sequence[PrefixSuffixes],
    plan: SuffixPlan,
    methods: Sequence[Method],
    slots: Sequence[int],
    dataset: str,
) -> dict[str, Any]:
    """What the results depend on; the names that every evaluation has mean what they mean there."""
    ratios = [count / plan.prefix_len for count in sorted(slots) if count < plan.prefix_len]
    whole = [[DENSE, 1.0]] * (plan.prefix_len in slots)
    manifest = json.dumps([asdict(text) for text in texts], sort_keys=True)
    return {
        "evaluation": "profile",
        "dataset": dataset,
        "num_examples": len(texts),
        **asdict(plan),
        "slots": sorted(slots),
        "manifest": hashlib.sha256(manifest.encode()).hexdigest(),
        "baselines": [[NO_CACHE, 0.0], *whole],
        "methods": [
            {
                "name": method.name, "options": dict(method.options), "num_examples": len(texts),
                "keep_ratios": ratios,
            }
            for method in methods
        ],
    }  # fmt: skip


def _log(out_dir: Path, event: dict[str, Any]) -> None:
    with (out_dir / "provenance.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(event) + "\n")
