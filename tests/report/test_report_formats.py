import re

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure as Canvas
from report_examples import made_up_records, write_results

from kvcat.report.plots import difference_plot, headline_plot
from kvcat.report.results import read_results
from kvcat.report.tables import Figure, Table, latex, markdown

NAN = float("nan")


def table(label="10%", note="A note."):
    cells = [Figure(0.03214, 0.029, 0.0355, 4, verdict="better", paper="paper 0.0321"), Figure(-0.5, NAN, NAN, 1, True)]
    lines = [
        {"keep": label, "model": name, "metric 0 (%)": cells[0], "metric 1 (%)": cells[1]}
        for name in ("kv_cat0", "kv_cat1")
    ]
    return Table("quality", "Quality", "Suffix, 50% & more", pd.DataFrame(lines), (note,))


def check_structure(text):
    """Environments, braces and columns of LaTeX tables fit together."""
    assert text.count("\\begin{table}") == text.count("\\end{table}")
    plain = re.sub(r"\\[{}\\]", "", text)
    assert plain.count("{") == plain.count("}")
    for letters, body in re.findall(r"\\begin\{tabular\}\{@\{\}([lr]+)@\{\}\}(.*?)\\end\{tabular\}", text, flags=re.S):
        cells = re.sub(r"\\shortstack\[r\]\{.*?\}\}|\\&", "", body)
        lines = [line for line in cells.splitlines() if line.rstrip().endswith("\\\\")]
        assert lines
        assert all(line.count("&") == len(letters) - 1 for line in lines)


def test_markdown_and_latex_have_intervals_verdicts_and_the_papers_figures():
    lines = markdown(table()).splitlines()
    assert lines[0] == "### Suffix, 50% & more"
    assert lines[2] == "| keep | model | metric 0 (%) | metric 1 (%) |"
    assert lines[4] == "| 10% | kv_cat0 | 0.0321 [0.0290, 0.0355] better paper 0.0321 | -50.0 |"
    assert lines[-1] == "A note."
    text = latex(table(), "tab:x")
    check_structure(text)
    assert "\\caption{Suffix, 50\\% \\& more}\n\\label{tab:x}" in text
    small = "\\\\{\\scriptsize [0.0290, 0.0355]}\\\\{\\scriptsize paper 0.0321}"
    assert "\\shortstack[r]{0.0321$^+$" + small + "}" in text
    assert "$-$50.0" in text
    assert "kv\\_cat0" in text


@given(st.text(alphabet='ab \\&%$#_{}~^<>|"\n-[*', max_size=30))
def test_no_text_can_break_a_latex_table(text):
    check_structure(latex(table(label=text, note=text), "tab:x"))
    assert "{}[" in latex(table(label="[a]"), "tab:x")


def test_gain_and_what_a_user_gets_are_drawn_on_one_scale_with_a_line_per_method(tmp_path):
    records = made_up_records(("base", "kvcat"), 3, ("attention-matching", "snapkv"))
    results = read_results(write_results(tmp_path / "r", records))
    headline = headline_plot(results)
    assert [title for title, _ in headline.panels] == ["KL, attention-matching", "NLL compact, attention-matching"]
    plot = difference_plot(results, "kvcat", "base")
    panels = list(Canvas().subplots(1, 2))
    plot._draw(panels)
    assert [title for title, _ in plot.panels] == ["KL: kvcat minus base", "NLL compact: kvcat minus base"]
    assert panels[0].get_ylim() == panels[1].get_ylim()
    assert panels[0].get_legend_handles_labels()[1] == ["attention-matching", "snapkv"]
    levels = Canvas().subplots()
    headline.panels[1][1](levels)
    assert levels.get_legend_handles_labels()[1] == ["base", "kvcat", "whole cache"]
