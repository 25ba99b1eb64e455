from dataclasses import replace

import pytest
from small_evaluations import noise, tiny

from kvcat.errors import InputError
from kvcat.evals import Method, Record, SuffixTask, evaluate, read_config
from kvcat.evals.evaluations.profile import SUPERVISION, profile_table, profile_text, slot_ratios


def caches(factor=1.0, model="m", document="d"):
    """Errors of eviction and of three gradient steps at 2, 4 and 1 slots."""
    errors = {2: (2.0, 3.0, 1.0, 1.5), 4: (1.2, 4.0, 4.0, 4.0), 1: (1.5, 5.0, 5.0, 5.0)}
    methods = ("snapkv", None), ("gradient", 0), ("gradient", 5), ("gradient", 9)
    return [
        Record(
            model,
            model,
            "float32",
            method,
            "{}",
            slots / 8,
            step,
            None,
            "text",
            "",
            document,
            "0",
            {"kl": factor * error},
        )
        for slots, slot_errors in errors.items()
        for (method, step), error in zip(methods, slot_errors, strict=True)
    ]


def best(records, model="m"):
    table = profile_table(records, 8, num_resamples=50)
    return table[(table.method == "best") & (table.model == model)]


def test_the_best_cache_of_a_window_is_the_best_of_all_methods_and_steps_within_its_slots():
    curve = best(caches())
    assert curve.num_slots.tolist() == [1, 2, 4]
    assert curve["mean"].tolist() == [1.5, 1.0, 1.0]
    assert curve.chosen.tolist() == ["1 x snapkv", "1 x gradient", "1 x gradient"]
    table = profile_table(caches(), 8)
    assert table[table.method == "gradient"]["mean"].tolist() == [5.0, 1.0, 4.0]
    others = [replace(r, values={"kl": 3.0 * (r.method != "snapkv")}) for r in caches(document="e")]
    row = best([*caches(), *others]).iloc[1]
    half = 12.7062047 * 0.5  # Student's t of two documents
    expected = (0.5, 1.0, 0.5 - half, 0.5 + half)
    assert (row["mean"], row.worst, row.low, row.high) == pytest.approx(expected)
    assert (row.num_windows, row.num_documents, row.chosen) == (2, 2, "1 x gradient, 1 x snapkv")


def test_a_profile_does_not_show_the_best_of_several_seeds():
    of_seeds = [replace(record, seed=seed) for record in caches() for seed in (3, 1)]
    message = r"snapkv has records for seeds \[1, 3\]; pass those of one seed"
    with pytest.raises(InputError, match=message):
        profile_table(of_seeds, 8)
    one_seed = [record for record in of_seeds if record.seed == 1]
    assert best(one_seed).equals(best(caches()))


def test_models_are_paired_with_the_first_on_the_same_windows():
    ours = [*caches(), *caches(3.0, document="e")]
    theirs = [*caches(6.0, "n", "e"), *caches(2.0, "n")]
    assert best([*ours, *theirs]).ratio.isna().all()
    row = best([*ours, *theirs], "n").iloc[1]
    assert (row.ratio, row.ratio_low, row.ratio_high) == pytest.approx((2.0,) * 3)
    for records in ([*ours, *theirs[:-1]], [*ours, *theirs[:12]], []):
        with pytest.raises(InputError, match="the run is incomplete"):
            profile_table(records, 8)


def test_the_text_shows_ratios_for_several_models_alone():
    for records, has_ratios in ((caches(), False), ([*caches(), *caches(6.0, "n")], True)):
        text = profile_text(profile_table(records, 8, num_resamples=50))
        assert ("Ratios are to the first" in text, "ratio_low" in text) == (has_ratios,) * 2
        assert all(line == line.rstrip() for line in text.splitlines())


def test_a_profile_is_the_suffix_evaluation_by_slots_and_all_slots_lose_nothing(tmp_path):
    assert slot_ratios([], 12) == [1 / 12, 2 / 12, 4 / 12, 8 / 12]
    for slots, said in [
        ([2, 2], "each once"),
        ([0], r"slots must be in \[1, 12\], not 0"),
        ([13], "not 13"),
    ]:
        with pytest.raises(InputError, match=said):
            slot_ratios(slots, 12)
    task = SuffixTask(tuple(noise()), "noise", SUPERVISION)
    methods = [Method("first"), Method("gradient", {"num_steps": 3, "init": "first"})]
    models = {"base": (tiny(0), None), "kvcat": (tiny(1), None)}
    records = evaluate(task, models, methods, slot_ratios([4, 12, 2], 12), tmp_path, progress=False)
    assert read_config(tmp_path)["evaluation"] == "suffix"
    table = profile_table(records, 12, num_resamples=50)
    for _, curve in table[table.method == "best"].groupby("model"):
        assert curve.num_slots.tolist() == [2, 4, 12]
        assert curve["mean"].is_monotonic_decreasing
        assert curve["mean"].iloc[-1] == pytest.approx(0.0, abs=1e-6)
    assert "5 windows of 3 documents" in profile_text(table)
    assert "nan" not in profile_text(table)
