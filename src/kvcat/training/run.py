"""The parts of a training run, made from its configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvcat.data import TokenData, merge_states, open_tokens
from kvcat.errors import InputError
from kvcat.models import load, self_test
from kvcat.training.checkpoint import Checkpoints
from kvcat.training.config import TrainConfig
from kvcat.training.distributed import World, distribute
from kvcat.training.log import RunLog
from kvcat.training.objective import Objective, loss_notes
from kvcat.training.optimizer import make_optimizer
from kvcat.training.run_folder import RunFolder
from kvcat.training.schedule import schedule_notes


@dataclass(eq=False)
class Run:
    """A run that is ready for its next step.

    Args:
        config: configuration of the run.
        objective: the model and its policies, sharded over the processes.
        optimizer: optimizer of the objective's parameters.
        checkpoints: checkpoints in the run's folder; the newest complete one is loaded.
        data: training sequences from that checkpoint on, and validation sequences.
        streams: numbers of the sequences of a step that this process reads.
        log: the record.
        step: steps that are done.
    """

    config: TrainConfig
    world: World
    objective: Objective
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints
    data: TokenData
    streams: range
    log: RunLog
    step: int

    @classmethod
    @contextmanager
    def open(cls, folder: RunFolder, *, progress: bool) -> Iterator["Run"]:
        """A new run, or one that continues from the newest checkpoint of its folder.

        The block ends with a closed log. After a mistake, it also waits for the checkpoint that is
        being written.

        Args:
            progress: show progress on standard error.

        Raises:
            InputError: no such model, or another one than the run started from; no such data, too
                little text or disk space, or no whole checkpoint.
        """
        config = folder.config
        world = folder.world
        model, tokenizer = load(config.model, dtype="float32", device=str(world.device))
        start = folder.check_start(model)
        if config.prefix_range is not None and config.masked_share:
            self_test(model, split=True)
        objective = Objective(model, config).to(world.device)
        folder.check_disk(objective)
        distribute(objective, world)
        optimizer = make_optimizer(objective.model, objective.policy_parameters(), config)
        checkpoints = Checkpoints(folder.path, config.keep_checkpoints, world, objective, optimizer)
        loaded = checkpoints.load_newest()
        per_process = config.batch_size // world.size
        streams = range(world.rank * per_process, (world.rank + 1) * per_process)
        data = _open_data(folder, tokenizer, streams, loaded.states)
        notes = loaded.notes + folder.record_config(loaded.step, start)
        log = RunLog(config, loaded.step, enabled=world.is_first, progress=progress)
        log.note(*notes, *schedule_notes(config), *loss_notes(model))
        run = cls(config, world, objective, optimizer, checkpoints, data, streams, log, loaded.step)
        try:
            yield run
        except (InputError, OSError):
            checkpoints.wait()  # let a checkpoint in progress finish before the error ends the run
            raise
        finally:
            log.close()


def _open_data(
    folder: RunFolder,
    tokenizer: PreTrainedTokenizerBase,
    streams: range,
    states: list[dict[str, Any]],
) -> TokenData:
    """The data of a run from where the processes, in the states that they saved, were reading."""
    config = folder.config
    place = merge_states(states) if states else {}  # a new run
    data = open_tokens(
        config.data,
        tokenizer,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        max_steps=folder.state.first_max_steps,
        validation_sequences=config.validation_sequences,
        seed=config.seed,
        streams=streams,
        revision=place.get("revision"),
        bos=config.bos,
    )
    if place:
        data.load_state_dict(place)
    return data
