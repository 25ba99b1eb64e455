"""Copies of the run's record for TensorBoard or Weights & Biases; ``metrics.jsonl`` stays the truth."""

import dataclasses
import hashlib
import importlib.util
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvcat.errors import InputError
from kvcat.training.config import TrainConfig

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


@runtime_checkable
class Monitor(Protocol):
    """Where records go beside the file."""

    def write(self, record: dict[str, Any]) -> None:
        """Show one record."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


def check_monitor(config: TrainConfig) -> None:
    """Refuse a monitor whose package is missing.

    Raises:
        InputError: with the command that installs it.
    """
    package = _PACKAGES.get(config.monitor)
    if package and importlib.util.find_spec(package) is None:
        raise InputError(
            f"--monitor {config.monitor} needs the package {package}: pip install 'kvcat[{config.monitor}]'"
        )


def open_monitor(config: TrainConfig) -> Monitor:
    """The monitor that the configuration names; a resumed run goes on in the same one."""
    if config.monitor == "tensorboard":
        return _TensorBoard(config)
    if config.monitor == "wandb":
        return _WeightsAndBiases(config)
    return _Nothing()


class _Nothing:
    def write(self, record: dict[str, Any]) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing is left."""


class _TensorBoard:
    def __init__(self, config: TrainConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(Path(config.output) / "tensorboard"))

    def write(self, record: dict[str, Any]) -> None:
        """Every number as a scalar."""
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, config: TrainConfig) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        folder = Path(config.output).resolve()
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        self._run = wandb.init(
            project="kvcat", name=folder.name, id=name, resume="allow", dir=folder, config=dataclasses.asdict(config)
        )

    def write(self, record: dict[str, Any]) -> None:
        """Every number of the record at its step."""
        self._run.log(_numbers(record), step=record["step"])

    def close(self) -> None:
        """End the upload."""
        self._run.finish()


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by ``kind/name`` or ``kind/name/group``."""
    kind, found = record["kind"], {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= {f"{kind}/{name}/{group}": float(part) for group, part in value.items()}
        elif isinstance(value, int | float) and name != "step":
            found[f"{kind}/{name}"] = float(value)
    return found
