import base64
import dataclasses
import json
import re
import struct
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from report_examples import (
    made_up_longbench,
    made_up_needle,
    made_up_records,
    write_results,
    write_run,
)

from kvcat.cli.report import report as report_command
from kvcat.errors import InputError
from kvcat.evals import compare_models, summarise
from kvcat.files import jsonl_bytes, read_jsonl
from kvcat.report import write_report as write_with_all_draws
from kvcat.report.figures import file_names
from kvcat.report.plots import COLOURS, line_style
from tiny import refusal

pytestmark = pytest.mark.slow  # whole pages with all their plots

DRAWS = 200
VOID = {"meta", "link", "br", "img", "wbr", "input"}


def write_report(*args, **options):
    return write_with_all_draws(*args, num_resamples=DRAWS, **options)


class Balanced(HTMLParser):
    """Tags that are still open, ids, and what they refer to."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.ids = []
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        self.open += [tag] if tag not in VOID else []
        self.ids += [value for name, value in attrs if name == "id"]
        self.addresses += [value for name, value in attrs if name in ("href", "src")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


MODELS = ("base", "control", "kvcat")
METHODS = ("attention-matching", "gradient")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    folder = write_results(
        root / "results", made_up_records(MODELS, 6, METHODS), prefix_len=192, suffix_len=64
    )
    runs = {
        "control": write_run(root / "control", "control"),
        "kvcat": write_run(root / "kvcat", "router"),
    }
    return write_report(
        [folder], root / "out", title="A <title>", runs=runs, context={"cost": "1 < 2 minutes"}
    )


def test_the_page_is_well_formed_makes_no_request_and_all_links_reach(report):
    page = Balanced()
    page.feed(report.read_text())
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    links = [address for address in page.addresses if not address.startswith("data:")]
    assert {link[1:] for link in links} <= set(page.ids)
    assert not re.search(r"<script [^>]*src|@import|url\(|fetch\(|import\(", report.read_text())


def test_the_page_opens_with_three_figures_then_differences_drawn_and_as_a_table(report):
    text = report.read_text()
    tiles = re.findall(
        r'<div class="tile (.*?)">\s*<p>(.*?)</p>\s*<p class="big">(.*?)</p>\s*<p>(\[.*?\])', text
    )
    assert [tile[1] for tile in tiles] == [
        "KL, ratio to control",
        "NLL on the compact cache, minus control",
        "Dense loss, minus control",
    ]
    rows = pd.read_csv(report.parent / "comparisons.csv").set_index("metric")
    rows = rows.query(
        "method == 'attention-matching' and keep_ratio == 0.1 and reference == 'control'"
    )
    kl, dense = (rows[rows["model"] == "kvcat"].loc[name] for name in ("kl", "nll_dense"))
    assert float(tiles[0][2]) == pytest.approx(kl["ratio"], abs=5e-4)
    assert float(tiles[2][2]) == pytest.approx(dense["difference"], abs=5e-5)
    assert (
        [tile[0].split()[0] for tile in tiles[::2]]
        == [kl["verdict"], dense["verdict"]]
        == ["better", "worse"]
    )
    order = [
        text.index(mark)
        for mark in ('class="tiles"', "<figure>", "Intervals (95 %)", "<table>", "framed")
    ]
    assert order == sorted(order)
    for expected_text in (
        "not training seeds",
        "No primary cell was named",
        "1 &lt; 2 minutes",
        "A &lt;title&gt;",
    ):
        assert expected_text in text


def test_tables_plots_and_every_row_in_full_precision_are_files_next_to_the_page(report):
    tables = (
        "quality-attention-matching",
        "differences-kvcat-control",
        "differences-control-base",
        "costs",
    )
    assert all(
        (report.parent / "tables" / f"{name}.{end}").exists()
        for name in tables
        for end in ("md", "tex")
    )
    for name in ("headline", "training", "differences-kvcat-control", "steps-kl"):
        assert (
            min(struct.unpack(">II", (report.parent / "plots" / f"{name}.png").read_bytes()[16:24]))
            > 400
        )
    records = made_up_records(MODELS, 6, METHODS)
    summary = summarise(records, num_resamples=DRAWS)
    comparisons = compare_models(records, "control", num_resamples=DRAWS)
    for name, frame in (("summary", summary), ("comparisons", comparisons)):
        written = pd.read_csv(report.parent / f"{name}.csv")
        keys = [
            key
            for key in ("model", "reference", "method", "keep_ratio", "step", "metric")
            if key in frame
        ]
        both = frame.astype({"step": float}).merge(written, on=keys, suffixes=("", "_written"))
        value = "value" if name == "summary" else "difference"
        assert len(both) > 50
        # pandas 2 reads the last digits of some numbers wrongly
        for column in (value, "low"):
            shown = both[f"{column}_written"]
            assert np.allclose(both[column], shown, rtol=1e-12, atol=1e-15, equal_nan=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_results(
        tmp_path_factory.mktemp("results") / "r", made_up_records(("base",), 3, ("snapkv",))
    )


def test_folders_of_one_name_get_sections_and_a_report_on_one_model_shows_its_figures(
    folder, tmp_path
):
    other = write_results(tmp_path / "code" / "r", made_up_longbench(skill=0.25), "longbench")
    write_report([other], tmp_path / "b")  # what it leaves there is replaced
    pages = [write_report([folder, other, folder], tmp_path / name) for name in "ab"]
    files = [
        {f.relative_to(p.parent): f.read_bytes() for f in p.parent.rglob("*") if f.is_file()}
        for p in pages
    ]
    assert files[0] == files[1]
    names = {
        name.name.partition("-quality")[0]
        for name in files[0]
        if name.match("tables/*-quality-*.tex")
    }
    assert len(names) == 2
    text = pages[0].read_text()
    for expected_text in (
        "LongBench v2 (",
        "Not a result, base: dense accuracy",
        "KL by slots kept",
    ):
        assert expected_text in text


def test_methods_and_folders_whose_names_differ_in_signs_alone_have_files_of_their_own(tmp_path):
    records = made_up_records(MODELS[:2], 2, ("snapkv",))
    labels = ("a:b", "a b", "A-b")
    by_method = [
        dataclasses.replace(record, method=label) for record in records for label in labels
    ]
    folders = [write_results(tmp_path / name, by_method) for name in ("r 1", "r-1")]
    page = write_report(folders, tmp_path / "out")
    written = [file.read_text() for file in (page.parent / "tables").glob("*-quality-*.md")]
    captions = Counter(text.partition(": 4 windows of")[0] for text in written)
    assert captions == {
        f"### Text after a compressed prefix, made-up. {label}": 2 for label in labels
    }
    plots = {file.name for file in (page.parent / "plots").glob("*-differences-*.png")}
    assert plots == {"r-1-differences-control-base.png", "r-1-2-differences-control-base.png"}
    assert file_names(["a b", "A-b", "a-b-2", "c"]) == ["a-b", "A-b-2", "a-b-2-2", "c"]


def sentences(page):
    return re.findall(r'<p class="verdict">(.*?)</p>', page.read_text(), flags=re.DOTALL)


def test_the_page_begins_with_one_sentence_on_the_outcome(report, tmp_path):
    folder = write_results(tmp_path / "alone", made_up_records(("base",), 6, METHODS))
    of_models = sentences(report)
    of_methods = sentences(write_report([folder], tmp_path / "out"))
    number = r"[+-]?\d+\.\d+"
    interval = rf"{number} \[{number}, {number}\]"
    assert re.fullmatch(
        rf"kvcat is better than control by KL \(ratio {interval}\); it is level by NLL on "
        r"the compact cache, worse by dense loss\.",
        of_models[0],
    )
    assert re.fullmatch(
        rf"At 10 % of the slots, the lowest KL is that of gradient {interval}; next "
        rf"attention-matching {interval}\.",
        of_methods[0],
    )
    assert (len(of_models), len(of_methods)) == (1, 1)


def test_a_share_is_in_per_cent_in_the_sentence_and_has_one_unit_in_the_caption(tmp_path):
    folder = write_results(tmp_path / "needle", made_up_needle(("base",)), "needle")
    page = write_report([folder], tmp_path / "out")
    (sentence,) = sentences(page)
    figure = r"\d+\.\d % \[\d+\.\d, \d+\.\d\]"
    pattern = rf"At \d+ % of the slots, the exact match of gradient is {figure}\."
    assert re.fullmatch(pattern, sentence), sentence
    text = page.read_text()
    assert "exact match (%) by method and share of the slots kept." in text
    captions = (page.parent / "tables").glob("*.md")
    assert not any("()" in caption.read_text() for caption in captions)


def test_models_are_shown_even_if_another_one_was_stopped_in_its_baselines(tmp_path):
    records = made_up_needle(per_depth=4)
    stopped = [r for r in records if r.model == "base" and r.method in ("dense", "no-context")]
    records = stopped + [r for r in records if r.model == "kvcat"]
    text = write_report(
        [write_results(tmp_path / "r", records, "needle")], tmp_path / "out"
    ).read_text()
    assert "kvcat" in text.partition("gradient")[2]


RECORDS = "records.jsonl"
METRICS = "metrics.jsonl"


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        (RECORDS, {"example": "x", "values": {"nll": 1.0}}, "without 'kl'"),
        (RECORDS, {"example": "x", "stratum": "y"}, "document 'd0' lies in two strata"),
        (METRICS, {"dense_loss": "x"}, f"{METRICS} is damaged: ValueError"),
        (METRICS, {"step": None}, f"{METRICS} is damaged: IntCastingNaNError"),
    ],
)
def test_damaged_results_are_one_line_before_anything_is_written(name, changes, line, tmp_path):
    folder = write_results(tmp_path / "results", made_up_records(("base",), 3, ("snapkv",)))
    (folder / METRICS).write_text((write_run(tmp_path / "run", "router") / METRICS).read_text())
    records = read_jsonl(folder / name)
    (folder / name).write_bytes(jsonl_bytes(*records, {**records[0], **changes}))
    assert line in refusal(
        write_report, [folder], tmp_path / "out", title="T", runs={"kvcat": folder}
    )
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_reported_is_one_line_before_anything_is_written(folder, tmp_path):
    empty = tmp_path / "empty"
    out = tmp_path / "out"
    empty.mkdir()
    for folders, runs, model, line in [
        ([empty], {}, None, "not a results folder"),
        ([folder], {"kvcat": empty}, None, "not a training run"),
        ([], {}, None, "no results folder and no run given"),
        ([folder], {}, "gpt", "no model 'gpt'"),
    ]:
        with pytest.raises(InputError, match=line):
            write_report(folders, out, title="t", runs=runs, paper_model=model)
    twice = tuple(write_run(tmp_path / name / "router", "router") for name in "ab")
    with pytest.raises(InputError, match="same label 'router'; give LABEL=FOLDER"):
        report_command(twice, output=out)
    assert not out.exists()


def test_a_run_of_one_step_and_perfect_compression_are_drawn(tmp_path):
    records = [
        r for r in made_up_records(num_documents=3, methods=("snapkv",)) if r.keep_ratio == 0.2
    ]
    for record in records:
        record.values.update(kl=0.0, delta_nll=0.0, delta_ppl=0.0)
    run = tmp_path / "run"
    run.mkdir()
    (run / METRICS).write_text(
        json.dumps({"kind": "train", "step": 1, "dense_loss": 2.0, "kept": {}}) + "\n"
    )
    assert write_report(
        [write_results(tmp_path / "r", records)], tmp_path / "out", title="t", runs={"kvcat": run}
    )


def test_a_method_has_one_colour_in_all_sections(tmp_path):
    folders = []
    for name, methods in (("a", METHODS), ("b", METHODS[1:])):
        records = made_up_records(("base",), 3, methods)
        folders.append(write_results(tmp_path / name, records))
    page = write_report(folders, tmp_path / "out").read_text()
    sections = page.split("<section ")[1:3]
    images = [base64.b64decode(re.search(r"svg\+xml;base64,([^\"]+)", s)[1]) for s in sections]
    drawn = [{colour for colour in COLOURS if colour.lower().encode() in i} for i in images]
    assert drawn == [set(COLOURS[:2]), {COLOURS[1]}]


def test_no_two_of_many_lines_have_the_same_colour_and_marker():
    names = [str(number) for number in range(49)]
    styles = {tuple(line_style(name, names).values()) for name in names}
    assert len(styles) == 49


def test_a_page_of_training_runs_alone_explains_nothing_that_it_does_not_show(tmp_path):
    run = write_run(tmp_path / "run", "router")
    page = write_report([], tmp_path / "out", runs={"kvcat": run}).read_text()
    assert "Training runs" in page
    for absent in ("Wilson", "bootstrap", "How to read this"):
        assert absent not in page
