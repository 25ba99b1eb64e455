"""Log-likelihoods of multiple-choice answers from lm-evaluation-harness, on local task files (extra ``harness``)."""

import contextlib
import copy
import io
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.errors import InputError

_PREFIX = "kvcat_"


@dataclass(frozen=True)
class QAExample:
    """A question with its choices.

    Args:
        document: task and what it was taken from; questions about one context, and WinoGrande's twins, share it.
        name: the row's own id, or a hash of its content; the same from a file and from the Hub.
        stratum: name of the task.
        contexts: one per choice.
        texts: one per choice; its characters are those that the score per character counts.
        gold: number of the right choice.
    """

    document: str
    name: str
    stratum: str
    contexts: tuple[str, ...]
    texts: tuple[str, ...]
    gold: int


def check_harness() -> None:
    """Refuse to go on without lm-evaluation-harness.

    Raises:
        InputError: it is not installed.
    """
    if find_spec("lm_eval") is None:
        raise InputError("multiple choice needs lm-evaluation-harness: pip install 'kvcat[harness]'")


def log_likelihoods(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[QAExample], *, batch_size: int = 8
) -> list[list[float]]:
    """Log-likelihood of every choice of every question, nats, from lm-evaluation-harness' own run.

    Contexts that with their choice exceed the model's positions lose their beginning.

    Args:
        model: a causal LM in memory.
        tokenizer: of the model.
        examples: of any tasks, none twice.
        batch_size: sequences at once.
    """
    lm_eval, models, tasks = map(import_module, ("lm_eval", "lm_eval.models.huggingface", "lm_eval.tasks"))
    with TemporaryDirectory() as folder, _quiet():
        names = write_task_files(examples, Path(folder))
        found: Any = lm_eval.simple_evaluate(
            model=models.HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size),
            tasks=names,
            task_manager=tasks.TaskManager(include_path=folder, include_defaults=False),
            bootstrap_iters=0,
            log_samples=True,
            # the process's random state stays as it is
            random_seed=None, numpy_random_seed=None, torch_random_seed=None, fewshot_random_seed=None,
        )  # fmt: skip
    scores = {
        (name.removeprefix(_PREFIX), sample["doc"]["name"]): [float(score) for score, _ in sample["filtered_resps"]]
        for name in names
        for sample in found["samples"][name]
    }
    return [scores[example.stratum, example.name] for example in examples]


def write_task_files(examples: Iterable[QAExample], folder: Path) -> list[str]:
    """Task files for lm-evaluation-harness with the questions beside them; returns the names of the tasks.

    ``lm_eval --model hf --model_args pretrained=MODEL --include_path FOLDER --tasks kvcat_piqa,...`` runs them without
    kvcat; its ``acc_norm`` is ``acc_per_char``. Where contexts differ (WinoGrande) it has ``acc`` only, as its lengths
    would be those of the contexts.

    Args:
        examples: of any tasks.
        folder: an existing folder.
    """
    by_task: dict[str, list[QAExample]] = defaultdict(list)
    for example in examples:
        by_task[example.stratum].append(example)
    for task, questions in by_task.items():
        partial = any(len(set(question.contexts)) > 1 for question in questions)
        file = folder.resolve() / f"{_PREFIX}{task}.jsonl"
        rows = "".join(json.dumps(_row(question, partial)) + "\n" for question in questions)
        file.write_text(rows, encoding="utf-8")
        config = json.dumps(_config(task, file, partial), indent=2)  # JSON is YAML
        file.with_suffix(".yaml").write_text(config + "\n", encoding="utf-8")
    return [f"{_PREFIX}{task}" for task in by_task]


def _row(question: QAExample, partial: bool) -> dict[str, Any]:
    if partial:  # the harness wants the number of the right context as text, and what follows it as target
        fields = {"text": question.gold, "choices": question.contexts, "target": question.texts[0]}
    else:
        fields = {"text": question.contexts[0], "choices": question.texts, "target": question.gold}
    return {"name": question.name, **fields}


def _config(task: str, file: Path, partial: bool) -> dict[str, Any]:
    return {
        "task": f"{_PREFIX}{task}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(file)}, "cache_dir": str(file.parent / "cache")},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "num_fewshot": 0,
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": "target",
        "target_delimiter": " ",
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in (["acc"] if partial else ["acc", "acc_norm"])
        ],
        "metadata": {"version": 1.0},
    }


@contextlib.contextmanager
def _quiet() -> Any:
    """No progress bars and no log lines below an error during the block."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
