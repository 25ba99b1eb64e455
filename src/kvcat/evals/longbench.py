"""LongBench v2 with a compressed context: four continuations by likelihood after the question."""

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache
from kvcat.choices import Bos
from kvcat.compress import INSTRUCTION, slots_for, trace
from kvcat.data import name_seed
from kvcat.errors import InputError
from kvcat.evals.answers import PreparedContexts, read_rows, token_nll
from kvcat.evals.suffix import data_name
from kvcat.evals.task import Baseline, Prepared, Task, Values, check_fits
from kvcat.tokenization import TextEncoder, opening_ids
from kvcat.types import Float, Tensor

HUB_SOURCE = "hub:zai-org/LongBench-v2"
MAX_TOKENS = 32_768
LETTERS = ("A", "B", "C", "D")
# 221 of 503 rows. Academic and Legal occur in Single- and in Multi-Document QA; the paper's accuracies are multiples
# of 1/94 and 1/33, so it counts both.
PAPER_SUB_DOMAINS = (
    "Academic", "Agent history QA", "Knowledge graph reasoning", "Legal", "Many-shot learning",
    "New language translation", "Table QA",
)  # fmt: skip

# Words as in the KV-CAT paper's appendix, line breaks as in LongBench v2's prompts/0shot.txt. That template also has
# <text> tags and a line "Choices:", which the paper's prompt does not name.
LEAD = "Please read the following text and answer the question below.\n\n"
QUESTION = (
    "\n\nWhat is the correct answer to this question: {question}\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}\n\n"
    "The correct answer is ("
)
_CHOICES = tuple(f"choice_{letter}" for letter in LETTERS)


@dataclass(frozen=True)
class LongBenchExample:
    """A question about a long text, with the answers A to D and the letter of the right one."""

    document: str  # a hash of the context: questions about one text are resampled together
    name: str  # the row's ``_id``
    stratum: str  # its sub-domain
    context: str
    question: str
    choices: tuple[str, str, str, str]
    answer: str


def make_task(
    data: str = HUB_SOURCE,
    *,
    sub_domains: Sequence[str] | None = PAPER_SUB_DOMAINS,
    limit: int | None = None,
    max_tokens: int = MAX_TOKENS,
    keep_ratios: Sequence[float] = (0.1, 0.2, 0.5),
    bos: Bos = "auto",
) -> "LongBenchTask":
    """The first ``limit`` examples of a source in the released schema, named as in ``read_rows``.

    The order depends on the examples' names alone, so that the first n are a fair sample. None takes the rows of
    all sub-domains. Other arguments are those of the task.

    Raises:
        InputError: as ``read_rows``; a row without a valid text or answer or with the ``_id`` of another, or no
            row of the sub-domains wanted.
    """
    examples: dict[str, LongBenchExample] = {}
    strata: dict[str, str] = {}
    for number, row in enumerate(read_rows(data), start=1):
        example = _example(row, f"row {number} of {data}")
        if example.name in examples:
            raise InputError(f"row {number} of {data} has the _id {example.name!r} of an earlier row")
        # a text that two sub-domains ask about is a document in each
        if strata.setdefault(example.document, example.stratum) != example.stratum:
            example = replace(example, document=f"{example.document} {example.stratum}")
        examples[example.name] = example
    chosen = [example for example in examples.values() if sub_domains is None or example.stratum in sub_domains]
    if not chosen:
        found = ", ".join(sorted({example.stratum for example in examples.values()})) or "nothing"
        raise InputError(f"{data} has no row of sub-domain {', '.join(sub_domains or ('any',))}; it has {found}")
    chosen.sort(key=lambda example: name_seed(f"longbench:{example.name}"))
    examples_in_order = tuple(chosen[:limit])
    return LongBenchTask(examples_in_order, data_name(data), max_tokens, tuple(keep_ratios), bos)


def _example(row: Any, where: str) -> LongBenchExample:
    texts = {}
    for column in ("_id", "sub_domain", "context", "question", *_CHOICES, "answer"):
        text = row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{where} has no text {column!r}")
        texts[column] = text.strip()
    name, stratum, context, question, *choices, answer = texts.values()
    if answer not in LETTERS:
        raise InputError(f"{where}: answer {row['answer']!r} is none of A, B, C, D")
    document = hashlib.sha256(context.encode()).hexdigest()[:16]
    return LongBenchExample(document, name, stratum, context, question, tuple(choices), answer)


@dataclass(frozen=True)
class Prompt:
    """An example as token ids, joined as ids and not as text: copies are the same tokens."""

    context: list[int]  # what is compressed: the start of a text, the prompt's first sentence, the example's text
    lead_len: int  # tokens before the example's text
    question: list[int]  # with the answers and the beginning of the reply, down to "("
    choices: list[list[int]]  # "A)" to "D)"
    right: int  # index of the right one

    def shortened(self, num_tokens: int) -> list[int]:
        """As much of the context as plain text: cut in the middle, or less than the first sentence."""
        lead, text = self.context[: self.lead_len], self.context[self.lead_len :]
        return lead[:num_tokens] if num_tokens < len(lead) else lead + cut_middle(text, num_tokens - len(lead))


def make_prompt(
    example: LongBenchExample,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    bos: Bos = "auto",
) -> Prompt:
    """The prompt whose reconstruction sequence, and whose text with question and answer, have at most so many tokens.

    ``bos`` says what the prompt begins with (``opening_ids``).

    Raises:
        InputError: fewer than two tokens are left for the context.
    """
    encoder = TextEncoder(tokenizer)
    opening = opening_ids(tokenizer, bos)
    choices = [encoder.behind(f"{letter})") for letter in LETTERS]
    answers = dict(zip(LETTERS, example.choices, strict=True))
    question = encoder.behind(QUESTION.format(question=example.question, **answers))
    lead = opening + encoder(LEAD)
    middle = len(encoder.behind(INSTRUCTION))
    copies = (max_tokens + len(opening) - middle) // 2  # the second has no opening
    room = min(copies, max_tokens - len(question) - max(map(len, choices))) - len(lead)
    if room < 2:
        raise InputError(
            f"row {example.name!r}: prompt and question leave {room} of max_tokens={max_tokens} for the context; "
            "at least 2 are needed"
        )
    right = LETTERS.index(example.answer)
    return Prompt(lead + cut_middle(encoder.behind(example.context), room), len(lead), question, choices, right)


def cut_middle(tokens: list[int], room: int) -> list[int]:
    """The first and the last room // 2 tokens; unchanged where there are no more than ``room``."""
    half = room // 2
    return tokens if len(tokens) <= room else [*tokens[:half], *tokens[len(tokens) - half :]]


@dataclass(frozen=True)
class PreparedChoices(PreparedContexts):
    """A prompt on a model."""

    @property
    def room(self) -> int:
        """Tokens of the question with the longest answer."""
        (prompt,) = self.batch
        return len(prompt.question) + max(map(len, prompt.choices))

    def values(self, cache: CompactCache | None) -> list[Values]:
        """``choice_values`` of the four answers behind the question."""
        (prompt,) = self.batch
        opening = self.task.opening_ids(self.tokenizer) if cache is None else []
        question = [*opening, *prompt.question]
        nll = token_nll(self.model, cache, [question] * len(LETTERS), prompt.choices)
        return [choice_values(torch.stack([-own.sum() for own in nll]), prompt.right)]

    def baseline(self, baseline: Baseline) -> list[Values]:
        """Also with as much of the context as plain text as the budget has slots."""
        if baseline.name != "truncated":
            return super().baseline(baseline)
        (prompt,) = self.batch
        context = prompt.shortened(slots_for(len(prompt.context), baseline.keep_ratio, None))
        # the question stands behind it only because a trace needs a suffix
        ids = torch.tensor([[*context, *prompt.question]], device=self.model.device)
        whole = trace(self.model, ids, len(context), room=self.room)
        return self.beside_dense(self.values(whole.dense_cache()))


def choice_values(log_likelihoods: Float[Tensor, " choices"], right: int) -> Values:
    """``accuracy``, 1 where the right continuation is the most likely one (the first of equal ones), else 0.

    And ``nll_choice``, minus the log of its probability among the continuations, nats, from their log-likelihoods.
    """
    nll = -float(log_likelihoods.log_softmax(0)[right])
    return {"accuracy": float(int(log_likelihoods.argmax()) == right), "nll_choice": nll}


@dataclass(frozen=True)
class LongBenchTask(Task):
    """Questions about long texts; the text is compressed, the question is read on the compact cache.

    Compressed is the prompt's first sentence with the text, fitted to <context><instruction><context>.
    Then question and answers follow uncompressed, and "A)", "B)", "C)", "D)" after "The correct answer is ("
    are scored by total log-likelihood: ``choice_values``, and with the prefix ``dense_`` the same on the whole cache.

    References: KV-CAT, appendix "Long-form question answering under KV cache compression"; Bai et al. 2025,
    arXiv:2412.15204 (LongBench v2).
    """

    examples: Sequence[LongBenchExample]
    dataset: str
    max_tokens: int = MAX_TOKENS  # of the reconstruction sequence and of the answered prompt; longer texts are cut
    keep_ratios: tuple[float, ...] = (0.1, 0.2, 0.5)  # of the context that truncated baselines see as plain text
    bos: Bos = "auto"  # what a prompt begins with (``opening_ids``)
    evaluation: ClassVar[str] = "longbench"

    @property
    def baselines(self) -> tuple[Baseline, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Dense, no context, and as much plain text as each keep ratio's budget."""
        return *Task.baselines, *(Baseline("truncated", keep) for keep in self.keep_ratios if keep < 1.0)

    def describe(self) -> Mapping[str, Any]:
        """What the results depend on."""
        return {
            **({} if self.bos == "auto" else {"bos": self.bos}),
            "max_tokens": self.max_tokens,
            "prompt": f"{LEAD}{{context}}{QUESTION}",
            "instruction": INSTRUCTION,
            "sub_domains": dict(sorted(Counter(example.stratum for example in self.examples).items())),
        }

    def opening_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids that a text begins with."""
        return opening_ids(tokenizer, self.bos)

    def batch_key(self, example: LongBenchExample) -> Hashable:
        """Every example is its own batch: contexts differ in length."""
        return example.name

    def check(self, label: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Refuse a model without tokenizer or with too few positions or tokens; a question that leaves no room."""
        if tokenizer is None:
            raise InputError(f"model {label!r} has no tokenizer, which LongBench v2 needs")
        check_fits(label, model, num_tokens=self.max_tokens, largest=0, what="sequences")
        for example in self.examples:  # without the text, which takes long to tokenise
            prompt = make_prompt(replace(example, context=""), tokenizer, self.max_tokens, self.bos)
            largest = max(max(tokens) for tokens in [prompt.context, prompt.question, *prompt.choices])
            check_fits(label, model, num_tokens=0, largest=largest, what="prompts")

    def prepare(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[LongBenchExample]
    ) -> Prepared:
        """An example as token ids of the model."""
        prompts = [make_prompt(e, tokenizer, self.max_tokens, self.bos) for e in batch]
        return PreparedChoices(self, model, tokenizer, prompts)
