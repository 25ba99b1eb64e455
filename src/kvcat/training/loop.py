"""The training loop, for one process or many."""

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.data import ReadingStopped, merge_states, open_tokens
from kvcat.errors import InputError
from kvcat.models import load, self_test
from kvcat.training.checkpoint import Checkpoints, checkpoint_folder, folders
from kvcat.training.config import TrainConfig
from kvcat.training.export import export_checkpoint
from kvcat.training.metrics import METRICS_FILE, MetricsLog, read_metrics
from kvcat.training.monitors import open_monitor
from kvcat.training.objective import Objective, Record, mean_record
from kvcat.training.optim import learning_rate, make_optimizer, set_learning_rate
from kvcat.training.progress import Progress
from kvcat.training.setup import check_disk, check_folder, check_request, claim_folder
from kvcat.training.sharding import prepare_layers, reduce_policies, shard
from kvcat.training.stop import Stopped, stop_requests
from kvcat.training.throughput import flops_per_token, peak_flops, peak_memory
from kvcat.training.world import World, join_world

EXPLODED = 1e6  # a routers' gradient norm that no clipping makes useful


@dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves.

    Args:
        folder: the run's folder, with ``config.json``, ``metrics.jsonl`` and ``checkpoints``.
        export: an ordinary Hugging Face folder with the trained model.
        validation: the last validation record.
    """

    folder: Path
    export: Path
    validation: dict[str, object]


def train(config: TrainConfig, *, progress: bool = True) -> TrainResult:
    """Train a checkpoint, or continue the run that stands in ``config.output``; returns where the result is.

    Started by torchrun, the processes share the work: the batches, the masks and, up to rounding, the losses are those
    of one process. The order of the batches and every random mask are functions of seed, step and sequence, so a
    resumed run equals an uninterrupted one bit for bit. SIGTERM and SIGINT save a checkpoint after the current step.

    Args:
        config: the whole configuration.
        progress: show a progress bar on standard error.

    Raises:
        InputError: a value out of range, an output folder of another run, text shorter than a sequence, routers at
            layers that do not exist, too little disk space, a loss that diverges.
        Stopped: a signal ended the run; its state is saved.
    """
    run = Path(config.output)
    check_request(config)
    check_folder(run, config)
    if (run / "done.json").exists() and (run / "export" / "config.json").exists():
        return TrainResult(run, run / "export", read_metrics(run / METRICS_FILE)[-1])
    with join_world(config.device, group=config.dtype != "float32") as world, stop_requests() as signals:
        model, tokenizer = load(config.model, dtype="float32", device=str(world.device))
        if config.prefix_range is not None and config.masked_share:
            self_test(model, split=True)
        check_disk(run, model, config.keep_checkpoints)
        with Trainer(config, model, tokenizer, world, signals) as trainer:
            with Progress(config.max_steps, trainer.step, enabled=progress and world.is_first) as bar:
                bar.note(*trainer.notes)
                trainer.run(bar)
            if world.is_first:
                export_checkpoint(checkpoint_folder(run, config.max_steps), run / "export")
                (run / "done.json").write_text(json.dumps({"steps": config.max_steps}) + "\n")
            world.wait()
    return TrainResult(run, run / "export", trainer.log.last("validation"))


class Trainer:
    """A run in progress: model, policies, optimizer, data and record; its folder is locked to the end of the block.

    Args:
        config: the whole configuration.
        model: the causal LM, float32, on the world's device.
        tokenizer: its tokenizer.
        world: the processes of the run.
        signals: filled with the number of a signal that asks the run to stop.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        world: World,
        signals: Sequence[int] = (),
    ) -> None:
        run = Path(config.output)
        self.config, self.world, self.signals = config, world, signals
        self.flops_per_token = flops_per_token(model, config)
        self.objective = Objective(model, config).to(world.device)
        own = config.batch_size // world.size
        self.streams = range(world.rank * own, (world.rank + 1) * own)
        self.data = open_tokens(
            config.data, tokenizer, seq_len=config.seq_len, batch_size=config.batch_size, max_steps=config.max_steps,
            validation_sequences=config.validation_sequences, seed=config.seed, streams=self.streams,
            workers=config.workers, stop=lambda: bool(signals), check=world.is_first,
        )  # fmt: skip
        self.lock = claim_folder(run, config, write=world.is_first)
        world.wait()
        prepare_layers(model, config)
        shard(self.objective, world, getattr(torch, config.dtype))
        self.optimizer = make_optimizer(self.objective, config)
        self.checkpoints = Checkpoints(run, config.keep_checkpoints, world, self.objective, self.optimizer)
        self.step, states, self.notes = self.checkpoints.load_newest()
        if states:
            self.data.train.load_state_dict(merge_states(states))
        monitor = open_monitor(config) if world.is_first else None
        self.log = MetricsLog(run / METRICS_FILE, self.step, enabled=world.is_first, monitor=monitor)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.data.train.close()
        self.log.close()
        self.lock.release()

    def run(self, bar: Progress) -> None:
        """Train to the last step, validating and saving on the way."""
        config = self.config
        if self.step == 0:
            self._validate(bar)
        while self.step < config.max_steps:
            started = time.perf_counter()
            record = self._train_step()
            if self.step % config.log_every == 0 or self.step == config.max_steps:
                self.log.write({"kind": "train", "step": self.step, **record, **self._speed(started)})
            bar.update(self.step, record)
            self._after_step(bar)
        self.checkpoints.wait()

    def _after_step(self, bar: Progress) -> None:
        config, last = self.config, self.step == self.config.max_steps
        stopping = self.world.any(bool(self.signals))
        if self.step % config.validation_every == 0 or last:
            self._validate(bar)
        if self.step % config.checkpoint_every == 0 or last or stopping:
            self.checkpoints.save(self.step, self.data.train.state_dict(), bar.saved)
        if stopping and not last:
            self.checkpoints.wait()
            signum = self.signals[0] if self.signals else 15
            raise Stopped(signum, f"stopped after step {self.step}; the same command continues")

    def _train_step(self) -> dict[str, Any]:
        config, world = self.config, self.world
        rate = learning_rate(self.step, config)
        set_learning_rate(self.optimizer, rate)
        own = len(self.streams)
        size = config.micro_batch_size or own
        records = []
        for start in range(0, own, size):
            streams = self.streams[start : start + size]
            total, record = self._losses(self._read(streams), streams, self.step)
            (total * (size / own)).backward()
            records.append(record)
        policies = self.objective.policy_parameters()
        reduce_policies(policies, world)
        norms = {"grad_norm": _clip(self.objective.model.parameters(), config.max_grad_norm)}
        if policies:
            norms["router_grad_norm"] = _clip(policies, config.max_grad_norm)
        self._refuse_divergence(norms)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        losses = mean_record(records, [1.0] * len(records), world)
        return {"tokens": self.step * config.tokens_per_step, "lr": rate, **losses, **norms}

    def _read(self, streams: Sequence[int]) -> torch.Tensor:
        try:
            return self.data.train.read(streams)
        except ReadingStopped:
            signum = self.signals[0] if self.signals else 15
            told = f"stopped while waiting for data after step {self.step}; the last checkpoint is in place"
            raise Stopped(signum, told) from None

    def _losses(self, tokens: torch.Tensor, sequences: Sequence[int], step: int | None) -> tuple[torch.Tensor, Record]:
        """The objective; masks are a function of seed, step and sequence: nothing to save, nothing to lose."""
        generators = []
        for sequence in sequences:
            words = np.random.SeedSequence([self.config.seed, step is not None, step or 0, sequence])
            generators.append(torch.Generator().manual_seed(int(words.generate_state(1, np.uint64)[0] >> 1)))
        return self.objective(tokens.to(self.world.device, non_blocking=True), generators, sequences, step)

    @torch.no_grad()
    def _validate(self, bar: Progress) -> None:
        """Means over all validation sequences; a process without one left runs along with weight 0."""
        table, world = self.data.validation, self.world
        size = self.config.micro_batch_size or len(self.streams)
        rounds = math.ceil(len(table) / (size * world.size))
        records, weights = [], []
        for part in range(rounds):
            start = (part * world.size + world.rank) * size
            rows = list(range(start, min(start + size, len(table))))
            weights.append(float(len(rows)))
            rows = rows or [0]
            records.append(self._losses(table.take(rows), rows, None)[1])
        record = {"kind": "validation", "step": self.step, **mean_record(records, weights, world)}
        self.log.write(record)
        bar.validated(record)

    def _refuse_divergence(self, norms: dict[str, float]) -> None:
        for name, norm in norms.items():
            whose = "routers" if name.startswith("router") else "model"
            if math.isfinite(norm) and not (whose == "routers" and norm > EXPLODED):
                continue
            self.checkpoints.wait()
            told = f"exploded to norm {norm:.1e}" if math.isfinite(norm) else "is not finite"
            saved = folders(Path(self.config.output))
            place = f"the last checkpoint is {saved[-1].name} in {self.config.output}" if saved else "nothing was saved"
            raise InputError(
                f"training diverged: the gradient of the {whose} in step {self.step + 1} "
                f"{told}; {place}, a smaller peak_lr than {self.config.peak_lr:g} needs another output folder"
            )

    def _speed(self, started: float) -> dict[str, float]:
        rate = self.config.tokens_per_step / (time.perf_counter() - started)
        peak = peak_flops(self.world.device, self.config.dtype)
        used = {} if peak is None else {"mfu": rate * self.flops_per_token / (peak * self.world.size)}
        return {"tokens_per_s": rate, **used, "peak_memory_gib": peak_memory(self.world.device)}


def _clip(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    norm = nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], max_norm)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # type: ignore[operator]
