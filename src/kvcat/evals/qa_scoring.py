"""Log-likelihoods of continuations: what each choice of a question is worth to a model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.compress.base import wide
from kvcat.errors import InputError
from kvcat.models import frozen, hidden_states, logits_from_hidden
from kvcat.types import Float, Int, Tensor

_LOGITS_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class Continuation:
    """A context and what is scored after it, as tokens.

    Args:
        tokens: of both.
        num_scored: how many of the last ones are the continuation, at least 1 and fewer than all.
    """

    tokens: tuple[int, ...]
    num_scored: int

    def pieces(self, positions: int | None) -> "list[Continuation]":
        """The same scored tokens in as many pieces as a model of so many positions needs, the last piece first.

        One piece is enough where the continuation fits: then its context loses its beginning, as in
        lm-evaluation-harness. A longer one, which the harness refuses, is scored in steps of half the positions, each
        after as much as fits before it.
        """
        if positions is None or self.num_scored <= positions:
            return [Continuation(self.tokens[-(positions or len(self.tokens)) - 1 :], self.num_scored)]
        step, first = max(1, positions // 2), len(self.tokens) - self.num_scored
        return [
            Continuation(self.tokens[max(0, end - positions - 1) : end], min(step, end - first))
            for end in range(len(self.tokens), first, -step)
        ]


def encode_continuations(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]) -> list[Continuation]:
    """Tokens of context, one space and text; the continuation's are those after as many as the context alone has.

    The context alone is encoded without its trailing white space, and both with whatever the tokenizer puts at the
    start of a text, as in lm-evaluation-harness.

    Args:
        tokenizer: of the model.
        pairs: (context, text).

    Raises:
        InputError: a continuation without a token.
    """
    if not pairs:
        return []
    wholes = tokenizer([f"{context} {text}" for context, text in pairs], verbose=False)["input_ids"]
    contexts = tokenizer([context.rstrip() for context, _ in pairs], verbose=False)["input_ids"]
    encoded: list[Continuation] = []
    for (_, text), whole, context in zip(pairs, wholes, contexts, strict=True):
        count = len(whole) - len(context)
        if count < 1 or not context:
            raise InputError(f"the tokenizer gives {text[:40]!r} no token after its context")
        encoded.append(Continuation(tuple(whole), count))
    return encoded


@torch.no_grad()
def log_likelihoods(
    model: PreTrainedModel, continuations: Sequence[Continuation], *, tokens_at_once: int = 8192
) -> list[float]:
    """Log-likelihood of each continuation given its context, in nats, summed over its tokens.

    Sequences of similar length share a batch and are padded on the right, where nothing that counts sees the padding.
    The head is applied where a token is scored, to a bounded number of positions at once.

    Args:
        model: a causal LM; it is in evaluation mode for as long as this takes.
        continuations: tokens to score.
        tokens_at_once: most tokens of a batch, padding included; a longer sequence is a batch of its own.
    """
    sums = [0.0] * len(continuations)
    positions = max_positions(model)
    pieces = [(index, piece) for index, whole in enumerate(continuations) for piece in whole.pieces(positions)]
    with frozen(model):
        for group in _groups(pieces, tokens_at_once):
            scores = _token_scores(model, [piece for _, piece in group]).cpu().double()
            parts = scores.split([piece.num_scored for _, piece in group])
            for (index, _), part in zip(group, parts, strict=True):
                sums[index] += float(part.sum())
    return sums


def max_positions(model: PreTrainedModel) -> int | None:
    """How many tokens the model can read at once; None where its configuration names no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _groups(
    pieces: Sequence[tuple[int, Continuation]], tokens_at_once: int
) -> Iterator[list[tuple[int, Continuation]]]:
    """What shares a batch: of similar length, the longest first."""
    group: list[tuple[int, Continuation]] = []
    for index, piece in sorted(pieces, key=lambda pair: -len(pair[1].tokens)):
        if group and (len(group) + 1) * (len(group[0][1].tokens) - 1) > tokens_at_once:
            yield group
            group = []
        group.append((index, piece))
    if group:
        yield group


def _token_scores(model: PreTrainedModel, group: Sequence[Continuation]) -> Float[Tensor, " scored"]:
    """Log-probability of every scored token, sequence after sequence."""
    device = next(model.parameters()).device
    longest = max(len(sequence.tokens) for sequence in group)
    padded = [[*sequence.tokens, *[0] * (longest - len(sequence.tokens))] for sequence in group]
    tokens = torch.tensor(padded, device=device)
    rows, columns = _indices(
        (row, len(sequence.tokens) - back)
        for row, sequence in enumerate(group)
        for back in range(sequence.num_scored, 0, -1)
    ).to(device)
    hidden = hidden_states(model, input_ids=tokens[:, :-1], use_cache=False)[rows, columns - 1]
    targets, scores = tokens[rows, columns, None], []
    step = max(1, _LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)
    for start in range(0, len(hidden), step):
        logits = wide(logits_from_hidden(model, hidden[start : start + step]))
        scores.append((logits.gather(1, targets[start : start + step]) - logits.logsumexp(1, keepdim=True))[:, 0])
    return torch.cat(scores)


def _indices(places: Iterable[tuple[int, int]]) -> Int[Tensor, "two scored"]:
    return torch.tensor(list(places)).T
