"""Questions about a context that is compressed: greedy answers, and how likely given answers are."""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pyarrow.parquet
import torch
from datasets.exceptions import DatasetsError
from huggingface_hub import constants
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache, check_token_ids
from kvcat.compress import Trace, trace
from kvcat.compress.compare import replay_hidden
from kvcat.compress.documents import INSTRUCTION, reconstruction_of_tokens
from kvcat.errors import InputError, one_line
from kvcat.evals.task import Baseline, Prepared, Task, Values, check_fits, check_vocabulary
from kvcat.hub import hub_obstacle
from kvcat.losses import score_positions
from kvcat.models import end_tokens, frozen, hidden_states, output_head, plain_generation
from kvcat.tokenization import TextEncoder, opening_ids, repaired
from kvcat.types import Float, Tensor


@dataclass(frozen=True)
class Question:
    """A context, a question about it, and its answer, as the tokens of one tokenizer."""

    document: str  # name of the context
    name: str  # of the question, unique in the document
    stratum: str  # group that is reported apart
    context: tuple[int, ...]  # what is compressed, with what the tokenizer puts at the start of a text
    question: tuple[int, ...]  # at least one
    answer: tuple[int, ...]  # the right one, at least one
    references: tuple[str, ...]  # texts that the answer is judged by
    max_new_tokens: int  # of a greedy answer, at least 1


@dataclass(frozen=True)
class PreparedContexts(Prepared):
    """Contexts of equal length that are compressed before what follows them is read; ``values`` says how."""

    @cached_property
    def trace(self) -> Trace:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dense forward over <context><instruction><context>, one row per example."""
        contexts = torch.tensor([example.context for example in self.batch], device=self.model.device)
        opening = self.task.opening_ids(self.tokenizer)
        sequence = reconstruction_of_tokens(self.tokenizer, contexts, opening)
        return trace(self.model, sequence, room=self.room)

    @property
    def room(self) -> int:
        """Tokens that follow the contexts at most."""
        raise NotImplementedError

    def values(self, cache: CompactCache | None) -> list[Values]:
        """Values per example when the cache stands for the contexts; None: there are none."""
        raise NotImplementedError

    def score(self, cache: CompactCache) -> list[Values]:
        """``values``, and with the prefix ``dense_`` those on the whole cache."""
        return self.beside_dense(self.values(cache))

    def baseline(self, baseline: Baseline) -> list[Values]:
        """The same with the whole context or without any."""
        return self.beside_dense(self._dense if baseline.name == "dense" else self._without)

    def beside_dense(self, own: list[Values]) -> list[Values]:
        """Values with the dense ones beside them."""
        named = [{f"dense_{name}": value for name, value in dense.items()} for dense in self._dense]
        return [values | dense for values, dense in zip(own, named, strict=True)]

    @cached_property
    def _dense(self) -> list[Values]:
        return self.values(self.trace.dense_cache())

    @cached_property
    def _without(self) -> list[Values]:
        return self.values(None)


@dataclass(frozen=True)
class PreparedQuestions(PreparedContexts):
    """Questions, answered greedily and under teacher forcing."""

    @property
    def room(self) -> int:
        """Tokens of the longest question with its answer."""
        return max(len(q.question) + max(len(q.answer), q.max_new_tokens) for q in self.batch)

    def values(self, cache: CompactCache | None) -> list[Values]:
        """``judge`` of the greedy answer, and ``nll`` of the right one, nats per token."""
        # without a context the question starts the text
        start = self.task.opening_ids(self.tokenizer) if cache is None else ()
        questions = [(*start, *example.question) for example in self.batch]
        answers = greedy_answers(self.model, cache, questions, max(example.max_new_tokens for example in self.batch))
        nll = token_nll(self.model, cache, questions, [example.answer for example in self.batch])
        found = []
        for example, tokens, own in zip(self.batch, answers, nll, strict=True):
            text = str(self.tokenizer.decode(tokens[: example.max_new_tokens], skip_special_tokens=True))
            found.append({**self.task.judge(text, example.references), "nll": float(own.mean())})
        return found

    def beside_dense(self, own: list[Values]) -> list[Values]:
        """Values with the dense ones and the gain of the context beside them."""
        rows = super().beside_dense(own)
        for row, without in zip(rows, self._without, strict=True):
            row["nll_dense"], row["nll_none"] = row.pop("dense_nll"), without["nll"]
            row["delta_nll"] = row["nll"] - row["nll_dense"]
            row["context_gain"] = row["nll_none"] - row["nll_dense"]
        return rows


@dataclass(frozen=True)
class QuestionTask(Task):
    """Questions about contexts that are compressed before; a task of this kind adds how answers are judged.

    Compressors are fitted to <context><instruction><context>.

    Values are those of ``judge`` on the compact cache, and with the prefix ``dense_`` on the whole one;
    and, nats per token of the right answer under teacher forcing, ``nll``, ``nll_dense``, ``delta_nll`` =
    nll - nll_dense, ``nll_none`` without the context, ``context_gain`` = nll_none - nll_dense.
    """

    dataset: str
    examples: tuple[Question, ...]
    options: Mapping[str, Any]  # what the examples were made from; stands in the configuration
    vocabulary: str  # hash of the vocabulary of the tokenizer that made the examples
    opening: tuple[int, ...] | None = None  # that contexts begin with; None: what the tokenizer puts there
    prepared: ClassVar[type[Prepared]] = PreparedQuestions

    @staticmethod
    def judge(answer: str, references: Sequence[str]) -> Values:
        """Values of a decoded answer: 1 is right, 0 wrong."""
        raise NotImplementedError

    def describe(self) -> Mapping[str, Any]:
        """The options."""
        return self.options

    def opening_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids that a text begins with."""
        return opening_ids(tokenizer) if self.opening is None else list(self.opening)

    def batch_key(self, example: Question) -> Hashable:
        """Contexts of equal length may share a batch."""
        return len(example.context)

    def check(self, label: str, model: PreTrainedModel, tokenizer: Any) -> None:
        """Refuse a model with another vocabulary or too few positions."""
        check_vocabulary(label, tokenizer, self.vocabulary)
        middle = len(TextEncoder(tokenizer).behind(INSTRUCTION)) - len(self.opening_ids(tokenizer))
        for q in self.examples:
            length = len(q.context) + len(q.question) + max(len(q.answer), q.max_new_tokens)
            largest = max(*q.context, *q.question, *q.answer)
            check_fits(label, model, num_tokens=length, largest=largest, what="context, question and answer")
            copies = 2 * len(q.context) + middle
            check_fits(label, model, num_tokens=copies, largest=0, what="reconstruction sequences")


def greedy_answers(
    model: PreTrainedModel, cache: CompactCache | None, questions: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """The most likely next tokens after each question, one at a time, before an end-of-text token.

    Shorter questions are padded on the left, so that each is answered as it would be alone. Of the model's own
    generation settings only the end-of-text tokens count. Without a cache there are no contexts.
    """
    width = max(map(len, questions))
    ids = torch.tensor([[0] * (width - len(q)) + list(q) for q in questions], device=model.device)
    mask = torch.tensor([[0] * (width - len(q)) + [1] * len(q) for q in questions], device=model.device)
    check_token_ids(model, ids)
    ends = end_tokens(model)
    with frozen(model), plain_generation(model, max_new_tokens=max_new_tokens) as settings:
        inputs = {"input_ids": ids, "attention_mask": mask} if cache is None else cache.inputs(model, ids, mask)
        made = model.generate(**inputs, generation_config=settings)  # type: ignore[operator]
    return [list(takewhile(lambda token: token not in ends, row)) for row in made[:, width:].tolist()]


@torch.no_grad()
def token_nll(
    model: PreTrainedModel,
    cache: CompactCache | None,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> list[Float[Tensor, " tokens"]]:
    """-log p(a_t | context, prompt, a_<t) of every token of each answer, nats.

    Prompt and answer, at least a token each, are joined as token ids: as one text an answer could merge with
    the end of the prompt ("(" and "A)" give "(A"). The cache stands for the contexts, one for each row or one
    for all; None: there are none.
    """
    rows = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    # padding stands after everything that is scored in its row
    ids = pad_sequence(rows, batch_first=True).to(model.device)
    check_token_ids(model, ids)
    if cache is None:
        with frozen(model):
            hidden = hidden_states(model, input_ids=ids, use_cache=False)
    else:
        hidden = replay_hidden(model, cache, ids)
    spans = [(row, len(prompt), len(tokens)) for row, (prompt, tokens) in enumerate(zip(prompts, rows, strict=True))]
    before = torch.cat([hidden[row, start - 1 : stop - 1] for row, start, stop in spans])
    targets = torch.cat([ids[row, start:stop] for row, start, stop in spans])
    nll = score_positions(output_head(model), before, targets).nll.double().cpu()
    return list(nll.split(list(map(len, answers))))


def answer_ids(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> tuple[tuple[int, ...], ...]:
    """Token ids of a question behind a text, and of the answer behind the question.

    Where a token would span question and answer, the answer is encoded as behind other text.

    An ``InputError`` where the tokenizer does not give the answer's text back.
    """
    encoder = TextEncoder(tokenizer)
    first = encoder.behind(question)
    both = encoder.behind(question + answer)
    is_between_tokens = both[: len(first)] == first
    rest = both[len(first) :] if is_between_tokens else encoder.behind(answer)
    if str(tokenizer.decode(rest)).strip() != answer.strip():
        raise InputError(f"the tokenizer {tokenizer.name_or_path!r} cannot spell the answer {answer.strip()!r}")
    return tuple(first), tuple(rest)


def read_rows(source: str) -> Iterator[Any]:
    """Rows of a data set of questions.

    The source is ``hub:OWNER/NAME[/CONFIG][@SPLIT]`` (split ``train`` if absent; from the cache alone where
    HF_HUB_OFFLINE is set), or a file: ``.parquet``, JSON lines, or one JSON array. An ``InputError`` where it
    does not exist or is damaged, or the Hub cannot be reached, told within seconds. Half of a surrogate pair,
    which JSON can spell and no encoding can hold, becomes U+FFFD.
    """
    # with HF_HUB_OFFLINE datasets itself looks into its cache, at once
    if source.startswith("hub:") and not constants.HF_HUB_OFFLINE and (obstacle := hub_obstacle()):
        told = "name a local copy, or set HF_HUB_OFFLINE=1 to take the one an earlier run left in the cache"
        raise InputError(f"{source} is on the Hub, and {obstacle}: {told}")
    try:
        if source.startswith("hub:"):
            path, _, split = source.removeprefix("hub:").partition("@")
            owner, name, *config = path.split("/")
            rows = datasets.load_dataset(f"{owner}/{name}", "/".join(config) or None, split=split or "train")
        elif source.endswith(".parquet"):
            rows = pyarrow.parquet.read_table(source).to_pylist()
        else:
            text = Path(source).read_text(encoding="utf-8-sig")
            array = text.lstrip().startswith("[")
            rows = json.loads(text) if array else [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, DatasetsError) as error:  # ArrowInvalid and UnicodeDecodeError are ValueErrors
        raise InputError(f"{source} cannot be read: {one_line(error)}") from None
    yield from map(repaired, rows)
