"""The examples of README, docs/compress.md and docs/theory.md run, and what they name exists."""

import re
import runpy
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

import kvcat
from kvcat.cli.app import run
from kvcat.compress import AttentionMatching, GradientCompression

ROOT = Path(__file__).parent.parent
README = "README.md"
COMPRESS = "docs/compress.md"
THEORY = "docs/theory.md"
KVPRESS = "docs/kvpress.md"


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", read(document), flags=re.MULTILINE | re.DOTALL)
    return [code for name, code in fenced if name == language]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (README, "CITATION.cff", "examples/minutes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(read(name), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "document", [README, pytest.param(COMPRESS, marks=pytest.mark.slow), THEORY, KVPRESS]
)
def test_python_examples_run_one_after_the_other_and_print_what_is_shown(
    document, workplace, capsys
):
    if document == KVPRESS:
        pytest.importorskip("kvpress")
    exec(compile("\n".join(blocks(document, "python")), document, "exec"), {})
    for shown in blocks(document, "output"):
        assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("document", "written"),
    [(README, "report/report.html"), (COMPRESS, "few.safetensors")],
)
@pytest.mark.slow
def test_shell_examples_run(
    document: str, written: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in "".join(blocks(document, "sh")).replace("\\\n", "").splitlines():
        program, *arguments = shlex.split(line)
        assert program == "kvcat"
        assert run(arguments) == 0, capsys.readouterr().err
    assert (workplace / written).stat().st_size > 10_000


@pytest.mark.real
def test_the_readmes_transcript_on_a_real_model_is_what_comes_out(workplace, capsys):
    (transcript,) = blocks(README, "console")
    for turn in transcript.split("$ kvcat ")[1:]:
        line, _, shown = turn.replace("\\\n", "").partition("\n")
        assert run(shlex.split(line)) == 0
        assert capsys.readouterr().out == shown


def test_the_example_of_trained_networks_prints_a_row_for_every_network_and_number_of_slots(
    monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["train_histogram.py", "--quick", "--seeds", "1"])
    names = runpy.run_path(str(ROOT / "examples" / "train_histogram.py"))
    names["QUICK"].steps = 8
    names["QUICK"].search_steps = 3
    names["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 1 + 6 * 3 + 3 + 1 + 2 * 3
    )  # a heading, trained networks, optimum, policy, found
    errors = {(line[:38].strip(), int(line[38:44])): float(line[44:53]) for line in lines[1:]}
    for name, r in errors:
        if r == 3:
            assert (
                errors[name, 3] < 1e-3 < errors[name, 1]
            )  # the whole cache is exact, one slot is not
    assert errors["compressible construction, its policy", 1] < 1e-4
    optimum = [errors["incompressible construction, optimum", r] for r in (1, 2)]
    assert all(errors["incompressible construction, found", r] >= optimum[r - 1] for r in (1, 2))


PAGES = [README, *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md")))]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of a page is called, on GitHub and on the site."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower()) for heading in headings
    ]
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading)) for heading in plain}


@pytest.mark.parametrize("document", PAGES)
def test_what_a_document_links_to_is_there(document: str) -> None:
    missing = []
    for link in re.findall(r"\]\(([^):\s]+)\)", read(document)):
        file, _, anchor = link.partition("#")
        target = (ROOT / document).parent / file if file else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []


def test_every_option_of_the_two_methods_that_make_slots_has_a_place_in_the_page_on_compression():
    page = read(COMPRESS)
    names = {f.name for kind in (AttentionMatching, GradientCompression) for f in fields(kind)}
    assert sorted(name for name in names if f"`{name}`" not in page) == []


def test_the_presets_on_the_page_are_those_of_the_code() -> None:
    table = read(COMPRESS).partition("| option | `stable`, the default | `known` | `paper` |")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|", table.split("\n\n")[0], re.M)
    assert len(rows) > 5
    for option, *cells in rows:
        for preset, cell in zip(("stable", "known", "paper"), cells, strict=True):
            value = getattr(AttentionMatching(preset), option)
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            expected = f"{float(cell):g}" if re.match(r"[\d.]", cell) else cell.strip("`")
            assert shown == expected, (option, preset)


def test_what_the_map_from_the_paper_names_is_there() -> None:
    page = read("docs/paper.md")
    for name in re.findall(r"`(kvcat(?:\.\w+)+)", page):
        resolve_name(name)
    files = re.findall(r"`(tests/[\w./]+)`", page)
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_every_room_of_the_package_has_a_line_in_the_tree() -> None:
    tree = next(block for block in blocks(README, "") if block.startswith("src/kvcat/"))
    rooms = {
        p.name for p in (ROOT / "src/kvcat").iterdir() if p.is_dir() and p.name != "__pycache__"
    }
    assert rooms == set(re.findall(r"^  (\w+)/", tree, flags=re.MULTILINE))


def test_the_citation_is_valid_and_of_this_version() -> None:
    """The keys that version 1.2.0 of the format requires, and the package's version."""
    citation = yaml.safe_load(read("CITATION.cff"))
    assert set(citation) >= {"cff-version", "message", "title", "authors"}
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", kvcat.__version__)
    for work in (citation, *citation["references"]):
        for author in work["authors"]:
            assert set(author) in ({"name"}, {"family-names", "given-names"})


def test_the_workflow_runs_the_targets_of_ci() -> None:
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    targets = set(workflow["jobs"]["make"]["strategy"]["matrix"]["target"])
    of_ci = set(re.findall(r"\bmake ([a-z-]+)", read(".ci/run"))) - {"test-python"}
    # other Pythons have a job of their own; .ci/run, one job, leaves out what takes ten minutes
    assert targets == of_ci | {"test-vllm-more"}
