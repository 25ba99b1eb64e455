"""The same questions through lm-evaluation-harness, as a check from outside (extra ``harness``)."""

import json
from collections import defaultdict
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.errors import InputError
from kvcat.evals.qa_rows import QAExample

_PREFIX = "kvcat_"


def write_harness_tasks(examples: Iterable[QAExample], folder: Path) -> list[str]:
    """Task files for lm-evaluation-harness, with the questions beside them; returns the names of the tasks.

    ``lm_eval --model hf --model_args pretrained=MODEL --include_path FOLDER --tasks kvcat_piqa,...`` runs them without
    kvcat; its ``acc_norm`` is ``acc_per_char``. Where contexts differ (WinoGrande) it has ``acc`` only, as its lengths
    would be those of the contexts.

    Args:
        examples: of any tasks.
        folder: made if absent.
    """
    by_task: dict[str, list[QAExample]] = defaultdict(list)
    for example in examples:
        by_task[example.stratum].append(example)
    folder.mkdir(parents=True, exist_ok=True)
    for task, questions in by_task.items():
        partial = any(len(set(question.contexts)) > 1 for question in questions)
        rows = [_row(question, partial) for question in questions]
        file = folder.resolve() / f"{_PREFIX}{task}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config = _config(task, file, partial)
        file.with_suffix(".yaml").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
    return [f"{_PREFIX}{task}" for task in by_task]


def harness_log_likelihoods(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Iterable[QAExample],
    folder: Path,
    *,
    batch_size: int = 8,
) -> dict[tuple[str, str], tuple[float, ...]]:
    """Log-likelihood of every choice, by (task, name) of the question, from lm-evaluation-harness' own run.

    Args:
        model: a causal LM.
        tokenizer: of the model.
        examples: of any tasks, none twice.
        folder: for the task files.
        batch_size: sequences at once.

    Raises:
        InputError: lm-evaluation-harness is not installed.
    """
    if find_spec("lm_eval") is None:
        raise InputError("lm-evaluation-harness is not installed: pip install 'kvcat[harness]'")
    lm_eval, models, tasks = map(import_module, ("lm_eval", "lm_eval.models.huggingface", "lm_eval.tasks"))
    names = write_harness_tasks(examples, folder)
    found: Any = lm_eval.simple_evaluate(
        model=models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
        tasks=names,
        task_manager=tasks.TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    return {
        (name.removeprefix(_PREFIX), sample["doc"]["name"]): tuple(
            float(score) for score, _ in sample["filtered_resps"]
        )
        for name in names
        for sample in found["samples"][name]
    }


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
        "dataset_kwargs": {"data_files": {"validation": str(file)}},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "num_fewshot": 0,
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": "target",
        "target_delimiter": " ",
        "metric_list": [{"metric": metric} for metric in (["acc"] if partial else ["acc", "acc_norm"])],
        "metadata": {"version": 1.0},
    }
