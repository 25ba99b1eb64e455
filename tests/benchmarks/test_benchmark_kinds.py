"""Questions of many kinds: which answers are right, and what a document holds."""

import random
import re

import pandas as pd
import pytest
import question_set
from kinds import ALL_KINDS, COMPLETION, HALVES, KINDS, NAMES, Asked, Draw, completion, spread
from leaderboard import with_tables
from question_set import TextDocument
from windows import Window

from tiny import loud_model
from tokenizers_zoo import byte_level

SENTENCES = [f"Sentence {number} is about Mr. Harbour and his ships." for number in range(90)]


def asked(*wanted, unwanted=(), rule="sentence"):
    return Asked("kind", "question?", "begun", wanted, unwanted, rule)


@pytest.mark.parametrize(
    ("question", "answer", "is_right"),
    [
        (asked(("48213",)), " 48213. The number of Peter is 77777.", True),
        (asked(("48213",)), " 482135.", False),
        (asked(("48213",)), " 48,213", True),
        (asked(("48213",)), " 48\u202f213", True),
        (asked(("48213",)), " 11111. It is 48213.", False),  # in the second sentence
        (asked(("Anna",)), "\nANNA, of course", True),
        (asked(("Anna",)), " Annabel.", False),
        (asked(("bread", "loaf")), " the loaf", True),
        (asked(("apples",), ("salt",)), " salt and apples.", True),
        (asked(("apples",), ("salt",)), " apples.", False),
        (asked(("7",), unwanted=("5",)), " seven o'clock, no longer five.", False),
        (asked(("7",), unwanted=("5",)), " seven o'clock.", True),
        (asked(("42",)), " forty-two windows", True),
        (asked(("42",)), " forty two", True),
        (asked(("42",)), " forty. Two", False),
        (asked(("7 August", "August 7")), " the 7th of the month", False),
        (asked(("7 August", "August 7")), " August 7th, 1931", True),
        (asked(("Andr\u00e9",)), " Andre.", True),
        (asked(("London",), rule="first"), " London. Then", True),
        (asked(("London",), rule="first"), " the London road", True),  # articles do not count
        (asked(("London",), rule="first"), " in London", False),
        (asked(("f Anna Corvo",), rule="anywhere"), "\n\n`f('Anna', \"Corvo\")`", True),
        (asked(("f Anna Corvo",), rule="anywhere"), "f(Corvo, Anna)", False),
        (asked(rule="refusal"), "The text does not say it.", True),
        (asked(rule="refusal"), "not stated", True),
        (asked(rule="refusal"), "It is not stated, but it is 48213.", False),
        (asked(rule="refusal"), "It is stated.", False),
    ],
)
def test_an_answer_is_judged_by_its_words(question, answer, is_right):
    assert question.is_right(answer) is is_right


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"absent", "instruction", "count"}))
def test_the_lines_of_a_fact_hold_its_right_answer_and_those_of_another_do_not(kind):
    lines, question = KINDS[kind](Draw(random.Random(1), "held-out"))
    made = (KINDS[kind](Draw(random.Random(seed), "held-out")) for seed in range(2, 99))
    others = next(lines for lines, other in made if other.wanted != question.wanted)
    said = " ".join(lines[-1:] if kind == "changed value" else lines)
    said = re.sub(r"[.\n]", ",", said)
    if kind in ("near miss", "function call"):
        said = " ".join(wordings[0] for wordings in question.wanted)
    assert question.is_right(said)
    assert not question.is_right(" ".join(others).replace(".", ","))
    assert Asked.of(
        {**vars(question), "wanted": [list(wordings) for wordings in question.wanted]}
    ) == (question)


def test_a_count_is_that_of_the_lines_and_what_is_absent_is_in_no_line():
    lines, question = KINDS["count"](Draw(random.Random(1), "held-out"))
    assert question.is_right(f"{len(lines)}")
    assert not question.is_right(f"{len(lines) + 1}")
    assert len(set(lines)) == len(lines)
    assert KINDS["absent"](Draw(random.Random(1), "held-out"))[0] == []


def test_a_completion_is_a_name_or_number_that_its_sentence_has_not_named():
    draw = Draw(random.Random(0), "held-out")
    (word,) = completion(draw, SENTENCES[:1]).wanted[0]
    assert word == "Harbour"
    assert completion(draw, ["he went away and never came back to us again"]) is None
    assert completion(draw, ["London is large, and all of us like London most"]) is None


def test_lines_are_at_even_depths_and_those_of_a_fact_in_their_order():
    facts = [["a1", "a2", "a3"], ["b"], [], ["c1", "c2"]]
    text = spread(random.Random(3), facts, [str(number) for number in range(60)])
    assert [word for word in text if word.isdigit()] == [str(number) for number in range(60)]
    lines = [word for word in text if not word.isdigit()]
    assert sorted(lines) == ["a1", "a2", "a3", "b", "c1", "c2"]
    assert [line for line in lines if line[0] == "a"] == ["a1", "a2", "a3"]
    depths = [text.index(line) - rank for rank, line in enumerate(lines)]
    assert depths == [5, 15, 25, 35, 45, 55]


def document(index, half="held-out"):
    tokenizer = byte_level()
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    window = Window("prose", "prose:x", 0, " ".join(SENTENCES))
    model = loud_model(vocab_size=310, max_position_embeddings=4096)
    return TextDocument(model, tokenizer, "prose", 1000, "1", index, window, half)


def test_documents_are_the_same_again_take_all_kinds_in_turns_and_fit():
    kinds = []
    for index in range(5):
        made = document(index)
        assert made.ids == document(index).ids
        assert 900 < len(made.ids) <= 1000
        assert made.asked == document(index).asked
        text = made.tokenizer.decode(made.ids)
        for question in made.made[1]:
            kinds.append(question.kind)
            for wordings in question.wanted:
                if question.kind not in ("count", "function call", "date"):
                    assert any(wording in text for wording in wordings), question
    missing = set(ALL_KINDS) - set(kinds)
    assert not missing - {COMPLETION}


def test_without_a_chat_template_document_question_and_answer_are_plain_text():
    made = document(0)
    made.tokenizer.chat_template = question_set.PLAIN_TEMPLATE
    text = made.tokenizer.bos_token + " ".join(made.made[0])
    assert made.tokenizer.decode(made.ids) == text
    asked = made.made[1][0]
    begun = made.tokenizer.decode(made.begun(asked))
    assert begun == f"\n\n{asked.question}\nAnswer: {asked.begun}"


def test_halves_share_no_person():
    texts = {
        half: " ".join(
            document(index, half).tokenizer.decode(document(index, half).ids) for index in range(4)
        )
        for half in HALVES
    }
    persons = [
        {name for name in NAMES if re.search(rf"\b{name}\b", texts[half])} for half in HALVES
    ]
    assert all(persons)
    assert not persons[0] & persons[1]


def test_a_repetition_as_the_answer_begins_after_the_turn_of_the_assistant():
    made = document(0)
    traced = made.traced("answer")
    assert traced.prefix_len == len(made.ids)
    body = made.ids[len(made.head) :]
    assert traced.input_ids[0, -len(body) :].tolist() == body
    between = made.tokenizer.decode(traced.input_ids[0, len(made.ids) : -len(body)])
    assert between.endswith("</s><s>assistant\n")


def test_the_page_has_the_tables_that_its_records_give():
    page = question_set.PAGE.read_text(encoding="utf-8")
    assert with_tables(page, {"kinds": question_set.page_table()}) == page


def test_a_size_of_one_method_that_is_not_the_first_is_in_the_table_by_bytes_alone():
    first, in_4_bits = (
        "attention-matching@reconstruction",
        "attention-matching,bits=4@reconstruction",
    )
    cells = [("dense", 1.0), ("no document", 0.0), (first, 0.1), (in_4_bits, 0.1), (in_4_bits, 0.2)]
    rows = [
        {"document": f"held-out-600-1-{document}", "condition": name, "keep": keep}
        | {"kind": "phone", "question": 0, "right": float(name != "no document")}
        for document in range(4)
        for name, keep in cells
    ]
    marks = question_set.marks_of(pd.DataFrame(rows))
    by_condition = "\n".join(question_set._by_condition(marks))
    assert "| slots kept | 10 % |\n" in by_condition
    by_bytes = "\n".join(question_set._by_bytes(marks, 600))
    assert by_bytes.count("4 bits, 10 % of the slots") == 1
    assert by_bytes.count("4 bits, 20 % of the slots") == 1


SHOWN = ("600", "2,000")  # tokens of the documents in the README


def test_the_readme_calls_a_difference_to_kvzip_chance_only_where_the_table_does():
    page = question_set.PAGE.read_text(encoding="utf-8").split("<!-- table kinds -->")[1]
    by_length = re.split(r"documents of ([\d,]+) tokens\*\*", page)
    page = "".join(by_length[place + 1] for place, text in enumerate(by_length) if text in SHOWN)
    readme = (question_set.PAGE.parent.parent / "README.md").read_text(encoding="utf-8")
    prose = " ".join(readme.split()).split("Asked questions of many kinds")[1]

    def rows(name):
        """A row for each model: its cells at 20, 10 and 5 % of the slots."""
        lines = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", page, re.MULTILINE)
        return [line.split("|")[2::-1] for line in lines]

    theirs = rows("KVzip (kvpress)")
    said = re.findall(r"\(KVzip (\d+), (\d+) and (\d+)\)", prose)
    assert "Each time only the difference at a fifth may be chance." in prose
    assert [[cell.split("; ")[1].strip() for cell in row] for row in theirs] == list(
        map(list, said)
    )
    assert [["\u2020" in cell for cell in row] for row in theirs] == [[True, False, False]] * 4
    for cell in (cell for row in rows("kvcat, the default") for cell in row):
        assert re.search(rf"\b{cell.split('; ')[1].strip()}\b", prose)
