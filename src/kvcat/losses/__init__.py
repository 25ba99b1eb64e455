"""The parts of the training objective."""

from kvcat.losses.chunked import ChunkedLosses, chunked_kl, chunked_objective, default_chunk_tokens
from kvcat.losses.head import OutputHead
from kvcat.losses.scoring import PositionScores, score_positions
from kvcat.losses.terms import budget_loss, distillation_kl, next_token_loss

__all__ = [
    "ChunkedLosses", "OutputHead", "PositionScores", "budget_loss", "chunked_kl", "chunked_objective",
    "default_chunk_tokens", "distillation_kl", "next_token_loss", "score_positions",
]  # fmt: skip
