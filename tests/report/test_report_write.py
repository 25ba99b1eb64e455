import csv
import io
import json
import re
import struct
from html.parser import HTMLParser

import pytest
from report_examples import made_up_needle, made_up_records, write_results, write_run

from kvcat.errors import InputError
from kvcat.evals.rows import compare_models, summarise
from kvcat.report import write_report
from kvcat.report.rowfiles import comparison_csv, summary_csv

VOID = {"meta", "link", "br", "use", "path", "circle", "rect"}


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.ids, self.references, self.urls = [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag, attrs):
        self._note(attrs)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def _note(self, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "xlink:href", "src"):
                (self.references if value.startswith("#") else self.urls).append(value)
            self.references += re.findall(r"url\((#[^)]*)\)", value or "")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    records = made_up_records(("control", "kvcat"), 3, ("attention-matching", "gradient"))
    folder = write_results(root / "results", records)
    runs = {"control": write_run(root / "control", "control"), "kvcat": write_run(root / "kvcat", "router")}
    return write_report([folder], root / "out", title="A <title>", runs=runs, context={"cost": "1 < 2 minutes"})


def test_the_page_is_well_formed_with_unique_ids_that_all_links_reach(report):
    page = Balanced()
    page.feed(report.read_text())
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    assert {reference[1:] for reference in page.references} <= set(page.ids)


def test_the_page_makes_no_request(report):
    page = Balanced()
    page.feed(report.read_text())
    assert all(url.startswith("data:") for url in page.urls)
    assert not re.search(r"<script|@import|url\((?!#)", report.read_text())


def test_what_was_run_stands_in_the_page_escaped(report):
    text = report.read_text()
    for part in ["A &lt;title&gt;", "1 &lt; 2 minutes", "kvcat eval suffix base control kvcat", "12 s", "f-kvcat"]:
        assert part in text
    for section in ["Text after a compressed prefix", "Training", "How to read this", "What was run"]:
        assert re.search(rf"<h2[^>]*>{section}</h2>", text)
    parts = ["Verdict", "Results", "Plots", "Optimization steps", "Improvement", "Differences", "Costs", "All tables"]
    assert re.findall(r"<h3>(.*?)</h3>", text)[:8] == parts


def test_tables_and_plots_stand_beside_the_page(report):
    names = {file.relative_to(report.parent).as_posix() for file in report.parent.rglob("*") if file.is_file()}
    plots = [
        "headline",
        "training",
        "pareto",
        *(f"quality-{m}" for m in ("kl", "nll", "delta_nll")),
        "steps-kl",
        "difference-nll",
    ]
    tables = ["quality-attention-matching", "steps-gradient", "differences-kvcat-control", "improvement", "speed-up"]
    tables += ["smallest-keep", "costs"]
    assert {"summary.csv", "comparisons.csv"} <= names
    assert {f"tables/{name}.{end}" for name in tables for end in ("md", "csv", "tex")} <= names
    assert {f"plots/{name}.png" for name in plots} <= names
    for file in (report.parent / "plots").iterdir():
        width, height = struct.unpack(">II", file.read_bytes()[16:24])
        assert width > 600
        assert height > 400


def test_csv_files_hold_every_row_in_full_precision():
    records = made_up_records(num_documents=3, methods=("attention-matching",))
    needle = made_up_needle(per_depth=2, keeps=(0.1,))
    rows = [*summarise(records), *summarise(needle), *summarise(needle, by_stratum=True)]
    lines = list(csv.DictReader(io.StringIO(summary_csv(rows))))
    assert len(lines) == len(rows)
    row = rows[0]
    assert [float(lines[0][name]) for name in ("kl", "nll", "nll_high")] == [
        row["kl"].value, row["nll"].value, row["nll"].high,
    ]  # fmt: skip
    assert lines[0]["exact_match"] == ""
    assert {line["stratum"] for line in lines if line["dataset"] == "passkey"} == {"", "0", "0.25", "0.5", "0.75", "1"}
    comparisons = [*compare_models(records), *compare_models(needle)]
    lines = list(csv.DictReader(io.StringIO(comparison_csv(comparisons))))
    compared = comparisons[0]
    assert float(lines[0]["nll_difference_low"]) == compared.differences["nll"].low
    assert float(lines[0]["kl_ratio"]) == compared.ratios["kl"].value
    assert lines[0]["exact_match_p"] == ""
    assert all(line["exact_match_p"] for line in lines if line["dataset"] == "passkey")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    records = made_up_records(models=("base", "kvcat"), num_documents=2, methods=("random",))
    return write_results(tmp_path_factory.mktemp("results") / "r", records)


def test_two_reports_of_the_same_results_are_identical_in_every_file(results, tmp_path):
    files = []
    for name in ("a", "b"):
        out = write_report([results], tmp_path / name, title="t").parent
        files.append({file.relative_to(out): file.read_bytes() for file in out.rglob("*") if file.is_file()})
    assert files[0] == files[1]


def test_one_model_is_reported_without_a_comparison(tmp_path):
    records = made_up_records(models=("base",), num_documents=3, methods=("random",))
    page = write_report([write_results(tmp_path / "r", records)], tmp_path / "out", title="t")
    assert "nothing to compare" in page.read_text()


def test_two_folders_get_sections_and_files_of_their_own(tmp_path):
    records = made_up_records(models=("base",), num_documents=2, methods=("random",))
    folders = [write_results(tmp_path / name / "r", records) for name in ("books", "code")]
    page = write_report(folders, tmp_path / "out", title="t")
    for name in ("books-r", "code-r"):
        assert f"Text after a compressed prefix ({name})</h2>" in page.read_text()
        assert (page.parent / "tables" / f"{name}-quality-random.tex").exists()
        assert (page.parent / "plots" / f"{name}-quality-kl.png").exists()
    with pytest.raises(InputError, match="cannot be told apart"):
        write_report([folders[0], folders[0]], tmp_path / "twice", title="t")
    with pytest.raises(InputError, match="no model 'gpt'"):
        write_report(folders, tmp_path / "gpt", title="t", paper_model="gpt")


def test_a_folder_without_results_a_run_without_metrics_and_no_folder_are_refused(results, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="no results folder"):
        write_report([empty], tmp_path / "out", title="t")
    with pytest.raises(InputError, match=r"no training run"):
        write_report([results], tmp_path / "out", title="t", runs={"kvcat": empty})
    with pytest.raises(InputError, match="no results folder and no run given"):
        write_report([], tmp_path / "out", title="t")
    assert not (tmp_path / "out").exists()


def test_a_run_of_one_step_and_perfect_compression_are_drawn(tmp_path):
    records = [r for r in made_up_records(num_documents=3, methods=("random",)) if r.keep_ratio == 0.4]
    for record in records:
        record.values.update(kl=0.0, delta_nll=0.0, delta_ppl=0.0)
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "dense_loss": 2.0, "kept": {}}) + "\n")
    page = write_report([write_results(tmp_path / "r", records)], tmp_path / "out", title="t", runs={"kvcat": run})
    assert page.exists()


def test_a_folder_whose_run_is_not_finished_says_so(tmp_path):
    records = made_up_records(("control", "kvcat"), 24, ("attention-matching",))
    whole = write_results(tmp_path / "whole", records)
    part = write_results(tmp_path / "part", [r for r in records if r.model == "control" or int(r.document[1:]) < 6])
    assert "INCOMPLETE" not in write_report([whole], tmp_path / "a", title="T").read_text()
    page = write_report([part], tmp_path / "b", title="T").read_text()
    assert "INCOMPLETE: kvcat has 12 of 48 examples under attention-matching at keep" in page


def test_a_torn_line_of_provenance_is_left_out(tmp_path):
    folder = write_results(tmp_path / "results", made_up_records(("control",), 3, ("attention-matching",)))
    log = folder / "provenance.jsonl"
    log.write_bytes(log.read_bytes()[:-5] + b"\n")
    assert write_report([folder], tmp_path / "page", title="T").exists()


def test_damaged_costs_and_records_are_one_line(tmp_path):
    folder = write_results(tmp_path / "results", made_up_records(("control",), 3, ("attention-matching",)))
    (folder / "costs.jsonl").write_text("garbage\n")
    with pytest.raises(InputError, match="no cost"):
        write_report([folder], tmp_path / "page", title="T")
    (folder / "costs.jsonl").unlink()
    with (folder / "records.jsonl").open("a") as stream:
        line = json.loads((folder / "records.jsonl").read_text().splitlines()[0])
        stream.write(json.dumps({**line, "example": "x", "values": 3}) + "\n")
    with pytest.raises(InputError, match="no record"):
        write_report([folder], tmp_path / "page", title="T")


def test_the_verdict_names_every_method(tmp_path):
    records = made_up_records(("control", "kvcat"), 12, ("attention-matching", "snapkv"))
    page = write_report([write_results(tmp_path / "results", records)], tmp_path / "page", title="T").read_text()
    assert "kvcat against control, snapkv: KL" in page
