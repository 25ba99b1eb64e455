"""The parts of the training objective."""

from kvcat.losses.budget import budget_loss
from kvcat.losses.prediction import distillation_kl, next_token_loss

__all__ = ["budget_loss", "distillation_kl", "next_token_loss"]
