"""The training loop, for one process or many."""

import logging
import math
import os
import signal
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from kvcat.cache import check_token_ids
from kvcat.errors import InputError, check_kind
from kvcat.training.checkpoint import folders
from kvcat.training.config import TrainConfig
from kvcat.training.distributed import World, join_world, reduce_policies
from kvcat.training.export import export_checkpoint
from kvcat.training.log import mean_record, peak_memory
from kvcat.training.objective import Record
from kvcat.training.optimizer import clip_gradients
from kvcat.training.plan import check_request, memory_concern
from kvcat.training.run import Run
from kvcat.training.run_folder import RunFolder
from kvcat.training.schedule import learning_rate
from kvcat.training.signals import Stopped, stop_requests
from kvcat.types import Float, Int, Tensor

_LOGGER = logging.getLogger(__name__)
EXPLODED = 1e6  # a larger gradient norm of the routers means divergence, whatever the clipping


@dataclass(frozen=True)
class TrainResult:
    """The results of a finished run.

    Args:
        folder: folder of the run.
        export: the Hugging Face folder.
        validation: the last validation record.
    """

    folder: Path
    export: Path
    validation: dict[str, object]


def train(config: TrainConfig, *, progress: bool = True) -> TrainResult:
    """Train a checkpoint, or continue the run in ``config.output``; returns the folders of the
    result.

    Started by torchrun, the processes share the work: the batches, the masks and, up to rounding,
    the losses are those of one process. The order of the batches and every random mask are
    functions of seed, step and sequence, so a resumed run equals an uninterrupted one bit for bit.
    SIGTERM and SIGINT save a checkpoint after the current step.

    Args:
        progress: show progress on standard error.

    Raises:
        InputError: a value out of range, an output folder of another run, text shorter than a
            sequence, routers at layers that do not exist, too little disk space, no whole
            checkpoint among those of the run, divergence.
        Stopped: a signal ended the run; its state is saved.
    """
    check_kind(TrainConfig, "a TrainConfig", config=config)
    check_request(config)
    concern = memory_concern(config)
    if concern is not None and os.environ.get("RANK", "0") == "0":
        _LOGGER.warning(concern)
    needs_group = config.dtype != "float32"
    with (
        join_world(config.device, group=needs_group) as world,
        stop_requests() as signals,
        RunFolder.open(config, world) as folder,
    ):
        if folder.state.finished is not None:
            return TrainResult(folder.path, folder.export, folder.state.finished)
        with Run.open(folder, progress=progress) as run:
            Trainer(run, signals).train()

        def export() -> None:
            export_checkpoint(folders(folder.path)[-1], folder.export)
            folder.mark_done()

        world.first(export)
        validation = run.log.last.get("validation", {})
        return TrainResult(folder.path, folder.export, validation)


class _Gradients(NamedTuple):
    """Norms of the gradients before they are clipped.

    Args:
        model: norm of the model's gradient.
        routers: norm over all routers together; None without routers.
        by_router: norm of each router, by the first layer of its group.
    """

    model: float
    routers: float | None
    by_router: dict[str, float]


class Trainer:
    """Trains a run to its last step.

    Args:
        run: opened.
        signals: gets the number of a signal that stops the run.
    """

    run: Run
    signals: Sequence[int]

    def __init__(self, run: Run, signals: Sequence[int]) -> None:
        self.run = run
        self.signals = signals

    def train(self) -> None:
        """Train to the last step, validating and saving on the way."""
        run = self.run
        config = run.config
        if run.step == 0:
            self._validate()
        while run.step < config.max_steps:
            started = time.perf_counter()
            record = self._train_step()
            run.log.write({"kind": "train", "step": run.step, **record, **self._speed(started)})
            is_last = run.step == config.max_steps
            is_stopping = run.world.any(bool(self.signals))
            if run.step % config.validation_every == 0 or is_last:
                self._validate()
            if run.step % config.checkpoint_every == 0 or is_last or is_stopping:
                state = run.data.state_dict()
                run.checkpoints.save(
                    run.step, state, lambda folder: run.log.note(f"saved {folder}")
                )
            if is_stopping and not is_last:
                run.checkpoints.wait()
                signum = self.signals[0] if self.signals else signal.SIGTERM
                raise Stopped(signum, f"stopped after step {run.step}; the same command continues")
        run.checkpoints.wait()

    def _train_step(self) -> dict[str, Any]:
        """Take a step; returns its record."""
        run = self.run
        config = run.config
        rate = learning_rate(run.step, config)
        for group in run.optimizer.param_groups:
            group["lr"] = rate * group["lr_multiplier"]
        losses = self._accumulate_gradients()
        norms = self._clip_gradients()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        run.step += 1
        record = {"tokens": run.step * config.tokens_per_step, "lr": rate}
        if norms.routers is not None:
            record["router_lr"] = rate * config.router_lr_multiplier
        record.update(losses)
        if norms.routers is not None:
            record["router_grad_norms"] = norms.by_router
            record["router_grad_norm"] = norms.routers
        record["grad_norm"] = norms.model
        return record

    def _accumulate_gradients(self) -> dict[str, Any]:
        """Add the gradients of all micro-batches of a step; returns the mean of their records."""
        run = self.run
        num_sequences = len(run.streams)
        micro_batch = run.config.micro_batch_size or num_sequences
        tokens = run.data.train.read()
        records = []
        for start in range(0, num_sequences, micro_batch):
            if isinstance(run.objective, FSDPModule):  # only the last backward pass reduces
                is_last = start + micro_batch >= num_sequences
                run.objective.set_requires_gradient_sync(is_last)
            rows = slice(start, start + micro_batch)
            loss, record = self._losses(tokens[rows], run.streams[rows], run.step)
            (loss * (micro_batch / num_sequences)).backward()
            records.append({**record, "tokens_crc32": _mean_crc32(tokens[rows], run.world)})
        mean = mean_record(records, [1.0] * len(records), run.world)
        # the sum over the sequences of the step
        mean["tokens_crc32"] = round(mean["tokens_crc32"] * run.config.batch_size)
        return mean

    def _clip_gradients(self) -> _Gradients:
        """Reduce the routers' gradients over the processes and clip all; returns the norms before.

        Raises:
            InputError: the run diverged.
        """
        run = self.run
        max_norm = run.config.max_grad_norm
        policies = run.objective.policy_parameters()
        reduce_policies(policies, run.world)
        by_router: dict[str, float] = {}
        router_norm = None
        if policies:
            for start, parameters in run.objective.router_parameters().items():
                by_router[start] = clip_gradients(parameters, math.inf)
            router_norm = clip_gradients(policies, max_norm)
        model_norm = clip_gradients(run.objective.model.parameters(), max_norm)
        self._check_norm("model", model_norm, math.inf)
        self._check_norm("routers", router_norm or 0.0, EXPLODED)
        return _Gradients(model_norm, router_norm, by_router)

    def _losses(
        self, tokens: Int[Tensor, "batch tokens"], sequences: Sequence[int], step: int | None
    ) -> tuple[Float[Tensor, ""], Record]:
        """The objective and its terms.

        Masks are a function of seed, step and sequence, so that checkpoints need not contain them.

        Args:
            tokens: token ids of the sequences.
            sequences: their numbers among those of the step, or of validation.
            step: counted from 0; None for validation.
        """
        run = self.run
        check_token_ids(run.objective.model, tokens)
        generators = []
        for sequence in sequences:
            entropy = [run.config.seed, step is not None, step or 0, sequence]
            word = np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]
            # shifted, because torch accepts no seed beyond 63 bits
            generators.append(torch.Generator().manual_seed(int(word >> 1)))
        tokens = tokens.to(run.world.device, non_blocking=True)
        return run.objective(tokens, generators, step)

    @torch.no_grad()
    def _validate(self) -> None:
        """Log the means over all validation sequences.

        A process that has no sequences left in the last batch takes part with weight 0.
        """
        run = self.run
        table = run.data.validation
        size = run.config.micro_batch_size or len(run.streams)
        num_batches = math.ceil(len(table) / (size * run.world.size))
        records = []
        weights = []
        for batch in range(num_batches):
            start = (batch * run.world.size + run.world.rank) * size
            rows = list(range(start, min(start + size, len(table))))
            weights.append(float(len(rows)))
            rows = rows or [0]
            _, record = self._losses(table[rows], rows, None)
            records.append(record)
        means = mean_record(records, weights, run.world)
        run.log.write({"kind": "validation", "step": run.step, **means})

    def _check_norm(self, whose: str, norm: float, limit: float) -> None:
        """Reject a gradient norm beyond a limit: the run diverged."""
        run = self.run
        if math.isfinite(norm) and norm <= limit:
            return
        run.checkpoints.wait()
        output = run.config.output
        saved = folders(Path(output))
        place = "nothing was saved"
        if saved:
            place = f"the last checkpoint of {output} is {saved[-1].name}"
        gradient = f"the gradient of the {whose} in step {run.step + 1} has norm {norm:.1e}"
        remedy = f"a smaller peak_lr than {run.config.peak_lr:g} needs another output folder"
        raise InputError(f"training diverged: {gradient}; {place}, {remedy}")

    def _speed(self, started: float) -> dict[str, float]:
        seconds = time.perf_counter() - started
        return {
            "tokens_per_s": self.run.config.tokens_per_step / seconds,
            "peak_memory_gib": peak_memory(self.run.world.device),
        }


def _mean_crc32(tokens: Int[Tensor, "batch tokens"], world: World) -> Float[Tensor, ""]:
    """The mean checksum of some sequences: equal in runs that are trained on the same tokens."""
    sums = [float(zlib.crc32(row)) for row in tokens.numpy()]
    return torch.tensor(sums, dtype=torch.float64, device=world.device).mean()
