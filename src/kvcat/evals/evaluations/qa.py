"""Answer multiple-choice questions without compression.

The eight tasks are in cloze form. A question has two to five pairs (context, text), one per choice.
lm-evaluation-harness scores the text, preceded by one space, after the context. Prompts are those
of lm-evaluation-harness; those of Social IQa and CommonsenseQA are from LightEval's cloze tasks for
small models, which the paper's evaluation follows. In WinoGrande, the contexts differ between the
choices and the text is the same, so that the number of characters does not matter. In LightEval,
and so probably in the paper, the texts differ and the context is the same.

References: KV-CAT, appendix "No compression QA evaluation"; LightEval,
examples/nanotron/custom_evaluation_tasks.py; lm-evaluation-harness 0.4.13, lm_eval/tasks.
"""

import copy
import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
import tyro

from kvcat.errors import InputError, check_least, one_line, unknown_name
from kvcat.evals.evaluation import Evaluation, PaperFigures, ReportFacts
from kvcat.evals.task import Baseline, Prepared, Task, Values, check_fits, check_tokenizer
from kvcat.extras import install_command
from kvcat.option_types import Count, Strings, Unset, flat
from kvcat.stats.metrics import Metric, share_of_examples
from kvcat.text.encoder import closing_ids, opening_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SIX_TASKS = ("hellaswag", "winogrande", "piqa", "openbookqa", "arc_easy", "arc_challenge")


@dataclass(frozen=True, kw_only=True)
class QA(Evaluation):
    """Answer multiple-choice questions zero-shot and without compression.

    The results show how training changed the model itself. The model's answer is the one with the
    highest log-likelihood per character.

    Example: kvcat eval qa base=./base kvcat=./export --out qa
    """

    facts = ReportFacts(
        title="Multiple choice without compression",
        metrics=("acc_per_char", "nll_per_char", "acc"),
        example_name="question",
        stratum_name="task",
        averages={
            "six": _SIX_TASKS,  # the paper's table
            "seven": (*_SIX_TASKS, "social_i_qa"),
            "eight": (*_SIX_TASKS, "social_i_qa", "commonsense_qa"),
        },
    )
    new_metrics: ClassVar = {
        "acc_per_char": share_of_examples(
            label="accuracy per character",
            description="Share of right answers with the highest log-likelihood per character.",
            shows_ability=True,
            chance=1 / 4,
            chance_by_stratum={
                "winogrande": 1 / 2,
                "piqa": 1 / 2,
                "social_i_qa": 1 / 3,
                "commonsense_qa": 1 / 5,
            },
        ),
        "acc": share_of_examples(
            label="accuracy, raw",
            description="Share of right answers with the highest total log-likelihood.",
        ),
        "nll_per_char": Metric(
            label="NLL per character",
            description="Negative log-likelihood of the right answer.",
            unit="nats/character",
        ),
    }
    paper = PaperFigures(metrics={"acc_per_char": "accuracy"}, compresses=False, average="six")

    data: Unset[Path] = None
    """Folder with a JSON Lines file TASK*.jsonl for each task; default: the Hub."""
    tasks: Annotated[Strings, tyro.conf.arg(name="task")] = ()
    """hellaswag, winogrande, piqa, social_i_qa, openbookqa, arc_easy, arc_challenge,
    commonsense_qa; all by default."""
    limit: Count = 1000
    """Number of questions from each task; all models get the same questions."""

    def make_task(self, tokenizer: Any, value: Any) -> "QATask":  # noqa: ARG002 not needed
        """A random sample from every task.

        The sample depends only on the seed and the rows' names. The examples alternate between
        tasks.

        Raises:
            InputError: a task is unknown or has no file; otherwise as in ``read_examples``.
        """
        check_least(1, limit=self.limit)
        tasks = flat(self.tasks)
        for task in tasks:
            if task not in TASKS:
                raise unknown_name("QA task", task, TASKS)
        samples = []
        for task, source in _sources(self.data, tasks).items():
            examples = read_examples(task, source)
            examples.sort(
                key=lambda example: _digest([self.data_seed, example.stratum, example.name])
            )
            samples.append(examples[: self.limit])
        in_turns = []
        for turn in range(max(len(sample) for sample in samples)):
            in_turns += [sample[turn] for sample in samples if turn < len(sample)]
        return QATask(tuple(in_turns))


Row = Mapping[str, Any]


@dataclass(frozen=True)
class QAExample:
    """A question with its choices."""

    # task and source; equal for questions about one context, and for WinoGrande's twins
    document: str
    name: str  # the row's id, or a hash of its content; equal for a file and the Hub
    stratum: str  # name of the task
    contexts: tuple[str, ...]  # one per choice
    texts: tuple[str, ...]  # one per choice; scores per character are divided by their lengths
    gold: int  # index of the right choice


class Cloze(NamedTuple):
    """A row of a task as contexts and texts, not yet checked."""

    contexts: str | list[str]  # a single one is shared by all choices
    texts: list[str]
    answer: str | int  # the label of the right choice
    labels: Sequence[str]  # labels of the choices
    shared: str | None = None  # equal for questions about one document; None: a separate document


def _hellaswag(row: Row) -> Cloze:
    """The row, cleaned as in lm-evaluation-harness of brackets from WikiHow's layout."""

    def clean(text: str) -> str:
        with_sentences = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", with_sentences).replace("  ", " ")

    if "ctx_a" in row:  # a sentence, and the beginning of the next one
        context = f"{row['ctx_a']} {row.get('ctx_b', '').capitalize()}"
    else:
        context = row["ctx"]
    return Cloze(
        contexts=clean(f"{row['activity_label']}: {context}"),
        texts=[clean(ending) for ending in row["endings"]],
        answer=row["label"],
        labels="0123",
    )


def _winogrande(row: Row) -> Cloze:
    """The row with the options in the contexts; the text is the end of the sentence."""
    before, _, after = row["sentence"].partition("_")
    options = [row["option1"], row["option2"]]
    return Cloze(
        contexts=[before + option for option in options],
        texts=[after.strip()] * 2,
        answer=row["answer"],
        labels="12",
        shared=json.dumps(sorted(options)),
    )


def _piqa(row: Row) -> Cloze:
    return Cloze(
        contexts=f"Question: {row['goal']}\nAnswer:",
        texts=[row["sol1"], row["sol2"]],
        answer=row["label"],
        labels="01",
        shared=row["goal"],
    )


def _social_i_qa(row: Row) -> Cloze:
    return Cloze(
        contexts=f"{row['context']} {row['question']}",
        texts=[row["answerA"], row["answerB"], row["answerC"]],
        answer=row["label"],
        labels="123",
        shared=row["context"],
    )


def _choices(prompt: str) -> Callable[[Row], Cloze]:
    """A reader of rows with labelled choices."""

    def read(row: Row) -> Cloze:
        return Cloze(
            contexts=prompt.format_map(row),
            texts=row["choices"]["text"],
            answer=row["answerKey"],
            labels=row["choices"]["label"],
        )

    return read


_ARC_PROMPT = "Question: {question}\nAnswer:"

TASKS: dict[str, tuple[str, Callable[[Row], Cloze]]] = {
    "hellaswag": ("hub:Rowan/hellaswag@validation", _hellaswag),
    "winogrande": ("hub:allenai/winogrande/winogrande_xl@validation", _winogrande),
    "piqa": ("hub:baber/piqa@validation", _piqa),
    "social_i_qa": ("hub:lighteval/siqa@validation", _social_i_qa),
    "openbookqa": ("hub:allenai/openbookqa/main@validation", _choices("{question_stem}")),
    "arc_easy": ("hub:allenai/ai2_arc/ARC-Easy@test", _choices(_ARC_PROMPT)),
    "arc_challenge": ("hub:allenai/ai2_arc/ARC-Challenge@test", _choices(_ARC_PROMPT)),
    "commonsense_qa": ("hub:tau/commonsense_qa@validation", _choices("{question}")),
}
"""The source and the reader of rows, by the name of the task."""


def _sources(folder: Path | None, tasks: Sequence[str]) -> dict[str, str]:
    """The source of each task's rows, in the order of ``TASKS``."""
    sources = {}
    for task, (hub_source, _) in TASKS.items():
        if tasks and task not in tasks:
            continue
        if folder is None:
            sources[task] = hub_source
            continue
        files = sorted(map(str, folder.glob(f"{task}*.jsonl")))
        if files:
            sources[task] = files[0]
        elif tasks:
            raise InputError(f"folder {folder} has no file {task}*.jsonl")
    if not sources:
        raise InputError(f"folder {folder} has no file {next(iter(TASKS))}*.jsonl")
    return sources


def read_examples(task: str, source: str) -> list[QAExample]:
    """All questions of a task, in the order of its rows.

    Identical rows (Social IQa has some) are kept, and their names are numbered.

    Raises:
        InputError: as in ``read_rows``; a row does not belong to this task; there are no rows.
    """
    from kvcat.data.rows import read_rows

    examples: list[QAExample] = []
    num_copies: Counter[str] = Counter()
    for number, row in enumerate(read_rows(source), start=1):
        try:
            example = _example(task, row)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{source}, row {number} is not a row of {task}: {one_line(error)}"
            ) from None
        num_copies[example.name] += 1
        count = num_copies[example.name]
        if count > 1:
            example = replace(example, name=f"{example.name}-{count}")
        examples.append(example)
    if not examples:
        raise InputError(f"{source} has no rows")
    return examples


def _example(task: str, row: Any) -> QAExample:
    """The question in a row.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is not a row of the task.
    """
    filled = {
        name: value for name, value in row.items() if value is not None and str(value).strip()
    }
    _, read = TASKS[task]
    cloze = read(filled)
    texts = cloze.texts
    contexts = cloze.contexts
    if isinstance(contexts, str):
        contexts = [contexts] * len(texts)
    gold = list(cloze.labels).index(str(cloze.answer).strip())
    has_choices = 2 <= len(texts) == len(cloze.labels)
    if not has_choices or not all(text.strip() for text in [*contexts, *texts]):
        raise ValueError("its choices are not at least two texts with a key each")
    row_id = row.get("ind", row.get("id"))
    name = _digest([contexts, texts, gold]) if row_id is None else str(row_id)
    source = name if cloze.shared is None else _digest(cloze.shared)
    return QAExample(
        document=f"{task}:{source}",
        name=name,
        stratum=task,
        contexts=tuple(contexts),
        texts=tuple(texts),
        gold=gold,
    )


def _digest(content: Any) -> str:
    """A hash of a JSON value."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class PreparedQA(Prepared):
    """Questions that are scored on one model."""

    def baseline(self, baseline: Baseline) -> list[Values]:  # noqa: ARG002 there is one
        """Values of every question on the dense model."""
        scores = log_likelihoods(self.model, self.tokenizer, self.batch)
        return [
            cloze_values(example, choice_scores)
            for example, choice_scores in zip(self.batch, scores, strict=True)
        ]


@dataclass(frozen=True)
class QATask(Task):
    """Multiple-choice questions that lm-evaluation-harness scores on the dense model.

    A question has three values. ``acc`` is 1 if the right choice has the highest log-likelihood,
    else 0. ``acc_per_char``, the main figure, is the same for the log-likelihood per character of
    the text. In a tie the first choice counts. ``nll_per_char`` is the negative log-likelihood of
    the right choice, in nats per character.
    """

    examples: tuple[QAExample, ...]
    dataset: str = "cloze"
    evaluation: ClassVar[str] = "qa"
    prepared: ClassVar[type[Prepared]] = PreparedQA
    compresses: ClassVar[bool] = False
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline("dense", 1.0),)

    def describe(self) -> Mapping[str, Any]:
        """The number of questions per task."""
        num_questions = Counter(example.stratum for example in self.examples)
        return {"tasks": dict(sorted(num_questions.items()))}

    def check(self, label: str, model: "PreTrainedModel", tokenizer: Any) -> None:
        """Raise an ``InputError`` if the model cannot score every choice or the harness is missing.

        A model cannot score a choice if it has no tokenizer, no tokens for the choice, or too few
        positions.
        """
        check_tokenizer(label, tokenizer, "qa")
        if find_spec("lm_eval") is None:
            raise InputError(
                f"multiple choice needs lm-evaluation-harness: {install_command('harness')}"
            )
        if closing_ids(tokenizer) and not hasattr(tokenizer, "backend_tokenizer"):
            raise InputError(f"model {label!r}: its slow tokenizer adds tokens after each text")
        for example in self.examples:
            words = [f" {text}" for text in example.texts]
            texts = tokenizer(words, add_special_tokens=False)["input_ids"]
            if not all(texts):
                raise InputError(
                    f"model {label!r}, {example.stratum} {example.name}: a choice has no token"
                )
            before = [context.rstrip() for context in example.contexts]
            contexts = tokenizer(before, verbose=False)["input_ids"]
            joined = [f"{a}{b}" for a, b in zip(example.contexts, words, strict=True)]
            whole = tokenizer(joined, verbose=False)["input_ids"]
            for choice, context, both in zip(example.texts, contexts, whole, strict=True):
                if len(both) <= len(context):  # one token, as of SuperBPE, spans the blank
                    raise InputError(
                        f"model {label!r}, {example.stratum} {example.name}: the tokens of "
                        f"{choice!r} merge into those before them"
                    )
            check_fits(
                label,
                model,
                num_tokens=max(len(text) for text in texts) + 1,
                largest=max(chain(*texts, *contexts)),
                what=f"choices of {example.stratum} {example.name}",
            )


def _without_closing(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """A copy of a tokenizer that adds nothing after a text.

    This is needed because the harness finds the choices at the end of the tokens.
    """
    from tokenizers.processors import TemplateProcessing

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
    """The values of a question (``QATask``), from the log-likelihoods of its choices in nats.

    If one is NaN, so are the values: none of the choices is known to be the most likely one.
    """
    total = np.array(scores)
    if np.isnan(total).any():
        return dict.fromkeys(("acc", "acc_per_char", "nll_per_char"), math.nan)
    per_char = total / [len(text) for text in example.texts]
    return {
        "acc": float(total.argmax() == example.gold),
        "acc_per_char": float(per_char.argmax() == example.gold),
        "nll_per_char": -float(per_char[example.gold]),
    }


def log_likelihoods(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", examples: Sequence[QAExample]
) -> list[list[float]]:
    """The log-likelihoods, in nats, that lm-evaluation-harness gives to every choice.

    The softmax is computed in float32, whatever the type of the model. If a context and its choice
    exceed the model's positions, the beginning of the context is cut.
    """
    models = import_module("lm_eval.models.huggingface")
    instances = import_module("lm_eval.api.instance")
    requests = []
    for example in examples:
        for context, text in zip(example.contexts, example.texts, strict=True):
            pair = (context, f" {text}")
            request = instances.Instance("loglikelihood", {}, pair, len(requests))
            requests.append(request)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the harness warns about a model in memory
    try:
        scorer = models.HFLM(
            pretrained=model,
            tokenizer=_without_closing(tokenizer),
            batch_size=len(examples),
            softmax_dtype="float32",  # else a sum in bfloat16 is rounded to sixteenths of a nat
        )
        scores = iter(scorer.loglikelihood(requests, disable_tqdm=True))
    finally:
        logging.disable(disabled)
    by_example = []
    for example in examples:
        choices = islice(scores, len(example.texts))
        by_example.append([float(log_likelihood) for log_likelihood, _ in choices])
    return by_example
