from matplotlib.figure import Figure
from report_examples import made_up_records, write_results

from kvcat.report.plots import difference_plot, headline_plot
from kvcat.report.results import read_results


def test_gain_and_what_a_user_gets_are_drawn_on_one_scale_with_a_line_per_method(tmp_path):
    records = made_up_records(("base", "kvcat"), 3, ("attention-matching", "snapkv"))
    results = read_results(write_results(tmp_path / "r", records))
    headline = headline_plot(results)
    assert [title for title, _ in headline.panels] == ["KL, attention-matching", "NLL compact, attention-matching"]
    plot = difference_plot(results, "kvcat", "base")
    panels = list(Figure().subplots(1, 2))
    plot._draw(panels)
    assert [title for title, _ in plot.panels] == ["KL: kvcat minus base", "NLL compact: kvcat minus base"]
    assert panels[0].get_ylim() == panels[1].get_ylim()
    assert panels[0].get_legend_handles_labels()[1] == ["attention-matching", "snapkv"]
    levels = Figure().subplots()
    headline.panels[1][1](levels)
    assert levels.get_legend_handles_labels()[1] == ["base", "kvcat", "whole cache"]
