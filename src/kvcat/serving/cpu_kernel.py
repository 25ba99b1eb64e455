"""Attention to documents next to an engine's pages on a CPU: one call for all requests of a step.

torch has no operator for heads with different numbers of slots, and one call for each document and
layer costs several times what its arithmetic does. So these are functions that Numba compiles, once
on a machine. ``document_attention`` is the same in plain torch.

Numbers are read as bits and become float32, because Numba knows neither bfloat16 nor float16.
"""

# pyright: reportMissingImports=false
# ruff: noqa: ANN001, ANN202 (Numba finds the types, and shapes stand in ``attend``)

import functools
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from numba.core import cgutils
from numba.extending import intrinsic

from kvcat.types import Tensor

_BLOCK = 64  # slots that are read at once
_UNROLL = 4  # terms of a sum for each time that it is read and written
# with these, sums may be computed in any order; infinities stay what they are
_OPTIONS = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "cache": True}
_FLOAT32, _BFLOAT16, _FLOAT16 = range(3)
_KINDS = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}
_HALF_UNIT = np.float32(2.0**112)  # from the bits of a float16, moved to a float32's, to its number
_LOG2_E = np.float32(1.4426950408889634)
_LOWEST = np.float32(-87)  # e to this is the smallest float32


def kind_of(dtype: torch.dtype) -> int:
    """The number of a type of numbers in ``attend``."""
    return _KINDS[dtype]


def bits_of(tensor: Tensor) -> np.ndarray:
    """The bits of a tensor on a CPU, which shares its memory: int32 for float32, otherwise int16."""
    return tensor.detach().view(torch.int32 if tensor.itemsize == 4 else torch.int16).numpy()


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads)


def attend(*arguments: Any) -> None:
    """``_attend`` with as many threads as torch has.

    Numba's own ones would be OpenMP's, and change the number of the engine's.
    """
    queries, _, slots = arguments[:3]
    num_tasks = len(slots) * queries.shape[1]
    num_threads = min(torch.get_num_threads(), num_tasks)
    if num_threads == 1:
        _attend(0, num_tasks, *arguments)
        return
    ends = [num_tasks * thread // num_threads for thread in range(num_threads + 1)]
    pool = _pool(num_threads)
    parts = [pool.submit(_attend, first, last, *arguments) for first, last in pairwise(ends)]
    for part in parts:
        part.result()


@no_type_check
@intrinsic
def _pointer(typing_context, address):  # noqa: ARG001
    """A pointer from a number, as C casts it."""

    def generate(context, builder, signature, arguments):  # noqa: ARG001
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return numba.types.voidptr(address), generate


@numba.njit(**_OPTIONS)
@no_type_check
def _widen(source, kind, numbers):
    """Bits of any kind to float32."""
    bits = numbers.view(np.int32)
    count = len(source)
    if kind == _FLOAT32:
        for i in range(count):
            bits[i] = source[i]
    elif kind == _BFLOAT16:
        for i in range(count):
            bits[i] = np.int32(source[i]) << 16
    else:
        for i in range(count):
            bits[i] = ((source[i] & 0x7FFF) << 13) | ((source[i] & 0x8000) << 16)
        for i in range(count):
            numbers[i] *= _HALF_UNIT


@numba.njit(**_OPTIONS)
@no_type_check
def _read(address, count, kind, rows):
    """The first rows of a tensor in memory as float32."""
    flat = rows.reshape(-1)[: count * rows.shape[1]]
    if kind == _FLOAT32:
        _widen(numba.carray(_pointer(address), flat.shape, np.int32), kind, flat)
    else:
        _widen(numba.carray(_pointer(address), flat.shape, np.int16), kind, flat)


@numba.njit(**_OPTIONS)
@no_type_check
def _weigh(scores, peak, mass):
    """Scores to e^(score - new peak): the peak, the sum of all weights so far, and the factor on
    the earlier ones."""
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
def _attend_slots(queries, scale, slots, kind, start, stop, positions, attended, peaks, masses):
    """Attention of tokens to the slots of one head, not yet divided by the masses.

    queries, attended: (tokens, group, head_dim)
    """
    num_tokens, group, head_dim = queries.shape
    num_bytes = head_dim * (4 if kind == _FLOAT32 else 2)
    keys = np.empty((_BLOCK, head_dim), np.float32)
    values = np.zeros((_BLOCK, head_dim), np.float32)
    scores = np.empty(_BLOCK + _UNROLL, np.float32)
    for first in range(start, stop, _BLOCK):
        count = min(_BLOCK, stop - first)
        _read(slots[0] + first * num_bytes, count, kind, keys)
        _read(slots[1] + first * num_bytes, count, kind, values)
        bias = numba.carray(_pointer(slots[2] + 4 * first), (count,), np.float32)
        until = numba.carray(_pointer(slots[3] + 8 * first), (count,), np.int64)
        for token in range(num_tokens):
            for member in range(group):
                query = queries[token, member]
                output = attended[token, member]
                for j in range(count):
                    score = np.float32(0)
                    for d in range(head_dim):
                        score += query[d] * keys[j, d]
                    scores[j] = score * scale
                if slots[2]:
                    for j in range(count):
                        scores[j] += bias[j]
                if slots[3]:
                    for j in range(count):
                        if positions[token] >= until[j]:
                            scores[j] = -np.inf
                peak, mass, factor = _weigh(
                    scores[:count], peaks[token, member], masses[token, member]
                )
                peaks[token, member] = peak
                masses[token, member] = mass
                for d in range(head_dim):
                    output[d] *= factor
                scores[count : count + _UNROLL] = 0
                for j in range(0, count, _UNROLL):
                    weight_0 = scores[j]
                    weight_1 = scores[j + 1]
                    weight_2 = scores[j + 2]
                    weight_3 = scores[j + 3]
                    for d in range(head_dim):
                        output[d] += (
                            weight_0 * values[j, d]
                            + weight_1 * values[j + 1, d]
                            + weight_2 * values[j + 2, d]
                            + weight_3 * values[j + 3, d]
                        )


@numba.njit(**_OPTIONS)
@no_type_check
def _mass_of_pages(
    queries, scale, position, pages, kind, places, is_plain, table, head, window, masses
):  # fmt: skip
    """The log-sum-exp of a token's scores over its pages.

    queries: (group, head_dim), of one KV head
    is_plain: places are successive
    """
    group, head_dim = queries.shape
    num_cells = places.shape[1]
    keys = np.empty((head_dim, num_cells), np.float32)
    scores = np.empty(num_cells, np.float32)
    peaks = np.full(group, -np.inf, np.float32)
    sums = np.zeros(group, np.float32)
    first_seen = max(0, position - window + 1) if window > 0 else 0
    for page in range(first_seen // num_cells, position // num_cells + 1):
        low = max(0, first_seen - page * num_cells)
        high = min(num_cells, position + 1 - page * num_cells)
        cells = pages[table[page], head]
        if is_plain:
            _widen(cells[places[0, 0] : places[0, 0] + keys.size], kind, keys.reshape(-1))
        else:
            for d in range(head_dim):
                _widen(cells[places[d]], kind, keys[d])
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


@numba.njit(nogil=True, error_model="numpy", **_OPTIONS)
@no_type_check
def _attend(
    first_task, last_task, queries, scale, slots, starts, tokens, positions, pages, kind, places, tables, window,
    attended, shares,
):  # fmt: skip
    """Attention of tokens to their documents, and the share of it next to that to their pages.

    A section is some tokens of one document; a task is one KV head of a section.

    Args:
        first_task, last_task: those to do; the last one is not among them.
        queries: (tokens, kv_heads, group, head_dim), float32.
        scale: factor on q.k, float32.
        slots: (sections, 4), the ``addresses`` of the sections' ``DocumentLayer``.
        starts: (sections, kv_heads + 1), its ``starts``.
        tokens: (sections + 1), the first token of every section, and the end of the last one.
        positions: (tokens), in their texts.
        pages: (blocks, kv_heads, size of a page), the bits of keys and values.
        kind: of the numbers in documents and pages.
        places: (head_dim, cells), of the keys in a page.
        tables: (tokens, pages), the blocks of each token's text.
        window: of the layer; below 1: none.
        attended: result, as the queries.
        shares: result, (tokens, kv_heads, group): e^l_document / (e^l_document + e^l_pages).
    """
    num_heads, group, head_dim = queries.shape[1:]
    is_plain = (places.ravel() == places[0, 0] + np.arange(places.size)).all()
    for task in range(first_task, last_task):
        section = task // num_heads
        head = task % num_heads
        first = tokens[section]
        last = tokens[section + 1]
        peaks = np.full((last - first, group), -np.inf, np.float32)
        masses = np.zeros((last - first, group), np.float32)
        of_pages = np.empty(group, np.float32)
        # contiguous, so that the loops become vector instructions
        of_head = queries[first:last, head].copy()
        outputs = np.zeros_like(of_head)
        _attend_slots(
            of_head, scale, slots[section], kind, starts[section, head],
            starts[section, head + 1], positions[first:last], outputs, peaks, masses,
        )  # fmt: skip
        for token in range(last - first):
            _mass_of_pages(
                of_head[token], scale, positions[first + token], pages, kind, places,
                is_plain, tables[first + token], head, window, of_pages,
            )  # fmt: skip
            for member in range(group):
                mass = masses[token, member]
                log_mass = peaks[token, member] + np.log(mass)
                shares[first + token, head, member] = 1 / (1 + np.exp(of_pages[member] - log_mass))
                if mass == 0:  # the token sees no slot
                    mass = np.float32(1)
                for d in range(head_dim):
                    attended[first + token, head, member, d] = outputs[token, member, d] / mass
