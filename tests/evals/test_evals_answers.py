import json
from dataclasses import replace
from functools import cache as once

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from small_evaluations import tiny, with_opening
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast

import kvcat
from kvcat.data.rows import read_rows
from kvcat.errors import InputError
from kvcat.evals.answers import greedy_answers
from kvcat.evals.questions import Question, QuestionTask, answer_ids
from kvcat.evals.task import vocabulary
from tiny import loud_model

CONTEXT = 24
NEW = 5


def small_model(**changes):
    """Weights this large make answers that differ from question to question and context to
    context."""
    options = {
        "vocab_size": 300,
        "hidden_size": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.5,
    }
    return tiny(0, **options | changes)


@pytest.fixture(scope="module")
def model():
    return small_model()


@once
def questions():
    draw = torch.Generator().manual_seed(2)
    made = []
    for index, (asked, answered) in enumerate([(3, 4), (7, 2), (1, 6)]):
        rows = [
            tuple(torch.randint(1, 300, (n,), generator=draw).tolist())
            for n in (CONTEXT, asked, answered)
        ]
        made.append(Question(f"d{index}", "0", "", *rows, ("e",), NEW))
    return made


class Matching(QuestionTask):
    @staticmethod
    def judge(answer, references):
        return {"length": float(len(answer)), "match": float(references[0] in answer)}


DENSE, NONE = BASELINES = Matching.baselines


def task_of(tokenizer, words=None):
    return Matching("fixture", tuple(questions()), {}, words or vocabulary(tokenizer))


def prepared(model, tokenizer, batch=None):
    return task_of(tokenizer).prepare(model, tokenizer, batch or questions())


def naive_answer(model, tokens, count):
    tokens = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]


def naive_nll(model, before, answer):
    with torch.no_grad():
        log_probs = model(torch.tensor([[*before, *answer]])).logits[0].log_softmax(-1)
    return -sum(float(log_probs[len(before) + i - 1, t]) for i, t in enumerate(answer)) / len(
        answer
    )


def test_answers_on_the_whole_cache_are_those_of_full_forwards(model, tokenizer):
    dense = prepared(model, tokenizer).trace.dense_cache()
    answers = greedy_answers(model, dense, [q.question for q in questions()], NEW)
    assert answers == [naive_answer(model, q.context + q.question, NEW) for q in questions()]
    none = greedy_answers(model, None, [q.question for q in questions()], NEW)
    assert none == [naive_answer(model, q.question, NEW) for q in questions()] != answers


def test_figures_of_an_example_are_those_of_full_forwards_and_belong_together(model):
    batch = prepared(model, with_opening())
    assert batch.score(kvcat.AttentionMatching()(batch.trace, keep_ratio=1.0)) == batch.baseline(
        DENSE
    )
    compact = batch.score(kvcat.Eviction("first")(batch.trace, keep_ratio=0.25))
    for q, values, dense, none in zip(
        questions(), compact, *map(batch.baseline, BASELINES), strict=True
    ):
        with_context = naive_nll(model, q.context + q.question, q.answer)
        assert (
            values["nll_dense"]
            == dense["nll"]
            == none["nll_dense"]
            == pytest.approx(with_context, abs=1e-5)
        )
        without = naive_nll(model, (0, *q.question), q.answer)
        assert values["nll_none"] == none["nll"] == pytest.approx(without, abs=1e-5)
        assert values["delta_nll"] == values["nll"] - values["nll_dense"] != 0.0
        assert (
            values["context_gain"] == none["delta_nll"] == values["nll_none"] - values["nll_dense"]
        )


def test_an_example_gives_the_same_alone_as_in_a_batch(model, tokenizer):
    batch = [
        replace(question, max_new_tokens=count)
        for question, count in zip(questions(), (1, NEW, 3), strict=True)
    ]
    together = prepared(model, tokenizer, batch)
    method = kvcat.AttentionMatching()
    values = together.score(method(together.trace, keep_ratio=0.25))
    assert len({row["length"] for row in values}) > 1
    for row, question in enumerate(batch):
        alone = prepared(model, tokenizer, [question])
        assert alone.score(method(alone.trace, keep_ratio=0.25))[0] == pytest.approx(
            values[row], abs=2e-4
        )
        for baseline in BASELINES:
            assert alone.baseline(baseline)[0] == pytest.approx(
                together.baseline(baseline)[row], abs=2e-4
            )


def test_a_long_answer_next_to_a_long_question_needs_no_positions_that_neither_has():
    model = loud_model("opt", vocab_size=300, ffn_dim=48, max_position_embeddings=40)
    short, long = [5, 6, 7], list(range(10, 46))
    answers = greedy_answers(model, None, [long, short], [4, 37])
    assert answers == [naive_answer(model, long, 4), naive_answer(model, short, 37)]


def test_of_the_settings_of_generation_only_the_end_of_text_counts_and_it_ends_its_row_alone(
    model, monkeypatch
):
    asked = [q.question for q in questions()]
    plain = greedy_answers(model, None, asked, NEW)
    drawn = {
        "do_sample": True,
        "temperature": 3.0,
        "top_p": 0.9,
        "repetition_penalty": 9.0,
        "num_beams": 2,
    }
    for ends in (None, [plain[0][2], 299]):
        settings = GenerationConfig(**drawn, eos_token_id=ends)
        monkeypatch.setattr(model, "generation_config", settings)
        answers = greedy_answers(model, None, asked, NEW)
        assert model.generation_config is settings
        assert answers == [
            row[: row.index(ends[0])] if ends and ends[0] in row else row for row in plain
        ]
    assert len(answers[0]) < NEW


def test_the_answers_tokens_follow_the_questions_unless_one_would_span_both(tokenizer):
    question, answer = answer_ids(tokenizer, "the cat sees", " the dog")
    assert [*question, *answer] == tokenizer.encode("the cat sees the dog")
    question, answer = answer_ids(tokenizer, "the ca", "t")
    assert [*question, *answer] != tokenizer.encode("the cat")
    assert [tokenizer.decode(ids) for ids in (question, answer)] == ["the ca", "t"]
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"?": 0, "key=": 1}, unk_token="?")),
        name_or_path="words",
    )
    with pytest.raises(InputError, match="tokenizer 'words' cannot spell the answer '4711'"):
        answer_ids(words, "key=", "4711")


ROWS = [{"text": "one\u2028line", "n": 1}, {"text": "two", "n": 2}]


def test_json_lines_a_json_array_and_parquet_give_the_same_rows(tmp_path):
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in ROWS)
    )
    assert all(
        list(read_rows(str(tmp_path / f"a.{form}"))) == ROWS
        for form in ("parquet", "json", "jsonl")
    )


def test_the_rows_of_the_hub_are_those_of_its_configuration_and_split_or_the_run_ends_at_once(
    monkeypatch,
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("kvcat.hub.hub_obstacle", lambda: "huggingface.co cannot be reached")
    with pytest.raises(
        InputError, match=r"me/mine.* is on the Hub, and huggingface.co cannot be reached"
    ):
        list(read_rows("hub:me/mine@test"))
    asked = []
    monkeypatch.setattr("kvcat.hub.hub_obstacle", lambda: None)
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *name, split: asked.append((*name, split)) or ROWS
    )
    for source in ("hub:me/mine", "hub:me/mine/part@test"):
        assert list(read_rows(source)) == ROWS
    assert asked == [("me/mine", None, "train"), ("me/mine", "part", "test")]
