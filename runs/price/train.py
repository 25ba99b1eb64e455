"""Where the price arises: KV-CAT whose two losses do not share one step of the optimizer.

    python runs/price/train.py own-moments --output out/price/own-moments-s1 --seed 1

KV-CAT adds the gradients of the dense model's next-token loss and of the distillation, and Adam
divides the sum by its own running size. So the distillation changes the dense loss in two ways: by
its direction, and by the smaller step that is left for the next-token loss. Here they are apart:

- ``own-moments``: Adam's step for the next-token loss alone, as in the control, and a step with
  moments of its own for the distillation, with the learning rate times the mask's weight.
- ``projected``: one step for the sum, from which the part of the distillation's gradient that
  points against the next-token gradient is left out (PCGrad, Yu et al. 2020, arXiv:2001.06782, with
  the next-token loss never projected). Over all weights together.

Everything else is ``kvcat train`` with the router policy and the same options. One process, one
micro-batch; a run that is killed begins anew.
"""

import argparse
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvcat.errors import InputError, run_script
from kvcat.files import read_json, write_json
from kvcat.losses import chunked_objective
from kvcat.models import hidden_states
from kvcat.training.checkpoint import folders
from kvcat.training.config import TrainConfig
from kvcat.training.distributed import join_world
from kvcat.training.export import export_checkpoint
from kvcat.training.loop import Trainer
from kvcat.training.optimizer import clip_gradients
from kvcat.training.run import Run
from kvcat.training.run_folder import RunFolder

FORMS = ("own-moments", "projected")
FORM_FILE = "form.json"


class ApartTrainer(Trainer):
    """A trainer that takes the gradients of the two losses one after the other.

    Args:
        run: opened; of one process and one micro-batch.
        form: one of ``FORMS``.
    """

    def __init__(self, run: Run, form: str) -> None:
        super().__init__(run, signals=[])
        config = run.config
        self.form = form
        self.weights = [p for p in run.objective.model.parameters() if p.requires_grad]
        self.mask_optimizer = torch.optim.AdamW(
            self.weights, lr=config.peak_lr, betas=config.betas, eps=1e-8, weight_decay=0.0
        )

    def _accumulate_gradients(self) -> dict[str, Any]:
        """Leave the gradients for the optimizer's step; returns the record of both losses."""
        run = self.run
        config = run.config
        tokens = run.data.train.read()
        hidden = hidden_states(run.objective.model, input_ids=tokens, use_cache=False)
        anchor = chunked_objective(run.objective.head, hidden[:, :-1], None, tokens[:, 1:])
        (config.anchor_weight * anchor.total).backward()
        anchor_gradients = self._taken_gradients()

        run.objective.config = replace(config, anchor_weight=0.0)
        mask_loss, record = self._losses(tokens, run.streams, run.step)
        run.objective.config = config
        mask_loss.backward()
        if self.form == "own-moments":
            self._step_of_the_mask()
            self._set_gradients(anchor_gradients)
        else:
            mask_gradients = self._taken_gradients()
            self._set_gradients(projected_sum(anchor_gradients, mask_gradients))
        scalars = {"dense_loss": anchor.dense_loss.item(), "kl": record["kl"].item()}
        checksum = sum(zlib.crc32(row) for row in tokens.numpy())
        return {**scalars, "tokens_crc32": checksum}

    def _step_of_the_mask(self) -> None:
        """A step with the distillation's gradients and moments."""
        config = self.run.config
        rate = self.run.optimizer.param_groups[0]["lr"]
        self.mask_optimizer.param_groups[0]["lr"] = rate * config.mask_weight
        clip_gradients(self.weights, config.max_grad_norm)
        self.mask_optimizer.step()

    def _taken_gradients(self) -> list[torch.Tensor]:
        """The weights' gradients, which are None afterwards."""
        gradients = [_gradient(weight) for weight in self.weights]
        self.mask_optimizer.zero_grad(set_to_none=True)
        return gradients

    def _set_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient


def projected_sum(
    anchor: Sequence[torch.Tensor], mask: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The sum of both, without the part of the mask's that points against the anchor's.

    g = a + m - min(0, <m, a>) / <a, a> a, with products over all weights together.
    """
    product = sum((m * a).sum() for m, a in zip(mask, anchor, strict=True))
    square = sum((a * a).sum() for a in anchor)
    against = torch.as_tensor(product).clamp_max(0) / square
    return [a + m - against * a for a, m in zip(anchor, mask, strict=True)]


def _gradient(weight: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def train(options: argparse.Namespace) -> Path:
    """The folder of the exported checkpoint, after training or from an earlier run.

    Raises:
        InputError: the output folder belongs to a run with other options.
    """
    config = run_config(options)
    with join_world(config.device, group=False) as world, RunFolder.open(config, world) as folder:
        form_file = folder.path / FORM_FILE
        # a run that was killed before it wrote the file has no checkpoint either
        form = read_json(form_file)["form"] if form_file.exists() else options.form
        if form != options.form:
            raise InputError(f"{folder.path} holds another run: its form is {form}")
        if "max_steps" in folder.state.changes:
            steps = folder.state.changes["max_steps"][0]
            raise InputError(f"{folder.path} holds another run: its max_steps is {steps}")
        if folder.state.finished is not None:
            return folder.export
        with Run.open(folder, progress=True) as run:
            write_json(form_file, {"form": options.form})
            ApartTrainer(run, options.form).train()
        export_checkpoint(folders(folder.path)[-1], folder.export)
        folder.mark_done()
    return folder.export


def run_config(options: argparse.Namespace) -> TrainConfig:
    """The configuration of ``kvcat train`` with the same options."""
    return TrainConfig(
        model=options.model,
        data=options.data,
        output=str(options.output),
        policy="router",
        num_groups=options.num_groups,
        target_keep=options.target_keep,
        target_warmup_steps=options.max_steps // 4,
        mask_weight=options.mask_weight,
        router_lr_multiplier=33.0,
        seq_len=options.seq_len,
        batch_size=options.batch_size,
        max_steps=options.max_steps,
        warmup_steps=options.warmup_steps,
        peak_lr=options.peak_lr,
        min_lr=options.min_lr,
        seed=options.seed,
        validation_sequences=8,
        validation_every=options.max_steps,
        checkpoint_every=options.max_steps,  # the mask's moments are in no checkpoint
    )


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("--model", default="kvcat-base")
    parser.add_argument("--data", default="installed")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-groups", type=int, default=4)
    parser.add_argument("--target-keep", type=float, default=0.25)
    parser.add_argument("--mask-weight", type=float, default=1.0)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-steps", type=int, default=160)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--peak-lr", type=float, default=3e-4)
    parser.add_argument("--min-lr", type=float, default=3e-5)
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
