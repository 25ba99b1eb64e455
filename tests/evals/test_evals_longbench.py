import json
import math

import pytest
import torch
from small_evaluations import tiny, with_opening

from kvcat.compress import INSTRUCTION, GradientCompression, slots_for
from kvcat.evals.evaluations.longbench import (
    LongBench,
    LongBenchTask,
    choice_values,
    cut_middle,
    make_prompt,
)
from kvcat.evals.task import Baseline
from tiny import byte_tokenizer, sentences

NAMES = ["Legal", "Table QA", "Literary", "Academic"]
ALL = ["all"]
DENSE = Baseline("dense", 1.0)
NONE = Baseline("no-context", 0.0)


def row(number=0, **changes):
    return {
        "_id": f"id{number}",
        "domain": "Single-Document QA",
        "sub_domain": NAMES[number % 4],
        "difficulty": "easy",
        "length": "short",
        "question": f" Which is small, {number}?\n",
        "choice_A": "the cat",
        "choice_B": "a dog",
        "choice_C": "a river and a tree",
        "choice_D": "it",
        "answer": "ABCD"[number % 4],
        "context": "\n" + "".join(sentences(30 + number, seed=number)),
        **changes,
    }


def examples_of(folder, rows, domains=ALL, **options):
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return LongBench.task(
        None, data=str(folder / "a.jsonl"), sub_domain=domains, **options
    ).examples


@pytest.fixture(scope="module")
def model():
    return tiny(
        0, vocab_size=302, hidden_size=32, max_position_embeddings=800, initializer_range=0.3
    ).double()


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    return examples_of(tmp_path_factory.mktemp("rows"), map(row, range(4)))


def prepared(model, tokenizer, examples, max_tokens=500):
    return LongBenchTask(examples, "fixture", max_tokens).prepare(model, tokenizer, examples[:1])


def test_the_prompt_reads_as_the_papers_and_both_copies_are_the_same_tokens(model, examples):
    tokenizer = with_opening()
    example = min(examples, key=lambda e: e.name)
    prompt = make_prompt(example, tokenizer, 10_000)
    assert tokenizer.decode(prompt.context) == (
        f"<eos>Please read the following text and answer the question below.\n\n{example.context}"
    )
    assert tokenizer.decode(prompt.question) == (
        "\n\nWhat is the correct answer to this question: Which is small, 0?\n"
        "(A) the cat\n(B) a dog\n(C) a river and a tree\n(D) it\n\nThe correct answer is ("
    )
    assert [tokenizer.decode(choice) for choice in prompt.choices] == ["A)", "B)", "C)", "D)"]
    batch = prepared(model, tokenizer, (example,), 400)
    ids = batch.trace.input_ids[0].tolist()
    context = batch.batch[0].context
    second = batch.trace.text.supervision_start
    assert ids[: len(context)] == context
    assert ids[second:] == context[1:]
    assert tokenizer.decode(ids[len(context) : second]) == INSTRUCTION
    assert 397 <= len(ids) <= 400


@pytest.mark.parametrize("make", [byte_tokenizer, with_opening])
def test_the_context_keeps_the_longest_equal_head_and_tail_that_fit(examples, make):
    tokenizer = make()
    whole = make_prompt(examples[0], tokenizer, 10_000)
    opening = len(tokenizer.encode(""))
    instruction = len(tokenizer.encode(INSTRUCTION, add_special_tokens=False))
    asked = len(whole.question) + len(whole.choices[0])
    for most in (*range(200, 300, 9), 5_000):
        prompt = make_prompt(examples[0], tokenizer, most)
        text, kept = (p.context[p.lead_len :] for p in (whole, prompt))
        sizes = [len(prompt.context) + spare_tokens for spare_tokens in (0, 2)]
        least, next_one = (max(2 * size - opening + instruction, size + asked) for size in sizes)
        assert least <= most
        half = len(kept) // 2
        assert kept == text or (kept == [*text[:half], *text[-half:]] and next_one > most)
    assert kept == text


def test_shortened_contexts_have_as_many_tokens_as_the_budget(examples):
    prompt = make_prompt(examples[0], byte_tokenizer(), 500)
    lead = prompt.context[: prompt.lead_len]
    text = prompt.context[prompt.lead_len :]
    for count in (1, len(lead) - 1, len(lead), len(lead) + 4):
        assert len(prompt.shortened(count)) == count
    assert prompt.shortened(len(lead) + 4) == [*lead, *text[:2], *text[-2:]]
    assert cut_middle([1, 2, 3, 4, 5], 3) == [1, 5]


@torch.no_grad()
def full_forward(model, before, prompt):
    """Log-likelihood of the four continuations, each in one plain forward over everything."""
    totals = []
    for choice in prompt.choices:
        log_probs = (
            model(input_ids=torch.tensor([[*before, *choice]]), use_cache=False)
            .logits[0]
            .log_softmax(-1)
        )
        totals.append(
            sum(float(log_probs[len(before) + i - 1, token]) for i, token in enumerate(choice))
        )
    return totals


def test_every_baseline_equals_a_full_forward_of_the_same_ids_and_all_slots_the_dense_one(
    model, examples
):
    batch = prepared(model, with_opening(), examples)
    prompt = batch.batch[0]
    dense = batch.baseline(DENSE)[0]
    texts = {DENSE: prompt.context, NONE: [0]}
    for keep in (0.02, 0.5):
        texts[Baseline("truncated", keep)] = prompt.shortened(
            slots_for(len(prompt.context), keep, None)
        )
    compressor = GradientCompression(num_steps=1, activation_checkpointing=True)
    for _, cache in compressor.snapshots(batch.trace, keep_ratio=1.0):
        assert batch.score(cache) == [dense]
    for baseline, text in texts.items():
        (values,) = batch.baseline(baseline)
        totals = full_forward(model, [*text, *prompt.question], prompt)
        nll = -float(torch.tensor(totals, dtype=torch.float64).log_softmax(0)[prompt.right])
        assert values["nll_choice"] == pytest.approx(nll, abs=1e-6)
        assert values["accuracy"] == float(totals[prompt.right] == max(totals))
        assert values["dense_nll_choice"] == dense["nll_choice"]


def test_the_order_depends_on_the_names_alone_and_questions_about_one_text_share_a_document(
    tmp_path,
):
    rows = [row(number) for number in range(5)] + [row(5, context=row(1)["context"])]
    forward = examples_of(tmp_path, rows)
    assert examples_of(tmp_path, rows[::-1]) == forward
    assert [example.name for example in forward] != [f"id{number}" for number in range(6)]
    assert len({example.document for example in forward}) == 5
    assert (
        examples_of(tmp_path, rows, ["Legal"], limit=3)
        == tuple(e for e in forward if e.stratum == "Legal")[:3]
    )
    task = LongBench.task(None, data=str(tmp_path / "a.jsonl"), max_tokens=400, keep=[0.2])
    assert (task.dataset, task.max_tokens) == ("a.jsonl", 400)
    assert {example.stratum for example in task.examples} == {
        "Legal",
        "Table QA",
        "Academic",
    }  # of the paper's seven
    assert task.baselines == (DENSE, NONE, Baseline("truncated", 0.2))


def test_known_log_likelihoods_of_choices_give_known_figures():
    equal = [
        choice_values(torch.full((4,), -7.0, dtype=torch.float64), right) for right in range(4)
    ]
    assert [v["accuracy"] for v in equal] == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]  # of equally likely ones the first
    assert all(v["nll_choice"] == pytest.approx(math.log(4)) for v in equal)
    values = choice_values(torch.tensor([0.1, 0.2, 0.6, 0.1], dtype=torch.float64).log() - 30.0, 1)
    assert (values["accuracy"], values["nll_choice"]) == (0.0, pytest.approx(-math.log(0.2)))


def test_a_text_that_two_sub_domains_ask_about_is_a_document_in_each(tmp_path):
    rows = [row(i, context="the same text", sub_domain=NAMES[i // 2]) for i in range(3)]
    placed = {e.name: (e.stratum, e.document) for e in examples_of(tmp_path, rows)}
    assert placed["id0"] == placed["id1"]
    assert placed["id0"][1] != placed["id2"][1]
