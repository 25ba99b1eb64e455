"""The package's readme, made from README.md when the package is built (a hook of hatchling).

An index shows the readme without the files next to it, so relative links would be dead there. If
[project.urls] in pyproject.toml has a Repository, they become links into it. Otherwise the words
stay without the link, and a picture's description takes its place.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

BRANCH = "main"
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<image>!?)\[(?P<words>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def package_readme(text: str, repository: str = "") -> str:
    """The readme with links that work anywhere.

    Args:
        text: README.md.
        repository: address of the repository on a forge; empty: there is none.
    """

    def absolute(link: re.Match[str]) -> str:
        target = link["target"]
        if ":" in target or target.startswith("#"):
            return link.group()
        if not repository:
            return f"*Picture: {link['words']}.*" if link["image"] else link["words"]
        kind = "raw" if link["image"] else "blob"
        address = f"{repository.rstrip('/')}/{kind}/{BRANCH}/{target}"
        return f"{link['image']}[{link['words']}]({address})"

    pieces = _FENCE.split(text)
    for index in range(0, len(pieces), 2):  # the others are blocks of code
        pieces[index] = _LINK.sub(absolute, pieces[index])
    return "".join(pieces)


class ReadmeHook(MetadataHookInterface):
    """Gives hatchling the readme."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the readme to the metadata of the package."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository", "")
        content = package_readme(text, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": content}
