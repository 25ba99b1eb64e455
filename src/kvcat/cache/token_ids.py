"""Token ids that a model has embeddings for."""

import torch
from transformers import PreTrainedModel

from kvcat.errors import InputError
from kvcat.types import Int, Tensor


def check_token_ids(model: PreTrainedModel, input_ids: Int[Tensor, "batch tokens"]) -> None:
    """Raise ``InputError`` for a token id without a row in the model's embedding.

    Such an id comes from a tokenizer with more tokens than the model. On a CPU the forward would
    end in an IndexError, on a GPU in an assertion that leaves the device unusable.
    """
    rows = _num_embeddings(model)
    if rows is None or input_ids.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in input_ids.aminmax())
    if lowest < 0:
        raise InputError(f"token {lowest} is no token: ids are from 0 to {rows - 1}")
    if highest >= rows:
        raise InputError(
            f"token {highest} has no embedding: {type(model).__name__} has {rows} "
            f"(tokens 0 to {rows - 1}), the tokenizer has at least {highest + 1} tokens: "
            "use the model's tokenizer, or resize the embeddings and train them"
        )


def _num_embeddings(model: PreTrainedModel) -> int | None:
    """Rows of the model's embedding; None where it has no matrix of embeddings."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    return weight.shape[0] if isinstance(weight, torch.Tensor) else None
