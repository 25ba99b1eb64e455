import math
import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcat.report.latex import escape, latex_table
from kvcat.report.tabledata import Column, Figure, TableData, standing_out

from kvcat.evals import Estimate
from kvcat.report.paper import paper_cell

COMPILER = next((name for name in ("pdflatex", "tectonic", "lualatex", "xelatex") if shutil.which(name)), None)
COLUMNS = (
    Column("keep", "left"),
    Column("model", "left"),
    Column("KL", decimals=4),
    Column("top-1", percent=True, decimals=1),
)
NAN = float("nan")


def table(blocks=None, columns=COLUMNS, caption="Suffix completion, 50% & more", label="tab:suffix"):
    def row(keep, model, variant, best):
        fields = {
            "table": "tab:attention-matching-ppl",
            "model": "Qwen2.5-0.5B",
            "variant": variant,
            "keep_ratio": keep,
        }
        cells = [paper_cell(**fields, metric=metric) for metric in ("kl", "top1")]
        kl, top1 = ("" if cell is None else cell.printed.rstrip("%") for cell in cells)
        figures = Figure(Estimate(0.03214, 0.029, 0.0355), best, kl), Figure(Estimate(0.885, NAN, NAN), False, top1)
        return (f"{100 * keep:g}%", model, *figures)

    rows = [[row(keep, "base", "base", False), row(keep, "kv_cat", "kv-cat", True)] for keep in (0.1, 0.15)]
    return TableData(columns, tuple(map(tuple, rows if blocks is None else blocks)), caption, label)


def columns_per_line(text):
    """Columns that each line between the rules fills, spans counted."""
    body = text[text.index("\\toprule") : text.index("\\bottomrule")]
    body = re.sub(r"\\(top|mid)rule|\\cmidrule\(lr\)\{[\d-]+\}", "", body)
    lines = [line for line in re.split(r"\\\\(?:\[-2pt\])?\n", body) if line.strip()]
    spans = [sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d)\}", line)) for line in lines]
    return [1 + len(re.findall(r"(?<!\\)&", line)) + span for line, span in zip(lines, spans, strict=True)]


def check_structure(text):
    opened, stack = re.findall(r"\\(begin|end)\{(\w+)\}", text), []
    for kind, name in opened:
        if kind == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert not stack
    bare = re.sub(r"\\[\\{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert len(re.findall(r"(?<!\\)\$", text)) % 2 == 0
    assert not re.search(r"(\\\\|rule)\s*[\[*](?!-2pt\])", text)
    letters = re.search(r"\\begin\{tabular\}\{@\{\}([lcr]+)@\{\}\}", text)
    assert letters
    assert set(columns_per_line(text)) == {len(letters[1])}


def test_a_table_shows_value_interval_and_the_papers_figure():
    text = latex_table(table())
    check_structure(text)
    assert "\\multicolumn{2}{c}{KL} & \\multicolumn{2}{c}{top-1 (\\%)}" in text
    assert "\\cmidrule(lr){3-4}\\cmidrule(lr){5-6}\nkeep & model & ours & paper & ours & paper \\\\" in text
    interval = " &  & {\\scriptsize [0.0290, 0.0355]} &  &  &  \\\\\n"
    assert f"10\\% & base & 0.0321 & 0.0483 & 88.5 & 89.3 \\\\[-2pt]\n{interval}" in text
    assert f" & kv\\_cat & \\textbf{{0.0321}} & 0.0321 & 88.5 & 91.4 \\\\[-2pt]\n{interval}" in text


def test_where_the_paper_has_no_cell_its_place_is_empty():
    text = latex_table(table())
    assert "15\\% & base & 0.0321 &  & 88.5 &  \\\\[-2pt]" in text


def test_without_figures_of_the_paper_there_is_one_line_of_heads():
    text = latex_table(table([[("10%", "base", Figure(Estimate(-0.5, -1.0, 0.0)), Figure(Estimate(NAN, NAN, NAN)))]]))
    check_structure(text)
    assert "keep & model & KL & top-1 (\\%) \\\\\n\\midrule\n" in text
    assert "10\\% & base & $-$0.5000 & -- \\\\[-2pt]\n &  & {\\scriptsize [$-$1.0000, 0.0000]} &  \\\\" in text
    assert "Bold" not in text


def test_blocks_are_ruled_apart_and_repeat_no_first_cell():
    text = latex_table(table())
    assert text.count("\\midrule\n") == 2
    assert [line.split("&")[0].strip() for line in text.splitlines() if "[-2pt]" in line] == [
        "10\\%", "", "15\\%", "",
    ]  # fmt: skip
    assert "Bold: better than every other model" in text


def test_every_special_character_is_escaped():
    assert escape("a_b & 5% #1 {x} $y$ ~ ^ \\ <b>|") == (
        "a\\_b \\& 5\\% \\#1 \\{x\\} \\$y\\$ \\textasciitilde{} \\textasciicircum{} \\textbackslash{} "
        "\\textless{}b\\textgreater{}\\textbar{}"
    )
    assert escape("two\n\nlines") == "two lines"


def test_a_line_that_begins_with_a_bracket_or_a_star_does_not_belong_to_the_line_break_before_it():
    text = latex_table(TableData((Column("[n]"),), ((("[1]",), ("*",)),), "", "tab:x"))
    assert "\\toprule\n{}[n] \\\\\n\\midrule\n{}[1] \\\\\n{}* \\\\\n" in text
    check_structure(text)


@given(st.text(alphabet='ab \\&%$#_{}~^<>|"\n-', max_size=30))
def test_no_text_can_break_a_table(text):
    columns = (Column(text, "left"), Column("b", "center"))
    check_structure(latex_table(TableData(columns, (((text, text),), (("x", text),)), text, "tab:x")))


def test_wrong_tables_are_told():
    with pytest.raises(ValueError, match="'tab:suffix' has 1 cells for 4 columns"):
        table([[("10%",)]])
    with pytest.raises(ValueError, match="no column"):
        TableData((), (), "", "tab:x")
    with pytest.raises(ValueError, match="'tab x' cannot be the label"):
        table(label="tab x")


def test_a_model_stands_out_only_where_it_is_better_than_every_other():
    models = ["base", "control", "kvcat"]
    verdicts = {("kvcat", "base"): "better", ("kvcat", "control"): "better", ("control", "base"): "worse"}
    assert standing_out(models, verdicts) == "kvcat"
    assert standing_out(models, {**verdicts, ("kvcat", "control"): "not distinguishable"}) is None
    assert standing_out(models, {key: verdicts[key] for key in list(verdicts)[:1]}) is None
    assert standing_out(["base", "kvcat"], {("kvcat", "base"): "worse"}) == "base"
    assert standing_out(["base"], {}) is None


def big_table(figures=9, rows=40, lead="attention-matching preset=paper num_iters=8"):
    columns = (Column("method", "left"), Column("keep"), *(Column(f"metric {i}", decimals=4) for i in range(figures)))
    cells = tuple(Figure(Estimate(0.01234, -0.00456, 0.02345)) for _ in range(figures))
    blocks = tuple(tuple((f"{lead} {b}", f"{r}%", *cells) for r in range(rows)) for b in range(2))
    return TableData(columns, blocks, "Big", "tab:big", ("A note.",))


def test_wide_tables_go_on_in_parts_that_repeat_their_leading_texts():
    text = latex_table(big_table(rows=2))
    assert text.count("\\begin{table}") == 2
    assert text.count("\\caption") == text.count("\\label") == text.count("A note.") == 1
    assert "keep & metric 0 & metric 1 & metric 2 & metric 3 & metric 4 \\\\" in text
    assert "Table~\\ref{tab:big}, continued." in text
    assert "keep & metric 5 & metric 6 & metric 7 & metric 8 \\\\" in text
    assert text.count("0\\% & 0.0123") == 4


def test_a_long_text_that_a_block_shares_has_a_line_of_its_own():
    text = latex_table(big_table(figures=3, rows=2))
    assert "\\multicolumn{4}{@{}l@{}}{attention-matching preset=paper num\\_iters=8 0} \\\\\n0\\% & 0.0123" in text
    assert "method" not in text


def test_tall_tables_go_on_and_lose_no_row():
    text = latex_table(big_table(figures=2, rows=40))
    assert text.count("\\begin{table}") == 4
    for row in range(40):
        assert text.count(f"\n{row}\\% & ") == 2
    pieces = text.split("\\begin{table}")[1:]
    assert max(piece.count("\\\\") for piece in pieces) <= 56


@pytest.mark.skipif(COMPILER is None, reason="no LaTeX compiler on this machine")
@pytest.mark.parametrize("label", ["tab:x", "tab:a_b"])
def test_tables_compile_and_fit_the_page(tmp_path, label):
    blocks = [
        [('<5% ~^\\ "a"|', "a_b$#{}", Figure(Estimate(0.1, 0.0, math.pi), True), Figure(Estimate(NAN, NAN, NAN)))]
    ]
    tables = latex_table(table()) + latex_table(table(blocks, label=label)) + latex_table(big_table())
    source = "\\documentclass{article}\n\\usepackage{booktabs,graphicx}\n\\begin{document}\n"
    (tmp_path / "page.tex").write_text(f"{source}{tables}\\end{{document}}\n", encoding="utf-8")
    options = [] if COMPILER == "tectonic" else ["-halt-on-error", "-interaction=nonstopmode"]
    run = subprocess.run(
        [str(COMPILER), *options, "page.tex"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:]
    assert (tmp_path / "page.pdf").stat().st_size > 1000
    assert "Overfull" not in run.stdout
    assert "too large" not in run.stdout
