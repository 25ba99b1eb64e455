import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from kvcat.report.plots import COLOURS, draw_profile, save_profile_plot

MODELS = ["base", "kvcat"]
KINDS = ["model", "random"]


def row(model, kind, slots, mean, worst, method="best"):
    cell = {"model": model, "kind": kind, "num_slots": slots, "method": method}
    return {**cell, "mean": mean, "worst": worst}


ROWS = [
    row(model, kind, slots, 1.0 / (1 + slots) / scale if slots < 8 else 0.0, 5.0 / (1 + slots) if slots < 8 else 0.0)
    for model, scale in zip(MODELS, (1, 2), strict=True)
    for kind in [*KINDS, "all"]
    for slots in (4, 0, 1, 8)
]


@pytest.mark.parametrize(("statistic", "top"), [("mean", 1.0), ("worst", 5.0)])
def test_there_is_one_line_per_model_and_kind_with_the_best_caches_errors(statistic, top):
    axes = Figure().subplots()
    draw_profile(axes, pd.DataFrame([*ROWS, row("base", "model", 1, 3.0, 3.0, method="first")]), statistic, MODELS)
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == [f"{model}, {kind}" for model in MODELS for kind in KINDS]
    for label, line in lines.items():
        scale = 2 if statistic == "mean" and label.startswith("kvcat") else 1
        assert np.array_equal(line.get_xdata(), [0, 1, 4])
        assert np.allclose(line.get_ydata(), [top / scale, top / 2 / scale, top / 5 / scale])
        assert line.get_color() == COLOURS[MODELS.index(label.split(",")[0])]
    assert lines["base, model"].get_linestyle() != lines["base, random"].get_linestyle()
    assert (axes.get_xscale(), axes.get_yscale()) == ("symlog", "log")
    assert [(text.get_text(), text.get_position()[0]) for text in axes.texts] == [("error 0", 8)]


def test_the_plot_is_a_file_also_where_all_errors_are_zero(tmp_path):
    for name, rows in (("a", ROWS), ("b", ROWS), ("zero", [row("base", "model", 8, 0.0, 0.0)])):
        save_profile_plot(pd.DataFrame(rows), tmp_path / name)
    assert (tmp_path / "a" / "profile.png").read_bytes() == (tmp_path / "b" / "profile.png").read_bytes()
    assert (tmp_path / "zero" / "profile.png").read_bytes().startswith(b"\x89PNG")
