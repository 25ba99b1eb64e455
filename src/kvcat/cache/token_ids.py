"""Checks that token ids have an embedding in a model."""

import torch
from transformers import PreTrainedModel

from kvcat.errors import InputError
from kvcat.types import Int, Tensor


def check_token_ids(model: PreTrainedModel, input_ids: Int[Tensor, "batch tokens"]) -> None:
    """Raise ``InputError`` for anything but a batch of token ids, and for an id without an
    embedding.

    Such an id comes from a tokenizer with more tokens than the model. On a CPU the forward would
    end in an IndexError, on a GPU in an assertion that leaves the device unusable.
    """
    check_batch_of_ids(input_ids)
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(weight, torch.Tensor) or input_ids.numel() == 0:
        return
    rows = weight.shape[0]
    lowest, highest = (int(bound) for bound in input_ids.aminmax())
    if lowest < 0:
        raise InputError(f"token {lowest} does not exist: ids are from 0 to {rows - 1}")
    if highest >= rows:
        raise InputError(
            f"token {highest} has no embedding: {type(model).__name__} has {rows} "
            f"(tokens 0 to {rows - 1}), the tokenizer has at least {highest + 1} tokens: "
            "use the model's tokenizer, or resize the embeddings and train them"
        )


def check_batch_of_ids(input_ids: object) -> None:
    """Raise ``InputError`` for anything but a tensor of whole numbers, (batch, tokens)."""
    if not isinstance(input_ids, torch.Tensor):
        kind = type(input_ids).__name__
        raise InputError(f"input_ids must be a tensor of shape (batch, tokens), not a {kind}")
    is_whole = not (input_ids.is_floating_point() or input_ids.is_complex())
    if input_ids.dim() != 2 or not is_whole or input_ids.dtype == torch.bool:
        raise InputError(
            "input_ids must be whole numbers of shape (batch, tokens), not "
            f"{str(input_ids.dtype).removeprefix('torch.')} of shape {tuple(input_ids.shape)}"
        )
