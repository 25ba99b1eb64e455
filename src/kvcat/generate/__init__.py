"""Generation after a compact cache: one loop for one answer, a batch, and a session's pieces."""

from kvcat.generate.answers import Answer, AnswerStream, TakeText, stop_tokens
from kvcat.generate.batches import (
    BATCH_ROWS,
    BatchQuestion,
    answer,
    answer_batch,
    answer_length,
    batch_size,
)
from kvcat.generate.loop import Row, generate
from kvcat.generate.settings import SAMPLING, end_tokens, left_out, plain_generation
from kvcat.settings import Sampling

__all__ = [
    "BATCH_ROWS",
    "SAMPLING",
    "Answer",
    "AnswerStream",
    "BatchQuestion",
    "Row",
    "Sampling",
    "TakeText",
    "answer",
    "answer_batch",
    "answer_length",
    "batch_size",
    "end_tokens",
    "generate",
    "left_out",
    "plain_generation",
    "stop_tokens",
]
