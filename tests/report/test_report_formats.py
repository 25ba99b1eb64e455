import re
from base64 import b64decode

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_examples import made_up_records, write_results

from kvcat.report.figures import Figure, Table, latex, markdown
from kvcat.report.plots import difference_plot, headline_plot
from kvcat.report.results import read_results

NAN = float("nan")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    records = made_up_records(("base", "kvcat"), 3, ("attention-matching", "snapkv"))
    folder = write_results(tmp_path_factory.mktemp("results") / "r", records)
    return read_results(folder, num_resamples=50)


def table(label="10 %", note="A note."):
    cells = [
        Figure(0.03214, 0.029, 0.0355, 4, verdict="better", paper="paper 0.0321"),
        Figure(-0.5, NAN, NAN, 1, True),
    ]
    lines = [
        {"keep": label, "model": name, "metric 0 (%)": cells[0], "metric 1 (%)": cells[1]}
        for name in ("kv_cat0", "kv_cat1")
    ]
    return Table("quality", "Quality", "Suffix, 50 % & more", pd.DataFrame(lines), (note,))


def check_structure(text):
    """Environments, braces and columns of LaTeX tables fit together."""
    assert text.count("\\begin{table}") == text.count("\\end{table}")
    plain = re.sub(r"\\[{}\\]", "", text)
    assert plain.count("{") == plain.count("}")
    for letters, body in re.findall(
        r"\\begin\{tabular\}\{@\{\}([lr]+)@\{\}\}(.*?)\\end\{tabular\}", text, flags=re.S
    ):
        cells = re.sub(r"\\shortstack\[r\]\{.*?\}\}|\\&", "", body)
        lines = [line for line in cells.splitlines() if line.rstrip().endswith("\\\\")]
        assert lines
        assert all(line.count("&") == len(letters) - 1 for line in lines)


def test_markdown_and_latex_have_intervals_verdicts_and_the_papers_figures():
    lines = markdown(table()).splitlines()
    assert lines[0] == "### Suffix, 50 % & more"
    assert lines[2] == "| keep | model | metric 0 (%) | metric 1 (%) |"
    assert lines[4] == "| 10 % | kv_cat0 | 0.0321 [0.0290, 0.0355] better paper 0.0321 | -50.0 |"
    assert lines[-1] == "A note."
    text = latex(table(), "tab:x")
    check_structure(text)
    assert "\\caption{Suffix, 50 \\% \\& more}\n\\label{tab:x}" in text
    small = "\\\\{\\scriptsize [0.0290, 0.0355]}\\\\{\\scriptsize paper 0.0321}"
    assert "\\shortstack[r]{0.0321$^+$" + small + "}" in text
    assert "$-$50.0" in text
    assert "kv\\_cat0" in text


@given(st.text(alphabet='ab \\&%$#_{}~^<>|"\n-[*', max_size=30))
def test_no_text_can_break_a_latex_table(text):
    check_structure(latex(table(label=text, note=text), "tab:x"))
    assert "{}[" in latex(table(label="[a]"), "tab:x")


def test_gain_and_what_a_user_gets_are_drawn_on_one_scale_with_a_line_per_method(results):
    plot = difference_plot(results, "kvcat", "base").draw()
    kl, nll = plot.panels
    assert kl.get_title() == "KL: kvcat minus base"
    assert nll.get_title() == "NLL compact: kvcat minus base"
    assert kl.get_ylim() == nll.get_ylim()
    assert kl.get_legend_handles_labels()[1] == ["no difference", "attention-matching", "snapkv"]


def test_the_headline_of_several_models_has_a_panel_for_each_and_a_line_per_method(results):
    base, kvcat = headline_plot(results).draw().panels
    assert base.get_title() == "KL, base"
    assert kvcat.get_title() == "KL, kvcat"
    assert base.get_ylim() == kvcat.get_ylim()
    for panel in (base, kvcat):
        assert panel.get_legend_handles_labels()[1] == ["attention-matching", "snapkv"]


def test_each_image_holds_one_panel_without_its_title(results):
    plot = headline_plot(results).draw()
    images = plot.images()
    assert [title for title, _ in images] == ["KL, base", "KL, kvcat"]
    for _, address in images:
        picture = b64decode(address.partition(",")[2]).decode()
        assert "KL (nats/token" in picture
        assert "KL, base" not in picture
        assert "KL, kvcat" not in picture
