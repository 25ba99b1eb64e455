"""The same questions through lm-evaluation-harness; most need it installed."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from test_evals_qa_rows import ROWS, WINOGRANDE, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcat.errors import InputError
from kvcat.evals import qa_harness
from kvcat.evals.qa import qa_task
from kvcat.evals.qa_harness import harness_log_likelihoods, write_harness_tasks
from kvcat.evals.qa_scoring import encode_continuations, log_likelihoods

needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # the harness and what it imports warn of their own affairs
OWN_TASKS = {
    "hellaswag": "hellaswag/hellaswag", "winogrande": "winogrande/default", "piqa": "piqa/piqa",
    "openbookqa": "openbookqa/openbookqa", "arc_easy": "arc/arc_easy", "arc_challenge": "arc/arc_easy",
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    return {task: write(tmp_path, row, task=task) for task, row in ROWS.items()}


@needs_harness
@pytest.mark.parametrize("form", ["partial", "whole"])
def test_both_give_the_same_log_likelihoods(tiny_folder, files, tmp_path, form):
    task = qa_task(files, winogrande=form)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    theirs = harness_log_likelihoods(model, tokenizer, task.examples, tmp_path / "harness", batch_size=3)
    assert torch.is_grad_enabled()
    for example in task.examples:
        pairs = list(zip(example.contexts, example.texts, strict=True))
        ours = log_likelihoods(model, encode_continuations(tokenizer, pairs))
        assert theirs[example.stratum, example.name] == pytest.approx(ours, rel=1e-5)


@needs_harness
@pytest.mark.parametrize("name", OWN_TASKS)
def test_the_prompts_are_those_of_the_harness_own_task_files(files, name):
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    (example,) = qa_task({name: files[name]}).examples
    file = Path(lm_eval.__file__).parent / "tasks" / f"{OWN_TASKS[name]}.yaml"
    local = {"data_files": dict.fromkeys(("train", "validation", "test"), str(files[name]))}
    config = {
        **load_yaml(file),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": local,
        "num_fewshot": 0,
    }
    own = ConfigurableTask(config=config)
    own.build_all_requests()
    assert [instance.args for instance in own.instances] == [
        (context, f" {text}") for context, text in zip(example.contexts, example.texts, strict=True)
    ]


def test_task_files_hold_the_questions(files, tmp_path):
    examples = qa_task(files).examples
    names = write_harness_tasks(examples, tmp_path / "out")
    assert sorted(names) == sorted(f"kvcat_{task}" for task in ROWS)
    row = json.loads((tmp_path / "out" / "kvcat_winogrande.jsonl").read_text())
    assert (row["text"], row["choices"], row["target"]) == (
        0,
        ["Ann beat Bob as Ann", "Ann beat Bob as Bob"],
        "was quick.",
    )
    metrics = {
        name: [entry["metric"] for entry in json.loads((tmp_path / "out" / f"{name}.yaml").read_text())["metric_list"]]
        for name in ("kvcat_winogrande", "kvcat_piqa")
    }
    assert metrics == {"kvcat_winogrande": ["acc"], "kvcat_piqa": ["acc", "acc_norm"]}
    whole = qa_task({"winogrande": write(tmp_path, WINOGRANDE)}, winogrande="whole")
    write_harness_tasks(whole.examples, tmp_path / "whole")
    row = json.loads((tmp_path / "whole" / "kvcat_winogrande.jsonl").read_text())
    assert (row["text"], row["target"]) == ("Ann beat Bob as", 0)


def test_without_the_harness_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(qa_harness, "find_spec", lambda name: None)
    model = AutoModelForCausalLM.from_config(_config())
    with pytest.raises(InputError, match=r"pip install 'kvcat\[harness\]'"):
        harness_log_likelihoods(model, _tokenizer(), [], tmp_path)


def _config():
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)


def _tokenizer():
    from tiny import byte_tokenizer

    return byte_tokenizer()
