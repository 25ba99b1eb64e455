"""The training objective as one module: the model, its policies, and the loss of a micro-batch."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcat.losses import budget_loss, chunked_kl, chunked_objective
from kvcat.models import HiddenOutput, MaskedPass, hidden_states, output_head
from kvcat.policies import build_policies
from kvcat.training.config import TrainConfig
from kvcat.types import Float, Int, Tensor

NEAR = 0.05  # a score within this distance of the threshold counts as near it

Record = dict[str, Any]
"""Scalars without gradient by name; ``kept``, ``mean_score`` and ``near_threshold`` by first layer of each group."""


class Objective(nn.Module):
    """L = lambda_mask KL(sg dense || masked) + lambda_anchor NTP(dense) + lambda_budget B; NTP alone for the control.

    All parameters that are trained belong to this module and are used inside its forward, so sharding, gradient
    reduction and checkpoints need to know nothing else. The model is not yet sharded when it is handed over.

    References: KV-CAT, equation "training_objective" and appendix "Training objective".
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig) -> None:
        super().__init__()
        self.config, self.model = config, model
        self.masked_pass = make_masked_pass(model, config)
        self.head = output_head(model)
        self._teacher: tuple[PreTrainedModel, ...] = ()  # a tuple, so that it is not part of the state
        if config.teacher == "frozen":
            teacher = copy.deepcopy(model).requires_grad_(False).eval()
            for parameter in teacher.parameters():  # not the buffers: positions stay exact
                parameter.data = parameter.data.to(getattr(torch, config.dtype))
            self._teacher = (teacher,)

    def policy_parameters(self) -> list[nn.Parameter]:
        """The routers' parameters; empty where the policy learns nothing."""
        return [p for parameters in self.router_parameters().values() for p in parameters]

    def router_parameters(self) -> dict[str, list[nn.Parameter]]:
        """The parameters of each router, by the first layer of its group."""
        policies = {} if self.masked_pass is None else self.masked_pass.policies
        return {start: parameters for start, p in policies.items() if (parameters := list(p.parameters()))}

    def forward(
        self, tokens: Int[Tensor, "batch tokens"], generators: Sequence[torch.Generator], step: int | None
    ) -> tuple[Float[Tensor, ""], Record]:
        """The objective with gradient, and its parts; ``generators`` draw random masks, one per sequence.

        ``step``, from 0, decides the routers' target and the split; None for validation.
        """
        config = self.config
        if self.masked_pass is None:
            hidden = hidden_states(self.model, input_ids=tokens, use_cache=False)
            losses = chunked_objective(self.head, hidden, None, tokens)
            return losses.total, {"dense_loss": losses.dense_loss}
        prefix_len = config.prefix_len_at(step)
        out = self.masked_pass.hidden(tokens, generators, prefix_len=prefix_len)
        total, record = self._distill(out, tokens, prefix_len or 0)
        scores = {start: score.detach() for start, score in out.scores.items()}
        keep = {start: (score > config.tau).to(score.dtype) for start, score in scores.items()}
        target = config.target_keep if step is None else config.target_at(step)
        budget = torch.stack([budget_loss(keep[start], out.scores[start], target) for start in keep]).mean()
        if self.policy_parameters():
            total = total + config.budget_weight * budget
        record |= {
            "budget": budget.detach(),
            "kept": {str(i): k.mean() for i, k in keep.items()},
            "mean_score": {str(i): s.mean() for i, s in scores.items()},
            "near_threshold": {str(i): ((s - config.tau).abs() < NEAR).float().mean() for i, s in scores.items()},
        }
        return total, record

    def _distill(
        self, out: HiddenOutput, tokens: Int[Tensor, "batch tokens"], prefix_len: int
    ) -> tuple[Float[Tensor, ""], Record]:
        """The distillation of the masked tokens and the anchor of all tokens, with their parts."""
        config, suffix = self.config, slice(prefix_len, None)
        share = (tokens.shape[1] - 1 - prefix_len) / (tokens.shape[1] - 1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._teacher):
            both = chunked_objective(
                self.head, out.dense_hidden[:, suffix], out.masked_hidden, tokens[:, suffix],
                mask_weight=config.mask_weight, anchor_weight=config.anchor_weight * share,
            )  # fmt: skip
            total, dense_loss = both.total, both.dense_loss
            if prefix_len:
                prefix = slice(0, prefix_len + 1)
                rest = chunked_objective(
                    self.head, out.dense_hidden[:, prefix], None, tokens[:, prefix],
                    anchor_weight=config.anchor_weight * (1 - share),
                )  # fmt: skip
                total = total + rest.total
                dense_loss = share * dense_loss + (1 - share) * rest.dense_loss
        for teacher in self._teacher:  # lambda_mask KL(base || masked) + lambda_anchor KL(base || dense)
            head = output_head(teacher)
            with torch.no_grad():
                base = hidden_states(teacher, input_ids=tokens, use_cache=False)
            masked = chunked_kl(head, base[:, prefix_len:], self.head, out.masked_hidden)
            dense = chunked_kl(head, base, self.head, out.dense_hidden)
            total = config.mask_weight * masked + config.anchor_weight * dense
        return total, {"dense_loss": dense_loss, "masked_loss": both.masked_loss, "kl": both.kl, "top1": both.top1}


def make_masked_pass(model: PreTrainedModel, config: TrainConfig) -> MaskedPass | None:
    """The pair of passes with the configured policy, or None for the control."""
    if config.policy == "control":
        return None
    text = model.config.get_text_config()
    policies = build_policies(
        config.policy, num_layers=text.num_hidden_layers, hidden_size=text.hidden_size,
        group_starts=config.group_starts, num_groups=config.num_groups, target=config.target_keep,
        feature_dim=config.feature_dim, noise=config.router_noise, seed=config.seed,
    )  # fmt: skip
    return MaskedPass(model, policies, tau=config.tau, detach_prefix=config.detach_prefix)
