"""Greedy answers and losses of given answers, on a compact cache or without a context."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from kvcat.cache import CompactCache, check_token_ids
from kvcat.compress.compare import replay_hidden
from kvcat.generate import Row, end_tokens, generate
from kvcat.losses import score_positions
from kvcat.models import frozen, hidden_states, output_head
from kvcat.types import Float, Tensor


def greedy_answers(
    model: PreTrainedModel,
    cache: CompactCache | None,
    questions: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
) -> list[list[int]]:
    """Greedy answers to the questions, decoded until an end-of-text token.

    Shorter questions are padded on the left; padding does not change an answer. Where layers keep a
    state of the context, which padding would change, only questions of equal length share a batch.
    Answers that share a batch have the same largest number of tokens, so that no row reaches
    positions that its own question and answer do not need. Only the end-of-text tokens are used
    from the model's generation settings.

    Args:
        model: model that answers.
        cache: cache in place of the contexts; None: there are no contexts.
        questions: token ids of each question.
        max_new_tokens: largest number of tokens in an answer, or in that to each question.
    """
    limits = max_new_tokens
    if isinstance(limits, int):
        limits = [limits] * len(questions)
    has_states = cache is not None and bool(cache.states)
    batches: dict[tuple[int, int], list[int]] = {}
    for row, (question, limit) in enumerate(zip(questions, limits, strict=True)):
        batches.setdefault((limit, len(question) if has_states else 0), []).append(row)
    answers: dict[int, list[int]] = {}
    for (limit, _), rows in batches.items():
        of_rows = cache if cache is None or cache.batch_size == 1 else cache.select(rows)
        some = _padded_answers(model, of_rows, [questions[row] for row in rows], limit)
        answers |= dict(zip(rows, some, strict=True))
    return [answers[row] for row in range(len(questions))]


def _padded_answers(
    model: PreTrainedModel,
    cache: CompactCache | None,
    questions: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[list[int]]:
    """As ``greedy_answers``, in one batch that is padded on the left."""
    width = max(len(question) for question in questions)
    padded = []
    is_token = []
    for question in questions:
        num_padding = width - len(question)
        padded.append([0] * num_padding + list(question))
        is_token.append([0] * num_padding + [1] * len(question))
    ids = torch.tensor(padded, device=model.device)
    mask = torch.tensor(is_token, device=model.device)
    check_token_ids(model, ids)
    inputs: Any = {"input_ids": ids, "attention_mask": mask}
    if cache is not None:
        inputs = cache.inputs(model, ids, mask)
    ends = end_tokens(model)
    rows = [Row(ends, max_new_tokens) for _ in questions]
    generate(model, inputs, rows)
    return [[token for token in row.ids if token not in ends] for row in rows]


@torch.no_grad()
def token_nll(
    model: PreTrainedModel,
    cache: CompactCache | None,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> list[Float[Tensor, " tokens"]]:
    """Loss of every token of each answer: -log p(a_t | context, prompt, a_<t), in nats.

    The prompt and the answer, at least one token each, are joined as token ids. If they were joined
    as text, the answer could merge with the end of the prompt ("(" and "A)" give "(A").

    Args:
        model: model that scores.
        cache: cache in place of the contexts, with one example per row or one for all rows; None:
            there are no contexts.
        prompts: token ids of each prompt.
        answers: token ids of each answer.
    """
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        rows.append(torch.tensor([*prompt, *answer]))
    # the padding follows all tokens that are scored in its row
    ids = pad_sequence(rows, batch_first=True).to(model.device)
    check_token_ids(model, ids)
    if cache is None:
        with frozen(model):
            hidden = hidden_states(model, input_ids=ids, use_cache=False)
    else:
        hidden = replay_hidden(model, cache, ids)
    before = []  # hidden states at the positions that predict the answers
    targets = []
    for row, (prompt, tokens) in enumerate(zip(prompts, rows, strict=True)):
        start = len(prompt)
        stop = len(tokens)
        before.append(hidden[row, start - 1 : stop - 1])
        targets.append(ids[row, start:stop])
    scores = score_positions(output_head(model), torch.cat(before), torch.cat(targets))
    nll = scores.nll.double().cpu()
    return list(nll.split([len(answer) for answer in answers]))
