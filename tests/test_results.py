"""The page of results is what the records give (runs/smollm2, runs/scale)."""

import gzip
import itertools
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from kvcat.errors import InputError
from kvcat.evals import Record

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "smollm2"


@pytest.fixture(scope="module")
def scripts():
    """The scripts' modules by name, and nothing of them afterwards."""
    sys.path.insert(0, str(FOLDER))
    import add_records
    import plots
    import records
    import tables

    yield {"add_records": add_records, "plots": plots, "records": records, "tables": tables}
    sys.path.remove(str(FOLDER))
    for name in ("add_records", "plots", "records", "tables", "curve"):
        del sys.modules[name]


def blocks():
    """The tables of the page by name."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    pattern = r"<!-- table (\S+) -->\n\n(.*?)\n<!-- end of the table -->"
    return dict(re.findall(pattern, text, re.DOTALL))


@pytest.mark.parametrize(
    "name",
    ["exact", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scale", "summary"))],
)
def test_the_page_shows_what_the_command_prints(scripts, name):
    assert blocks()[name] == scripts["tables"].table(name)


@pytest.mark.slow
def test_the_figures_of_the_summary_are_those_of_the_tables_of_one_form(scripts):
    tables = scripts["tables"]
    lines = [line for line in blocks()["summary"].splitlines() if line.startswith("|")][2:]
    for line, (name, title) in zip(lines, tables.SUMMARY.items(), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0] == title
        if name not in ("books/router-128@0", "books/attn-48@0", "books/attn-reader-w0.3-64"):
            continue  # one row of each kind: a run, other steps, several runs
        table = tables.table(name)
        assert f"Dense NLL {cells[3]} p " in table.replace("\n", " ")
        for cell, (metric, method, _) in zip(cells[4:], tables.COLUMNS.values(), strict=True):
            label = tables.METHODS[method] + (", ridge start" if method == tables.PAPER else "")
            if cell != "-":
                assert f"| {tables.PARTS[metric]}, {label} | {cell} p " in table


@pytest.mark.slow
def test_no_ratio_is_marked_whose_interval_holds_1(scripts):
    """As the page says: a mark needs an interval without the value of no difference. A bound next
    to it may be printed as 1.000."""
    cell = re.compile(r"(?:\*\*[.\d]+\*\*|[.\d]+†) \[([-.\d]+), ([-.\d]+)\]")
    num_marked = 0
    for name in ("summary", "books/router-256", "2026-11-26/books/router-64@0"):
        for line in scripts["tables"].table(name).splitlines():
            ratios = line.split("|")[5:9] if name == "summary" else [line]
            for low, high in cell.findall("|".join(ratios)):
                if name == "summary" or line.startswith("| KL"):
                    num_marked += 1
                    assert float(high) <= 1 or float(low) >= 1, f"{name}: {line}"
    assert num_marked > 40


def test_a_ratio_and_a_difference_of_a_table_are_those_of_plain_means_of_the_file(scripts):
    with gzip.open(FOLDER / "records.csv.gz", "rt") as file:
        rows = pd.read_csv(file)
    rows = rows[(rows["text"] == "books") & (rows["seed"] == 0) & (rows["keep_ratio"] == 0.05)]
    means = rows.groupby(["model", "method"])[["kl", "nll", "nll_dense", "context_gain"]].mean()
    ours = means.loc["router-256", "h2o"]
    theirs = means.loc["control-256", "h2o"]
    table = scripts["tables"].table("books/router-256")
    cells = [line.split("|") for line in table.splitlines()[3:-2]]
    first_cell = {title.strip(): cell for _, title, cell, *_ in cells}
    ratio = ours["kl"] / theirs["kl"]
    assert f"{ratio:.3f}".lstrip("0") in first_cell["KL, H2O"]
    per_gain = ratio * theirs["context_gain"] / ours["context_gain"]
    assert f"{per_gain:.3f}".lstrip("0") in first_cell["KL per nat of context gain, H2O"]
    difference = ours["nll"] - theirs["nll"]
    assert f"{difference:+.4f}".replace("+0", "+") in first_cell["NLL on the cache, H2O"]
    dense = ours["nll_dense"] - theirs["nll_dense"]
    assert f"Dense NLL **{dense:+.4f}**".replace("+0", "+") in table


def test_a_p_value_of_a_table_is_the_share_of_exchanges_with_as_large_a_difference(scripts):
    with gzip.open(FOLDER / "records.csv.gz", "rt") as file:
        rows = pd.read_csv(file)
    rows = rows[(rows["text"] == "books") & (rows["seed"] == 0) & (rows["method"] == "snapkv")]
    rows = rows[rows["keep_ratio"] == 0.1]
    by_document = rows.pivot_table(index="document", columns="model", values="nll", aggfunc="sum")
    differences = (by_document["router-256"] - by_document["control-256"]).to_numpy()
    signs = np.array(list(itertools.product([1, -1], repeat=len(differences))))
    sums = np.abs(signs @ differences)
    p_value = (sums >= sums[0] - 1e-9).mean()
    table = scripts["tables"].table("books/router-256")
    (line,) = (line for line in table.splitlines() if "NLL on the cache, SnapKV" in line)
    assert line.split("|")[3].split(" p ")[1].strip() == f"{p_value:.3f}".lstrip("0")


def test_the_log_is_newest_first():
    log = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    days = re.findall(r"^## (\d{4}-\d\d-\d\d)$", log, re.MULTILINE)
    assert days == sorted(set(days), reverse=True)


def made_up_rows():
    windows = [
        (model, seed, f"d{number}", 10.0 * price + number, kl * number)
        for model, seeds, price, kl in (
            ("control-8", "01", 0.0, 2.0),
            ("rand-8", "0", 0.2, 1.0),
            ("rand-w0.5-8", "02", 0.1, 1.5),
        )
        for seed in seeds
        for number in range(1, 7)
    ]
    rows = pd.DataFrame(windows, columns=["model", "seed", "document", "nll_dense", "kl"])
    return rows.assign(
        text="books",
        evaluated="2026-11-25",
        method="h2o",
        keep_ratio=0.1,
        window="0",
        nll=rows["nll_dense"] + 1,
        context_gain=1.0,
    )


def test_runs_are_compared_on_the_seeds_that_both_have_and_against_the_control_of_their_steps(
    scripts,
):
    records = scripts["records"]
    comparison = records.compared(made_up_rows(), "rand-w0.5-8")
    assert (comparison.control, comparison.seeds) == ("control-8", ("0",))
    row = comparison.row("kl", "h2o", 0.1)
    assert [row["ratio"], row["ratio_low"], row["ratio_high"]] == pytest.approx([0.75] * 3)
    dense = comparison.dense.loc["nll_dense"]
    assert [dense["difference"], dense["low"], dense["high"]] == pytest.approx([1.0] * 3)
    assert records.price_share(made_up_rows(), "rand-w0.5-8", "rand-8").value == pytest.approx(0.5)
    assert "| KL, H2O | **.750** [.750, .750] p .031 |" in scripts["tables"].comparison_table(
        comparison
    )


def test_a_cell_that_one_of_two_runs_lacks_is_left_out(scripts):
    rows = made_up_rows()
    second = rows[rows["model"] == "rand-8"].assign(seed="1")
    both = pd.concat([rows, second])
    rows = pd.concat([both, both[both["seed"] == "0"].assign(keep_ratio=0.2)])
    comparison = scripts["records"].compared(rows, "rand-8")
    assert comparison.seeds == ("0", "1")
    assert set(comparison.cells["keep_ratio"]) == {0.1}


def test_runs_of_several_days_are_joined_each_next_to_its_control_of_the_same_day(scripts):
    compared = scripts["records"].compared
    rows = made_up_rows()
    rows = rows[rows["seed"] == "0"]
    later = rows.assign(evaluated="2026-11-26", seed="1")
    # the first run's control was judged again, with other values
    again = rows[rows["model"] == "control-8"].assign(evaluated="2026-11-26", kl=100.0)
    days = "2026-11-25+2026-11-26"
    comparison = compared(pd.concat([rows, later, again]), "rand-8", evaluated=days)
    assert comparison.seeds == ("0", "1")
    assert comparison.row("kl", "h2o", 0.1)["ratio"] == pytest.approx(0.5)
    both = pd.concat([rows, rows.assign(evaluated="2026-11-26")])
    with pytest.raises(SystemExit, match="judged on several days"):
        compared(both, "rand-8", evaluated=days)


def test_the_base_is_compared_with_every_run(scripts):
    """It has one run, whose seed is no seed of the training."""
    rows = made_up_rows()
    base = rows[(rows["model"] == "control-8") & (rows["seed"] == "0")]
    rows = pd.concat([rows, base.assign(model="base", kl=base["kl"] * 4)])
    compared = partial(scripts["records"].compared, rows, "rand-w0.5-8")
    assert compared(control="base").seeds == ("0", "2")
    of_control = compared(seeds=["0"]).row("kl", "h2o", 0.1)["ratio"]
    of_base = compared(control="base", seeds=["0"]).row("kl", "h2o", 0.1)["ratio"]
    assert of_base == pytest.approx(of_control / 4)


def test_unknown_tables_and_models_are_rejected_in_one_line(scripts):
    for name in ("nothing", "music/router-256", "books/nothing-8", "2026-01-01/books/router-256"):
        with pytest.raises(SystemExit, match=r"no (table|records)"):
            scripts["tables"].table(name)


def test_windows_of_a_results_folder_become_rows_once(scripts, tmp_path):
    add = scripts["add_records"]
    values = {"kl": 0.123456, "nll": 3.0, "nll_dense": 2.5, "context_gain": 0.4}
    place = ("f", "float32", "h2o", "{}", 0.05, None, None, "books", "", "doc", "7", values)
    records = [Record("router-w1@1", *place), Record("base", *place)]
    new = add.rows_of(records, {"router-w1@1": "router-64"}, "books", "2026-11-27")
    (row,) = new.to_dict("records")
    assert (row["model"], row["seed"], row["kl"], row["window"]) == ("router-64", "1", 0.12346, "7")
    with pytest.raises(ValueError, match="no records of control"):
        add.rows_of(records, {"control": "control-64"}, "books", "2026-11-27")
    options = ("attention-matching", '{"preset": "paper"}')
    of_paper = Record("router-w1@1", "f", "float32", *options, *place[4:])
    with_options = add.rows_of([of_paper], {"router-w1@1": "router-64"}, "books", "2026-11-27")
    assert set(with_options["method"]) == {scripts["tables"].PAPER}
    file = tmp_path / "records.csv.gz"
    old = scripts["records"].read()
    add.write(add.joined(old, new), file)
    again = scripts["records"].read(file)
    pd.testing.assert_frame_equal(again.iloc[:-1], old)
    assert again.iloc[-1]["kl"] == 0.12346
    with pytest.raises(ValueError, match="1 rows are there already"):
        add.joined(again, new)


def test_windows_of_another_length_or_supervision_are_not_added(scripts):
    """`evaluate.sh` has other lengths by default than the file."""
    check = scripts["add_records"].check_windows
    of_file = {"evaluation": "suffix", "prefix_len": 384, "suffix_len": 128}
    of_file["supervision"] = "suffix"
    check(of_file, "books")
    check(of_file | {"supervision": "first-half"}, "books-first-half")
    with pytest.raises(ValueError, match=r"^supervision of the folder is 'suffix'"):
        check(of_file, "books-first-half")
    for name, other in (
        ("evaluation", "needle"),
        ("prefix_len", 768),
        ("suffix_len", 256),
        ("supervision", "first-half"),
    ):
        with pytest.raises(ValueError, match=f"^{name} of the folder is {other!r}, not"):
            check(of_file | {name: other}, "books")


def test_writing_the_file_again_changes_no_byte(scripts, tmp_path):
    scripts["add_records"].write(scripts["records"].read(), tmp_path / "again.csv.gz")
    with gzip.open(tmp_path / "again.csv.gz") as again, gzip.open(FOLDER / "records.csv.gz") as now:
        assert again.read() == now.read()


def test_every_line_of_the_price_curve_has_records_and_a_control(scripts):
    known = set(scripts["records"].read()["model"])
    tables = scripts["tables"]
    for name in itertools.chain(tables.SUMMARY, *scripts["plots"].LINES.values()):
        model = tables.NAME.fullmatch(name)["model"]
        assert {model, scripts["records"].control_of(model)} <= known


def test_the_curve_has_points_outside_the_queue_and_no_ratio_to_a_gain_of_nothing(scripts):
    curve = scripts["tables"].curve
    rows = curve.read()
    rows = rows[rows["model"].isin(["control-10.6", "router-10.6"]) & (rows["seed"] == "1")]
    rows = rows.assign(model=rows["model"].str.replace("-10.6", "-100"))
    rows["context_gain"] = [0.1 * (-1) ** i for i in rows.groupby(curve.KEY[:5]).cumcount()]
    *_, last = curve.table(rows).splitlines()
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells[:3] == ["router", "100", "1"]
    assert [title for title, cell in zip(curve.COLUMNS, cells[3:], strict=True) if cell == "-"] == [
        "KL / gain, default"
    ]


@pytest.mark.slow
def test_a_form_that_trains_keys_and_values_alone_has_a_control_that_does(scripts):
    curve = scripts["tables"].curve
    rows = curve.read()
    rows = rows[rows["model"].isin(["control-1", "router-1"]) & (rows["seed"] == "1")]
    keys_values = rows.assign(model=rows["model"].str.replace("-1", "-kv-1"))
    other = rows.loc[rows["model"] == "router-1"].assign(model="control-1")  # of the others
    _, _, router, *_ = curve.table(rows).splitlines()
    both = curve.table(pd.concat([keys_values, other], ignore_index=True)).splitlines()
    assert both[-1] == router.replace("| router |", "| router-kv |")
    assert both[-2].startswith("| control-kv | 1 | 1 | -")  # the control's loss is the lower one


def test_windows_of_other_packages_are_not_added_to_the_curve(scripts, monkeypatch, tmp_path):
    """The curve's texts are the installed sources: with other packages they are other windows."""
    curve = scripts["tables"].curve
    rows = curve.read()
    new = rows[rows["model"] == "router-10.6"]
    file = tmp_path / "records.csv.gz"
    monkeypatch.setattr(curve, "rows_of", lambda _: new)
    assert curve.add([tmp_path], file) == len(new)
    other = new.assign(seed=9, window=new["window"] + "x")
    monkeypatch.setattr(curve, "rows_of", lambda _: other)
    num_windows = new.loc[new["supervision"] == "reconstruction", "window"].nunique()
    with pytest.raises(InputError, match=f"{2 * num_windows} windows of reconstruction are not"):
        curve.add([tmp_path], file)
    assert len(curve.read(file)) == len(new)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"bose": "books-64"}, "no label bose: there are base"),
        ({"base": "boks-64"}, "no model boks-64: there are base, books-64"),
    ],
)
def test_answers_of_a_misspelt_label_or_model_are_not_left_out_in_silence(
    scripts, monkeypatch, tmp_path, names, message
):
    answers = scripts["tables"].answers
    monkeypatch.setattr(answers, "FILE", tmp_path / "recall.csv.gz")
    rows = pd.DataFrame({"model": ["base"], "document": ["d"]})
    monkeypatch.setitem(
        sys.modules, "question_set", SimpleNamespace(rows_of=lambda _: rows, judged=0)
    )
    (tmp_path / "out.jsonl").touch()
    with pytest.raises(InputError, match=message):
        answers.add([tmp_path / "out.jsonl"], names, "1")
    assert not answers.FILE.exists()
