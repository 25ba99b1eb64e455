r"""``kvcat train`` with a loss on each layer's attention in place of the KL of the predictions.

    python runs/smollm2/align.py 1 small --model smollm2-135m --policy attention \
        --prefix-range 0.5 0.5 --mask-weight 0 --output out/align ...

The first argument is the weight of the loss: the mean over the layers of |m - d|^2 / |d|^2, where m
is what a layer's attention adds to the residual stream after the hidden slots, d what it adds in
the dense pass at the same tokens, without gradient, and the squares are summed over all tokens.
After it come the arguments of ``kvcat train``, with a prefix range. An output folder continues only
with the same weight, which is in a file next to it. The record of a step has the loss as ``align``.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from train_only import check_form  # of this folder

import kvcat
from kvcat.cli.train import parse_config
from kvcat.errors import InputError, run_script
from kvcat.models import decoder_layers
from kvcat.training.objective import Objective


def layer_loss(output: torch.Tensor, prefix_len: int) -> torch.Tensor:
    """|m - d|^2 / |d|^2 of one layer's attention.

    Args:
        output: of shape (batch, tokens, hidden); the text, then its tokens after the prefix again,
            which do not see the hidden slots.
        prefix_len: tokens of the prefix.
    """
    num_tokens = (output.shape[1] + prefix_len) // 2
    dense = output[:, prefix_len:num_tokens].detach().float()
    masked = output[:, num_tokens:].float()
    return (masked - dense).square().sum() / dense.square().sum()


def align(weight: float) -> None:
    """Add the loss to the objective of this process's runs."""
    begin, forward = Objective.__init__, Objective.forward
    losses: list[torch.Tensor] = []

    def after_attention(_module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        gate = kwargs.get("kv_gate")
        if gate is not None:
            losses.append(layer_loss(output[0], gate.prefix_len))

    def begun(self: Objective, *arguments: Any) -> None:
        begin(self, *arguments)
        for layer in decoder_layers(self.model):
            layer.self_attn.register_forward_hook(after_attention, with_kwargs=True)

    def with_loss(self: Objective, *arguments: Any) -> Any:
        total, record = forward(self, *arguments)
        loss = torch.stack(losses).mean()
        losses.clear()
        return total + weight * loss, {**record, "align": loss.detach()}

    Objective.__init__ = begun
    Objective.forward = with_loss


def main() -> None:
    """Train and print the folder of the export."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weight", type=float, help="of the loss")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of kvcat train")
    options = parser.parse_args()
    config, dry_run = parse_config(options.arguments)
    if dry_run:
        raise InputError("--dry-run is an option of kvcat train alone")
    if config.policy == "control" or config.prefix_range is None:
        raise InputError("the layers are compared after a hidden prefix: --prefix-range and a mask")
    if config.activation_checkpointing:
        raise InputError("a layer that runs twice would be counted twice")
    check_form(Path(config.output), f"align {options.weight:g}")
    align(options.weight)
    print(kvcat.train(config).export)


if __name__ == "__main__":
    run_script(main)
