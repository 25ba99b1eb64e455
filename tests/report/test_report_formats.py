import re
import shutil
import subprocess

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcat.report.tables import Figure, Table, latex, markdown

COMPILER = next((name for name in ("pdflatex", "tectonic", "lualatex", "xelatex") if shutil.which(name)), None)
NAN = float("nan")


def table(rows=2, figures=2, label="10%", note="A note."):
    cells = [Figure(0.03214, 0.029, 0.0355, 4, verdict="better", paper="0.0321"), Figure(-0.5, NAN, NAN, 1, True)]
    lines = [
        {"keep": label, "model": name, **{f"metric {i} (%)": cells[i % 2] for i in range(figures)}}
        for name in [f"kv_cat{row}" for row in range(rows)]
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


def test_markdown_has_intervals_verdicts_and_the_papers_figures():
    lines = markdown(table()).splitlines()
    assert lines[0] == "### Suffix, 50% & more"
    assert lines[2] == "| keep | model | metric 0 (%) | metric 1 (%) |"
    assert lines[4] == "| 10% | kv_cat0 | 0.0321 [0.0290, 0.0355] better paper 0.0321 | -50.0 |"
    assert lines[-1] == "A note."


def test_latex_is_a_booktabs_table_with_small_intervals_and_minus_signs():
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


@pytest.mark.skipif(COMPILER is None, reason="no LaTeX compiler on this machine")
def test_tables_compile_and_fit_the_page(tmp_path):
    body = "".join(latex(table(*size), f"tab:{size[0]}") for size in ((2, 2, '<5% ~^\\ "a"|'), (60, 14)))
    source = "\\documentclass{article}\n\\usepackage{booktabs,adjustbox}\n\\begin{document}\n"
    (tmp_path / "page.tex").write_text(f"{source}{body}\\end{{document}}\n", encoding="utf-8")
    options = [] if COMPILER == "tectonic" else ["-halt-on-error", "-interaction=nonstopmode"]
    run = subprocess.run([str(COMPILER), *options, "page.tex"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:]
    assert "Overfull" not in run.stdout
    assert "too large" not in run.stdout
