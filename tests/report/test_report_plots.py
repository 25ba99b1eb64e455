import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from report_examples import made_up_records, write_results

from kvcat.report.plots import COLOURS, difference_plot, draw_profile, save_profile_plot
from kvcat.report.results import read_results

MODELS, KINDS = ["base", "kvcat"], ["model", "random"]


def row(model, kind, slots, mean, method="best"):
    return {"model": model, "kind": kind, "num_slots": slots, "method": method,
            "mean": mean, "worst": 5.0 * mean}  # fmt: skip


ROWS = [
    row(model, kind, slots, (slots < 8) / (1 + slots) / scale)
    for model, scale in zip(MODELS, (1, 2), strict=True)
    for kind in [*KINDS, "all"]
    for slots in (4, 0, 1, 8)
]


def test_there_is_one_line_per_model_and_kind_with_the_best_caches_errors():
    axes = Figure().subplots()
    draw_profile(axes, pd.DataFrame([*ROWS, row("base", "model", 1, 3.0, method="first")]), "worst", MODELS)
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == [f"{model}, {kind}" for model in MODELS for kind in KINDS]
    for label, line in lines.items():
        scale = 2 if label.startswith("kvcat") else 1
        assert np.array_equal(line.get_xdata(), [0, 1, 4])
        assert np.allclose(line.get_ydata(), [5 / scale, 2.5 / scale, 1 / scale])
        assert line.get_color() == COLOURS[MODELS.index(label.split(",")[0])]
    assert lines["base, model"].get_linestyle() != lines["base, random"].get_linestyle()
    assert [(text.get_text(), text.get_position()[0]) for text in axes.texts] == [("error 0", 8)]


def test_the_plot_is_a_file_also_where_all_errors_are_zero(tmp_path):
    assert save_profile_plot(pd.DataFrame([row("base", "model", 8, 0.0)]), tmp_path).read_bytes()[1:4] == b"PNG"


def test_gain_and_what_a_user_gets_are_drawn_on_one_scale_with_a_line_per_method(tmp_path):
    records = made_up_records(("base", "kvcat"), 3, ("attention-matching", "snapkv"))
    plot = difference_plot(read_results(write_results(tmp_path / "r", records)), "kvcat", "base")
    panels = list(Figure().subplots(1, 2))
    plot._draw(panels)
    assert [title for title, _ in plot.panels] == ["KL: kvcat minus base", "NLL compact: kvcat minus base"]
    assert panels[0].get_ylim() == panels[1].get_ylim()
    assert panels[0].get_legend_handles_labels()[1] == ["attention-matching", "snapkv"]
