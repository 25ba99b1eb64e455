"""The joint report of KL on several models."""

import sys
from pathlib import Path
from types import SimpleNamespace

import leaderboard
import numpy as np
import pytest
import quality
import questions
from named_models import NamedModel, parse_models
from quality import makes_cache, report, report_kinds, table, written

from kvcat.errors import InputError
from kvcat.stats.intervals import ClusterBootstrap
from tiny import refusal


def records_of(label, scale):
    """Two methods on four windows; the second has half the first one's KL on three of them."""
    records = []
    for window in range(4):
        for method, factor in (("attention-matching", 1.0), ("refined", 0.5 if window else 2.0)):
            kl = scale * (window + 1) * factor
            about = {"model": label, "window": window, "kind": "ab"[window % 2]}
            about |= {"document": f"d{window}", "method": method, "keep": 0.1, "seconds": 1.0}
            records.append({**about, "way": "suffix", "halves": [kl, 2 * kl]})
            records.append({**about, "way": "self", "halves": [kl, 3 * kl]})
    return records


def test_a_report_has_means_ratios_and_the_windows_on_which_a_method_is_ahead(capsys):
    records = records_of("one", 0.01) + records_of("two", 0.1)
    report(records, ["attention-matching", "refined"], [0.1], ["suffix", "self"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "one: 4 windows of 4 documents (2 a, 2 b)"
    fitted = lines.index("| fitted | one 10 % | two 10 % |")
    first, second = lines[fitted + 2 : fitted + 4]
    assert first.startswith("| `attention-matching` | 0.025 [")
    assert "| 0.25 [" in first
    # (2 + 1 + 1.5 + 2) / (1 + 2 + 3 + 4)
    assert second.count("| 0.65 [") == 2
    assert second.count("], 3/4 |") == 2


def test_one_document_has_no_interval():
    one = ClusterBootstrap(["a", "a"]).mean(np.array([1.0, 3.0]))
    assert written(one) == "2 (no interval)"
    two = ClusterBootstrap(["a", "b"]).mean(np.array([1.0, 3.0]))
    assert written(two).startswith("2 [")


def test_a_document_alone_counts_both_halves():
    losses = table(records_of("one", 0.01))
    np.testing.assert_allclose(losses["self", "attention-matching", 0.1].mean(), 0.05)
    np.testing.assert_allclose(losses["later", "attention-matching", 0.1].mean(), 0.05)


def test_windows_that_a_method_lacks_do_not_count():
    records = records_of("one", 0.01)
    missing = [r for r in records if (r["window"], r["method"], r["way"]) != (1, "refined", "self")]
    assert list(table(missing).index.get_level_values("window")) == [0, 2, 3]


def test_kinds_have_their_own_means(capsys):
    report_kinds(records_of("one", 0.01), "attention-matching", [0.1])
    lines = capsys.readouterr().out.splitlines()
    assert "| one, a, later | 0.04 |" in lines
    assert "| one, b, self | 0.06 |" in lines


@pytest.mark.parametrize(
    ("method", "ways"),
    [
        ("attention-matching", {"suffix", "self", "reconstruction"}),
        ("refined,preset=known", {"suffix", "reconstruction"}),
        ("gradient,init=attention-matching", {"suffix", "reconstruction"}),
        ("original-omp-fast", {"suffix"}),
        ("snapkv", {"suffix"}),
        ("grkv", {"suffix"}),
    ],
)
def test_a_method_makes_a_cache_where_it_has_something_to_learn_from(method, ways):
    everything = ("suffix", "self", "reconstruction")
    assert {way for way in everything if makes_cache(method, way)} == ways


def test_models_are_named_by_their_label_or_folder():
    models = parse_models(["smollm2-135m", "folder/small", "Big=folder/large"])
    assert [model.label for model in models] == ["smollm2-135m", "small", "Big"]
    assert models[2] == NamedModel("Big", "folder/large")
    assert "share a label" in refusal(parse_models, ["a/x", "b/x"])
    assert "is no model" in refusal(parse_models, ["=x"])


@pytest.mark.parametrize(
    ("benchmark", "arguments"),
    [
        (quality, ["--data", "text=none", "--methods", "h2o", "no-such-method"]),
        (questions, ["--conditions", "h2o@self", "no-such-method@self"]),
        (leaderboard, ["--data", "text=none", "--add", "no-such-method"]),
    ],
)
def test_an_unknown_method_is_rejected_before_a_model_is_loaded(
    benchmark, arguments, tmp_path, monkeypatch
):
    monkeypatch.setattr(leaderboard, "METHODS", {"h2o": "H2O"})
    out = ["--model", "no-such-model", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, *arguments, *out])
    assert "no compressor 'no-such-method'" in refusal(benchmark.main)


def test_a_method_that_cannot_compress_the_model_is_left_out_and_the_others_go_on(
    monkeypatch, capsys
):
    def measured(_traces, method, _way, keeps):
        if method == "no-windows":
            raise InputError("it compresses all layers or none")
        for keep in keeps:
            yield {"keep": keep}

    named = SimpleNamespace(label="m", tokenizer=None, load_for=lambda _: None)
    window = SimpleNamespace(kind="prose", document="d", tokens=lambda *_: [])
    options = SimpleNamespace(
        methods=["no-windows", "h2o"], ways=["suffix"], keep=[0.1], prefix=4, peer=None, out=Path()
    )
    monkeypatch.setattr(quality, "measure", measured)
    monkeypatch.setattr(quality, "method_of", lambda spec, _: spec)
    monkeypatch.setattr(quality, "encoder", lambda _: None)
    records = list(quality.run(named, [window, window], options, set()))
    assert [(record["method"], record["window"]) for record in records] == [("h2o", 0), ("h2o", 1)]
    assert capsys.readouterr().err.count("no-windows is left out: it compresses all") == 1


def test_methods_that_make_no_cache_in_any_way_are_rejected_and_one_of_several_has_no_kinds(
    tmp_path, monkeypatch, capsys
):
    words = "quality.py --model kvcat-base --data a=a --methods snapkv --ways self --out"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(tmp_path / "out")])
    assert "snapkv makes no cache of its own in the way self" in refusal(quality.main)
    assert not (tmp_path / "out").exists()
    report_kinds(records_of("one", 0.01), "snapkv", [0.1])
    assert capsys.readouterr().out == ""
