"""Distillation from another model, in chunks of tokens."""

import torch
from torch.utils.checkpoint import checkpoint

from kvcat.losses.chunked import default_chunk_tokens
from kvcat.losses.head import OutputHead
from kvcat.losses.prediction import distillation_kl
from kvcat.types import Float, Tensor


def chunked_kl(
    teacher_head: OutputHead,
    teacher_hidden: Float[Tensor, "batch tokens teacher_hidden"],
    head: OutputHead,
    hidden: Float[Tensor, "batch tokens hidden"],
    chunk_tokens: int | None = None,
) -> Float[Tensor, ""]:
    """``distillation_kl`` of two heads' logits, made chunk by chunk and once more in the backward.

    Args:
        teacher_head, teacher_hidden: the teacher's; no gradient.
        head, hidden: the student's.
        chunk_tokens: positions per chunk, at least 1; None takes 2^26 logits a chunk.

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
