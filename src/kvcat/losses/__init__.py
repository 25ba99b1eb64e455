"""The parts of the training objective."""

from kvcat.losses.budget import budget_loss
from kvcat.losses.chunked import ChunkedLosses, chunked_objective, default_chunk_tokens
from kvcat.losses.head import OutputHead
from kvcat.losses.prediction import distillation_kl, next_token_loss
from kvcat.losses.scoring import PositionScores, score_positions
from kvcat.losses.teaching import chunked_kl

__all__ = [
    "ChunkedLosses",
    "OutputHead",
    "PositionScores",
    "budget_loss",
    "chunked_kl",
    "chunked_objective",
    "default_chunk_tokens",
    "distillation_kl",
    "next_token_loss",
    "score_positions",
]
