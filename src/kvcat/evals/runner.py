"""The resumable loop of every evaluation over models, batches, baselines and compressors."""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from kvcat.cache import CompactCache, fingerprint
from kvcat.compress import Compressor, seeded_compressors
from kvcat.compress.calibration import budget_digests
from kvcat.errors import InputError, check_least, check_shard, unknown_name
from kvcat.evals.costs import Step, answer_speed, measure
from kvcat.evals.evaluation import ReportFacts
from kvcat.evals.records import ResultsFolder, Shard, read_costs
from kvcat.evals.registry import find_evaluation
from kvcat.evals.task import (
    Baseline,
    Method,
    Prepared,
    Task,
    Values,
    check_keep_ratios,
    manifest,
)
from kvcat.precision import tf32_facts, tf32_products
from kvcat.progress import disable_bar
from kvcat.provenance import provenance
from kvcat.stats.records import Record, method_label

_LOGGER = logging.getLogger(__name__)
Models = Mapping[str, tuple[PreTrainedModel, Any]]
"""Model and tokenizer by label."""
Primary = tuple[str, float, str]
"""The primary cell: method with its options, keep ratio and metric."""
Scores = list[tuple[Step, list[Values]]]
"""The values of every example in a batch, by step."""


@dataclass(frozen=True)
class _Job:
    """A method with one seed, or a baseline."""

    name: str
    options: Mapping[str, Any]
    keep_ratios: tuple[float, ...]
    num_examples: int  # only the first examples are scored
    seed: int | None = None
    compressor: Compressor | None = None  # None: this is a baseline
    budgets: str = ""  # content of the method's files of budgets when the run began

    def check_budgets(self) -> None:
        """Raise an ``InputError`` if a file of budgets has changed."""
        if _budgets_of_options(self.options) != self.budgets:
            raise InputError(
                f"the file of budgets of {self.name} changed during the run: results of one folder "
                "are made with one content; put the earlier file back, or choose another folder"
            )

    @property
    def last_step(self) -> Step:
        """The step in the last record of an example."""
        return None if self.compressor is None else self.compressor.last_step


@dataclass(frozen=True)
class _Batch:
    """Examples that share a trace, with the jobs that score them."""

    examples: Sequence[Any]
    jobs: list[_Job]

    @property
    def num_scores(self) -> int:
        """The number of scored examples, summed over jobs and keep ratios."""
        return len(self.examples) * sum(len(job.keep_ratios) for job in self.jobs)


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
    primary: Primary | None = None,
    speed: bool = False,
    progress: bool = True,
) -> list[Record]:
    """The records for every model, baseline, method, keep ratio, seed and example.

    They include the records of earlier runs in the folder. All methods share one trace per batch. A
    method with snapshots has one record per snapshot. After a kill, the same call computes the
    missing records and returns the same result. The costs of each method on its first batch are
    written to ``costs.jsonl``, the versions and hardware that computed records to
    ``provenance.jsonl``. On a GPU, passes of a float32 model are computed in TF32
    (``tf32_products``).

    Args:
        task: examples, and how they are scored.
        models: (model, tokenizer) by label. Labels ``LABEL@SEED`` are training runs of one variant,
            which tables combine.
        methods: names of compressors; or ``Method`` objects, for options, other keep ratios or
            fewer examples.
        keep_ratios: fractions of the slots that caches keep, each in (0, 1].
        out_dir: results folder. It holds one configuration; models may be added to it.
        batch_size: number of examples per trace, at least 1.
        seeds: seeds of randomised compressors, with one record per seed; the others run once.
        shard: (index, count): score only every count-th batch, for processes that share the folder.
        primary: the primary cell; None: the first method at its first keep ratio on the
            evaluation's first metric.
        speed: also time answers from the compact cache and from the dense cache.
        progress: show progress on standard error.

    Raises:
        InputError: there is nothing to evaluate, a value is out of range or given twice, a method
            is unknown, a model cannot run an example, the folder has another configuration, or a
            score is NaN.
    """
    plan = Plan.of(task, methods, keep_ratios, batch_size=batch_size, seeds=seeds, primary=primary)
    plan.check(models)
    return plan.run(models, out_dir, shard=shard, speed=speed, progress=progress)


@dataclass(frozen=True)
class Plan:
    """What ``evaluate`` computes for every model; made and checked before any model is loaded."""

    task: Task
    config: dict[str, Any]  # the settings on which the records depend, except models
    jobs: list[_Job]
    batch_size: int

    @classmethod
    def of(
        cls,
        task: Task,
        methods: Sequence[str | Method],
        keep_ratios: Sequence[float],
        *,
        batch_size: int = 16,
        seeds: Sequence[int] = (0,),
        primary: Primary | None = None,
    ) -> "Plan":
        """The plan for arguments of ``evaluate``.

        Raises:
            InputError: ``evaluate`` would reject an argument for a reason other than a model.
        """
        complete = [_complete(method, keep_ratios, task) for method in methods]
        config = _configuration(task, complete, batch_size=batch_size, seeds=seeds, primary=primary)
        return cls(task, config, _jobs(task, complete, seeds), batch_size)

    def check(self, models: Models) -> None:
        """Raise an ``InputError`` if there is no model, or one that cannot run the examples."""
        if not models:
            raise InputError("nothing to evaluate: no model given")
        for label, (model, tokenizer) in models.items():
            self.task.check(label, model, tokenizer)

    def run(
        self,
        models: Models,
        out_dir: Path,
        *,
        shard: Shard = (0, 1),
        speed: bool = False,
        progress: bool = True,
    ) -> list[Record]:
        """The records, computed where the folder lacks them (``evaluate``); ``check`` comes first.

        Raises:
            InputError: there is no such shard, the folder has another configuration, or a score is
                NaN.
        """
        index, count = shard
        check_shard(index, count)
        batches = _batches(self.task, self.jobs, self.batch_size)[index::count]
        num_scores = len(models) * sum(batch.num_scores for batch in batches)
        begun = time.monotonic()
        with (
            ResultsFolder(out_dir, self.config, shard=shard) as folder,
            progress_bar(num_scores, self.task.evaluation, shown=progress) as bar,
        ):
            runs = []
            for label, (model, tokenizer) in models.items():
                run = _Run(self.task, label, model, tokenizer, folder=folder, bar=bar, speed=speed)
                runs.append(run)
            folder.check_models({run.label: run.weights for run in runs})
            if speed and batches:
                for run in runs:
                    run.warn_of_untimed(batches)
            # a call that computes nothing is not among the sources of the records
            is_complete = all(run.has_scored(batch) for run in runs for batch in batches)
            if not is_complete:
                precisions = [tf32_facts(next(run.model.parameters())) for run in runs]
                facts = {**provenance(), **max(precisions, key=len)}
                folder.append_event({"event": "start", **facts})
            for run in runs:
                for batch in batches:
                    run.score_missing(batch)
            if not is_complete:
                seconds = round(time.monotonic() - begun, 1)
                folder.append_event({"event": "end", "seconds": seconds})
            return folder.records


@dataclass
class _Run:
    """The state of the evaluation of one model."""

    task: Task
    label: str
    model: PreTrainedModel
    tokenizer: Any
    folder: ResultsFolder
    bar: tqdm
    speed: bool
    fingerprint: str = field(init=False)
    dtype: str = field(init=False)
    device: torch.device = field(init=False)
    measured: list[_Job] = field(default_factory=list, init=False)  # jobs whose costs are known

    def __post_init__(self) -> None:
        self.fingerprint = fingerprint(self.model)
        parameter = next(self.model.parameters())
        self.dtype = str(parameter.dtype).removeprefix("torch.")
        self.device = parameter.device

    @property
    def weights(self) -> dict[str, str]:
        """The fingerprint and dtype of the model's weights."""
        return {"fingerprint": self.fingerprint, "dtype": self.dtype}

    def has_scored(self, batch: _Batch) -> bool:
        """Whether the folder has all records of a batch."""
        return all(self._has_scored(job, batch) for job in batch.jobs)

    def _has_scored(self, job: _Job, batch: _Batch) -> bool:
        """Whether the folder has all records of a method for a batch."""
        return all(self._is_done(job, keep, batch.examples) for keep in job.keep_ratios)

    def warn_of_untimed(self, batches: Sequence[_Batch]) -> None:
        """Warn of methods that will not be timed, since the folder has all their records."""
        timed = [
            (cost["model"], method_label(cost["method"], cost["options"]))
            for cost in read_costs(self.folder.path)
            if "tokens_per_s" in cost
        ]
        missing = [
            job for batch in batches for job in batch.jobs if not self._has_scored(job, batch)
        ]
        for job in batches[0].jobs:  # all methods score the first examples
            is_timed = (self.label, method_label(job.name, job.options)) in timed
            if job.compressor is not None and job not in missing and not is_timed:
                _LOGGER.warning(
                    "the speed of answers with %s on %r is not measured: %s has its scores already",
                    job.name,
                    self.label,
                    self.folder.path,
                )

    def score_missing(self, batch: _Batch) -> None:
        """Compute and write the records of a batch that the folder lacks."""
        examples = batch.examples
        prepared = None
        for job in batch.jobs:
            missing = [keep for keep in job.keep_ratios if not self._is_done(job, keep, examples)]
            self.bar.update(len(examples) * (len(job.keep_ratios) - len(missing)))
            if not missing:
                continue
            if prepared is None:
                prepared = self.task.prepare(self.model, self.tokenizer, examples)
            all_scores = self._scores(job, missing, prepared)
            for keep_ratio, scores in zip(missing, all_scores, strict=True):
                job.check_budgets()
                self.folder.append(
                    self._record(job, keep_ratio, step, example, values[row])
                    for row, example in enumerate(examples)
                    for step, values in scores
                )
                place = f"{self.label}: {job.name} keep {keep_ratio:g}"
                self.bar.set_postfix_str(place, refresh=False)
                self.bar.update(len(examples))

    def _is_done(self, job: _Job, keep_ratio: float, examples: Sequence[Any]) -> bool:
        """Whether all records exist; the last step of an example is written last."""
        for example in examples:
            record = self._record(job, keep_ratio, job.last_step, example, {})
            if not self.folder.done(record.key):
                return False
        return True

    def _record(
        self, job: _Job, keep_ratio: float, step: Step, example: Any, values: Values
    ) -> Record:
        return Record(
            model=self.label,
            fingerprint=self.fingerprint,
            dtype=self.dtype,
            method=job.name,
            options=json.dumps(dict(job.options), sort_keys=True),
            keep_ratio=keep_ratio,
            step=step,
            seed=job.seed,
            dataset=self.task.dataset,
            stratum=example.stratum,
            document=example.document,
            example=example.name,
            values=values,
        )

    def _scores(
        self, job: _Job, keep_ratios: Sequence[float], prepared: Prepared
    ) -> Iterator[Scores]:
        """Scores for each keep ratio; on a job's first batch, each keep ratio is also measured."""
        compressor = job.compressor
        if compressor is None:
            with tf32_products(self.device):
                values = prepared.baseline(Baseline(job.name, keep_ratios[0]))
            yield [(None, values)]
            return
        with tf32_products(self.device):  # it is made when it is first asked for
            trace = prepared.trace
        if job in self.measured:
            for snapshots in compressor.each_snapshots(trace, keep_ratios):
                yield [(step, self._score(prepared, cache)) for step, cache in snapshots]
        else:
            if not self.measured:  # the first run in a process is slower
                next(compressor.snapshots(trace, keep_ratio=keep_ratios[0]))
            self.measured.append(job)
            for keep_ratio in keep_ratios:
                yield self._measured_scores(job, compressor, keep_ratio, prepared)

    def _score(self, prepared: Prepared, cache: CompactCache) -> list[Values]:
        """The values of each example; the methods themselves compute without TF32."""
        with tf32_products(self.device):
            return prepared.score(cache)

    def _measured_scores(
        self, job: _Job, compressor: Compressor, keep_ratio: float, prepared: Prepared
    ) -> Scores:
        """Scores by step; seconds, memory and bytes are written to the folder."""
        trace = prepared.trace

        def use(cache: CompactCache) -> tuple[list[Values], dict[str, float]]:
            values = self._score(prepared, cache)
            with tf32_products(self.device):
                return values, answer_speed(trace, cache) if self.speed else {}

        measured = measure(
            lambda: compressor.snapshots(trace, keep_ratio=keep_ratio),
            use,
            cuda=trace.input_ids.device.type == "cuda",
        )
        job_facts = {
            "model": self.label,
            "method": job.name,
            "options": dict(job.options),
            "keep_ratio": keep_ratio,
            "seed": job.seed,
            "dataset": self.task.dataset,
            "examples": len(prepared.batch),
            "tokens": trace.prefix_len,
            "dense_bytes": trace.dense_cache().nbytes,
        }
        if self.speed and not all(speed for _, (_, speed) in measured):
            place = f"{job.name} at keep ratio {keep_ratio:g}"
            _LOGGER.warning("%s: an answer would exceed the model's positions: not timed", place)
        self.folder.append_cost(*({**job_facts, **cost, **speed} for cost, (_, speed) in measured))
        return [(cost["step"], scores) for cost, (scores, _) in measured]


def progress_bar(total: int, name: str, *, shown: bool = True) -> tqdm:
    """A progress bar on standard error, or a line every ten seconds if that is not a terminal."""
    seconds = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        total=total, desc=name, disable=disable_bar(not shown), mininterval=seconds, file=sys.stderr
    )


def _configuration(
    task: Task,
    methods: Sequence[Method],
    *,
    batch_size: int,
    seeds: Sequence[int],
    primary: Primary | None,
) -> dict[str, Any]:
    """The settings on which the records depend, except models; with the primary cell."""
    cells = []
    least_counts = {"batch_size": batch_size}
    for method in methods:
        cells += [(method.label, keep_ratio) for keep_ratio in method.keep_ratios or ()]
        least_counts[f"{method.name}: num_examples"] = method.num_examples or 0
    for name, values in (
        ("example", task.examples),
        ("method or keep ratio", [*cells, *task.baselines]),
        ("seed", seeds),
    ):
        if not values:
            raise InputError(f"nothing to evaluate: no {name} given")
    for (method, keep_ratio), count in Counter(cells).items():
        if count > 1:
            raise InputError(f"{method} at keep ratio {keep_ratio:g} is given {count} times")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"a seed is given twice: {', '.join(map(str, seeds))}")
    if cells and not task.compresses:
        raise InputError(f"{task.evaluation} is evaluated without compression")
    check_least(1, **least_counts)
    _check_names(task.examples)
    check_keep_ratios([keep_ratio for _, keep_ratio in cells])
    return {
        "evaluation": task.evaluation,
        "dataset": task.dataset,
        "num_examples": len(task.examples),
        **task.describe(),
        "manifest": manifest(task.examples),
        "baselines": [[baseline.name, baseline.keep_ratio] for baseline in task.baselines],
        "methods": [asdict(method) for method in methods],
        **_budgets(methods),
        "primary": _primary_cell(cells, find_evaluation(task.evaluation).facts, primary),
        "batch_size": batch_size,
        "seeds": list(seeds),
    }


def _check_names(examples: Sequence[Any]) -> None:
    """``InputError`` for examples whose records could not be distinguished, or not be reported."""
    stratum_of: dict[str, str] = {}
    for (document, name), count in Counter((each.document, each.name) for each in examples).items():
        if count > 1:
            raise InputError(
                f"{count} examples of document {document!r} are called {name!r}: their records "
                "could not be distinguished"
            )
    for example in examples:
        first = stratum_of.setdefault(example.document, example.stratum)
        if first != example.stratum:
            raise InputError(
                f"document {example.document!r} lies in two strata, {first!r} and "
                f"{example.stratum!r}"
            )


def _budgets(methods: Sequence[Method]) -> dict[str, dict[str, str]]:
    """The content of the methods' files of budgets, by label; empty without such files."""
    digests = {}
    for method in methods:
        of_method = _budgets_of_options(method.options)
        if of_method:
            digests[method.label] = of_method
    return {"budgets": digests} if digests else {}


def _budgets_of_options(options: Mapping[str, Any]) -> str:
    """The content of the files of budgets in a method's options; empty without such files."""
    texts = [f"{name}={value}" for name, value in options.items()]
    return ", ".join(digest for digest in map(budget_digests, texts) if digest)


def _complete(method: str | Method, keep_ratios: Sequence[float], task: Task) -> Method:
    """The method with its keep ratios and its number of examples."""
    if isinstance(method, str):
        method = Method(method)
    if method.keep_ratios is not None:
        keep_ratios = method.keep_ratios
    num_examples = len(task.examples)
    if method.num_examples is not None:
        num_examples = min(method.num_examples, num_examples)
    ratios = tuple(float(keep_ratio) for keep_ratio in keep_ratios)
    return replace(method, keep_ratios=ratios, num_examples=num_examples)


def _jobs(task: Task, methods: Sequence[Method], seeds: Sequence[int]) -> list[_Job]:
    """The baselines, then every complete method with each of its seeds."""
    num_examples = len(task.examples)
    jobs = [
        _Job(baseline.name, {}, (baseline.keep_ratio,), num_examples) for baseline in task.baselines
    ]
    for method in methods:
        for seed, compressor in seeded_compressors(method.name, method.options, seeds):
            job = _Job(
                name=method.name,
                options=method.options,
                keep_ratios=method.keep_ratios or (),
                num_examples=method.num_examples or 0,
                seed=seed,
                compressor=compressor,
                budgets=_budgets_of_options(method.options),
            )
            jobs.append(job)
    return jobs


def _batches(task: Task, jobs: Sequence[_Job], batch_size: int) -> list[_Batch]:
    """Batches of examples with equal keys; a batch ends where a job's examples end."""
    examples = task.examples
    keys = [task.batch_key(example) for example in examples]
    limits = {job.num_examples for job in jobs} | {len(examples)}
    batches = []
    start = 0
    for stop in range(1, len(examples) + 1):
        is_full = stop - start == batch_size
        if stop in limits or is_full or keys[stop] != keys[start]:
            batch_jobs = [job for job in jobs if start < job.num_examples]
            batches.append(_Batch(examples[start:stop], batch_jobs))
            start = stop
    return batches


def _primary_cell(
    cells: list[tuple[str, float]], facts: ReportFacts, primary: Primary | None
) -> dict[str, Any] | None:
    """The primary cell; None if nothing is compressed and no cell is named."""
    if primary is None and not cells:
        return None
    method, keep_ratio, metric = primary or (*cells[0], facts.deciding)
    if (method, keep_ratio) not in cells:
        raise InputError(f"primary cell: {method} at keep ratio {keep_ratio:g} is not evaluated")
    if metric not in facts.metrics:
        raise unknown_name("metric of the primary cell", metric, facts.metrics)
    cell = {"method": method, "keep_ratio": keep_ratio, "metric": metric}
    if primary is not None:
        cell["named"] = True
    return cell
