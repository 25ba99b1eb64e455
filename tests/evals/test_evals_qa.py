import copy
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from small_evaluations import tiny

from kvcat.cache import fingerprint
from kvcat.evals import evaluate
from kvcat.evals.evaluations.qa import (
    QA,
    QAExample,
    QATask,
    cloze_values,
    log_likelihoods,
    read_examples,
)
from tiny import byte_tokenizer

pytestmark = pytest.mark.filterwarnings(
    "default"
)  # the harness and its imports have warnings of their own
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed"
)
CHOICES = {"text": ["ice", "fire", "sand"], "label": ["A", "B", "C"]}
HELLASWAG = {
    "ind": 24,
    "activity_label": "Roof",
    "ctx_a": "A man [header] sits.",
    "ctx_b": "he",
    "label": "1",
    "ctx": "A man [header] sits. he",
    "endings": [" is using [step] wrap.", "rips [title] tiles.", "holds.", "starts."],
}
WINOGRANDE = {
    "sentence": "Ann beat Bob as _ was quick. ",
    "option1": "Ann",
    "option2": "Bob",
    "answer": "1",
}
ROWS = {
    "hellaswag": HELLASWAG,
    "winogrande": WINOGRANDE,
    "piqa": {"goal": "Boil water.", "sol1": "Use a pot ", "sol2": "Use a hat", "label": 0},
    "social_i_qa": {
        "context": "Al fell.",
        "question": "How is Al?",
        "answerA": "sore",
        "answerB": "glad",
        "answerC": "rich",
        "label": "1",
    },
    "openbookqa": {
        "id": "7-980",
        "question_stem": "What is hot?",
        "choices": CHOICES,
        "answerKey": "B",
    },
    "arc_easy": {"id": "M1", "question": "What is hot?", "choices": CHOICES, "answerKey": "B"},
    "commonsense_qa": {"id": "c", "question": "What is hot?", "choices": CHOICES, "answerKey": "B"},
}


def write(folder, *rows, task="rows"):
    file = folder / f"{task}.jsonl"
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return file


@pytest.mark.parametrize(
    ("task", "contexts", "texts", "gold"),
    [
        ("social_i_qa", ["Al fell. How is Al?"] * 3, ["sore", "glad", "rich"], 0),
        ("commonsense_qa", ["What is hot?"] * 3, ["ice", "fire", "sand"], 1),
    ],
)
def test_a_row_becomes_the_cloze_question_of_its_task(tmp_path, task, contexts, texts, gold):
    (example,) = read_examples(task, str(write(tmp_path, ROWS[task])))
    assert (example.contexts, example.texts, example.gold) == (tuple(contexts), tuple(texts), gold)
    assert example.stratum == task
    assert example.document.startswith(f"{task}:")


def test_equal_rows_without_an_id_stay_and_twins_share_a_document(tmp_path):
    twin = {
        **WINOGRANDE,
        "sentence": "Ann lost to Bob as _ was slow.",
        "option1": "Bob",
        "option2": "Ann",
    }
    first, second, copy = read_examples(
        "winogrande", str(write(tmp_path, WINOGRANDE, twin, WINOGRANDE))
    )
    assert first.document == second.document == copy.document
    assert (copy.name, len({first.name, second.name})) == (f"{first.name}-2", 2)


def test_the_sample_depends_on_seed_and_names_only_and_tasks_take_turns(tmp_path):
    rows = [{**ROWS["arc_easy"], "id": f"M{number}"} for number in range(40)]
    for name, order in [("one", rows), ("two", rows[::-1])]:
        (tmp_path / name).mkdir()
        write(tmp_path / name, *order, task="arc_easy_test")
        write(tmp_path / name, ROWS["piqa"], task="piqa_validation_hf")
    drawn = QA.task(None, data=tmp_path / "one", limit=10).examples
    assert [example.name for example in drawn[1:5]] == [
        "M33",
        "M30",
        "M11",
        "M17",
    ]  # the same on every machine
    assert drawn[0].stratum == "piqa"
    assert QA.task(None, data=tmp_path / "two", limit=10).examples == drawn
    assert QA.task(None, data=tmp_path / "one", limit=20).examples[:11] == drawn
    assert QA.task(None, data=tmp_path / "one", limit=10, data_seed=1).examples != drawn
    assert len(QA.task(None, data=tmp_path / "one", tasks=["arc_easy"]).examples) == 40


@pytest.fixture(scope="module")
def pair():
    return tiny(0, vocab_size=300, hidden_size=32, max_position_embeddings=128), byte_tokenizer()


def example(number, contexts, texts, gold=0, task="piqa"):
    return QAExample(f"{task}:{number}", str(number), task, tuple(contexts), tuple(texts), gold)


EXAMPLES = (
    example(0, ["the cat sees"] * 2, ["a dog and a tree.", "it"]),
    example(1, ["the old house was", "the red river was"], ["small."] * 2, 1, "winogrande"),
    example(
        2,
        ["where is the stone? \nAnswer:"] * 3,
        ["it was", "in the river ", "\u00c4pfel"],
        2,
        "arc_easy",
    ),
    example(3, ["a "] * 2, ["dog", "house and tree and river"]),
)


def naive(model, tokenizer, context, text):
    """One sequence at a time, all logits, no padding; the context's own tokens are counted
    apart."""
    whole = tokenizer.encode(f"{context} {text}")
    start = len(tokenizer.encode(context.rstrip()))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([whole])).logits[0].double().log_softmax(-1)
    return sum(logits[t - 1, whole[t]].item() for t in range(start, len(whole)))


@needs_harness
def test_the_harness_gives_the_values_of_plain_forwards_and_the_run_resumes(
    pair, tmp_path, monkeypatch
):
    task = QATask(EXAMPLES)
    models = {"base": pair}
    before = fingerprint(pair[0])
    state = torch.get_rng_state()
    records = evaluate(task, models, [], [], tmp_path / "out", batch_size=3, progress=False)
    for question, record in zip(EXAMPLES, records, strict=True):
        choices = zip(question.contexts, question.texts, strict=True)
        values = cloze_values(question, [naive(*pair, *choice) for choice in choices])
        assert (record.stratum, record.document, record.example) == (
            question.stratum,
            question.document,
            question.name,
        )
        assert record.values == pytest.approx(values, abs=1e-5)
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert fingerprint(pair[0]) == before
    monkeypatch.setattr("kvcat.evals.evaluations.qa.log_likelihoods", None)
    assert evaluate(task, models, [], [], tmp_path / "out", batch_size=3, progress=False) == records


@needs_harness
def test_the_likelihoods_of_a_bfloat16_model_are_not_rounded_to_bfloat16(pair):
    model = copy.deepcopy(pair[0]).to(torch.bfloat16)
    tokenizer = pair[1]
    for question, scores in zip(EXAMPLES, log_likelihoods(model, tokenizer, EXAMPLES), strict=True):
        choices = zip(question.contexts, question.texts, strict=True)
        expected = [naive(model, tokenizer, *choice) for choice in choices]
        assert scores == pytest.approx(expected, abs=0.01)


def test_each_accuracy_has_a_different_argmax():
    values = [
        cloze_values(example(0, ["x"] * 3, ["abcdefghij", "abc", "ab"], gold), [-10.0, -4.0, -3.9])
        for gold in range(3)
    ]
    assert [v["acc"] for v in values] == [0.0, 0.0, 1.0]
    assert [v["acc_per_char"] for v in values] == [1.0, 0.0, 0.0]
    assert values[0]["nll_per_char"] == 1.0


def test_a_choice_whose_likelihood_is_not_a_number_leaves_none_of_the_values():
    question = example(0, ["x"] * 3, ["abc", "ab", "a"])
    assert all(map(math.isnan, cloze_values(question, [-1.0, math.nan, -2.0]).values()))


@needs_harness
@pytest.mark.parametrize(
    "file",
    [
        "hellaswag/hellaswag",
        "winogrande/default",
        "piqa/piqa",
        "openbookqa/openbookqa",
        "arc/arc_easy",
    ],
)
def test_the_prompts_are_those_of_the_harnesss_task_files(tmp_path, file):
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    name = file.split("/")[file.startswith("arc")]
    rows = str(write(tmp_path, ROWS[name]))
    (example,) = read_examples(name, rows)
    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / f"{file}.yaml")
    local = {"data_files": dict.fromkeys(("train", "validation", "test"), rows)}
    read = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": local, "num_fewshot": 0}
    harness_task = ConfigurableTask(config={**config, **read})
    harness_task.build_all_requests()
    assert [instance.args for instance in harness_task.instances] == [
        (context, f" {text}") for context, text in zip(example.contexts, example.texts, strict=True)
    ]
