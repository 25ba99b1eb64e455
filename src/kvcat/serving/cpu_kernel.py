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
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from kvcat.serving.document_attention import DocumentLayer
from kvcat.types import Float, Int, Tensor

_BLOCK = 64  # slots that are read at once
# sums of a product of matrices that are computed at once
_TILE_ROWS = 4
_TILE = 16
# with these, sums may be computed in any order; infinities stay what they are
_OPTIONS = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "cache": True}
# of ``_attend``: it is compiled when this module is imported, not for the first request
_TYPES = (
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, float32[::1], "
    "int64, float32, int64, int64[:, ::1], int64[::1], int64[::1], int32[:, ::1], int64[::1], "
    "int64[:, ::1], int64[:, ::1])"
)
_FLOAT32, _BFLOAT16, _FLOAT16 = range(3)
_KINDS = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}
_HALF_UNIT = np.float32(2.0**112)  # from the bits of a float16, moved to a float32's, to its number
_LOG2_E = np.float32(1.4426950408889634)
_LOWEST = np.float32(-87)  # e to this is the smallest float32


def kind_of(dtype: torch.dtype) -> int:
    """The number of a type of numbers in ``attend``."""
    return _KINDS[dtype]


@functools.cache
def key_table(dtype: torch.dtype | None, scale: float) -> np.ndarray:
    """The keys that the codes of pages in 8 bits represent, float32, in the order of the codes.

    Args:
        dtype: of the codes, one of torch's with 8 bits; None: the pages have the numbers of the
            queries, and the table is empty.
        scale: what the engine divides keys by before it rounds them.
    """
    if dtype is None:
        return np.empty(0, np.float32)
    return (torch.arange(256, dtype=torch.uint8).view(dtype).float() * scale).numpy()


def key_places(places: np.ndarray) -> np.ndarray:
    """Places of keys in the first half of a page, (head_dim, cells), as ``_attend`` reads them.

    They are negative, -1 - place, if not all keys are successive.
    """
    is_plain = np.array_equal(places.ravel(), places[0, 0] + np.arange(places.size))
    return places if is_plain else -1 - places


@dataclass(frozen=True, eq=False)
class KernelLayer:
    """A layer of a document as ``attend`` reads it.

    Args:
        keys: head after head, ``_BLOCK`` slots after ``_BLOCK`` slots, channel after channel.
        values: head after head, slot after slot.
        log_bias, seen_until: as in ``DocumentLayer``.
        starts: the first slot of every head, and the end of the last one.
    """

    keys: Float[Tensor, " numbers"]
    values: Float[Tensor, "slots head_dim"]
    log_bias: Float[Tensor, " slots"] | None
    seen_until: Int[Tensor, " slots"] | None
    starts: tuple[int, ...]

    @staticmethod
    def of(layer: DocumentLayer) -> "KernelLayer":
        """A document's layer."""
        blocks = [
            block.T.flatten()
            for first, end in pairwise(layer.starts)
            for block in layer.keys[first:end].split(_BLOCK)
        ]
        keys = torch.cat(blocks)
        return KernelLayer(keys, layer.values, layer.log_bias, layer.seen_until, layer.starts)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors if tensor is not None)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where keys, values, log-bias and ``seen_until`` begin in memory; 0 for None."""
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in self._tensors)

    @property
    def _tensors(self) -> tuple[Tensor | None, ...]:
        return (self.keys, self.values, self.log_bias, self.seen_until)


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
def _read(address, kind, width, numbers):
    """Some columns of a matrix of any kind in memory as float32.

    Args:
        address: of the first number.
        kind: of the numbers.
        width: numbers from one row to the next.
        numbers: (rows, columns), the result.
    """
    bits = numbers.view(np.int32)
    num_rows, count = numbers.shape
    if kind == _FLOAT32:
        wide = numba.carray(_pointer(address), (num_rows, width), np.int32)
        for row in range(num_rows):
            for i in range(count):
                bits[row, i] = wide[row, i]
        return
    half = numba.carray(_pointer(address), (num_rows, width), np.int16)
    for row in range(num_rows):
        if kind == _BFLOAT16:
            for i in range(count):
                bits[row, i] = np.int32(half[row, i]) << 16
        else:
            for i in range(count):
                bits[row, i] = ((half[row, i] & 0x7FFF) << 13) | ((half[row, i] & 0x8000) << 16)
            for i in range(count):
                numbers[row, i] *= _HALF_UNIT


@numba.njit(**_OPTIONS)
@no_type_check
def _read_pages(address, kind, table, width, numbers):
    """``_read`` for pages: if the table is not empty, the numbers are codes of 8 bits."""
    if len(table) == 0:
        _read(address, kind, width, numbers)
        return
    num_rows, count = numbers.shape
    codes = numba.carray(_pointer(address), (num_rows, width), np.uint8)
    for row in range(num_rows):
        for i in range(count):
            numbers[row, i] = table[codes[row, i]]


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


@no_type_check
@intrinsic
def _add_tile(typing_context, a, b, stride, c, row, column, depth):  # noqa: ARG001
    """Add a @ b to c, in one tile of it.

    Numba's loops would keep the sums in memory; here they are ``_TILE_ROWS`` vectors of ``_TILE``
    numbers in registers. If rows are missing, the last one is computed several times.

    Args:
        a: (rows, at least depth).
        b: the numbers of (depth, columns), and then at least ``_TILE`` others.
        stride: from a row of b to the next one.
        c: (rows, columns).
        row, column: the first of the tile.
        depth: terms of every sum.
    """

    def generate(context, builder, signature, arguments):
        a, b, stride, c, row, column, depth = arguments
        a = context.make_array(signature.args[0])(context, builder, a)
        b = context.make_array(signature.args[1])(context, builder, b)
        c = context.make_array(signature.args[3])(context, builder, c)
        vector = ir.VectorType(ir.FloatType(), _TILE)
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), _TILE), [0] * _TILE)

        def vector_at(array, place):
            return builder.bitcast(builder.gep(array.data, [place]), vector.as_pointer())

        num_rows, a_width = cgutils.unpack_tuple(builder, a.shape, 2)
        _, c_width = cgutils.unpack_tuple(builder, c.shape, 2)
        last = builder.sub(num_rows, row.type(1))
        a_rows = []
        c_rows = []
        sums = []
        for i in range(_TILE_ROWS):
            number = builder.add(row, row.type(i))
            number = builder.select(builder.icmp_signed("<", number, last), number, last)
            a_rows.append(builder.gep(a.data, [builder.mul(number, a_width)]))
            c_rows.append(vector_at(c, builder.add(builder.mul(number, c_width), column)))
            sums.append(cgutils.alloca_once_value(builder, builder.load(c_rows[i], align=4)))
        with cgutils.for_range(builder, depth) as loop:
            place = builder.add(builder.mul(loop.index, stride), column)
            of_b = builder.load(vector_at(b, place), align=4)
            for a_row, total in zip(a_rows, sums, strict=True):
                number = builder.load(builder.gep(a_row, [loop.index]))
                first = builder.insert_element(vector(ir.Undefined), number, ir.IntType(32)(0))
                of_a = builder.shuffle_vector(first, first, zeros)
                product = builder.fmul(of_a, of_b, flags=("contract",))
                added = builder.fadd(builder.load(total), product, flags=("contract",))
                builder.store(added, total)
        for c_row, total in zip(c_rows, sums, strict=True):
            builder.store(builder.load(total), c_row, align=4)
        return context.get_dummy_value()

    return numba.types.void(a, b, stride, c, row, column, depth), generate


@numba.njit(**_OPTIONS)
@no_type_check
def _add_product(a, b, stride, c, num_columns, depth):
    """Add a @ b to the first columns of c, rounded up to whole tiles; see ``_add_tile``."""
    for column in range(0, num_columns, _TILE):
        for row in range(0, len(a), _TILE_ROWS):
            _add_tile(a, b, stride, c, row, column, depth)


@numba.njit(**_OPTIONS)
@no_type_check
def _weigh(scores, peak, mass, powers):
    """Scores become weights, e^(score - new peak); ``powers`` is room for as many numbers.

    Returns the peak, the sum of all weights so far, and the factor on the earlier ones.
    """
    new_peak = peak
    for j in range(len(scores)):
        new_peak = max(new_peak, scores[j])
    if new_peak == -np.inf:
        scores[:] = 0
        return new_peak, mass, np.float32(1)
    # e^x = 2^n 2^f with |f| <= 1/2 and a polynomial for 2^f, which becomes vector instructions
    for j in range(len(scores)):
        x = scores[j] - new_peak
        x = (x if x > _LOWEST else _LOWEST) * _LOG2_E  # max() would be no vector instruction
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
def _attend_slots(queries, group, slots, kind, start, stop, positions, attended, peaks, masses):
    """Attention of tokens to the slots of one head, not yet divided by the masses.

    queries: (tokens * group, head_dim), times the scale; attended: as queries; peaks, masses:
    (tokens * group)
    """
    num_rows, head_dim = queries.shape
    num_bytes = head_dim * _itemsize(kind)
    keys = np.zeros(head_dim * _BLOCK + _TILE, np.float32)
    values = np.empty((_BLOCK, head_dim), np.float32)
    scores = np.empty((num_rows, _BLOCK), np.float32)
    powers = np.empty(_BLOCK, np.int32)
    for first in range(start, stop, _BLOCK):
        count = min(_BLOCK, stop - first)
        of_block = keys[: head_dim * count].reshape(head_dim, count)
        _read(slots[0] + first * num_bytes, kind, count, of_block)
        _read(slots[1] + first * num_bytes, kind, head_dim, values[:count])
        num_columns = -(-count // _TILE) * _TILE
        scores[:, :count] = 0
        scores[:, count:num_columns] = -np.inf
        if slots[2]:
            scores[:, :count] = numba.carray(_pointer(slots[2] + 4 * first), (count,), np.float32)
        if slots[3]:
            until = numba.carray(_pointer(slots[3] + 8 * first), (count,), np.int64)
            for row in range(num_rows):
                for j in range(count):
                    if positions[row // group] >= until[j]:
                        scores[row, j] = -np.inf
        _add_product(queries, keys, count, scores, num_columns, head_dim)
        for row in range(num_rows):
            peaks[row], masses[row], factor = _weigh(
                scores[row, :num_columns], peaks[row], masses[row], powers
            )
            if factor != 1:
                for d in range(head_dim):
                    attended[row, d] *= factor
        _add_product(scores, values.reshape(-1), head_dim, attended, head_dim, count)


@numba.njit(**_OPTIONS)
@no_type_check
def _read_page(page, kind, table, places, in_page, keys):
    """The first keys of a page, (head_dim, cells).

    in_page: (1, numbers), room for the keys of a page in the page's order
    """
    num_cells = places.shape[1]
    if places[0, 0] >= 0:
        num_bytes = 1 if len(table) > 0 else _itemsize(kind)
        _read_pages(page + places[0, 0] * num_bytes, kind, table, num_cells, keys)
        return
    _read_pages(page, kind, table, in_page.shape[1], in_page)
    for d in range(len(keys)):
        for cell in range(keys.shape[1]):
            keys[d, cell] = in_page[0, -1 - places[d, cell]]


@numba.njit(**_OPTIONS)
@no_type_check
def _weigh_pages(
    queries, group, positions, pages, block_step, kind, table, places, blocks, window, peaks, masses
):  # fmt: skip
    """The peaks and masses of tokens' scores over the pages of one KV head: the sum of e^score is
    mass e^peak.

    A page is read once for all successive tokens that see it: those of a request, or of requests
    with the same beginning.

    queries: (tokens * group, head_dim), times the scale; peaks, masses: (tokens * group)
    """
    num_tokens = len(positions)
    head_dim, num_cells = places.shape
    keys = np.zeros(head_dim * num_cells + _TILE, np.float32)
    in_page = np.empty((1, head_dim * num_cells), np.float32)
    scores = np.empty((len(queries), num_cells + _TILE), np.float32)
    powers = np.empty(num_cells + _TILE, np.int32)
    first_seen = max(0, positions.min() - window + 1) if window > 0 else 0
    for page in range(first_seen // num_cells, positions.max() // num_cells + 1):
        offset = page * num_cells  # position of the page's first cell
        stop = 0
        while stop < num_tokens:
            start = stop
            block = blocks[start, page]
            last = positions[start]
            while stop < num_tokens and blocks[stop, page] == block:
                last = max(last, positions[stop])
                stop += 1
            if last < offset:
                continue
            num_columns = min(num_cells, -(-(last + 1 - offset) // _TILE) * _TILE)
            of_page = keys[: head_dim * num_columns].reshape(head_dim, num_columns)
            _read_page(pages + block * block_step, kind, table, places, in_page, of_page)
            rows = slice(start * group, stop * group)
            scores[rows] = 0
            _add_product(queries[rows], keys, num_columns, scores[rows], num_columns, head_dim)
            for row in range(start * group, stop * group):
                position = positions[row // group]
                low = max(0, position - window + 1 - offset) if window > 0 else 0
                high = min(num_columns, position + 1 - offset)
                if low < high:
                    of_row = scores[row, :num_columns]
                    of_row[:low] = -np.inf
                    of_row[high:] = -np.inf
                    peaks[row], masses[row], _ = _weigh(of_row, peaks[row], masses[row], powers)


@numba.njit(_TYPES, nogil=True, error_model="numpy", **_OPTIONS)
@no_type_check
def _attend(
    first_task, last_task, query, query_step, output, output_step, pages, block_step, head_step,
    kind, table, group, scale, window, places, batch_tokens, positions, blocks, sections, slots,
    starts,
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
        table: what ``key_table`` made: if it is not empty, pages have codes.
        group: query heads of a KV head.
        scale: factor on q.k, float32.
        window: of the layer; below 1: none.
        places: (head_dim, cells), what ``key_places`` made; head_dim is a multiple of ``_TILE``.
        batch_tokens: (tokens), numbers of the tokens in the batch, section after section.
        positions: (tokens), in their texts.
        blocks: (tokens, pages), those of each token's text.
        sections: (sections + 1), the first of their tokens, and the end of the last one.
        slots: (sections, 4), the ``addresses`` of the sections' ``KernelLayer``.
        starts: (sections, kv_heads + 1), its ``starts``.
    """
    num_heads = starts.shape[1] - 1
    head_dim = places.shape[0]
    num_bytes = group * head_dim * _itemsize(kind)
    of_pages = np.empty((group, head_dim), np.float32)
    for task in range(first_task, last_task):
        section = task // num_heads
        head = task % num_heads
        first = sections[section]
        last = sections[section + 1]
        num_rows = (last - first) * group
        queries = np.empty((num_rows, head_dim), np.float32)
        for token in range(first, last):
            address = query + batch_tokens[token] * query_step + head * num_bytes
            row = (token - first) * group
            _read(address, kind, head_dim, queries[row : row + group])
        queries *= scale
        attended = np.zeros((num_rows, head_dim), np.float32)
        peaks = np.full(num_rows, -np.inf, np.float32)
        masses = np.zeros(num_rows, np.float32)
        _attend_slots(
            queries, group, slots[section], kind, starts[section, head], starts[section, head + 1],
            positions[first:last], attended, peaks, masses,
        )  # fmt: skip
        page_peaks = np.full(num_rows, -np.inf, np.float32)
        page_masses = np.zeros(num_rows, np.float32)
        _weigh_pages(
            queries, group, positions[first:last], pages + head * head_step, block_step, kind,
            table, places, blocks[first:last], window, page_peaks, page_masses,
        )  # fmt: skip
        for token in range(first, last):
            address = output + batch_tokens[token] * output_step + head * num_bytes
            _read(address, kind, head_dim, of_pages)
            for member in range(group):
                row = (token - first) * group + member
                if masses[row] > 0:  # otherwise the token sees no slot
                    # log-sum-exp of the pages less that of the document
                    ahead = page_peaks[row] - peaks[row] + np.log(page_masses[row] / masses[row])
                    share = 1 / (1 + np.exp(ahead))
                    for d in range(head_dim):
                        of_document = attended[row, d] / masses[row]
                        of_pages[member, d] += share * (of_document - of_pages[member, d])
            _write(of_pages.reshape(-1), address, kind)
