"""kvpress' RULER protocol: scores, folders, answers of the dense cache, and resuming."""

import argparse
import json

import kvpress_ruler
import pandas as pd
import pytest
import torch
import yaml
from kvpress_ruler import contains_score, run, task_scores, turn_parts

import kvcat
from tiny import byte_tokenizer, refusal, write_tiny_model

CONTEXTS = ("the cat sees a red stone. " * 3, "an old dog finds the river. " * 3)


@pytest.mark.parametrize(
    ("task", "answer", "references", "score"),
    [
        ("niah_single_1", " It is 123.", ["123"], 1.0),
        ("niah_multivalue", "123 and 456", ["123", "456", "789", "0000"], 0.5),
        ("vt", "\x01ABC\n", ["abc"], 1.0),
        ("qa_2", "the river", ["lake", "River"], 1.0),
        ("qa_1", "nothing", ["lake", "River"], 0.0),
    ],
)
def test_an_answer_scores_the_share_of_references_it_contains(task, answer, references, score):
    assert contains_score(task, answer, references) == score


def test_scores_are_means_of_each_task_in_per_cent():
    frame = pd.DataFrame(
        {
            "task": ["vt", "vt", "vt", "qa_1"],
            "predicted_answer": ["a b", "a", "x", "b"],
            "answer": [["a", "b"], ["a", "b"], ["a", "b"], ["a", "b"]],
        }
    )
    assert task_scores(frame) == {
        "qa_1": {"string_match": 100.0},
        "vt": {"string_match": 50.0},
    }


def test_the_turn_is_split_where_the_question_goes():
    assert turn_parts(byte_tokenizer(), "some text") == ("<user>some text", "</user><assistant>")
    assert turn_parts(byte_tokenizer(chat=False), "some text") == ("some text", "\n")


@pytest.fixture
def options(tmp_path):
    rows = [
        {
            "context": context,
            "question": question,
            "answer_prefix": "it is",
            "answer": ["the cat"],
            "max_new_tokens": 4,
            "task": task,
        }
        for context in CONTEXTS
        for question, task in (("who?", "niah_single_1"), ("what is red?", "qa_1"))
    ]
    data = tmp_path / "data" / "96"
    data.mkdir(parents=True)
    pd.DataFrame(rows).to_parquet(data / "test.parquet")
    return argparse.Namespace(
        model=str(write_tiny_model(tmp_path / "tiny")),
        data=str(tmp_path / "data"),
        dataset="ruler",
        data_dir="96",
        methods=["snapkv", "attention-matching"],
        compression_ratio=[0.5, 0.75],
        fraction=1.0,
        max_context_length=None,
        output_dir=tmp_path / "results",
        device="cpu",
        dtype="float32",
    )


def test_folders_are_those_of_kvpress_and_the_dense_answers_those_of_plain_transformers(options):
    metrics = run(options)
    model = options.model.replace("/", "--")
    assert set(metrics) == {
        f"ruler__96__{model}__{method}__{ratio}"
        for method, ratio in [
            ("no_press", "0.00"),
            ("snapkv", "0.50"),
            ("snapkv", "0.75"),
            ("attention-matching", "0.50"),
            ("attention-matching", "0.75"),
        ]
    }
    for name, scores in metrics.items():
        folder = options.output_dir / name
        predictions = pd.read_csv(folder / "predictions.csv", keep_default_na=False)
        assert "context" not in predictions
        assert {"question", "answer", "task", "predicted_answer"} <= set(predictions)
        assert set(scores) == {"niah_single_1", "qa_1"}
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["press_name"] in name
        assert f"{config['compression_ratio']:.2f}" == name[-4:]
    dense = pd.read_csv(
        options.output_dir / f"ruler__96__{model}__no_press__0.00" / "predictions.csv",
        keep_default_na=False,
    )
    loaded, tokenizer = kvcat.load(options.model)
    texts = [
        f"<user>{context}{question}</user><assistant>it is"
        for context in CONTEXTS
        for question in ("who?", "what is red?")
    ]
    for text, predicted in zip(texts, dense["predicted_answer"], strict=True):
        context = next(c for c in CONTEXTS if c in text)
        pieces = ("<user>" + context, text.removeprefix("<user>" + context))
        ids = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]
        out = loaded.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)
        assert predicted == tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


def test_a_stopped_run_continues_and_a_finished_one_answers_nothing(options, monkeypatch):
    options.methods = ["snapkv"]
    whole = run(options)
    folder = next(options.output_dir.glob("*snapkv__0.50"))
    lines = (folder / "answers.jsonl").read_text().splitlines(keepends=True)
    (folder / "answers.jsonl").write_text(lines[0])
    (folder / "metrics.json").unlink()
    assert run(options) == whole
    again = (folder / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in again] == [json.loads(line) for line in lines]
    monkeypatch.setattr(kvpress_ruler, "answer_context", None)
    assert run(options) == whole


def test_mistakes_are_one_line_before_the_model_is_loaded(options):
    options.model = "no-such-model"
    options.compression_ratio = [1.0]
    assert "compression ratio 1 is outside [0, 1)" in refusal(run, options)
    options.compression_ratio = [0.5]
    options.data_dir = "128"
    assert "has no .parquet and no .jsonl file" in refusal(run, options)
    options.data_dir = "96"
    options.methods = ["no-such-method"]
    assert "no-such-method" in refusal(run, options)
