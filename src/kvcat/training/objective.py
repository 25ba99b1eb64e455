"""The training objective as one module: the model, its policies, and the loss of a micro-batch."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from kvcat.losses import OutputHead, budget_loss, chunked_kl, chunked_objective
from kvcat.models import HiddenOutput, MaskedPass, hidden_states, output_head
from kvcat.policies import AttentionMassPolicy, RandomPolicy, build_policies
from kvcat.training.config import TrainConfig
from kvcat.training.lora import add_lora
from kvcat.training.world import World
from kvcat.types import Float, Int, Tensor

NEAR = 0.05  # a score that close to the threshold is near it

Record = dict[str, Any]
"""Scalars without gradient by name; ``kept``, ``mean_score`` and ``near_threshold`` by first layer of each group."""


class Objective(nn.Module):
    """L = lambda_mask KL(sg dense || masked) + lambda_anchor NTP(dense) + lambda_budget B; NTP alone for the control.

    Everything that is trained is below this module and everything is used inside its forward, so sharding, gradient
    reduction and checkpoints need know nothing else.

    Args:
        model: the causal LM, not yet sharded.
        config: policy, weights, threshold and target.

    Raises:
        InputError: groups that start at layers which do not exist, a model whose head is not linear.

    References: KV-CAT, equation "training_objective" and appendix "Training objective".
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig) -> None:
        super().__init__()
        self.config, self.model = config, model
        self.masked_pass = make_masked_pass(model, config)
        self.head = output_head(model)
        self._teacher = frozen_teacher(model) if config.teacher == "frozen" else None
        add_lora(model, config)

    def policy_parameters(self) -> list[nn.Parameter]:
        """The routers' parameters; empty where the policy learns nothing."""
        return [] if self.masked_pass is None else list(self.masked_pass.parameters())

    def forward(
        self,
        tokens: Int[Tensor, "batch tokens"],
        generators: Sequence[torch.Generator],
        sequences: Sequence[int],
        step: int | None,
    ) -> tuple[Float[Tensor, ""], Record]:
        """The objective with gradient, and what it is made of.

        Args:
            tokens: token ids.
            generators: source of random masks, one per sequence.
            sequences: numbers of the sequences in their step, consecutive.
            step: from 0, decides target and keep ratio; None for validation, which masks every sequence at the target.
        """
        config = self.config
        if self.masked_pass is None:
            hidden = hidden_states(self.model, input_ids=tokens, use_cache=False)
            losses = chunked_objective(self.head, hidden, None, tokens, mask_weight=0.0, anchor_weight=1.0)
            return losses.total, {"dense_loss": losses.dense_loss}
        ratio = self._choose_ratio(step)
        prefix_len = config.prefix_len_at(step)
        if prefix_len is not None:
            out = self.masked_pass.hidden(tokens, generators, prefix_len=prefix_len)
        else:
            order, num_masked = self._masked_first(sequences, step)
            tokens, generators = tokens[order], [generators[row] for row in order[:num_masked]]
            out = self.masked_pass.hidden(tokens, generators, num_masked)
        total, record = self._distilled(out, tokens, prefix_len or 0)
        with torch.no_grad():
            keep = {c: (scores > config.tau).to(scores.dtype) for c, scores in out.scores.items()}
            kept = keep if ratio is None else out.keep
        target = config.target_keep if step is None else config.target_at(step)
        budget = torch.stack([budget_loss(keep[c], out.scores[c], target) for c in keep]).mean()
        if self.policy_parameters():
            total = total + config.budget_weight * budget
        scores = {c: s.detach() for c, s in out.scores.items()}
        record |= {
            "budget": budget.detach(),
            "kept": {str(c): k.detach().mean() for c, k in kept.items()},
            "mean_score": {str(c): s.mean() for c, s in scores.items()},
            "near_threshold": {str(c): ((s - config.tau).abs() < NEAR).float().mean() for c, s in scores.items()},
        }
        return total, record

    def _choose_ratio(self, step: int | None) -> float | None:
        """This step's drawn keep ratio, handed to whoever decides the count; None leaves threshold and target."""
        ratio = None
        if self.config.keep_range is not None and step is not None:
            ratio = float(np.random.default_rng([self.config.seed, step]).uniform(*self.config.keep_range))
        for policy in self.masked_pass.policies.values() if self.masked_pass else ():
            if isinstance(policy, RandomPolicy | AttentionMassPolicy):
                policy.keep_ratio = self.config.target_keep if ratio is None else ratio
            elif self.masked_pass is not None:
                self.masked_pass.keep_ratio = ratio
        return ratio

    def _masked_first(self, sequences: Sequence[int], step: int | None) -> tuple[list[int], int]:
        """Rows with those of the masked pass first, evenly spread over a step's sequences, and their number."""
        share = self.config.masked_fraction if step is not None else 1.0
        chosen = [int((s + 1) * share + 1e-6) > int(s * share + 1e-6) for s in sequences]
        return sorted(range(len(sequences)), key=lambda row: not chosen[row]), sum(chosen)

    def _distilled(
        self, out: HiddenOutput, tokens: Int[Tensor, "batch tokens"], prefix_len: int
    ) -> tuple[Float[Tensor, ""], Record]:
        """Distillation where there is a masked pass and the anchor everywhere, with their parts."""
        config, paired = self.config, len(out.masked_hidden)
        both_passes = slice(0, paired), slice(prefix_len, None)
        alone = (slice(None), slice(0, prefix_len + 1)) if prefix_len else (slice(paired, None), slice(None))
        predictions = len(tokens) * (tokens.shape[1] - 1)
        share = tokens[both_passes][:, 1:].numel() / predictions
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._teacher is None):
            both = chunked_objective(
                self.head, out.dense_hidden[both_passes], out.masked_hidden, tokens[both_passes],
                mask_weight=config.mask_weight, anchor_weight=config.anchor_weight * share,
            )  # fmt: skip
            total, dense_loss = both.total, both.dense_loss
            if share < 1:
                rest = chunked_objective(
                    self.head, out.dense_hidden[alone], None, tokens[alone],
                    mask_weight=0.0, anchor_weight=config.anchor_weight * (1 - share),
                )  # fmt: skip
                total = total + rest.total
                dense_loss = share * dense_loss + (1 - share) * rest.dense_loss
        if self._teacher is not None:
            total = self._taught(out, tokens, both_passes)
        record = {"dense_loss": dense_loss, "masked_loss": both.masked_loss, "kl": both.kl, "top1": both.top1}
        return total, record

    def _taught(
        self, out: HiddenOutput, tokens: Int[Tensor, "batch tokens"], both_passes: tuple[slice, slice]
    ) -> Float[Tensor, ""]:
        """lambda_mask KL(base || masked) + lambda_anchor KL(base || dense), the logits of one chunk at a time."""
        model, head = self._teacher or (self.model, self.head)
        with torch.no_grad():
            taught = hidden_states(model, input_ids=tokens, use_cache=False)
        masked = chunked_kl(head, taught[both_passes], self.head, out.masked_hidden)
        dense = chunked_kl(head, taught, self.head, out.dense_hidden)
        return self.config.mask_weight * masked + self.config.anchor_weight * dense


def frozen_teacher(model: PreTrainedModel) -> tuple[PreTrainedModel, OutputHead]:
    """A copy of the model as it stands, in evaluation mode and without gradient, and its head."""
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    return teacher, output_head(teacher)


def make_masked_pass(model: PreTrainedModel, config: TrainConfig) -> MaskedPass | None:
    """The pair of passes with the configured policy, or None for the control.

    Raises:
        InputError: groups that start at layers which do not exist.
    """
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
    return MaskedPass(model, policies, tau=config.tau, coupling=config.coupling)


def mean_record(records: Sequence[Record], weights: Sequence[float], world: World) -> dict[str, Any]:
    """The weighted average of all processes' records as plain numbers; the devices are read once.

    Args:
        records: of this process, all of the same names.
        weights: of each record, at least one positive in some process.
        world: the processes.
    """
    names = list(_flat(records[0]))
    rows = torch.stack([torch.stack(list(_flat(record).values())).double() for record in records])
    weight = torch.tensor(weights, dtype=rows.dtype, device=rows.device)
    sums = world.mean(torch.cat([weight @ rows, weight.sum()[None]]))
    told: dict[str, Any] = {}
    for (name, group), value in zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True):
        if group is None:
            told[name] = value
        else:
            told.setdefault(name, {})[group] = value
    return told


def _flat(record: Record) -> dict[tuple[str, str | None], Tensor]:
    flat: dict[tuple[str, str | None], Tensor] = {}
    for name, value in record.items():
        flat |= (
            {(name, group): part for group, part in value.items()} if isinstance(value, dict) else {(name, None): value}
        )
    return flat
