"""The commands theory histogram and theorem."""

import csv
import json
from pathlib import Path

import pytest

from kvcat.cli.app import run
from kvcat.cli.theory import parse_budget


def table(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_histogram_command_writes_both_curves_and_shows_the_optimum(tmp_path, capsys):
    argv = ["--symbols", "2", "--length", "5", "--scaling", "4", "6", "--out", str(tmp_path)]
    assert run(["theory", "histogram", *argv]) == 0
    said = capsys.readouterr().out
    assert "all 85 pairs of histograms" in said
    budgets = table(tmp_path / "budget.csv")
    assert [row["num_slots"] for row in budgets] == ["1", "2", "3", "4"]
    assert (tmp_path / "histogram.png").stat().st_size > 1000
    assert f"exact optimum over all policies {float(budgets[0]['optimum']):.10f}" in said
    rows = {(row["budget"], row["longest"]) for row in table(tmp_path / "scaling.csv")}
    assert rows == {
        (budget, n) for budget in ("r = 1", "r = max(1, n - 1)", "r = n - 1") for n in ("4", "6")
    }


def test_the_theorem_command_shows_one_network_exact_and_the_other_above_c(tmp_path, capsys):
    argv = ["--function", "parity", "mean", "--length", "3", "--constant", "0.5", "--budget", "1"]
    assert run(["theory", "theorem", *argv, "--out", str(tmp_path)]) == 0
    assert "14 sequences, 20 splits, all verified" in (said := capsys.readouterr().out)
    assert "differ in 6 rows of block 2 W_2" in said
    rows = table(tmp_path / "theorem.csv")
    bounds = table(tmp_path / "bounds.csv")
    assert [row["function"] for row in rows] == ["parity", "mean"]
    for row, bound in zip(rows, bounds, strict=True):
        assert float(row["compressible, one slot"]) < 1e-12
        assert float(row["incompressible |M - f|"]) < 1e-12
        assert (bound["n"], bound["k"], bound["r"]) == ("2", "1", "1")
        certified = float(row["incompressible, certified for every policy"])
        assert float(bound["margin"]) == certified - 0.5 > 0.0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["budget"] == "1"
    assert "torch" in report["provenance"]


def test_functions_and_lengths_may_be_named_one_by_one(tmp_path):
    argv = ["--function", "parity", "--function", "mean", "--length", "3", "--out", str(tmp_path)]
    assert run(["theory", "theorem", *argv]) == 0
    assert [row["function"] for row in table(tmp_path / "theorem.csv")] == ["parity", "mean"]
    argv = ["--scaling", "6", "--scaling", "4", "--length", "3", "--out", str(tmp_path)]
    assert run(["theory", "histogram", *argv]) == 0
    assert {row["longest"] for row in table(tmp_path / "scaling.csv")} == {"4", "6"}


def test_budgets_are_functions_of_the_prefix_length():
    budgets = {"2": [1, 2, 2, 2, 2], "n-1": [0, 1, 2, 3, 4], "n/2": [0, 1, 1, 2, 2], "0": [0] * 5}
    assert {text: [parse_budget(text)(n) for n in range(1, 6)] for text in budgets} == budgets


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder without new files")
def test_a_folder_that_cannot_be_written_to_is_named_before_anything_is_computed(capsys):
    for name in ("histogram", "theorem"):
        assert run(["theory", name, "--out", "/proc"]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("kvcat: cannot write /proc/report.json: ")
