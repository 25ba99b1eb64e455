"""Evaluations by name: the files of ``kvcat.evals.evaluations``, and those of other packages."""

import dataclasses
import importlib
import pkgutil
from typing import Any

from kvcat import plugins
from kvcat.errors import InputError
from kvcat.evals import evaluations
from kvcat.evals.evaluation import Evaluation
from kvcat.evals.metrics import METRICS, Metric, register_metrics


def evaluation_names() -> list[str]:
    """The names of all evaluations, those of other packages included; none is imported."""
    names = [*_built_in_names(), *plugins.plugin_names(plugins.EVALUATIONS)]
    return list(dict.fromkeys(names))


def find_evaluation(name: str) -> type[Evaluation]:
    """The evaluation of a name; its metrics are in ``METRICS`` from then on.

    Raises:
        InputError: an unknown name, or a package whose evaluation cannot be loaded or lacks
            something.
    """
    if name in _built_in_names():
        plugins.check_new_names(plugins.EVALUATIONS, {name})
        return _built_in(name)
    plugins.check_new_names(plugins.EVALUATIONS, set(_built_in_names()))
    if name not in plugins.plugin_names(plugins.EVALUATIONS):
        raise InputError(f"no evaluation {name!r}; there are {', '.join(evaluation_names())}")
    kind = plugins.load_plugin(plugins.EVALUATIONS, name)
    if not (isinstance(kind, type) and issubclass(kind, Evaluation)):
        raise InputError(f"plug-in {name!r} is no subclass of Evaluation: {kind!r}")
    all_metrics()  # those of this package first, so that the plug-in is named in a clash
    _register(kind, f"plug-in {name!r}")
    return kind


def all_metrics() -> dict[str, Metric]:
    """``METRICS``, with the metrics of all evaluations of this package."""
    for name in _built_in_names():
        _built_in(name)
    return METRICS


def _built_in_names() -> list[str]:
    """Names of the evaluations of this package, which are those of their files."""
    return [module.name for module in pkgutil.iter_modules(evaluations.__path__)]


def _built_in(name: str) -> type[Evaluation]:
    """The one public ``Evaluation`` that a file of this package defines."""
    module = importlib.import_module(f"{evaluations.__name__}.{name}")
    (kind,) = (
        member
        for member in vars(module).values()
        if isinstance(member, type)
        and issubclass(member, Evaluation)
        and member.__module__ == module.__name__
        and not member.__name__.startswith("_")
    )
    _register(kind, f"evaluation {name!r}")
    return kind


def _register(kind: type[Evaluation], what: str) -> None:
    """Add an evaluation's metrics to ``METRICS``, and check what it says about itself.

    Raises:
        InputError: it is no dataclass, has no ``facts``, or names a metric that does not exist.
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
