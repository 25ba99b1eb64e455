import json
import os
import subprocess
import sys

import pyarrow as pa
import pytest
from longbench_files import SAMPLE, row, written
from pyarrow import parquet

from kvcat.errors import InputError
from kvcat.evals.longbench_rows import PAPER_SUB_DOMAINS, SUB_DOMAINS, longbench_examples


def test_json_lines_a_json_array_and_parquet_give_the_same_examples(tmp_path):
    rows = [row(number) for number in range(6)]
    lines = longbench_examples(written(tmp_path / "a.jsonl", rows), sub_domains=None)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert len(lines) == 6
    assert longbench_examples(str(tmp_path / "a.json"), sub_domains=None) == lines
    assert longbench_examples(str(tmp_path / "a.parquet"), sub_domains=None) == lines


def test_the_order_depends_on_the_names_alone(tmp_path):
    rows = [row(number) for number in range(6)]
    forward = longbench_examples(written(tmp_path / "a.jsonl", rows), sub_domains=None)
    assert longbench_examples(written(tmp_path / "b.jsonl", rows[::-1]), sub_domains=None) == forward
    assert [example.name for example in forward] != [f"id{number}" for number in range(6)]


def test_questions_about_one_text_share_a_document(tmp_path):
    rows = [row(0), row(1), row(2, context=row(1)["context"])]
    found = {e.name: e.document for e in longbench_examples(written(tmp_path / "a.jsonl", rows), sub_domains=None)}
    assert found["id1"] == found["id2"] != found["id0"]


def test_the_papers_seven_sub_domains_are_221_rows_of_503():
    assert sum(SUB_DOMAINS.values()) == 503
    assert sum(SUB_DOMAINS[name] for name in PAPER_SUB_DOMAINS) == 221
    assert [SUB_DOMAINS[name] for name in PAPER_SUB_DOMAINS] == [94, 20, 15, 33, 21, 20, 18]


def test_sub_domains_choose_rows_of_every_domain(tmp_path):
    rows = [row(0), row(1), row(2), row(3), row(4, domain="Multi-Document QA")]
    source = written(tmp_path / "a.jsonl", rows)
    assert {e.name for e in longbench_examples(source)} == {"id0", "id1", "id3", "id4"}
    assert {e.name for e in longbench_examples(source, sub_domains=["Legal"])} == {"id0", "id4"}
    assert len(longbench_examples(source, sub_domains=None)) == 5


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "holds no row"),
        ([row(0), {"_id": "x"}], r"row 1 of .*a.jsonl has no column 'domain'; its columns: _id$"),
        ([row(0, question=7)], "row 0 of .*a.jsonl: column 'question' holds int, not text"),
        ([row(0, choice_D=" ")], "row 0 of .*a.jsonl: column 'choice_D' is empty"),
        ([row(0), row(1, answer="E")], "row 1 of .*a.jsonl: answer 'E' is none of A, B, C, D"),
        ([row(0), row(1, answer="")], "row 1 of .*a.jsonl: answer '' is none of"),
        ([row(0), row(1), row(0)], "rows 0 and 2 of .*a.jsonl share the _id 'id0'"),
        ([row(0, context="too short")], "row 0 of .*a.jsonl: its context of 9 characters is shorter than the instr"),
        ([row(2)], "a.jsonl has no row of sub-domain Academic, .*; it has Literary"),
        ([row(0, question="\ud83d")], "row 0 of .*a.jsonl: column 'question' is no valid Unicode: surrogates"),
        ([["a"]], "row 0 of .*a.jsonl is no JSON object"),
    ],
)
def test_a_mistake_in_the_data_is_one_clear_line(tmp_path, rows, said):
    with pytest.raises(InputError, match=said) as error:
        longbench_examples(written(tmp_path / "a.jsonl", rows))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", json.dumps(row(0)) + "\n{torn", "row 1 of .*a.jsonl is not JSON"),
        ("a.json", "[{", "a.json cannot be read: JSONDecodeError"),
        ("a.parquet", "no parquet", "a.parquet cannot be read: ArrowInvalid"),
        ("a.jsonl", b"\xff\xfe\n", "a.jsonl cannot be read: UnicodeDecodeError"),
    ],
)
def test_a_damaged_file_is_one_clear_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=said) as error:
        longbench_examples(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_a_missing_file_and_an_unknown_sub_domain_are_named(tmp_path):
    with pytest.raises(InputError, match=r"no such LongBench v2 file: .*none.jsonl"):
        longbench_examples(str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="no sub-domain 'Legl'; there are Academic"):
        longbench_examples(str(tmp_path / "none.jsonl"), sub_domains=["Legl"])


def test_without_a_way_to_the_hub_the_run_ends_at_once(monkeypatch):
    monkeypatch.setattr("kvcat.evals.longbench_rows.hub_obstacle", lambda: "huggingface.co cannot be reached")
    with pytest.raises(InputError, match=r"zai-org/LongBench-v2' is on the Hub, and huggingface.co cannot be reached"):
        longbench_examples()


@pytest.mark.slow
def test_offline_a_data_set_that_is_not_in_the_cache_is_named_at_once(tmp_path):
    code = "from kvcat.evals.longbench_rows import longbench_examples as e; e('hub:nobody/nothing')"
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=60)
    assert "InputError: data set 'nobody/nothing' cannot be opened" in done.stderr


def test_the_rows_of_the_hub_are_those_of_its_split(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return [row(0), row(1)]

    monkeypatch.setattr("kvcat.evals.longbench_rows.hub_obstacle", lambda: None)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert {e.name for e in longbench_examples()} == {"id0", "id1"}
    assert {e.name for e in longbench_examples("hub:me/mine@test")} == {"id0", "id1"}
    assert asked == [("zai-org/LongBench-v2", "train"), ("me/mine", "test")]


@pytest.mark.skipif(not SAMPLE.is_file(), reason="no LongBench v2 sample in ../shared/assets")
def test_real_rows_are_read_by_sub_domain():
    assert len(longbench_examples(str(SAMPLE), sub_domains=None)) == 20
    assert {e.stratum for e in longbench_examples(str(SAMPLE))} == {"Academic", "Legal"}
