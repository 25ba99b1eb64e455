"""The exact optimum over all policies of a network that a policy reaches through one scalar.

Behind r slots whose scalars sum to t, the error of a suffix b is || rho-bar((t + S(b)) / (r + k)) - f([a, b]) ||: the
norm of a piecewise linear function of t. Between two neighbouring bends of any suffix's function all of them are norms
of affine functions, so the largest is convex there and its least value is attained at an end of the piece, at the
least point of one suffix's error or where two are equal. Looking at every piece gives min_t max_b, exactly: the bends
are rational numbers, held as integers.

References: KV-CAT, appendix "Compressible Transformers for General Functions", Lemma 2 ("for every KV cache
compression policy"), made quantitative.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcat.errors import InputError
from kvcat.theory.definitions import sequences
from kvcat.theory.scalar_code import KNOTS_PER_CODE, ScalarCode, check_lengths
from kvcat.types import Float, Int, Tensor

MAX_EVALUATIONS = 10**9
"""Errors (suffix by bend) beyond which a scan is refused: it would take minutes."""

PORTION = 10**6
"""Errors held at once."""

_TIGHT = 1e-13  # relative gap between a value attained and a lower bound that counts as none


@dataclass(frozen=True)
class ScalarOptimum:
    """The least of max_b of the error, a scalar t that attains it, and the suffixes at which it does.

    ``lower_bound`` is the least value that any t can have; it equals ``error`` but for rounding.
    """

    prefix: tuple[int, ...]
    num_slots: int
    scalar: float
    error: float
    lower_bound: float
    worst_suffixes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class _Curves:
    """Errors of suffixes of one length as functions of t: knots and offsets as integers, in one unit for all."""

    suffixes: Int[Tensor, "suffixes k"]
    knots: np.ndarray  # (r + k) times the map's knots
    levels: np.ndarray  # its values there, (knots, d_out)
    offsets: np.ndarray  # S(b), (suffixes,)
    wanted: np.ndarray  # f([a, b]), (suffixes, d_out)

    def bends(self) -> np.ndarray:
        return (self.knots - self.offsets[:, None]).ravel()

    def differences(self, scalars: np.ndarray) -> np.ndarray:
        """rho-bar - f at integer scalars: (scalars, suffixes, d_out)."""
        at = np.clip(scalars[:, None] + self.offsets, self.knots[0], self.knots[-1])
        right = np.clip(np.searchsorted(self.knots, at, side="left"), 1, len(self.knots) - 1)
        low, high = self.knots[right - 1], self.knots[right]
        part = ((at - low) / (high - low))[..., None]
        return self.levels[right - 1] * (1 - part) + self.levels[right] * part - self.wanted


def optimal_scalar(
    code: ScalarCode,
    prefix: Int[Tensor, " n"],
    num_slots: int,
    suffix_lens: Sequence[int] | None = None,
) -> ScalarOptimum:
    """The best that any policy can do for a prefix: min_t max_b || rho-bar((t + S(b)) / (r + k)) - f([a, b]) ||.

    Args:
        code: the scalar code and its map rho-bar.
        prefix: a, of n >= 1 symbols.
        num_slots: r, 0 <= r <= n. With r = 0 there is no scalar to choose, t = 0.
        suffix_lens: the lengths k that one cache is to serve; default all of 1 to N - n, as the definition of
            compressibility has it.

    Raises:
        ValueError: lengths or slots out of range, or a scan of more than ``MAX_EVALUATIONS`` errors.
    """
    n = prefix.shape[0]
    lens = tuple(range(1, code.table.longest - n + 1)) if suffix_lens is None else tuple(sorted(set(suffix_lens)))
    check_lengths(code, n, lens, num_slots)
    common = math.lcm(*(n + k for k in lens))
    curves = [_curves(code, prefix, k, num_slots, common) for k in lens]
    scalars = np.zeros(1, dtype=np.int64)
    if num_slots:
        scalars = np.unique(np.concatenate([curve.bends() for curve in curves]))
    num_suffixes = sum(len(curve.suffixes) for curve in curves)
    if len(scalars) * num_suffixes > MAX_EVALUATIONS:
        raise InputError(
            f"the scan of prefix {prefix.tolist()} has {len(scalars)} bends and {num_suffixes} suffixes, "
            f"more than {MAX_EVALUATIONS} errors"
        )
    scalar, error, bound = _scan(curves, scalars)
    unit = KNOTS_PER_CODE * common
    worst = _worst(code, prefix, curves, scalar / unit, num_slots, error)
    return ScalarOptimum(tuple(prefix.tolist()), num_slots, scalar / unit, error, bound, worst)


def _curves(code: ScalarCode, prefix: Tensor, suffix_len: int, num_slots: int, common: int) -> _Curves:
    """Suffixes of one length: y = (t + S(b)) / (r + k) is the knot K / (5 j) where 5 L t = (r + k) K L / j - 5 L S(b).

    L, ``common``, is a multiple of every j that is scanned, so that these are integers.
    """
    n, j = prefix.shape[0], prefix.shape[0] + suffix_len
    at, levels = code.knots(j)
    suffixes = sequences(code.table.num_symbols, suffix_len)
    whole = torch.cat([prefix.expand(len(suffixes), -1), suffixes], -1)
    largest = KNOTS_PER_CODE * common * (num_slots + suffix_len) * (code.largest(j) + 1)
    if largest >= 2**53:
        raise InputError(f"codes up to {code.largest(j)} are too large for an exact scan")
    return _Curves(
        suffixes,
        (at * ((num_slots + suffix_len) * (common // j))).numpy(),
        levels.numpy(),
        (code.encode(suffixes, start=n) * (KNOTS_PER_CODE * common)).numpy(),
        code.table(whole).numpy(),
    )


def _scan(curves: list[_Curves], scalars: np.ndarray) -> tuple[float, float, float]:
    """The scalar (in integer units) of least maximum, that value, and a lower bound on every other's."""

    def errors(at: np.ndarray) -> np.ndarray:
        return np.concatenate([curve.differences(at) for curve in curves], 1)

    count = max(1, PORTION // sum(len(curve.suffixes) for curve in curves))
    best, at, bounds = np.inf, float(scalars[0]), []
    for start in range(0, len(scalars), count):
        part = scalars[start : start + count + 1]
        difference = errors(part)
        largest = np.linalg.norm(difference, axis=-1).max(1)
        if largest.min() < best:
            best, at = float(largest.min()), float(part[largest.argmin()])
        bounds.append(_least_of_each(difference[:-1], difference[1:]))
    bounds = np.concatenate(bounds)
    lower = best
    for piece in bounds.argsort(kind="stable"):
        if bounds[piece] >= best * (1 - _TIGHT):  # nor can any piece behind it do better
            lower = min(lower, float(bounds[piece]))
            break
        left, right = errors(scalars[piece : piece + 2])
        place, value, bound = minimise_maximum(left, right - left)
        lower = min(lower, bound)
        if value < best:
            best, at = value, float(scalars[piece]) * (1 - place) + float(scalars[piece + 1]) * place
    return at, best, min(lower, best)


def _least_of_each(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """max_b of the least error of suffix b alone on each piece: no scalar of the piece can do better."""
    step = right - left
    squared = (step**2).sum(-1)
    place = np.clip(-(left * step).sum(-1) / np.where(squared > 0, squared, 1), 0, 1)
    return np.linalg.norm(left + place[..., None] * step, axis=-1).max(-1, initial=0)


def minimise_maximum(
    start: Float[np.ndarray, "functions d_out"], step: Float[np.ndarray, "functions d_out"]
) -> tuple[float, float, float]:
    """The least of max_b || start_b + u step_b || over u in [0, 1]: a place u, the value there, and a lower bound.

    Exact, by exchange: two of the functions decide a minimum of convex functions of one variable, and the least value
    of the larger of any two bounds the whole from below. Whichever function is largest at the pair's least point is
    exchanged into the pair, so that the bound rises strictly until it is attained.

    Args:
        start: affine functions at u = 0.
        step: their change up to u = 1.
    """
    squares = np.stack([(step**2).sum(1), 2 * (start * step).sum(1), (start**2).sum(1)], 1)
    scale = float(squares[:, 2].max()) or 1.0

    def pair_least(pair: tuple[int, int]) -> tuple[float, float]:
        places = [0.0, 1.0]
        for a, b, _ in squares[list(pair)]:
            places += [-b / (2 * a)] if a > 0 else []
        places += _roots(*(squares[pair[0]] - squares[pair[1]]))
        inside = np.array([u for u in places if 0 <= u <= 1])
        values = np.linalg.norm(start[list(pair)] + inside[:, None, None] * step[list(pair)], axis=-1).max(1)
        return float(values.min()), float(inside[values.argmin()])

    top = int(squares[:, 2].argmax())
    pair, bound, best = (top, top), -1.0, (np.inf, 0.0)
    while True:
        value, place = pair_least(pair)
        if value <= bound:  # the exchange no longer rises: rounding
            return best[1], best[0], bound
        bound = value
        errors = np.linalg.norm(start + place * step, axis=1)
        worst = int(errors.argmax())
        best = min(best, (float(errors[worst]), place))
        if best[0] <= bound + _TIGHT * scale**0.5:
            return best[1], best[0], bound
        pair = max(((pair[0], worst), (pair[1], worst)), key=lambda p: pair_least(p)[0])


def _roots(a: float, b: float, c: float) -> list[float]:
    """Real roots of a u^2 + b u + c, in the form that does not cancel."""
    discriminant = b * b - 4 * a * c
    if discriminant < 0:
        return [-b / (2 * a)]  # the two touch but for rounding, or never meet and the place is merely one more
    half = -(b + math.copysign(math.sqrt(discriminant), b)) / 2
    return ([half / a] if a != 0 else []) + ([c / half] if half != 0 else [])


def suffix_errors(
    code: ScalarCode, prefix: Int[Tensor, " n"], suffixes: Int[Tensor, "batch k"], scalar: float, num_slots: int
) -> Float[Tensor, " batch"]:
    """|| rho-bar((t + S(b)) / (r + k)) - f([a, b]) || for each suffix of one length, at one scalar."""
    n, k = prefix.shape[0], suffixes.shape[1]
    check_lengths(code, n, (k,), num_slots)
    y = (scalar + code.encode(suffixes, start=n)) / (num_slots + k)
    whole = torch.cat([prefix.expand(len(suffixes), -1), suffixes], -1)
    return torch.linalg.vector_norm(code.evaluate(n + k, y) - code.table(whole), dim=-1)


def _worst(
    code: ScalarCode, prefix: Tensor, curves: list[_Curves], scalar: float, num_slots: int, error: float
) -> tuple[tuple[int, ...], ...]:
    """The suffixes whose error at the scalar is the largest but for what rounding the scalar can change."""
    slack = 2 * code.rounding(abs(scalar) + code.largest(code.table.longest))
    found = (
        curve.suffixes[suffix_errors(code, prefix, curve.suffixes, scalar, num_slots) >= error - slack].tolist()
        for curve in curves
    )
    return tuple(tuple(row) for row in itertools.chain.from_iterable(found))
