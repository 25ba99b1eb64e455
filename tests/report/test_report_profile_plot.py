import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from kvcat.evals import Estimate
from kvcat.evals.profile_summary import ProfileRow
from kvcat.report.plots import COLOURS
from kvcat.report.profile_plot import draw_profile, save_profile_plot

MODELS = ["base", "kvcat"]
KINDS = ["model", "random"]


def row(model, kind, slots, mean, worst, method="best", measure="kl"):
    return ProfileRow(
        model, kind, slots, slots / 8, method, measure, Estimate(mean, math.nan, math.nan), worst, None, math.nan,
        math.nan, 1, 5, {},
    )  # fmt: skip


ROWS = [
    row(model, kind, slots, 1.0 / (1 + slots) / scale if slots < 8 else 0.0, 5.0 / (1 + slots) if slots < 8 else 0.0)
    for model, scale in zip(MODELS, (1, 2), strict=True)
    for kind in [*KINDS, "all"]
    for slots in (4, 0, 1, 8)
]


@pytest.mark.parametrize(("statistic", "top"), [("mean", 1.0), ("worst", 5.0)])
def test_there_is_one_line_per_model_and_kind_with_the_best_caches_errors(statistic, top):
    others = [row("base", "model", 1, 3.0, 3.0, method="first")]
    for axes in [Figure().subplots()]:
        draw_profile(axes, [*ROWS, *others], statistic, MODELS)
        lines = {line.get_label(): line for line in axes.lines}
        assert list(lines) == [f"{model}, {kind}" for model in MODELS for kind in KINDS]
        for label, line in lines.items():
            scale = 2 if statistic == "mean" and label.startswith("kvcat") else 1
            assert np.array_equal(line.get_xdata(), [0, 1, 4])
            assert np.allclose(line.get_ydata(), [top / scale, top / 2 / scale, top / 5 / scale])
            assert line.get_color() == COLOURS[MODELS.index(label.split(",")[0])]
        assert lines["base, model"].get_linestyle() != lines["base, random"].get_linestyle()
        assert (axes.get_xscale(), axes.get_yscale()) == ("symlog", "log")
        assert [text.get_text() for text in axes.texts] == ["error 0"]
        assert axes.texts[0].get_position()[0] == 8


def test_a_single_model_needs_no_name_in_the_legend():
    for axes in [Figure().subplots()]:
        draw_profile(axes, [r for r in ROWS if r.model == "base" and r.num_slots < 8], "mean", ["base"])
        assert [line.get_label() for line in axes.lines] == KINDS
        assert not axes.texts


@pytest.mark.parametrize("measure", ["kl", "tv", "log_prob", "output"])
def test_the_plot_is_two_files_that_another_run_writes_again_to_the_last_byte(tmp_path, measure):
    rows = [row(r.model, r.kind, r.num_slots, r.mean.value, r.worst, measure=measure) for r in ROWS]
    written = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths = save_profile_plot([*rows, row("base", "model", 1, 9.0, 9.0, measure="none")], tmp_path / name,
                                  measure=measure)  # fmt: skip
        assert [path.name for path in paths] == ["profile.png", "profile.svg"]
        written.append([path.read_bytes() for path in paths])
    assert written[0] == written[1]
    assert written[0][0].startswith(b"\x89PNG")
    assert b"kvcat, random" in written[0][1]


def test_errors_that_are_all_zero_still_make_a_plot(tmp_path):
    save_profile_plot([row("base", "model", 8, 0.0, 0.0)], tmp_path)
    assert (tmp_path / "profile.png").stat().st_size > 1000
