"""The metrics of all evaluations, and what a report shows of each evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure over examples."""

    label: str  # column head
    description: str  # one line for a reader
    long_label: str = ""  # where there is room for more than the label; empty: the label
    unit: str = "nats/token"  # empty for a share
    decimals: int = 3  # as shown
    percent: bool = False  # shown in percent
    log_scale: bool = False  # drawn on a logarithmic axis
    lower_is_better: bool = True
    share: bool = False  # mean of a per-example score in [0, 1], with the interval of ``share``
    ratio: bool = False  # the ratio of two models means something, because 0 is nothing lost
    comparable: bool = True  # models are compared by it, because it is over the same examples
    of_dense_model: bool = False  # the same next to every method and keep ratio
    dense_metric: str = ""  # name of the same metric with the whole cache
    shows_ability: bool = False  # with the whole cache it shows whether a model can do the task
    chance: float = 0.0  # its value for a model that guesses
    chance_by_stratum: Mapping[str, float] = field(default_factory=dict)  # where it differs
    columns: tuple[str, ...] = ()  # per-example values that it uses; empty: the one of its name
    function: Callable[..., Any] | None = np.asarray  # of their means; None: the column's median
    defined_where: str = ""  # a column whose mean must be clearly above 0, or there is no figure

    @property
    def heading(self) -> str:
        """Head of a column of values."""
        return f"{self.label} (%)" if self.percent else self.label

    @property
    def difference_heading(self) -> str:
        """Head of a column of differences between models."""
        return f"{self.label} diff. (pt)" if self.percent else f"{self.label} diff."

    @property
    def difference_decimals(self) -> int:
        """Decimals of a difference, which is smaller than the values."""
        return self.decimals if self.percent else 4

    @property
    def scale(self) -> float:
        """Factor from a value to the displayed figure."""
        return 100.0 if self.percent else 1.0


_score = partial(Metric, unit="", decimals=1, percent=True, lower_is_better=False, share=True)

METRICS = {
    "delta_ppl": Metric(
        label="delta PPL",
        description="Mean over windows of exp(NLL compact) - exp(NLL dense); the paper's figure, "
        "heavy-tailed.",
        unit="perplexity",
        ratio=True,
    ),
    "delta_ppl_median": Metric(
        label="median delta PPL",
        description="Median over windows of exp(NLL compact) - exp(NLL dense).",
        unit="perplexity",
        columns=("delta_ppl",),
        function=None,
    ),
    "delta_ppl_corpus": Metric(
        label="corpus delta PPL",
        description="exp(mean NLL compact) - exp(mean NLL dense): all suffixes as one corpus.",
        unit="perplexity",
        columns=("nll", "nll_dense"),
        function=lambda nll, dense: np.exp(nll) - np.exp(dense),
    ),
    "kl": Metric(
        label="KL",
        description="KL(dense || compact) of the next-token distributions of the suffix.",
        decimals=4,
        log_scale=True,
        ratio=True,
    ),
    "top1": Metric(
        label="top-1",
        description="Share of suffix positions whose most likely token is the same with the dense "
        "and the compact cache.",
        unit="",
        decimals=1,
        percent=True,
        lower_is_better=False,
    ),
    "nll": Metric(
        label="NLL compact",
        description="Negative log-likelihood of the real suffix, or of the right answer, on the "
        "compact cache.",
        long_label="NLL on the compact cache",
        dense_metric="nll_dense",
    ),
    "delta_nll": Metric(
        label="delta NLL",
        description="NLL on the compact cache minus dense NLL.",
        decimals=4,
        ratio=True,
    ),
    "nll_dense": Metric(
        label="NLL dense",
        description="Negative log-likelihood with the whole cache: the price paid in training.",
        long_label="Dense loss",
        of_dense_model=True,
    ),
    "context_gain": Metric(
        label="context gain",
        description="NLL without the prefix minus dense NLL, of suffix tokens 2 onwards: the use "
        "of the prefix.",
        lower_is_better=False,
        of_dense_model=True,
        shows_ability=True,
    ),
    "retention": Metric(
        label="retention",
        description="1 - delta NLL / context gain, of sums; not given where that gain is not "
        "clearly above 0.",
        unit="",
        decimals=1,
        percent=True,
        lower_is_better=False,
        columns=("lost", "gained"),
        function=lambda lost, gained: 1.0 - lost / gained,
        defined_where="gained",
    ),
    "exact_match": _score(
        label="exact match",
        description="Share of examples whose greedy answer on the compact cache is right.",
        dense_metric="dense_exact_match",
        shows_ability=True,
    ),
    "native_exact_match": _score(
        label="exact match, native",
        description="The same of the examples that the model answers rightly with its whole cache, "
        "as in the paper. It rewards a model that is right on few.",
        comparable=False,
        columns=("native_match", "dense_exact_match"),
        function=np.divide,
    ),
    "dense_exact_match": _score(
        label="exact match, dense",
        description="Share of examples answered rightly with the whole cache.",
        of_dense_model=True,
    ),
    "correct_prefix": _score(
        label="digits",
        description="Share of the passkey's digits before the first wrong one.",
    ),
    "string_match": _score(
        label="string match",
        description="Share of the right answers that the greedy answer contains, as in RULER.",
        dense_metric="dense_string_match",
        shows_ability=True,
    ),
    "dense_string_match": _score(
        label="string match, dense",
        description="The same with the whole cache.",
        of_dense_model=True,
    ),
    "accuracy": _score(
        label="accuracy",
        description="Share of questions whose right answer has the highest log-likelihood.",
        dense_metric="dense_accuracy",
        shows_ability=True,
        chance=1 / 4,
    ),
    "dense_accuracy": _score(
        label="accuracy, dense",
        description="The same with the whole cache.",
        of_dense_model=True,
    ),
    "nll_choice": Metric(
        label="NLL of the choice",
        description="Minus the log of the right answer's probability among the four; 1.386 is "
        "guessing.",
        unit="nats",
    ),
    "acc_per_char": _score(
        label="accuracy",
        description="Share of right answers with the highest log-likelihood per character.",
        shows_ability=True,
        chance=1 / 4,
        chance_by_stratum={
            "winogrande": 1 / 2,
            "piqa": 1 / 2,
            "social_i_qa": 1 / 3,
            "commonsense_qa": 1 / 5,
        },
    ),
    "acc": _score(label="accuracy, raw", description="The same by the total log-likelihood."),
    "nll_per_char": Metric(
        label="NLL per character",
        description="Negative log-likelihood of the right answer.",
        unit="nats/character",
    ),
}
"""Every metric by its name in summaries and CSV files."""

PRODUCTS = {
    "lost": ("delta_nll", "num_tokens"),
    "gained": ("context_gain", "num_predicted"),
    "native_match": ("exact_match", "dense_exact_match"),
}
"""Per-example columns of metrics that are the product of two recorded values."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a report shows of an evaluation."""

    title: str
    example_name: str  # what one example is called
    stratum_name: str  # what a stratum is called
    metrics: tuple[str, ...]  # of the tables: what decides, what a user gets, the price, others
    reported_steps: tuple[int, ...] = ()  # gradient steps in the tables besides the last one
    step_metrics: tuple[str, ...] = ()  # drawn against gradient steps; empty: the deciding one
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # strata, by a name

    @property
    def deciding(self) -> str:
        """The metric that decides where no other is named."""
        return self.metrics[0]


_SIX_TASKS = ("hellaswag", "winogrande", "piqa", "openbookqa", "arc_easy", "arc_challenge")

EVALUATIONS = {
    "suffix": Evaluation(
        title="Text after a compressed prefix",
        example_name="window",
        stratum_name="stratum",
        metrics=(
            "kl",
            "nll",
            "nll_dense",
            "context_gain",
            "delta_nll",
            "delta_ppl",
            "top1",
            "retention",
        ),
        step_metrics=("kl", "delta_ppl"),
    ),
    "needle": Evaluation(
        title="Needle in a haystack",
        example_name="example",
        stratum_name="depth",
        metrics=(
            "exact_match",
            "nll",
            "dense_exact_match",
            "nll_dense",
            "native_exact_match",
            "correct_prefix",
        ),
    ),
    "ruler": Evaluation(
        title="RULER",
        example_name="example",
        stratum_name="task",
        metrics=("string_match", "nll", "dense_string_match", "nll_dense", "exact_match"),
    ),
    "longbench": Evaluation(
        title="LongBench v2",
        example_name="question",
        stratum_name="sub-domain",
        metrics=("accuracy", "nll_choice", "dense_accuracy"),
        reported_steps=(20, 100),
    ),
    "qa": Evaluation(
        title="Multiple choice without compression",
        example_name="question",
        stratum_name="task",
        metrics=("acc_per_char", "nll_per_char", "acc"),
        averages={
            "six": _SIX_TASKS,  # the paper's table
            "seven": (*_SIX_TASKS, "social_i_qa"),
            "eight": (*_SIX_TASKS, "social_i_qa", "commonsense_qa"),
        },
    ),
}
"""Every evaluation by its name in configurations."""
