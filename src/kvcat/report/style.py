"""How plots look: a colour and a marker per model that all readers can tell apart, text in the page's colour."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, from the pair that differs most
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
_INK = "#0a0b0c"


def colours(models: Sequence[str]) -> dict[str, str]:
    """Model label to colour."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(models)}


def css_colours(models: Sequence[str]) -> dict[str, str]:
    """Model label to the page's variable for its colour, lighter on a dark page."""
    return {name: f"var(--c{i % len(COLOURS)})" for i, name in enumerate(models)}


def markers(models: Sequence[str]) -> dict[str, str]:
    """Model label to marker, so that colour is never the only difference."""
    return {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(models)}


@contextmanager
def plotting() -> Iterator[Any]:
    """Matplotlib's pyplot on the Agg back-end with our style, restored afterwards."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    settings: dict[Any, Any] = {
        "font.size": 10.0,
        "axes.titlesize": 10.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.formatter.useoffset": False,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "grid.color": "#808080",
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.6,
        "lines.markersize": 5.0,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "kvcat",
    }
    with mpl.rc_context(settings):
        yield plt
        plt.close("all")


def svg(figure: "Figure", name: str, description: str) -> str:
    """The figure as an SVG element for a page: text and axes take the page's colour, ids are its own.

    Args:
        figure: what to draw.
        name: prefix of all ids, unique in the page.
        description: for those who cannot see it.
    """
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    for rank, colour in enumerate(COLOURS):
        text = re.sub(colour, f"var(--c{rank})", text, flags=re.I)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([\d.]+)px '[^']*'[^;\"]*", r"font: \1px system-ui, sans-serif", text)
    text = re.sub(r'<svg ([^>]*?)\bwidth="[^"]*"', r"<svg \1", text, count=1)
    text = re.sub(r'<svg ([^>]*?)\bheight="[^"]*"', rf'<svg role="img" aria-label="{description}" \1', text, count=1)
    return text.strip()
