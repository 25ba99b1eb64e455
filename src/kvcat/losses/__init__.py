"""The terms of the training objective, and their chunked forms."""

from kvcat.losses.chunked import chunked_distillation, chunked_kl, chunked_objective
from kvcat.losses.head import OutputHead
from kvcat.losses.scores import PositionScores, score_positions
from kvcat.losses.terms import budget_loss, distillation_kl, next_token_loss

__all__ = [
    "OutputHead",
    "PositionScores",
    "budget_loss",
    "chunked_distillation",
    "chunked_kl",
    "chunked_objective",
    "distillation_kl",
    "next_token_loss",
    "score_positions",
]
