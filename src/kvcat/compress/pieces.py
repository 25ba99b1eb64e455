"""Long documents in bounded memory: each piece is compressed before the next one is read.

What a model holds on the way are the slots so far and one piece, in place of the whole text. Later
pieces attend to what is compact already, and slots stay as they were fitted.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from kvcat.cache import (
    CompactCache,
    FirstSlots,
    document_digests,
    fingerprint,
    first_ids,
    first_slots,
)
from kvcat.compress.base import Compressor
from kvcat.compress.documents import check_length
from kvcat.compress.parts import repeated_tokens
from kvcat.compress.sessions.inputs import compaction_obstacle
from kvcat.compress.sessions.repetition import fitted_also_to
from kvcat.compress.sessions.state import SessionState
from kvcat.compress.trace import Reconstruction, Trace
from kvcat.errors import InputError
from kvcat.memory import return_freed_memory
from kvcat.models import model_name
from kvcat.progress import disable_bar

PIECE_TOKENS = 2048
"""Most tokens of a text that are compressed at once."""


def num_pieces(num_tokens: int) -> int:
    """The number of pieces of a text with so many tokens."""
    return -(-num_tokens // PIECE_TOKENS)


def check_layers(config: PreTrainedConfig) -> None:
    """Raise an ``InputError`` for a model whose layers cannot be compressed in pieces."""
    obstacle = compaction_obstacle(config)
    if obstacle:
        raise InputError(f"in_pieces compresses as sessions do: {obstacle}")


def check_pieces(config: PreTrainedConfig, sequence: Reconstruction, num_slots: int) -> None:
    """Raise an ``InputError`` for a document that cannot be compressed in pieces.

    Args:
        config: of the model, which must be able to continue from a compact cache and have positions
            for the text and a repetition.
        sequence: the text with the copy that supervises.
        num_slots: per layer and head; every piece needs one.
    """
    check_layers(config)
    check_length(config, sequence, "reconstruction", in_parts=True)
    count = num_pieces(sequence.prefix_len)
    least = -(-sequence.prefix_len // (sequence.prefix_len // count))
    if num_slots < least:
        raise InputError(
            f"num_slots is {num_slots}: {count} pieces need at least {least}, one slot each"
        )


@torch.no_grad()
def compress_in_pieces(
    model: PreTrainedModel,
    sequence: Reconstruction,
    compressor: Compressor,
    num_slots: int,
    on_piece: Callable[[Trace, float], None] = lambda _trace, _seconds: None,
) -> CompactCache:
    """The compact cache of a document that is read, repeated and compressed piece by piece.

    Every piece gets a share of the slots that is in proportion to its tokens.

    Args:
        model: a decoder-only transformers model.
        sequence: one text with the copy that supervises.
        compressor: fits slots to queries, without bits.
        num_slots: per layer and head, on average.
        on_piece: called with the trace of every piece that was read, and the seconds of reading it.

    Raises:
        InputError: as ``check_pieces``.
    """
    check_pieces(model.config, sequence, num_slots)
    prefix_len = sequence.prefix_len
    count = num_pieces(prefix_len)
    num_copied = sequence.input_ids.shape[1] - sequence.supervision_start
    num_opening = prefix_len - num_copied  # tokens of the text that the copy omits
    ids = sequence.input_ids[:, :prefix_len].to(model.device)
    instruction = sequence.input_ids[0, prefix_len : sequence.supervision_start]
    of_model = fingerprint(model)
    edges = [prefix_len * number // count for number in range(count + 1)]
    document: Any = None  # the cache of the pieces so far
    slots_of_first: FirstSlots = ()
    for start, stop in tqdm(
        list(pairwise(edges)), "pieces", delay=2.0, disable=disable_bar(), leave=False
    ):
        begun = time.perf_counter()
        state, _ = SessionState.empty(model, document).run(model, ids[0, start:stop])
        trace = state.trace(model, of_model, num_later=0)
        on_piece(trace, time.perf_counter() - begun)
        repeated = repeated_tokens(trace, instruction, max(0, num_opening - start), lead=0)
        fitted = fitted_also_to(trace, repeated)
        size = num_slots * stop // prefix_len - num_slots * start // prefix_len
        piece = compressor(fitted, num_slots=size)
        del state, trace, repeated, fitted
        return_freed_memory()
        if document is None:
            slots_of_first = first_slots([layer.heads() for layer in piece.ordinary_layers()], 0)
            document = piece
        else:
            document = document.followed_by(piece)
    record = replace(
        document.record,
        model=model_name(model),
        architecture=type(model).__name__,
        document=document_digests(ids),
        first_ids=first_ids(ids),
        first_slots=slots_of_first,
        chat=sequence.chat,
        chat_template=sequence.chat_template,
        supervision="reconstruction",
        appended=0,
    )
    return replace(document, record=record)
