"""QA without compression: log-likelihoods, accuracies, averages, and what compressors are told."""

import json
import math

import pytest
import torch

from kvcat.cache import fingerprint
from kvcat.errors import InputError
from kvcat.evals import qa_scoring
from kvcat.evals.qa import QATask, averages, choice_values, qa_task, task_accuracies
from kvcat.evals.qa_rows import QAExample
from kvcat.evals.qa_scoring import Continuation, encode_continuations, log_likelihoods
from kvcat.evals.records import Record
from kvcat.evals.running import evaluate
from kvcat.evals.task import Baseline, Task
from tiny import byte_tokenizer, stock_model

DENSE = Baseline("dense", 1.0)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny(tokenizer)


def tiny(tokenizer, positions=128):
    torch.manual_seed(0)
    return stock_model(
        "qwen2", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=positions, initializer_range=0.3,
    ).eval()  # fmt: skip


def example(number, contexts, texts, gold=0, task="piqa"):
    return QAExample(f"{task}:{number}", str(number), task, tuple(contexts), tuple(texts), gold)


@pytest.fixture(scope="module")
def examples():
    return (
        example(0, ["the cat sees"] * 2, ["a dog and a tree.", "it"]),
        example(1, ["the old house was", "the red river was"], ["small."] * 2, 1, "winogrande"),
        example(
            2, ["Question: where is the stone? \nAnswer:"] * 3, ["it was", "in the river ", "Äpfel"], 2, "arc_easy"
        ),
        example(3, ["a "] * 2, ["dog", "house and tree and river"]),
    )


def naive(model, tokenizer, context, text):
    """One sequence at a time, all logits, no padding; the context's own tokens are counted apart."""
    whole, start = tokenizer.encode(f"{context} {text}"), len(tokenizer.encode(context.rstrip()))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([whole])).logits[0].double().log_softmax(-1)
    return sum(logits[t - 1, whole[t]].item() for t in range(start, len(whole)))


def test_log_likelihoods_are_those_of_one_sequence_at_a_time(model, tokenizer, examples, monkeypatch):
    pairs = [pair for each in examples for pair in zip(each.contexts, each.texts, strict=True)]
    encoded = encode_continuations(tokenizer, pairs)
    expected = [naive(model, tokenizer, *pair) for pair in pairs]
    for tokens_at_once in (1, 60, 10_000):
        assert log_likelihoods(model, encoded, tokens_at_once=tokens_at_once) == pytest.approx(expected, abs=1e-4)
    monkeypatch.setattr(qa_scoring, "_LOGITS_AT_ONCE", 3 * len(tokenizer))
    assert log_likelihoods(model, encoded) == pytest.approx(expected, abs=1e-4)


def test_uniform_predictions_cost_log_vocabulary_a_token(tokenizer, examples):
    uniform = tiny(tokenizer)
    torch.nn.init.zeros_(uniform.lm_head.weight)
    (values,) = QATask(examples).prepare(uniform, tokenizer, examples[:1]).baseline(DENSE)
    tokens = len(tokenizer.encode(" a dog and a tree."))
    assert values["nll_per_char"] == pytest.approx(tokens * math.log(len(tokenizer)) / len("a dog and a tree."))
    assert values["acc"] == 0.0  # the text of fewer tokens wins
    assert values["acc_per_token"] == 1.0  # of equal scores the first


def test_each_accuracy_has_its_own_argmax():
    question = example(0, ["x"] * 3, ["abcdefghij", "abc", "ab"], 0)
    values = choice_values(question, [-10.0, -4.0, -3.9], [10, 5, 2])
    assert values == {"acc": 0.0, "acc_per_char": 1.0, "acc_per_token": 0.0, "nll_per_char": 1.0}
    values = choice_values(example(0, ["x"] * 3, question.texts, 1), [-10.0, -4.0, -3.9], [10, 5, 2])
    assert values["acc_per_token"] == 1.0
    assert choice_values(example(0, ["x"] * 3, question.texts, 2), [-10.0, -4.0, -3.9], [10, 5, 2])["acc"] == 1.0


def test_a_question_scores_alone_as_in_any_batch(model, tokenizer, examples):
    task = QATask(examples)
    together = task.prepare(model, tokenizer, examples).baseline(DENSE)
    for question, values in zip(examples, together, strict=True):
        (alone,) = task.prepare(model, tokenizer, [question]).baseline(DENSE)
        assert alone == pytest.approx(values, abs=1e-5)


def test_the_runner_writes_one_record_a_question_and_resumes(model, tokenizer, examples, tmp_path):
    task, models = QATask(examples), {"base": (model, tokenizer)}
    records = evaluate(task, models, [], [], tmp_path / "out", batch_size=3, progress=False)
    expected = task.prepare(model, tokenizer, examples).baseline(DENSE)
    for question, found, values in zip(examples, records, expected, strict=True):
        assert (found.stratum, found.document, found.example) == (question.stratum, question.document, question.name)
        assert found.values == pytest.approx(values, abs=1e-5)
    assert set(task_accuracies(records)) == {"piqa", "winogrande", "arc_easy"}
    assert evaluate(task, models, [], [], tmp_path / "out", batch_size=3, progress=False) == records


def test_a_context_beyond_the_positions_loses_its_beginning(tokenizer):
    short = tiny(tokenizer, positions=16)
    long, near = "the tree " * 40 + "likes the dog", "tree likes the dog"
    far = example(0, [long, near], ["and"] * 2)
    (values,) = QATask((far,)).prepare(short, tokenizer, [far]).baseline(DENSE)
    assert values["truncated"] == 1.0
    (whole,) = encode_continuations(tokenizer, [(long, "and")])
    (piece,) = whole.pieces(16)
    assert len(piece.tokens) == 17  # the last token is predicted, not read
    assert piece.tokens == whole.tokens[-17:]
    assert log_likelihoods(short, [whole]) == pytest.approx(log_likelihoods(short, [piece]))
    assert whole.pieces(None) == whole.pieces(len(whole.tokens) - 1) == [whole]


def test_a_continuation_beyond_the_positions_is_scored_token_by_token_in_pieces(tokenizer):
    whole = Continuation(tuple(range(3, 50)), 40)
    pieces = whole.pieces(10)
    scored = [piece.tokens[-piece.num_scored :] for piece in pieces]
    assert tuple(token for part in reversed(scored) for token in part) == whole.tokens[-40:]
    assert all(len(piece.tokens) <= 11 and piece.num_scored <= 5 for piece in pieces)
    short = tiny(tokenizer, positions=10)
    assert log_likelihoods(short, [whole])[0] == pytest.approx(sum(log_likelihoods(short, pieces)))


def test_scoring_leaves_autograd_on_and_the_model_as_it_was(model, tokenizer, examples):
    import kvcat.evals  # noqa: F401

    before = fingerprint(model)
    model.train()
    try:
        QATask(examples).prepare(model, tokenizer, examples).baseline(DENSE)
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert model.training
        assert all(parameter.requires_grad for parameter in model.parameters())
    finally:
        model.eval()
    assert fingerprint(model) == before


def test_compressors_are_refused(model, tokenizer, examples):
    prepared = QATask(examples).prepare(model, tokenizer, examples)
    with pytest.raises(InputError, match="qa is evaluated without compression"):
        _ = prepared.trace
    with pytest.raises(InputError, match="qa has no baseline 'truncated'"):
        prepared.baseline(Baseline("truncated", 0.5))
    task = QATask(examples)
    assert isinstance(task, Task)
    assert task.baselines == (DENSE,)


def test_what_a_model_cannot_score_is_told_before_work(model, tokenizer, examples):
    task = QATask(examples)
    task.check("m", model, tokenizer)
    with pytest.raises(InputError, match="qa needs the tokenizer of model 'm'"):
        task.check("m", model, None)
    with pytest.raises(InputError, match="qa needs the model's tokenizer"):
        task.prepare(model, None, examples)
    small = stock_model(
        "llama", vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(InputError, match="outside the vocabulary of model 'm', 20 tokens"):
        task.check("m", small, tokenizer)
    with pytest.raises(InputError, match=r"model 'm', piqa 9: .* no token after its context"):
        QATask((example(9, ["", "a"], ["b", "b"]),)).check("m", model, tokenizer)


def test_the_manifest_knows_every_part_of_a_question(examples):
    hashes = {QATask(examples).describe()["manifest"]}
    first = examples[0]
    for changed in [
        example(0, first.contexts, first.texts, 1),
        example(0, ["x"] * 2, first.texts),
        example(0, first.contexts, ["x"] * 2),
        example(9, first.contexts, first.texts),
    ]:
        hashes.add(QATask((changed, *examples[1:])).describe()["manifest"])
    assert len(hashes) == 5
    assert QATask(examples).describe()["tasks"] == {"arc_easy": 1, "piqa": 2, "winogrande": 1}


def test_tasks_take_turns_in_the_order_of_evaluation(tmp_path):
    choices = {"text": ["ice", "fire"], "label": ["A", "B"]}
    files = {}
    for task, count in [("arc_easy", 5), ("openbookqa", 2)]:
        rows = [{"id": f"{task}-{n}", "question": "Hot?", "choices": choices, "answerKey": "B"} for n in range(count)]
        files[task] = tmp_path / f"{task}.jsonl"
        files[task].write_text("".join(json.dumps(row) + "\n" for row in rows))
    strata = [each.stratum for each in qa_task(files, num_examples=4).examples]
    assert strata == ["openbookqa", "arc_easy", "openbookqa", "arc_easy", "arc_easy", "arc_easy"]
    assert qa_task(files).describe() == qa_task(dict(reversed(files.items()))).describe()
    with pytest.raises(InputError, match="no QA task given"):
        qa_task({})


def test_the_averages_of_the_papers_table_are_its_own():
    tasks = ["hellaswag", "winogrande", "piqa", "openbookqa", "arc_easy", "arc_challenge"]
    for row, average in [
        ([54.6, 52.9, 70.4, 38.2, 60.8, 32.2], 51.5),
        ([53.6, 54.1, 72.1, 37.4, 63.6, 32.4], 52.2),
        ([68.6, 60.5, 76.2, 40.0, 73.3, 45.2], 60.6),
        ([66.4, 60.5, 75.5, 40.6, 73.9, 43.5], 60.1),
    ]:
        found = averages(dict(zip(tasks, row, strict=True)))
        assert set(found) == {"six"}
        assert found["six"] == pytest.approx(average, abs=0.051)
    eight = {**dict.fromkeys(tasks, 0.5), "social_i_qa": 0.85, "commonsense_qa": 0.1}
    assert averages(eight) == pytest.approx({"six": 0.5, "seven": 0.55, "eight": 0.49375})


def record(task, name, right, model="base"):
    return Record(
        model=model, fingerprint="f", dtype="float32", method="dense", options="{}", keep_ratio=1.0, step=None,
        seed=None, dataset="cloze", stratum=task, document=f"{task}:{name}", example=name,
        values={"acc_per_char": right},
    )  # fmt: skip


def test_task_accuracies_are_means_of_one_models_records():
    records = [record("piqa", "1", 1.0), record("piqa", "2", 0.0), record("arc_easy", "1", 1.0)]
    assert task_accuracies(records) == {"piqa": 0.5, "arc_easy": 1.0}
    with pytest.raises(InputError, match="records of two models: base, other"):
        task_accuracies([*records, record("piqa", "1", 1.0, model="other")])
