"""How far a compact cache's outputs are from the dense ones, output by output."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from kvcat.models import frozen, hidden_states, logits_from_hidden
from kvcat.types import Bool, Float, Int, Tensor

MEASURES = {
    "kl": "KL(dense || compact) of the next-token distributions, nats",
    "tv": "total variation of the next-token distributions, in [0, 1]",
    "log_prob": "largest |log p_dense - log p_compact| over the vocabulary, nats",
    "output": "Euclidean norm of the difference of the last token's representation (what the head reads): the "
    "definition to the letter, on the model's own scale",
}
"""Error measures: all are 0 where compression changes nothing."""

_ELEMENTS = 2**21


@torch.no_grad()
def output_errors(
    model: PreTrainedModel,
    dense: Float[Tensor, "suffixes positions hidden"],
    compact: Float[Tensor, "suffixes positions hidden"],
) -> dict[str, Float[Tensor, "suffixes positions"]]:
    """Every measure for every suffix b and every length k: at position k stands the output of b's first k tokens.

    In a causal model M([a, b_1 .. b_k]) is the output at the k-th position of the suffix, so that one suffix of K
    tokens gives the definition's error for K suffixes. In float64; what is not finite is infinitely wrong.

    Args:
        model: whose head reads the representations.
        dense: with the whole cache.
        compact: with the compact one.
    """
    flat = {name: torch.zeros(dense.shape[:2], dtype=torch.float64).flatten() for name in MEASURES}
    rows = max(1, _ELEMENTS // model.config.get_text_config().vocab_size)
    pairs = zip(dense.flatten(0, 1).split(rows), compact.flatten(0, 1).split(rows), strict=True)
    for index, (whole, small) in enumerate(pairs):
        log_p, log_q = (logits_from_hidden(model, part).double().log_softmax(-1) for part in (whole, small))
        p, q = log_p.exp(), log_q.exp()
        found = {
            "kl": (p * (log_p - log_q)).sum(-1).clamp_min(0.0),
            "tv": (p - q).abs().sum(-1) / 2,
            "log_prob": (log_p - log_q).abs().amax(-1),
            "output": (whole.double() - small.double()).norm(dim=-1),
        }
        for name, values in found.items():
            flat[name][index * rows : index * rows + len(values)] = values.cpu().nan_to_num(
                nan=torch.inf, posinf=torch.inf
            )
    return {name: values.view(dense.shape[:2]) for name, values in flat.items()}


@torch.no_grad()
def without_prefix(
    model: PreTrainedModel, suffixes: Int[Tensor, "suffixes positions"], prefix_len: int
) -> Float[Tensor, "suffixes positions hidden"]:
    """The suffix's representations with an empty cache: r(n) = 0, its tokens at their own positions n + 1, n + 2, ...

    Args:
        model: a causal LM.
        suffixes: token ids.
        prefix_len: n.
    """
    tokens = suffixes.to(model.device)
    positions = torch.arange(prefix_len, prefix_len + suffixes.shape[1], device=model.device).expand(tokens.shape)
    with frozen(model):
        return hidden_states(model, input_ids=tokens, position_ids=positions, use_cache=False)


def summary_values(
    errors: Mapping[str, Tensor], counted: Bool[Tensor, "suffixes positions"], role: str
) -> dict[str, float]:
    """Mean and worst of every measure over the outputs that count, and how many they are.

    Args:
        errors: of ``output_errors``.
        counted: which outputs; none gives no figures but their number.
        role: "test" names the figures ``kl``, ``kl_worst``, ... ``num_outputs``; another role precedes them.
    """
    head = "" if role == "test" else f"{role}_"
    values = {f"{head}num_outputs": float(counted.sum())}
    if not counted.any():
        return values
    for name, all_values in errors.items():
        own = all_values[counted]
        values |= {f"{head}{name}": float(own.mean()), f"{head}{name}_worst": float(own.max())}
    return values
