"""The training objective as one module: the model, its policies, and the loss of a micro-batch."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvcat.losses import OutputHead, budget_loss, chunked_kl, chunked_objective
from kvcat.models import HiddenOutput, MaskedPass, hidden_states, output_head
from kvcat.policies import build_policies
from kvcat.training.config import TrainConfig
from kvcat.types import Float, Int, Tensor

NEAR = 0.05  # a score within this distance of the threshold counts as near it

Record = dict[str, Any]
"""Scalars without gradient by name; ``kept``, ``mean_score`` and ``near_threshold`` by first layer
of each group. With a split, the masked loss, the KL and the top-1 agreement are means over the
tokens after it, and ``dense_suffix_loss`` is the dense loss of the same tokens."""


class Objective(nn.Module):
    """The weighted sum of three losses; for the control, the next-token loss alone.

    L = lambda_mask KL(sg dense || masked) + lambda_anchor NTP(dense) + lambda_budget B.

    All trained parameters belong to this module and are used inside its forward, so sharding,
    gradient reduction and checkpoints only deal with this module.

    Args:
        model: not yet sharded.

    References: KV-CAT, equation "training_objective" and appendix "Training objective".
    """

    config: TrainConfig
    model: PreTrainedModel
    masked_pass: MaskedPass | None
    head: OutputHead

    def __init__(self, model: PreTrainedModel, config: TrainConfig) -> None:
        super().__init__()
        self.config = config
        self.model = model
        # in a tuple, so that the teacher is not part of the module's state; empty without a teacher
        self._teachers: tuple[PreTrainedModel, ...] = ()
        if config.teacher == "frozen":
            self._teachers = (_frozen_copy(model, getattr(torch, config.dtype)),)
        self.masked_pass = make_masked_pass(model, config)
        self.head = output_head(model)

    def policy_parameters(self) -> list[nn.Parameter]:
        """The routers' parameters; empty if the policy learns nothing."""
        return [p for parameters in self.router_parameters().values() for p in parameters]

    def router_parameters(self) -> dict[str, list[nn.Parameter]]:
        """The parameters of each router, by the first layer of its group."""
        if self.masked_pass is None:
            return {}
        by_start = {start: list(p.parameters()) for start, p in self.masked_pass.policies.items()}
        return {start: parameters for start, parameters in by_start.items() if parameters}

    def forward(
        self,
        tokens: Int[Tensor, "batch tokens"],
        generators: Sequence[torch.Generator],
        step: int | None,
    ) -> tuple[Float[Tensor, ""], Record]:
        """The objective with gradient, and its terms.

        Args:
            generators: sources of random masks, one per sequence.
            step: counted from 0, decides the routers' target and the split; None for validation.
        """
        config = self.config
        if self.masked_pass is None:
            hidden = hidden_states(self.model, input_ids=tokens, use_cache=False)
            losses = chunked_objective(
                self.head, hidden[:, :-1], None, tokens[:, 1:], compiled=self._compiles_loss
            )
            return losses.total, {"dense_loss": losses.dense_loss}
        prefix_len = config.prefix_len_at(step)
        out = self.masked_pass.hidden(tokens, generators, prefix_len=prefix_len)
        total, record = self._distill(out, tokens, prefix_len or 0)
        target = config.target_keep if step is None else config.target_at(step)
        budget, budget_record = _budget(out.scores, target, config.tau)
        if self.policy_parameters():
            total = total + config.budget_weight * budget
        return total, {**record, **budget_record}

    @property
    def _compiles_loss(self) -> bool:
        """Whether the loss is compiled: on a CPU it is as fast without."""
        return self.config.compile and self.head.weight.device.type != "cpu"

    def _distill(
        self, out: HiddenOutput, tokens: Int[Tensor, "batch tokens"], prefix_len: int
    ) -> tuple[Float[Tensor, ""], Record]:
        """The distillation of the masked tokens and the anchor of all tokens, and their terms.

        The hidden state at t predicts the token at t + 1.
        """
        config = self.config
        num_predictions = tokens.shape[1] - 1
        suffix_share = (num_predictions - prefix_len) / num_predictions
        # a frozen teacher replaces the objective below, of which only the record is used then
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._teachers):
            suffix = chunked_objective(
                self.head,
                out.dense_hidden[:, prefix_len:-1],
                out.masked_hidden[:, :-1],
                tokens[:, prefix_len + 1 :],
                mask_weight=config.mask_weight,
                anchor_weight=config.anchor_weight * suffix_share,
                compiled=self._compiles_loss,
            )
            total = suffix.total
            dense_loss = suffix.dense_loss
            if prefix_len:
                prefix = chunked_objective(
                    self.head,
                    out.dense_hidden[:, :prefix_len],
                    None,
                    tokens[:, 1 : prefix_len + 1],
                    anchor_weight=config.anchor_weight * (1 - suffix_share),
                    compiled=self._compiles_loss,
                )
                total = total + prefix.total
                dense_loss = suffix_share * dense_loss + (1 - suffix_share) * prefix.dense_loss
        for teacher in self._teachers:
            total = self._distill_from(teacher, out, tokens, prefix_len)
        record = {
            "dense_loss": dense_loss,
            "masked_loss": suffix.masked_loss,
            "kl": suffix.kl,
            "top1": suffix.top1,
        }
        if prefix_len:
            record["dense_suffix_loss"] = suffix.dense_loss
        return total, record

    def _distill_from(
        self,
        teacher: PreTrainedModel,
        out: HiddenOutput,
        tokens: Int[Tensor, "batch tokens"],
        prefix_len: int,
    ) -> Float[Tensor, ""]:
        """lambda_mask KL(base || masked) + lambda_anchor KL(base || dense)."""
        teacher_head = output_head(teacher)
        with torch.no_grad():
            base = hidden_states(teacher, input_ids=tokens, use_cache=False)[:, :-1]
        masked = chunked_kl(
            teacher_head, base[:, prefix_len:], self.head, out.masked_hidden[:, :-1]
        )
        dense = chunked_kl(teacher_head, base, self.head, out.dense_hidden[:, :-1])
        return self.config.mask_weight * masked + self.config.anchor_weight * dense


def loss_notes(model: PreTrainedModel) -> list[str]:
    """Lines for people about a term of the model's pretraining that the loss does not have."""
    coefficient = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
    if not coefficient:
        return []
    return [
        "the loss has no term that keeps the model's experts equally busy (router_aux_loss_coef "
        f"{coefficient:g} is not used)"
    ]


def make_masked_pass(model: PreTrainedModel, config: TrainConfig) -> MaskedPass | None:
    """The dense and the masked pass with the configured policy; None for the control."""
    if config.policy == "control":
        return None
    text = model.config.get_text_config()
    policies = build_policies(
        config.policy,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        group_starts=config.group_starts,
        num_groups=config.num_groups,
        target=config.target_keep,
        feature_dim=config.feature_dim,
        noise=config.router_noise,
        seed=config.seed,
    )
    return MaskedPass(model, policies, tau=config.tau, detach_prefix=config.detach_prefix)


def _frozen_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy in evaluation mode whose parameters, of this dtype, get no gradient."""
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    for parameter in teacher.parameters():  # not the buffers: positions stay exact
        parameter.data = parameter.data.to(dtype)
    return teacher


def _budget(
    scores: dict[int, Float[Tensor, "batch slots"]], target: float, tau: float
) -> tuple[Float[Tensor, ""], Record]:
    """The mean budget loss of all groups with gradient, and what the policies keep."""
    losses: list[Tensor] = []
    kept: dict[str, Tensor] = {}
    mean_score: dict[str, Tensor] = {}
    near_threshold: dict[str, Tensor] = {}
    for start, group_scores in scores.items():
        detached = group_scores.detach()
        keep = (detached > tau).to(detached.dtype)
        losses.append(budget_loss(keep, group_scores, target))
        kept[str(start)] = keep.mean()
        mean_score[str(start)] = detached.mean()
        near_threshold[str(start)] = ((detached - tau).abs() < NEAR).float().mean()
    budget = torch.stack(losses).mean()
    record: Record = {
        "budget": budget.detach(),
        "kept": kept,
        "mean_score": mean_score,
        "near_threshold": near_threshold,
    }
    return budget, record
