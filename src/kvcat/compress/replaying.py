"""The suffix scored on a compact cache, and compared with the dense model."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvcat.cache import CompactCache
from kvcat.compress.common import wide
from kvcat.compress.freezing import frozen
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.models import hidden_states, logits_from_hidden
from kvcat.types import Float, Int, Tensor

_CHUNK_ELEMENTS = 2**25


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
    model: PreTrainedModel, cache: CompactCache, suffix_ids: Int[Tensor, "batch suffix"]
) -> Float[Tensor, "batch suffix hidden"]:
    """Input of the head at the suffix positions when the compact cache stands for the prefix.

    Args:
        model: the model the cache was made with.
        cache: compact prefix.
        suffix_ids: tokens after the prefix.
    """
    inputs = cache.inputs(model, suffix_ids)
    with frozen(model):
        return hidden_states(model, **inputs, use_cache=True)


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
def compare(trace: Trace, cache: CompactCache) -> Scores:
    """The suffix of the trace on the compact cache against the dense forward.

    The first suffix token is predicted from the prefix's last position, which no compression changes: both NLLs count
    it with the dense prediction.

    Args:
        trace: with a suffix.
        cache: a compact cache of this trace's prefix.

    Raises:
        InputError: no suffix, or a cache of another model, prefix length or batch.
    """
    suffix, length = trace.suffix_ids, trace.suffix_ids.shape[1]
    if length == 0:
        raise InputError(
            f"the trace ends with its prefix of {trace.prefix_len} tokens: there is no suffix to compare on"
        )
    if cache.num_tokens != trace.prefix_len or cache.batch_size not in (1, trace.batch_size):
        raise InputError(
            f"a cache of {cache.batch_size} prefixes of {cache.num_tokens} tokens does not belong to a trace of "
            f"{trace.batch_size} prefixes of {trace.prefix_len}"
        )
    hidden = replay_hidden(trace.model, cache, suffix)
    nll_dense = -wide(trace.logits_at(-1, 0)).log_softmax(-1).gather(-1, suffix[:, :1, None])[:, 0, 0]
    nll, kl, top1 = nll_dense.clone(), torch.zeros_like(nll_dense), torch.zeros_like(nll_dense)
    step = max(1, _CHUNK_ELEMENTS // (trace.batch_size * trace.model.config.get_text_config().vocab_size))
    for start in range(0, length, step):
        stop = min(start + step, length)
        dense = wide(trace.logits_at(start, stop)).log_softmax(-1)
        compact = wide(logits_from_hidden(trace.model, hidden[:, start:stop])).log_softmax(-1)
        kl += (dense.exp() * (dense - compact)).sum(-1).sum(-1)
        top1 += (dense.argmax(-1) == compact.argmax(-1)).sum(-1)
        targets = suffix[:, start + 1 : stop + 1, None]
        nll_dense -= dense[:, : targets.shape[1]].gather(-1, targets).sum((1, 2))
        nll -= compact[:, : targets.shape[1]].gather(-1, targets).sum((1, 2))
    nll, nll_dense = nll / length, nll_dense / length
    return Scores(nll, nll_dense, nll - nll_dense, nll.exp() - nll_dense.exp(), kl / length, top1 / length)
