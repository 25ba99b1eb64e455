"""Methods that train for small caches, at the tokens of a KV-CAT run: DMS and SP-KV.

    python runs/peers/train.py dms --model kvcat-base --output out/peers/dms-s0

Both learn a gate for every slot and KV head (``gated_attention.py``), and both were made for models
that keep their gates. Here the gates are dropped after training, as KV-CAT drops its routers: the
exported checkpoint is an ordinary one, whose caches are compressed afterwards.

- ``dms`` (Dynamic Memory Sparsification, Lancucki et al. 2025, arXiv:2506.05345): g = 1 - alpha
  with alpha a Gumbel-sigmoid of the predictor's logit, at temperature .1, logits starting at -5.
  The loss is KL(starting model || gated model) plus a one-sided loss that raises the mean alpha to
  a target, which grows linearly over the first half of the run.
- ``sp-kv`` (Self-Pruned Key-Value Attention, Faysse et al. 2026, arXiv:2605.14037): g is the
  sigmoid of the predictor's logit, which starts at 5. The loss is the next-token loss of the gated
  model, and nothing else asks for fewer slots.

Ours, where the papers were made for longer texts or do not say: the window, a linear predictor that
reads the normalised input of the attention, its learning rate, the weight of the one-sided loss.
Batches, optimizer and learning rate are those of ``kvcat train`` with the same options; the record
of every step has the checksum of its tokens. A run that is killed continues.
"""

import argparse
import copy
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from gated_attention import GatePredictors
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel

import kvcat
from kvcat.data import open_tokens
from kvcat.errors import InputError, run_script
from kvcat.files import (
    append_jsonl,
    atomic_write,
    claim_folder,
    make_folder,
    one_writer,
    read_jsonl,
    write_json,
)
from kvcat.losses import chunked_kl, chunked_objective
from kvcat.models import hidden_states, output_head, save
from kvcat.training.config import TrainConfig
from kvcat.training.optimizer import clip_gradients, make_optimizer
from kvcat.training.schedule import learning_rate

METHODS = ("dms", "sp-kv")
METRICS = "metrics.jsonl"
STATE = "state.pt"
FIRST_LOGIT = {"dms": -5.0, "sp-kv": 5.0}
TEMPERATURE = 0.1
TINY = 1e-6


class DMS:
    """Gates and loss of Dynamic Memory Sparsification.

    Args:
        model: the model that is trained.
        teacher: the same before training, with open gates.
        predictors: the model's gates.
        target: mean alpha to reach, the share of slots that is hidden in the end.
        weight: weight of the one-sided loss.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel,
        predictors: GatePredictors,
        *,
        target: float,
        weight: float,
    ) -> None:
        self.model = model
        self.head = output_head(model)
        self.teacher = teacher
        self.teacher_head = output_head(teacher)
        self.predictors = predictors
        self.target = target
        self.weight = weight

    def loss(
        self, tokens: torch.Tensor, progress: float, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """KL(teacher || gated) + weight * max(0, target - mean alpha), and what was hidden."""

        def log_gate(logits: torch.Tensor) -> torch.Tensor:
            uniform = torch.rand(logits.shape, generator=generator).clamp(TINY, 1 - TINY)
            noise = uniform.log() - (-uniform).log1p()
            return functional.logsigmoid(-(logits + noise) / TEMPERATURE)

        with torch.no_grad():
            teacher = hidden_states(self.teacher, input_ids=tokens, use_cache=False)
        self.predictors.use(log_gate)
        gated = hidden_states(self.model, input_ids=tokens, use_cache=False)
        distillation = chunked_kl(self.teacher_head, teacher[:, :-1], self.head, gated[:, :-1])
        alpha = torch.stack([-torch.expm1(gates) for gates in self.predictors.log_gates]).mean()
        target_now = self.target * min(1.0, 2 * progress)
        one_sided = (target_now - alpha).clamp_min(0)
        record = {"kl": distillation.item(), "hidden": alpha.item(), "target": target_now}
        return distillation + self.weight * one_sided, record


class SPKV:
    """Gates and loss of Self-Pruned Key-Value Attention.

    Args:
        model: the model that is trained.
        predictors: its gates.
    """

    def __init__(self, model: PreTrainedModel, predictors: GatePredictors) -> None:
        self.model = model
        self.head = output_head(model)
        self.predictors = predictors

    def loss(
        self, tokens: torch.Tensor, _progress: float, _generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The next-token loss of the gated model, and the mean of 1 - u."""
        self.predictors.use(functional.logsigmoid)
        gated = hidden_states(self.model, input_ids=tokens, use_cache=False)
        losses = chunked_objective(self.head, gated[:, :-1], None, tokens[:, 1:])
        gates = torch.stack([gates.detach().exp() for gates in self.predictors.log_gates])
        record = {"gated_loss": losses.dense_loss.item(), "hidden": 1 - gates.mean().item()}
        return losses.total, record


class PeerRun:
    """A run that is ready for its next step; a new one, or one that was stopped.

    Args:
        options: those of the command.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder = options.output
        self.config = run_config(options)
        make_folder(self.folder)
        self.model, self.tokenizer = kvcat.load(options.model, dtype="float32")
        teacher = copy.deepcopy(self.model).requires_grad_(False)  # before the model has gates
        self.predictors = GatePredictors(
            self.model,
            window=options.window,
            bias=FIRST_LOGIT[options.method],
            scale=options.scale,
        )
        self.method: DMS | SPKV = SPKV(self.model, self.predictors)
        if options.method == "dms":
            self.method = DMS(
                self.model,
                teacher,
                self.predictors,
                target=1 - options.target_keep,
                weight=options.hide_weight,
            )
        self.optimizer = make_optimizer(self.model, self.predictors.parameters(), self.config)
        self.data = open_tokens(
            self.config.data,
            self.tokenizer,
            seq_len=self.config.seq_len,
            batch_size=self.config.batch_size,
            max_steps=self.config.max_steps,
            validation_sequences=self.config.validation_sequences,
            seed=self.config.seed,
        )
        self.step = 0
        self._continue()

    def train(self) -> None:
        """Train to the last step, saving on the way."""
        config = self.config
        steps = range(self.step, config.max_steps)
        for _ in tqdm(steps, initial=self.step, total=config.max_steps, desc=self.folder.name):
            record = self._train_step()
            append_jsonl(self.folder / METRICS, record)
            if self.step % config.checkpoint_every == 0:
                self._save()

    def export(self, export: Path) -> None:
        """Write the checkpoint without gates, and the loss of its dense pass on held-out text."""
        self.predictors.open_gates()
        tokens = self.data.validation
        with torch.no_grad():
            hidden = hidden_states(self.model, input_ids=tokens, use_cache=False)
            losses = chunked_objective(self.method.head, hidden[:, :-1], None, tokens[:, 1:])
        validation = {"dense_loss": losses.dense_loss.item()}
        write_json(self.folder / "validation.json", validation)
        with atomic_write(export) as partial:
            save(self.model, self.tokenizer, partial)

    def _train_step(self) -> dict[str, float]:
        """Take a step; returns its record."""
        config = self.config
        rate = learning_rate(self.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_multiplier"]
        tokens = self.data.train.read()
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        progress = self.step / config.max_steps
        means: dict[str, float] = {}
        for rows in tokens.split(config.micro_batch_size or len(tokens)):
            share = len(rows) / len(tokens)
            loss, record = self.method.loss(rows, progress, generator)
            (loss * share).backward()
            means = {name: means.get(name, 0.0) + share * record[name] for name in record}
        clip_gradients(self.predictors.parameters(), config.max_grad_norm)
        clip_gradients(self.model.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        checksum = sum(zlib.crc32(row) for row in tokens.numpy())  # as kvcat train counts it
        return {"step": self.step, "lr": rate, "tokens_crc32": checksum, **means}

    def _save(self) -> None:
        """Write all that the run needs to continue, whole or not at all."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "predictors": self.predictors.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": json.dumps(self.data.train.state_dict()),
        }
        with atomic_write(self.folder / STATE) as partial:
            torch.save(state, partial)

    def _continue(self) -> None:
        """Continue from the saved state, if there is one; later records are dropped."""
        metrics = self.folder / METRICS
        if not (self.folder / STATE).exists():
            metrics.unlink(missing_ok=True)
            return
        state = torch.load(self.folder / STATE, weights_only=True)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.predictors.load_state_dict(state["predictors"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.data.train.load_state_dict(json.loads(state["data"]))
        records = [record for record in read_jsonl(metrics) if record["step"] <= self.step]
        metrics.unlink()
        append_jsonl(metrics, *records)


def train(options: argparse.Namespace) -> Path:
    """The folder of the exported checkpoint, after training or from an earlier run.

    Raises:
        InputError: the output folder belongs to a run with other options.
    """
    export = options.output / "export"
    make_folder(options.output)
    with one_writer(options.output):
        description = {name: str(value) for name, value in vars(options).items()}
        existing = claim_folder(options.output, "peer.json", description)
        if existing not in (None, description):
            raise InputError(f"{options.output} holds a run with other options; choose another")
        if not export.exists():
            run = PeerRun(options)
            run.train()
            run.export(export)
    return export


def run_config(options: argparse.Namespace) -> TrainConfig:
    """The options that ``kvcat train`` has too."""
    of_peers = ("method", "output", "window", "scale", "target_keep", "hide_weight")
    values = {name: value for name, value in vars(options).items() if name not in of_peers}
    return TrainConfig(
        output=str(options.output), policy="control", validation_sequences=8, **values
    )


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--model", default="kvcat-base")
    parser.add_argument("--data", default="installed")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--scale", type=float, default=10.0, help="factor on the predictors")
    parser.add_argument("--target-keep", type=float, default=0.25, help="of dms")
    parser.add_argument("--hide-weight", type=float, default=5.0, help="of dms' one-sided loss")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--max-steps", type=int, default=160)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--peak-lr", type=float, default=3e-4)
    parser.add_argument("--min-lr", type=float, default=3e-5)
    parser.add_argument("--checkpoint-every", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(words)


def main() -> None:
    """Train and print the folder of the export; a mistake is one line and exit code 2."""
    try:
        print(train(parse_arguments()))
    except InputError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run_script(main)
