"""The parts of the training objective."""

from kvcat.losses.chunked import OutputHead, PositionScores, chunked_kl, chunked_objective, score_positions
from kvcat.losses.terms import budget_loss, distillation_kl, next_token_loss

__all__ = [
    "OutputHead", "PositionScores", "budget_loss", "chunked_kl", "chunked_objective", "distillation_kl",
    "next_token_loss", "score_positions",
]  # fmt: skip
