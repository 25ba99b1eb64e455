"""The training loop for one device."""

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.data import TokenTable
from kvcat.errors import InputError
from kvcat.models import MaskedPass, load
from kvcat.policies import build_policies
from kvcat.training.checkpoint import TrainState, load_newest, save_checkpoint
from kvcat.training.config import TrainConfig
from kvcat.training.export import export
from kvcat.training.metrics import MetricsLog, read_metrics
from kvcat.training.objective import StepLosses, mean_losses, objective
from kvcat.training.optim import learning_rate, make_optimizer, set_learning_rate
from kvcat.training.progress import Progress
from kvcat.training.setup import check_disk, check_folder, check_length, claim_folder, training_tables
from kvcat.training.stop import Stopped, stop_requests


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

    The order of the batches and every random mask are functions of seed and step, so a resumed run equals an
    uninterrupted one bit for bit. SIGTERM and SIGINT save a checkpoint after the current step.

    Args:
        config: the whole configuration.
        progress: show a progress bar on standard error.

    Raises:
        InputError: a value out of range, an output folder of another run, text shorter than a sequence, routers at
            layers that do not exist, too little disk space, a loss that diverges.
        Stopped: a signal ended the run; its state is saved.
    """
    run = Path(config.output)
    check_folder(run, config)
    if (run / "done.json").exists() and (run / "export" / "config.json").exists():
        return TrainResult(run, run / "export", read_metrics(run / "metrics.jsonl")[-1])
    model, tokenizer = load(config.model, dtype="float32", device=config.device)
    check_length(model, config.seq_len)
    check_disk(run, model, config.keep_checkpoints)
    trainer = Trainer(config, model, tokenizer)
    with trainer.log, stop_requests() as signals, Progress(config.max_steps, trainer.step, enabled=progress) as bar:
        bar.note(*trainer.notes)
        trainer.run(signals, bar)
        target = export(model, trainer.routers, tokenizer, config, trainer.log.last("validation"))
    (run / "done.json").write_text(json.dumps({"steps": config.max_steps}) + "\n")
    return TrainResult(run, target, trainer.log.last("validation"))


class Trainer:
    """A run in progress: model, policies, optimizer, data and record.

    Args:
        config: the whole configuration.
        model: the causal LM, float32.
        tokenizer: its tokenizer.
    """

    def __init__(self, config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config, self.model = config, model
        self.masked_pass = make_masked_pass(model, config)
        self.table, self.validation_table = training_tables(config, tokenizer)
        self.routers: nn.Module = self.masked_pass or nn.Module()
        self.optimizer = make_optimizer(model, self.routers, config)
        claim_folder(Path(config.output), config)
        state, self.notes = load_newest(Path(config.output))
        self.step = 0
        if state is not None:
            self._restore(state)
        self.log = MetricsLog(Path(config.output) / "metrics.jsonl", self.step)

    def run(self, signals: list[int], bar: Progress) -> None:
        """Train to the last step, validating and saving on the way."""
        config = self.config
        if self.step == 0:
            self._validate(bar)
        while self.step < config.max_steps:
            started = time.perf_counter()
            record = self._train_step()
            seconds = time.perf_counter() - started
            if self.step % config.log_every == 0 or self.step == config.max_steps:
                self.log.write(
                    {"kind": "train", "step": self.step, **record, "tokens_per_s": config.tokens_per_step / seconds}
                )
            bar.update(self.step, record)
            last = self.step == config.max_steps
            if self.step % config.validation_every == 0 or last:
                self._validate(bar)
            if self.step % config.checkpoint_every == 0 or last or signals:
                self._save(bar)
            if signals and not last:
                raise Stopped(signals[0], f"stopped after step {self.step}; the same command continues")

    def _train_step(self) -> dict[str, object]:
        config = self.config
        rate = learning_rate(self.step, config)
        set_learning_rate(self.optimizer, rate)
        losses = []
        for micro, tokens in enumerate(self._micro_batches(self.table, self.step, config.seed)):
            loss = self._losses(tokens, self._generator("train", self.step, micro))
            (loss.total / config.accumulation).backward()
            losses.append(loss)
        norms = {"grad_norm": _clip(self.model.parameters(), config.max_grad_norm)}
        if self.masked_pass is not None:
            norms["router_grad_norm"] = _clip(self.routers.parameters(), config.max_grad_norm)
        if not all(math.isfinite(norm) for norm in norms.values()):
            raise InputError(
                f"training diverged: a gradient of step {self.step + 1} is not finite; the last checkpoint is in "
                f"place, a smaller peak_lr than {config.peak_lr:g} needs another output folder"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {"tokens": self.step * config.tokens_per_step, "lr": rate, **mean_losses(losses), **norms}

    def _micro_batches(self, table: TokenTable, step: int, seed: int) -> Iterable[torch.Tensor]:
        batch = table.batch(step, self.config.batch_size, seed)
        return batch.chunk(self.config.accumulation)

    def _losses(self, tokens: torch.Tensor, generator: torch.Generator) -> StepLosses:
        device = torch.device(self.config.device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            return objective(self.model, self.masked_pass, tokens.to(device), self.config, generator)

    @torch.no_grad()
    def _validate(self, bar: Progress) -> None:
        rows = torch.from_numpy(self.validation_table.sequences.astype("int64"))
        parts = rows.split(self.config.micro_batch_size or self.config.batch_size)
        losses = [self._losses(tokens, self._generator("validation", 0, i)) for i, tokens in enumerate(parts)]
        full = [loss for loss, tokens in zip(losses, parts, strict=True) for _ in tokens]
        record = {"kind": "validation", "step": self.step, **mean_losses(full)}
        self.log.write(record)
        bar.validated(record)

    def _generator(self, kind: str, step: int, micro: int) -> torch.Generator:
        """Masks are a function of seed, purpose, step and micro-batch: nothing to save, nothing to lose."""
        words = np.random.SeedSequence([self.config.seed, kind == "train", step, micro]).generate_state(1, np.uint64)
        return torch.Generator(self.config.device).manual_seed(int(words[0] >> 1))

    def _save(self, bar: Progress) -> None:
        state = TrainState(
            self.step, _own_tensors(self.model), dict(self.routers.state_dict()), self.optimizer.state_dict()
        )
        folder = save_checkpoint(Path(self.config.output), state, self.config.keep_checkpoints)
        bar.saved(folder)

    def _restore(self, state: TrainState) -> None:
        own = _own_tensors(self.model)
        if own.keys() != state.model.keys():
            raise InputError(f"the checkpoint in {self.config.output} belongs to another model")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state.model[name])
        self.routers.load_state_dict(state.routers)
        self.optimizer.load_state_dict(state.optimizer)
        self.step = state.step


def make_masked_pass(model: PreTrainedModel, config: TrainConfig) -> MaskedPass | None:
    """The pair of passes with the configured policy, or None for the control.

    Raises:
        InputError: groups that start at layers which do not exist.
    """
    if config.policy == "control":
        return None
    text = model.config.get_text_config()
    policies = build_policies(
        config.policy,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        group_starts=config.group_starts,
        num_groups=config.num_groups,
        target=config.target_keep,
        feature_dim=config.feature_dim,
        noise=config.router_noise,
        seed=config.seed,
    )
    return MaskedPass(model, policies, tau=config.tau, coupling=config.coupling, keep_self=config.keep_self)


def _own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and saved buffers by name; a tensor that two names share stands once."""
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    seen, own = set(), {}
    for name, tensor in model.state_dict().items():
        if name in names and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            own[name] = tensor
    return own


def _clip(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    return float(nn.utils.clip_grad_norm_(list(parameters), max_norm))
