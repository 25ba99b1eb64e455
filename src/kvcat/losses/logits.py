"""Values and gradients from logits chunk by chunk, so that a whole logit tensor never exists."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from kvcat.errors import check_least
from kvcat.losses.head import OutputHead
from kvcat.memory import CPU_CACHE_ELEMENTS, LOGIT_ELEMENTS, rows_per_chunk
from kvcat.types import Float, Int, Tensor

_CHUNK_TOKENS_CPU = 1024
_CHUNK_ELEMENTS_CPU = 2**26  # logits of one pass
_BLOCK_ELEMENTS_CPU = CPU_CACHE_ELEMENTS  # float32 copies of logits
_BLOCK_ELEMENTS_DEVICE = 2**24
_BLOCK_ELEMENTS_COMPILED = 2**26  # with few copies: gradients before they overwrite the logits


@dataclass(frozen=True, eq=False)
class PassInputs:
    """The inputs that the logits are computed from, in any dtype.

    Args:
        dense: hidden states of the dense pass, or of the teacher.
        masked: hidden states of the masked pass, or of the student; None: there is one pass.
        weight, bias: W and b of the output head.
    """

    dense: Float[Tensor, "positions hidden"]
    masked: Float[Tensor, "positions hidden"] | None
    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, " vocab"] | None


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients with respect to each of the ``PassInputs``; None if it is not needed."""

    dense: Float[Tensor, "positions hidden"] | None = None
    masked: Float[Tensor, "positions hidden"] | None = None
    weight: Float[Tensor, "vocab hidden"] | None = None
    bias: Float[Tensor, " vocab"] | None = None

    @classmethod
    def zeros(cls, inputs: PassInputs, needed: Sequence[bool], dtype: torch.dtype) -> "Gradients":
        """Gradients of 0.

        Args:
            inputs: the tensors that the gradients are taken with respect to.
            needed: whether dense, masked, weight and bias need one, in this order.
            dtype: dtype of the gradients.
        """
        tensors: dict[str, Tensor] = {}
        for (name, tensor), is_needed in zip(vars(inputs).items(), needed, strict=True):
            if is_needed:
                tensors[name] = torch.zeros_like(tensor, dtype=dtype)
        return cls(**tensors)


class PositionValues(NamedTuple):
    """Values of every position; 0 for a value whose inputs are absent.

    Args:
        dense_nll: -log probability of the target in the dense pass, nats.
        masked_nll: the same in the masked pass, nats.
        kl: KL(dense || masked), nats.
        top1: 1 where both passes have the same most likely token, else 0.
    """

    dense_nll: Float[Tensor, " positions"]
    masked_nll: Float[Tensor, " positions"]
    kl: Float[Tensor, " positions"]
    top1: Float[Tensor, " positions"]


class _ChunkPass(NamedTuple):
    """One pass over a chunk of positions; the gradients with respect to the logits overwrite the
    logits.
    """

    hidden: Float[Tensor, "chunk hidden"]
    logits: Float[Tensor, "chunk vocab"]


class _Block(NamedTuple):
    """What the values and gradients of a block of logits depend on, except the logits."""

    scale: float
    softcap: float | None
    dense_learns: bool
    masked_learns: bool
    wide: torch.dtype


class _LogProbs(NamedTuple):
    """Log-probabilities of a block of positions, and the soft-cap's derivative if there is one."""

    values: Float[Tensor, "block vocab"]
    slope: Float[Tensor, "block vocab"] | None


def positions_per_chunk(head: OutputHead, device_elements: int = LOGIT_ELEMENTS) -> int:
    """Positions whose logits exist at once: as many as have 2^28 logits (``device_elements``), on a
    CPU 1,024 or as many as have 2^26.

    Each chunk adds to the whole gradient of W once, so fewer chunks move less memory.
    """
    vocab_size = len(head.weight)
    device = head.weight.device
    rows = rows_per_chunk(
        vocab_size, device, cpu_elements=_CHUNK_ELEMENTS_CPU, device_elements=device_elements
    )
    return min(_CHUNK_TOKENS_CPU, rows) if device.type == "cpu" else rows


class LogitChunks:
    """Values of all positions and gradients of their weighted mean, chunk by chunk.

    With z the logits, p = softmax(z_dense), s = softmax(z_masked), y the target and n the number of
    positions, the mean of mask_weight KL(dense || masked) + anchor_weight NLL(dense) has the
    gradients

        dL/dz_dense = anchor_weight (p - onehot(y)) / n,    dL/dz_masked = mask_weight (s - p) / n.

    The KL has no gradient to the dense pass. For each chunk:

    1. Make the logits of both passes, with one matrix product each.
    2. Block by block, in at least float32, compute log-probabilities and the positions' values.
       Where gradients are needed, overwrite the logits by the gradients by the logits.
    3. Turn these into gradients by the hidden states, W and b, with matrix products.

    Args:
        head: the output head. Its ``compute_dtype`` is that of the matrix products.
        inputs: hidden states, W and b.
        targets: token ids; None: no NLL, and no gradient to the dense pass.
        gradients: tensors that gradients are added to; None: no gradients are computed.
        anchor_weight, mask_weight: lambda_anchor and lambda_mask.
        chunk_tokens: positions of a chunk, at least 1; None: ``positions_per_chunk``.
        block_tokens: positions of a block, at least 1; None: as many as stay in a CPU's cache, or
            as many as have 2^26 logits if blocks are compiled.
        compiled: compile the work on a block with torch.compile. It then reads logits and writes
            gradients in a few passes, without copies in float32.
    """

    def __init__(
        self,
        head: OutputHead,
        inputs: PassInputs,
        targets: Int[Tensor, " positions"] | None,
        gradients: Gradients | None = None,
        *,
        anchor_weight: float = 1.0,
        mask_weight: float = 1.0,
        chunk_tokens: int | None = None,
        block_tokens: int | None = None,
        compiled: bool = False,
    ):
        check_least(1, chunk_tokens=1 if chunk_tokens is None else chunk_tokens)
        check_least(1, block_tokens=1 if block_tokens is None else block_tokens)
        self.head = head
        self.inputs = inputs
        self.targets = targets
        self.gradients = Gradients() if gradients is None else gradients
        self.anchor_weight = anchor_weight
        self.mask_weight = mask_weight
        # W and b in the dtype of the matrix products, once for all chunks
        self.dtype = head.compute_dtype()
        self.weight = inputs.weight.to(self.dtype)
        self.bias = None if inputs.bias is None else inputs.bias.to(self.dtype)
        # the gradients of W and b come through the logits of both passes
        by_head = self.gradients.weight is not None or self.gradients.bias is not None
        self.dense_learns = targets is not None and (by_head or self.gradients.dense is not None)
        self.masked_learns = by_head or self.gradients.masked is not None
        # the dtype of softmax and of all sums over positions
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.num_positions = len(inputs.dense)
        self.chunk = chunk_tokens or positions_per_chunk(head)
        on_cpu, on_device = _BLOCK_ELEMENTS_CPU, _BLOCK_ELEMENTS_DEVICE
        if compiled:
            on_cpu = on_device = _BLOCK_ELEMENTS_COMPILED
        self.block = block_tokens or rows_per_chunk(
            len(self.weight), self.weight.device, cpu_elements=on_cpu, device_elements=on_device
        )
        self.score_block = _compiled_block() if compiled else _score_block
        self.of_block = _Block(
            head.scale, head.softcap, self.dense_learns, self.masked_learns, self.wide
        )

    def run(self) -> PositionValues:
        """Work through all chunks; the values of all positions."""
        device = self.inputs.dense.device
        zeros = torch.zeros(4, self.num_positions, dtype=self.wide, device=device)
        values = PositionValues(*zeros)
        with torch.autocast(device.type, enabled=False):
            for start in range(0, self.num_positions, self.chunk):
                stop = min(start + self.chunk, self.num_positions)
                self._add_chunk(slice(start, stop), values)
        return values

    def _add_chunk(self, chunk: slice, values: PositionValues) -> None:
        # 1. logits
        dense = self._project(self.inputs.dense[chunk])
        masked = None if self.inputs.masked is None else self._project(self.inputs.masked[chunk])
        # 2. values, and gradients by the logits
        for start in range(chunk.start, chunk.stop, self.block):
            positions = slice(start, min(start + self.block, chunk.stop))
            block = slice(start - chunk.start, positions.stop - chunk.start)
            masked_logits = None if masked is None else masked.logits[block]
            targets = None if self.targets is None else self.targets[positions, None]
            scores = self.score_block(dense.logits[block], masked_logits, targets, self.of_block)
            for name, score in scores.items():
                getattr(values, name)[positions] = score
        # 3. gradients by the inputs
        if self.dense_learns:
            self._add_gradients(dense, self.gradients.dense, chunk, self.anchor_weight)
        if masked is not None and self.masked_learns:
            self._add_gradients(masked, self.gradients.masked, chunk, self.mask_weight)

    def _project(self, hidden: Float[Tensor, "chunk hidden"]) -> _ChunkPass:
        hidden = hidden.to(self.dtype)
        return _ChunkPass(hidden, functional.linear(hidden, self.weight, self.bias))

    def _add_gradients(
        self,
        chunk_pass: _ChunkPass,
        by_hidden: Float[Tensor, "positions hidden"] | None,
        chunk: slice,
        loss_weight: float,
    ) -> None:
        """Gradients of one pass by its hidden states, W and b, from the gradients by its logits."""
        hidden, by_logits = chunk_pass  # (chunk, hidden), (chunk, vocab)
        # the head's scale is part of the chain from hidden states to logits
        factor = loss_weight * self.head.scale / self.num_positions
        by_weight = self.gradients.weight  # (vocab, hidden)
        by_bias = self.gradients.bias  # (vocab,)
        if by_hidden is not None:
            product = (by_logits @ self.weight).to(by_hidden.dtype)
            torch.mul(product, factor, out=by_hidden[chunk])
        if by_weight is not None and by_weight.dtype == by_logits.dtype:
            # one fused call; in another type the product has to be made first
            by_weight.addmm_(by_logits.t(), hidden, alpha=factor)
        elif by_weight is not None:
            by_weight.add_(by_logits.t() @ hidden, alpha=factor)
        if by_bias is not None:
            by_bias.add_(by_logits.sum(0, dtype=by_bias.dtype), alpha=factor)


def _score_block(
    dense_logits: Float[Tensor, "block vocab"],
    masked_logits: Float[Tensor, "block vocab"] | None,
    targets: Int[Tensor, "block 1"] | None,
    block: _Block,
) -> dict[str, Float[Tensor, " block"]]:
    """``PositionValues`` of a block of positions by name; logits are overwritten by gradients.

    Tensors are reused: the fewer of vocabulary size exist, the longer blocks may be.
    """
    values: dict[str, Tensor] = {}
    log_dense = _log_probs(dense_logits, block)
    if targets is not None:
        values["dense_nll"] = -log_dense.values.gather(-1, targets).squeeze(-1)
    if masked_logits is None:
        dense_probs = log_dense.values.exp_()
    else:
        log_masked = _log_probs(masked_logits, block)
        # not in place: log p is needed once more, for the KL
        dense_probs = log_dense.values.exp()
        if targets is not None:
            values["masked_nll"] = -log_masked.values.gather(-1, targets).squeeze(-1)
        same = log_dense.values.argmax(-1) == log_masked.values.argmax(-1)
        values["top1"] = same.to(block.wide)
        # KL = sum_v p_v (log p_v - log s_v), over log p, which is not needed any more
        differences = log_dense.values.sub_(log_masked.values)
        values["kl"] = differences.mul_(dense_probs).sum(-1)
        if block.masked_learns:
            # dL/dz_masked without its factor: s - p
            by_masked = log_masked.values.exp_().sub_(dense_probs)
            _overwrite(masked_logits, by_masked, log_masked.slope)
    if block.dense_learns and targets is not None:
        # dL/dz_dense without its factor: p - onehot(y)
        _overwrite(dense_logits, _minus_one_hot(dense_probs, targets), log_dense.slope)
    return values


@cache
def _compiled_block() -> Any:
    """``_score_block``, compiled when it is first called."""
    return torch.compile(_score_block)


def _log_probs(logits: Float[Tensor, "block vocab"], block: _Block) -> _LogProbs:
    """Log-probabilities from the head's product, before scale and soft-cap."""
    wide = logits.to(block.wide, copy=True)
    if block.scale != 1:
        wide.mul_(block.scale)
    slope = None
    if block.softcap is not None:
        wide.div_(block.softcap).tanh_()
        if block.dense_learns or block.masked_learns:
            # d/dz of c tanh(z / c) is 1 - tanh^2(z / c)
            slope = wide.square().neg_().add_(1)
        wide.mul_(block.softcap)
    return _LogProbs(wide.log_softmax(-1), slope)


def _minus_one_hot(
    probs: Float[Tensor, "block vocab"], targets: Int[Tensor, "block 1"]
) -> Float[Tensor, "block vocab"]:
    """Probabilities, less 1 at the targets; the result may overwrite them."""
    if torch.compiler.is_compiling():
        # part of the pass that writes the gradient; a scatter would need the probabilities first
        tokens = torch.arange(probs.shape[-1], device=probs.device)
        return probs - (tokens == targets).to(probs.dtype)
    return probs.scatter_add_(-1, targets, probs.new_full(targets.shape, -1.0))


def _overwrite(
    logits: Float[Tensor, "block vocab"],
    gradient: Float[Tensor, "block vocab"],
    slope: Float[Tensor, "block vocab"] | None,
) -> None:
    """Replace the head's product by the gradient by it, before scale and soft-cap."""
    if slope is not None:
        gradient = gradient.mul_(slope)
    logits.copy_(gradient)
