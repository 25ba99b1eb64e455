import dataclasses
import json
import math

import pytest
import torch
from scipy import stats

from kvcat.errors import InputError
from kvcat.recipes import histogram_runs
from kvcat.recipes.histogram import HistogramConfig, task_errors
from kvcat.recipes.histogram_constructions import OPTIMUM, OPTIMUM_FOUND, POLICY, POLICY_FOUND, construction_rows
from kvcat.recipes.histogram_measure import SearchOptions, count_prefixes
from kvcat.recipes.histogram_runs import (
    HistogramExperiment,
    load_histogram,
    method_variants,
    quick_experiment,
    read_rows,
    run_histogram_experiment,
)
from kvcat.recipes.histogram_summary import mean_interval, summarise_histogram
from kvcat.theory.histogram_optimum import joint_optimum

BASE = HistogramConfig(longest=5, width=8, key_width=4, hidden_width=16, num_steps=8, batch_size=8)
SMALL = HistogramExperiment(
    method_variants(BASE, ("usual", "random")),
    seeds=(0, 1),
    prefix_len=3,
    slots=(1, 3),
    num_prefixes=3,
    search=SearchOptions(num_steps=4, num_restarts=2),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("histogram") / "run"
    return folder, run_histogram_experiment(SMALL, folder, progress=False)


def test_every_variant_seed_and_number_of_slots_has_a_row(finished):
    _, rows = finished
    keys = [(row["model"], row["seed"], row["num_slots"]) for row in rows]
    assert keys == [(name, seed, r) for name in SMALL.variants for seed in (0, 1) for r in (1, 3)]
    assert all(isinstance(value, str | int | float) for row in rows for value in row.values())
    assert all(bool(row["kept"]) == row["model"].startswith("random") for row in rows)


def test_a_second_run_only_reads(finished, monkeypatch):
    folder, rows = finished
    monkeypatch.setattr(histogram_runs, "train_histogram", None)
    assert run_histogram_experiment(SMALL, folder, progress=False) == rows
    assert read_rows(SMALL, folder) == rows


def test_a_run_that_was_stopped_goes_on_to_the_same_rows(finished, tmp_path, monkeypatch):
    folder, rows = finished
    trained = []

    def stops_at_the_third(config):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(config)
        return train(config)

    train = histogram_runs.train_histogram
    monkeypatch.setattr(histogram_runs, "train_histogram", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run_histogram_experiment(SMALL, tmp_path, progress=False)
    assert len(read_rows(SMALL, tmp_path)) == 4
    monkeypatch.setattr(histogram_runs, "train_histogram", train)
    assert run_histogram_experiment(SMALL, tmp_path, progress=False) == rows
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_network_without_its_figures_is_done_again(finished, tmp_path):
    _, rows = finished
    one = dataclasses.replace(SMALL, seeds=(0,))
    run_histogram_experiment(one, tmp_path, progress=False)
    (tmp_path / "2-seed0.json").unlink()
    (tmp_path / "2-seed0.safetensors").write_bytes(b"half a file")
    assert run_histogram_experiment(one, tmp_path, progress=False) == [row for row in rows if row["seed"] == 0]
    load_histogram(one, tmp_path, list(one.variants)[2], 0)


def test_more_seeds_may_join_and_other_settings_may_not(finished, tmp_path):
    _, rows = finished
    run_histogram_experiment(dataclasses.replace(SMALL, seeds=(1,)), tmp_path, progress=False)
    assert run_histogram_experiment(SMALL, tmp_path, progress=False) == rows
    with pytest.raises(InputError, match="experiment with other settings"):
        run_histogram_experiment(dataclasses.replace(SMALL, prefix_len=2, slots=(1,)), tmp_path, progress=False)


def test_the_saved_network_is_the_one_that_was_measured(finished):
    folder, rows = finished
    for row in rows:
        rms, worst = task_errors(load_histogram(SMALL, folder, row["model"], row["seed"]))
        assert (rms, worst) == (row["task_rms"], row["task_max"])
    with pytest.raises(InputError, match="no network 'usual, trained attention' of seed 7"):
        load_histogram(SMALL, folder, "usual, trained attention", 7)


def test_the_constructions_stand_beside_with_the_exact_optimum_and_the_policy():
    experiment = dataclasses.replace(SMALL, slots=None, num_prefixes=4, search=SearchOptions(num_steps=100))
    rows = {(row["model"], row["num_slots"]): row for row in construction_rows(experiment)}
    prefixes = count_prefixes(3, 3, limit=4)
    for r in (1, 2, 3):
        optima = [joint_optimum(torch.bincount(prefix, minlength=3), 2, r).error for prefix in prefixes]
        assert rows[OPTIMUM, r]["max_error"] == pytest.approx(max(optima), abs=1e-14)
        assert rows[OPTIMUM, r]["mean_error"] == pytest.approx(sum(optima) / 4, abs=1e-14)
        found = rows[OPTIMUM_FOUND, r]["mean_error"]
        assert rows[OPTIMUM, r]["mean_error"] - 1e-9 <= found <= 1.02 * rows[OPTIMUM, r]["mean_error"] + 1e-9
    assert rows[POLICY, 1]["max_error"] < 1e-10
    assert (POLICY, 2) not in rows
    assert rows[POLICY_FOUND, 1]["mean_error"] > 1e-3  # the search does not find what the policy knows
    assert rows[POLICY_FOUND, 3]["max_error"] < 1e-10
    assert {row["model"] for row in construction_rows(experiment, search=False)} == {OPTIMUM, POLICY}


def test_an_interval_is_students_t():
    values = [0.2, 0.5, 0.1, 0.4]
    mean, low, high = mean_interval(values)
    expected = stats.t.interval(0.95, 3, loc=0.3, scale=stats.sem(values))
    assert (mean, low, high) == pytest.approx((0.3, *expected), abs=1e-12)
    assert mean_interval([1.0])[0] == 1.0
    assert math.isnan(mean_interval([1.0])[1])


def test_a_ratio_pairs_each_network_with_the_usual_one_of_its_seed_and_architecture():
    experiment = dataclasses.replace(SMALL, slots=(1,))
    usual_uniform, random_uniform, usual_trained, random_trained = experiment.variants
    errors = {
        usual_uniform: (0.2, 0.8),
        random_uniform: (0.1, 0.1),
        usual_trained: (9.0, 9.0),
        random_trained: (3.0, 1.0),
    }
    rows = [
        {"model": name, "seed": seed, "num_slots": 1, "max_error": 1.0, "mean_error": pair[seed], "task_max": 0.5}
        for name, pair in errors.items()
        for seed in (0, 1)
    ]
    table = {row["model"]: row for row in summarise_histogram(experiment, rows)}
    assert table[random_uniform]["ratio"] == pytest.approx(math.sqrt(0.5 * 0.125))
    assert table[random_trained]["ratio"] == pytest.approx(math.sqrt(1 / 3 * 1 / 9))
    assert table[random_uniform]["ratio_low"] < 0.1 < table[random_uniform]["ratio_high"]
    assert math.isnan(table[usual_uniform]["ratio"])
    assert table[usual_uniform]["mean_error"] == pytest.approx(0.5)
    assert table[usual_uniform]["num_seeds"] == 2


def test_seeds_that_are_not_finished_are_left_out_of_the_summary(finished):
    _, rows = finished
    table = summarise_histogram(SMALL, [row for row in rows if row["seed"] == 0])
    assert {row["num_seeds"] for row in table} == {1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seeds": (1, 1)}, r"seeds must be different and at least one, got \(1, 1\)"),
        ({"prefix_len": 5}, "1 to 4 symbols, got 5"),
        ({"slots": (4,)}, r"slots must lie in 1 to 3, got \[4\]"),
        ({"variants": {"a": BASE, "b": dataclasses.replace(BASE, longest=6)}}, "one number of symbols and length"),
    ],
)
def test_an_experiment_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, **wrong)


@pytest.mark.slow
def test_the_quick_experiment_runs_through_with_a_bar(tmp_path, capsys):
    rows = run_histogram_experiment(quick_experiment(), tmp_path)
    assert len(rows) == 4 * 2 * 3
    assert "histogram 32/32" in capsys.readouterr().err
    assert json.loads((tmp_path / "experiment.json").read_text())["prefix_len"] == 3
