r"""Question answering without compression: eight multiple-choice tasks as cloze, scored by lm-evaluation-harness.

A question is two to five pairs (context, text), one per choice; scored is one space and the text after the context.
The prompts are those of LightEval's cloze task file for small models, which the paper's evaluation follows (the same
eight tasks, 1000 rows each, ARC from the test split), and of lm-evaluation-harness where that has the task as cloze:

==============  ===============================================  =========================  ==================
task            context                                          texts                      harness has
==============  ===============================================  =========================  ==================
hellaswag       ``<activity_label>: <ctx_a> <Ctx_b>``, cleaned   the endings, cleaned       the same
winogrande      the sentence up to ``_``, then the option        the rest of the sentence   the same
piqa            ``Question: <goal>\nAnswer:``                     sol1, sol2                 the same
social_i_qa     ``<context> <question>``                         answerA, answerB, answerC  ``Q: ...\nA:``
openbookqa      ``<question_stem>``                              the choices                the same
arc_easy        ``Question: <question>\nAnswer:``                 the choices                the same
arc_challenge   as arc_easy                                      the choices                the same
commonsense_qa  ``<question>``                                   the choices                letters, no cloze
==============  ===============================================  =========================  ==================

WinoGrande is scored by partial evaluation: contexts differ, the text is the same, so that its characters do not matter.
LightEval has it the other way round, ``winogrande="whole"``: the context ends before the blank, the texts are option
and rest.

References: KV-CAT, appendix "No compression QA evaluation"; LightEval, examples/nanotron/custom_evaluation_tasks.py;
lm-evaluation-harness 0.4.13, lm_eval/tasks.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.errors import InputError
from kvcat.evals.harness import QAExample, check_harness, log_likelihoods
from kvcat.evals.hub import hub_rows
from kvcat.evals.task import Baseline, Prepared, Task, Values, check_fits

SIX = ("hellaswag", "winogrande", "piqa", "openbookqa", "arc_easy", "arc_challenge")
AVERAGES: dict[str, tuple[str, ...]] = {
    "six": SIX,
    "seven": (*SIX, "social_i_qa"),
    "eight": (*SIX, "social_i_qa", "commonsense_qa"),
}
"""Averages over tasks: ``six`` is the paper's table, ``seven`` adds Social IQa, ``eight`` CommonsenseQA."""

WINOGRANDE_FORMS = ("partial", "whole")
Row = Mapping[str, Any]


def make_task(
    folder: Path | None = None,
    *,
    tasks: Sequence[str] | None = None,
    num_examples: int = 1000,
    seed: int = 0,
    winogrande: str = "partial",
) -> "QATask":
    """The same sample of every task for everybody, a function of the seed and the rows' names only.

    The tasks take turns, so that the first n questions are a fair sample of them for every n.

    Args:
        folder: of JSON lines, a file TASK*.jsonl each, in the Hub's schema or the one that the data
            set's authors published; None reads the Hub.
        tasks: names in ``QA_SOURCES``; None takes all, or those that the folder has.
        num_examples: of each task, at least 1; a task with fewer (OpenBookQA has 500) gives all.
        seed: of the draw.
        winogrande: "partial" or "whole", see above.

    Raises:
        InputError: a value out of its range, an unknown task, no file of a task or two, as ``read_examples``.
    """
    if num_examples < 1:
        raise InputError(f"num_examples is {num_examples}; it must be at least 1")
    if winogrande not in WINOGRANDE_FORMS:
        raise InputError(f"winogrande is {winogrande!r}; it must be one of {', '.join(WINOGRANDE_FORMS)}")
    for task in tasks or ():
        if task not in QA_SOURCES:
            raise InputError(f"no QA task {task!r}; there are {', '.join(QA_SOURCES)}")
    files = dict.fromkeys(tasks or QA_SOURCES) if folder is None else _files(folder, tasks)
    drawn = []
    for task in [task for task in QA_SOURCES if task in files]:
        examples = read_examples(task, files[task], winogrande=winogrande)
        drawn.append(sorted(examples, key=lambda e: _digest([seed, e.stratum, e.name]))[:num_examples])
    turns = [own[turn] for turn in range(max(map(len, drawn))) for own in drawn if turn < len(own)]
    return QATask(tuple(turns))


@dataclass(frozen=True)
class QATask(Task):
    """Multiple-choice questions, scored on the dense model only by lm-evaluation-harness.

    Per question 1 or 0, whether the choice of the highest score is the right one: ``acc`` by
    log-likelihood, ``acc_per_char`` by log-likelihood per character of the text, the headline; of equal
    ones the first choice is taken. And ``nll_per_char`` of the right choice, nats per character.

    Args:
        examples: of any tasks, in the order of evaluation.
        dataset: name of the data set in the records.
    """

    examples: tuple[QAExample, ...]
    dataset: str = "cloze"
    evaluation: ClassVar[str] = "qa"
    compresses: ClassVar[bool] = False
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline("dense", 1.0),)

    def describe(self) -> Mapping[str, Any]:
        """Number of questions per task."""
        return {"tasks": dict(sorted(Counter(example.stratum for example in self.examples).items()))}

    def check(self, label: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Refuse a model that cannot run these questions.

        Raises:
            InputError: no tokenizer, a choice without a token or longer than the model's positions, tokens outside the
                vocabulary, no lm-evaluation-harness.
        """
        if tokenizer is None:
            raise InputError(f"qa needs the tokenizer of model {label!r}")
        check_harness()
        for example in self.examples:
            texts = tokenizer([f" {text}" for text in example.texts], add_special_tokens=False)["input_ids"]
            if not all(texts):
                raise InputError(f"model {label!r}, {example.stratum} {example.name}: a choice has no token")
            contexts = tokenizer(list(example.contexts), verbose=False)["input_ids"]
            largest = max(token for tokens in [*texts, *contexts] for token in tokens)
            what = f"choices of {example.stratum} {example.name}"
            check_fits(label, model, num_tokens=max(map(len, texts)) + 1, largest=largest, what=what)

    def prepare(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[QAExample]
    ) -> "PreparedQA":
        """The questions on a model."""
        return PreparedQA(model, tokenizer, batch)


@dataclass(frozen=True)
class PreparedQA(Prepared):
    """Questions on one model; there is nothing to compress."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch: Sequence[QAExample]

    def baseline(self, baseline: Baseline) -> list[Values]:  # noqa: ARG002 there is one
        """Values of every question under the whole model."""
        scores = log_likelihoods(self.model, self.tokenizer, self.batch)
        return [choice_values(example, own) for example, own in zip(self.batch, scores, strict=True)]


def choice_values(example: QAExample, scores: Sequence[float]) -> Values:
    """What a question's log-likelihoods make of it, see ``QATask``.

    Args:
        example: the question.
        scores: log-likelihood of each choice, nats.
    """
    total = np.array(scores)
    per_char = total / [len(text) for text in example.texts]
    right = {name: float(s.argmax() == example.gold) for name, s in [("acc", total), ("acc_per_char", per_char)]}
    return {**right, "nll_per_char": -float(per_char[example.gold])}


@dataclass(frozen=True)
class _Question:
    """A row read: ``id`` where the data set has one, ``group`` where several rows belong together."""

    contexts: tuple[str, ...]
    texts: tuple[str, ...]
    gold: int
    id: str | None = None
    group: str | None = None


@dataclass(frozen=True)
class QASource:
    """Where a task's rows are on the Hub, and how one is read."""

    repository: str
    config: str | None
    split: str
    read: Callable[[Row], _Question]


def read_examples(task: str, file: Path | None = None, *, winogrande: str = "partial") -> list[QAExample]:
    """All questions of a task, in the order of its rows.

    Rows that are equal in every respect (Social IQa has some) stay, their names numbered.

    Args:
        task: one of ``QA_SOURCES``.
        file: JSON lines; None reads the Hub.
        winogrande: as in ``make_task``.

    Raises:
        InputError: no such file, a row that is not one of this task (told with its number), an id twice, no row at all,
            or no way to the Hub (told within seconds).
    """
    source = QA_SOURCES[task]
    read = _winogrande_whole if (task, winogrande) == ("winogrande", "whole") else source.read
    if file is None:
        where, rows = source.repository, enumerate(hub_rows(source.repository, source.config, source.split), start=1)
    else:
        where, rows = str(file), _file_rows(file)
    examples: list[QAExample] = []
    places: dict[str, int] = {}
    copies: Counter[str] = Counter()
    for number, row in rows:
        try:
            question = read(row)
        except InputError as error:
            raise InputError(f"{where}, row {number}: {error}, so it is no row of {task}") from None
        name = question.id or _digest([question.contexts, question.texts, question.gold])
        if question.id is not None and name in places:
            raise InputError(f"{where}, row {number}: id {name!r} is that of row {places[name]} too")
        places[name] = number
        copies[name] += 1
        unique = name if copies[name] == 1 else f"{name}-{copies[name]}"
        document = f"{task}:{name if question.group is None else _digest(question.group)}"
        examples.append(QAExample(document, unique, task, question.contexts, question.texts, question.gold))
    if not examples:
        raise InputError(f"{where} holds no row")
    return examples


def _files(folder: Path, tasks: Sequence[str] | None) -> dict[str, Path]:
    if not folder.is_dir():
        raise InputError(f"no such folder: {folder}")
    found: dict[str, Path] = {}
    for task in tasks or QA_SOURCES:
        files = sorted(folder.glob(f"{task}*.jsonl"))
        if len(files) > 1:
            raise InputError(f"{folder} has two files of {task}: {files[0].name} and {files[1].name}")
        if files:
            found[task] = files[0]
        elif tasks:
            raise InputError(f"{folder} has no file {task}*.jsonl")
    if not found:
        raise InputError(f"{folder} has no file of a QA task, such as {next(iter(QA_SOURCES))}*.jsonl")
    return found


def _file_rows(file: Path) -> Iterator[tuple[int, Row]]:
    if not file.is_file():
        raise InputError(f"no such file: {file}")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except ValueError:  # not UTF-8, or not JSON
                raise InputError(f"{file}, row {number}: not a line of JSON") from None
            if not isinstance(row, dict):
                raise InputError(f"{file}, row {number}: not a JSON object")
            yield number, row


def _hellaswag(row: Row) -> _Question:
    """The preprocessing of the data set's own users: brackets are left-overs of WikiHow's layout."""
    parted = "ctx_a" in row
    context = f"{_text(row, 'ctx_a')} {str(row.get('ctx_b') or '').capitalize()}" if parted else _text(row, "ctx")
    endings = row.get("endings")
    if not isinstance(endings, list):
        raise InputError("it has no list 'endings'")
    texts = tuple(_clean(ending) for ending in _texts(endings))
    gold = _answer(row, "label", [str(number) for number in range(len(texts))])
    context = _clean(f"{_text(row, 'activity_label')}: {context}")
    return _Question((context,) * len(texts), texts, gold, id=str(row["ind"]) if "ind" in row else None)


def _clean(text: str) -> str:
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _winogrande(row: Row) -> _Question:
    before, rest, options, gold = _winogrande_parts(row)
    contexts = tuple(before + option for option in options)
    return _Question(contexts, (rest,) * 2, gold, group=json.dumps(sorted(options)))


def _winogrande_whole(row: Row) -> _Question:
    before, rest, options, gold = _winogrande_parts(row)
    if not before.strip():
        raise InputError("nothing stands before the blank")
    texts = tuple(f"{option} {rest}" for option in options)
    return _Question((before.rstrip(),) * 2, texts, gold, group=json.dumps(sorted(options)))


def _winogrande_parts(row: Row) -> tuple[str, str, tuple[str, str], int]:
    before, blank, rest = _text(row, "sentence").partition("_")
    if not blank or not rest.strip():
        raise InputError("its sentence has no blank '_' with text after it")
    options = _text(row, "option1"), _text(row, "option2")
    return before, rest.strip(), options, _answer(row, "answer", "12")


def _piqa(row: Row) -> _Question:
    goal, texts = _text(row, "goal"), (_text(row, "sol1"), _text(row, "sol2"))
    return _Question((f"Question: {goal}\nAnswer:",) * 2, texts, _answer(row, "label", "01"), group=goal)


def _social_i_qa(row: Row) -> _Question:
    context, texts = _text(row, "context"), tuple(_text(row, f"answer{letter}") for letter in "ABC")
    gold = _answer(row, "correct", "ABC") if "correct" in row else _answer(row, "label", "123")
    return _Question((f"{context} {_text(row, 'question')}",) * 3, texts, gold, group=context)


def _plain(row: Row) -> _Question:
    """OpenBookQA and CommonsenseQA: the bare question, in the Hub's schema or that of the data sets' authors."""
    question = row.get("question")
    inner: Row = question if isinstance(question, Mapping) else row
    stem = _text(inner, next((field for field in ("question_stem", "stem") if field in inner), "question"))
    choices = inner.get("choices")
    if isinstance(choices, list) and all(isinstance(choice, Mapping) for choice in choices):
        choices = {field: [choice.get(field) for choice in choices] for field in ("text", "label")}
    if not isinstance(choices, Mapping) or not all(isinstance(choices.get(field), list) for field in ("text", "label")):
        raise InputError("it has no 'choices' with 'text' and 'label'")
    texts = _texts(choices["text"])
    if len(choices["label"]) != len(texts):
        raise InputError(f"it has {len(texts)} choices and {len(choices['label'])} labels")
    if not isinstance(row.get("id"), str):
        raise InputError("it has no text 'id'")
    return _Question((stem,) * len(texts), texts, _answer(row, "answerKey", choices["label"]), id=row["id"])


def _arc(row: Row) -> _Question:
    plain = _plain(row)
    return _Question(
        tuple(f"Question: {context}\nAnswer:" for context in plain.contexts), plain.texts, plain.gold, plain.id
    )


def _text(row: Row, field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"it has no text {field!r}")
    return value


def _texts(values: list[Any]) -> tuple[str, ...]:
    if len(values) < 2 or not all(isinstance(value, str) and value.strip() for value in values):
        raise InputError("its choices are not at least two texts")
    return tuple(values)


def _answer(row: Row, field: str, keys: Sequence[str]) -> int:
    value = row.get(field)
    if str(value).strip() not in keys:
        raise InputError(f"its {field!r} is {value!r} and not one of {', '.join(map(str, keys))}")
    return list(keys).index(str(value).strip())


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


QA_SOURCES: dict[str, QASource] = {
    "hellaswag": QASource("Rowan/hellaswag", None, "validation", _hellaswag),
    "winogrande": QASource("allenai/winogrande", "winogrande_xl", "validation", _winogrande),
    "piqa": QASource("baber/piqa", None, "validation", _piqa),
    "social_i_qa": QASource("lighteval/siqa", None, "validation", _social_i_qa),
    "openbookqa": QASource("allenai/openbookqa", "main", "validation", _plain),
    "arc_easy": QASource("allenai/ai2_arc", "ARC-Easy", "test", _arc),
    "arc_challenge": QASource("allenai/ai2_arc", "ARC-Challenge", "test", _arc),
    "commonsense_qa": QASource("tau/commonsense_qa", None, "validation", _plain),
}
