"""Traces of long documents: the text is read once, and repeated part by part behind it.

One repetition of the whole text would need twice its positions, and would end far from what it
repeats. Each part's repetition begins right after the text, and its queries alone are kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import Cache, PreTrainedModel

from kvcat.cache import rope_factors
from kvcat.compress.queries import own_queries
from kvcat.compress.query_set import QuerySet
from kvcat.compress.trace import LAST_POSITIONS, Reconstruction, Trace, TracedText
from kvcat.compress.tracing import kept_positions, read, split_layers
from kvcat.memory import return_freed_memory
from kvcat.models import capture, frozen, positions_of
from kvcat.progress import disable_bar
from kvcat.types import Int, Tensor

PART_TOKENS = 1024
"""Most tokens of a text that are repeated at once."""
_LEAST_TOKENS = 64  # of a part of a text that nearly fills the model's positions
LEAD = 16
"""Tokens before a part that begin its repetition, and whose queries are not kept."""


def num_parts(sequence: Reconstruction, positions: int, part_tokens: int = PART_TOKENS) -> int:
    """The number of parts in which the copy of a text is repeated; 1 for a short text.

    Args:
        sequence: the text with its copy.
        positions: of the model, which make parts of a very long text smaller.
        part_tokens: most tokens of a part.
    """
    num_copied = sequence.input_ids.shape[1] - sequence.supervision_start
    if num_copied <= part_tokens and sequence.input_ids.shape[1] <= positions:
        return 1
    num_free = positions - sequence.supervision_start - LEAD
    return -(-num_copied // min(part_tokens, max(_LEAST_TOKENS, num_free)))


def num_positions_in_parts(
    sequence: Reconstruction, positions: int, part_tokens: int = PART_TOKENS
) -> int:
    """The positions that a model needs to read a text and to repeat it part by part."""
    num_copied = sequence.input_ids.shape[1] - sequence.supervision_start
    count = num_parts(sequence, positions, part_tokens)
    if count == 1:
        return sequence.input_ids.shape[1]
    num_before = sequence.supervision_start + LEAD
    is_full = positions - num_before < _LEAST_TOKENS
    return num_before + (_LEAST_TOKENS if is_full else -(-num_copied // count))


def longest_text(sequence: Reconstruction, positions: int) -> int:
    """The tokens of the longest text that can be read and repeated, in parts or at once."""
    num_between = sequence.supervision_start - sequence.prefix_len
    num_opening = sequence.prefix_len - (sequence.input_ids.shape[1] - sequence.supervision_start)
    at_once = min((positions - num_between + num_opening) // 2, PART_TOKENS + num_opening)
    return max(at_once, positions - num_between - LEAD - _LEAST_TOKENS)


@torch.no_grad()
def trace_in_parts(
    model: PreTrainedModel,
    sequence: Reconstruction,
    *,
    room: int | None = None,
    part_tokens: int = PART_TOKENS,
    on_read: Callable[[], None] = lambda: None,
) -> Trace:
    """The trace of texts that are read once and then repeated part by part.

    It has no suffix: there are no predictions to learn from.

    Args:
        model: a decoder-only transformers model.
        sequence: texts of equal length with the copy that supervises.
        room: as in ``trace``.
        part_tokens: most tokens of a part.
        on_read: called when the text was read, before it is repeated.
    """
    prefix_len = sequence.prefix_len
    expected_len = prefix_len + (room or 0)
    text = TracedText(
        input_ids=sequence.input_ids[:, :prefix_len],
        prefix_len=prefix_len,
        supervision="reconstruction",
        supervision_start=prefix_len,
        chat=sequence.chat,
        chat_template=sequence.chat_template,
        rope=rope_factors(model.config, expected_len),
        room=room,
    )
    positions = positions_of(model.config)
    longest = max(num_positions_in_parts(sequence, positions, part_tokens), expected_len)
    split = split_layers(model, longest, None)
    count = num_parts(sequence, positions, part_tokens)
    kept = kept_positions(0, prefix_len, every=False)
    rounded = count > 1
    trace = read(model, text, split, kept, chunk_tokens=part_tokens, rounded=rounded)
    on_read()
    moved = own_queries(trace)
    if rounded:
        trace = _with_last_queries(trace)
    return_freed_memory()
    sources = [*_repeated(trace, sequence, count), *([] if moved is None else [moved])]
    return_freed_memory()
    return replace(trace, sources=sources)


@torch.no_grad()
def repeated_tokens(
    trace: Trace, instruction: Int[Tensor, " instruction"], first: int, *, lead: int = LEAD
) -> list[QuerySet]:
    """The queries of the last tokens of a prefix, repeated right after it; [] without positions.

    They are repeated after an instruction and the tokens before them, whose queries are not kept.

    Args:
        trace: of the prefix, the first tokens of which may be in a compact cache.
        instruction: that asks for the repetition.
        first: of the tokens.
        lead: most tokens before them that begin the repetition.
    """
    prefix = trace.input_ids[:, : trace.prefix_len]
    copied = prefix[:, max(0, first - lead) :]
    middle = instruction.to(prefix).expand(len(prefix), -1)
    start = trace.prefix_len + len(instruction)
    sequence = Reconstruction(torch.cat([prefix, middle, copied], dim=1), trace.prefix_len, start)
    positions = positions_of(trace.model.config)
    if trace.document is not None:
        positions -= trace.document.num_tokens
    if num_positions_in_parts(sequence, positions) > positions:
        return []
    sets = list(_repeated(trace, sequence, num_parts(sequence, positions)))
    numbers: list[Any] = [each.repeated for each in sets]
    chosen = [(repeated >= first).nonzero().squeeze(1) for repeated in numbers]
    return [each.selected(rows) for each, rows in zip(sets, chosen, strict=True) if len(rows)]


def _with_last_queries(trace: Trace) -> Trace:
    """The trace without the queries of its prefix except for those at the last positions."""
    positions = trace.prefix_positions[-LAST_POSITIONS:]
    layers = [
        replace(layer, prefix_queries=layer.prefix_queries[:, :, -len(positions) :].numbers())
        for layer in trace.layers
    ]
    return replace(trace, layers=layers, prefix_positions=positions)


def _repeated(trace: Trace, sequence: Reconstruction, count: int) -> Iterator[QuerySet]:
    """The queries of ``count`` parts, repeated right after the text.

    All of them are kept, because each selects the keys of the tokens that it repeats: with a third
    of them half of the right answers were lost.
    """
    copied = sequence.input_ids[:, sequence.supervision_start :]
    num_copied = copied.shape[1]
    edges = [number * num_copied // count for number in range(count + 1)]
    text_cache = trace.after_document(trace.dense_cache()).to_transformers(
        trace.model, read_only=True, any_length=True
    )
    ranges = list(pairwise(edges))
    for start, stop in tqdm(ranges, "repeating", delay=2.0, disable=disable_bar(), leave=False):
        yield _repeated_part(trace, text_cache, sequence, start, stop, rounded=count > 1)


def _repeated_part(
    trace: Trace,
    text_cache: Cache,
    sequence: Reconstruction,
    start: int,
    stop: int,
    *,
    rounded: bool,
) -> QuerySet:
    """The queries of one part of the copy; nothing else of its forward pass stays in memory.

    Args:
        trace: of the text.
        text_cache: of the text, for the model.
        sequence: the text with its copy.
        start, stop: range of the part in the copy.
        rounded: whether its queries are kept in 8 bits.
    """
    instruction = sequence.input_ids[:, sequence.prefix_len : sequence.supervision_start]
    copied = sequence.input_ids[:, sequence.supervision_start :]
    num_opening = sequence.prefix_len - copied.shape[1]  # tokens of the text that the copy omits
    lead = copied[:, max(0, start - LEAD) : start]
    ids = torch.cat([instruction, lead, copied[:, start:stop]], dim=1)
    last_seen = torch.arange(ids.shape[1] - (stop - start), ids.shape[1])
    with frozen(trace.model):
        captured = capture(
            trace.model,
            ids,
            query_positions=last_seen,
            hidden_start=ids.shape[1] - 1,
            past=text_cache,
            rope=trace.text.rope,
            layers=trace.layer_numbers,
            first_slot=-ids.shape[1],  # slots of a compact cache are fewer than its tokens
            rounded=rounded,
        )
    queries = QuerySet(
        states=captured.queries,
        positions=trace.prefix_len + last_seen,
        weights=torch.ones(stop - start),
        log_elsewhere=[],
        repeated=torch.arange(num_opening + start, num_opening + stop),
    )
    own_text = queries.log_masses(trace.layer_numbers, captured.scales, captured.keys, last_seen)
    return replace(queries, log_elsewhere=own_text)
