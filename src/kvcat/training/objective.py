"""The training objective and its parts, for one micro-batch."""

from dataclasses import dataclass

import torch
from torch import nn

from kvcat.losses import budget_loss, distillation_kl, next_token_loss
from kvcat.models import MaskedPass
from kvcat.training.config import TrainConfig
from kvcat.types import Float, Int, Tensor


@dataclass
class StepLosses:
    """The objective and what it is made of.

    Args:
        total: the weighted sum, with gradient.
        parts: without gradient: ``dense_loss``, and with a policy ``masked_loss``, ``kl``, ``top1``, ``budget``.
        kept: kept fraction of each group, by its first layer.
        mean_score: mean keep probability of each group.
    """

    total: Float[Tensor, ""]
    parts: dict[str, float]
    kept: dict[int, float]
    mean_score: dict[int, float]


def objective(
    model: nn.Module,
    masked_pass: MaskedPass | None,
    tokens: Int[Tensor, "batch tokens"],
    config: TrainConfig,
    generator: torch.Generator,
) -> StepLosses:
    """L = lambda_mask KL(sg dense || masked) + lambda_anchor NTP(dense) + lambda_budget B; NTP alone without a policy.

    Args:
        model: the causal LM.
        masked_pass: the pair of passes over the same model; None for the control.
        tokens: token ids.
        config: weights, threshold and target.
        generator: source of the policies' random masks.

    References: KV-CAT, equation "training_objective" and appendix "Training objective".
    """
    if masked_pass is None:
        loss = next_token_loss(model(input_ids=tokens, use_cache=False).logits, tokens)
        return StepLosses(loss, {"dense_loss": loss.item()}, {}, {})
    out = masked_pass(tokens, generator)
    anchor = next_token_loss(out.dense_logits, tokens)
    kl = distillation_kl(out.dense_logits, out.masked_logits)
    keep = {layer: (scores.detach() > config.tau).to(scores.dtype) for layer, scores in out.scores.items()}
    budget = torch.stack([budget_loss(keep[c], out.scores[c], config.target_keep) for c in keep]).mean()
    learned = any(p.requires_grad for p in masked_pass.parameters())
    total = config.mask_weight * kl + config.anchor_weight * anchor
    if learned:
        total = total + config.budget_weight * budget
    with torch.no_grad():
        agree = out.dense_logits[:, :-1].argmax(-1) == out.masked_logits[:, :-1].argmax(-1)
        parts = {
            "dense_loss": anchor.item(),
            "masked_loss": next_token_loss(out.masked_logits, tokens).item(),
            "kl": kl.item(),
            "top1": agree.double().mean().item(),
            "budget": budget.item(),
        }
    kept = {c: k.mean().item() for c, k in keep.items()}
    return StepLosses(total, parts, kept, {c: s.detach().mean().item() for c, s in out.scores.items()})


def mean_losses(losses: list[StepLosses]) -> dict[str, object]:
    """Averages over micro-batches of equal size, as the fields of a metrics record."""
    n = len(losses)
    record: dict[str, object] = {k: sum(x.parts[k] for x in losses) / n for k in losses[0].parts}
    for name in ("kept", "mean_score"):
        layers = getattr(losses[0], name)
        if layers:
            record[name] = {str(c): sum(getattr(x, name)[c] for x in losses) / n for c in layers}
    return record
