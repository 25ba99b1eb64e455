import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from small_evaluations import with_opening

import kvcat
from kvcat.compress.documents import INSTRUCTION
from kvcat.evals.evaluations.needle import QUERY, Needle, NeedleTask, lines_with_decoys
from kvcat.evals.haystacks import draws
from kvcat.evals.task import manifest
from tiny import byte_tokenizer, refusal

QWEN = Path(__file__).parents[3] / "shared" / "assets" / "tokenizers" / "qwen2.5"
DISTRACTOR = re.compile(r"candidate (\d{6})\.|The code (\d{6}) is a decoy")


@pytest.fixture(scope="module")
def tokenizer():
    return kvcat.load("kvcat-base")[1]


@pytest.fixture(scope="module")
def paper(tokenizer):
    return Needle.task(tokenizer)


def distractors(text):
    return [first or second for first, second in DISTRACTOR.findall(text)]


def test_the_paper_s_examples_are_twenty_at_each_of_five_depths_and_never_change(paper):
    strata = [example.stratum for example in paper.examples]
    assert Counter(strata) == dict.fromkeys(["0", "0.25", "0.5", "0.75", "1"], 20)
    assert len({example.document for example in paper.examples}) == 100
    assert (
        manifest(paper.examples)
        == "c5df5c8be6f049acfad5dcd971180372f9682d980ff9d7f8cc85228e968dee8a"
    )


@pytest.mark.parametrize(("length", "make"), [(120, byte_tokenizer), (301, with_opening)])
def test_every_haystack_has_exactly_the_requested_tokens_and_its_needle_at_its_depth(length, make):
    tokenizer = make()
    first = len(tokenizer.encode(""))
    for example in Needle.task(tokenizer, length=length, per_depth=2).examples:
        needle = [
            *example.question,
            *example.answer,
            *tokenizer.encode(".\n", add_special_tokens=False),
        ]
        assert len(example.context) == length
        room = length - len(needle) - first
        start = first + round(float(example.stratum) * room)
        assert list(example.context[start : start + len(needle)]) == needle
        assert list(example.context[:first]) == tokenizer.encode("")


def test_the_passkey_occurs_once_in_its_haystack_and_a_distractor_equal_to_it_is_redrawn(
    tokenizer, paper
):
    for example in paper.examples:
        (passkey,) = example.references
        text = tokenizer.decode(example.context)
        assert re.fullmatch(r"\d{6}", passkey)
        assert tokenizer.decode(example.answer) == passkey
        assert text.count(passkey) == text.count(f"{QUERY}{passkey}.\n") == 1
        assert passkey not in distractors(text)

    def first(passkey):
        return distractors("".join(islice(lines_with_decoys(draws(0), passkey), 40)))

    plain = first("none")
    again = first(plain[3])
    assert plain[3] not in again
    assert again[:3] == plain[:3]


def test_passkeys_depend_on_seed_depth_and_number_alone(tokenizer):
    def passkeys(encoder=tokenizer, **settings):
        return [
            q.references
            for q in Needle.task(encoder, **{"length": 300, "per_depth": 2, **settings}).examples
        ]

    assert passkeys(byte_tokenizer(), length=200, per_depth=3)[:10] == passkeys()
    assert not set(passkeys()) & set(passkeys(data_seed=1))


def test_qwen_s_tokens_are_those_of_the_text_read_as_a_whole():
    if not QWEN.is_dir():
        pytest.skip("no Qwen2.5 tokenizer here")
    from transformers import AutoTokenizer

    qwen = AutoTokenizer.from_pretrained(QWEN)
    task = Needle.task(qwen, per_depth=1)
    assert (
        manifest(task.examples)
        == "fd5b42edf8426a5baf0a5ca8f324f6afe220af1fd0f777dbdad51526db6f1c7b"
    )
    for example in task.examples:
        assert len(example.context) == 1024
        assert qwen.encode(qwen.decode(example.context)) == list(example.context)


@pytest.mark.parametrize(
    ("answer", "exact", "prefix"),
    [
        ("483920", 1.0, 1.0),
        (" 483920.\nThe", 1.0, 1.0),
        ("4839201", 0.0, 1.0),
        ("48 3920", 0.0, 2 / 6),
        ("x483920", 0.0, 0.0),
    ],
)
def test_an_answer_is_right_where_its_digits_are_the_passkey(answer, exact, prefix):
    assert NeedleTask.judge(answer, ("483920",)) == {
        "exact_match": exact,
        "correct_prefix": pytest.approx(prefix),
    }


def test_the_shortest_haystack_holds_needle_and_instruction(tokenizer):
    least = len(tokenizer.encode(f"{QUERY}483920.\n")) + len(tokenizer.encode(INSTRUCTION))
    Needle.task(tokenizer, length=least, per_depth=1)
    message = refusal(Needle.task, tokenizer, length=least - 1, per_depth=1)
    assert message.endswith(f"need {least}")
