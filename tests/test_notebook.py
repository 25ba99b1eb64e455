"""The tour runs from the first cell to the last, and its links lead to files."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "tour.ipynb"
LARGEST_FILE = 60_000


def cells(kind):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_is_small_compiles_and_has_no_dead_link():
    assert NOTEBOOK.stat().st_size < LARGEST_FILE
    for source in cells("code"):
        compile(source, NOTEBOOK.name, "exec")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", "\n".join(cells("markdown")))
    assert links
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


@pytest.mark.slow
def test_every_cell_runs_and_the_compact_cache_answers_like_the_whole_one(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    whole, compact = re.findall(r"(?:whole|compact): (.*)", printed)
    assert whole == compact
    assert any("image/png" in output.get("data", {}) for output in outputs)
