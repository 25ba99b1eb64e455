"""The paper's tables as data: every printed figure with what it is a figure of and where it stands."""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

PERCENT_METRICS = ("accuracy", "exact_match", "top1")


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
        return float(self.printed.rstrip("%")) * self._unit

    @property
    def rounding(self) -> float:
        """Half a unit of the last printed digit: how far the figure may lie from what was rounded."""
        decimals = len(self.printed.rstrip("%").partition(".")[2])
        return 0.5 * 10.0**-decimals * self._unit

    def agrees(self, value: float) -> bool:
        """Whether a value in our units rounds to what is printed; either way where it lies in the middle."""
        return abs(value - self.value) <= self.rounding * (1.0 + 1e-6)

    @property
    def _unit(self) -> float:
        return 0.01 if self.metric in PERCENT_METRICS else 1.0


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


def paper_improvement(**fields: Any) -> float | None:
    """How many times better KV-CAT is than the base: base / KV-CAT of a loss, KV-CAT / base of a share.

    Args:
        fields: of ``PaperCell`` by name, all but ``variant``.

    Returns:
        A ratio above 1 where KV-CAT is better; None where the paper lacks either cell.

    Raises:
        ValueError: the fields name cells with different figures.
    """
    base, ours = paper_cell(**fields, variant="base"), paper_cell(**fields, variant="kv-cat")
    if base is None or ours is None:
        return None
    return ours.value / base.value if base.metric in PERCENT_METRICS else base.value / ours.value


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
