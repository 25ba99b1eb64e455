"""Log-bias and values of kept keys, fitted to the attention of the whole prefix."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from kvcat.compress.box import PulledSystem, TallSystem, WideSystem, is_wide, solve_box
from kvcat.compress.heads import HeadBlock, take
from kvcat.compress.selection import DenseAttention, KeySelection, select_slots
from kvcat.compress.solvers import fit_values, solve_ridge
from kvcat.types import Float, Int, Tensor

_TOLERANCE = 1e-10


@dataclass(frozen=True)
class FitOptions:
    """How keys are chosen, and log-bias and values fitted.

    Args:
        selection: of the keys.
        log_bias: whether slots get a log-bias.
        bounds: box on the log-bias, nats.
        num_iters: projected-gradient steps of the log-bias; None solves to convergence.
        original_values: whether slots keep the values of their keys; otherwise these are fitted.
        ridge: of the value fit, relative to the squared spectral norm; None for minimum-norm least squares.
        bias_ridge: pulls the log-bias to 0, relative to the squared spectral norm of the attention masses.
        towards_kept: the ridge pulls the values towards those of the kept keys, otherwise towards 0.
        guard: heads that the fit leaves with a larger output error than their kept keys and values unchanged are
            fitted again without log-bias, the ridge pulling towards the unchanged values.
    """

    selection: KeySelection = field(default_factory=KeySelection)
    log_bias: bool = True
    bounds: tuple[float, float] = (-3.0, 3.0)
    num_iters: int | None = None
    original_values: bool = False
    ridge: float | None = 1e-6
    bias_ridge: float = 0.0
    towards_kept: bool = False
    guard: bool = True


@dataclass(frozen=True)
class KeptKeys:
    """Kept keys as the queries see them, chunk by chunk; held between passes where one chunk is all.

    Args:
        block: heads with their queries.
        dense: their dense attention.
        slots: positions of the kept keys.
    """

    block: HeadBlock
    dense: DenseAttention
    slots: Int[Tensor, "heads slots"]

    @cached_property
    def chunks(self) -> list[slice]:
        """Ranges of queries."""
        return list(self.block.query_chunks())

    @cached_property
    def _held(self) -> tuple[Tensor, Tensor]:
        return self._exponentials(self.chunks[0])

    def exponentials(self, chunk: slice) -> tuple[Float[Tensor, "heads chunk slots"], Float[Tensor, "heads chunk one"]]:
        """exp(score - top), and top, the largest kept score of each query, nats; 0 and 0 where it sees no slot."""
        return self._held if len(self.chunks) == 1 else self._exponentials(chunk)

    def _exponentials(self, chunk: slice) -> tuple[Tensor, Tensor]:
        scores = self.block.scores(chunk, self.slots)
        top = scores.amax(-1, keepdim=True)
        if self.block.positions is not None:
            top = top.masked_fill(top == -torch.inf, 0.0)
        return scores.sub_(top).exp_(), top

    def masses(self, chunk: slice) -> Float[Tensor, "heads chunk slots"]:
        """exp(score - dense top), times the query's weight."""
        found, top = self.exponentials(chunk)
        return self.block.weighted(found * (top - self.dense.top[:, chunk]).exp_(), chunk)

    def attention(
        self, chunk: slice, log_bias: Float[Tensor, "heads slots"]
    ) -> tuple[Float[Tensor, "heads chunk slots"], Float[Tensor, "heads chunk value_dim"]]:
        """Attention over the slots and the dense outputs it should give; both 0 for queries that see no slot."""
        found, _ = self.exponentials(chunk)
        weights = found * log_bias.exp().unsqueeze(1)
        total = weights.sum(-1, keepdim=True)
        outputs = self.dense.outputs[:, chunk]
        if self.block.positions is None:
            return weights.div_(total), outputs
        sees = total > 0
        return weights.div_(total.masked_fill(~sees, 1.0)), outputs * sees

    def weighted_attention(
        self, chunk: slice, log_bias: Float[Tensor, "heads slots"]
    ) -> tuple[Float[Tensor, "heads chunk slots"], Float[Tensor, "heads chunk value_dim"]]:
        """The same, times the query's weight."""
        attention, outputs = self.attention(chunk, log_bias)
        return self.block.weighted(attention, chunk), self.block.weighted(outputs, chunk)

    def select(self, rows: Int[Tensor, " rows"]) -> "KeptKeys":
        """Some of the heads."""
        return KeptKeys(self.block.select(rows), self.dense.select(rows), self.slots[rows])


def fit_slots(
    block: HeadBlock, dense: DenseAttention, num_slots: int, options: FitOptions
) -> tuple[Int[Tensor, "heads slots"], Float[Tensor, "heads slots value_dim"], Float[Tensor, "heads slots"]]:
    """Positions, values and log-bias of the slots of a block of heads; without log-bias this is 0.

    Args:
        block: heads with their queries.
        dense: their dense attention.
        num_slots: slots per head; heads that have no more keep all as they are.
        options: of selection and fits.
    """
    heads, prefix, _ = block.keys.shape
    if num_slots >= prefix:
        every = torch.arange(prefix, device=block.keys.device).expand(heads, -1)
        return every, block.values, torch.zeros_like(block.keys[..., 0])
    kept = KeptKeys(block, dense, select_slots(block, dense, num_slots, options.selection, options.bounds))
    own = take(block.values, kept.slots)
    none = torch.zeros_like(own[..., 0])
    log_bias = _fit_bias(kept, options) if options.log_bias else none
    towards = own if options.towards_kept else None
    values = own if options.original_values else _fit_values(kept, log_bias, options.ridge, towards)
    if options.guard and (options.log_bias or not options.original_values):
        worse = (output_error(kept, values, log_bias) > output_error(kept, own, none)).nonzero().flatten()
        if len(worse):
            fitted = own[worse]
            if not options.original_values:
                fitted = _fit_values(kept.select(worse), none[worse], options.ridge, fitted)
            values, log_bias = values.index_copy(0, worse, fitted), log_bias.index_fill(0, worse, 0.0)
    return kept.slots, values, log_bias


def _fit_bias(kept: KeptKeys, options: FitOptions) -> Float[Tensor, "heads slots"]:
    # a fixed number of steps leaves errors far above those of single precision
    dtype = torch.float64 if options.num_iters is None else kept.dense.mass.dtype
    mass = kept.block.weighted(kept.dense.mass.unsqueeze(-1), slice(None)).squeeze(-1).to(dtype)
    if is_wide(mass.shape[1], kept.slots.shape[1], options.num_iters):
        system = WideSystem(torch.cat([kept.masses(chunk).to(dtype) for chunk in kept.chunks], 1), mass)
    else:
        gram, target = torch.zeros(()), torch.zeros(())
        for chunk in kept.chunks:
            design = kept.masses(chunk).to(dtype)
            gram, target = gram + design.mT @ design, target + design.mT @ mass[:, chunk].unsqueeze(-1)
        system = TallSystem(gram, target.squeeze(-1))
    if options.bias_ridge:
        system = PulledSystem(system, options.bias_ridge * system.norm())
    size = mass.square().sum(1)
    weights = solve_box(system, size, bounds=options.bounds, num_iters=options.num_iters, tolerance=_TOLERANCE)
    return weights.log().to(kept.block.keys.dtype)


def _fit_values(
    kept: KeptKeys,
    log_bias: Float[Tensor, "heads slots"],
    ridge: float | None,
    towards: Float[Tensor, "heads slots value_dim"] | None = None,
) -> Float[Tensor, "heads slots value_dim"]:
    """Ridge least squares on the attention outputs; the ridge pulls towards 0, or towards given values."""
    base = torch.zeros_like(take(kept.block.values, kept.slots)) if towards is None else towards
    if ridge is None or len(kept.chunks) == 1 or kept.dense.mass.shape[1] < kept.slots.shape[1]:
        parts = [kept.weighted_attention(chunk, log_bias) for chunk in kept.chunks]
        attention, outputs = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return base + fit_values(attention, outputs - attention @ base, ridge=ridge)
    gram, target = torch.zeros(()), torch.zeros(())
    for chunk in kept.chunks:
        attention, outputs = kept.weighted_attention(chunk, log_bias)
        residual = (outputs - attention @ base).double()
        attention = attention.double()
        gram, target = gram + attention.mT @ attention, target + attention.mT @ residual
    return base + solve_ridge(gram, target, ridge).to(kept.block.values.dtype)


def output_error(
    kept: KeptKeys, values: Float[Tensor, "heads slots value_dim"], log_bias: Float[Tensor, "heads slots"]
) -> Float[Tensor, " heads"]:
    """Squared error of the attention output over the slots, times squared weights, summed over queries.

    Args:
        kept: the slots' keys.
        values: of the slots.
        log_bias: of the slots, nats.
    """
    error = values.new_zeros(len(values))
    for chunk in kept.chunks:
        attention, outputs = kept.weighted_attention(chunk, log_bias)
        error += (attention @ values - outputs).square().sum((1, 2))
    return error
