import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from report_examples import made_up_records, write_results

from kvcat.report.plots import COLOURS, difference_plot, draw_profile, headline_plots, save_profile_plot
from kvcat.report.results import read_results

MODELS = ["base", "kvcat"]


def row(model, slots, mean, method="best"):
    return {"model": model, "num_slots": slots, "method": method, "mean": mean, "worst": 5.0 * mean}


ROWS = [
    row(model, slots, (slots < 8) / slots / scale)
    for model, scale in zip(MODELS, (1, 2), strict=True)
    for slots in (4, 1, 8)
]


def test_there_is_one_line_per_model_with_the_best_caches_errors():
    axes = Figure().subplots()
    draw_profile(axes, pd.DataFrame([*ROWS, row("base", 1, 3.0, method="first")]), "worst", MODELS)
    assert [line.get_label() for line in axes.lines] == MODELS
    for line, scale, colour in zip(axes.lines, (1, 2), COLOURS, strict=False):
        assert np.array_equal(line.get_xdata(), [1, 4])  # an error of 0 has no place on a log axis
        assert np.allclose(line.get_ydata(), [5 / scale, 1.25 / scale])
        assert line.get_color() == colour


def test_the_plot_is_a_file_also_where_all_errors_are_zero(tmp_path):
    assert save_profile_plot(pd.DataFrame([row("base", 8, 0.0)]), tmp_path).read_bytes()[1:4] == b"PNG"


def test_gain_and_what_a_user_gets_are_drawn_on_one_scale_with_a_line_per_method(tmp_path):
    records = made_up_records(("base", "kvcat"), 3, ("attention-matching", "snapkv"))
    results = read_results(write_results(tmp_path / "r", records))
    (headline,) = headline_plots(results)
    assert [title for title, _ in headline.panels] == ["KL, attention-matching", "NLL compact, attention-matching"]
    plot = difference_plot(results, "kvcat", "base")
    panels = list(Figure().subplots(1, 2))
    plot._draw(panels)
    assert [title for title, _ in plot.panels] == ["KL: kvcat minus base", "NLL compact: kvcat minus base"]
    assert panels[0].get_ylim() == panels[1].get_ylim()
    assert panels[0].get_legend_handles_labels()[1] == ["attention-matching", "snapkv"]
