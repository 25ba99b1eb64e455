"""The one loop behind every evaluation: models, batches, baselines, compressors; records that survive a kill."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from kvcat.cache import CompactCache, fingerprint, fingerprint_like
from kvcat.compress import Compressor, seeded_compressor, takes_seed
from kvcat.errors import InputError, check_least
from kvcat.evals.costs import Step, answer_speed, measure
from kvcat.evals.records import Record, ResultsFolder, Shard
from kvcat.evals.statistics import EVALUATIONS, Evaluation
from kvcat.evals.task import Baseline, Method, Prepared, Task, Values, check_keep_ratios, manifest
from kvcat.provenance import provenance

Models = Mapping[str, tuple[PreTrainedModel, Any]]  # label to model and tokenizer
Steps = list[tuple[Step, list[Values]]]


@dataclass(frozen=True)
class _Job:
    """A method with one seed, or a baseline."""

    method: Method  # with its keep ratios and its number of examples
    compressor: Compressor | None = None  # None: a baseline
    seed: int | None = None

    @property
    def keep_ratios(self) -> tuple[float, ...]:
        return self.method.keep_ratios or ()

    def caches(self, trace: Any, keep_ratios: Sequence[float]) -> Iterator[Iterator[tuple[Step, CompactCache]]]:
        """For each keep ratio the batch's compact caches by step; None is the step of a method without steps."""
        if hasattr(self.compressor, "snapshots"):
            for keep_ratio in keep_ratios:
                yield self.compressor.snapshots(trace, keep_ratio=keep_ratio)  # type: ignore[union-attr]
        else:
            for cache in self.compressor.each(trace, keep_ratios):  # type: ignore[union-attr]
                yield iter([(None, cache)])


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
        models: label to (model, tokenizer); tables join ``LABEL@SEED``, training runs of one variant.
        methods: names of compressors, or ``Method`` for options, own keep ratios or fewer examples.
        keep_ratios: fractions kept, each in (0, 1].
        out_dir: the results folder; one configuration per folder, to which models may be added.
        batch_size: examples per trace, at least 1.
        seeds: of the compressors that draw; one record per seed. Others run once.
        shard: (index, count): every count-th batch alone, for processes that share the folder.
        primary: the cell that decides: method with its options, keep ratio, metric. None takes the first of each.
        speed: also time answers from the compact and from the dense cache.
        progress: show progress on standard error.

    Raises:
        InputError: nothing to evaluate, a value out of range, an unknown method, examples that a model cannot
            run, a folder of another configuration, a score that is not a number.
    """
    if not models:
        raise InputError("nothing to evaluate: no model given")
    if not 0 <= shard[0] < shard[1]:
        raise InputError(f"shard {shard[0]} of {shard[1]} does not exist; the first is 0, the last {shard[1] - 1}")
    config = configuration(task, methods, keep_ratios, batch_size=batch_size, seeds=seeds, primary=primary)
    count = len(task.examples)
    methods = [_settled(method, keep_ratios, count) for method in methods]
    jobs = [_Job(Method(own.name, {}, (own.keep_ratio,), count)) for own in task.baselines]
    for method in methods:
        drawn = seeds if takes_seed(method.name, method.options) else [None]
        jobs += [_Job(method, seeded_compressor(method.name, method.options, seed or 0), seed) for seed in drawn]
    for label, (model, tokenizer) in models.items():
        task.check(label, model, tokenizer)
    batches = _batches(task, batch_size, {method.num_examples for method in methods})[shard[0] :: shard[1]]
    work = [(a, b, [job for job in jobs if a < (job.method.num_examples or 0)]) for a, b in batches]
    total = len(models) * sum(len(job.keep_ratios) * (b - a) for a, b, own in work for job in own)
    begun, name = time.monotonic(), task.evaluation
    with ResultsFolder(out_dir, config, shard=shard) as folder, progress_bar(total, name, shown=progress) as bar:
        folder.append_event({"event": "start", **provenance()})
        runs = []
        for label, (model, tokenizer) in models.items():
            dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
            recorded = folder.fingerprint_of(label)
            identity = fingerprint(model) if recorded is None else fingerprint_like(recorded, model)
            runs.append(_Run(task, label, model, tokenizer, identity, dtype, folder, bar, speed))
            folder.check_model(label, identity, dtype)
        for run in runs:
            for start, stop, own in work:
                run.batch(task.examples[start:stop], own)
        folder.append_event({"event": "end", "seconds": round(time.monotonic() - begun, 1)})
        return folder.records


@dataclass(frozen=True)
class _Run:
    """One model's part of an evaluation; ``measured`` are the jobs whose costs are known."""

    task: Task
    label: str
    model: PreTrainedModel
    tokenizer: Any
    fingerprint: str
    dtype: str
    folder: ResultsFolder
    bar: tqdm
    speed: bool
    measured: list[_Job] = field(default_factory=list)

    def batch(self, batch: Sequence[Any], jobs: Sequence[_Job]) -> None:
        """Do what is missing of a batch."""
        prepared = None
        for job in jobs:
            missing = [keep_ratio for keep_ratio in job.keep_ratios if not self._done(job, keep_ratio, batch)]
            self.bar.update(len(batch) * (len(job.keep_ratios) - len(missing)))
            if not missing:
                continue
            prepared = prepared or self.task.prepare(self.model, self.tokenizer, batch)
            for keep_ratio, found in zip(missing, self._scores(job, missing, prepared), strict=True):
                self.folder.append(
                    self._record(job, keep_ratio, step, example, values[row])
                    for row, example in enumerate(batch)
                    for step, values in found
                )
                self.bar.set_postfix_str(f"{self.label}: {job.method.name} keep {keep_ratio:g}", refresh=False)
                self.bar.update(len(batch))

    def _done(self, job: _Job, keep_ratio: float, batch: Sequence[Any]) -> bool:
        """An example's last step is written after its others, so its record stands for them."""
        last = job.compressor.num_steps if hasattr(job.compressor, "snapshots") else None  # type: ignore[union-attr]
        return all(self.folder.done(self._record(job, keep_ratio, last, example, {}).key) for example in batch)

    def _record(self, job: _Job, keep_ratio: float, step: Step, example: Any, values: Values) -> Record:
        method = job.method.name, json.dumps(dict(job.method.options), sort_keys=True), keep_ratio, step, job.seed
        place = self.task.dataset, example.stratum, example.document, example.name
        return Record(self.label, self.fingerprint, self.dtype, *method, *place, values)

    def _scores(self, job: _Job, keep_ratios: Sequence[float], prepared: Prepared) -> Iterator[Steps]:
        """Scores by step for each keep ratio; on a job's first batch also what each costs alone."""
        if job.compressor is None:
            yield [(None, prepared.baseline(Baseline(job.method.name, keep_ratios[0])))]
        elif job in self.measured:
            for caches in job.caches(prepared.trace, keep_ratios):
                yield [(step, prepared.score(cache)) for step, cache in caches]
        else:
            if not self.measured:
                next(next(job.caches(prepared.trace, keep_ratios[:1])))  # warms up
            self.measured.append(job)
            for keep_ratio in keep_ratios:
                yield self._measure(job, keep_ratio, prepared)

    def _measure(self, job: _Job, keep_ratio: float, prepared: Prepared) -> Steps:
        """Scores by step; seconds, memory and bytes go into the folder."""
        trace = prepared.trace

        def use(cache: CompactCache) -> tuple[list[Values], dict[str, float]]:
            return prepared.score(cache), answer_speed(trace, cache) if self.speed else {}

        cuda = trace.input_ids.device.type == "cuda"
        found = measure(lambda: next(job.caches(trace, [keep_ratio])), use, cuda=cuda)
        about = {
            "model": self.label, "method": job.method.name, "options": dict(job.method.options),
            "keep_ratio": keep_ratio, "seed": job.seed, "dataset": self.task.dataset,
            "examples": len(prepared.batch), "tokens": trace.prefix_len,
            "dense_bytes": trace.dense_cache().nbytes,
        }  # fmt: skip
        self.folder.append_cost(*(about | cost | speed for cost, (_, speed) in found))
        return [(cost["step"], scores) for cost, (scores, _) in found]


def progress_bar(total: int, name: str, *, shown: bool = True) -> tqdm:
    """A progress bar on standard error; where that is no terminal, a line every ten seconds."""
    seconds = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, desc=name, disable=not shown, mininterval=seconds, file=sys.stderr)


def _settled(method: str | Method, keep_ratios: Sequence[float], count: int) -> Method:
    """The method with its keep ratios and its number of examples."""
    method = Method(method) if isinstance(method, str) else method
    covered = count if method.num_examples is None else min(method.num_examples, count)
    ratios = tuple(map(float, keep_ratios if method.keep_ratios is None else method.keep_ratios))
    return replace(method, keep_ratios=ratios, num_examples=covered)


def _batches(task: Task, batch_size: int, limits: set[int | None]) -> list[tuple[int, int]]:
    """Bounds of the batches: of examples that may share one; every method's examples end at the end of a batch."""
    batches, start, total = [], 0, len(task.examples)
    keys = [task.batch_key(example) for example in task.examples]
    for stop in range(1, total + 1):
        if stop in limits or stop == total or stop - start == batch_size or keys[stop] != keys[start]:
            batches.append((start, stop))
            start = stop
    return batches


def configuration(
    task: Task,
    methods: Sequence[str | Method],
    keep_ratios: Sequence[float],
    *,
    batch_size: int,
    seeds: Sequence[int] = (0,),
    primary: tuple[str, float, str] | None = None,
) -> dict[str, Any]:
    """What the records of ``evaluate`` depend on beside the models, with the primary cell.

    Raises:
        InputError: whatever ``evaluate`` refuses without a look at a model.
    """
    methods = [_settled(method, keep_ratios, len(task.examples)) for method in methods]
    cells = [(method.label, keep_ratio) for method in methods for keep_ratio in method.keep_ratios or ()]
    wanted = {"example": task.examples, "method or keep ratio": [*cells, *task.baselines], "seed": seeds}
    for name, found in wanted.items():
        if not found:
            raise InputError(f"nothing to evaluate: no {name} given")
    if cells and not task.compresses:
        raise InputError(f"{task.evaluation} is evaluated without compression")
    check_least(1, batch_size=batch_size, **{f"{m.name}: num_examples": m.num_examples or 0 for m in methods})
    check_keep_ratios([keep_ratio for _, keep_ratio in cells])
    return {
        "evaluation": task.evaluation,
        "dataset": task.dataset,
        "num_examples": len(task.examples),
        **task.describe(),
        "manifest": manifest(task.examples),
        "baselines": [[baseline.name, baseline.keep_ratio] for baseline in task.baselines],
        "methods": [asdict(method) for method in methods],
        "primary": _primary_cell(cells, EVALUATIONS[task.evaluation], primary),
        "batch_size": batch_size,
        "seeds": list(seeds),
    }


def _primary_cell(
    cells: list[tuple[str, float]], evaluation: Evaluation, primary: tuple[str, float, str] | None
) -> dict[str, Any] | None:
    if not (primary or cells):
        return None
    method, keep_ratio, metric = primary or (*cells[0], evaluation.deciding)
    if (method, keep_ratio) not in cells:
        raise InputError(f"primary cell: {method} at keep ratio {keep_ratio:g} is not evaluated")
    if metric not in evaluation.metrics:
        raise InputError(f"primary cell: no metric {metric!r}; there are {', '.join(evaluation.metrics)}")
    return {"method": method, "keep_ratio": keep_ratio, "metric": metric} | ({"named": True} if primary else {})
