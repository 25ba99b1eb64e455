"""What every evaluation promises: a new one adds one row to ``ROWS``."""

from dataclasses import is_dataclass
from pathlib import Path

import pytest

import kvcat
from kvcat.evals import METRICS, evaluate, find_evaluation, summarise
from kvcat.evals.registry import evaluation_names
from tiny import sentences

SMALL = Path(__file__).parents[2] / "runs" / "small"
pytestmark = pytest.mark.filterwarnings("default")  # the harness and its imports warn
ROWS = {  # options of a small task
    "suffix": {"prefix": 32, "suffix": 16, "windows": 2, "split": "all", "data": (("TEXTS",),)},
    "profile": {"prefix": 32, "suffix": 16, "windows": 2, "data": "TEXTS"},
    "needle": {"length": 200, "per_depth": 1},
    "ruler": {"tasks": (("niah_single",),), "length": ((400,),), "per_task": 2},
    "longbench": {"data": "LONGBENCH", "sub_domain": (("all",),), "max_tokens": 700, "limit": 2},
    "qa": {"data": "QA", "limit": 1},
    "tools": {"num_functions": 2, "cases": 2},
}


@pytest.fixture(scope="module")
def loaded():
    return {"base": kvcat.load("kvcat-base")}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contract")
    for number in range(4):
        (folder / f"{number}.txt").write_text("".join(sentences(40, seed=number)))
    return folder


def options_of(name, texts, out):
    places = {"TEXTS": str(texts), "LONGBENCH": str(SMALL / "longbench.jsonl"), "QA": SMALL / "qa"}
    options = dict(ROWS[name])
    if "data" in options:
        data = options["data"]
        options["data"] = ((places["TEXTS"],),) if isinstance(data, tuple) else places[data]
    return find_evaluation(name)(models=("kvcat-base",), out=out, **options)


def test_every_evaluation_has_a_row():
    assert sorted(ROWS) == evaluation_names()


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("name", ROWS)
def test_an_evaluation_records_the_metrics_that_it_shows_and_the_whole_cache_loses_nothing(
    name, loaded, texts, tmp_path
):
    if name == "qa":
        pytest.importorskip("lm_eval", reason="multiple choice needs lm-evaluation-harness")
    options = options_of(name, texts, tmp_path)
    kind = type(options)
    assert is_dataclass(kind)
    assert f"Example: kvcat eval {name} " in kind.__doc__
    _, tokenizer = loaded["base"]
    value = getattr(options, kind.folder_option)[0][0] if kind.folder_option else None
    task = options.make_task(tokenizer, value)
    assert find_evaluation(task.evaluation).facts == kind.facts
    methods, keep_ratios = (["first"], [1.0]) if task.compresses else ([], [])
    records = evaluate(task, loaded, methods, keep_ratios, tmp_path, progress=False)
    whole = summarise(records, num_resamples=20).query("stratum == ''")
    assert set(kind.facts.metrics) <= set(whole["metric"])
    compressed = whole[whole["method"] == "first"].set_index("metric")["value"]
    for metric in set(compressed.index) & set(kind.facts.metrics):
        dense = METRICS[metric].dense_metric
        if dense in compressed:
            assert compressed[metric] == pytest.approx(compressed[dense], abs=1e-5)


def test_a_label_in_a_report_says_one_thing_in_all_evaluations():
    for name in evaluation_names():
        find_evaluation(name)
    by_label = {}
    for metric in METRICS.values():
        assert by_label.setdefault(metric.label, metric.description) == metric.description
