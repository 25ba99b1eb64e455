"""Evaluations by name: the files in ``kvcat.evals.evaluations``, and plug-ins."""

import dataclasses
import importlib
import pkgutil
from functools import cache
from typing import Any

from kvcat import plugins
from kvcat.errors import InputError, unknown_name
from kvcat.evals import evaluations
from kvcat.evals.evaluation import Evaluation
from kvcat.stats.metrics import METRICS, Metric, register_metrics


def evaluation_names() -> list[str]:
    """The names of all evaluations, including plug-ins; no evaluation is imported."""
    names = [*_built_in_names(), *plugins.plugin_names(plugins.EVALUATIONS)]
    return list(dict.fromkeys(names))


def find_evaluation(name: str) -> type[Evaluation]:
    """Loads an evaluation and registers its metrics.

    Raises:
        InputError: the name is unknown, or the evaluation cannot be loaded or is incomplete.
    """
    if name in _built_in_names():
        plugins.check_new_names(plugins.EVALUATIONS, {name})
        return _built_in(name)
    plugins.check_new_names(plugins.EVALUATIONS, set(_built_in_names()))
    if name not in plugins.plugin_names(plugins.EVALUATIONS):
        raise unknown_name("evaluation", name, evaluation_names())
    kind = plugins.load_plugin(plugins.EVALUATIONS, name)
    if not (isinstance(kind, type) and issubclass(kind, Evaluation)):
        raise InputError(f"plug-in {name!r} is not a subclass of Evaluation: {kind!r}")
    all_metrics()  # first, so that in a conflict the error names the plug-in
    _register_plugin(kind, f"plug-in {name!r}")
    return kind


def all_metrics() -> dict[str, Metric]:
    """``METRICS`` with the metrics of all evaluations in this package."""
    for name in _built_in_names():
        _built_in(name)
    return METRICS


def _built_in_names() -> list[str]:
    """The names of the evaluations in this package: the names of their files."""
    return [module.name for module in pkgutil.iter_modules(evaluations.__path__)]


@cache
def _built_in(name: str) -> type[Evaluation]:
    """The only public ``Evaluation`` that a file of this package defines."""
    module = importlib.import_module(f"{evaluations.__name__}.{name}")
    (kind,) = (
        member
        for member in vars(module).values()
        if isinstance(member, type)
        and issubclass(member, Evaluation)
        and member.__module__ == module.__name__
        and not member.__name__.startswith("_")
    )
    register_metrics(kind.new_metrics, f"{kind.__module__}.{kind.__qualname__}")
    return kind


def _register_plugin(kind: type[Evaluation], what: str) -> None:
    """Check the class of another package's evaluation, and add its metrics to ``METRICS``.

    Raises:
        InputError: it is not a dataclass, has no ``facts``, or names a metric that does not exist.
    """
    if "__dataclass_params__" not in vars(kind) or not dataclasses.is_dataclass(kind):
        raise InputError(
            f"{what}: {kind.__name__} needs the decorator @dataclass(frozen=True, kw_only=True)"
        )
    facts: Any = getattr(kind, "facts", None)
    if facts is None:
        raise InputError(f"{what}: {kind.__name__} has no facts for the report (ReportFacts)")
    register_metrics(kind.new_metrics, f"{kind.__module__}.{kind.__qualname__}")
    if not facts.metrics:
        raise InputError(f"{what}: the facts of {kind.__name__} name no metric")
    for metric in (*facts.metrics, *facts.plotted_metrics, *facts.step_metrics):
        if metric not in METRICS:
            raise InputError(f"{what}: no metric {metric!r}; add it to new_metrics")
