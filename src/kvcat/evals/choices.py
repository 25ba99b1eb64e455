"""Multiple choice by likelihood: continuations of one prompt, scored on a compact cache or without any context."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvcat.cache import CompactCache
from kvcat.compress.base import wide
from kvcat.compress.compare import replay_hidden
from kvcat.models import frozen, hidden_states, logits_from_hidden
from kvcat.types import Float, Tensor


@torch.no_grad()
def choice_log_likelihoods(
    model: PreTrainedModel,
    cache: CompactCache | None,
    prompt_ids: Sequence[int],
    choice_ids: Sequence[Sequence[int]],
) -> Float[Tensor, " choices"]:
    """Total log-likelihood of each continuation c after the prompt, nats: sum_t log p(c_t | cache, prompt, c_<t).

    One batch with a row per continuation; all rows share the cached example. Prompt and continuation are joined as
    token ids: tokenised as one text, a continuation could merge with the end of the prompt ("(" and "A)" give "(A").

    Args:
        model: the model the cache was made with.
        cache: one example that stands before the prompt; None: the prompt is all there is.
        prompt_ids: at least one token.
        choice_ids: the continuations, at least one, each of at least one token; their lengths may differ.

    Raises:
        ValueError: no prompt, no continuation, or one without tokens.
        InputError: a cache of another model or of several examples.
    """
    if not prompt_ids or not choice_ids or not all(choice_ids):
        raise ValueError("a prompt and continuations of at least one token each are needed")
    lengths = torch.tensor([len(choice) for choice in choice_ids])
    longest = int(lengths.max())
    # what pads a row stands after everything that is scored in it
    rows = [[*prompt_ids, *choice, *[choice[0]] * (longest - len(choice))] for choice in choice_ids]
    ids = torch.tensor(rows, device=next(model.parameters()).device)
    if cache is None:
        with frozen(model):
            hidden = hidden_states(model, input_ids=ids, use_cache=False)
    else:
        hidden = replay_hidden(model, cache, ids)
    first = len(prompt_ids)
    log_probs = wide(logits_from_hidden(model, hidden[:, first - 1 : -1])).log_softmax(-1)
    each = log_probs.gather(-1, ids[:, first:, None])[..., 0].double().cpu()
    return each.masked_fill(torch.arange(longest) >= lengths[:, None], 0.0).sum(1)


def choice_values(log_likelihoods: Float[Tensor, " choices"], right: int) -> dict[str, float]:
    """What one multiple-choice question gives.

    ``accuracy`` is 1 where the right continuation is the most likely one (of equally likely ones the first is taken),
    otherwise 0; ``margin`` its log-likelihood minus the best wrong one's, nats; ``nll_choice`` minus the log of its
    probability among the continuations, nats, log(4) for four equally likely ones; ``choice`` the index taken.

    Args:
        log_likelihoods: of at least two continuations, nats.
        right: index of the right one.
    """
    found = log_likelihoods.tolist()
    taken = found.index(max(found))
    wrong = max(value for index, value in enumerate(found) if index != right)
    return {
        "accuracy": float(taken == right),
        "margin": found[right] - wrong,
        "nll_choice": -float(log_likelihoods.log_softmax(0)[right]),
        "choice": float(taken),
    }
