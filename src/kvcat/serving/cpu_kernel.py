"""Attention to documents next to an engine's pages on a CPU: one call for all requests of a step.

torch has no operator for heads with different numbers of slots, and one call for each document and
layer costs several times what its arithmetic does. So these are functions that Numba compiles, once
on a machine. ``document_attention`` is the same in plain torch.

Numbers are read as bits and become float32, because Numba knows neither bfloat16 nor float16.
"""

# pyright: reportMissingImports=false
# ruff: noqa: PLR0913 (compiled functions have no objects)

import functools
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from numba.core import cgutils
from numba.extending import intrinsic

_BLOCK = 64  # slots that are read at once
_UNROLL = 4  # terms of a sum for each time that it is read and written
# with these, sums may be computed in any order; infinities stay what they are
_OPTIONS = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "cache": True}
# of ``_attend``: it is compiled when this module is imported, not for the first request
_TYPES = (
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, float32, "
    "int64, int64[:, ::1], int64[::1], int64[::1], int32[:, ::1], int64[::1], int64[:, ::1], "
    "int64[:, ::1])"
)
_FLOAT32, _BFLOAT16, _FLOAT16 = range(3)
_KINDS = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}
_HALF_UNIT = np.float32(2.0**112)  # from the bits of a float16, moved to a float32's, to its number
_LOG2_E = np.float32(1.4426950408889634)
_LOWEST = np.float32(-87)  # e to this is the smallest float32


def kind_of(dtype: torch.dtype) -> int:
    """The number of a type of numbers in ``attend``."""
    return _KINDS[dtype]


def key_places(places: np.ndarray) -> np.ndarray:
    """Places of keys in a page, (head_dim, cells), as ``_attend`` reads them.

    They are negative, -1 - place, if not all keys are successive.
    """
    is_plain = np.array_equal(places.ravel(), places[0, 0] + np.arange(places.size))
    return places if is_plain else -1 - places


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads)


def attend(*arguments: Any) -> None:
    """``_attend`` without its first two arguments, with as many threads as torch has.

    Numba's own threads would be OpenMP's, and change the number of the engine's.
    """
    starts = arguments[-1]
    num_tasks = len(starts) * (starts.shape[1] - 1)
    num_threads = min(torch.get_num_threads(), num_tasks)
    if num_threads == 1:
        _attend(0, num_tasks, *arguments)
        return
    ends = [num_tasks * thread // num_threads for thread in range(num_threads + 1)]
    pool = _pool(num_threads)
    calls = [pool.submit(_attend, first, last, *arguments) for first, last in pairwise(ends)]
    for call in calls:
        call.result()


@no_type_check
@intrinsic
def _pointer(typing_context, address):  # noqa: ARG001
    """A pointer from a number, as C casts it."""

    def generate(context, builder, signature, arguments):  # noqa: ARG001
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return numba.types.voidptr(address), generate


@numba.njit(**_OPTIONS)
@no_type_check
def _itemsize(kind):
    return 4 if kind == _FLOAT32 else 2


@numba.njit(**_OPTIONS)
@no_type_check
def _read(address, kind, numbers):
    """Successive numbers of any kind in memory as float32."""
    bits = numbers.view(np.int32)
    count = len(numbers)
    if kind == _FLOAT32:
        wide = numba.carray(_pointer(address), (count,), np.int32)
        for i in range(count):
            bits[i] = wide[i]
        return
    half = numba.carray(_pointer(address), (count,), np.int16)
    if kind == _BFLOAT16:
        for i in range(count):
            bits[i] = np.int32(half[i]) << 16
    else:
        for i in range(count):
            bits[i] = ((half[i] & 0x7FFF) << 13) | ((half[i] & 0x8000) << 16)
        for i in range(count):
            numbers[i] *= _HALF_UNIT


@numba.njit(**_OPTIONS)
@no_type_check
def _write(numbers, address, kind):
    """The opposite of ``_read``, rounded to even; ``numbers`` may change."""
    bits = numbers.view(np.int32)
    count = len(numbers)
    if kind == _FLOAT32:
        wide = numba.carray(_pointer(address), (count,), np.int32)
        for i in range(count):
            wide[i] = bits[i]
        return
    half = numba.carray(_pointer(address), (count,), np.int16)
    if kind == _BFLOAT16:
        for i in range(count):
            half[i] = (bits[i] + 0x7FFF + ((bits[i] >> 16) & 1)) >> 16
    else:
        for i in range(count):
            numbers[i] /= _HALF_UNIT
        for i in range(count):
            size = bits[i] & 0x7FFFFFFF
            half[i] = ((size + 0xFFF + ((size >> 13) & 1)) >> 13) | ((bits[i] >> 16) & 0x8000)


@numba.njit(**_OPTIONS)
@no_type_check
def _weigh(scores, peak, mass):
    """Scores become weights, e^(score - new peak).

    Returns the peak, the sum of all weights so far, and the factor on the earlier ones.
    """
    new_peak = peak
    for j in range(len(scores)):
        new_peak = max(new_peak, scores[j])
    if new_peak == -np.inf:
        scores[:] = 0
        return new_peak, mass, np.float32(1)
    # e^x = 2^n 2^f with |f| <= 1/2 and a polynomial for 2^f, which becomes vector instructions
    powers = np.empty(len(scores), np.int32)
    for j in range(len(scores)):
        x = max(scores[j] - new_peak, _LOWEST) * _LOG2_E
        whole = np.floor(x + np.float32(0.5))
        f = x - whole
        y = np.float32(1.5403530e-4)
        y = y * f + np.float32(1.3333558e-3)
        y = y * f + np.float32(9.6181291e-3)
        y = y * f + np.float32(5.5504109e-2)
        y = y * f + np.float32(2.4022651e-1)
        y = y * f + np.float32(6.9314718e-1)
        scores[j] = y * f + np.float32(1)
        powers[j] = (np.int32(whole) + 127) << 23
    factor = np.exp(peak - new_peak)
    mass *= factor
    numbers = powers.view(np.float32)
    for j in range(len(scores)):
        scores[j] *= numbers[j]
        mass += scores[j]
    return new_peak, mass, factor


@numba.njit(**_OPTIONS)
@no_type_check
def _score(query, scale, keys, bias, until, position, scores):
    """Scores of a query; ``bias`` and ``until`` are addresses of as many numbers, or 0."""
    count = len(scores)
    for j in range(count):
        score = np.float32(0)
        for d in range(len(query)):
            score += query[d] * keys[j, d]
        scores[j] = score * scale
    if bias:
        nats = numba.carray(_pointer(bias), (count,), np.float32)
        for j in range(count):
            scores[j] += nats[j]
    if until:
        ends = numba.carray(_pointer(until), (count,), np.int64)
        for j in range(count):
            if position >= ends[j]:
                scores[j] = -np.inf


@numba.njit(**_OPTIONS)
@no_type_check
def _add_values(weights, values, output):
    """Add weighted values; ``len(weights)`` is a multiple of ``_UNROLL``."""
    for j in range(0, len(weights), _UNROLL):
        weight_0 = weights[j]
        weight_1 = weights[j + 1]
        weight_2 = weights[j + 2]
        weight_3 = weights[j + 3]
        for d in range(len(output)):
            output[d] += (
                weight_0 * values[j, d]
                + weight_1 * values[j + 1, d]
                + weight_2 * values[j + 2, d]
                + weight_3 * values[j + 3, d]
            )


@numba.njit(**_OPTIONS)
@no_type_check
def _attend_slots(queries, scale, slots, kind, start, stop, positions, attended, peaks, masses):
    """Attention of tokens to the slots of one head, not yet divided by the masses.

    queries, attended: (tokens, group, head_dim)
    """
    num_tokens, group, head_dim = queries.shape
    num_bytes = head_dim * _itemsize(kind)
    keys = np.empty((_BLOCK, head_dim), np.float32)
    values = np.zeros((_BLOCK, head_dim), np.float32)
    weights = np.empty(_BLOCK, np.float32)
    for first in range(start, stop, _BLOCK):
        count = min(_BLOCK, stop - first)
        _read(slots[0] + first * num_bytes, kind, keys[:count].reshape(-1))
        _read(slots[1] + first * num_bytes, kind, values[:count].reshape(-1))
        bias = slots[2] + 4 * first if slots[2] else 0
        until = slots[3] + 8 * first if slots[3] else 0
        weights[count:] = 0
        num_weights = -(-count // _UNROLL) * _UNROLL
        for token in range(num_tokens):
            for member in range(group):
                scores = weights[:count]
                _score(queries[token, member], scale, keys, bias, until, positions[token], scores)
                peak, mass, factor = _weigh(scores, peaks[token, member], masses[token, member])
                peaks[token, member] = peak
                masses[token, member] = mass
                output = attended[token, member]
                for d in range(head_dim):
                    output[d] *= factor
                _add_values(weights[:num_weights], values, output)


@numba.njit(**_OPTIONS)
@no_type_check
def _mass_of_pages(
    queries, scale, position, pages, block_step, kind, places, table, window, masses
):  # fmt: skip
    """The log-sum-exp of a token's scores over the pages of one KV head.

    queries: (group, head_dim)
    """
    group, head_dim = queries.shape
    num_cells = places.shape[1]
    keys = np.empty((head_dim, num_cells), np.float32)
    flat_keys = keys.reshape(-1)
    scores = np.empty(num_cells, np.float32)
    peaks = np.full(group, -np.inf, np.float32)
    sums = np.zeros(group, np.float32)
    first_seen = max(0, position - window + 1) if window > 0 else 0
    for page in range(first_seen // num_cells, position // num_cells + 1):
        low = max(0, first_seen - page * num_cells)
        high = min(num_cells, position + 1 - page * num_cells)
        block = pages + table[page] * block_step
        if places[0, 0] >= 0:
            _read(block + places[0, 0] * _itemsize(kind), kind, flat_keys)
        else:
            for d in range(head_dim):
                for cell in range(high):
                    at = d * num_cells + cell
                    place = -1 - places[d, cell]
                    _read(block + place * _itemsize(kind), kind, flat_keys[at : at + 1])
        for member in range(group):
            query = queries[member]
            scores[:] = 0
            for d in range(0, head_dim, _UNROLL):
                channel_0 = query[d]
                channel_1 = query[d + 1]
                channel_2 = query[d + 2]
                channel_3 = query[d + 3]
                for cell in range(num_cells):
                    scores[cell] += (
                        channel_0 * keys[d, cell]
                        + channel_1 * keys[d + 1, cell]
                        + channel_2 * keys[d + 2, cell]
                        + channel_3 * keys[d + 3, cell]
                    )
            seen = scores[low:high]
            for j in range(len(seen)):
                seen[j] *= scale
            peaks[member], sums[member], _ = _weigh(seen, peaks[member], sums[member])
    for member in range(group):
        masses[member] = peaks[member] + np.log(sums[member])


@numba.njit(_TYPES, nogil=True, error_model="numpy", **_OPTIONS)
@no_type_check
def _attend(
    first_task, last_task, query, query_step, output, output_step, pages, block_step, head_step,
    kind, group, scale, window, places, batch_tokens, positions, tables, sections, slots, starts,
):  # fmt: skip
    """Merge the attention of tokens to their documents into that to their pages.

    A section is some tokens of one document; a task is one KV head of a section. Steps are bytes.

    Args:
        first_task, last_task: those to do; the last one is not among them.
        query, query_step: address of the first token's queries, (heads, head_dim), and from a token
            to the next one.
        output, output_step: the same of the attention to the pages, which is replaced.
        pages, block_step, head_step: address of the first page, and the steps from a block, and
            from a KV head, to the next one.
        kind: of all these numbers, and of those of documents.
        group: query heads of a KV head.
        scale: factor on q.k, float32.
        window: of the layer; below 1: none.
        places: (head_dim, cells), what ``key_places`` made.
        batch_tokens: (tokens), numbers of the tokens in the batch, section after section.
        positions: (tokens), in their texts.
        tables: (tokens, pages), the blocks of each token's text.
        sections: (sections + 1), the first of their tokens, and the end of the last one.
        slots: (sections, 4), the ``addresses`` of the sections' ``DocumentLayer``.
        starts: (sections, kv_heads + 1), its ``starts``.
    """
    num_heads = starts.shape[1] - 1
    head_dim = places.shape[0]
    num_bytes = group * head_dim * _itemsize(kind)
    of_pages = np.empty((group, head_dim), np.float32)
    page_masses = np.empty(group, np.float32)
    for task in range(first_task, last_task):
        section = task // num_heads
        head = task % num_heads
        first = sections[section]
        count = sections[section + 1] - first
        queries = np.empty((count, group, head_dim), np.float32)
        for token in range(count):
            address = query + batch_tokens[first + token] * query_step + head * num_bytes
            _read(address, kind, queries[token].reshape(-1))
        attended = np.zeros((count, group, head_dim), np.float32)
        peaks = np.full((count, group), -np.inf, np.float32)
        masses = np.zeros((count, group), np.float32)
        _attend_slots(
            queries, scale, slots[section], kind, starts[section, head], starts[section, head + 1],
            positions[first : first + count], attended, peaks, masses,
        )  # fmt: skip
        for token in range(count):
            _mass_of_pages(
                queries[token], scale, positions[first + token], pages + head * head_step,
                block_step, kind, places, tables[first + token], window, page_masses,
            )  # fmt: skip
            address = output + batch_tokens[first + token] * output_step + head * num_bytes
            _read(address, kind, of_pages.reshape(-1))
            for member in range(group):
                mass = masses[token, member]
                if mass > 0:  # otherwise the token sees no slot
                    log_mass = peaks[token, member] + np.log(mass)
                    share = 1 / (1 + np.exp(page_masses[member] - log_mass))
                    for d in range(head_dim):
                        of_document = attended[token, member, d] / mass
                        of_pages[member, d] += share * (of_document - of_pages[member, d])
            _write(of_pages.reshape(-1), address, kind)
