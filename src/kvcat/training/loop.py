"""The training loop, for one process or many."""

import math
import signal
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import check_token_ids
from kvcat.data import merge_states, open_tokens
from kvcat.errors import InputError
from kvcat.files import one_writer, read_json, read_jsonl, write_json
from kvcat.models import load, self_test
from kvcat.training.checkpoint import Checkpoints, Continuation, check_disk, check_folder, folders, record_config
from kvcat.training.config import TrainConfig
from kvcat.training.distributed import World, join_world, prepare_layers, reduce_policies, shard
from kvcat.training.export import export_checkpoint
from kvcat.training.log import METRICS_FILE, RunLog, mean_record
from kvcat.training.objective import Objective, Record
from kvcat.training.plan import check_request, peak_memory

_ONE_REQUEST = 2.0  # seconds within which signals count as one
EXPLODED = 1e6  # a routers' gradient norm that no clipping makes useful
DONE_FILE = "done.json"


@dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves: its folder, the exported Hugging Face folder, the last validation record."""

    folder: Path
    export: Path
    validation: dict[str, object]


class Stopped(Exception):  # noqa: N818 (not an error)
    """A signal of this number ended the run after its state was saved."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


def train(config: TrainConfig, *, progress: bool = True) -> TrainResult:
    """Train a checkpoint, or continue the run that stands in ``config.output``; returns where the result is.

    Started by torchrun, the processes share the work: the batches, the masks and, up to rounding, the losses are those
    of one process. The order of the batches and every random mask are functions of seed, step and sequence, so a
    resumed run equals an uninterrupted one bit for bit. SIGTERM and SIGINT save a checkpoint after the current step.

    Args:
        config: the whole configuration.
        progress: show progress on standard error.

    Raises:
        InputError: a value out of range, an output folder of another run, text shorter than a sequence, routers at
            layers that do not exist, too little disk space, no whole checkpoint among those of the run, divergence.
        Stopped: a signal ended the run; its state is saved.
    """
    run = Path(config.output)
    check_request(config)
    with ExitStack() as stack:
        world = stack.enter_context(join_world(config.device, group=config.dtype != "float32"))
        signals = stack.enter_context(_stop_requests())

        def hold_folder() -> tuple[Continuation, Record | None]:
            stack.enter_context(one_writer(run))
            return check_folder(config), _last_record(config)

        earlier, finished = world.first(hold_folder)
        if finished is not None and "export_dtype" not in earlier.changes:
            return TrainResult(run, run / "export", finished)
        model, tokenizer = load(config.model, dtype="float32", device=str(world.device))
        if config.prefix_range is not None and config.masked_share:
            self_test(model, split=True)
        trainer = Trainer(config, model, tokenizer, world, signals, earlier, stack, progress=progress)
        try:
            trainer.run()
        except (InputError, OSError):
            trainer.checkpoints.wait()  # a mistake does not cut a checkpoint short
            raise

        def export() -> None:
            export_checkpoint(folders(run)[-1], run / "export")
            write_json(run / DONE_FILE, _done(config))

        world.first(export)
        return TrainResult(run, run / "export", trainer.log.last.get("validation", {}))


def _done(config: TrainConfig) -> Record:
    """What says that a run is complete."""
    return {"steps": config.max_steps, "export_dtype": config.export_dtype}


def _last_record(config: TrainConfig) -> Record | None:
    """The last record of a run that is complete; None of any other."""
    run = Path(config.output)
    done, exported = run / DONE_FILE, run / "export" / "config.json"
    # an earlier version wrote the steps alone
    if not (done.exists() and exported.exists() and {**_done(config), **read_json(done)} == _done(config)):
        return None
    return [{}, *read_jsonl(run / METRICS_FILE)][-1]


class Trainer:
    """A run in progress: model, policies, optimizer, data and record; ``stack`` holds its folder and files open.

    ``signals`` is filled with the number of a signal that stops the run; ``earlier`` is what ``check_folder`` returns.
    """

    def __init__(
        self, config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, world: World,
        signals: Sequence[int], earlier: Continuation, stack: ExitStack, *, progress: bool,
    ) -> None:  # fmt: skip
        run = Path(config.output)
        self.config, self.world, self.signals = config, world, signals
        self.objective = Objective(model, config).to(world.device)
        world.first(lambda: check_disk(config, self.objective))
        prepare_layers(model, config)
        shard(self.objective, world, getattr(torch, config.dtype))
        self.optimizer = make_optimizer(self.objective, config)
        self.checkpoints = Checkpoints(run, config.keep_checkpoints, world, self.objective, self.optimizer)
        self.step, states, notes = self.checkpoints.load_newest()
        own, place = config.batch_size // world.size, merge_states(states)
        self.streams = range(world.rank * own, (world.rank + 1) * own)
        self.data = open_tokens(
            config.data, tokenizer, seq_len=config.seq_len, batch_size=config.batch_size, max_steps=earlier.begun_with,
            validation_sequences=config.validation_sequences, seed=config.seed, streams=self.streams,
            revision=place.get("revision"), bos=config.bos,
        )  # fmt: skip
        if place:
            self.data.train.load_state_dict(place)
        notes += world.first(lambda: record_config(config, self.step, earlier.changes))
        self.log = RunLog(config, self.step, enabled=world.is_first, progress=progress)
        stack.callback(self.log.close)
        self.log.note(*notes)

    def run(self) -> None:
        """Train to the last step, validating and saving on the way."""
        config = self.config
        if self.step == 0:
            self._validate()
        while self.step < config.max_steps:
            started = time.perf_counter()
            record = self._train_step()
            self.log.write({"kind": "train", "step": self.step, **record, **self._speed(started)})
            last, stopping = self.step == config.max_steps, self.world.any(bool(self.signals))
            if self.step % config.validation_every == 0 or last:
                self._validate()
            if self.step % config.checkpoint_every == 0 or last or stopping:
                state, note = self.data.train.state_dict(), self.log.note
                self.checkpoints.save(self.step, state, lambda folder, note=note: note(f"saved {folder}"))
            if stopping and not last:
                self.checkpoints.wait()
                signum = self.signals[0] if self.signals else signal.SIGTERM
                raise Stopped(signum, f"stopped after step {self.step}; the same command continues")
        self.checkpoints.wait()

    def _train_step(self) -> dict[str, Any]:
        config, world = self.config, self.world
        rate = learning_rate(self.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_multiplier"]
        own = len(self.streams)
        size = config.micro_batch_size or own
        tokens, records = self.data.train.read(), []
        for start in range(0, own, size):
            if isinstance(self.objective, FSDPModule):  # only the last backward pass reduces, the others add up
                self.objective.set_requires_gradient_sync(start + size >= own)
            part = slice(start, start + size)
            total, record = self._losses(tokens[part], self.streams[part], self.step)
            (total * (size / own)).backward()
            records.append(record | {"tokens_crc32": _mean_crc32(tokens[part], self.world)})
        routers, policies = self.objective.router_parameters(), self.objective.policy_parameters()
        reduce_policies(policies, world)
        norms: dict[str, Any] = {}
        rates = {"lr": rate}
        if policies:
            rates["router_lr"] = rate * config.router_lr_multiplier
            norms["router_grad_norms"] = {start: _clip(part, math.inf) for start, part in routers.items()}
            norms["router_grad_norm"] = _clip(policies, config.max_grad_norm)
        norms["grad_norm"] = _clip(self.objective.model.parameters(), config.max_grad_norm)
        self._refuse_divergence("model", norms["grad_norm"], math.inf)
        self._refuse_divergence("routers", norms.get("router_grad_norm", 0.0), EXPLODED)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        losses = mean_record(records, [1.0] * len(records), world)
        losses["tokens_crc32"] = round(losses["tokens_crc32"] * config.batch_size)  # the sum over the sequences
        return {"tokens": self.step * config.tokens_per_step, **rates, **losses, **norms}

    def _losses(self, tokens: torch.Tensor, sequences: Sequence[int], step: int | None) -> tuple[torch.Tensor, Record]:
        """The objective; masks are a function of seed, step and sequence, so a checkpoint need not hold them."""
        check_token_ids(self.objective.model, tokens)
        generators = []
        for sequence in sequences:
            words = np.random.SeedSequence([self.config.seed, step is not None, step or 0, sequence])
            generators.append(torch.Generator().manual_seed(int(words.generate_state(1, np.uint64)[0] >> 1)))
        return self.objective(tokens.to(self.world.device, non_blocking=True), generators, step)

    @torch.no_grad()
    def _validate(self) -> None:
        """Means over all validation sequences; a process without one left takes part with weight 0."""
        table, world = self.data.validation, self.world
        size = self.config.micro_batch_size or len(self.streams)
        records, weights = [], []
        for part in range(math.ceil(len(table) / (size * world.size))):
            start = (part * world.size + world.rank) * size
            rows = list(range(start, min(start + size, len(table))))
            weights.append(float(len(rows)))
            rows = rows or [0]
            records.append(self._losses(table[rows], rows, None)[1])
        self.log.write({"kind": "validation", "step": self.step, **mean_record(records, weights, world)})

    def _refuse_divergence(self, whose: str, norm: float, limit: float) -> None:
        if math.isfinite(norm) and norm <= limit:
            return
        self.checkpoints.wait()
        saved, config = folders(Path(self.config.output)), self.config
        place = f"the last checkpoint of {config.output} is {saved[-1].name}" if saved else "nothing was saved"
        raise InputError(
            f"training diverged: the gradient of the {whose} in step {self.step + 1} has norm {norm:.1e}; {place}, a "
            f"smaller peak_lr than {config.peak_lr:g} needs another output folder"
        )

    def _speed(self, started: float) -> dict[str, float]:
        rate = self.config.tokens_per_step / (time.perf_counter() - started)
        return {"tokens_per_s": rate, "peak_memory_gib": peak_memory(self.world.device)}


def learning_rate(step: int, config: TrainConfig) -> float:
    """The model's learning rate at a step, from 0: linear warm-up to the peak, then half a cosine to the floor."""
    if step < config.warmup_steps:
        return config.peak_lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.max_steps - 1 - config.warmup_steps)
    return config.min_lr + (config.peak_lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(objective: Objective, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the model (matrices with weight decay, vectors without) and the routers (own rate, no decay)."""
    parameters = [p for p in objective.model.parameters() if p.requires_grad]
    groups: list[tuple[list[nn.Parameter], float, float]] = [
        ([p for p in parameters if p.ndim >= 2], config.weight_decay, 1.0),
        ([p for p in parameters if p.ndim < 2], 0.0, 1.0),
        (objective.policy_parameters(), 0.0, config.router_lr_multiplier),
    ]
    return torch.optim.AdamW(
        [{"params": p, "weight_decay": decay, "lr_multiplier": factor} for p, decay, factor in groups if p],
        lr=config.peak_lr, betas=config.betas, eps=1e-8, fused=True,
    )  # fmt: skip


def _mean_crc32(tokens: torch.Tensor, world: World) -> torch.Tensor:
    """Of the sequences of a micro-batch: runs that record the same were trained on the same tokens."""
    sums = [float(zlib.crc32(row)) for row in tokens.numpy()]
    return torch.tensor(sums, dtype=torch.float64, device=world.device).mean()


def _clip(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """The norm of the gradients before they are clipped."""
    norm = nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], max_norm)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # type: ignore[operator]


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """A list to which a SIGTERM or SIGINT appends its number during the block; empty outside the main thread.

    Another one, two seconds later or more, raises ``Stopped`` at once, even where the program waits for data: torchrun
    hands on a signal that its processes may have got themselves.
    """
    received: list[int] = []
    first = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(signum: int, _: FrameType | None) -> None:
        nonlocal first
        first = first or time.monotonic()
        received.append(signum)
        if time.monotonic() - first > _ONE_REQUEST:
            raise Stopped(signum, "stopped at once; the checkpoints so far are in place")

    previous = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
