"""Answer LongBench v2 from compressed contexts.

The four answers of a question are scored by their likelihoods.
"""

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import tyro

from kvcat.errors import InputError
from kvcat.evals.evaluation import CompressingEvaluation, PaperFigures, ReportFacts
from kvcat.evals.questions import PreparedContexts
from kvcat.evals.task import Baseline, Prepared, Task, Values, check_fits, check_tokenizer
from kvcat.option_types import Bos, Count, Strings, Unset, flat
from kvcat.stats.metrics import Metric, share_of_examples
from kvcat.text.encoder import TextEncoder, opening_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvcat.cache import CompactCache
    from kvcat.types import Float, Tensor

HUB_SOURCE = "hub:zai-org/LongBench-v2"
MAX_TOKENS = 32_768


@dataclass(frozen=True, kw_only=True)
class LongBench(CompressingEvaluation):
    """Compress long contexts by reconstruction, then answer the question on the compact cache.

    The four answers are scored by log-likelihood. Baselines are the dense cache, no context, and
    plain text with as many tokens as the budget. The paper's method: --method
    gradient,activation_checkpointing=true. Default keep ratios: 0.1 0.2 0.5.

    Example: kvcat eval longbench base=./base kvcat=./export --method gradient --out longbench
    """

    default_keeps = (0.1, 0.2, 0.5)
    facts = ReportFacts(
        title="LongBench v2",
        metrics=("accuracy", "nll_choice", "dense_accuracy"),
        example_name="question",
        stratum_name="sub-domain",
        reported_steps=(20, 100),
    )
    new_metrics: ClassVar = {
        "accuracy": share_of_examples(
            label="accuracy",
            description="Share of questions whose right answer has the highest log-likelihood.",
            dense_metric="dense_accuracy",
            shows_ability=True,
            chance=1 / 4,
        ),
        "dense_accuracy": share_of_examples(
            label="accuracy, dense",
            description="The same with the whole cache.",
            of_dense_model=True,
        ),
        "nll_choice": Metric(
            label="NLL of the choice",
            description="Minus the log of the right answer's probability among the four; 1.386 is "
            "guessing.",
            unit="nats",
        ),
    }
    paper = PaperFigures(metrics={"accuracy": "accuracy"}, names_model=False, all_strata="total")

    data: str = HUB_SOURCE
    """hub:OWNER/NAME, or a .jsonl, .json or .parquet file with LongBench v2's columns."""
    sub_domain: Strings = ()
    """Sub-domains, or `all`; by default the paper's seven, 221 rows."""
    max_tokens: Count = MAX_TOKENS
    """Longest sequence, in tokens; contexts are cut in the middle so that two copies fit."""
    limit: Unset[Count] = None
    """Number of examples; the first ones are a fair sample. All by default."""
    bos: Bos = "auto"
    batch_size: tyro.conf.Suppress[int] = 1
    # nothing is drawn: the order follows from the rows' names
    data_seed: tyro.conf.Suppress[int] = 0

    def make_task(self, tokenizer: Any, value: Any) -> "LongBenchTask":  # noqa: ARG002 not needed
        """The examples in rows with the released columns.

        Their order depends only on their names, so that the first n are a random sample.

        Raises:
            InputError: as in ``read_rows``; a row lacks a valid text or answer, or has the ``_id``
                of another row; no row is in the sub-domains.
        """
        from kvcat.data import name_seed
        from kvcat.data.rows import data_name, read_rows

        wanted = tuple(flat(self.sub_domain)) or PAPER_SUB_DOMAINS
        examples: dict[str, LongBenchExample] = {}
        strata: dict[str, str] = {}
        for number, row in enumerate(read_rows(self.data), start=1):
            example = _example(row, f"row {number} of {self.data}")
            if example.name in examples:
                raise InputError(
                    f"row {number} of {self.data} has the _id {example.name!r} of an earlier row"
                )
            # a text with questions from two sub-domains is a separate document in each
            if strata.setdefault(example.document, example.stratum) != example.stratum:
                example = replace(example, document=f"{example.document} {example.stratum}")
            examples[example.name] = example
        selected = [
            example
            for example in examples.values()
            if wanted == ("all",) or example.stratum in wanted
        ]
        if not selected:
            existing = sorted({example.stratum for example in examples.values()})
            raise InputError(
                f"{self.data} has no row of sub-domain {', '.join(wanted)}; it has "
                f"{', '.join(existing) or 'nothing'}"
            )
        selected.sort(key=lambda example: name_seed(f"longbench:{example.name}"))
        return LongBenchTask(
            tuple(selected[: self.limit]),
            data_name(self.data),
            self.max_tokens,
            tuple(self.keep_ratios()),
            self.bos,
        )


LETTERS = ("A", "B", "C", "D")
# 221 of 503 rows. Academic and Legal occur in Single- and in Multi-Document QA; the paper's
# accuracies are multiples of 1/94 and 1/33, so the paper counts both.
PAPER_SUB_DOMAINS = (
    "Academic",
    "Agent history QA",
    "Knowledge graph reasoning",
    "Legal",
    "Many-shot learning",
    "New language translation",
    "Table QA",
)

# The words are those of the KV-CAT paper's appendix, the line breaks those of LongBench v2's
# prompts/0shot.txt. That template also has <text> tags and a line "Choices:", which the paper's
# prompt does not name.
LEAD = "Please read the following text and answer the question below.\n\n"
QUESTION = (
    "\n\nWhat is the correct answer to this question: {question}"
    "\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}"
    "\n\nThe correct answer is ("
)
_CHOICES = tuple(f"choice_{letter}" for letter in LETTERS)


@dataclass(frozen=True)
class LongBenchExample:
    """A question about a long text, with the answers A to D and the letter of the right answer."""

    document: str  # hash of the context: questions about one text are resampled together
    name: str  # the row's ``_id``
    stratum: str  # its sub-domain
    context: str
    question: str
    choices: tuple[str, str, str, str]
    answer: str


def _example(row: Any, where: str) -> LongBenchExample:
    """The example in a row; ``where`` names the row in an ``InputError``."""
    texts = {}
    for column in ("_id", "sub_domain", "context", "question", *_CHOICES, "answer"):
        text = row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{where} has no text {column!r}")
        texts[column] = text.strip()
    if texts["answer"] not in LETTERS:
        raise InputError(f"{where}: answer {row['answer']!r} is not one of A, B, C, D")
    a, b, c, d = (texts[column] for column in _CHOICES)
    return LongBenchExample(
        document=hashlib.sha256(texts["context"].encode()).hexdigest()[:16],
        name=texts["_id"],
        stratum=texts["sub_domain"],
        context=texts["context"],
        question=texts["question"],
        choices=(a, b, c, d),
        answer=texts["answer"],
    )


@dataclass(frozen=True)
class Prompt:
    """An example as token ids, joined as ids and not as text, so that copies have equal tokens."""

    context: list[int]  # compressed: the opening, the prompt's first sentence, the text
    lead_len: int  # tokens before the example's text
    question: list[int]  # with the answers and the beginning of the reply, up to "("
    choices: list[list[int]]  # "A)" to "D)"
    right: int  # index of the right answer

    def shortened(self, num_tokens: int) -> list[int]:
        """The context, cut in the middle of the text, or within the first sentence."""
        if num_tokens < self.lead_len:
            return self.context[:num_tokens]
        lead = self.context[: self.lead_len]
        text = self.context[self.lead_len :]
        return lead + cut_middle(text, num_tokens - self.lead_len)


def make_prompt(
    example: LongBenchExample,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    bos: Bos = "auto",
) -> Prompt:
    """The prompt of an example; a text that is too long is cut in the middle.

    Args:
        tokenizer: tokenizer of the model.
        max_tokens: largest length of the reconstruction sequence, and of the text with question and
            answer.
        bos: start of the prompt (``opening_ids``).

    Raises:
        InputError: fewer than two tokens remain for the context.
    """
    from kvcat.compress import INSTRUCTION

    encoder = TextEncoder(tokenizer)
    opening = opening_ids(tokenizer, bos)
    choices = [encoder.behind(f"{letter})") for letter in LETTERS]
    answers = dict(zip(LETTERS, example.choices, strict=True))
    question = encoder.behind(QUESTION.format(question=example.question, **answers))
    lead = opening + encoder(LEAD)
    num_instruction = len(encoder.behind(INSTRUCTION))
    # the second copy in a reconstruction sequence has no opening
    most_by_copies = (max_tokens + len(opening) - num_instruction) // 2
    most_by_answer = max_tokens - len(question) - max(len(choice) for choice in choices)
    room = min(most_by_copies, most_by_answer) - len(lead)
    if room < 2:
        raise InputError(
            f"row {example.name!r}: prompt and question leave {room} of max_tokens={max_tokens} "
            "for the context; at least 2 are needed"
        )
    return Prompt(
        context=lead + cut_middle(encoder.behind(example.context), room),
        lead_len=len(lead),
        question=question,
        choices=choices,
        right=LETTERS.index(example.answer),
    )


def cut_middle(tokens: list[int], room: int) -> list[int]:
    """The first and the last room // 2 tokens; all tokens if there are at most ``room``."""
    half = room // 2
    if len(tokens) <= room:
        return tokens
    return [*tokens[:half], *tokens[len(tokens) - half :]]


@dataclass(frozen=True)
class PreparedChoices(PreparedContexts):
    """A prompt that is scored on a model."""

    @property
    def room(self) -> int:
        """The number of tokens in the question with the longest answer."""
        (prompt,) = self.batch
        return len(prompt.question) + max(map(len, prompt.choices))

    def values(self, cache: "CompactCache | None") -> list[Values]:
        """``choice_values`` of the four answers after the question."""
        import torch

        from kvcat.evals.answers import token_nll

        (prompt,) = self.batch
        opening = self.task.opening_ids(self.tokenizer) if cache is None else []
        question = [*opening, *prompt.question]
        nll = token_nll(self.model, cache, [question] * len(LETTERS), prompt.choices)
        log_likelihoods = torch.stack([-token_nlls.sum() for token_nlls in nll])
        return [choice_values(log_likelihoods, prompt.right)]

    def baseline(self, baseline: Baseline) -> list[Values]:
        """Values without compression; "truncated" sees plain text as long as the budget."""
        import torch

        from kvcat.compress import slots_for, trace

        if baseline.name != "truncated":
            return super().baseline(baseline)
        (prompt,) = self.batch
        num_slots = slots_for(len(prompt.context), baseline.keep_ratio, None)
        context = prompt.shortened(num_slots)
        # the question follows the context only because a trace needs a suffix
        ids = torch.tensor([[*context, *prompt.question]], device=self.model.device)
        whole = trace(self.model, ids, len(context), room=self.room)
        return self.with_dense(self.values(whole.dense_cache()))


def choice_values(log_likelihoods: "Float[Tensor, ' choices']", right: int) -> Values:
    """``accuracy`` and ``nll_choice`` of a question, from the answers' log-likelihoods in nats.

    ``accuracy`` is 1 if the right answer is the most likely one (the first one in a tie), else 0;
    ``nll_choice`` is minus the log of the right answer's probability among the answers.
    """
    is_right = int(log_likelihoods.argmax()) == right
    nll = -float(log_likelihoods.log_softmax(0)[right])
    return {"accuracy": float(is_right), "nll_choice": nll}


@dataclass(frozen=True)
class LongBenchTask(Task):
    """Questions about long texts, answered from compact caches of the texts.

    The context is the prompt's first sentence and the text. It is compressed; compressors are
    fitted to <context><instruction><context>. The question and the answers follow uncompressed.
    "A)", "B)", "C)" and "D)" after "The correct answer is (" are scored by their total
    log-likelihood. The values are those of ``choice_values`` on the compact cache and, with the
    prefix ``dense_``, on the whole cache.

    References: KV-CAT, appendix "Long-form question answering under KV cache compression"; Bai et
    al. 2025, arXiv:2412.15204 (LongBench v2).
    """

    examples: Sequence[LongBenchExample]
    dataset: str
    # limit for the reconstruction sequence and the answered prompt; longer texts are cut
    max_tokens: int = MAX_TOKENS
    # shares of the context that truncated baselines see as plain text
    keep_ratios: tuple[float, ...] = (0.1, 0.2, 0.5)
    bos: Bos = "auto"  # start of a prompt (``opening_ids``)
    evaluation: ClassVar[str] = "longbench"

    @property
    def baselines(self) -> tuple[Baseline, ...]:  # pyright: ignore
        """The whole context, no context, and truncated text with as many tokens as each budget."""
        truncated = [Baseline("truncated", keep) for keep in self.keep_ratios if keep < 1.0]
        return (*Task.baselines, *truncated)

    def describe(self) -> Mapping[str, Any]:
        """All settings on which the results depend."""
        from kvcat.compress import INSTRUCTION

        num_rows = Counter(example.stratum for example in self.examples)
        described: dict[str, Any] = {} if self.bos == "auto" else {"bos": self.bos}
        described["max_tokens"] = self.max_tokens
        described["prompt"] = f"{LEAD}{{context}}{QUESTION}"
        described["instruction"] = INSTRUCTION
        described["sub_domains"] = dict(sorted(num_rows.items()))
        return described

    def opening_ids(self, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
        """The token ids at the start of every text."""
        return opening_ids(tokenizer, self.bos)

    def batch_key(self, example: LongBenchExample) -> Hashable:
        """A different key for every example, because contexts differ in length."""
        return example.name

    def check(self, label: str, model: "PreTrainedModel", tokenizer: Any) -> None:
        """Raise an ``InputError`` for a model or a question that cannot be used.

        The reasons are a missing tokenizer, too few positions, too small a vocabulary, or a
        question that leaves no room for the text.
        """
        check_tokenizer(label, tokenizer, "longbench")
        check_fits(label, model, num_tokens=self.max_tokens, largest=0, what="sequences")
        for example in self.examples:
            # without the text, whose tokenisation is slow
            without_text = replace(example, context="")
            prompt = make_prompt(without_text, tokenizer, self.max_tokens, self.bos)
            largest = max(*prompt.context, *prompt.question, *chain(*prompt.choices))
            check_fits(label, model, num_tokens=0, largest=largest, what="prompts")

    def prepare(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        batch: Sequence[LongBenchExample],
    ) -> Prepared:
        """An example in the model's token ids."""
        prompts = [make_prompt(example, tokenizer, self.max_tokens, self.bos) for example in batch]
        return PreparedChoices(self, model, tokenizer, prompts)
