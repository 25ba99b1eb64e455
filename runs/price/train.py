"""Where the price arises: KV-CAT whose two losses do not share one step of the optimizer.

    python runs/price/train.py own-moments small --model kvcat-base --output out/price/own-moments

KV-CAT adds the gradients of the dense model's next-token loss and of the distillation, and Adam
divides the sum by its own running size. So the distillation changes the dense loss in two ways: by
its direction, and by the smaller step that is left for the next-token loss. Here they are apart:

- ``own-moments``: Adam's step for the next-token loss alone, as in the control, and a step with
  moments of its own for the distillation, with the learning rate times the mask's weight.
- ``projected``: one step for the sum, from which the part of the distillation's gradient that
  points against the next-token gradient is left out (PCGrad, Yu et al. 2020, arXiv:2001.06782, with
  the next-token loss never projected). Over all weights together.

After the form come the arguments of ``kvcat train``. One process, one micro-batch; a run that is
killed begins anew.
"""

import argparse
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvcat.cli.train import parse_config
from kvcat.errors import InputError, run_script
from kvcat.files import read_json, write_json
from kvcat.training.checkpoint import folders
from kvcat.training.config import TrainConfig
from kvcat.training.distributed import join_world, world_size
from kvcat.training.export import export_checkpoint
from kvcat.training.loop import Trainer
from kvcat.training.optimizer import clip_gradients
from kvcat.training.plan import check_request
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
        objective = run.objective
        tokens = run.data.train.read()
        masked_pass = objective.masked_pass
        objective.masked_pass = None  # this makes it the control's
        anchor_loss, anchor_record = self._losses(tokens, run.streams, run.step)
        (config.anchor_weight * anchor_loss).backward()
        anchor_gradients = self._taken_gradients()
        objective.masked_pass = masked_pass

        objective.config = replace(config, anchor_weight=0.0)
        mask_loss, record = self._losses(tokens, run.streams, run.step)
        objective.config = config
        mask_loss.backward()
        if self.form == "own-moments":
            self._step_of_the_mask()
            self._set_gradients(anchor_gradients)
        else:
            mask_gradients = self._taken_gradients()
            self._set_gradients(projected_sum(anchor_gradients, mask_gradients))
        scalars = {"dense_loss": anchor_record["dense_loss"].item(), "kl": record["kl"].item()}
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


def train(form: str, config: TrainConfig) -> Path:
    """The folder of the exported checkpoint, after training or from an earlier run.

    Args:
        form: one of ``FORMS``.
        config: of ``kvcat train``.

    Raises:
        InputError: the form cannot be trained in this way, or the output folder belongs to a run
            with other options.
    """
    config = checked(form, config)
    with (
        join_world(config.device, group=config.dtype != "float32") as world,
        RunFolder.open(config, world) as folder,
    ):
        form_file = folder.path / FORM_FILE
        # a run that was killed before it wrote the file has no checkpoint either
        existing = read_json(form_file)["form"] if form_file.exists() else form
        if form != existing:
            raise InputError(f"{folder.path} holds another run: its form is {existing}")
        if "max_steps" in folder.state.changes:
            steps = folder.state.changes["max_steps"][0]
            raise InputError(f"{folder.path} holds another run: its max_steps is {steps}")
        if folder.state.finished is not None:
            return folder.export
        with Run.open(folder, progress=True) as run:
            write_json(form_file, {"form": form})
            ApartTrainer(run, form).train()
        export_checkpoint(folders(folder.path)[-1], folder.export)
        folder.mark_done()
    return folder.export


def checked(form: str, config: TrainConfig) -> TrainConfig:
    """The configuration, with one checkpoint at the end.

    Raises:
        InputError: a configuration that the form does not have.
    """
    if config.policy == "control" or config.teacher != "self":
        raise InputError(f"{form} needs a masked pass that the model itself teaches")
    if config.micro_batch_size not in (None, config.batch_size):
        raise InputError(f"{form} has one micro-batch a step, not of {config.micro_batch_size}")
    if form == "projected" and config.dtype != "float32":
        raise InputError("projected needs --dtype float32")
    if world_size() > 1:
        raise InputError(f"{form} runs in one process, not in {world_size()}")
    check_request(config)
    # the mask's moments are in no checkpoint
    return replace(config, checkpoint_every=config.max_steps)


def main() -> None:
    """Train and print the folder of the export."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of kvcat train")
    options = parser.parse_args()
    config, dry_run = parse_config(options.arguments)
    if dry_run:
        raise InputError("--dry-run is an option of kvcat train alone")
    print(train(options.form, config))


if __name__ == "__main__":
    run_script(main)
