"""The package's readme has no link that is dead on an index."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytest.importorskip("hatchling")
sys.path.insert(0, str(ROOT / "tools"))

from package_readme import package_readme  # noqa: E402

TEXT = """See [the docs](docs/compress.md#bytes), [paper](https://arxiv.org/abs/1) and [below](#x).
![A plot](docs/plot.png)
```
[code](stays.md)
```
"""


def test_relative_links_lead_to_the_repository_where_there_is_one():
    text = package_readme(TEXT, "https://forge.example/o/r/")
    assert "[the docs](https://forge.example/o/r/blob/main/docs/compress.md#bytes)" in text
    assert "![A plot](https://forge.example/o/r/raw/main/docs/plot.png)" in text
    assert "[paper](https://arxiv.org/abs/1) and [below](#x)" in text
    assert "[code](stays.md)" in text


def test_without_a_repository_the_words_stay_and_no_relative_link_does():
    text = package_readme(TEXT)
    assert text.startswith("See the docs, [paper](https://arxiv.org/abs/1)")
    assert "*Picture: A plot.*" in text
    readme = package_readme((ROOT / "README.md").read_text(encoding="utf-8"))
    outside_code = re.sub(r"^```.*?^```$", "", readme, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", outside_code)
    assert [target for target in targets if ":" not in target] == []
