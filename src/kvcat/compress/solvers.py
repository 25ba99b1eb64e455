"""Least squares for many attention heads at once: box-constrained, and with a ridge."""

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import torch

from kvcat.errors import InputError, check_in, check_least, finite
from kvcat.types import Float, Tensor

Scale = Literal["spectral", "columns"]
"""What a pull is relative to: the squared spectral norm, or ``usual_column``."""

_TOLERANCE = 1e-5
_EXACT_TOLERANCE = 1e-11
_POWER_STEPS = 60
_STEPS_PER_CHECK = 4
_MAX_STEPS = 20_000
_SINGLE_PRECISION_RIDGE = 1e-5
_LEAST_SHIFT = 1e-6  # of the squared spectral norm
_LEAST_COLUMNS_FOR_BLOCKS = 512
_NUM_BLOCKS = 4
_SAFE_CONDITION = 0.01  # times the largest condition whose singular values all count


def fit_log_bias(
    kept_scores: Float[Tensor, "*heads queries slots"],
    dense_scores: Float[Tensor, "*heads queries tokens"],
    *,
    bounds: tuple[float, float] = (-3.0, 3.0),
    num_iters: int | None = None,
    pull: float = 0.0,
    relative_to: Scale = "spectral",
    weights: Float[Tensor, "*heads queries"] | None = None,
) -> Float[Tensor, "*heads slots"]:
    """Log-bias per kept slot so that the kept slots carry the attention mass of the whole prefix.

    Minimises, for every head, |A w - b|^2 + pull S |w - 1|^2 with exp(bounds[0]) <= w_j <=
    exp(bounds[1]), where A_ij = c_i exp(kept_scores_ij - m_i), b_i = c_i sum_t exp(dense_scores_it
    - m_i), m_i = max_t dense_scores_it, c_i = weights_i and S is the squared size of A
    (``relative_to``); returns log w. Accelerated projected gradient on the normal equations, with
    columns scaled to equal length, until no weight moves by more than 1e-5 in a step; without a
    pull in float64, by 1e-11.

    Args:
        kept_scores: scaled scores q.k / sqrt(head_dim) of the kept keys, nats; -inf where a query
            does not see a key.
        dense_scores: the same queries against the whole prefix, nats; a single column holds the log
            of the whole mass.
        bounds: box on the log-bias, nats, lower < upper.
        num_iters: plain projected-gradient steps without pull from the clamped least-squares
            solution (``least_squares``: minimum norm, no ridge), as in the paper; None solves to
            the tolerance.
        pull: towards w = 1, relative to S, at least 0.
        relative_to: "spectral", S = |A|_2^2, or "columns", S = ``usual_column(A)``.
        weights: factor on the error of each query; None: 1.

    Raises:
        InputError: bounds that do not increase, a negative num_iters or pull, or both of them.

    References: KV-CAT, appendix "Attention-Matching"; Zweiger et al. 2026, arXiv:2602.16284;
        restarts of the acceleration: O'Donoghue and Candes 2015, arXiv:1204.3982.
    """
    _check_log_bias_options(bounds, num_iters, pull)
    largest = dense_scores.amax(-1, keepdim=True)
    design = (kept_scores - largest).exp_()
    mass = (dense_scores - largest).exp().sum(-1)
    if weights is not None:
        design.mul_(weights.unsqueeze(-1))
        mass = mass * weights
    low = math.exp(bounds[0])
    high = math.exp(bounds[1])
    if num_iters is not None:
        solution = _projected_steps(design, mass, low, high, num_iters)
    elif pull:
        solution = _pulled_weights(design, mass, (low, high), pull, relative_to)
    else:
        # without a pull the equations may be nearly singular
        solution = _pulled_weights(design.double(), mass.double(), (low, high), 0.0, relative_to)
    return solution.log().to(kept_scores.dtype)


def fit_values(
    weights: Float[Tensor, "*heads queries slots"],
    targets: Float[Tensor, "*heads queries value_dim"],
    *,
    ridge: float | None = 1e-6,
    towards: Float[Tensor, "*heads slots value_dim"] | None = None,
    relative_to: Scale = "spectral",
) -> Float[Tensor, "*heads slots value_dim"]:
    """Values C that minimise |weights C - targets|^2 + ridge * S * |C - towards|^2, with S the
    squared size of the weights (``relative_to``).

    Solved through the smaller of the two normal equations, over slots or over queries. Relative to
    the spectral norm in float64, or in the weights' precision if the ridge is at least 1e-5;
    relative to the columns in the weights' precision, with at least 1e-6 of the squared spectral
    norm, which single precision needs.

    Args:
        weights: attention weights of the kept slots.
        targets: attention outputs of the dense prefix.
        ridge: relative to S, larger than 0; None: minimum-norm least squares without ridge, like
            the default solver of the original implementation.
        towards: where the ridge pulls the values; None: 0.
        relative_to: "spectral", S = |weights|_2^2, or "columns", S = ``usual_column(weights)``.

    Raises:
        InputError: ridge not larger than 0.

    References: KV-CAT, appendix "Attention-Matching"; Zweiger et al. 2026, arXiv:2602.16284.
    """
    # also here, for other compressors: a negative ridge gives values far from any minimum
    check_ridge(ridge)
    if towards is not None:
        product = weights @ towards
        residual = torch.sub(targets, product, out=product)
        return towards + fit_values(weights, residual, ridge=ridge, relative_to=relative_to)
    if ridge is None:
        return least_squares(weights, targets)
    design = weights
    wanted = targets
    if relative_to == "spectral" and ridge < _SINGLE_PRECISION_RIDGE:
        design = weights.double()
        wanted = targets.double()
    num_queries, num_slots = weights.shape[-2:]
    is_dual = num_queries < num_slots
    gram = products_of_columns(design.mT if is_dual else design)
    if is_dual:
        size = usual_column(design) if relative_to == "columns" else None
        values = design.mT @ _solve_shifted(gram, wanted, _ridge_shift(gram, ridge, size))
    else:
        size = usual_diagonal(gram) if relative_to == "columns" else None
        values = _solve_shifted(gram, design.mT @ wanted, _ridge_shift(gram, ridge, size))
    return values.to(targets.dtype)


def fit_in_chunks(
    queries: Float[Tensor, "heads queries head_dim"],
    keys: Float[Tensor, "heads slots head_dim"],
    key_bias: Float[Tensor, "heads slots"] | None,
    log_mass: Float[Tensor, "heads queries"],
    weights: Float[Tensor, "heads queries"],
    outputs: Float[Tensor, "heads queries value_dim"],
    slot_values: Float[Tensor, "heads slots value_dim"],
    *,
    bounds: tuple[float, float] | None,
    pull: float,
    ridge: float,
    rows_at_once: int,
) -> tuple[Float[Tensor, "heads slots"], Float[Tensor, "heads slots value_dim"]]:
    """``fit_log_bias`` with a pull and then ``fit_values``, relative to the columns, without a
    tensor of all queries x slots.

    Both read the queries through sums of products alone, to which every chunk adds its own. All
    queries see all slots, and there are at least as many queries as slots.

    Args:
        queries: times the factor on q.k.
        keys: of the slots.
        key_bias: nats added to their scores; None: nothing is.
        log_mass: of each query on the whole prefix, nats.
        weights: factor on the error of each query.
        outputs: attention outputs of the whole prefix, times the weights.
        slot_values: towards which the values are pulled.
        bounds: of the log-bias; None: it is 0.
        pull, ridge: of log-bias and values.
        rows_at_once: queries of a chunk.
    """
    starts = range(0, queries.shape[1], rows_at_once)
    chunks = [slice(start, start + rows_at_once) for start in starts]

    def scores_of(rows: slice) -> Tensor:
        scores = queries[:, rows] @ keys.mT
        return scores if key_bias is None else scores.add_(key_bias.unsqueeze(1))

    def designs() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in chunks:
            of_rows = weights[:, rows].unsqueeze(-1)
            scores = scores_of(rows).sub_(log_mass[:, rows].unsqueeze(-1))
            yield scores.exp_().mul_(of_rows), of_rows

    def attentions() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in chunks:
            scores = scores_of(rows).add_(bias.unsqueeze(1))
            attention = torch.softmax(scores, -1, out=scores).mul_(weights[:, rows].unsqueeze(-1))
            yield attention, outputs[:, rows] - attention @ slot_values

    bias = torch.zeros_like(slot_values[..., 0])
    if bounds is not None:
        gram, mass = _sum_of_products(designs())
        low, high = map(math.exp, bounds)
        bias = _solve_pulled(gram, mass.squeeze(-1), (low, high), pull, usual_diagonal(gram)).log()
    gram, right = _sum_of_products(attentions())
    shift = _ridge_shift(gram, ridge, usual_diagonal(gram))
    return bias, slot_values + _solve_shifted(gram, right, shift)


def _sum_of_products(chunks: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A^T A and A^T B, where rows of A and B come in chunks."""
    gram = right = torch.zeros(())
    for number, (design, targets) in enumerate(chunks):
        of_rows = products_of_columns(design)
        gram = gram.add_(of_rows) if number else of_rows
        right = right + design.mT @ targets
    return gram, right


def _ridge_shift(
    gram: Float[Tensor, "*heads rows rows"], ridge: float, size: Float[Tensor, "*heads"] | None
) -> Float[Tensor, "*heads"]:
    """What a ridge adds to the diagonal: relative to a size, or to the spectral norm."""
    shift = ridge * largest_eigenvalue(gram)
    return shift if size is None else (ridge * size).maximum(_LEAST_SHIFT / ridge * shift)


def least_squares(
    design: Float[Tensor, "*heads queries slots"], targets: Float[Tensor, "*heads queries columns"]
) -> Float[Tensor, "*heads slots columns"]:
    """The X of smallest norm among those that minimise |design X - targets|^2, without any ridge.

    Singular values below the rounding of float64 count as 0. Solved in float64, on a GPU there
    (``least_squares_by_qr``), else by LAPACK's gelsd on the CPU: the other drivers of torch need a
    design of full rank.
    """
    if design.is_cuda:
        solution = least_squares_by_qr(design.double(), targets.double())
    else:
        solution = torch.linalg.lstsq(
            design.double().cpu(), targets.double().cpu(), driver="gelsd"
        ).solution
    return solution.to(targets)


def least_squares_by_qr(
    design: Float[Tensor, "*heads queries slots"], targets: Float[Tensor, "*heads queries columns"]
) -> Float[Tensor, "*heads slots columns"]:
    """``least_squares`` of all heads at once, by operations that run on any device.

    From the QR factors of the design, or of its transpose if it has more slots than queries. Where
    the triangle may be singular, its singular values are computed, which are those of the design.
    """
    num_queries, num_slots = design.shape[-2:]
    is_wide = num_queries < num_slots
    basis, upper = torch.linalg.qr(design.mT if is_wide else design)
    # the design is basis @ triangle, or triangle @ basis.mT
    triangle = upper.mT if is_wide else upper
    right = targets if is_wide else basis.mT @ targets
    identity = torch.eye(upper.shape[-1], dtype=upper.dtype, device=upper.device)
    inverse = torch.linalg.solve_triangular(upper, identity.expand_as(upper), upper=True)
    condition = torch.linalg.matrix_norm(upper) * torch.linalg.matrix_norm(inverse)
    rounding = torch.finfo(design.dtype).eps * max(num_queries, num_slots)
    solution = torch.linalg.solve_triangular(triangle, right, upper=not is_wide)
    # true also of NaN, which a zero on the diagonal leads to
    may_be_singular = ~(condition < _SAFE_CONDITION / rounding)
    if may_be_singular.any():
        left, values, right_vectors = torch.linalg.svd(triangle[may_be_singular])
        is_zero = values <= rounding * values[..., :1]
        inverse_values = torch.where(is_zero, 0.0, values.reciprocal()).unsqueeze(-1)
        coordinates = inverse_values * (left.mT @ right[may_be_singular])
        solution[may_be_singular] = right_vectors.mT @ coordinates
    return basis @ solution if is_wide else solution


def check_ridge(ridge: float | None) -> None:
    """Reject a ridge that is not larger than 0."""
    if ridge is not None:
        check_in("(0, inf)", ridge=ridge)


def largest_eigenvalue(gram: Float[Tensor, "*heads rows rows"]) -> Float[Tensor, "*heads"]:
    """Largest eigenvalue of positive semi-definite matrices by the power method from the row sums.

    For matrices without negative entries, such as attention weights', it is exact to 1e-6; else a
    lower bound.
    """
    tiny = torch.finfo(gram.dtype).tiny
    vector = gram.abs().sum(-1)
    value = torch.zeros_like(gram[..., 0, 0])
    for step in range(_POWER_STEPS):
        vector = vector / vector.norm(dim=-1, keepdim=True).clamp_min(tiny)
        product = _times(gram, vector)
        if step % _STEPS_PER_CHECK == 0:
            new_value = (vector * product).sum(-1)
            if (new_value - value <= 1e-6 * new_value).all():
                return new_value
            value = new_value
        vector = product
    return value


def products_of_columns(
    design: Float[Tensor, "*heads rows columns"],
) -> Float[Tensor, "*heads columns columns"]:
    """The inner products of all pairs of columns, A^T A.

    Of many columns only those products are computed that are on the diagonal or left of it, in
    blocks, and the others are copied. That takes about half of the time.
    """
    num_columns = design.shape[-1]
    if num_columns < _LEAST_COLUMNS_FOR_BLOCKS:
        return design.mT @ design
    gram = design.new_empty(*design.shape[:-2], num_columns, num_columns)
    block_size = -(-num_columns // _NUM_BLOCKS)
    for start in range(0, num_columns, block_size):
        stop = min(start + block_size, num_columns)
        block = slice(start, stop)
        gram[..., block, :stop] = design[..., block].mT @ design[..., :stop]
        gram[..., :start, block] = gram[..., block, :start].mT
    return gram


def usual_column(design: Float[Tensor, "*heads rows columns"]) -> Float[Tensor, "*heads"]:
    """Mean squared length of the columns without the longest one; of a single column its own.

    The squared spectral norm of attention weights is nearly that of the column of the attention
    sink alone. This is what the other slots have.
    """
    return usual_square(design.square().sum(-2))


def usual_diagonal(gram: Float[Tensor, "*heads columns columns"]) -> Float[Tensor, "*heads"]:
    """``usual_column`` of a design, from A^T A."""
    return usual_square(gram.diagonal(dim1=-2, dim2=-1))


def usual_square(squares: Float[Tensor, "*heads columns"]) -> Float[Tensor, "*heads"]:
    """As ``usual_column``, of the squared lengths of the columns."""
    num_columns = squares.shape[-1]
    if num_columns == 1:
        return squares[..., 0]
    return (squares.sum(-1) - squares.amax(-1)).clamp_min(0.0) / (num_columns - 1)


def _check_log_bias_options(
    bounds: tuple[float, float], num_iters: int | None, pull: float
) -> None:
    lower, upper = (finite("bounds", bound) for bound in bounds)
    if not -50 <= lower < upper <= 50:
        raise InputError(f"bounds must increase and lie within 50 nats of 0, not {bounds}")
    check_least(0, num_iters=0 if num_iters is None else num_iters)
    check_in("[0, inf)", pull=pull)
    if pull and num_iters is not None:
        raise InputError(f"num_iters={num_iters} steps are without a pull, not with pull={pull}")


def _pulled_weights(
    design: Tensor, mass: Tensor, box: tuple[float, float], pull: float, relative_to: Scale
) -> Tensor:
    """Weights in the box that minimise |A w - b|^2 with a pull towards 1."""
    gram = products_of_columns(design)
    target = _times(design.mT, mass)
    if not pull:
        return solve_box(gram, target, *box, tolerance=_EXACT_TOLERANCE)
    size = usual_diagonal(gram) if relative_to == "columns" else largest_eigenvalue(gram)
    return _solve_pulled(gram, target, box, pull, size)


def _solve_pulled(
    gram: Tensor, target: Tensor, box: tuple[float, float], pull: float, size: Tensor
) -> Tensor:
    """Weights in the box, from A^T A and A^T b, with a pull towards 1 relative to a size."""
    shift = pull * size.unsqueeze(-1)
    gram.diagonal(dim1=-2, dim2=-1).add_(shift)
    return solve_box(gram, target + shift, *box, tolerance=_TOLERANCE)


def _projected_steps(
    design: Tensor, mass: Tensor, low: float, high: float, num_iters: int
) -> Tensor:
    """Projected-gradient steps on |A w - b|^2 from the clamped least-squares solution, as in the
    paper.
    """
    num_queries, num_slots = design.shape[-2:]
    gram = products_of_columns(design.mT if num_queries < num_slots else design)
    squared_norm = largest_eigenvalue(gram)
    step_size = 1 / squared_norm.clamp_min(torch.finfo(squared_norm.dtype).tiny).unsqueeze(-1)
    start = least_squares(design, mass.unsqueeze(-1)).squeeze(-1)
    weights = start.clamp(low, high)
    for _ in range(num_iters):
        error = _times(design, weights) - mass
        weights = (weights - step_size * _times(design.mT, error)).clamp(low, high)
    return weights


def solve_box(
    gram: Float[Tensor, "*heads slots slots"],
    target: Float[Tensor, "*heads slots"],
    low: float,
    high: float,
    *,
    tolerance: float,
) -> Float[Tensor, "*heads slots"]:
    """Weights w within [low, high] that minimise w.Gw / 2 - target.w. G is overwritten.

    Projected gradient with momentum, which starts again when a step turns against it. Each head
    ends when a step moves none of its weights by more than ``tolerance``, or after 20,000 steps.
    """
    # columns of equal length converge in far fewer steps, and a scaled box is still a box
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal, 1.0).sqrt()
    gram.div_(scale.unsqueeze(-1)).div_(scale.unsqueeze(-2))
    target = target / scale
    lower = low * scale
    upper = high * scale
    tiny = torch.finfo(gram.dtype).tiny
    largest = largest_eigenvalue(gram).clamp_min(tiny).unsqueeze(-1)
    step_size = 1 / (1.001 * largest)
    # a gradient step without its box is w (I - step_size G) + step_size target
    step_matrix = gram.mul_(-step_size.unsqueeze(-1))
    step_matrix.diagonal(dim1=-2, dim2=-1).add_(1)
    step_offset = step_size * target

    # each weight in units of its column's scale
    result = scale
    weights = scale
    extrapolated = scale
    steps_with_momentum = torch.zeros_like(largest)
    has_ended = torch.zeros_like(largest, dtype=torch.bool)
    for index in range(_MAX_STEPS):
        new_weights = _times(step_matrix, extrapolated).add_(step_offset).clamp_(lower, upper)
        moved = new_weights - weights
        if index % _STEPS_PER_CHECK == 0:
            result = torch.where(has_ended, result, new_weights)
            displacement = new_weights - extrapolated
            is_small = displacement.abs() <= tolerance * scale
            has_ended = has_ended | is_small.all(-1, keepdim=True)
            if has_ended.all():
                break
            against_momentum = (displacement * moved).sum(-1, keepdim=True) < 0
            steps_with_momentum.masked_fill_(against_momentum, 0.0)
        momentum = steps_with_momentum / (steps_with_momentum + 3)
        weights = new_weights
        extrapolated = torch.addcmul(new_weights, momentum, moved)
        steps_with_momentum += 1
    return result / scale


def _solve_shifted(gram: Tensor, right: Tensor, shift: Tensor) -> Tensor:
    """(G + shift I)^-1 right by Cholesky; 0 where G is 0."""
    shift = torch.where(shift > 0, shift, torch.ones_like(shift))
    gram.diagonal(dim1=-2, dim2=-1).add_(shift.unsqueeze(-1))
    factor = torch.linalg.cholesky(gram)
    # on batches in single precision, CPUs solve for rows twice as fast as for columns, or as
    # torch.cholesky_solve
    half = torch.linalg.solve_triangular(factor.mT, right.mT, upper=True, left=False)
    return torch.linalg.solve_triangular(factor, half, upper=False, left=False).mT


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix times vector: as row times matrix, since products with one column are several times
    slower on CPUs.
    """
    return (vector.unsqueeze(-2) @ matrix.mT).squeeze(-2)
