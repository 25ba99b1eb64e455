"""Question answering without compression: eight multiple-choice tasks as cloze, scored by lm-evaluation-harness.

A question is two to five pairs (context, text), one per choice; scored is one space and the text after the
context. Prompts are lm-evaluation-harness' own; those of Social IQa and CommonsenseQA are of LightEval's cloze
task file for small models, which the paper's evaluation follows. WinoGrande's contexts differ and its text is
the same, so that its characters do not matter; LightEval, and so probably the paper, has it the other way round.

References: KV-CAT, appendix "No compression QA evaluation"; LightEval,
examples/nanotron/custom_evaluation_tasks.py; lm-evaluation-harness 0.4.13, lm_eval/tasks.
"""

import copy
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.errors import InputError, check_least, one_line
from kvcat.evals.answers import read_rows
from kvcat.evals.task import Baseline, Prepared, Task, Values, check_fits
from kvcat.tokenization import closing_ids, opening_ids

Row = Mapping[str, Any]


@dataclass(frozen=True)
class QAExample:
    """A question with its choices."""

    document: str  # task and what it was taken from; questions about one context, and WinoGrande's twins, share it
    name: str  # the row's own id, or a hash of its content; the same from a file and from the Hub
    stratum: str  # name of the task
    contexts: tuple[str, ...]  # one per choice
    texts: tuple[str, ...]  # one per choice, whose characters the score per character counts
    gold: int  # number of the right choice


Cloze = tuple[str | list[str], list[str], Any, Sequence[str], Any]
"""Context or contexts, texts, answer, its value for each choice, and what questions of one document share."""


def _hellaswag(row: Row) -> Cloze:
    """The preprocessing of the data set's own users: brackets are left-overs of WikiHow's layout."""

    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    parts = f"{row['ctx_a']} {row.get('ctx_b', '').capitalize()}" if "ctx_a" in row else row["ctx"]
    return clean(f"{row['activity_label']}: {parts}"), list(map(clean, row["endings"])), row["label"], "0123", None


def _winogrande(row: Row) -> Cloze:
    before, _, rest = row["sentence"].partition("_")
    options = [row["option1"], row["option2"]]
    return [before + option for option in options], [rest.strip()] * 2, row["answer"], "12", json.dumps(sorted(options))


def _piqa(row: Row) -> Cloze:
    return f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"], "01", row["goal"]


def _social_i_qa(row: Row) -> Cloze:
    texts = [row[f"answer{letter}"] for letter in "ABC"]
    return f"{row['context']} {row['question']}", texts, row["label"], "123", row["context"]


def _choices(prompt: str) -> Callable[[Row], Cloze]:
    return lambda row: (
        prompt.format_map(row), row["choices"]["text"], row["answerKey"], row["choices"]["label"], None
    )  # fmt: skip


TASKS: dict[str, tuple[str, Callable[[Row], Cloze]]] = {
    "hellaswag": ("hub:Rowan/hellaswag@validation", _hellaswag),
    "winogrande": ("hub:allenai/winogrande/winogrande_xl@validation", _winogrande),
    "piqa": ("hub:baber/piqa@validation", _piqa),
    "social_i_qa": ("hub:lighteval/siqa@validation", _social_i_qa),
    "openbookqa": ("hub:allenai/openbookqa/main@validation", _choices("{question_stem}")),
    "arc_easy": ("hub:allenai/ai2_arc/ARC-Easy@test", _choices("Question: {question}\nAnswer:")),
    "arc_challenge": ("hub:allenai/ai2_arc/ARC-Challenge@test", _choices("Question: {question}\nAnswer:")),
    "commonsense_qa": ("hub:tau/commonsense_qa@validation", _choices("{question}")),
}
"""Source and reader of rows by the name of the task."""


def make_task(
    folder: Path | None = None, *, tasks: Sequence[str] | None = None, num_examples: int = 1000, seed: int = 0
) -> "QATask":
    """The same sample of every task for everybody, a function of the seed and the rows' names only; tasks take turns.

    Args:
        folder: of JSON lines, in the Hub's schema, the first file TASK*.jsonl of each task; None reads the Hub.
        tasks: names in ``TASKS``; None takes all, or those that the folder has.
        num_examples: of each task, at least 1; a task with fewer gives all.
        seed: of the draw.

    Raises:
        InputError: a value out of its range, an unknown task, no file of a task, as ``read_examples``.
    """
    check_least(1, num_examples=num_examples)
    for task in tasks or ():
        if task not in TASKS:
            raise InputError(f"no QA task {task!r}; there are {', '.join(TASKS)}")
    sources = {task: [TASKS[task][0]] for task in TASKS if not tasks or task in tasks}
    if folder is not None:
        sources = {task: sorted(map(str, folder.glob(f"{task}*.jsonl"))) for task in sources}
        if (tasks and not all(sources.values())) or not any(sources.values()):
            lacking = next(task for task, files in sources.items() if not files)
            raise InputError(f"folder {folder} has no file {lacking}*.jsonl")
    drawn = [
        sorted(read_examples(task, files[0]), key=lambda e: _digest([seed, e.stratum, e.name]))[:num_examples]
        for task, files in sources.items() if files
    ]  # fmt: skip
    turns = [own[turn] for turn in range(max(map(len, drawn))) for own in drawn if turn < len(own)]
    return QATask(tuple(turns))


def read_examples(task: str, source: str) -> list[QAExample]:
    """All questions of a task, in the order of its rows.

    Rows that are equal in every respect (Social IQa has some) stay, their names numbered.

    Raises:
        InputError: as ``read_rows``; a row that is not one of this task (told with its number), no row at all.
    """
    examples: list[QAExample] = []
    copies: Counter[str] = Counter()
    for number, row in enumerate(read_rows(source), start=1):
        try:
            given = {field: value for field, value in row.items() if value is not None and str(value).strip()}
            contexts, texts, answer, keys, shared = TASKS[task][1](given)
            contexts = [contexts] * len(texts) if isinstance(contexts, str) else contexts
            gold = list(keys).index(str(answer).strip())
            if not 2 <= len(texts) == len(keys) or not all(text.strip() for text in [*contexts, *texts]):
                raise ValueError("its choices are not at least two texts with a key each")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{source}, row {number} is no row of {task}: {one_line(error)}") from None
        own = row.get("ind", row.get("id"))
        name = _digest([contexts, texts, gold]) if own is None else str(own)
        copies[name] += 1
        unique = name if copies[name] == 1 else f"{name}-{copies[name]}"
        document = f"{task}:{name if shared is None else _digest(shared)}"
        examples.append(QAExample(document, unique, task, tuple(contexts), tuple(texts), gold))
    if not examples:
        raise InputError(f"{source} holds no row")
    return examples


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class PreparedQA(Prepared):
    """Questions on one model."""

    def baseline(self, baseline: Baseline) -> list[Values]:  # noqa: ARG002 there is one
        """Values under the whole model."""
        scores = log_likelihoods(self.model, self.tokenizer, self.batch)
        return [cloze_values(example, own) for example, own in zip(self.batch, scores, strict=True)]


@dataclass(frozen=True)
class QATask(Task):
    """Multiple-choice questions, scored on the dense model only by lm-evaluation-harness.

    Per question 1 or 0, whether the choice of the highest score is the right one: ``acc`` by
    log-likelihood, ``acc_per_char`` by log-likelihood per character of the text, the headline; of equal
    ones the first choice is taken. And ``nll_per_char`` of the right choice, nats per character.
    """

    examples: tuple[QAExample, ...]
    dataset: str = "cloze"
    evaluation: ClassVar[str] = "qa"
    prepared: ClassVar[type[Prepared]] = PreparedQA
    compresses: ClassVar[bool] = False
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline("dense", 1.0),)

    def describe(self) -> Mapping[str, Any]:
        """Number of questions per task."""
        return {"tasks": dict(sorted(Counter(example.stratum for example in self.examples).items()))}

    def check(self, label: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Refuse a model that has no tokenizer, no tokens or too few positions for a choice; and no harness."""
        if tokenizer is None:
            raise InputError(f"qa needs the tokenizer of model {label!r}")
        if find_spec("lm_eval") is None:
            raise InputError("multiple choice needs lm-evaluation-harness: pip install 'kvcat[harness]'")
        if closing_ids(tokenizer) and not hasattr(tokenizer, "backend_tokenizer"):
            raise InputError(f"model {label!r}: its slow tokenizer puts tokens behind each text")
        for example in self.examples:
            texts = tokenizer([f" {text}" for text in example.texts], add_special_tokens=False)["input_ids"]
            if not all(texts):
                raise InputError(f"model {label!r}, {example.stratum} {example.name}: a choice has no token")
            contexts = tokenizer(list(example.contexts), verbose=False)["input_ids"]
            largest = max(token for tokens in [*texts, *contexts] for token in tokens)
            what = f"choices of {example.stratum} {example.name}"
            check_fits(label, model, num_tokens=max(map(len, texts)) + 1, largest=largest, what=what)


def _without_closing(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer that puts nothing behind a text, for the harness: it cuts choices off the end of texts."""
    copied = copy.deepcopy(tokenizer)
    if closing_ids(copied):
        opening = opening_ids(copied)
        names = copied.convert_ids_to_tokens(opening)
        backend: Any = copied.backend_tokenizer
        backend.post_processor = TemplateProcessing(
            single=[*names, "$A"], special_tokens=list(zip(names, opening, strict=True))
        )
    return copied


def cloze_values(example: QAExample, scores: Sequence[float]) -> Values:
    """What the log-likelihoods of a question's choices, nats, make of it; see ``QATask``."""
    total = np.array(scores)
    per_char = total / [len(text) for text in example.texts]
    right = {name: float(s.argmax() == example.gold) for name, s in [("acc", total), ("acc_per_char", per_char)]}
    return {**right, "nll_per_char": -float(per_char[example.gold])}


def log_likelihoods(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[QAExample]
) -> list[list[float]]:
    """Log-likelihood of every choice of every question, nats, as lm-evaluation-harness scores them.

    Contexts that with their choice exceed the model's positions lose their beginning.
    """
    harness, instance = map(import_module, ("lm_eval.models.huggingface", "lm_eval.api.instance"))
    pairs = [(context, f" {text}") for q in examples for context, text in zip(q.contexts, q.texts, strict=True)]
    requests = [instance.Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns of a model in memory
    try:
        words = _without_closing(tokenizer)
        scorer = harness.HFLM(pretrained=model, tokenizer=words, batch_size=len(examples))
        scores = iter(scorer.loglikelihood(requests, disable_tqdm=True))
    finally:
        logging.disable(disabled)
    return [[float(score) for score, _ in islice(scores, len(question.texts))] for question in examples]
