"""The objective of both passes in chunks of tokens: at no time does a whole logit tensor exist."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kvcat.errors import InputError
from kvcat.losses.head import OutputHead
from kvcat.losses.terms import distillation_kl
from kvcat.types import Float, Int, Tensor

_CHUNK_ELEMENTS = 2**26
_CHUNK_TOKENS_CPU = 256  # more rows make a CPU's products no faster (benchmarks/loss.py)


@dataclass(frozen=True, eq=False)
class ChunkedLosses:
    """The weighted objective and its parts, scalars in float32, float64 where the head is.

    Args:
        total: mask_weight * kl + anchor_weight * dense_loss, with gradient.
        dense_loss: next-token loss of the dense pass, nats; like all below without gradient.
        masked_loss: next-token loss of the masked pass, nats; None for the control.
        kl: KL(dense || masked), nats; None for the control.
        top1: fraction of positions where both passes have the same most likely token; None for the control.
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
    by the gradient that arrives, and differentiates once. Matrix products run in ``head.compute_dtype()``, as in
    ``head.logits``; scale, soft-cap, softmax and every sum over positions in at least float32.

    Memory on top of the inputs: three float32 tensors of chunk_tokens x vocab (five with a soft-cap), W once in the
    dtype of the products where that is not its own, its gradient in float32, and the hidden states' gradients; in the
    backward the scaled gradients beside these instead of the chunk. Half-precision products add one of W's shape.
    Where gradients are off, or none is required, none is made.

    Args:
        head: the model's output head. Its W must be a plain tensor: a sharded model unshards it around this call, as
            FSDP2 does for the parameters of a module inside that module's forward.
        dense_hidden: output of the model's final norm in the dense pass.
        masked_hidden: the same of the masked pass; None for the control, whose total has no KL.
        tokens: token ids, at least two a sequence.
        mask_weight: lambda_mask, >= 0.
        anchor_weight: lambda_anchor, >= 0.
        chunk_tokens: positions per chunk, at least 1; None takes ``default_chunk_tokens``.

    Raises:
        InputError: fewer than two tokens, chunk_tokens below 1, a sharded W.

    References: KV-CAT, equation "training_objective". Gradients made in the forward: Hsu et al. 2024 (Liger Kernel),
        arXiv:2410.10989.
    """
    _check(head, tokens, chunk_tokens)
    options = PassOptions.of(head, chunk_tokens or default_chunk_tokens(head), mask_weight, anchor_weight)
    dense = dense_hidden[:, :-1].flatten(0, 1)
    masked = None if masked_hidden is None else masked_hidden[:, :-1].flatten(0, 1)
    weight, bias = head.weight, head.bias
    if not torch.is_grad_enabled():  # autograd's own bookkeeping would report that gradients are needed
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        dense, masked = dense.detach(), None if masked is None else masked.detach()
    total, means = _Objective.apply(dense, masked, weight, bias, tokens[:, 1:].flatten(), options)
    return ChunkedLosses(total, *means.unbind())


def chunked_kl(
    teacher_head: OutputHead,
    teacher_hidden: Float[Tensor, "batch tokens teacher_hidden"],
    head: OutputHead,
    hidden: Float[Tensor, "batch tokens hidden"],
    chunk_tokens: int | None = None,
) -> Float[Tensor, ""]:
    """``distillation_kl`` of two heads' logits, made chunk by chunk and once more in the backward.

    References: KV-CAT, footnote on distillation from a frozen base model.
    """
    step = chunk_tokens or default_chunk_tokens(head)
    taught = teacher_hidden[:, :-1].detach().flatten(0, 1)
    learned = hidden[:, :-1].flatten(0, 1)

    def chunk_sum(t: Tensor, s: Tensor) -> Tensor:
        # distillation_kl leaves the last position out, so one more is appended
        pair = [torch.cat([x, x[-1:]])[None] for x in (teacher_head.logits(t), head.logits(s))]
        return distillation_kl(pair[0], pair[1]) * len(s)

    parts = [
        checkpoint(chunk_sum, taught[i : i + step], learned[i : i + step], use_reentrant=False)
        for i in range(0, len(learned), step)
    ]
    return torch.stack(parts).sum() / len(learned)  # type: ignore[arg-type]


def default_chunk_tokens(head: OutputHead) -> int:
    """Positions of which one pass has 2^26 logits (256 MiB in float32); on a CPU not more than 256.

    A chunk adds once to the whole gradient of W, so that more positions mean less memory traffic per position.
    """
    tokens = max(1, _CHUNK_ELEMENTS // head.weight.shape[0])
    return min(tokens, _CHUNK_TOKENS_CPU) if head.weight.device.type == "cpu" else tokens


@dataclass(frozen=True)
class PassOptions:
    """What the passes over chunks need besides tensors, as in ``chunked_objective`` and ``OutputHead``."""

    scale: float
    softcap: float | None
    chunk: int
    dtype: torch.dtype
    mask_weight: float
    anchor_weight: float

    @classmethod
    def of(cls, head: OutputHead, chunk: int, mask_weight: float = 1.0, anchor_weight: float = 1.0) -> "PassOptions":
        """The options of one head, products in the dtype that the head has now."""
        return cls(head.scale, head.softcap, chunk, head.compute_dtype(), mask_weight, anchor_weight)


class _Objective(torch.autograd.Function):
    """Total and means of (dense_loss[, masked_loss, kl, top1]); the gradients are made in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        dense: Float[Tensor, "positions hidden"],
        masked: Float[Tensor, "positions hidden"] | None,
        weight: Float[Tensor, "vocab hidden"],
        bias: Float[Tensor, " vocab"] | None,
        targets: Int[Tensor, " positions"],
        options: PassOptions,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " parts"]]:
        inputs = (dense, masked, weight, bias)
        with torch.autocast(weight.device.type, enabled=False):
            passes = ChunkedPasses(inputs, ctx.needs_input_grad[:4], targets, options)
            means = passes.run().mean(1)
        total = options.anchor_weight * means[0]
        if masked is not None:
            total = total + options.mask_weight * means[2]
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        ctx.save_for_backward(*passes.gradients)
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
        return *scaled, None, None


class ChunkedPasses:
    """Values per position and gradients of the total, one chunk after the other.

    ``inputs`` are dense and masked hidden states, W and b, in any dtype; ``needs`` says which need a gradient.
    """

    def __init__(
        self,
        inputs: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
        needs: tuple[bool, ...],
        targets: Int[Tensor, " positions"],
        options: PassOptions,
    ):
        self.dense, self.masked, weight, bias = inputs
        self.targets, self.options = targets, options
        self.weight, self.bias = weight.to(options.dtype), None if bias is None else bias.to(options.dtype)
        wide = torch.promote_types(options.dtype, torch.float32)
        self.values = torch.zeros(1 if self.masked is None else 4, len(targets), dtype=wide, device=targets.device)
        self.gradients = [
            torch.zeros_like(x, dtype=wide) if x is not None and need else None
            for x, need in zip(inputs, needs, strict=True)
        ]

    def run(self) -> Float[Tensor, "parts positions"]:
        """Dense NLL of every position, and with a masked pass its NLL, KL(dense || masked) and top-1 agreement."""
        for start in range(0, len(self.targets), self.options.chunk):
            self._add(slice(start, start + self.options.chunk))
        return self.values

    def _add(self, rows: slice) -> None:
        targets, hidden = self.targets[rows, None], self.dense[rows].to(self.options.dtype)
        log_p, top, slope = self._log_probs(hidden)
        self.values[0, rows] = -log_p.gather(-1, targets).squeeze(-1)
        p = log_p.exp_() if self.masked is None else self._add_masked(rows, self.masked[rows], log_p, top)
        if self._gradient_through(0):
            p.scatter_add_(-1, targets, p.new_full(targets.shape, -1.0))
            self._add_gradient(0, rows, hidden, p, slope, self.options.anchor_weight)

    def _add_masked(
        self,
        rows: slice,
        masked: Float[Tensor, "chunk hidden"],
        log_p: Float[Tensor, "chunk vocab"],
        top: Int[Tensor, " chunk"],
    ) -> Float[Tensor, "chunk vocab"]:
        """The masked pass of a chunk; returns p and uses ``log_p`` up."""
        hidden = masked.to(self.options.dtype)
        log_s, top_masked, slope = self._log_probs(hidden)
        p = log_p.exp()
        self.values[1, rows] = -log_s.gather(-1, self.targets[rows, None]).squeeze(-1)
        self.values[2, rows] = log_p.sub_(log_s).mul_(p).sum(-1)
        self.values[3, rows] = (top == top_masked).to(self.values.dtype)
        if self._gradient_through(1):
            self._add_gradient(1, rows, hidden, log_s.exp_().sub_(p), slope, self.options.mask_weight)
        return p

    def _log_probs(
        self, hidden: Float[Tensor, "chunk hidden"]
    ) -> tuple[Float[Tensor, "chunk vocab"], Int[Tensor, " chunk"], Float[Tensor, "chunk vocab"] | None]:
        """Log-probabilities, the most likely token, and the soft-cap's derivative where there is one."""
        logits = functional.linear(hidden, self.weight, self.bias).to(self.values.dtype)
        if self.options.scale != 1:
            logits.mul_(self.options.scale)
        slope = None
        if self.options.softcap is not None:
            logits.div_(self.options.softcap).tanh_()
            slope = logits.square().neg_().add_(1) if any(g is not None for g in self.gradients) else None
            logits.mul_(self.options.softcap)
        return logits.log_softmax(-1), logits.argmax(-1), slope

    def _gradient_through(self, which: int) -> bool:
        hidden, weight, bias = self.gradients[which], *self.gradients[2:]
        return not (hidden is None and weight is None and bias is None)

    def _add_gradient(
        self,
        which: int,
        rows: slice,
        hidden: Float[Tensor, "chunk hidden"],
        by_logits: Float[Tensor, "chunk vocab"],
        slope: Float[Tensor, "chunk vocab"] | None,
        loss_weight: float,
    ) -> None:
        """Gradients of the chunk's rows, of W and of b from those by the logits, which are used up."""
        if slope is not None:
            by_logits.mul_(slope)
        factor = loss_weight * self.options.scale / len(self.targets)
        product = by_logits.to(self.options.dtype)
        by_hidden, (by_weight, by_bias) = self.gradients[which], self.gradients[2:]
        if by_hidden is not None:
            torch.mul((product @ self.weight).to(by_hidden.dtype), factor, out=by_hidden[rows])
        if by_weight is not None and by_weight.dtype == product.dtype:
            by_weight.addmm_(product.t(), hidden, alpha=factor)
        elif by_weight is not None:
            by_weight.add_(product.t() @ hidden, alpha=factor)
        if by_bias is not None:
            by_bias.add_(by_logits.sum(0), alpha=factor)


def _check(head: OutputHead, tokens: Int[Tensor, "batch tokens"], chunk_tokens: int | None) -> None:
    if tokens.shape[1] < 2:
        raise InputError(f"a sequence of {tokens.shape[1]} tokens predicts nothing: at least 2 are needed")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise InputError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if hasattr(head.weight, "placements"):  # a DTensor, without the import of torch.distributed
        raise InputError("the output weight is sharded: the chunked objective needs it whole")
