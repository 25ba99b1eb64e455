"""The one loop behind every evaluation: models, batches, baselines, compressors; records that survive a kill."""

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from kvcat.cache import CompactCache, fingerprint
from kvcat.compress import Compressor, Trace, seeded_compressor, takes_seed
from kvcat.errors import InputError
from kvcat.evals.costs import answer_speed, measure
from kvcat.evals.records import Record, ResultsFolder, Shard, method_label
from kvcat.evals.statistics import DECIDING, METRICS
from kvcat.evals.task import (
    Baseline,
    Method,
    Models,
    Prepared,
    Step,
    Task,
    Values,
    check_keep_ratios,
    check_least,
    manifest,
    vocabulary,
)  # fmt: skip
from kvcat.provenance import provenance

_PROMPT, _ANSWER = 32, 16


@dataclass(frozen=True)
class _Job:
    """One method with one seed, or a baseline; and the examples that it covers."""

    name: str
    options: Mapping[str, Any]
    keep_ratios: tuple[float, ...]
    num_examples: int
    seed: int | None = None
    compressor: Compressor | None = None

    @property
    def last_step(self) -> Step:
        return getattr(self.compressor, "num_steps", None) if hasattr(self.compressor, "snapshots") else None

    @property
    def cells(self) -> list[tuple[str, float]]:
        """Label and keep ratio of each of its rows in tables."""
        return [(method_label(self.name, self.options), keep_ratio) for keep_ratio in self.keep_ratios]


def evaluate(
    task: Task,
    models: Models,
    methods: Sequence[str | Method],
    keep_ratios: Sequence[float],
    out_dir: Path,
    *,
    batch_size: int = 16,
    seeds: Sequence[int] = (0,),
    shard: Shard = (0, 1),
    primary: tuple[str, float, str] | None = None,
    speed: bool = False,
    progress: bool = True,
) -> list[Record]:
    """Records of every model, baseline, method, keep ratio, seed and example, also those of earlier runs.

    One trace per batch serves all methods. A method with snapshots gives one record per snapshot. The same
    call after a kill does what is missing and ends with the same records. What each method took on the first
    batch stands in ``costs.jsonl``, versions and hardware in ``provenance.jsonl``.

    Args:
        task: the examples and how they are scored.
        models: label to (model, tokenizer). Labels ``LABEL@SEED`` are training runs of one variant, which
            tables join.
        methods: names of compressors, or ``Method`` for options, own keep ratios or fewer examples.
        keep_ratios: fractions kept, each in (0, 1].
        out_dir: the results folder; one configuration per folder, to which models may be added.
        batch_size: examples per trace, at least 1.
        seeds: of the compressors that draw; one record per seed. Others run once.
        shard: (index, count): every count-th batch alone, for processes that share the folder.
        primary: the cell that decides a comparison: method with its options, keep ratio, metric. None takes
            the first method at its first keep ratio and the evaluation's first metric.
        speed: also time answers from the compact and from the dense cache.
        progress: show progress on standard error.

    Raises:
        InputError: nothing to evaluate, a value out of range, an unknown method or evaluation, examples
            that a model cannot run, tokenizers that differ, a folder of another configuration, a score
            that is not a number.
    """
    if len(set(seeds)) < len(seeds) or not seeds:
        raise InputError(f"seeds are {list(seeds)}; give at least one, and each once")
    count = len(task.examples)
    methods = [Method(method) if isinstance(method, str) else method for method in methods]
    plan = [job for method in methods for job in _jobs(method, keep_ratios, count, seeds)]
    baselines = [_Job(baseline.name, {}, (baseline.keep_ratio,), count) for baseline in task.baselines]
    _check_request(task, models, plan, batch_size, shard)
    _check_models(task, models)
    config = _config(task, methods, keep_ratios) | {
        "primary": _primary(task, plan, primary), "batch_size": batch_size, "seeds": list(seeds)
    }  # fmt: skip
    batches = _batches(task, batch_size, {job.num_examples for job in plan})[shard[0] :: shard[1]]
    work = {batch: [job for job in [*baselines, *plan] if batch[0] < job.num_examples] for batch in batches}
    total = len(models) * sum(len(job.keep_ratios) * (b - a) for (a, b), jobs in work.items() for job in jobs)
    begun, name = time.monotonic(), task.evaluation
    with ResultsFolder(out_dir, config, shard=shard) as folder, progress_bar(total, name, shown=progress) as bar:
        folder.append_event({"event": "start", **provenance()})
        for label, (model, tokenizer) in models.items():
            dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
            run = _Run(task, label, model, tokenizer, fingerprint(model), dtype, folder, bar, speed)
            folder.check_model(label, run.fingerprint, dtype)
            for (start, stop), jobs in work.items():
                run.batch(task.examples[start:stop], jobs)
        folder.append_event({"event": "end", "seconds": round(time.monotonic() - begun, 1)})
        return folder.records


@dataclass(frozen=True)
class _Run:
    """One model's part of an evaluation; ``measured`` holds the jobs' keep ratios whose costs are known."""

    task: Task
    label: str
    model: PreTrainedModel
    tokenizer: Any
    fingerprint: str
    dtype: str
    folder: ResultsFolder
    bar: tqdm
    speed: bool
    measured: set[tuple[int, float]] = field(default_factory=set)

    def batch(self, batch: Sequence[Any], jobs: Sequence[_Job]) -> None:
        """Do what is missing of a batch."""
        prepared = None
        for job in jobs:
            missing = [keep_ratio for keep_ratio in job.keep_ratios if not self._done(job, keep_ratio, batch)]
            advance(self.bar, len(batch) * (len(job.keep_ratios) - len(missing)), f"{self.label}: found on disk")
            if not missing:
                continue
            prepared = prepared or self.task.prepare(self.model, self.tokenizer, batch)
            for keep_ratio, found in zip(missing, self._scores(job, missing, prepared, len(batch)), strict=True):
                self.folder.append(
                    self._record(job, keep_ratio, step, example, values[row])
                    for row, example in enumerate(batch)
                    for step, values in found
                )
                advance(self.bar, len(batch), f"{self.label}: {job.name} keep {keep_ratio:g}")

    def _done(self, job: _Job, keep_ratio: float, batch: Sequence[Any]) -> bool:
        """An example's last step is written after its others, so its record stands for them."""
        records = (self._record(job, keep_ratio, job.last_step, example, {}) for example in batch)
        return all(self.folder.done(record.key) for record in records)

    def _record(self, job: _Job, keep_ratio: float, step: Step, example: Any, values: Values) -> Record:
        options = json.dumps(dict(job.options), sort_keys=True)
        try:
            return Record(
                self.label, self.fingerprint, self.dtype, job.name, options, keep_ratio, step, job.seed,
                self.task.dataset, example.stratum, example.document, example.name, values,
            )  # fmt: skip
        except ValueError as error:
            raise InputError(f"model {self.label!r}, {job.name} at keep ratio {keep_ratio:g}: {error}") from None

    def _scores(
        self, job: _Job, keep_ratios: Sequence[float], prepared: Prepared, num_examples: int
    ) -> Iterator[list[tuple[Step, list[Values]]]]:
        """Scores by step for each keep ratio; on a job's first batch also what each costs alone."""
        if job.compressor is None:
            yield [(None, prepared.baseline(Baseline(job.name, keep_ratios[0])))]
        elif all((id(job), keep_ratio) in self.measured for keep_ratio in keep_ratios):
            for caches in prepared.caches(job.compressor, keep_ratios):
                yield [(step, prepared.score(cache)) for step, cache in caches]
        else:
            for keep_ratio in keep_ratios:
                yield self._measure(job, job.compressor, keep_ratio, prepared, num_examples)

    def _measure(
        self, job: _Job, compressor: Compressor, keep_ratio: float, prepared: Prepared, num_examples: int
    ) -> list[tuple[Step, list[Values]]]:
        def make() -> Iterator[tuple[Step, CompactCache]]:
            return next(prepared.caches(compressor, [keep_ratio]))

        def use(step: Step, cache: CompactCache) -> None:
            found.append((step, prepared.score(cache)))
            last.append(cache)

        found, last, trace = [], deque[CompactCache](maxlen=1), prepared.trace
        if not self.measured:
            next(make())  # warms up
        costs = measure(make, trace.input_ids.device, use=use)
        costs[-1] |= self._speed(trace, last[0])
        about = {
            "model": self.label, "method": job.name, "options": dict(job.options), "keep_ratio": keep_ratio,
            "seed": job.seed, "dataset": self.task.dataset, "examples": num_examples, "tokens": trace.prefix_len,
            "dense_bytes": trace.dense_cache().nbytes,
        }  # fmt: skip
        self.folder.append_cost(*({**about, **cost} for cost in costs))
        self.measured.add((id(job), keep_ratio))
        return found

    def _speed(self, trace: Trace, cache: CompactCache) -> dict[str, float]:
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if not self.speed or (positions is not None and trace.prefix_len + _PROMPT + _ANSWER > positions):
            return {}
        caches, prompt = (trace.dense_cache().select([0]), cache.select([0])), trace.input_ids[:1, :_PROMPT]
        dense, compact = (answer_speed(self.model, own, prompt, num_tokens=_ANSWER) for own in caches)
        return {**compact, **{f"{name}_dense": value for name, value in dense.items()}}


def progress_bar(total: int, name: str, *, shown: bool = True) -> tqdm:
    """A progress bar on standard error; where that is no terminal, a line every ten seconds."""
    seconds = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, desc=name, disable=not shown, mininterval=seconds, file=sys.stderr)


def advance(bar: tqdm, count: int, what: str) -> None:
    """``count`` more units are done, the last of them for ``what``."""
    bar.set_postfix_str(what, refresh=False)
    bar.update(count)


def _jobs(method: Method, keep_ratios: Sequence[float], count: int, seeds: Sequence[int]) -> list[_Job]:
    covered = count if method.num_examples is None else min(method.num_examples, count)
    check_least(1, **{f"{method.name}: num_examples": covered if count else 1})
    ratios = tuple(map(float, keep_ratios if method.keep_ratios is None else method.keep_ratios))
    check_keep_ratios(ratios)
    own = [] if not ratios else seeds if takes_seed(method.name, method.options) else [None]
    made = [(seed, seeded_compressor(method.name, method.options, seed or 0)) for seed in own]
    return [_Job(method.name, method.options, ratios, covered, *pair) for pair in made]


def _batches(task: Task, batch_size: int, limits: set[int]) -> list[tuple[int, int]]:
    """Bounds of the batches: of examples that may share one; every method's examples end at the end of a batch."""
    batches, start, total = [], 0, len(task.examples)
    keys = [task.batch_key(example) for example in task.examples]
    for stop in range(1, total + 1):
        if stop in limits or stop == total or stop - start == batch_size or keys[stop] != keys[start]:
            batches.append((start, stop))
            start = stop
    return batches


def _primary(task: Task, plan: Sequence[_Job], wanted: tuple[str, float, str] | None) -> dict[str, Any] | None:
    cells = [cell for job in plan for cell in job.cells]
    if wanted is None and not cells:
        return None
    method, keep_ratio, metric = wanted or (*cells[0], DECIDING[task.evaluation])
    if (method, keep_ratio) not in cells:
        raise InputError(f"primary cell: {method} at keep ratio {keep_ratio:g} is not evaluated")
    if metric not in METRICS:
        raise InputError(f"primary cell: no metric {metric!r}; there are {', '.join(METRICS)}")
    return {"method": method, "keep_ratio": keep_ratio, "metric": metric} | ({"named": True} if wanted else {})


def _config(task: Task, methods: Sequence[Method], keep_ratios: Sequence[float]) -> dict[str, Any]:
    count = len(task.examples)
    return {
        "evaluation": task.evaluation,
        "dataset": task.dataset,
        "num_examples": count,
        **task.describe(),
        "manifest": manifest(task.examples),
        "baselines": [[baseline.name, baseline.keep_ratio] for baseline in task.baselines],
        "methods": [
            {
                "name": method.name,
                "options": dict(method.options),
                "num_examples": min(method.num_examples or count, count),
                "keep_ratios": list(map(float, keep_ratios if method.keep_ratios is None else method.keep_ratios)),
            }
            for method in methods
        ],
    }


def _check_request(task: Task, models: Models, plan: Sequence[_Job], batch_size: int, shard: Shard) -> None:
    if task.evaluation not in DECIDING:
        raise InputError(f"no evaluation {task.evaluation!r}; there are {', '.join(DECIDING)}")
    wanted = [*plan, *task.baselines]
    for name, found in [("model", models), ("example", task.examples), ("method or keep ratio", wanted)]:
        if not found:
            raise InputError(f"nothing to evaluate: no {name} given")
    if plan and not task.compresses:
        raise InputError(f"{task.evaluation} is evaluated without compression")
    check_least(1, batch_size=batch_size)
    if not 0 <= shard[0] < shard[1]:
        raise InputError(f"shard {shard[0]} of {shard[1]} does not exist; the first is 0, the last {shard[1] - 1}")
    for (label, keep_ratio, _), times in Counter((*cell, job.seed) for job in plan for cell in job.cells).items():
        if times > 1:
            raise InputError(f"{label} at keep ratio {keep_ratio:g} is given twice")
    if len({(example.document, example.name) for example in task.examples}) < len(task.examples):
        raise InputError("two examples share document and name")


def _check_models(task: Task, models: Models) -> None:
    for label, (model, tokenizer) in models.items():
        task.check(label, model, tokenizer)
    known = {label: tokenizer for label, (_, tokenizer) in models.items() if task.tokenized and tokenizer is not None}
    for label, tokenizer in known.items():
        first = next(iter(known))
        if vocabulary(tokenizer) != vocabulary(known[first]):
            raise InputError(f"models {first!r} and {label!r} have different tokenizers: their examples differ")
