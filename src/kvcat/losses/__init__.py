"""The terms of the training objective, and their chunked forms."""
# isort: skip_file

# fmt: off
from kvcat.losses.chunked import (
    chunked_distillation as chunked_distillation, chunked_kl as chunked_kl,
    chunked_objective as chunked_objective,
)
from kvcat.losses.head import OutputHead as OutputHead
from kvcat.losses.scores import PositionScores as PositionScores, score_positions as score_positions
from kvcat.losses.terms import (
    budget_loss as budget_loss, distillation_kl as distillation_kl,
    next_token_loss as next_token_loss,
)
# fmt: on
