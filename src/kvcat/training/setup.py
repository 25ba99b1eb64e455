"""What is checked and prepared before the first step."""

import shutil
from pathlib import Path

from torch import nn

from kvcat.errors import InputError
from kvcat.locking import FolderLock
from kvcat.models import read_config
from kvcat.policies import check_group_starts, default_group_starts
from kvcat.training.config import TrainConfig, check_batch
from kvcat.training.lora import check_lora
from kvcat.training.monitors import check_monitor
from kvcat.training.world import world_size

CONFIG_FILE = "config.json"
_FREE = ("output", "monitor", "workers", "keep_checkpoints")  # what a run's continuation may change
_PARTIAL = "config.partial"  # a kill while the configuration was written leaves no more than this


def check_folder(run: Path, config: TrainConfig) -> None:
    """Accept a folder that is absent, empty, or of the same run; nothing is written.

    Raises:
        InputError: the folder is not empty and belongs to something else, or to a run with another configuration.
    """
    existing = run / CONFIG_FILE
    if existing.exists():
        try:
            previous = TrainConfig.load(existing)
        except InputError:
            raise InputError(f"output folder {run} is not empty and holds no run of ours") from None
        for name in previous.__dataclass_fields__:
            if getattr(previous, name) != getattr(config, name) and name not in _FREE:
                raise InputError(
                    f"{run} holds another run: its {name} is {getattr(previous, name)!r}, not {getattr(config, name)!r}"
                )
        return
    if run.exists() and (not run.is_dir() or any(file.name != _PARTIAL for file in run.iterdir())):
        raise InputError(f"output folder {run} is not empty and holds no run of ours")


def claim_folder(run: Path, config: TrainConfig, *, write: bool = True) -> FolderLock:
    """Lock the run's folder, and write the configuration, whole or not at all, unless it is there.

    Args:
        run: the folder; made where it is absent.
        config: the run's configuration.
        write: False leaves all that to another process of the run.

    Raises:
        InputError: the folder cannot be made, another process writes to it or has claimed it for another run.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(run, enabled=write)
        if write:
            check_folder(run, config)
        if write and not (run / CONFIG_FILE).exists():
            config.save(run / CONFIG_FILE)
    except OSError as error:
        raise InputError(f"cannot make output folder {run}: {error.strerror}") from None
    return lock


def check_request(config: TrainConfig) -> None:
    """Refuse what the model's configuration alone shows to be impossible, before weights or data are read.

    Raises:
        InputError: a batch that does not divide over the processes, sequences longer than the model's positions,
            groups at layers that do not exist, a package that is not installed.
    """
    check_batch(config, world_size())
    check_monitor(config)
    check_lora(config)
    text = read_config(config.model).get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and config.seq_len > positions:
        raise InputError(f"seq_len {config.seq_len} exceeds the model's {positions} positions")
    if config.group_starts is None:
        default_group_starts(text.num_hidden_layers, config.num_groups)
    else:
        check_group_starts(config.group_starts, text.num_hidden_layers)


def check_disk(run: Path, model: nn.Module, keep_checkpoints: int) -> None:
    """Refuse to start where checkpoints and export will not fit.

    Args:
        run: the run's folder; it need not exist.
        model: what is saved, in float32, with two moments of the optimizer.
        keep_checkpoints: checkpoints that stay; one more is there while it is written.

    Raises:
        InputError: less free space than the run will need.
    """
    weights = sum(p.numel() for p in model.parameters()) * 4
    needed = weights * (3 * (keep_checkpoints + 1) + 1)
    there = next(folder for folder in (run.absolute(), *run.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise InputError(
            f"no disk space for {run}: {free / 1e6:,.1f} MB free, checkpoints and export need {needed / 1e6:,.1f} MB"
        )
