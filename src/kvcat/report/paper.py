"""The paper's tables as data, and its figures beside ours."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from kvcat.errors import InputError

PERCENT_METRICS = ("accuracy", "exact_match", "top1")
_VARIANTS = {
    "base": "base", "kvcat": "kv-cat", "kv-cat": "kv-cat", "router": "kv-cat", "rand": "rand", "random": "rand",
    "attn": "attn", "attention": "attn",
}  # fmt: skip
_CORPORA = {"wikitext-103": "WikiText-103", "pg-19": "PG-19", "arxiv": "arXiv"}
_METRICS = {
    "suffix": {"delta_ppl": "delta_ppl", "kl": "kl", "top1": "top1"},
    "needle": {"native_exact_match": "exact_match"},
    "longbench": {"accuracy": "accuracy"},
    "qa": {"acc_per_char": "accuracy"},
}


@dataclass(frozen=True)
class PaperCell:
    """One printed figure.

    Args:
        table: label of the table, e.g. ``tab:niah``.
        place: section it belongs to.
        method: ``attention-matching``, ``gradient``, or None without compression.
        steps: gradient steps, None where there are none or the paper contradicts itself.
        num_examples: examples behind the figure.
        model: ``Qwen2.5-0.5B``, ``Qwen2.5-1.5B``, or None where the paper does not say.
        variant: ``base``, ``kv-cat`` (the one with routers), ``rand`` or ``attn``.
        group: task, sub-domain or corpus; ``average`` and ``total`` are over the groups; may be empty.
        keep_ratio: fraction kept, None without compression and for averages over keep ratios.
        metric: ``accuracy``, ``exact_match``, ``delta_ppl``, ``kl`` or ``top1``.
        printed: as in the paper, e.g. ``88.5%``.
    """

    table: str
    place: str
    method: str | None
    steps: int | None
    num_examples: int
    model: str | None
    variant: str
    group: str
    keep_ratio: float | None
    metric: str
    printed: str

    @property
    def value(self) -> float:
        """The figure in our units: shares, not percent."""
        return float(self.printed.rstrip("%")) * (0.01 if self.metric in PERCENT_METRICS else 1.0)


def paper_cells(**fields: Any) -> list[PaperCell]:
    """Cells whose fields have these values, in the paper's order; without fields all of them.

    Args:
        fields: of ``PaperCell`` by name, e.g. ``table="tab:niah", variant="base"``.
    """
    return [cell for cell in _cells() if all(getattr(cell, name) == value for name, value in fields.items())]


def paper_cell(**fields: Any) -> PaperCell | None:
    """The cell that the fields name, None where the paper has none.

    Args:
        fields: of ``PaperCell`` by name; cells that several tables repeat count as one.

    Raises:
        ValueError: the fields name cells with different figures.
    """
    cells = paper_cells(**fields)
    if len({(cell.printed, cell.model, cell.variant, cell.group, cell.keep_ratio, cell.metric) for cell in cells}) > 1:
        raise ValueError(f"{len(cells)} cells of the paper have {fields}")
    return cells[0] if cells else None


def paper_settings(model: str) -> dict[str, str]:
    """The table of training hyperparameters for a model: setting to what is printed.

    Args:
        model: ``Qwen2.5-0.5B`` or ``Qwen2.5-1.5B``.

    Raises:
        ValueError: another model.
    """
    settings = _data()["settings"]
    if model not in settings["models"]:
        raise ValueError(f"the paper trains {' and '.join(settings['models'])}, not {model}")
    column = 1 + settings["models"].index(model)
    return {row[0]: row[column] for row in settings["rows"]}


@dataclass(frozen=True)
class Paper:
    """What the paper prints for one evaluation of one of its models; nothing where no model is named.

    Args:
        model: ``Qwen2.5-0.5B`` or ``Qwen2.5-1.5B``: what the models labelled base, kvcat (kv-cat,
            router), rand and attn are; None prints nothing.
        evaluation: name of the evaluation.
        dataset: name of the data set.

    Raises:
        InputError: a model that the paper does not have.
    """

    model: str | None
    evaluation: str = ""
    dataset: str = ""

    def __post_init__(self) -> None:
        known = sorted({cell.model for cell in paper_cells() if cell.model is not None})
        if self.model is not None and self.model not in known:
            raise InputError(f"the paper has no model {self.model!r}; it has {' and '.join(known)}")

    def figure(
        self, label: str, method: str, keep_ratio: float, step: int | None, stratum: str = ""
    ) -> Callable[[str], str]:
        """Metric to the printed figure without its percent sign, empty where there is none.

        Args:
            label: of our model.
            method: name of our method with its options.
            keep_ratio: fraction kept.
            step: gradient steps; None or negative without.
            stratum: task or sub-domain; ``total`` or ``average`` over all.
        """
        variant = _VARIANTS.get(label.partition(" ")[0].lower().replace("_", "-"))
        corpus = _CORPORA.get(self.dataset.partition(":")[0], "")
        qa = self.evaluation == "qa"

        def printed(metric: str) -> str:
            name = _METRICS.get(self.evaluation, {}).get(metric)
            if self.model is None or variant is None or name is None:
                return ""
            cell = paper_cell(
                model=None if self.evaluation == "longbench" else self.model, variant=variant, metric=name,
                group=corpus if self.evaluation == "suffix" else stratum,
                method=None if qa else method.partition(" ")[0], keep_ratio=None if qa else keep_ratio,
            )  # fmt: skip
            return "" if cell is None or cell.steps not in (None, step) else cell.printed.rstrip("%")

        return printed

    @property
    def note(self) -> str:
        """Where the paper's data are others than ours; empty where they are not, or nothing is printed."""
        corpus = self.dataset.partition(":")[0]
        if self.model is None or self.evaluation != "suffix" or corpus in _CORPORA or corpus.startswith("fineweb"):
            return ""
        return f"The paper's figures are of {self.model} on FineWeb, ours of {self.dataset}."


@lru_cache(maxsize=1)
def _cells() -> tuple[PaperCell, ...]:
    data = _data()
    cells = []
    for table in data["tables"]:
        sizes = table.get("group_sizes", {})
        common = (table["label"], table["place"], table["method"], table["steps"])
        for cell in table["cells"]:
            named = dict(zip(data["cell"], cell, strict=True))
            cells.append(PaperCell(*common, sizes.get(named["group"], table["num_examples"]), **named))
    return tuple(cells)


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    return json.loads(files("kvcat.report").joinpath("paper_tables.json").read_text(encoding="utf-8"))
