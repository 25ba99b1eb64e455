import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_evals_answers import with_opening

from kvcat.compress import INSTRUCTION, GradientCompression, slots_for
from kvcat.errors import InputError
from kvcat.evals.longbench import (
    LongBenchPrompt,
    LongBenchTask,
    _prompt,
    choice_values,
    cut_middle,
    longbench_examples,
    make_task,
)
from kvcat.evals.task import Baseline
from tiny import byte_tokenizer, sentences, stock_model

SAMPLE = Path(__file__).parents[3] / "shared" / "assets" / "longbench_v2" / "sample-20-shortest.jsonl"
NAMES = ["Legal", "Table QA", "Literary", "Academic"]


def row(number=0, **changes):
    return {
        "_id": f"id{number}", "domain": "Single-Document QA", "sub_domain": NAMES[number % 4], "difficulty": "easy",
        "length": "short", "question": f" Which is small, {number}?\n", "choice_A": "the cat", "choice_B": "a dog",
        "choice_C": "a river and a tree", "choice_D": "it", "answer": "ABCD"[number % 4],
        "context": "\n" + "".join(sentences(30 + number, seed=number)), **changes,
    }  # fmt: skip


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


DENSE, NONE = Baseline("dense", 1.0), Baseline("no-context", 0.0)


@pytest.fixture(scope="module")
def plain():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = stock_model(
        "qwen2", vocab_size=302, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=800, initializer_range=0.3,
    )  # fmt: skip
    return made.double().eval()


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    return longbench_examples(
        written(tmp_path_factory.mktemp("rows") / "r.jsonl", map(row, range(4))), sub_domains=None
    )


@pytest.fixture(scope="module")
def task(examples):
    return LongBenchTask(tuple(examples), "fixture", max_tokens=500, keep_ratios=(0.1, 0.5, 1.0))


@pytest.fixture(scope="module")
def prepared(task, model, plain):
    return task.prepare(model, plain, task.examples[:1])


@torch.no_grad()
def full_forward(model, before, prompt):
    """Log-likelihood of the four continuations, each in one plain forward over everything."""
    totals = []
    for choice in prompt.choices:
        log_probs = model(input_ids=torch.tensor([[*before, *choice]]), use_cache=False).logits[0].log_softmax(-1)
        totals.append(sum(float(log_probs[len(before) + i - 1, token]) for i, token in enumerate(choice)))
    return totals


def assert_scored_as(values, totals, right):
    assert values["nll_choice"] == pytest.approx(
        -float(torch.tensor(totals, dtype=torch.float64).log_softmax(0)[right]), abs=1e-6
    )
    assert values["accuracy"] == float(totals[right] == max(totals))


def test_the_prompt_reads_as_the_papers_and_both_copies_are_the_same_tokens(model, examples):
    tokenizer, example = with_opening(), next(e for e in examples if e.name == "id0")
    prompt = _prompt(example, tokenizer)
    start = tokenizer.decode(prompt.opening)
    assert tokenizer.decode(prompt.prefix) == (
        f"{start}Please read the following text and answer the question below.\n\n{example.context}"
    )
    assert tokenizer.decode(prompt.question) == (
        "\n\nWhat is the correct answer to this question: Which is small, 0?\n"
        "(A) the cat\n(B) a dog\n(C) a river and a tree\n(D) it\n\nThe correct answer is ("
    )
    assert [tokenizer.decode(choice) for choice in prompt.choices] == ["A)", "B)", "C)", "D)"]
    prepared = LongBenchTask((example,), "fixture", max_tokens=400).prepare(model, tokenizer, [example])
    ids, prefix = prepared.trace.input_ids[0].tolist(), prepared.prompt.prefix
    second = prepared.trace.supervision_start
    assert ids[: len(prefix)] == prefix
    assert ids[second:] == prefix[len(prompt.opening) :]
    assert tokenizer.decode(ids[len(prefix) : second]) == INSTRUCTION
    assert 397 <= len(ids) <= 400


def lengths(opening, lead, context, instruction, question, choice):
    return LongBenchPrompt(
        [1] * opening, [2] * lead, list(range(context)), [3] * instruction, [4] * question, [[5] * choice]
    )


def fitted(prompt, most):
    return cut_middle(prompt.context, prompt.room(most))


@given(st.integers(0, 1), st.integers(1, 8), st.integers(0, 90), st.integers(1, 40), st.integers(60, 120))
def test_the_context_keeps_the_longest_equal_head_and_tail_that_fit(opening, lead, context, question, most):
    instruction, choice = 12, 2
    prompt = lengths(opening, lead, context, instruction, question, choice)

    def fits(num_context):
        copies = opening + 2 * (lead + num_context) + instruction
        return max(copies, opening + lead + num_context + question + choice) <= most

    kept = fitted(prompt, most)
    if fits(context):
        assert kept == list(range(context))
    else:
        half = len(kept) // 2
        assert kept == [*range(half), *range(context - half, context)]
        assert fits(len(kept))
        assert not fits(len(kept) + 2)


def test_shortened_prefixes_have_as_many_tokens_as_the_budget():
    prompt = lengths(1, 10, 500, 20, 5, 2)
    assert [len(prompt.shortened(count)) for count in (511, 111, 110, 13, 11, 4)] == [511, 111, 109, 13, 11, 4]
    assert prompt.shortened(15) == [1, *[2] * 10, 0, 1, 498, 499]
    assert prompt.shortened(4) == [1, 2, 2, 2]


def test_every_baseline_equals_a_full_forward_of_the_same_ids(model, examples):
    tokenizer = with_opening()
    prepared = LongBenchTask(tuple(examples), "fixture", max_tokens=500).prepare(model, tokenizer, examples[:1])
    prompt, right = prepared.prompt, prepared.right
    assert len(_prompt(examples[0], tokenizer).context) > len(prompt.context)
    texts = {DENSE: prompt.prefix, NONE: prompt.opening}
    for keep in (0.02, 0.5):
        budget = slots_for(len(prompt.prefix), keep, None)
        texts[Baseline("truncated", keep)] = prompt.shortened(budget)
        assert budget - 1 <= len(prompt.shortened(budget)) <= budget
    for baseline, text in texts.items():
        (values,) = prepared.baseline(baseline)
        assert_scored_as(values, full_forward(model, [*text, *prompt.question], prompt), right)


def test_keeping_every_slot_scores_as_the_dense_cache(prepared):
    (steps,) = prepared.caches(GradientCompression(num_steps=2, activation_checkpointing=True), [1.0])
    caches = [cache for _, cache in steps]
    assert len(caches) == 3
    assert all(prepared.score(cache) == prepared.baseline(DENSE) for cache in caches)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 801}, "sequences of 801 tokens exceed the 800 positions of model 'tiny'"),
        ({"max_tokens": 150}, r"row 'id\d': prompt and question leave -\d+ of max_tokens=150 for the context"),
        ({"keep_ratios": (0.0,)}, r"keep ratio 0 is outside \(0, 1\]"),
    ],
)
def test_a_mistake_is_told_before_heavy_work(examples, model, plain, options, said):
    with pytest.raises(InputError, match=said):
        LongBenchTask(tuple(examples), "fixture", **{"max_tokens": 500, **options}).check("tiny", model, plain)
    with pytest.raises(InputError, match="model 'tiny' has no tokenizer"):
        LongBenchTask(tuple(examples), "fixture", max_tokens=500).check("tiny", model, None)


def test_the_order_depends_on_the_names_alone_and_questions_about_one_text_share_a_document(tmp_path):
    rows = [row(number) for number in range(5)] + [row(5, context=row(1)["context"])]
    source = written(tmp_path / "a.jsonl", rows)
    forward = longbench_examples(source, sub_domains=None)
    assert longbench_examples(written(tmp_path / "b.jsonl", rows[::-1]), sub_domains=None) == forward
    assert [example.name for example in forward] != [f"id{number}" for number in range(6)]
    assert len({example.document for example in forward}) == 5
    task = make_task(source, sub_domains=None, limit=3, max_tokens=400, keep_ratios=[0.2])
    assert (task.dataset, task.examples, task.max_tokens) == ("a.jsonl", tuple(forward[:3]), 400)
    assert [(b.name, b.keep_ratio) for b in task.baselines] == [
        ("dense", 1.0), ("no-context", 0.0), ("truncated", 0.2)
    ]  # fmt: skip


def test_sub_domains_choose_rows_of_every_domain(tmp_path):
    rows = [row(0), row(1), row(2), row(3), row(4, domain="Multi-Document QA")]
    source = written(tmp_path / "a.jsonl", rows)
    assert {e.name for e in longbench_examples(source)} == {"id0", "id1", "id3", "id4"}
    assert {e.name for e in longbench_examples(source, sub_domains=["Legal"])} == {"id0", "id4"}
    assert len(longbench_examples(source, sub_domains=None)) == 5
    if SAMPLE.is_file():
        assert {e.stratum for e in longbench_examples(str(SAMPLE))} == {"Academic", "Legal"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(0), {"_id": "x"}], "row 2 of .*a.jsonl has no text 'sub_domain'"),
        ([row(0), row(1, answer="E")], "row 2 of .*a.jsonl: answer 'E' is none of A, B, C, D"),
        ([row(0), row(1), row(0)], "row 3 of .*a.jsonl has the _id 'id0' of an earlier row"),
        ([row(2)], "a.jsonl has no row of sub-domain Academic, .*; it has Literary"),
        ([row(0, question="\ud83d")], "row 1 of .*a.jsonl: column 'question' is no valid Unicode"),
    ],
)
def test_a_mistake_in_the_data_is_one_clear_line(tmp_path, rows, said):
    with pytest.raises(InputError, match=said) as error:
        longbench_examples(written(tmp_path / "a.jsonl", rows))
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="no sub-domain 'Legl'; there are Academic"):
        longbench_examples("none.jsonl", sub_domains=["Legl"])


def test_known_log_likelihoods_of_choices_give_known_figures():
    equal = [choice_values(torch.full((4,), -7.0, dtype=torch.float64), right) for right in range(4)]
    assert [v["accuracy"] for v in equal] == [1.0, 0.0, 0.0, 0.0]  # of equally likely ones the first
    assert all(v["nll_choice"] == pytest.approx(math.log(4)) for v in equal)
    found = choice_values(torch.tensor([0.1, 0.2, 0.6, 0.1], dtype=torch.float64).log() - 30.0, 1)
    assert found["accuracy"] == 0.0
    assert found["nll_choice"] == pytest.approx(-math.log(0.2))
