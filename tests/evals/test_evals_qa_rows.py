"""Cloze questions from rows: prompts, schemas, names, samples and what is told about rows that are none."""

import json
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from kvcat.errors import InputError
from kvcat.evals import qa_rows
from kvcat.evals.qa_rows import QA_SOURCES, qa_files, read_examples, sample_examples

ASSETS = Path(__file__).parents[3] / "shared" / "assets" / "multiple_choice"
needs_assets = pytest.mark.skipif(not ASSETS.is_dir(), reason="the multiple-choice files are not here")
CHOICES = {"text": ["ice", "fire", "sand"], "label": ["A", "B", "C"]}
HELLASWAG = {
    "ind": 24, "activity_label": "Roof", "ctx_a": "A man [header] sits.", "ctx_b": "he", "label": "1",
    "ctx": "A man [header] sits. he", "endings": [" is using [step] wrap.", "rips [title] tiles.", "holds.", "starts."],
}  # fmt: skip
WINOGRANDE = {"sentence": "Ann beat Bob as _ was quick. ", "option1": "Ann", "option2": "Bob", "answer": "1"}
ROWS = {
    "hellaswag": HELLASWAG,
    "winogrande": WINOGRANDE,
    "piqa": {"goal": "Boil water.", "sol1": "Use a pot ", "sol2": "Use a hat", "label": 0},
    "social_i_qa": {
        "context": "Al fell.", "question": "How is Al?", "answerA": "sore", "answerB": "glad", "answerC": "rich",
        "label": "1",
    },
    "openbookqa": {"id": "7-980", "question_stem": "What is hot?", "choices": CHOICES, "answerKey": "B"},
    "arc_easy": {"id": "M1", "question": "What is hot?", "choices": CHOICES, "answerKey": "B"},
    "arc_challenge": {
        "id": "M2", "question": "What is hot?", "choices": {**CHOICES, "label": ["1", "2", "3"]}, "answerKey": "2",
    },
    "commonsense_qa": {"id": "c", "question": "What is hot?", "choices": CHOICES, "answerKey": "B"},
}  # fmt: skip


def write(folder, *rows, task="rows"):
    file = folder / f"{task}.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def read_one(folder, task, row, **options):
    (example,) = read_examples(task, write(folder, row), **options)
    return example


@pytest.mark.parametrize(
    ("task", "contexts", "texts", "gold"),
    [
        ("hellaswag", ["Roof: A man sits. He"] * 4, ["is using wrap.", "rips. tiles.", "holds.", "starts."], 1),
        ("winogrande", ["Ann beat Bob as Ann", "Ann beat Bob as Bob"], ["was quick."] * 2, 0),
        ("piqa", ["Question: Boil water.\nAnswer:"] * 2, ["Use a pot ", "Use a hat"], 0),
        ("social_i_qa", ["Al fell. How is Al?"] * 3, ["sore", "glad", "rich"], 0),
        ("openbookqa", ["What is hot?"] * 3, ["ice", "fire", "sand"], 1),
        ("arc_easy", ["Question: What is hot?\nAnswer:"] * 3, ["ice", "fire", "sand"], 1),
        ("arc_challenge", ["Question: What is hot?\nAnswer:"] * 3, ["ice", "fire", "sand"], 1),
        ("commonsense_qa", ["What is hot?"] * 3, ["ice", "fire", "sand"], 1),
    ],
)
def test_a_row_becomes_the_cloze_question_of_its_task(tmp_path, task, contexts, texts, gold):
    example = read_one(tmp_path, task, ROWS[task])
    assert (example.contexts, example.texts, example.gold) == (tuple(contexts), tuple(texts), gold)
    assert example.stratum == task
    assert example.document.startswith(f"{task}:")


def test_winogrande_as_a_whole_has_one_context_and_the_options_in_the_texts(tmp_path):
    example = read_one(tmp_path, "winogrande", WINOGRANDE, winogrande="whole")
    assert example.contexts == ("Ann beat Bob as",) * 2
    assert example.texts == ("Ann was quick.", "Bob was quick.")


@pytest.mark.parametrize("task", ["openbookqa", "arc_easy", "commonsense_qa"])
def test_the_authors_own_nested_schema_gives_the_same_question_as_the_hubs(tmp_path, task):
    pairs = [{"text": text, "label": label} for text, label in zip(CHOICES["text"], CHOICES["label"], strict=True)]
    row = ROWS[task]
    nested = {"id": row["id"], "question": {"stem": "What is hot?", "choices": pairs}, "answerKey": "B"}
    assert read_one(tmp_path, task, nested) == read_one(tmp_path, task, row)


def test_other_forms_in_the_wild_give_the_same_question(tmp_path):
    social = {key: value for key, value in ROWS["social_i_qa"].items() if key != "label"}
    assert read_one(tmp_path, "social_i_qa", {**social, "correct": "A"}) == read_one(
        tmp_path, "social_i_qa", ROWS["social_i_qa"]
    )
    joined = {key: value for key, value in HELLASWAG.items() if key not in ("ctx_a", "ctx_b")}
    clean = {
        **joined,
        "ctx": "A man sits. He",
        "label": 1,
        "endings": list(read_one(tmp_path, "hellaswag", HELLASWAG).texts),
    }
    assert read_one(tmp_path, "hellaswag", clean) == read_one(tmp_path, "hellaswag", HELLASWAG)


@pytest.mark.parametrize(
    ("task", "change", "told"),
    [
        ("piqa", {"sol2": None}, "it has no text 'sol2'"),
        ("piqa", {"label": -1}, "its 'label' is -1 and not one of 0, 1"),
        ("hellaswag", {"label": ""}, "its 'label' is '' and not one of 0, 1, 2, 3"),
        ("hellaswag", {"endings": "x"}, "it has no list 'endings'"),
        ("winogrande", {"sentence": "no blank"}, "its sentence has no blank '_' with text after it"),
        ("social_i_qa", {"answerB": "  "}, "it has no text 'answerB'"),
        ("openbookqa", {"choices": ["a"]}, "it has no 'choices' with 'text' and 'label'"),
        ("arc_easy", {"answerKey": "D"}, "its 'answerKey' is 'D' and not one of A, B, C"),
        ("arc_easy", {"choices": {"text": ["a"], "label": ["A"]}}, "its choices are not at least two texts"),
        ("commonsense_qa", {"choices": {"text": ["a", "b"], "label": ["A"]}}, "it has 2 choices and 1 labels"),
        ("commonsense_qa", {"id": None}, "it has no text 'id'"),
    ],
)
def test_a_row_that_is_none_is_told_with_file_and_number(tmp_path, task, change, told):
    first = ROWS[task] if task not in ("piqa",) else {**ROWS[task], "goal": "Another"}
    file = write(tmp_path, first, {**ROWS[task], **change})
    with pytest.raises(InputError) as error:
        read_examples(task, file)
    assert str(error.value) == f"{file}, row 2: {told}, so it is no row of {task}"


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], " holds no row"),
        (["\n"], " holds no row"),
        ([ROWS["arc_easy"], "{oops"], ", row 2: not a line of JSON"),
        (["[1]"], ", row 1: not a JSON object"),
        ([ROWS["arc_easy"], ROWS["arc_easy"]], ", row 2: id 'M1' is that of row 1 too"),
    ],
)
def test_a_file_that_cannot_serve_is_told_in_one_line(tmp_path, rows, told):
    file = write(tmp_path, *rows)
    with pytest.raises(InputError) as error:
        read_examples("arc_easy", file)
    assert str(error.value) == f"{file}{told}"


def test_what_does_not_exist_is_told(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_examples("piqa", tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="no QA task 'boolq'; there are hellaswag"):
        read_examples("boolq")
    with pytest.raises(InputError, match="winogrande is 'half'"):
        read_examples("winogrande", winogrande="half")


def test_equal_rows_without_an_id_stay_and_twins_share_a_document(tmp_path):
    twin = {**WINOGRANDE, "sentence": "Ann lost to Bob as _ was slow.", "option1": "Bob", "option2": "Ann"}
    first, second, copy = read_examples("winogrande", write(tmp_path, WINOGRANDE, twin, WINOGRANDE))
    assert first.document == second.document == copy.document
    assert len({first.name, second.name, copy.name}) == 3
    assert copy.name == f"{first.name}-2"


def test_the_sample_depends_on_seed_and_names_only(tmp_path):
    rows = [{**ROWS["arc_easy"], "id": f"M{number}"} for number in range(40)]
    examples = read_examples("arc_easy", write(tmp_path, *rows))
    drawn = sample_examples(examples, 10)
    assert sample_examples(examples[::-1], 10) == drawn
    assert sample_examples(examples, 20)[:10] == drawn
    assert sample_examples(examples, 10, seed=1) != drawn
    assert len(sample_examples(examples, 1000)) == 40
    assert [example.name for example in drawn[:4]] == ["M33", "M30", "M11", "M17"]  # the same on every machine
    with pytest.raises(InputError, match="num_examples is 0"):
        sample_examples(examples, 0)


def test_a_folders_files_are_found_by_the_tasks_names(tmp_path):
    for name in ("piqa_validation_hf", "arc_easy"):
        write(tmp_path, ROWS["piqa"], task=name)
    assert qa_files(tmp_path) == {name: tmp_path / f"{file}.jsonl" for name, file in
                                  [("piqa", "piqa_validation_hf"), ("arc_easy", "arc_easy")]}  # fmt: skip
    assert list(qa_files(tmp_path, ["arc_easy"])) == ["arc_easy"]
    with pytest.raises(InputError, match=r"has no file hellaswag\*\.jsonl"):
        qa_files(tmp_path, ["hellaswag"])
    write(tmp_path, ROWS["piqa"], task="piqa_test")
    with pytest.raises(InputError, match=r"two files of piqa: piqa_test\.jsonl and piqa_validation_hf\.jsonl"):
        qa_files(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no file of a QA task"):
        qa_files(tmp_path / "empty")


def test_without_a_network_the_hub_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="'baber/piqa' is on the Hub, and HF_HUB_OFFLINE is set"):
        read_examples("piqa")


def test_the_hubs_rows_give_the_same_questions_as_a_files(tmp_path, monkeypatch):
    asked = []

    def load_dataset(repository, config, split):
        asked.append((repository, config, split))
        return datasets.Dataset.from_list([ROWS["arc_challenge"]])

    monkeypatch.setattr(qa_rows, "hub_obstacle", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_examples("arc_challenge") == [read_one(tmp_path, "arc_challenge", ROWS["arc_challenge"])]
    assert asked == [("allenai/ai2_arc", "ARC-Challenge", "test")]


def test_only_arc_comes_from_the_test_split():
    assert {task for task, source in QA_SOURCES.items() if source.split == "test"} == {"arc_easy", "arc_challenge"}


@needs_assets
@pytest.mark.parametrize(("task", "count"), [
    ("hellaswag", 1000), ("winogrande", 1267), ("piqa", 1838), ("social_i_qa", 1954), ("openbookqa", 500),
    ("arc_easy", 570), ("arc_challenge", 299), ("commonsense_qa", 1221),
])  # fmt: skip
def test_every_real_row_is_a_question_with_a_name_of_its_own(task, count):
    examples = read_examples(task, qa_files(ASSETS)[task])
    assert len(examples) == len({example.name for example in examples}) == count
    assert len(sample_examples(examples, 1000)) == min(count, 1000)
    assert all("[" not in text for example in examples for text in example.texts if task == "hellaswag")
