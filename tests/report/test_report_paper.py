"""The paper's tables as data: every cell as printed, and what adds up or does not (docs/paper.md
lists it)."""

import itertools
import re
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from kvcat.report.paper import paper_tables
from kvcat.stats.significance import sign_flip_p_value

PAPER = Path(__file__).resolve().parents[3] / "shared" / "paper" / "kv-cat.tex"
SMALL = "Qwen2.5-0.5B"
LARGE = "Qwen2.5-1.5B"
PAIRS = list(itertools.product((SMALL, LARGE), ("base", "kv-cat")))
QA = "tab:fineweb-reasoning"
NEEDLE = "tab:niah"
SUFFIX = "tab:attention-matching-ppl"
LONGBENCH = "tab:lbv2-step20-selected-monotone"
DOMAINS = "tab:cross-domain-am"
QA_POLICIES = "tab:ab-reasoning"
SUFFIX_POLICIES = "tab:am_random_vs_ours"
NEEDLE_KEEPS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)


PERCENT_METRICS = ("accuracy", "exact_match", "top1")
PRINTED = paper_tables()
SHARES = PRINTED["metric"].isin(PERCENT_METRICS).map({True: 0.01, False: 1.0})
VALUES = PRINTED.assign(value=PRINTED["printed"].str.rstrip("%").astype(float) * SHARES)


def rows(**fields):
    """Rows of the paper's tables with these values, in their order."""
    values = VALUES
    for name, wanted in fields.items():
        values = values[values[name] == wanted]
    return list(values.itertuples())


def cells_of(**fields):
    """The same without the paper's own averages."""
    return [row for row in rows(**fields) if row.stratum not in ("average", "total")]


def value(**fields):
    (row,) = rows(**fields)
    return row.value


def improvement(metric, **fields):
    """How many times better KV-CAT is than the base."""
    base, ours = (value(**fields, metric=metric, variant=variant) for variant in ("base", "kv-cat"))
    return ours / base if metric in PERCENT_METRICS else base / ours


def agrees(row, value):
    """Whether a value in our units rounds to what is printed; either way if it is in the
    middle."""
    decimals = len(row.printed.rstrip("%").partition(".")[2])
    unit = 0.01 if row.metric in PERCENT_METRICS else 1.0
    return abs(value - row.value) <= 0.5 * 10.0**-decimals * unit * (1.0 + 1e-6)


def worst_p(base, ours, total):
    """McNemar's p where the two models are right on as different examples as their totals allow."""
    first = np.arange(total) < ours
    second = np.roll(np.arange(total) < base, ours - max(0, base + ours - total))
    return sign_flip_p_value(first * 1.0, second * 1.0, np.arange(total).astype(str))


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not next to the project")
@pytest.mark.parametrize("label", list(dict.fromkeys(paper_tables()["table"])))
def test_every_cell_is_what_the_papers_source_prints_in_its_order(label):
    source = PAPER.read_text(encoding="utf-8")
    source = source[source.index(f"\\label{{{label}}}") :]
    body = source[source.index("\\midrule" if "\\midrule" in source[:3000] else "\\hline") :]
    body = re.sub(
        r"\\multirow\{\d+\}|\\rotatebox\[.*?\]|\{90\}|\\cmidrule\([lr]+\)\{[\d-]+\}", "", body
    )
    body = body[: body.index("\\end{tabular}")].replace("\\textbf", "").replace("\\%", "%")
    cells = [
        re.sub(r"[{}\s*]|\\[a-z]+rule|\\hline", "", cell) for cell in re.split(r"\\\\|&", body)
    ]
    keeps = {f"{100 * keep:g}%" for keep in NEEDLE_KEEPS} | {f"{keep:.2f}" for keep in NEEDLE_KEEPS}
    figures = [cell for cell in cells if re.fullmatch(r"[\d.]+%?", cell) and cell not in keeps]
    assert figures == [row.printed for row in rows(table=label)]


def test_averages_are_over_six_tasks_and_nine_keep_ratios():
    for average in [
        *rows(table=QA, stratum="average"),
        *rows(table=QA_POLICIES, stratum="average"),
    ]:
        cells = cells_of(table=average.table, model=average.model, variant=average.variant)
        assert len(cells) == 6  # the paper says eight, and its appendix names seven
        assert agrees(average, mean(cell.value for cell in cells))
    means = {}
    for model, variant in PAIRS:
        cells = cells_of(table=NEEDLE, model=model, variant=variant)
        assert tuple(cell.keep_ratio for cell in cells) == NEEDLE_KEEPS
        means[model, variant] = mean(cell.value for cell in cells)
        assert agrees(
            *rows(table=NEEDLE, model=model, variant=variant, stratum="average"),
            means[model, variant],
        )
    assert [round(100 * (means[m, "kv-cat"] - means[m, "base"]), 1) for m in (SMALL, LARGE)] == [
        6.4,
        5.2,
    ]
    base, ours = (
        mean(c.value for c in cells_of(table=QA, model=LARGE, variant=v))
        for v in ("base", "kv-cat")
    )
    assert 100 * (ours - base) == pytest.approx(
        -0.567, abs=0.001
    )  # printed is .5, a difference of rounded averages


def test_the_longbench_cells_are_whole_numbers_of_rows_and_no_total_differs_significantly():
    counts = {}
    for total in rows(table=LONGBENCH, stratum="total"):
        cells = cells_of(table=LONGBENCH, keep_ratio=total.keep_ratio, variant=total.variant)
        assert sum(cell.num_examples for cell in cells) == total.num_examples == 221
        right = [round(cell.value * cell.num_examples) for cell in cells]
        assert all(
            agrees(cell, n / cell.num_examples) for cell, n in zip(cells, right, strict=True)
        )
        assert agrees(total, sum(right) / 221)
        counts[total.keep_ratio, total.variant] = sum(right)
    pairs = [(counts[keep, "base"], counts[keep, "kv-cat"]) for keep in (0.1, 0.2, 0.5)]
    assert pairs == [(49, 67), (49, 68), (56, 69)]  # 49 of 221 lies below chance
    assert [round(worst_p(*pair, 221), 2) for pair in pairs] == [0.11, 0.10, 0.28]


def test_the_headline_ratios_are_the_best_cells_of_their_tables():
    assert [r.value for r in rows(table=SUFFIX, model=SMALL, variant="base", keep_ratio=0.05)] == [
        0.780,
        0.0562,
        0.885,
    ]
    suffix, needle = (
        {
            (m, k): improvement(metric, table=table, model=m, keep_ratio=k)
            for m, k in itertools.product((SMALL, LARGE), keeps)
        }
        for table, metric, keeps in (
            (SUFFIX, "delta_ppl", (0.05, 0.1, 0.2, 0.4)),
            (NEEDLE, "exact_match", NEEDLE_KEEPS),
        )
    )
    assert (max(suffix, key=suffix.__getitem__), max(needle, key=needle.__getitem__)) == (
        (LARGE, 0.1),
        (SMALL, 0.5),
    )
    assert (suffix[LARGE, 0.1], needle[SMALL, 0.5]) == pytest.approx((3.21, 1.68), abs=0.005)
    cells = rows(table=DOMAINS, variant="base")
    ratios = {
        (c.stratum, c.keep_ratio, c.metric): improvement(
            c.metric, table=DOMAINS, stratum=c.stratum, keep_ratio=c.keep_ratio
        )
        for c in cells
    }
    assert ratios["WikiText-103", 0.1, "delta_ppl"] == pytest.approx(5.29, abs=0.005)
    assert [key for key, ratio in ratios.items() if ratio <= 1.0] == [("arXiv", 0.4, "delta_ppl")]


def test_the_ablation_tables_repeat_the_main_ones_and_the_router_is_best_in_every_cell():
    for (table, main), variant in itertools.product(
        ((QA_POLICIES, QA), (SUFFIX_POLICIES, SUFFIX)), ("base", "kv-cat")
    ):
        repeated = {
            (c.stratum, str(c.keep_ratio), c.metric): c.printed
            for c in rows(table=table, variant=variant)
        }
        printed = rows(table=main, variant=variant, model=SMALL)
        assert repeated == {(c.stratum, str(c.keep_ratio), c.metric): c.printed for c in printed}
    for cell in rows(table=SUFFIX_POLICIES, variant="kv-cat"):
        others = rows(table=SUFFIX_POLICIES, keep_ratio=cell.keep_ratio, metric=cell.metric)
        choose = max if cell.metric == "top1" else min
        assert choose(others, key=lambda c: c.value).variant == "kv-cat"


@pytest.mark.parametrize(
    ("task", "validation", "test"), [("arc_easy", 570, 1000), ("arc_challenge", 299, 1000)]
)
def test_the_arc_figures_are_impossible_on_the_validation_split(task, validation, test):
    cells = [cell for table in (QA, QA_POLICIES) for cell in rows(table=table, stratum=task)]
    fits = {n: all(agrees(c, round(c.value * n) / n) for c in cells) for n in (validation, test)}
    assert fits == {validation: False, test: True}


def test_claims_of_the_text_on_the_needle_and_on_more_slots_do_not_hold_for_both_models():
    gains = {SMALL: [], LARGE: []}
    sure = []
    for model, keep in itertools.product((SMALL, LARGE), NEEDLE_KEEPS):
        base, ours = (
            round(100 * value(table=NEEDLE, model=model, variant=variant, keep_ratio=keep))
            for variant in ("base", "kv-cat")
        )
        gains[model].append(ours - base)
        sure += [(model, keep)] if worst_p(base, ours, 100) <= 0.05 else []
    assert gains[SMALL][-4:] == [11, 11, 14, 19]  # "11 to 19 points at 30 to 50 %"
    assert gains[LARGE][-4:] == [3, 8, 13, 18]
    assert sure == [(SMALL, 0.5)]
    for model, variant in PAIRS:
        kls = [cell.value for cell in rows(table=SUFFIX, model=model, variant=variant, metric="kl")]
        assert kls != sorted(kls, reverse=True)
