"""Transformers with compressible KV caches: training (KV-CAT), compression, measurement of both.

Names are imported on first use, so that ``import kvcat`` and ``kvcat --help`` stay fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from kvcat.extras import missing_package

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvcat import (
        attention,
        cache,
        compress,
        corpus,
        data,
        evals,
        losses,
        models,
        policies,
        recipes,
        report,
        serving,
        theory,
        training,
    )
    from kvcat.cache import CompactCache
    from kvcat.compress import (
        AttentionMatching,
        Eviction,
        GradientCompression,
        Session,
        Trace,
        append,
        compare,
        compose,
        compress_document,
        document_trace,
        question_ids,
        reconstruction,
        replay,
        trace,
    )
    from kvcat.corpus import Store
    from kvcat.errors import InputError
    from kvcat.models import load
    from kvcat.settings import DocumentSettings
    from kvcat.training import TrainConfig
    from kvcat.training.loop import train

__all__ = [
    "AttentionMatching",
    "CompactCache",
    "DocumentSettings",
    "Eviction",
    "GradientCompression",
    "InputError",
    "Session",
    "Store",
    "Trace",
    "TrainConfig",
    "append",
    "attention",
    "cache",
    "compare",
    "compose",
    "compress",
    "compress_document",
    "corpus",
    "data",
    "document_trace",
    "evals",
    "load",
    "losses",
    "models",
    "policies",
    "question_ids",
    "recipes",
    "reconstruction",
    "replay",
    "report",
    "serving",
    "theory",
    "trace",
    "train",
    "training",
]
_HOME = {
    "AttentionMatching": "compress",
    "CompactCache": "cache",
    "DocumentSettings": "settings",
    "Eviction": "compress",
    "GradientCompression": "compress",
    "InputError": "errors",
    "Session": "compress",
    "Store": "corpus",
    "Trace": "compress",
    "TrainConfig": "training",
    "append": "compress",
    "compare": "compress",
    "compose": "compress",
    "compress_document": "compress",
    "document_trace": "compress",
    "load": "models",
    "question_ids": "compress",
    "reconstruction": "compress",
    "replay": "compress",
    "trace": "compress",
    "train": "training.loop",
}
"""The module of every name that is not a module itself."""


def __getattr__(name: str) -> Any:
    try:
        if name in _HOME:
            return getattr(importlib.import_module(f"kvcat.{_HOME[name]}"), name)
        if name in __all__:
            return importlib.import_module(f"kvcat.{name}")
    except ModuleNotFoundError as error:
        line = missing_package(error, f"kvcat.{name}")
        if line:
            raise ModuleNotFoundError(line, name=error.name) from error
        raise
    raise AttributeError(f"module 'kvcat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
