import csv
import io
import math

import pytest
from report_examples import (
    made_up_longbench,
    made_up_needle,
    made_up_qa,
    made_up_records,
    made_up_ruler,
    write_results,
)

from kvcat.errors import InputError
from kvcat.evals import Estimate
from kvcat.evals.qa import averages, task_accuracies
from kvcat.evals.rows import summarise
from kvcat.report import headline_markdown, headline_text
from kvcat.report.beside import Paper
from kvcat.report.latex import latex_table
from kvcat.report.reading import read_results
from kvcat.report.sections import tables_by_part
from kvcat.report.tabledata import Column, Figure, TableData
from kvcat.report.tables import costs_table, differences_table, quality_table, strata_table
from kvcat.report.writers import csv_table, markdown_table, text_table

NONE = Paper(None, "", "")
MADE_UP = {
    "suffix": lambda: made_up_records(num_documents=4, methods=("attention-matching", "gradient")),
    "needle": lambda: made_up_needle(per_depth=6, keeps=(0.1, 0.5)),
    "ruler": made_up_ruler,
    "longbench": made_up_longbench,
    "qa": lambda: made_up_qa(num_questions=15),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    return {name: read_results(write_results(root / name, made(), name)) for name, made in MADE_UP.items()}


def heads(table):
    return [column.head for column in table.columns]


def row_of(table, *lead):
    return next(row for row in table.rows if row[: len(lead)] == lead)


@pytest.mark.parametrize("name", list(MADE_UP))
def test_every_table_of_every_evaluation_can_be_written_in_every_form(folders, name):
    tables = [t for part in tables_by_part(folders[name], Paper("Qwen2.5-0.5B", name, "x")).values() for t in part]
    assert len({table.label for table in tables}) == len(tables)
    for table in tables:
        lines = markdown_table(table).splitlines()
        assert {line.replace("\\|", "").count("|") for line in lines} == {lines[0].count("|")}
        assert {len(line) for line in csv.reader(io.StringIO(csv_table(table)))} == {
            len(next(csv.reader(io.StringIO(csv_table(table)))))
        }
        assert len(lines) == len(table.rows) + 2
        assert latex_table(table).count("\\\\\n") >= len(table.rows) + 1
        assert len(text_table(table).splitlines()) == 1 + len(table.rows) + len(table.blocks)


def test_markdown_shows_interval_paper_and_what_stands_out():
    columns = (Column("keep", "left"), Column("KL", decimals=4), Column("top-1", percent=True, decimals=1, sign=True))
    figures = (
        Figure(Estimate(0.03214, 0.029, 0.0355), best=True, paper="0.0321"),
        Figure(Estimate(0.05, math.nan, math.nan), verdict="better"),
    )
    table = TableData(columns, ((("5|%", *figures),),), "", "tab:x")
    assert markdown_table(table).splitlines() == [
        "| keep | KL | paper | top-1 (pt) |",
        "| --- | --- | --- | --- |",
        "| 5\\|% | **0.0321** [0.0290, 0.0355] | 0.0321 | +5.0 better |",
    ]
    assert csv_table(table).splitlines() == [
        "keep,KL,KL low,KL high,KL paper,top-1,top-1 low,top-1 high,top-1 verdict",
        "5|%,0.03214,0.029,0.0355,0.0321,0.05,,,better",
    ]


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0.00"), (-0.001, "0.00"), (0.5, "+0.50"), (12345.6, "+1.23e+04"), (math.nan, "--")]
)
def test_numbers_have_the_digits_they_deserve(value, shown):
    assert Column("x", decimals=2, sign=True).number(value) == shown


def test_texts_that_a_block_repeats_are_shown_once():
    table = TableData((Column("a", "left"), Column("b", "left"), Column("c")), (), "", "tab:x")
    block = (("x", "y", "1"), ("x", "y", "2"), ("x", "z", "2"), ("w", "z", "2"))
    assert [table.repeated(block, i) for i in range(4)] == [0, 2, 1, 0]


def test_the_quality_table_begins_with_the_papers_columns(folders):
    table = quality_table(folders["suffix"], NONE, "attention-matching")
    assert heads(table)[:7] == ["keep", "model", "delta PPL", "KL", "top-1", "NLL compact", "delta NLL"]
    assert [len(block) for block in table.blocks] == [3, 3, 3, 3]
    assert "8 windows of 4 documents" in table.caption
    assert "Only 4 documents" in table.notes[0]


def test_rows_of_unequal_numbers_of_examples_tell_their_own(tmp_path):
    records = [r for r in made_up_records(num_documents=4) if r.method == "random"]
    records = [r for r in records if r.model != "kvcat" or r.document != "d3"]
    table = quality_table(read_results(write_results(tmp_path, records)), NONE, "random")
    assert heads(table)[:4] == ["keep", "model", "n", "delta PPL"]
    assert [row[1:3] for row in table.blocks[0]] == [("base", "8"), ("control", "8"), ("kvcat", "6")]


def test_a_method_with_steps_is_shown_at_its_last_one_and_with_all_in_a_table_of_its_own(folders):
    last = quality_table(folders["suffix"], NONE, "gradient")
    assert {row[1] for row in last.rows} == {"100"}
    every = quality_table(folders["suffix"], NONE, "gradient", all_steps=True)
    assert [block[0][1] for block in every.blocks][:8] == ["0", "1", "2", "5", "10", "20", "50", "100"]


def test_the_papers_figures_stand_beside_the_same_cells_only(folders):
    table = quality_table(folders["suffix"], Paper("Qwen2.5-0.5B", "suffix", "made-up"), "attention-matching")
    ours = {row[:2]: [cell.paper for cell in row[2:5]] for row in table.rows}
    assert ours["5%", "base"] == ["0.780", "0.0562", "88.5"]
    assert ours["5%", "kvcat"] == ["0.461", "0.0385", "91.1"]
    assert ours["5%", "control"] == ["", "", ""]
    assert table.notes[-1] == "The paper's figures are of Qwen2.5-0.5B on FineWeb, ours of made-up."
    gradient = quality_table(folders["suffix"], Paper("Qwen2.5-0.5B", "suffix", "made-up"), "gradient")
    assert not any(gradient.has_paper(i) for i in range(len(gradient.columns)))


@pytest.mark.parametrize(
    ("evaluation", "dataset", "cell", "printed"),
    [
        ("suffix", "fineweb-edu:test", ("KV-CAT", "attention-matching num_iters=8", 0.1, None, "kl"), "0.0321"),
        ("suffix", "x", ("rand", "attention-matching", 0.05, None, "kl"), "0.0420"),
        ("needle", "passkey", ("router", "gradient", 0.5, 100, "native_exact_match"), "47"),
        ("needle", "passkey", ("router", "gradient", 0.5, 20, "native_exact_match"), ""),
        ("needle", "passkey", ("router", "gradient", 0.5, 100, "exact_match"), ""),
        ("needle", "passkey", ("router", "snapkv", 0.5, 100, "native_exact_match"), ""),
        ("longbench", "x", ("base [plumbing]", "gradient", 0.1, 20, "accuracy", "Legal"), "27.3"),
        ("longbench", "x", ("kvcat", "gradient", 0.5, 100, "accuracy", "total"), "31.2"),
        ("qa", "cloze", ("attn", "dense", 1.0, None, "acc_per_char", "hellaswag"), "50.7"),
        ("qa", "cloze", ("base", "dense", 1.0, None, "acc_per_char", "average"), "51.5"),
        ("qa", "cloze", ("base", "dense", 1.0, None, "acc_per_char", "social_i_qa"), ""),
        ("ruler", "ruler-4096", ("base", "gradient", 0.1, 100, "string_match"), ""),
    ],
)
def test_a_cell_of_the_paper_is_found_by_evaluation_label_method_keep_step_and_stratum(
    evaluation, dataset, cell, printed
):
    assert Paper("Qwen2.5-0.5B", evaluation, dataset).printed(*cell) == printed
    assert Paper(None, evaluation, dataset).printed(*cell) == ""


def test_other_corpora_of_the_paper_go_by_the_name_of_ours():
    cell = ("base", "attention-matching", 0.05, None, "delta_ppl")
    assert Paper("Qwen2.5-1.5B", "suffix", "arxiv:test").printed(*cell) == "1.659"
    assert Paper("Qwen2.5-0.5B", "suffix", "arxiv:test").printed(*cell) == ""
    assert Paper("Qwen2.5-1.5B", "suffix", "arxiv:test").note == ""
    with pytest.raises(InputError, match=r"no model 'gpt'; it has Qwen2.5-0.5B and Qwen2.5-1.5B"):
        Paper("gpt", "suffix", "x")


def test_the_needle_table_has_plain_native_and_dense_matches(folders):
    table = quality_table(folders["needle"], Paper("Qwen2.5-0.5B", "needle", "passkey"), "gradient")
    assert heads(table)[3:6] == ["exact match", "exact match, native", "exact match, dense"]
    assert [cell.paper for cell in row_of(table, "50%", "100", "kvcat")[3:6]] == ["", "47", ""]


def test_the_depth_table_has_a_row_per_depth_and_one_for_all(folders):
    table = strata_table(folders["needle"], NONE, "gradient")
    assert [row[2] for row in table.blocks[0]] == ["0", "0.25", "0.5", "0.75", "1", "all"]
    records = [
        record
        for record in MADE_UP["needle"]()
        if (record.model, record.method, record.keep_ratio, record.step) == ("kvcat", "gradient", 0.5, 100)
    ]
    right = [record.values["exact_match"] for record in records if record.stratum == "0.25"]
    assert row_of(table, "50%", "100", "0.25")[6].estimate.value == sum(right) / len(right)
    assert row_of(table, "50%", "100", "all")[3] == str(len(records)) == "30"


def test_longbench_is_reported_after_20_and_100_steps_by_sub_domain_with_the_total(folders):
    table = strata_table(folders["longbench"], NONE, "gradient")
    assert [(block[0][0], block[0][1], len(block)) for block in table.blocks] == [
        ("10%", "20", 4), ("10%", "100", 4), ("50%", "20", 4), ("50%", "100", 4),
    ]  # fmt: skip
    assert [row[3] for row in table.blocks[0]] == ["24", "12", "8", "44"]
    parts = tables_by_part(folders["longbench"], NONE)
    baselines = next(table for table in parts["Results"] if table.name == "baselines")
    assert [block[0][:2] for block in baselines.blocks] == [
        ("dense", "100%"), ("no-context", "0%"), ("truncated", "50%"), ("truncated", "10%"),
    ]  # fmt: skip


def test_qa_averages_are_means_over_tasks_with_intervals(folders):
    table = strata_table(folders["qa"], Paper("Qwen2.5-0.5B", "qa", "cloze"), "dense")
    assert heads(table)[2:] == ["base", "control", "router", "rand", "attn"]
    assert [row[0] for row in table.rows][-3:] == ["average of six", "average of seven", "average of eight"]
    own = [record for record in MADE_UP["qa"]() if record.model == "router"]
    exact = averages(task_accuracies(own))
    for name in ("six", "seven", "eight"):
        figure = row_of(table, f"average of {name}")[4]
        assert figure.estimate.value == pytest.approx(exact[name], abs=1e-12)
        assert figure.estimate.low < exact[name] < figure.estimate.high
    assert row_of(table, "average of six")[1] == "90"
    assert [cell.paper for cell in row_of(table, "average of six")[2:]] == ["51.5", "", "52.2", "50.7", "50.2"]


def test_the_interval_of_an_average_is_that_of_independent_tasks(tmp_path):
    records = made_up_qa(models=("base",), num_questions=100)
    found = read_results(write_results(tmp_path / "qa", records, "qa")).averages
    eight = next(average for average in found if average.name == "eight").estimate
    shares = task_accuracies(records).values()
    error = math.sqrt(sum(share * (1.0 - share) / 100 for share in shares)) / 8
    assert eight.high - eight.low == pytest.approx(2 * 1.96 * error, rel=0.05)


def test_differences_name_their_verdict_and_mcnemars_test(folders):
    table = differences_table(folders["needle"], "kvcat", "base")
    row = next(row for row in table.rows if row[0] == "gradient after 100 steps" and row[1] == "50%")
    right = {
        model: {
            record.document: record.values["exact_match"]
            for record in MADE_UP["needle"]()
            if (record.model, record.method, record.keep_ratio, record.step) == (model, "gradient", 0.5, 100)
        }
        for model in ("kvcat", "base")
    }
    only = [sum(right[a][d] > right[b][d] for d in right[a]) for a, b in (("kvcat", "base"), ("base", "kvcat"))]
    assert row[heads(table).index("right alone")] == f"{only[0]} : {only[1]}"
    assert any("examples: differences under" in note or "agree on all" in note for note in table.notes)
    suffix = differences_table(folders["suffix"], "kvcat", "control")
    assert suffix.rows[0][heads(suffix).index("KL ratio")].verdict == "better"


def test_costs_stand_beside_quality_per_example(folders):
    table = costs_table(folders["suffix"])
    row = row_of(table, "attention-matching", "40%", "kvcat")
    assert [cell.estimate.value for cell in row[4:]] == pytest.approx(
        [0.05 / 0.15**2, 28.0, 1638 / 1024, 1638 / 4096, 0.5, 1.5]
    )
    quality = quality_table(folders["suffix"], NONE, "attention-matching")
    assert row[3].estimate == row_of(quality, "40%", "kvcat")[heads(quality).index("KL")].estimate
    assert "gradient after 100 steps" in {row[0] for row in table.rows}


def test_models_that_cannot_do_the_task_are_labelled_plumbing_everywhere(tmp_path):
    results = read_results(write_results(tmp_path / "r", made_up_longbench(skill=0.25), "longbench"))
    assert list(results.models) == ["base [plumbing]", "kvcat [plumbing]"]
    for part in tables_by_part(results, NONE).values():
        for table in part:
            assert any("plumbing" in text for text in (markdown_table(table), table.caption))
    assert any("not above chance" in note for note in strata_table(results, NONE, "gradient").notes)
    capable = read_results(write_results(tmp_path / "s", made_up_longbench(), "longbench"))
    assert list(capable.models) == ["base", "kvcat"]
    assert not capable.plumbing


def test_the_headline_names_the_method_and_how_much_data_stands_behind_it():
    rows = summarise(made_up_records(num_documents=6, methods=("attention-matching",)))
    text = headline_text(rows)
    assert text.startswith("attention-matching, 12 windows of 6 documents\n")
    assert [line.split()[0] for line in text.splitlines() if "base" in line] == ["5%", "10%", "20%", "40%"]
    assert headline_markdown(rows).count("\n") == 2 + 4 * 3


def test_the_headline_of_a_method_with_steps_is_its_last_step_and_no_baseline():
    rows = summarise(MADE_UP["needle"]())
    last = next(r for r in rows if (r.model, r.method, r.keep_ratio, r.step) == ("base", "gradient", 0.1, 100))
    text = headline_text(rows)
    assert text.startswith("gradient, 30 examples of 30 documents\n")
    assert f"{100 * last['exact_match'].value:.1f}" in text
    assert text.count("base") == 2
