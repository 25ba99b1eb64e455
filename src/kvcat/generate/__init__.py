"""Generation after a compact cache: one loop for one answer, a batch, and a session's pieces."""
# isort: skip_file

# fmt: off
from kvcat.generate.answers import (
    Answer as Answer, AnswerStream as AnswerStream, TakeText as TakeText,
    stop_tokens as stop_tokens,
)
from kvcat.generate.batches import (
    BATCH_ROWS as BATCH_ROWS, AnswerRow as AnswerRow, BatchQuestion as BatchQuestion,
    answer as answer, answer_batch as answer_batch, answer_length as answer_length,
    batch_size as batch_size,
)
from kvcat.generate.loop import Row as Row, generate as generate
from kvcat.generate.settings import (
    SAMPLING as SAMPLING, end_tokens as end_tokens, left_out as left_out,
    plain_generation as plain_generation,
)
from kvcat.settings import Sampling as Sampling
# fmt: on
