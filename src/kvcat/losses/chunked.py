"""The output head, and losses and scores behind it in chunks of tokens: a whole logit tensor never exists."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kvcat.errors import InputError, check_least
from kvcat.losses.terms import check_length, distillation_kl
from kvcat.types import Float, Int, Tensor

_CHUNK_TOKENS, _CHUNK_ELEMENTS = 1024, 2**26  # logits of one pass, at most 256 MiB in float32
_BLOCK_ELEMENTS, _BLOCK_ELEMENTS_CPU = 2**24, 2**19  # wide copies of logits; on a CPU they stay in its cache


@dataclass(frozen=True, eq=False)
class OutputHead:
    """logits = cap(a (W x + b)), cap(z) = c tanh(z / c), or z without a soft-cap.

    ``weight`` and ``bias`` are read from the module at every use, so a head stays valid where sharding exchanges the
    module's parameters.

    Args:
        linear: W and b; an ``nn.Linear`` that computes as one.
        scale: a, before the soft-cap; not zero.
        softcap: c, positive; None for none.

    Raises:
        InputError: a module whose forward is not W x + b, scale or soft-cap out of range.
    """

    linear: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.linear, nn.Linear) or type(self.linear).forward is not nn.Linear.forward:
            raise InputError(f"an output head must be a plain linear layer, got {type(self.linear).__name__}")
        if not abs(self.scale) > 0:
            raise InputError(f"the scale of the logits must not be zero, got {self.scale}")
        if self.softcap is not None and not self.softcap > 0:
            raise InputError(f"the soft-cap of the logits must be positive, got {self.softcap}")

    @property
    def weight(self) -> Float[Tensor, "vocab hidden"]:
        """W."""
        return cast(nn.Linear, self.linear).weight

    @property
    def bias(self) -> Float[Tensor, " vocab"] | None:
        """The bias b, None where the head has none."""
        return cast(nn.Linear, self.linear).bias

    def compute_dtype(self) -> torch.dtype:
        """Dtype of the matrix products: autocast's where it is on and W is not float64, W's own otherwise."""
        device, dtype = self.weight.device.type, self.weight.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            return torch.get_autocast_dtype(device)
        return dtype

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """All logits at once, in the dtype of the matrix product."""
        logits = functional.linear(hidden.to(self.compute_dtype()), self.weight, self.bias)
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True, eq=False)
class ChunkedLosses:
    """The weighted objective and its parts, scalars in float32, float64 where the head is.

    Args:
        total: mask_weight * kl + anchor_weight * dense_loss, with gradient.
        dense_loss: next-token loss of the dense pass, nats; like all below without gradient.
        masked_loss: next-token loss of the masked pass, nats; None for the control, like all below.
        kl: KL(dense || masked), nats.
        top1: fraction of positions where both passes have the same most likely token.
    """

    total: Float[Tensor, ""]
    dense_loss: Float[Tensor, ""]
    masked_loss: Float[Tensor, ""] | None = None
    kl: Float[Tensor, ""] | None = None
    top1: Float[Tensor, ""] | None = None


def chunked_objective(
    head: OutputHead,
    dense_hidden: Float[Tensor, "batch tokens hidden"],
    masked_hidden: Float[Tensor, "batch tokens hidden"] | None,
    tokens: Int[Tensor, "batch tokens"],
    *,
    mask_weight: float = 1.0,
    anchor_weight: float = 1.0,
    chunk_tokens: int | None = None,
) -> ChunkedLosses:
    """lambda_mask KL(sg dense || masked) + lambda_anchor NTP(dense) over positions t = 2..T, and what it is made of.

    Equals ``distillation_kl`` and ``next_token_loss`` on the head's logits in value and every gradient. With z the
    logits, p = softmax(z_dense), s = softmax(z_masked), y the next token and n the number of predictions,

        dL/dz_dense = lambda_anchor (p - onehot(y)) / n,    dL/dz_masked = lambda_mask (s - p) / n,

    so a chunk's dense logits, made once, serve the anchor with gradient and the KL without. The gradients by both
    hidden states, W and b are made in the forward, where the chunk's logits are at hand; the backward only scales them
    by the gradient that arrives, and differentiates once. Matrix products run in ``head.compute_dtype()``; scale,
    soft-cap, softmax and every sum over positions in at least float32.

    Memory on top of the inputs: chunk_tokens x vocab logits of both passes, which give way to the gradients by them; a
    few rows of these in float32; W once in the dtype of the products where that is not its own, its gradient in
    float32, and the hidden states' gradients. Where gradients are off, or none is required, none is made.

    Args:
        head: the model's output head. Its W must be a plain tensor: a sharded model unshards it around this call, as
            FSDP2 does for the parameters of a module inside that module's forward.
        dense_hidden: output of the model's final norm in the dense pass.
        masked_hidden: the same of the masked pass; None for the control, whose total has no KL.
        tokens: token ids, at least two a sequence.
        mask_weight, anchor_weight: lambda_mask and lambda_anchor, >= 0.
        chunk_tokens: positions per chunk, at least 1; None takes 1,024, or as many as give 2^26 logits.

    Raises:
        InputError: fewer than two tokens, chunk_tokens below 1, a sharded W.

    References: KV-CAT, equation "training_objective". Gradients made in the forward: Hsu et al. 2024 (Liger Kernel),
        arXiv:2410.10989.
    """
    check_length(tokens.shape[1])
    if hasattr(head.weight, "placements"):  # a DTensor, without the import of torch.distributed
        raise InputError("the output weight is sharded: the chunked objective needs it whole")
    dense = dense_hidden[:, :-1].flatten(0, 1)
    inputs = [dense, None if masked_hidden is None else masked_hidden[:, :-1].flatten(0, 1), head.weight, head.bias]
    if not torch.is_grad_enabled():  # autograd's own bookkeeping would report that gradients are needed
        inputs = [None if x is None else x.detach() for x in inputs]
    chunk = _chunk_tokens(head, chunk_tokens)
    total, means = _Objective.apply(*inputs, tokens[:, 1:].flatten(), head, chunk, (anchor_weight, mask_weight))
    return ChunkedLosses(total, *means.unbind())


def chunked_kl(
    teacher_head: OutputHead,
    teacher_hidden: Float[Tensor, "batch tokens teacher_hidden"],
    head: OutputHead,
    hidden: Float[Tensor, "batch tokens hidden"],
) -> Float[Tensor, ""]:
    """``distillation_kl`` of two heads' logits, made chunk by chunk and once more in the backward.

    References: KV-CAT, footnote on distillation from a frozen base model.
    """
    step = _chunk_tokens(head)
    taught = teacher_hidden[:, :-1].detach().flatten(0, 1)
    learned = hidden[:, :-1].flatten(0, 1)

    def chunk_sum(t: Tensor, s: Tensor) -> Tensor:
        # distillation_kl leaves the last position out, so one more is appended
        pair = [torch.cat([x, x[-1:]])[None] for x in (teacher_head.logits(t), head.logits(s))]
        return distillation_kl(pair[0], pair[1]) * len(s)

    pairs = zip(taught.split(step), learned.split(step), strict=True)
    parts: list[Any] = [checkpoint(chunk_sum, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(parts).sum() / len(learned)


@dataclass(frozen=True, eq=False)
class PositionScores:
    """Scores of every position in float32, float64 where the head is.

    Args:
        nll: -log probability of the target, nats.
        nll_teacher: the same under the teacher; None without one, like all below.
        kl: KL(teacher || student), nats.
        top1: 1 where both have the same most likely token, else 0.
    """

    nll: Float[Tensor, "*positions"]
    nll_teacher: Float[Tensor, "*positions"] | None = None
    kl: Float[Tensor, "*positions"] | None = None
    top1: Float[Tensor, "*positions"] | None = None


@torch.no_grad()
def score_positions(
    head: OutputHead,
    hidden: Float[Tensor, "*positions hidden"],
    targets: Int[Tensor, "*positions"],
    teacher_hidden: Float[Tensor, "*positions hidden"] | None = None,
) -> PositionScores:
    """NLL of the targets, and with a teacher its NLL, KL(teacher || student) and top-1 agreement, at every position.

    Nothing is shifted: ``hidden``, the input of the head, is scored against ``targets`` at the same position. Where a
    position has no next token, any id serves as its target; KL and top-1 do not depend on it.
    """
    first, second = (hidden, None) if teacher_hidden is None else (teacher_hidden, hidden.flatten(0, -2))
    inputs = (first.flatten(0, -2), second, head.weight, head.bias)
    values = _Chunks(head, inputs, (False,) * 4, targets.flatten(), _chunk_tokens(head)).run()
    nll, *rest = (part.view(targets.shape) for part in values)
    return PositionScores(rest[0], nll, *rest[1:]) if rest else PositionScores(nll)


def _chunk_tokens(head: OutputHead, wanted: int | None = None) -> int:
    """Positions per chunk; each chunk adds once to the whole gradient of W, so that fewer chunks move less memory."""
    check_least(1, chunk_tokens=1 if wanted is None else wanted)
    return wanted or max(1, min(_CHUNK_TOKENS, _CHUNK_ELEMENTS // head.weight.shape[0]))


class _Objective(torch.autograd.Function):
    """Total and means of (dense_loss[, masked_loss, kl, top1]); the gradients are made in the forward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Float[Tensor, ""], Float[Tensor, " parts"]]:
        *inputs, targets, head, chunk, weights = arguments
        chunks = _Chunks(head, inputs, ctx.needs_input_grad[:4], targets, chunk, weights)
        means = chunks.run().mean(1)
        total = weights[0] * means[0]
        if len(means) > 1:
            total = total + weights[1] * means[2]
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        ctx.save_for_backward(*chunks.gradients)
        ctx.mark_non_differentiable(means)
        return total, means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # the product comes before the cast: scaled losses are there to keep small gradients out of float16's underflow
        scaled = (
            None if gradient is None else (gradient * upstream[0]).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None


class _Chunks:
    """Values per position and gradients of the weighted total, one chunk after the other.

    ``inputs`` are dense and masked hidden states, W and b, in any dtype; ``needs`` says which need a gradient;
    ``weights`` are those of the dense and of the masked pass.
    """

    def __init__(
        self,
        head: OutputHead,
        inputs: Any,
        needs: tuple[bool, ...],
        targets: Int[Tensor, " positions"],
        step: int,
        weights: tuple[float, float] = (1.0, 1.0),
    ):
        self.dense, self.masked, weight, bias = inputs
        self.head, self.targets, self.step, self.weights = head, targets, step, weights
        self.dtype = head.compute_dtype()
        self.weight, self.bias = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        wide = torch.promote_types(self.dtype, torch.float32)
        self.values = torch.zeros(1 if self.masked is None else 4, len(targets), dtype=wide, device=targets.device)
        self.gradients = [
            torch.zeros_like(x, dtype=wide) if x is not None and need else None
            for x, need in zip(inputs, needs, strict=True)
        ]

    def run(self) -> Float[Tensor, "parts positions"]:
        """Dense NLL of every position, and with a masked pass its NLL, KL(dense || masked) and top-1 agreement."""
        with torch.autocast(self.weight.device.type, enabled=False):
            for start in range(0, len(self.targets), self.step):
                self._add(slice(start, start + self.step))
        return self.values

    def _add(self, rows: slice) -> None:
        hidden = [x[rows].to(self.dtype) for x in (self.dense, self.masked) if x is not None]
        logits = [functional.linear(x, self.weight, self.bias) for x in hidden]
        elements = _BLOCK_ELEMENTS_CPU if self.weight.device.type == "cpu" else _BLOCK_ELEMENTS
        size = max(1, elements // len(self.weight))
        parts = (x.split(size) for x in (*logits, self.values[:, rows].T, self.targets[rows]))
        for *own, values, targets in zip(*parts, strict=True):
            self._score(own, values, targets[:, None])
        for which, (x, by_logits) in enumerate(zip(hidden, logits, strict=True)):
            if self._gradient_through(which):
                self._add_gradient(which, rows, x, by_logits)

    def _score(
        self,
        logits: Sequence[Float[Tensor, "block vocab"]],
        values: Float[Tensor, "block parts"],
        targets: Int[Tensor, "block 1"],
    ) -> None:
        """Values of a block of positions; its logits give way to the gradients by them."""
        log_p, slope = self._log_probs(logits[0])
        values[:, 0] = -log_p.gather(-1, targets).squeeze(-1)
        if self.masked is None:
            p = log_p.exp_()
        else:
            log_s, slope_masked = self._log_probs(logits[1])
            p = log_p.exp()
            values[:, 1] = -log_s.gather(-1, targets).squeeze(-1)
            values[:, 3] = (log_p.argmax(-1) == log_s.argmax(-1)).to(values.dtype)
            values[:, 2] = log_p.sub_(log_s).mul_(p).sum(-1)
            if self._gradient_through(1):
                _replace(logits[1], log_s.exp_().sub_(p), slope_masked)
        if self._gradient_through(0):
            p.scatter_add_(-1, targets, p.new_full(targets.shape, -1.0))
            _replace(logits[0], p, slope)

    def _log_probs(
        self, logits: Float[Tensor, "block vocab"]
    ) -> tuple[Float[Tensor, "block vocab"], Float[Tensor, "block vocab"] | None]:
        """Log-probabilities of what the head's product gave, and the soft-cap's derivative where there is one."""
        logits, softcap = logits.to(self.values.dtype, copy=True), self.head.softcap
        if self.head.scale != 1:
            logits.mul_(self.head.scale)
        slope = None
        if softcap is not None:
            logits.div_(softcap).tanh_()
            slope = logits.square().neg_().add_(1) if any(g is not None for g in self.gradients) else None
            logits.mul_(softcap)
        return logits.log_softmax(-1), slope

    def _gradient_through(self, which: int) -> bool:
        return any(x is not None for x in (self.gradients[which], *self.gradients[2:]))

    def _add_gradient(
        self, which: int, rows: slice, hidden: Float[Tensor, "chunk hidden"], by_logits: Float[Tensor, "chunk vocab"]
    ) -> None:
        """Gradients of the chunk's rows, of W and of b from those by the logits."""
        factor = self.weights[which] * self.head.scale / len(self.targets)
        by_hidden, (by_weight, by_bias) = self.gradients[which], self.gradients[2:]
        if by_hidden is not None:
            torch.mul((by_logits @ self.weight).to(by_hidden.dtype), factor, out=by_hidden[rows])
        if by_weight is not None and by_weight.dtype == by_logits.dtype:
            by_weight.addmm_(by_logits.t(), hidden, alpha=factor)
        elif by_weight is not None:
            by_weight.add_(by_logits.t() @ hidden, alpha=factor)
        if by_bias is not None:
            by_bias.add_(by_logits.sum(0, dtype=by_bias.dtype), alpha=factor)


def _replace(
    logits: Float[Tensor, "block vocab"],
    gradient: Float[Tensor, "block vocab"],
    slope: Float[Tensor, "block vocab"] | None,
) -> None:
    """Put the gradient by the head's product, before scale and soft-cap, in its place."""
    logits.copy_(gradient if slope is None else gradient.mul_(slope))
