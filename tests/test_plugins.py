"""Packages that add compressors, policies and evaluations, and the example of one."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import kvcat
from kvcat.cli.app import run
from kvcat.compress import compare, compressor_names, make_compressor, replay
from kvcat.corpus import CorpusSettings
from kvcat.errors import InputError
from kvcat.evals import evaluation_names, find_evaluation, read_config, read_records, summarise
from kvcat.policies import build_policies
from tiny import loud_model

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"


def install(folder: Path, name: str, entry_points: dict[str, dict[str, str]]) -> None:
    """Metadata of an installed package, as pip writes it."""
    info = folder / f"{name}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = []
    for group, points in entry_points.items():
        lines.append(f"[{group}]")
        lines += [f"{point} = {target}" for point, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The example package, installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(tmp_path / "site", "kvcat_example", project["entry-points"])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    yield
    for module in [name for name in sys.modules if name.startswith("kvcat_example")]:
        del sys.modules[module]


@pytest.fixture(scope="module")
def traced():
    windows = torch.randint(0, 67, (2, 64), generator=torch.Generator().manual_seed(1))
    return kvcat.trace(loud_model(), windows, 48)


def test_the_page_on_extensions_shows_the_files_of_the_example_as_they_are():
    page = (EXAMPLE.parents[1] / "docs" / "extend.md").read_text()
    files = [EXAMPLE / "pyproject.toml", *(EXAMPLE / "src" / "kvcat_example").glob("[a-z]*.py")]
    assert len(files) == 5
    for file in files:
        assert f"\n{file.read_text()}```\n" in page, file.name


def test_a_scorer_of_another_package_is_a_method_with_options_like_any_other(example, traced):
    cache = make_compressor("value-norm", power=1.0)(traced, num_slots=6)
    assert cache.metadata["method"] == "value-norm"
    assert cache.metadata["power"] == "1.0"
    expected = traced.values[0].norm(p=1, dim=-1).topk(6).indices.sort(-1).values
    assert torch.equal(cache.layers[0].positions, expected)
    with pytest.raises(InputError, match=r"value-norm has no option 'powr' .*; its options: power"):
        make_compressor("value-norm", powr=1.0)


DEMANDING_MODULE = """
from dataclasses import dataclass
from kvcat.compress import Compressor, Scorer, received_mass

@dataclass(frozen=True)
class Received(Scorer):
    needs_all_queries = True

    def measure(self, trace):
        return received_mass(trace, 0)

@dataclass(frozen=True)
class Learner(Compressor):
    needs_predictions = True
    protects = False

    def fit(self, prefix, sizes):
        yield from ()
"""


def test_what_a_method_of_another_package_needs_is_asked_before_any_work(
    traced, tmp_path, monkeypatch, capsys
):
    points = {"received": "demanding_methods:Received", "learner": "demanding_methods:Learner"}
    install(tmp_path, "added", {"kvcat.compressors": points})
    (tmp_path / "demanding_methods.py").write_text(DEMANDING_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    model, tokenizer = kvcat.load("kvcat-base")
    with pytest.raises(InputError, match="received needs all queries of the prefix"):
        kvcat.Session(model, tokenizer, budget=40, tail=8, method="received")
    with pytest.raises(InputError, match="demanding-methods protects no slots"):
        kvcat.Session(model, tokenizer, budget=40, tail=8, method="learner", protect=[(0, 4)])
    with pytest.raises(InputError, match="demanding-methods protects no slots: leave out protect"):
        make_compressor("learner")(traced, num_slots=8, protect=[(0, 4)])
    with pytest.raises(InputError, match="learner needs supervision reconstruction"):
        CorpusSettings(method="learner", supervision="self")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat")
    command = ["compress", "kvcat-base", "--text", str(text), "-o", str(tmp_path / "c")]
    command += ["--method", "learner"]
    assert run([*command, "--supervision", "self"]) == 2
    assert "learner needs supervision reconstruction" in capsys.readouterr().err
    assert run([*command, "--protect-text", str(text)]) == 2
    assert "protects no slots" in capsys.readouterr().err
    sys.modules.pop("demanding_methods", None)


def test_a_compressor_of_another_package_may_give_its_layers_unequal_slots(
    example, traced, tmp_path
):
    cache = make_compressor("first-by-layer")(traced, num_slots=8)
    counts = [layer.max_slots for layer in cache.layers]
    assert counts[0] > 8 > counts[-1]
    assert sum(counts) == 8 * len(counts)
    assert compare(traced, cache).kl.isfinite().all()
    cache.save(tmp_path / "c.safetensors")
    again = kvcat.CompactCache.load(tmp_path / "c.safetensors", traced.model)
    assert torch.equal(
        replay(traced.model, again, traced.suffix_ids),
        replay(traced.model, cache, traced.suffix_ids),
    )
    whole = make_compressor("first-by-layer")(traced, keep_ratio=1.0)
    torch.testing.assert_close(
        replay(traced.model, whole, traced.suffix_ids), traced.logits, rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow
def test_a_policy_of_another_package_trains_with_options_from_the_command_line(example, tmp_path):
    scores = build_policies("strided,stride=3", num_layers=2, hidden_size=8, num_groups=1)[0](
        torch.zeros(2, 7, 8)
    )
    assert scores.tolist() == [[1, 0, 0, 1, 0, 0, 1]] * 2
    with pytest.raises(
        InputError, match=r"policy strided has no option 'strid' .*; its options: stride"
    ):
        build_policies("strided,strid=3", num_layers=2, hidden_size=8)
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text(
            "import os\nprint(os.getcwd())\n" * 30 + str(number)
        )
    line = [
        "train",
        "small",
        "--model",
        "kvcat-base",
        "--policy",
        "strided,stride=2",
        "--max-steps",
        "1",
    ]
    line += ["--seq-len", "64", "--batch-size", "2", "--validation-sequences", "2"]
    line += ["--data", str(tmp_path / "texts"), "--output", str(tmp_path / "run")]
    assert run(line) == 0
    assert "strided,stride=2" in (tmp_path / "run" / "config.json").read_text()
    assert run(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page")]) == 0
    assert (tmp_path / "page" / "plots" / "training.png").exists()


def test_the_command_line_finds_methods_of_other_packages(example, tmp_path, capsys):
    assert {"value-norm", "first-by-layer"} <= set(compressor_names())
    (tmp_path / "page.txt").write_text("import os\nprint(os.getcwd())\n" * 8)
    line = ["compress", "kvcat-base", "--text", str(tmp_path / "page.txt"), "--keep", "0.2"]
    line += ["--method", "value-norm,power=1.5", "-o", str(tmp_path / "page.safetensors")]
    assert run(line) == 0, capsys.readouterr().err
    assert run(["info", str(tmp_path / "page.safetensors")]) == 0
    assert "value-norm" in capsys.readouterr().out


@pytest.mark.slow
def test_an_evaluation_of_another_package_runs_with_methods_of_it_and_has_its_page(
    example, tmp_path, capsys
):
    out = tmp_path / "prices"
    line = ["eval", "price-list", "base=kvcat-base", "--lists", "3"]
    line += ["--method", "value-norm,power=1.0", "first-by-layer", "--keep", "0.5"]
    assert run([*line, "--out", str(out), "--items", "8"]) == 0
    assert "first digit (%)" in capsys.readouterr().out
    config = read_config(out)
    assert (config["evaluation"], config["items"], config["num_examples"]) == ("price-list", 8, 3)
    records = read_records(out)
    assert {record.method for record in records} == {
        "dense",
        "no-context",
        "value-norm",
        "first-by-layer",
    }
    assert len(records) == 4 * 3
    (row,) = (
        summarise(records, num_resamples=50)
        .query("method == 'first-by-layer' and metric == 'first_digit' and stratum == ''")
        .itertuples()
    )
    digits = [r.values["first_digit"] for r in records if r.method == "first-by-layer"]
    assert row.value == pytest.approx(sum(digits) / 3)
    assert run(["report", str(out), "-o", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "report.html").read_text()
    for text in ("Prices in a list", "3 questions of prices, 8 items each.", "first digit"):
        assert text in page
    table = (tmp_path / "page" / "tables" / "quality.md").read_text()
    assert "first-by-layer" in table
    assert run([*line, "--out", str(out), "--items", "9"]) == 2
    assert "items is 8 there, 9 here" in capsys.readouterr().err


def test_the_help_lists_evaluations_of_other_packages_and_shows_their_options(example, capsys):
    assert "price-list" in evaluation_names()
    assert run(["eval"]) == 0
    assert re.search(
        r"eval price-list +An evaluation of the package kvcat_example\.", capsys.readouterr().out
    )
    assert run(["eval", "price-list", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--items INT>=1" in shown
    assert "Example: kvcat eval price-list" in shown


def test_results_of_an_evaluation_whose_package_is_gone_are_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        '{"evaluation": "price-list", "dataset": "x", "num_examples": 1, "methods": []}'
    )
    assert run(["report", str(tmp_path), "-o", str(tmp_path / "page")]) == 2
    message = capsys.readouterr().err
    assert "config.json: no evaluation 'price-list'; there are longbench, needle" in message
    assert message.count("\n") == 1


EVALUATION_MODULE = """
from dataclasses import dataclass
from kvcat.evals import Evaluation, Metric, ReportFacts, share_of_examples

class NoDataclass(Evaluation):
    facts = ReportFacts(title="T", metrics=("nll",))

@dataclass(frozen=True, kw_only=True)
class NoFacts(Evaluation):
    pass

@dataclass(frozen=True, kw_only=True)
class NoSuchMetric(Evaluation):
    facts = ReportFacts(title="T", metrics=("nll", "shine"))

@dataclass(frozen=True, kw_only=True)
class OtherKL(Evaluation):
    facts = ReportFacts(title="T", metrics=("kl",))
    new_metrics = {"kl": Metric(label="KL", description="Another KL.")}

def failed(right):
    return 1.0 - right

@dataclass(frozen=True, kw_only=True)
class OtherShare(Evaluation):
    facts = ReportFacts(title="T", metrics=("failed",))
    new_metrics = {
        "failed": share_of_examples(
            label="f", description="F.", columns=("exact_match",), function=failed
        )
    }
"""


@pytest.mark.parametrize(
    ("points", "name", "message"),
    [
        (
            {"broken": "no_such_module:Thing"},
            "broken",
            "'broken' of package added cannot be loaded: ModuleNotFoundError",
        ),
        ({"wrong": "math:pi"}, "wrong", "plug-in 'wrong' is not a subclass of Evaluation: 3.14"),
        ({"e": "evaluations_of_a_test:NoDataclass"}, "e", "needs the decorator @dataclass"),
        ({"e": "evaluations_of_a_test:NoFacts"}, "e", "NoFacts has no facts for the report"),
        ({"e": "evaluations_of_a_test:NoSuchMetric"}, "e", "plug-in 'e': no metric 'shine'"),
        (
            {"e": "evaluations_of_a_test:OtherKL"},
            "e",
            "OtherKL has a metric 'kl', but kvcat.evals.evaluations.",
        ),
        ({"e": "evaluations_of_a_test:OtherShare"}, "e", "share 'failed' is the mean of the value"),
        (
            {"needle": "math:pi"},
            "needle",
            "package added adds 'needle' to kvcat.evaluations, which kvcat has already",
        ),
    ],
)
def test_an_evaluation_that_does_not_fit_is_listed_and_gives_one_line(
    points, name, message, tmp_path, monkeypatch, capsys
):
    install(tmp_path, "added", {"kvcat.evaluations": points})
    (tmp_path / "evaluations_of_a_test.py").write_text(EVALUATION_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run(["eval", "--help"]) == 0
    assert f"eval {name} " in capsys.readouterr().out
    assert run(["eval", name, "kvcat-base", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert find_evaluation("suffix").facts.deciding == "kl"
    sys.modules.pop("evaluations_of_a_test", None)


@pytest.mark.parametrize(
    ("points", "name", "message"),
    [
        (
            {"broken": "no_such_module:Thing"},
            "broken",
            "package added cannot be loaded: ModuleNotFoundError",
        ),
        (
            {"wrong": "math:pi"},
            "wrong",
            "plug-in 'wrong' is not a subclass of Compressor or Scorer",
        ),
        ({"h2o": "math:pi"}, "h2o", "package added adds 'h2o' to kvcat.compressors"),
        (
            {"h2o": "math:pi"},
            "other",
            "package added adds 'h2o' to kvcat.compressors, which kvcat has already",
        ),
        ({}, "nothing", "no compressor 'nothing'; there are attention-matching"),
    ],
)
def test_a_package_that_does_not_fit_is_named_when_its_method_is_requested(
    points, name, message, tmp_path, monkeypatch
):
    install(tmp_path, "added", {"kvcat.compressors": points})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=message):
        make_compressor(name)
    assert make_compressor("snapkv") is not None
