"""Continued pretraining with and without KV-CAT: configuration, loop, checkpoints, export.

Names are imported on first use: the command line reads the configuration's fields without loading torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcat.training.config import TrainConfig
    from kvcat.training.export import export_checkpoint
    from kvcat.training.loop import TrainResult, train
    from kvcat.training.metrics import read_metrics
    from kvcat.training.stop import Stopped

_HOME = {
    "Stopped": "stop",
    "TrainConfig": "config",
    "TrainResult": "loop",
    "export_checkpoint": "export",
    "read_metrics": "metrics",
    "train": "loop",
}

__all__ = ["Stopped", "TrainConfig", "TrainResult", "export_checkpoint", "read_metrics", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"kvcat.training.{_HOME[name]}"), name)
    raise AttributeError(f"module 'kvcat.training' has no attribute {name!r}")
