"""The one loop behind every evaluation: models, batches, baselines, compressors; records that survive a kill."""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvcat.cache import CompactCache, fingerprint
from kvcat.compress import Compressor, Trace, seeded_compressor, takes_seed
from kvcat.errors import InputError
from kvcat.evals.costs import Meter, answer_speed, metered
from kvcat.evals.progress import EvalProgress
from kvcat.evals.provenance import provenance
from kvcat.evals.records import Record, ResultsFolder, Shard
from kvcat.evals.task import Baseline, Example, Prepared, Task, Values

ModelSource = tuple[PreTrainedModel, Any] | Callable[[], tuple[PreTrainedModel, Any]]
_PROMPT, _ANSWER = 32, 16


@dataclass(frozen=True)
class Method:
    """A compressor to evaluate, and on how much.

    Args:
        name: of the compressor, e.g. ``attention-matching``.
        options: of the compressor where they differ from its defaults, JSON values.
        keep_ratios: those of this method, each in (0, 1]; None takes the evaluation's.
        num_examples: only the first examples; None takes all.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    keep_ratios: tuple[float, ...] | None = None
    num_examples: int | None = None


@dataclass(frozen=True)
class _Job:
    """One method at one keep ratio and seed, with its last step if it has steps, and the examples it covers."""

    method: Method
    compressor: Compressor
    keep_ratio: float
    last_step: int | None
    num_examples: int
    seed: int | None

    def caches(self, traced: Trace) -> Iterator[tuple[int | None, CompactCache]]:
        if self.last_step is None:
            yield None, self.compressor(traced, keep_ratio=self.keep_ratio)
        else:
            yield from self.compressor.snapshots(traced, keep_ratio=self.keep_ratio)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Subject:
    """A loaded model with what its records say of it."""

    label: str
    model: PreTrainedModel
    tokenizer: Any
    fingerprint: str
    dtype: str
    dataset: str

    def record(self, work: _Job | Baseline, step: int | None, example: Example, values: Values) -> Record:
        if isinstance(work, Baseline):
            method, options, seed = work.name, "{}", None
        else:
            method, seed = work.method.name, work.seed
            options = json.dumps(dict(work.method.options), sort_keys=True)
        return Record(
            self.label, self.fingerprint, self.dtype, method, options, work.keep_ratio, step, seed, self.dataset,
            example.stratum, example.document, example.name, values,
        )  # fmt: skip

    def is_done(self, folder: ResultsFolder, work: _Job | Baseline, batch: Sequence[Example]) -> bool:
        """An example's last step is written after its others, so its record stands for them."""
        last = None if isinstance(work, Baseline) else work.last_step
        return all(folder.done(self.record(work, last, example, {}).key) for example in batch)


def evaluate(
    task: Task,
    models: Mapping[str, ModelSource],
    methods: Sequence[str | Method],
    keep_ratios: Sequence[float],
    out_dir: Path,
    *,
    batch_size: int = 16,
    seeds: Sequence[int] = (0,),
    shard: Shard = (0, 1),
    speed: bool = False,
    progress: bool = True,
) -> list[Record]:
    """Records of every model, baseline, method, keep ratio, seed and example, also those of earlier runs.

    One trace per batch serves all methods. A method with snapshots gives one record per snapshot. Batches are written
    as they finish; the same call after a kill does what is missing and ends with the same records. Seconds, memory and
    bytes of a first batch stand in ``costs.jsonl``, versions and hardware in ``provenance.jsonl``.

    Args:
        task: the examples and how they are scored.
        models: label to (model, tokenizer), or to a function that loads them, called when their turn comes.
        methods: names of compressors, or ``Method`` for options, own keep ratios or fewer examples.
        keep_ratios: fractions kept, each in (0, 1].
        out_dir: the results folder; one configuration per folder, to which models may be added.
        batch_size: examples per trace, at least 1.
        seeds: of the compressors that draw; one record per seed.
        shard: (index, count): every count-th batch alone, for processes that share the folder.
        speed: also time answers from the compact and from the dense cache, once per model, method and keep ratio.
        progress: show progress on standard error.

    Raises:
        InputError: nothing to evaluate, a value out of range, an unknown method, examples that a model cannot run,
            tokenizers that differ, a folder of another configuration.
    """
    count = len(task.examples)
    plan = [job for method in methods for job in _jobs(method, keep_ratios, count, seeds)]
    _check_request(task, models, plan, batch_size, seeds, shard)
    vocabularies: dict[str, str] = {}
    for label, source in models.items():
        if not callable(source):
            _check_model(task, label, *source, vocabularies)
    config = _config(task, plan, batch_size, seeds)
    batches = _batches(task, batch_size, {job.num_examples for job in plan})[shard[0] :: shard[1]]
    total = len(models) * sum(_work(task, plan, start, stop)[1] for start, stop in batches)
    begun = time.monotonic()
    seconds: dict[str, float] = defaultdict(float)
    with (
        ResultsFolder(out_dir, config, shard=shard) as folder,
        EvalProgress(total, shown=progress, name=task.evaluation) as bar,
    ):
        _log(out_dir, {"event": "start", **provenance()})
        for label, source in models.items():
            model, tokenizer = source() if callable(source) else source
            _check_model(task, label, model, tokenizer, vocabularies)
            dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
            subject = _Subject(label, model, tokenizer, fingerprint(model), dtype, task.dataset)
            folder.check_model(label, subject.fingerprint, subject.dtype)
            run = _Run(subject, task, folder, bar, seconds, speed)
            for start, stop in batches:
                run.batch(task.examples[start:stop], _work(task, plan, start, stop)[0])
        by_method = {name: round(spent, 2) for name, spent in seconds.items()}
        _log(out_dir, {"event": "end", "seconds": round(time.monotonic() - begun, 1), "seconds_by_method": by_method})
        return folder.records


@dataclass(frozen=True)
class _Run:
    """One model's part of an evaluation; ``measured`` holds the jobs whose costs are known."""

    subject: _Subject
    task: Task
    folder: ResultsFolder
    bar: EvalProgress
    seconds: dict[str, float]
    speed: bool
    measured: set[int] = field(default_factory=set)

    def batch(self, batch: Sequence[Example], work: Sequence[_Job | Baseline]) -> None:
        """Do what is missing of a batch."""
        missing = [part for part in work if not self.subject.is_done(self.folder, part, batch)]
        self.bar.advance(len(batch) * (len(work) - len(missing)), f"{self.subject.label}: found on disk")
        if not missing:
            return
        prepared = self.task.prepare(self.subject.model, self.subject.tokenizer, batch)
        for part in missing:
            begun = time.monotonic()
            name = part.name if isinstance(part, Baseline) else part.method.name
            if isinstance(part, Baseline):
                self._write(part, batch, [(None, prepared.baseline(part))])
            else:
                self._compress(part, batch, prepared)
            self.seconds[name] += time.monotonic() - begun
            self.bar.advance(len(batch), f"{self.subject.label}: {name} keep {part.keep_ratio:g}")

    def _compress(self, job: _Job, batch: Sequence[Example], prepared: Prepared) -> None:
        """Caches and their scores; on a job's first batch also what they cost, sharing no work with other jobs."""
        traced, first = prepared.trace, id(job) not in self.measured
        meter, found, costs = Meter(traced.input_ids.device), [], []
        for step, cache in metered(job.caches(traced), meter):
            found.append((step, prepared.score(cache)))
            if first:
                cost = {"step": step, "seconds": meter.seconds, "peak_mib": meter.peak_mib, "bytes": cache.nbytes}
                costs.append(cost | (self._speed(traced, cache) if step == job.last_step else {}))
        about = {
            "model": self.subject.label, "method": job.method.name, "options": dict(job.method.options),
            "keep_ratio": job.keep_ratio, "seed": job.seed, "dataset": self.subject.dataset, "examples": len(batch),
            "tokens": traced.prefix_len, "dense_bytes": traced.dense_cache().nbytes,
        }  # fmt: skip
        for cost in costs:
            self.folder.append_cost({**about, **cost})
        self.measured.add(id(job))
        self._write(job, batch, found)

    def _speed(self, traced: Trace, cache: CompactCache) -> dict[str, float]:
        positions = getattr(self.subject.model.config.get_text_config(), "max_position_embeddings", None)
        last = traced.prefix_len + _PROMPT + _ANSWER
        if not self.speed or (positions is not None and last > positions):
            return {}
        model, prompt = self.subject.model, traced.input_ids[:1, :_PROMPT]
        caches = traced.dense_cache().select([0]), cache.select([0])
        if not self.measured:
            answer_speed(model, caches[0], prompt, num_tokens=_ANSWER)  # the first answer of all pays for set-up
        dense, compact = (answer_speed(model, own, prompt, num_tokens=_ANSWER) for own in caches)
        return {**compact, **{f"{name}_dense": value for name, value in dense.items()}}

    def _write(
        self, work: _Job | Baseline, batch: Sequence[Example], found: Sequence[tuple[int | None, list[Values]]]
    ) -> None:
        self.folder.append(
            self.subject.record(work, step, example, values[row])
            for row, example in enumerate(batch)
            for step, values in found
        )


def manifest(examples: Sequence[Any]) -> str:
    """A hash of everything that examples hold, so that a folder is about these and no others."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(sorted(vars(example).items()), default=str).encode() + b"\n")
    return digest.hexdigest()


def _jobs(method: str | Method, keep_ratios: Sequence[float], count: int, seeds: Sequence[int]) -> list[_Job]:
    method = Method(method) if isinstance(method, str) else method
    if method.num_examples is not None and method.num_examples < 1:
        raise InputError(f"{method.name}: num_examples is {method.num_examples}; it must be at least 1")
    ratios = keep_ratios if method.keep_ratios is None else method.keep_ratios
    jobs = []
    for ratio in ratios:
        for seed in seeds if takes_seed(method.name, method.options) else [None]:
            compressor = seeded_compressor(method.name, method.options, seed or 0)
            last_step = compressor.num_steps if hasattr(compressor, "snapshots") else None  # type: ignore[attr-defined]
            covered = min(method.num_examples or count, count)
            jobs.append(_Job(method, compressor, float(ratio), last_step, covered, seed))
    return jobs


def _work(task: Task, plan: Sequence[_Job], start: int, stop: int) -> tuple[list[_Job | Baseline], int]:
    """What is done on a batch, and how many records' worth of progress that is."""
    work = [*task.baselines, *(job for job in plan if start < job.num_examples)]
    return work, len(work) * (stop - start)


def _batches(task: Task, batch_size: int, limits: set[int]) -> list[tuple[int, int]]:
    """Bounds of the batches: of examples that may share one; every method's examples end at the end of a batch."""
    batches, start, total = [], 0, len(task.examples)
    keys = [task.batch_key(example) for example in task.examples]
    for stop in range(1, total + 1):
        if stop in limits or stop == total or stop - start == batch_size or keys[stop] != keys[start]:
            batches.append((start, stop))
            start = stop
    return batches


def _config(task: Task, plan: Sequence[_Job], batch_size: int, seeds: Sequence[int]) -> dict[str, Any]:
    methods: dict[str, dict[str, Any]] = {}
    for job in plan:
        key = json.dumps([job.method.name, dict(job.method.options)], sort_keys=True)
        entry = {"name": job.method.name, "options": dict(job.method.options), "num_examples": job.num_examples}
        ratios = methods.setdefault(key, {**entry, "keep_ratios": []})["keep_ratios"]
        if job.keep_ratio not in ratios:
            ratios.append(job.keep_ratio)
    return {
        "evaluation": task.evaluation,
        "dataset": task.dataset,
        "num_examples": len(task.examples),
        **task.describe(),
        "baselines": [[baseline.name, baseline.keep_ratio] for baseline in task.baselines],
        "methods": list(methods.values()),
        "batch_size": batch_size,
        "seeds": list(seeds),
    }


def _check_request(
    task: Task,
    models: Mapping[str, ModelSource],
    plan: Sequence[_Job],
    batch_size: int,
    seeds: Sequence[int],
    shard: Shard,
) -> None:
    wanted = [*plan, *task.baselines]
    for name, found in [("model", models), ("example", task.examples), ("method or keep ratio", wanted)]:
        if not found:
            raise InputError(f"nothing to evaluate: no {name} given")
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; it must be at least 1")
    if not 0 <= shard[0] < shard[1]:
        raise InputError(f"shard {shard[0]} of {shard[1]} does not exist; the first is 0, the last {shard[1] - 1}")
    if len(set(seeds)) < len(seeds) or not seeds:
        raise InputError(f"seeds are {list(seeds)}; give at least one, and each once")
    for job in plan:
        if not 0.0 < job.keep_ratio <= 1.0:
            raise InputError(f"keep ratio {job.keep_ratio:g} is outside (0, 1]")
    jobs = [(job.method.name, json.dumps(dict(job.method.options), sort_keys=True), job.keep_ratio, job.seed)
            for job in plan]  # fmt: skip
    if len(set(jobs)) < len(jobs):
        name, _, keep, _ = next(job for job in jobs if jobs.count(job) > 1)
        raise InputError(f"{name} at keep ratio {keep:g} is asked for twice")
    names = [(example.document, example.name) for example in task.examples]
    if len(set(names)) < len(names):
        raise InputError("two examples share document and name")


def _check_model(task: Task, label: str, model: PreTrainedModel, tokenizer: Any, vocabularies: dict[str, str]) -> None:
    task.check(label, model, tokenizer)
    if tokenizer is None or not task.tokenized:
        return
    words = json.dumps(sorted(tokenizer.get_vocab().items()))
    vocabularies[label] = hashlib.sha256(words.encode()).hexdigest()
    first = next(iter(vocabularies))
    if vocabularies[first] != vocabularies[label]:
        raise InputError(f"models {first!r} and {label!r} have different tokenizers: their examples differ")


def _log(out_dir: Path, event: dict[str, Any]) -> None:
    log = out_dir / "provenance.jsonl"
    torn = log.exists() and not log.read_bytes().endswith(b"\n")
    with log.open("a", encoding="utf-8") as stream:
        stream.write("\n" * torn + json.dumps(event) + "\n")
