import io
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from report_examples import (
    made_up_longbench,
    made_up_needle,
    made_up_qa,
    made_up_records,
    write_results,
    write_run,
)

from kvcat.errors import InputError
from kvcat.evals import ResultsFolder, find_evaluation
from kvcat.evals.records import read_config
from kvcat.report import headline_text
from kvcat.report.figures import Figure
from kvcat.report.page import Section
from kvcat.report.paper import Paper
from kvcat.report.plots import result_plots
from kvcat.report.results import read_results as read_with_all_draws
from kvcat.report.tables import (
    costs_table,
    dense_table,
    differences_table,
    quality_table,
    result_tables,
    strata_table,
)
from kvcat.report.training_plots import run_metrics, training_plot

MADE_UP = {
    "suffix": made_up_records,
    "needle": made_up_needle,
    "longbench": made_up_longbench,
    "qa": made_up_qa,
}


def read_results(*args):
    return read_with_all_draws(*args, num_resamples=200)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    return {
        name: read_results(write_results(root / name, make(), name))
        for name, make in MADE_UP.items()
    }


def row_of(table, **labels):
    """The one row with these labels."""
    frame = table.frame
    for name, label in labels.items():
        frame = frame[frame[name] == label]
    assert len(frame) == 1, labels
    return frame.iloc[0]


def test_quality_is_the_mean_over_examples_with_its_verdict_against_the_control(folders):
    table = quality_table(folders["suffix"], "attention-matching")
    figure = row_of(table, keep="5 %", model="kvcat")["KL"]
    cell_records = [
        r
        for r in MADE_UP["suffix"]()
        if (r.model, r.method, r.keep_ratio) == ("kvcat", "attention-matching", 0.05)
    ]
    assert figure.value == pytest.approx(
        sum(r.values["kl"] for r in cell_records) / len(cell_records), rel=1e-12
    )
    assert figure.low < figure.value < figure.high
    assert figure.verdict == "better"
    assert row_of(table, keep="5 %", model="control")["KL"].verdict == ""
    whole_cache = dense_table(folders["suffix"])
    assert row_of(whole_cache, model="kvcat")["NLL dense"].verdict == "worse"
    assert "24 windows of 12 documents. Marked: better or worse than control." in table.caption
    assert list(table.frame["model"])[:3] == ["base", "control", "kvcat"]
    assert set(quality_table(folders["suffix"], "gradient").frame["steps"]) == {"100"}
    assert set(quality_table(folders["longbench"], "gradient").frame["steps"]) == {"20", "100"}


@pytest.mark.slow
def test_rows_over_unequal_numbers_of_examples_show_their_number(tmp_path):
    records = [
        r for r in made_up_records(num_documents=4) if r.model != "kvcat" or r.document != "d3"
    ]
    results = read_results(write_results(tmp_path / "r", records))
    table = quality_table(results, "snapkv")
    assert row_of(table, keep="5 %", model="kvcat")["n"] == "6"
    assert row_of(table, keep="5 %", model="base")["n"] == "8"
    assert "Incomplete: kvcat has 6 of 8 examples" in " ".join(table.notes)
    assert "Only 3 documents" in " ".join(table.notes)
    mixed = [r for r in made_up_records() if r.method != "gradient" or r.document < "d3"]
    tables = read_results(write_results(tmp_path / "mixed", mixed))
    notes = {name: " ".join(quality_table(tables, name).notes) for name in ("snapkv", "gradient")}
    assert ("Only" in notes["snapkv"], "Only" in notes["gradient"]) == (False, True)
    text = headline_text(results).splitlines()
    assert text[0].startswith("Incomplete: kvcat has 6 of 8")
    assert text[1] == "6 windows of 3 documents, or 8 windows of 4 documents"
    assert {line.split()[0] for line in text[3:]} == {"attention-matching", "snapkv", "gradient"}


def test_differences_show_price_and_gain_side_by_side_and_name_their_verdict(folders):
    table = differences_table(folders["suffix"], "kvcat", "control")
    row = row_of(table, method="attention-matching", keep="10 %")
    quality = quality_table(folders["suffix"], "attention-matching")
    ours, control = (row_of(quality, keep="10 %", model=model) for model in ("kvcat", "control"))
    assert row["KL ratio"].value == pytest.approx(ours["KL"].value / control["KL"].value)
    assert (row["KL ratio"].verdict, row["delta NLL diff."].text[0]) == ("better", "-")


def test_gradient_steps_to_the_bases_level_are_read_off_the_mean_curves(folders):
    table = next(t for t in result_tables(folders["suffix"]) if t.name == "steps")
    places = {"keep": "10 %", "model": "kvcat", "level of": "base", "metric": "KL"}
    row = row_of(table, **places)
    kl = {
        (model, step): np.mean(
            [
                r.values["kl"]
                for r in MADE_UP["suffix"]()
                if (r.model, r.method, r.keep_ratio, r.step) == (model, "gradient", 0.1, step)
            ]
        )
        for model in ("base", "kvcat")
        for step in (10, 100)
    }
    between = np.interp(-kl["base", 100], [-kl["kvcat", 10], -kl["kvcat", 100]], [10, 100])
    steps, fewer = row["steps to it"], row["times fewer"]
    assert steps.value == pytest.approx(between)
    assert fewer.value == pytest.approx(100 / between)
    assert fewer.low < fewer.value < fewer.high


def test_figures_of_the_whole_cache_are_shown_once_with_their_differences(folders):
    table = dense_table(folders["suffix"])
    ours, control, price = (
        row_of(table, model=label)["NLL dense"]
        for label in ("kvcat", "control", "kvcat minus control")
    )
    assert price.value == pytest.approx(ours.value - control.value, rel=1e-9)
    assert (price.verdict, price.text[0]) == ("worse", "+")
    for other in result_tables(folders["suffix"]):
        if other.name != "whole-cache":
            assert not {"NLL dense", "context gain"} & set(other.frame)


def test_a_page_on_one_model_compares_methods_in_one_table_each(tmp_path):
    results = read_results(write_results(tmp_path / "r", made_up_records(("base",), 6)))
    tables = {table.name: table.frame for table in result_tables(results)}
    assert list(tables) == ["overview", "quality", "whole-cache", "costs"]
    assert list(tables["overview"]) == ["method", "5 %", "10 %", "20 %"]
    assert list(tables["overview"]["method"]) == ["attention-matching", "snapkv", "gradient"]
    cell = tables["overview"].set_index("method").loc["snapkv", "10 %"]
    records = [
        r.values["kl"]
        for r in made_up_records(("base",), 6)
        if (r.method, r.keep_ratio) == ("snapkv", 0.1)
    ]
    assert cell.value == pytest.approx(sum(records) / len(records), rel=1e-12)
    assert all("model" not in frame for frame in tables.values())


def test_no_table_has_an_empty_column(folders):
    for results in folders.values():
        for table in result_tables(results):
            for column in table.frame:
                cells = table.frame[column]
                texts = [cell.text if isinstance(cell, Figure) else cell for cell in cells]
                assert set(texts) - {"", "--"}, (table.name, column)


def test_a_table_as_csv_has_values_and_intervals_in_full_precision(folders):
    table = quality_table(folders["suffix"], "snapkv")
    written = pd.read_csv(io.StringIO(table.csv))
    figures = table.frame["KL"]
    # pandas 2 reads the last digits of some numbers wrongly
    assert list(written["KL"]) == pytest.approx([figure.value for figure in figures], rel=1e-14)
    assert list(written["KL, high"]) == pytest.approx([f.high for f in figures], rel=1e-14)
    assert list(written["model"]) == list(table.frame["model"])


@pytest.mark.slow
def test_one_named_cell_is_primary_and_only_the_others_are_corrected(tmp_path):
    primary = {"method": "snapkv", "keep_ratio": 0.2, "metric": "kl"}
    results = read_results(
        write_results(tmp_path / "r", made_up_records(num_documents=4), primary=primary)
    )
    assert results.cell == ("snapkv", 0.2, -1)
    assert Section("", results, [], []).cell.startswith(
        "snapkv at 20 % of the slots: the primary cell, by default the first method"
    )
    table = differences_table(results, "kvcat", "control")
    assert [
        (cell.primary, cell.exploratory) for cell in table.frame["KL ratio"] if cell.primary
    ] == [(True, False)]
    assert math.isnan(row_of(table, method="snapkv", keep="20 %")["p (Holm)"].value)
    assert row_of(table, method="snapkv", keep="10 %")["p (Holm)"].value <= 1.0
    alone = write_results(
        tmp_path / "alone", made_up_records(("base",)), primary=primary | {"named": True}
    )
    assert read_results(alone).cell == ("snapkv", 0.2, -1)


def test_several_training_seeds_are_one_model_with_intervals_over_both(tmp_path):
    """Two runs of one variant, LABEL@SEED, the second with three times the error of the first."""
    ours = made_up_records(("kvcat",), 4, ("snapkv",))
    records = [
        replace(
            r,
            model=f"kvcat@{seed}",
            fingerprint=str(seed),
            values=r.values | {"kl": r.values["kl"] * 3.0**seed},
        )
        for r, seed in product(ours, range(2))
    ]
    results = read_results(
        write_results(tmp_path / "r", [*made_up_records(("base",), 4, ("snapkv",)), *records])
    )
    assert (results.models, results.pairs, results.summary["num_seeds"].max()) == (
        ["base", "kvcat"],
        [("kvcat", "base")],
        2,
    )
    (row,) = costs_table(results).frame.query("model == 'kvcat' and keep == '5 %'").itertuples()
    # the runs' means are m and 3 m, so Student's t of one degree of freedom reaches 12.7 m
    assert row.KL.high > 7 * row.KL.value


def test_strata_have_a_row_each_and_one_for_all(folders):
    table = strata_table(folders["needle"], "gradient")
    assert list(table.frame["depth"])[:4] == ["0", "0.5", "1", "all"]
    kls = [
        r.values["exact_match"]
        for r in MADE_UP["needle"]()
        if (r.model, r.method, r.keep_ratio, r.stratum) == ("kvcat", "gradient", 0.5, "0.5")
    ]
    assert row_of(table, keep="50 %", depth="0.5")["kvcat"].value == pytest.approx(
        sum(kls) / len(kls)
    )
    assert row_of(table, keep="50 %", depth="all")["n"] == "60"


@pytest.mark.slow
def test_qa_averages_are_means_over_tasks_with_the_interval_of_independent_tasks(folders):
    table = strata_table(read_results(folders["qa"].folder, "Qwen2.5-0.5B"), "dense")
    tasks = {}
    for r in MADE_UP["qa"]():
        if r.model == "kvcat":
            tasks.setdefault(r.stratum, []).append(r.values["acc_per_char"])
    shares = [sum(correct) / len(correct) for correct in tasks.values()]
    eight = row_of(table, task="average of eight")["kvcat"]
    assert eight.value == pytest.approx(sum(shares) / 8, abs=1e-12)
    error = math.sqrt(sum(share * (1.0 - share) / 60 for share in shares)) / 8
    assert eight.high - eight.low == pytest.approx(2 * 1.96 * error, rel=0.05)
    six = row_of(table, task="average of six")
    papers = [six[model].paper for model in ("base", "control", "kvcat", "rand")]
    assert papers == ["paper 51.5", "", "paper 52.2", "paper 50.7"]
    assert result_tables(folders["qa"])[0].name == "task-dense"
    assert result_plots(folders["qa"]) == []


def test_an_average_over_tasks_covers_training_runs_that_answer_all_of_them(tmp_path):
    records = [r for r in MADE_UP["qa"]() if r.model == "kvcat"]
    runs = [
        replace(r, model=f"kvcat@{run}", fingerprint=f"f-{run}") for r in records for run in "01"
    ]
    table = strata_table(read_results(write_results(tmp_path, runs, "qa")), "dense")
    rows = [row for row in table.frame.to_dict("records") if "average" not in row["task"]]
    average = row_of(table, task="average of eight")["kvcat"]
    tasks = [row["kvcat"] for row in rows if row["task"] != "all"]
    assert len(tasks) == 8
    half_widths = [task.high - task.value for task in tasks]
    assert average.high - average.value == pytest.approx(sum(half_widths) / 8, abs=1e-12)


def test_a_model_that_is_called_like_a_column_of_the_table_has_a_column_of_its_own(tmp_path):
    records = [r for r in MADE_UP["qa"]() if r.model == "kvcat"]
    table = strata_table(read_results(write_results(tmp_path / "a", records, "qa")), "dense")
    called = [replace(r, model="n") for r in records]
    same = strata_table(read_results(write_results(tmp_path / "b", called, "qa")), "dense")
    assert list(same.frame) == [c.replace("kvcat", "model n") for c in table.frame]
    for name, other in zip(table.frame, same.frame, strict=True):
        assert table.frame[name].astype(str).tolist() == same.frame[other].astype(str).tolist()


@pytest.mark.slow
def test_missing_seeds_and_training_runs_are_named_like_missing_examples(tmp_path):
    made_up = made_up_records(("base", "kvcat"), num_documents=4, methods=("snapkv", "gradient"))
    records = [r for r in made_up if r.model == "base"]
    records += [
        replace(r, model=f"kvcat@{run}", fingerprint=f"f-{run}")
        for r in made_up
        if r.model == "kvcat"
        for run in (0, 1)
    ]
    seeded = []
    for seed in (0, 1):
        seeded += [replace(r, seed=seed) if r.method == "snapkv" else r for r in records]
    seeded = list({r.key: r for r in seeded}.values())
    whole = read_results(write_results(tmp_path / "whole", seeded, seeds=[0, 1]))
    assert whole.warnings == []

    lacks_a_seed = [r for r in seeded if (r.model, r.seed, r.document) != ("base", 1, "d3")]
    results = read_results(write_results(tmp_path / "seed", lacks_a_seed, seeds=[0, 1]))
    assert results.warnings == [
        "Incomplete: base has 6 of 8 examples of snapkv at 5 %, with every seed and training run. "
        "Its figures are therefore over other examples, seeds or training runs."
    ]
    lacks_a_run = [r for r in seeded if (r.model, r.method) != ("kvcat@1", "gradient")]
    results = read_results(write_results(tmp_path / "run", lacks_a_run, seeds=[0, 1]))
    (warning,) = results.warnings
    assert warning.startswith("Incomplete: kvcat has 0 of 8 examples of gradient at 5 %, with")
    stopped = [r for r in seeded if r.seed != 1]
    results = read_results(write_results(tmp_path / "stopped", stopped, seeds=[0, 1]))
    assert [warning.split(" of ")[0] for warning in results.warnings] == [
        "Incomplete: base has 0",
        "Incomplete: kvcat has 0",
    ]


def test_models_of_different_types_and_records_of_different_versions_are_named(tmp_path):
    records = made_up_records(("base", "kvcat"), num_documents=4, methods=("snapkv",))
    mixed = [replace(r, dtype="bfloat16") if r.model == "kvcat" else r for r in records]
    folder = write_results(tmp_path / "mixed", mixed)
    of_types = "Weights of different types (float32: base; bfloat16: kvcat): differences include"
    assert read_results(folder).warnings == [f"{of_types} their rounding."]
    with ResultsFolder(folder, read_config(folder)) as opened:
        for torch_version in ("2.12.0", "2.13.0", "2.13.0"):
            versions = {"kvcat": "0.1.0", "torch": torch_version}
            opened.append_event({"event": "start", **versions})
    _, of_versions = read_results(folder).warnings
    assert of_versions == (
        "Different versions made the records (torch 2.12.0 and 2.13.0): figures may depend on it."
    )


@pytest.mark.slow
def test_a_model_without_one_of_the_tasks_has_no_average_over_them(tmp_path):
    lacking = ("kvcat", "arc_challenge")
    records = [r for r in MADE_UP["qa"]() if (r.model, r.stratum) != lacking]
    table = strata_table(read_results(write_results(tmp_path, records, "qa")), "dense")
    six = row_of(table, task="average of six")
    assert six["base"].value > 0.0
    assert six["kvcat"] == ""


@pytest.mark.parametrize(
    ("evaluation", "dataset", "cell", "printed"),
    [
        (
            "suffix",
            "fineweb-edu:test",
            ("KV-CAT", "attention-matching num_iters=8", 0.1, -1, "kl"),
            "0.0321",
        ),
        ("needle", "passkey", ("router", "gradient", 0.5, 100, "native_exact_match"), "47"),
        ("needle", "passkey", ("router", "gradient", 0.5, 20, "native_exact_match"), ""),
        (
            "longbench",
            "x",
            ("base [not a result]", "gradient", 0.1, 20, "accuracy", "Legal"),
            "27.3",
        ),
        ("longbench", "x", ("kvcat", "gradient", 0.5, 100, "accuracy", ""), "31.2"),
        ("qa", "cloze", ("attn", "dense", 1.0, -1, "acc_per_char", "hellaswag"), "50.7"),
        ("ruler", "ruler-4096", ("base", "gradient", 0.1, 100, "string_match"), ""),
    ],
)
def test_the_papers_cell_is_found_by_evaluation_label_method_keep_step_and_stratum(
    evaluation, dataset, cell, printed
):
    figures = find_evaluation(evaluation).paper
    assert Paper("Qwen2.5-0.5B", figures, dataset).printed(*cell) == (
        f"paper {printed}" if printed else ""
    )
    assert Paper(None, figures, dataset).printed(*cell) == ""


@pytest.mark.slow
def test_other_corpora_of_the_paper_go_by_the_name_of_ours_and_others_get_a_note(folders):
    paper = Paper("Qwen2.5-1.5B", find_evaluation("suffix").paper, "arxiv:test")
    assert (paper.printed("base", "attention-matching", 0.05, -1, "delta_ppl"), paper.note) == (
        "paper 1.659",
        "",
    )
    results = read_results(folders["suffix"].folder, "Qwen2.5-0.5B")
    table = quality_table(results, "attention-matching")
    assert row_of(table, keep="5 %", model="kvcat")["delta PPL"].paper == "paper 0.461"
    assert (
        table.notes[-1] == "The paper's figures are for Qwen2.5-0.5B on FineWeb, ours for made-up."
    )
    with pytest.raises(InputError, match=r"no model 'gpt'; it has Qwen2.5-0.5B and Qwen2.5-1.5B"):
        Paper("gpt")


def test_costs_are_per_example_and_relative_to_the_dense_cache(folders):
    row = row_of(costs_table(folders["suffix"]), method="snapkv", keep="20 %", model="kvcat")
    assert [row[name].value for name in row.index[4:]] == pytest.approx(
        [2.0, 28.0, 819 / 1024, 819 / 4096, 0.5, 1.5]
    )
    quality = row_of(quality_table(folders["suffix"], "snapkv"), keep="20 %", model="kvcat")
    assert row["KL"].value == quality["KL"].value


@pytest.mark.slow
def test_models_that_cannot_do_the_task_are_labelled_in_every_table(tmp_path):
    results = read_results(
        write_results(tmp_path / "r", made_up_longbench(skill=0.25), "longbench")
    )
    assert results.models == ["base [not a result]", "kvcat [not a result]"]
    for table in result_tables(results):
        assert any("above chance" in note for note in table.notes)
        assert (
            "[not a result]"
            in table.caption + " ".join(table.frame.columns) + table.frame.to_string()
        )


@pytest.mark.parametrize(
    ("figure", "text", "interval"),
    [
        (Figure(0.885, 0.8, 0.9, decimals=1, percent=True), "88.5", "[80.0, 90.0]"),
        (Figure(-0.00004, -0.1, 0.2, decimals=3, signed=True), "0.000", "[-0.100, +0.200]"),
        (Figure(123456.0, signed=True), "+1.23e+05", ""),
    ],
)
def test_figures_are_shown_with_their_digits_sign_and_interval(figure, text, interval):
    assert (figure.text, figure.interval) == (text, interval)
    assert [replace(figure, verdict=v).decided for v in ("better", "level")] == ["better", ""]


@pytest.mark.slow
def test_every_line_of_every_plot_is_in_its_legend(folders, tmp_path):
    runs = {name: write_run(tmp_path / name, name) for name in ("control", "router")}
    metrics = {name: run_metrics(folder) for name, folder in runs.items()}
    alone = read_results(write_results(tmp_path / "r", made_up_records(("base",), 6)))
    plots = [training_plot(metrics, []), *result_plots(alone), *result_plots(folders["suffix"])]
    for plot in plots:
        for panel in plot.draw().panels:
            shown = {text.get_text() for text in panel.get_legend().get_texts()}
            bars = list(panel.containers)
            in_bars = {child for container in bars for child in container.get_children()}
            named = [line.get_label() for line in panel.lines if line not in in_bars]
            named += [container.get_label() for container in bars]
            assert set(named) == shown, (plot.name, panel.get_title())
            assert panel.lines
