"""Draw the pictures of docs/how-it-works.md as SVG files: python tools/draw_method.py."""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "method"
INK = "#222222"
FAINT = "#c8c8c8"
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREEN = "#009e73"
CELL = 22


@dataclass
class Picture:
    """An SVG picture on white ground.

    Args:
        title: read aloud in place of the picture.
        width, height: in pixels.
    """

    title: str
    width: int
    height: int
    elements: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = INK
    ) -> None:
        """A filled rectangle."""
        self.elements.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" '
            f'stroke="{edge}" stroke-width="1"/>'
        )

    def text(self, x: float, y: float, text: str, *, color: str = INK, anchor: str = "start"):
        """A line of text that begins, ends or has its middle at x."""
        self.elements.append(
            f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A line with a head at its end."""
        self.elements.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" '
            'stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def row(self, x: float, y: float, fills: list[str]) -> None:
        """Cells side by side."""
        for index, fill in enumerate(fills):
            self.box(x + CELL * index, y, CELL, CELL, fill)

    def save(self, name: str) -> None:
        """Write the picture into the folder of the page."""
        head = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="{INK}"/></marker>'
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" '
            'font-family="sans-serif" font-size="14">',
            f"<title>{escape(self.title)}</title>",
            f"<defs>{head}</defs>",
            f'<rect width="{self.width}" height="{self.height}" fill="white"/>',
            *self.elements,
            "</svg>",
        ]
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")


def compression() -> None:
    """Trace, keys, log-bias and values, with the numbers of the page."""
    picture = Picture("A prefix of twelve slots becomes a compact cache of four", 720, 268)
    picture.text(20, 30, "1  One forward pass: keys and values of the prefix, and queries")
    picture.row(20, 42, [FAINT] * 12)
    picture.text(20 + 12 * CELL + 12, 58, "one slot per token, for every layer and KV head")
    picture.text(20, 100, "2  Keep the keys that the queries attend to most")
    kept = {0, 4, 5, 10}
    picture.row(20, 112, [BLUE if slot in kept else "white" for slot in range(12)])
    picture.text(20 + 12 * CELL + 12, 128, "root mean square of the attention weights")
    picture.text(20, 170, "3, 4  Fit a log-bias and a value for every kept key")
    labels = [
        (BLUE, "key: unchanged"),
        (GREEN, "3  log-bias: the logarithm of how many slots this one represents"),
        (ORANGE, "4  value: such that the attention output is that of the whole prefix"),
    ]
    for index, (color, label) in enumerate(labels):
        picture.row(20, 182 + CELL * index, [color] * 4)
        picture.text(20 + 4 * CELL + 12, 198 + CELL * index, label, color=color)
    picture.save("compression")


def queries() -> None:
    """Where the queries come from that a cache is fitted to."""
    title = "Queries after the prefix, and the prefix's own queries moved after it"
    picture = Picture(title, 720, 225)
    picture.text(20, 30, "The document in three parts, and the text after it")
    part_colors = ["#cfe3f1", "#9cc7e3", "#63a6d2"]
    after = 20 + 12 * CELL + 8
    for index, color in enumerate(part_colors):
        picture.row(20 + 4 * CELL * index, 42, [color] * 4)
    picture.row(after, 42, [GREEN] * 5)
    picture.text(
        after, 82, "later text, if it is known, or a repetition of the document", color=GREEN
    )
    picture.text(after, 112, "the queries of each part, rotated to the same positions")
    for index, color in enumerate(part_colors):
        picture.row(after, 122 + (CELL + 4) * index, [color] * 4)
        picture.arrow(20 + 4 * CELL * index + 2 * CELL, 68, after - 6, 133 + (CELL + 4) * index)
    picture.text(after, 216, "They represent later text that nobody has seen yet.")
    picture.save("queries")


def budgets() -> None:
    """Heads get as many slots as they need."""
    picture = Picture("Equal slots in four heads, and the same number allocated by need", 720, 230)
    picture.text(20, 30, "Equal budgets: every head keeps four slots")
    picture.text(380, 30, "Adaptive: the same sixteen slots, by need")
    for head, num_slots in enumerate((1, 9, 2, 4)):
        y = 46 + 36 * head
        picture.text(20, y + 16, f"head {head + 1}")
        picture.row(80, y, [BLUE] * 4)
        picture.text(380, y + 16, f"head {head + 1}")
        picture.row(440, y, [BLUE] * num_slots)
    picture.text(20, 214, "A slot goes where it lowers the error of the attention outputs most.")
    picture.save("budgets")


def masked_pass() -> None:
    """The dense and the masked pass of KV-CAT."""
    picture = Picture(
        "KV-CAT: the masked pass learns to predict what the dense pass predicts", 720, 250
    )
    picture.text(20, 52, "dense pass")
    picture.row(120, 36, [BLUE] * 10)
    picture.arrow(120 + 10 * CELL + 6, 47, 430, 47)
    picture.text(440, 52, "predictions")
    picture.text(540, 52, "next-token loss", color=GREEN)
    picture.text(20, 112, "router")
    kept = [1, 1, 0, 1, 0, 0, 1, 0, 1, 0]
    picture.row(120, 96, [FAINT if keep else "white" for keep in kept])
    picture.text(120 + 10 * CELL + 14, 112, "budget loss", color=GREEN)
    picture.text(20, 172, "masked pass")
    picture.row(120, 156, [BLUE if keep else "white" for keep in kept])
    picture.arrow(120 + 10 * CELL + 6, 167, 430, 167)
    picture.text(440, 172, "predictions")
    picture.arrow(480, 62, 480, 154)
    picture.text(490, 112, "KL to the dense pass", color=GREEN)
    picture.text(20, 222, "At the end the router is dropped: an ordinary checkpoint remains.")
    picture.save("masked-pass")


def widened_head() -> None:
    """A log-bias as one more channel of queries and keys."""
    picture = Picture("A log-bias as an extra channel of a widened head", 720, 200)
    picture.text(20, 52, "query")
    picture.row(110, 36, [GREEN] * 8)
    picture.box(110 + 8 * CELL, 36, CELL, CELL, "white")
    picture.text(110 + 8.5 * CELL, 52, "1", anchor="middle")
    picture.text(20, 92, "key")
    picture.row(110, 76, [BLUE] * 8)
    picture.box(110 + 8 * CELL, 76, CELL, CELL, "#f6d5bd")
    picture.text(110 + 8.5 * CELL, 92, "β", anchor="middle", color=ORANGE)
    picture.text(110 + 10 * CELL, 72, "score = query · key + β")
    picture.text(20, 132, "value")
    picture.row(110, 116, [ORANGE] * 8)
    picture.box(110 + 8 * CELL, 116, CELL, CELL, "white")
    picture.text(110 + 8.5 * CELL, 132, "0", anchor="middle")
    picture.text(20, 180, "An engine without a log-bias computes the same attention.")
    picture.save("widened-head")


def main() -> None:
    """Draw all pictures."""
    compression()
    queries()
    budgets()
    masked_pass()
    widened_head()


if __name__ == "__main__":
    main()
