import json
import re
import struct
from html.parser import HTMLParser

import pytest
from report_examples import made_up_records, write_results, write_run

from kvcat.errors import InputError
from kvcat.report import write_report

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
    records = made_up_records(num_documents=5, methods=("attention-matching", "gradient"))
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
    for section in ["Verdict", "Results", "Plots", "Optimization steps", "Comparisons", "Training", "How to read this"]:
        assert re.search(rf"<h2[^>]*>{section}</h2>", text)


def test_tables_and_plots_stand_beside_the_page(report):
    names = {file.relative_to(report.parent).as_posix() for file in report.parent.rglob("*") if file.is_file()}
    plots = [
        "headline",
        "training",
        *(f"quality-{m}" for m in ("kl", "nll", "delta_nll")),
        "steps-kl",
        "difference-nll",
    ]
    assert {"summary.md", "summary.csv", "comparisons.md", "comparisons.csv"} <= names
    assert {f"plots/{name}.png" for name in plots} <= names
    for file in (report.parent / "plots").iterdir():
        width, height = struct.unpack(">II", file.read_bytes()[16:24])
        assert width > 600
        assert height > 400


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    records = made_up_records(models=("base", "kvcat"), num_documents=3, methods=("random",))
    return write_results(tmp_path_factory.mktemp("results") / "r", records)


def test_two_reports_of_the_same_results_are_identical(results, tmp_path):
    pages = [write_report([results], tmp_path / name, title="t").read_bytes() for name in ("a", "b")]
    assert pages[0] == pages[1]


def test_one_model_is_reported_without_a_comparison(tmp_path):
    records = made_up_records(models=("base",), num_documents=3, methods=("random",))
    page = write_report([write_results(tmp_path / "r", records)], tmp_path / "out", title="t")
    assert "nothing to compare" in page.read_text()


def test_two_folders_get_sections_of_their_own(tmp_path):
    records = made_up_records(models=("base",), num_documents=2, methods=("random",))
    folders = [write_results(tmp_path / name, records) for name in ("books", "code")]
    text = write_report(folders, tmp_path / "out", title="t").read_text()
    assert "Verdict (books)" in text
    assert "Verdict (code)" in text


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
