"""How much a model's predictions depend on the output of every query head at every token."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcat.attention import enable
from kvcat.cache import Factors, check_token_ids, held_factors, rope_factors
from kvcat.errors import InputError
from kvcat.losses import chunked_objective
from kvcat.models.recompute import recomputing
from kvcat.models.structure import decoder_layers, frozen, hidden_states, output_head
from kvcat.types import Float, Int, Tensor, at_least_float32

# with more tokens in a batch, activations are computed again in the backward pass
_MOST_TOKENS_KEPT = 1024


def output_gradients(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch tokens"],
    *,
    rope: Factors | None = None,
    layers: Sequence[int] | None = None,
) -> list[Float[Tensor, "batch _ tokens"]]:
    """Norm of the gradient of a text's log-likelihood by the attention output of each query head.

    The log-likelihood is the sum of log p(x_t | x_<t) over the tokens x_2 ... x_T, in nats. Its
    gradient by a head's output at a token says how much a small error of this output changes the
    predictions of the next token and of all later ones. Squared and averaged over texts that the
    model itself samples, it is the Fisher information; here the text is the given one.

    One forward and one backward pass over the whole text. With more than 1,024 tokens every layer
    runs once more in the backward pass, so that only one layer's activations are in memory.

    Args:
        model: a causal LM that passed ``self_test``; it is switched to kvcat's attention.
        input_ids: token ids, no padding, at least two.
        rope, layers: as in ``capture``.

    Returns:
        Per layer, the norms by query head and token, in at least float32; 0 at the last token,
        which predicts nothing.

    Raises:
        InputError: fewer than two tokens, or a layer that does not attend through transformers'
            attention interface.
    """
    num_examples, num_tokens = input_ids.shape
    if num_tokens < 2:
        raise InputError("the gradient of a text's likelihood needs at least two tokens")
    check_token_ids(model, input_ids)
    enable(model)
    if rope is None:
        rope = rope_factors(model.config, num_tokens)
    numbers = range(len(decoder_layers(model))) if layers is None else layers
    norms: dict[int, Tensor] = {}

    def watch(layer: int, outputs: Float[Tensor, "batch tokens heads value_dim"]) -> None:
        def keep(gradient: Tensor) -> None:
            norms[layer] = at_least_float32(gradient).norm(dim=-1).transpose(1, 2)

        outputs.register_hook(keep)

    def with_gradient(_module: Any, _args: Any, embedded: Tensor) -> Tensor:
        return embedded.requires_grad_()

    num_predictions = num_examples * (num_tokens - 1)
    is_long = input_ids.numel() > _MOST_TOKENS_KEPT
    head = output_head(model)
    handle = model.get_input_embeddings().register_forward_hook(with_gradient)
    options = {"use_cache": False, "kv_output": watch}
    try:
        with (
            torch.enable_grad(),
            frozen(model),
            held_factors(model, rope),
            recomputing(model, enabled=is_long),
        ):
            hidden = hidden_states(model, input_ids=input_ids, **options)
            # the sum over predictions, not their mean
            losses = chunked_objective(
                head, hidden[:, :-1], None, input_ids[:, 1:], anchor_weight=float(num_predictions)
            )
            losses.total.backward()
    finally:
        handle.remove()
    if not norms.keys() >= set(numbers):
        raise InputError(
            f"{type(model).__name__} is not supported: not all of its layers attend through "
            "transformers' attention interface"
        )
    return [norms[number] for number in numbers]
