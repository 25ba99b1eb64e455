"""Tables of KL and right answers against bytes, from records written by hand."""

import pandas as pd
import pytest
from named_models import NamedModel
from quantized import losses, plot, shares_right

from kvcat.errors import InputError
from kvcat.files import append_jsonl
from tiny import refusal, write_tiny_model


def window(method, way, document, first, second, bits="4", fewer=10.0):
    place = {"model": "m", "window": document, "document": document}
    figures = {"method": method, "bits": bits, "way": way, "keep": 0.1, "fewer": fewer}
    return {**place, **figures, "halves": [first, second]}


def value(table, **chosen):
    for name, wanted in chosen.items():
        table = table[table[name] == wanted]
    (row,) = table.itertuples()
    return row.estimate.value


def test_a_method_that_reads_nothing_later_counts_as_a_document_alone():
    records = []
    for number, document in enumerate("abc"):
        records.append(window("attention-matching", "suffix", document, 0.1 + number, 3.0))
        records.append(window("attention-matching", "reconstruction", document, 5.0, 7.0))
        records.append(window("snapkv", "suffix", document, 2.0, 4.0 + number))
    table = losses(records)
    assert value(table, method="attention-matching", on="fitted") == pytest.approx(1.1)
    assert value(table, method="attention-matching", on="later") == pytest.approx(3.0)
    assert value(table, method="attention-matching", on="document") == pytest.approx(6.0)
    assert value(table, method="snapkv", on="document") == pytest.approx(3.5)
    assert len(table) == 6


def test_right_answers_are_shares_of_questions_and_not_of_documents(tmp_path):
    place = {"model": "m", "method": "snapkv", "bits": "4", "keep": 0.1, "fewer": 30.0}
    records = [
        {**place, "document": "a", "right": [True]},
        {**place, "document": "b", "right": [True, False, False, False]},
    ]
    table = shares_right(records)
    assert value(table) == pytest.approx(2 / 5)
    # a document that one of the caches was not asked about does not count
    records.append({**place, "bits": "8", "document": "b", "right": [True, True, False, False]})
    table = shares_right(records)
    assert value(table, bits="4") == pytest.approx(1 / 4)
    assert value(table, bits="8") == pytest.approx(1 / 2)
    path = tmp_path / "picture.png"
    kl = losses([window("snapkv", "suffix", document, 1.0, 2.0) for document in "ab"])
    plot({"answers": (kl, table), "none": (kl, pd.DataFrame())}, path)
    assert path.stat().st_size > 10_000


def test_records_of_an_older_version_that_name_no_model_are_rejected(tmp_path):
    file = tmp_path / "records.jsonl"
    append_jsonl(file, {"model": "a", "kl": 1.0}, {"model": "b", "kl": 2.0})
    assert NamedModel("a", "nowhere").records(file) == [{"model": "a", "kl": 1.0}]
    append_jsonl(file, {"window": 0})
    with pytest.raises(InputError, match="records that name no model: choose another --out"):
        NamedModel("a", "nowhere").records(file)


def test_records_of_another_model_under_the_same_label_are_not_continued(tmp_path):
    folders = [write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    first, other = (NamedModel("tiny", str(folder)) for folder in folders)
    file = tmp_path / "records.jsonl"
    for _ in range(2):
        first.load_for(file)
    assert "records of another model called 'tiny'" in refusal(other.load_for, file)
    NamedModel("second", other.path).load_for(file)
    first.load_for(file)
