"""The whole experiment: networks trained with and without the masked objective, measured beside the constructions."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch

from kvcat.cache.storage import write_whole
from kvcat.errors import InputError
from kvcat.evals.progress import EvalProgress
from kvcat.locking import FolderLock
from kvcat.recipes.histogram import HistogramConfig, make_network, train_histogram
from kvcat.recipes.histogram_measure import Compressibility, SearchOptions, measure_histogram
from kvcat.theory.definitions import Transformer

Row = dict[str, Any]
"""A line of a table: ``model``, ``seed`` and figures by name."""

PLAN = "experiment.json"


def method_variants(
    base: HistogramConfig, methods: Sequence[str] = ("usual", "router"), *, fewer_steps: int | None = None
) -> dict[str, HistogramConfig]:
    """Every method with uniform attention behind a block that does not mix, and with trained attention throughout.

    The first is the architecture of the paper's constructions, where the keys of a cache have no effect. A policy of
    its first block would have none either, so there is one for the second block alone.

    Args:
        base: everything else.
        methods: of ``METHODS``.
        fewer_steps: adds the usual training stopped early, a control whose task error can be that of the masked
            objective, which costs some; None for none.
    """
    constructions = {"uniform": True, "mixing": False, "group_starts": (1,)}
    trained = {"uniform": False, "mixing": True, "group_starts": (0, 1)}
    variants: dict[str, HistogramConfig] = {}
    for name, changes in (("uniform", constructions), ("trained", trained)):
        for method in methods:
            variants[f"{method}, {name} attention"] = dataclasses.replace(base, method=method, **changes)
        if fewer_steps is not None:
            stopped = dataclasses.replace(base, method="usual", num_steps=fewer_steps, **changes)
            variants[f"usual, {fewer_steps} steps, {name} attention"] = stopped
    return variants


def _default_variants() -> dict[str, HistogramConfig]:
    return method_variants(HistogramConfig(), fewer_steps=400)


@dataclass(frozen=True)
class HistogramExperiment:
    """What is trained and how it is measured.

    Args:
        variants: configurations by name; their seed is replaced by each of ``seeds``.
        seeds: of weights, data and masks.
        prefix_len: n of the measured prefixes.
        slots: r, each in 1 to n; None for all.
        num_prefixes: count vectors that are looked at; None for all.
        search: effort of the search for the best cache.
    """

    variants: Mapping[str, HistogramConfig] = field(default_factory=_default_variants)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    prefix_len: int = 5
    slots: tuple[int, ...] | None = None
    num_prefixes: int | None = 9
    search: SearchOptions = field(default_factory=SearchOptions)

    def __post_init__(self) -> None:
        tasks = {(c.num_symbols, c.longest) for c in self.variants.values()}
        if len(tasks) != 1:
            raise InputError(
                f"the variants of an experiment need one number of symbols and length, got {sorted(tasks)}"
            )
        if not 1 <= self.prefix_len < self.longest:
            raise InputError(f"prefixes must have 1 to {self.longest - 1} symbols, got {self.prefix_len}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise InputError(f"seeds must be different and at least one, got {self.seeds}")
        if not all(1 <= r <= self.prefix_len for r in self.budgets):
            raise InputError(f"slots must lie in 1 to {self.prefix_len}, got {self.budgets}")

    @property
    def num_symbols(self) -> int:
        """Size m of the alphabet."""
        return next(iter(self.variants.values())).num_symbols

    @property
    def longest(self) -> int:
        """Longest sequences, N symbols."""
        return next(iter(self.variants.values())).longest

    @property
    def budgets(self) -> list[int]:
        """Numbers of slots r that are measured."""
        return list(range(1, self.prefix_len + 1)) if self.slots is None else list(self.slots)


def quick_experiment() -> HistogramExperiment:
    """Seconds instead of minutes: shows that everything runs, not what training finds."""
    base = HistogramConfig(longest=6, hidden_width=16, width=8, key_width=4, num_steps=120, batch_size=32)
    return HistogramExperiment(
        method_variants(base),
        seeds=(0, 1),
        prefix_len=3,
        num_prefixes=4,
        search=SearchOptions(num_steps=40, num_restarts=2),
    )


def run_histogram_experiment(experiment: HistogramExperiment, folder: Path, *, progress: bool = True) -> list[Row]:
    """Train and measure every variant with every seed; returns ``rows`` of all of them.

    Each network's figures are a JSON file in the folder, its weights a safetensors file beside it, both written whole
    or not at all. What is there is not done again: a run that was stopped continues, a second run only reads.

    Args:
        experiment: what to do.
        folder: made if absent.
        progress: show a bar.

    Raises:
        InputError: the folder holds another experiment, or another process is writing to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder):
        _claim(experiment, folder)
        jobs = [(name, seed) for seed in experiment.seeds for name in experiment.variants]
        steps = 1 + len(experiment.budgets)
        with EvalProgress(len(jobs) * steps, shown=progress, name="histogram") as bar:
            for name, seed in jobs:
                if _result_path(experiment, folder, name, seed).exists():
                    bar.advance(steps, f"{name}, seed {seed}: there already")
                else:
                    _run_one(experiment, folder, name, seed, bar)
    return read_rows(experiment, folder)


def _run_one(experiment: HistogramExperiment, folder: Path, name: str, seed: int, bar: EvalProgress) -> None:
    trained = train_histogram(dataclasses.replace(experiment.variants[name], seed=seed))
    label = f"{name}, seed {seed}"
    bar.advance(1, f"{label}: trained")
    measured = measure_histogram(
        trained.model,
        prefix_len=experiment.prefix_len,
        slots=experiment.budgets,
        num_prefixes=experiment.num_prefixes,
        search=experiment.search,
        done=lambda what: bar.advance(1, f"{label}: {what}"),
    )
    record = {
        "model": name,
        "seed": seed,
        "task_rms": trained.rms_error,
        "task_max": trained.max_error,
        "masked_rms": trained.masked_rms,
        "kept": list(trained.kept),
        "compressibility": [asdict(row) for row in measured],
    }
    path = _result_path(experiment, folder, name, seed)
    write_whole(path.with_suffix(".safetensors"), safetensors.torch.save(trained.parameters))
    write_whole(path, _json(record))  # last: its presence says that the seed is finished


def load_histogram(experiment: HistogramExperiment, folder: Path, name: str, seed: int) -> Transformer:
    """A trained network of a finished experiment.

    Raises:
        InputError: it has not been trained there.
    """
    path = _result_path(experiment, folder, name, seed).with_suffix(".safetensors")
    if not path.exists():
        raise InputError(f"{folder} has no network {name!r} of seed {seed}")
    network = make_network(experiment.variants[name])
    network.load_state_dict(safetensors.torch.load_file(path))
    return network.requires_grad_(False).transformer()


def read_rows(experiment: HistogramExperiment, folder: Path) -> list[Row]:
    """One row for every network, seed and number of slots that is finished.

    Columns: model, seed, prefix_len, num_slots, max_error and mean_error (over prefixes, of the worst error over
    suffixes), worst_prefix, task_rms and task_max (of the network without compression), masked_rms, kept (fractions of
    the groups, separated by spaces).
    """
    rows: list[Row] = []
    for name in experiment.variants:
        for seed in experiment.seeds:
            path = _result_path(experiment, folder, name, seed)
            if path.exists():
                record = json.loads(path.read_text())
                shared = {key: record[key] for key in ("task_rms", "task_max", "masked_rms")}
                shared["kept"] = " ".join(f"{share:.4f}" for share in record["kept"])
                for measured in record["compressibility"]:
                    measured["worst_prefix"] = tuple(measured["worst_prefix"])
                    rows.append(Compressibility(**measured).as_row(name, seed) | shared)
    return rows


def _result_path(experiment: HistogramExperiment, folder: Path, name: str, seed: int) -> Path:
    return folder / f"{list(experiment.variants).index(name)}-seed{seed}.json"


def _json(values: Any) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _claim(experiment: HistogramExperiment, folder: Path) -> None:
    """Write what the folder is for, or check that it is for this; more seeds may join."""
    plan = json.loads(json.dumps(asdict(experiment)))
    del plan["seeds"]
    for variant in plan["variants"].values():
        del variant["seed"]
    path = folder / PLAN
    if not path.exists():
        write_whole(path, _json(plan))
    elif json.loads(path.read_text()) != plan:
        raise InputError(f"{folder} holds an experiment with other settings: choose another folder")
