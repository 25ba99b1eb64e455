import re
from collections import Counter

import pytest
from small_evaluations import with_opening

import kvcat
from kvcat.evals.evaluations.ruler import RULER_TASKS, Ruler, RulerTask
from kvcat.evals.task import manifest
from tiny import byte_tokenizer

SHORT = tuple(name for name in RULER_TASKS if name != "cwe")  # its list takes thousands of tokens


def small(tokenizer, length=440, **changes):
    return Ruler.task(tokenizer, length, **{"per_task": 2, "tasks": SHORT, **changes})


@pytest.fixture(scope="module")
def tokenizer():
    return kvcat.load("kvcat-base")[1]


@pytest.fixture(scope="module")
def task(tokenizer):
    return small(tokenizer)


def read_needles(text, question):
    keys = re.findall(r"[a-z]{6}-[a-z]{6}", question.partition("?")[0])
    pairs = re.findall(r"magic numbers for ([a-z]{6}-[a-z]{6}) is: (\d{7})\.", text)
    return {value for key, value in pairs if key in keys}


def read_variables(text, question):
    value = re.search(r"the value (\d{5})", question)[1]
    names = {value}
    for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", text):
        if source in names:
            names.add(name)
    return names - {value}


def read_common(text, question):
    words = re.findall(r"^\d+\. (\w+)$", text, flags=re.MULTILINE)
    return {
        word
        for word, _ in Counter(words).most_common(int(re.search(r"the (\d+) most", question)[1]))
    }


def read_frequent(text, question):
    words = text.partition("coded words.\n")[2].split()
    return {word for word, _ in Counter(word for word in words if word != "....").most_common(3)}


READERS = {name: read_needles for name in RULER_TASKS if name.startswith("niah")} | {
    "vt": read_variables,
    "cwe": read_common,
    "fwe": read_frequent,
}


@pytest.mark.parametrize("name", RULER_TASKS)
def test_a_reader_of_the_text_finds_the_answers_of(tokenizer, name):
    for example in small(tokenizer, tasks=(name,), length=4096 if name == "cwe" else 1500).examples:
        text = tokenizer.decode(example.context)
        question = tokenizer.decode(example.question)
        assert READERS[name](text, question) == set(example.references)
        assert tokenizer.decode(example.answer) == " " + ", ".join(example.references)
        assert (
            RulerTask.judge(tokenizer.decode(example.answer), example.references)["exact_match"]
            == 1.0
        )


@pytest.mark.parametrize(("length", "make"), [(880, byte_tokenizer), (1995, with_opening)])
def test_every_text_has_exactly_the_tokens_of_its_length(make, length):
    tokenizer = make()
    for example in small(tokenizer, length=length, per_task=1).examples:
        assert len(example.context) == length
        assert list(example.context[: len(tokenizer.encode(""))]) == tokenizer.encode("")


def test_texts_are_filled_with_whole_lines_depend_on_seed_task_and_number_alone_and_never_change(
    tokenizer, task
):
    for example in task.examples:
        text = tokenizer.decode(example.context)
        assert tokenizer.encode(text) == list(example.context)
        assert len(tokenizer.encode(re.split(r"Some special|Memorize and|Read the", text)[0])) < 80
    assert [example.stratum for example in task.examples] == list(SHORT) * 2
    assert small(tokenizer, per_task=1).examples == task.examples[: len(SHORT)]
    one = small(tokenizer, tasks=("vt",)).examples
    assert one == tuple(example for example in task.examples if example.stratum == "vt")
    other = small(tokenizer, data_seed=1)
    assert not {e.references for e in other.examples} & {e.references for e in task.examples}
    assert (
        manifest(task.examples)
        == "fbbc7290676429850e05c49c68798126634fae860865ddea224163958c569ffc"
    )
    words = Ruler.task(tokenizer, tasks=("cwe",), per_task=1)
    assert (
        manifest(words.examples)
        == "ba99317b3ce56fa5be9e4983c8483df9d503c04e81b3daef5c53637c664cb01b"
    )


@pytest.mark.parametrize(("answer", "share"), [("A, b and c", 1.0), ("a B", 2 / 3), ("x y z", 0.0)])
def test_a_match_is_the_share_of_references_that_the_answer_contains(answer, share):
    judged = RulerTask.judge(answer, ("a", "b", "c"))
    assert judged == {"string_match": pytest.approx(share), "exact_match": float(share == 1)}
