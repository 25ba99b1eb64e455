"""The suffix scored on a compact cache, and compared with the dense model."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvcat.attention import enable
from kvcat.cache import CompactCache
from kvcat.compress.common import wide
from kvcat.compress.freezing import frozen
from kvcat.compress.teacher import positions_at_once
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.models import hidden_states, logits_from_hidden
from kvcat.types import Float, Int, Tensor


def replay(
    model: PreTrainedModel, cache: CompactCache, suffix_ids: Int[Tensor, "batch suffix"]
) -> Float[Tensor, "batch suffix vocab"]:
    """Logits of the suffix positions when the compact cache stands for the prefix.

    Args:
        model: the model the cache was made with.
        cache: compact prefix; one cached example serves any number of rows.
        suffix_ids: tokens after the prefix.

    Raises:
        InputError: another model, no tokens, or a batch that does not fit.
    """
    with torch.no_grad():
        return logits_from_hidden(model, replay_hidden(model, cache, suffix_ids))


@torch.no_grad()
def replay_hidden(
    model: PreTrainedModel, cache: CompactCache, suffix_ids: Int[Tensor, "batch suffix"], *, chunk_tokens: int = 4096
) -> Float[Tensor, "batch suffix hidden"]:
    """Input of the head at the suffix positions when the compact cache stands for the prefix.

    Args:
        model: the model the cache was made with.
        cache: compact prefix.
        suffix_ids: tokens after the prefix.
        chunk_tokens: most tokens of each example that run at once, at least 1; more of them run chunk after chunk
            behind the growing cache, so that activations grow with the chunk.

    Raises:
        InputError: as ``replay``, or chunk_tokens below 1.
    """
    parts = list(_replayed(model, cache, suffix_ids, chunk_tokens))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@torch.no_grad()
def _replayed(
    model: PreTrainedModel, cache: CompactCache, suffix_ids: Int[Tensor, "batch suffix"], chunk_tokens: int
) -> Iterator[Float[Tensor, "batch positions hidden"]]:
    if chunk_tokens < 1:
        raise InputError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    past = cache.inputs(model, suffix_ids)["past_key_values"]
    enable(model)  # whose attention needs no mask of chunk x suffix
    for tokens in suffix_ids.split(chunk_tokens, dim=1):
        with frozen(model):
            hidden = hidden_states(model, input_ids=tokens, past_key_values=past, use_cache=True)
        yield hidden


@dataclass(frozen=True)
class Scores:
    """How the suffix fares on a compact cache, one figure per example.

    Args:
        nll: negative log-likelihood of the suffix on the compact cache, nats per token.
        nll_dense: the same on the dense cache.
        delta_nll: nll - nll_dense, nats per token.
        delta_ppl: exp(nll) - exp(nll_dense).
        kl: KL(dense || compact), mean over the suffix's query positions, nats.
        top1: fraction of the suffix's query positions where both have the same most likely token.
    """

    nll: Float[Tensor, " batch"]
    nll_dense: Float[Tensor, " batch"]
    delta_nll: Float[Tensor, " batch"]
    delta_ppl: Float[Tensor, " batch"]
    kl: Float[Tensor, " batch"]
    top1: Float[Tensor, " batch"]


@torch.no_grad()
def compare(trace: Trace, cache: CompactCache, *, start: int = 0, chunk_tokens: int = 4096) -> Scores:
    """The suffix of the trace on the compact cache against the dense forward.

    The first suffix token is predicted from the prefix's last position, which no compression changes: both NLLs count
    it with the dense prediction. Memory grows with the chunk, not with the suffix, but for its keys and values.

    Args:
        trace: with a suffix.
        cache: a compact cache of this trace's prefix.
        start: first suffix position that counts, with the token it predicts; 0 takes the whole suffix.
        chunk_tokens: as in ``replay_hidden``.

    Raises:
        InputError: no suffix, a cache of another model, prefix length or batch, a start that leaves no token, or
            chunk_tokens below 1.
    """
    suffix, length = trace.suffix_ids, trace.suffix_ids.shape[1]
    if length == 0:
        raise InputError(
            f"the trace ends with its prefix of {trace.prefix_len} tokens: there is no suffix to compare on"
        )
    if not 0 <= start < max(1, length - 1):
        raise InputError(f"start must be in [0, {length - 2}] for a suffix of {length} tokens, not {start}")
    if cache.num_tokens != trace.prefix_len or cache.batch_size not in (1, trace.batch_size):
        raise InputError(
            f"a cache of {cache.batch_size} prefixes of {cache.num_tokens} tokens does not belong to a trace of "
            f"{trace.batch_size} prefixes of {trace.prefix_len}"
        )
    nll_dense = -wide(trace.logits_at(-1, 0)).log_softmax(-1).gather(-1, suffix[:, :1, None])[:, 0, 0] * (start == 0)
    nll, kl, top1 = nll_dense.clone(), torch.zeros_like(nll_dense), torch.zeros_like(nll_dense)
    stop = 0
    for replayed in _replayed(trace.model, cache, suffix, chunk_tokens):
        for hidden in replayed.split(positions_at_once(trace), dim=1):
            stop += hidden.shape[1]
            counted = min(stop - start, hidden.shape[1])
            if counted <= 0:
                continue
            first = stop - counted
            dense = wide(trace.logits_at(first, stop)).log_softmax(-1)
            compact = wide(logits_from_hidden(trace.model, hidden[:, -counted:])).log_softmax(-1)
            kl += (dense.exp() * (dense - compact)).sum(-1).sum(-1)
            top1 += (dense.argmax(-1) == compact.argmax(-1)).sum(-1)
            targets = suffix[:, first + 1 : stop + 1, None]
            nll_dense -= dense[:, : targets.shape[1]].gather(-1, targets).sum((1, 2))
            nll -= compact[:, : targets.shape[1]].gather(-1, targets).sum((1, 2))
    positions = length - start
    tokens = positions if start == 0 else positions - 1
    nll, nll_dense, kl, top1 = nll / tokens, nll_dense / tokens, kl / positions, top1 / positions
    return Scores(nll, nll_dense, nll - nll_dense, nll.exp() - nll_dense.exp(), kl, top1)
