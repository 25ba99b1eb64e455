"""The demo's answers in plain words, from its results."""

import pandas as pd

from kvcat.report.results import HEADLINE_KEEP, Results, nearest
from kvcat.settings import DEFAULT_KEEP

SAME_TOKENS = 0.95
"""The share of equal next tokens that the answer on sizes asks for."""


def compression_verdicts(results: Results) -> dict[str, str]:
    """Answers about the methods on the first model of a suffix evaluation, by question."""
    return {
        "What does a small cache lose?": _loss_answer(results),
        "How small can the cache be?": _size_answer(results),
    }


def training_verdicts(results: Results) -> dict[str, str]:
    """Answers on KV-CAT against the control, by question."""
    rows = results.pair_rows["KV-CAT", "control"]
    method = results.methods[0]
    rows = rows[rows["final"] & (rows["method"] == method)]
    keep_ratio = nearest(rows["keep_ratio"], HEADLINE_KEEP)
    rows = rows[rows["keep_ratio"] == keep_ratio].set_index("metric")
    size = f"{_percent(keep_ratio)} of the slots"
    return {
        "Do caches compress better after KV-CAT training?": _better_answer(rows.loc["kl"], size),
        "What does the training cost?": _cost_answer(rows.loc["nll_dense"]),
        "Does it pay, compression included?": _sum_answer(rows.loc["nll"], size),
    }


def _loss_answer(results: Results) -> str:
    """The loss of the default method at its usual size, or the nearest, against the next best."""
    kl = _cells(results, "kl")
    keep_ratio = nearest(kl["keep_ratio"], DEFAULT_KEEP)
    at_size = kl[kl["keep_ratio"] == keep_ratio].set_index("method")
    default = results.methods[0]
    ours = at_size.loc[default]
    top1 = _cells(results, "top1").set_index(["method", "keep_ratio"])
    same = top1.loc[(default, keep_ratio), "figure"].text
    answer = (
        f"With {_percent(keep_ratio)} of the slots, {default} moves predictions by "
        f"{ours['figure'].text} {ours['figure'].interval} nats per token (KL), and the most likely "
        f"next token stays the same in {same} % of places."
    )
    others = at_size.drop(index=default)
    if others.empty:
        return answer
    other = others.loc[others["value"].idxmin()]
    times = other["value"] / ours["value"]
    if other["low"] > ours["high"]:
        relation = f"{times:.2g} times as much"
    elif other["high"] < ours["low"]:
        relation = f"less, {times:.2g} times as much"
    else:
        relation = "and the intervals overlap"
    figure = other["figure"]
    loss = f"{figure.text} {figure.interval}"
    return f"{answer} The best other method, {other.name}: {loss}, {relation}."


def _size_answer(results: Results) -> str:
    """The smallest measured size at which enough next tokens stay the same, by method."""
    top1 = _cells(results, "top1")
    enough = top1[top1["value"] >= SAME_TOKENS].groupby("method")["keep_ratio"].min()
    largest = _percent(top1["keep_ratio"].max())
    words = [
        f"{method} with {_percent(enough[method])} of the slots"
        for method in results.methods
        if method in enough
    ]
    without = [method for method in results.methods if method not in enough]
    asked = f"{_percent(SAME_TOKENS)} of the most likely next tokens stay the same"
    if not words:
        return f"With none of the sizes up to {largest} of the slots do {asked}."
    answer = f"{asked}: {', '.join(words)}"
    if without:
        answer += f"; not even with {largest}: {', '.join(without)}"
    return f"{answer}."


def _better_answer(row: pd.Series, size: str) -> str:
    """Whether the caches of KV-CAT lose less than those of the control."""
    figure = row["ratio_figure"]
    words = {
        "better": "Yes, they lose less",
        "worse": "No, they lose more",
        "level": "Not measurably: the difference may be chance",
    }
    verdict = words[figure.verdict]
    ratio = f"KL is {figure.text} {figure.interval} times that of the control"
    return f"{verdict}. At {size}, {ratio}."


def _cost_answer(row: pd.Series) -> str:
    """What KV-CAT costs in predictions with the whole cache."""
    figure = row["figure"]
    words = {
        "better": "Nothing: with the whole cache, the model predicts text better than the control",
        "worse": "With the whole cache, the model predicts text worse than the control",
        "level": "Nothing measurable: with the whole cache, the difference may be chance",
    }
    return f"{words[figure.verdict]}: {figure.text} {figure.interval} nats per token."


def _sum_answer(row: pd.Series, size: str) -> str:
    """How KV-CAT predicts text on a compact cache, which combines gain and cost."""
    figure = row["figure"]
    words = {
        "better": "Yes: on caches with {}, it predicts text better than the control",
        "worse": "No: on caches with {}, it predicts text worse than the control",
        "level": "Neither gain nor loss is measurable: on caches with {}, the difference to the "
        "control may be chance",
    }
    verdict = words[figure.verdict].format(size)
    return f"{verdict}: {figure.text} {figure.interval} nats per token."


def _cells(results: Results, metric: str) -> pd.DataFrame:
    """The rows of a metric for the first model and the last step of every method."""
    rows = results.compressed(results.rows)
    rows = rows[rows["final"] & (rows["metric"] == metric)]
    return rows[rows["model"] == results.models[0]]


def _percent(share: float) -> str:
    return f"{100.0 * share:g} %"
