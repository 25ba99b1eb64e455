"""Hooks of the documentation site (mkdocs.yml): pages from files outside docs/, and their links.

Links between files of the repository become links between pages. A link to a file that is no page,
such as a script, becomes the plain path.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "index.md": "README.md",
    "reproduce.md": "runs/README.md",
    "smollm2.md": "runs/smollm2/README.md",
    "benchmarks.md": "benchmarks/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages of the site by their name there, and the files that they are made from."""
NOTEBOOKS = {"tour.md": "examples/tour.ipynb"}
"""The same for notebooks."""
_NAMES = {source: page for page, source in PAGES.items()}
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
# spaces of "5 %", "[.91, 1.02]", "p .03" and "p < .001", at which no line should end
_UNBROKEN = re.compile(r"(?<=\d) (?=%)|(?<=\d,) (?=[-+.\d]+\])|(?<=\bp) (?=[.<])|(?<=\bp <) (?=\.)")
# pieces of code at whose hyphens and spaces no line should end, such as "--keep 0.2"
_SHORT_CODE = re.compile(r"<code>(?=[^<\n]{1,24}</code>)")
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """The files of docs/ with the pages that come from elsewhere."""
    for page, source in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    for page, source in NOTEBOOKS.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        content = notebook_page(json.loads(text), source)
        files.append(File.generated(config, page, content=content))
    return files


def notebook_page(notebook: dict[str, Any], source: str) -> str:
    """A notebook as Markdown: its texts, its code, and what the code printed and drew."""
    pieces = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            pieces.append(text)
            continue
        pieces.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                pieces.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            picture = output.get("data", {}).get("image/png", "").strip()
            if picture:
                pieces.append(f'<img alt="The figure" src="data:image/png;base64,{picture}">')
        if len(pieces) == 2:  # after the introduction and the first cell
            pieces.append(f"(The notebook is `{source}` in the repository.)")
    return "\n\n".join(pieces) + "\n"


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:  # noqa: ARG001
    """The text of a page with links to other pages."""
    name = page.file.src_uri
    source = {**PAGES, **NOTEBOOKS}.get(name, f"docs/{name}")
    pieces = _FENCE.split(markdown)
    for index in range(0, len(pieces), 2):  # the others are blocks of code
        pieces[index] = _linked(pieces[index], name, source, files)
        pieces[index] = _UNBROKEN.sub("\u00a0", pieces[index])
    return "".join(pieces)


def on_page_content(html: str, **_: Any) -> str:
    """A page whose short pieces of code docs/site.css keeps on one line."""
    return _SHORT_CODE.sub('<code class="short">', html)


def _linked(text: str, name: str, source: str, files: Files) -> str:
    """A text of the file ``source`` with the links that it has as the page ``name``."""

    def link(match: re.Match[str]) -> str:
        shown, target = match.groups()
        if is_outside(target):
            return match.group()
        place = _place(target, name, source, files)
        if place is None:
            return shown if shown.startswith("`") else f"`{_in_repository(target, source)}`"
        return f"[{shown}]({place})"

    def image(match: re.Match[str]) -> str:
        shown, target = match.groups()
        return f"![{shown}]({_place(target, name, source, files) or target})"

    return _LINK.sub(link, _IMAGE.sub(image, text))


def is_outside(target: str) -> bool:
    """Whether a link leads to another site, or to a heading of the same page."""
    return ":" in target or target.startswith("#")


def _in_repository(target: str, source: str) -> str:
    """The path of a link's file from the root of the repository."""
    path = target.partition("#")[0]
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def _place(target: str, name: str, source: str, files: Files) -> str | None:
    """The link to the page or picture of a target, from the page ``name``; None: there is none."""
    _, mark, heading = target.partition("#")
    path = _in_repository(target, source)
    page = _NAMES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    if page is None or files.get_file_from_path(page) is None:
        return None
    return posixpath.relpath(page, posixpath.dirname(name) or ".") + mark + heading
