import math

import pytest
from test_evals_runner import noise, tiny

from kvcat.errors import InputError
from kvcat.evals import Method, Record, SuffixTask, evaluate, read_config
from kvcat.evals.profile import SUPERVISION, profile_markdown, profile_table, slot_ratios


def record(slots, method, error, *, document="d", model="m", step=None, options="{}"):
    values = {"kl": error}
    return Record(model, "f", "float32", method, options, slots / 8, step, None, "text", "", document, "0", values)


CACHES = [
    record(2, "snapkv", 2.0), record(2, "gradient", 3.0, step=0), record(2, "gradient", 1.0, step=5),
    record(2, "gradient", 1.5, step=9), record(4, "snapkv", 1.2), record(4, "gradient", 4.0, step=0),
    record(4, "gradient", 4.0, step=5), record(4, "gradient", 4.0, step=9), record(1, "snapkv", 1.5),
    record(1, "gradient", 5.0, step=0), record(1, "gradient", 5.0, step=5), record(1, "gradient", 5.0, step=9),
]  # fmt: skip


def scaled(factor, **place):
    return [Record(**{**vars(r), "values": {"kl": factor * r.values["kl"]}, **place}) for r in CACHES]


def best(records, model="m"):
    table = profile_table(records, 8, num_resamples=50)
    return table[(table.method == "best") & (table.model == model)]


def test_the_best_cache_has_at_most_so_many_slots_and_is_the_best_of_all_methods_and_steps():
    curve = best(CACHES)
    assert curve.num_slots.tolist() == [1, 2, 4]
    assert curve["mean"].tolist() == [1.5, 1.0, 1.0]
    assert curve.chosen.tolist() == ["1 x snapkv", "1 x gradient", "1 x gradient"]
    table = profile_table(CACHES, 8)
    assert table[table.method == "gradient"]["mean"].tolist() == [5.0, 1.0, 4.0]


def test_the_best_cache_is_chosen_window_by_window_and_intervals_resample_documents():
    others = [Record(**{**vars(r), "document": "e", "values": {"kl": 3.0 * (r.method != "snapkv")}}) for r in CACHES]
    row = best([*CACHES, *others]).iloc[1]
    assert (row["mean"], row.worst, row.low, row.high) == (0.5, 1.0, 0.0, 1.0)
    assert (row.num_windows, row.num_documents, row.chosen) == (2, 2, "1 x gradient, 1 x snapkv")


def test_models_are_paired_with_the_first_on_the_same_windows():
    ours = [*CACHES, *scaled(3.0, document="e")]
    theirs = [*scaled(6.0, model="n", document="e"), *scaled(2.0, model="n")]
    assert best([*ours, *theirs]).ratio.isna().all()
    row = best([*ours, *theirs], "n").iloc[1]
    assert (row.ratio, row.ratio_low, row.ratio_high) == (2.0, 2.0, 2.0)
    for records in ([*ours, *theirs[:-1]], [*ours, *theirs[: len(CACHES)]], []):
        with pytest.raises(InputError, match="the run did not end"):
            profile_table(records, 8)


def test_numbers_of_slots_are_powers_of_two_below_the_prefix_unless_they_are_named():
    assert slot_ratios([], 12) == [1 / 12, 2 / 12, 4 / 12, 8 / 12]
    assert slot_ratios([4, 12, 2], 12) == [2 / 12, 4 / 12, 1.0]
    for slots, said in [([2, 2], "each once"), ([0], "0 slots are outside 1 to 12"), ([13], "13 slots")]:
        with pytest.raises(InputError, match=said):
            slot_ratios(slots, 12)


def test_a_profile_is_the_suffix_evaluation_by_slots_and_all_slots_lose_nothing(tmp_path):
    task = SuffixTask(tuple(noise()), "noise", SUPERVISION)
    models = {"base": (tiny(0), None), "kvcat": (tiny(1), None)}
    methods = [Method("first"), Method("gradient", {"num_steps": 3, "init": "first"})]
    records = evaluate(task, models, methods, slot_ratios([2, 4, 12], 12), tmp_path, progress=False)
    assert read_config(tmp_path)["evaluation"] == "suffix"
    table = profile_table(records, 12, num_resamples=50)
    for _, curve in table[table.method == "best"].groupby("model"):
        assert curve.num_slots.tolist() == [2, 4, 12]
        assert curve["mean"].is_monotonic_decreasing
        assert curve["mean"].iloc[-1] == pytest.approx(0.0, abs=1e-6)
    text = profile_markdown(table)
    assert "| model | slots | best | to the first model's | chosen | first | gradient |" in text
    assert "5 windows of 3 documents" in text
    assert "nan" not in text
    assert math.isnan(table.ratio.iloc[0])
