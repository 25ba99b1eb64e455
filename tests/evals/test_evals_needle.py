import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from test_evals_answers import with_opening

import kvcat
from kvcat.compress.documents import INSTRUCTION
from kvcat.errors import InputError
from kvcat.evals.needle import FILLER, QUERY, NeedleTask, draws, lines_with_decoys, make_task
from kvcat.evals.task import manifest
from tiny import byte_tokenizer, stock_model

QWEN = Path(__file__).parents[3] / "shared" / "assets" / "tokenizers" / "qwen2.5"
BASELINES = NeedleTask.baselines
DISTRACTOR = re.compile(r"candidate (\d{6})\.|The code (\d{6}) is a decoy")


@pytest.fixture(scope="module")
def base():
    return kvcat.load("kvcat-base")


@pytest.fixture(scope="module")
def tokenizer(base):
    return base[1]


@pytest.fixture(scope="module")
def paper(tokenizer):
    return make_task(tokenizer)


@pytest.fixture(scope="module")
def short(tokenizer):
    return make_task(tokenizer, length=300, per_depth=2)


def text_of(tokenizer, example):
    return tokenizer.decode(example.context)


def distractors(text):
    return [first or second for first, second in DISTRACTOR.findall(text)]


def test_the_paper_s_examples_are_twenty_at_each_of_five_depths_and_never_change(paper):
    strata = [example.stratum for example in paper.examples]
    assert {stratum: strata.count(stratum) for stratum in strata} == dict.fromkeys(
        ["0", "0.25", "0.5", "0.75", "1"], 20
    )
    assert len({example.document for example in paper.examples}) == 100
    assert manifest(paper.examples) == "c5df5c8be6f049acfad5dcd971180372f9682d980ff9d7f8cc85228e968dee8a"


@pytest.mark.parametrize(("length", "make"), [(120, byte_tokenizer), (301, with_opening)])
def test_every_haystack_has_exactly_the_tokens_asked_for_and_its_needle_at_its_depth(length, make):
    tokenizer = make()
    first = len(tokenizer.encode(""))
    for example in make_task(tokenizer, length=length, per_depth=2).examples:
        needle = [*example.question, *example.answer, *tokenizer.encode(".\n", add_special_tokens=False)]
        assert len(example.context) == length
        room = length - len(needle) - first
        start = first + round(float(example.stratum) * room)
        assert list(example.context[start : start + len(needle)]) == needle
        assert list(example.context[:first]) == tokenizer.encode("")


def test_the_passkey_stands_once_in_its_haystack_and_in_no_distractor(tokenizer, paper):
    for example in paper.examples:
        (passkey,) = example.references
        text = text_of(tokenizer, example)
        assert re.fullmatch(r"\d{6}", passkey)
        assert tokenizer.decode(example.answer) == passkey
        assert text.count(passkey) == text.count(f"{QUERY}{passkey}.\n") == 1
        assert passkey not in distractors(text)


def test_each_drawn_line_is_a_distractor_with_the_paper_s_probability(tokenizer, paper):
    drawn = []
    for example in paper.examples:  # the lines before and behind the needle that are cut are no draws
        parts = text_of(tokenizer, example).split(f"{QUERY}{example.references[0]}.\n")
        drawn += [line for part in parts for line in part.splitlines()[1:]]
    told = [line for line in drawn if DISTRACTOR.search(line)]
    assert all(line in FILLER for line in drawn if line not in told)
    assert len(told) / len(drawn) == pytest.approx(0.35, abs=4 * (0.35 * 0.65 / len(drawn)) ** 0.5)
    assert sum("decoy" in line for line in told) / len(told) == pytest.approx(0.5, abs=2 / len(told) ** 0.5)


def test_a_code_that_equals_the_passkey_is_drawn_again():
    def first(passkey):
        return distractors("".join(islice(lines_with_decoys(draws(0), passkey), 40)))

    plain = first("none")
    again = first(plain[3])
    assert plain[3] not in again
    assert again[:3] == plain[:3]


def test_passkeys_depend_on_seed_depth_and_number_alone(tokenizer, short):
    other = make_task(byte_tokenizer(), length=200, per_depth=3)
    passkeys = [example.references for example in short.examples]
    assert [example.references for example in other.examples][: len(passkeys)] == passkeys
    assert not set(passkeys) & {e.references for e in make_task(tokenizer, length=300, per_depth=2, seed=1).examples}


def test_qwen_s_tokens_are_those_of_the_text_read_as_a_whole():
    if not QWEN.is_dir():
        pytest.skip("no Qwen2.5 tokenizer here")
    from transformers import AutoTokenizer

    qwen = AutoTokenizer.from_pretrained(QWEN)
    task = make_task(qwen, per_depth=1)
    assert manifest(task.examples) == "fd5b42edf8426a5baf0a5ca8f324f6afe220af1fd0f777dbdad51526db6f1c7b"
    for example in task.examples:
        assert len(example.context) == 1024
        assert qwen.encode(text_of(qwen, example)) == list(example.context)


@pytest.fixture(scope="module")
def learned():
    """A model that has learned five haystacks' passkeys by heart, and these haystacks."""
    tokenizer = byte_tokenizer()
    task = make_task(tokenizer, length=130, per_depth=1)
    stop = tokenizer.encode(".")
    rows = torch.tensor([[*e.context, *e.question, *e.answer, *stop] for e in task.examples])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = stock_model(
            "llama", vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        logits = model(input_ids=rows).logits[:, -8:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, -7:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), tokenizer, task


def test_passkeys_that_a_model_knows_are_right_until_compression_loses_them(learned):
    model, tokenizer, task = learned
    batch = task.prepare(model, tokenizer, task.examples)
    dense, none = (batch.baseline(baseline) for baseline in BASELINES)
    assert set(dense[0]) == {
        "exact_match", "correct_prefix", "dense_exact_match", "dense_correct_prefix", "nll", "nll_dense", "delta_nll",
        "nll_none", "context_gain",
    }  # fmt: skip
    assert [(row["exact_match"], row["correct_prefix"]) for row in dense] == [(1.0, 1.0)] * 5
    assert sum(row["exact_match"] for row in none) <= 1.0
    assert max(row["nll"] for row in dense) < 0.1 < min(row["nll_none"] for row in dense)
    snapshots = kvcat.GradientCompression(num_steps=1).snapshots(batch.trace, keep_ratio=1.0)
    assert [batch.score(cache) for _, cache in snapshots] == [dense] * 2
    few = batch.score(kvcat.Eviction("first")(batch.trace, keep_ratio=0.02))
    assert sum(row["exact_match"] for row in few) < 5.0
    assert [row["dense_exact_match"] for row in few] == [1.0] * 5


@pytest.mark.parametrize(
    ("answer", "exact", "prefix"),
    [
        ("483920", 1.0, 1.0),
        (" 483920.\nThe", 1.0, 1.0),
        ("4839201", 0.0, 1.0),
        ("483921", 0.0, 5 / 6),
        ("48 3920", 0.0, 2 / 6),
        ("x483920", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_an_answer_is_right_where_its_digits_are_the_passkey(answer, exact, prefix):
    assert NeedleTask.judge(answer, ("483920",)) == {"exact_match": exact, "correct_prefix": pytest.approx(prefix)}


def test_a_haystack_too_short_and_numbers_out_of_range_are_refused(tokenizer):
    needle, instruction = f"{QUERY}483920.\n", INSTRUCTION
    least = len(tokenizer.encode(needle)) + len(tokenizer.encode(instruction))
    make_task(tokenizer, length=least, per_depth=1)
    with pytest.raises(InputError, match=f"a haystack of {least - 1} tokens is too short: .* take {least}"):
        make_task(tokenizer, length=least - 1, per_depth=1)
    for options in ({"length": 0}, {"per_depth": 0}):
        with pytest.raises(InputError, match=f"{next(iter(options))} is 0"):
            make_task(tokenizer, **options)
