"""theory profile, end to end."""

import csv
import json

import pytest

from kvcat.cli.app import run
from kvcat.cli.options import SUFFIX_KINDS, spread_values
from kvcat.evals.profile_suffixes import KINDS
from kvcat.evals.records import ResultsFolder, read_records
from tiny import byte_tokenizer, sentences, write_tiny_model

QUICK = [
    "--prefix-len", 16, "--suffix-len", 4, "--num-fit-suffixes", 2, "--num-choice-suffixes", 2,
    "--num-test-suffixes", 2, "--method", "attention-matching", "first", "--slots", 2, 4, 16,
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(sentences(20)))
    return path


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "other", seed=1)


def arguments(models, text, out, *options):
    return [str(x) for x in ["theory", "profile", *models, "--text", text, "--out", out, *QUICK, *options]]


@pytest.fixture(scope="module")
def finished(tiny_folder, other_folder, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("profile") / "out"
    argv = arguments([f"base={tiny_folder}", f"other={other_folder}"], text, out)
    assert run(argv) == 0
    return argv, out


def test_a_profile_ends_in_records_tables_and_a_plot(finished):
    _, out = finished
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "config.json", "records.jsonl", "suffixes.json", "provenance.jsonl", "profile.csv", "epsilon.csv", "profile.md",
        "profile.png", "profile.svg",
    }  # fmt: skip
    records = read_records(out)
    assert len(records) == 2 * 2 * (1 + 2 * 2 + 1) * 4
    assert {record.dataset for record in records} == {f"text.txt:{k}" for k in ("model", "true", "other", "random")}
    rows = list(csv.DictReader((out / "profile.csv").read_text().splitlines()))
    best = [r for r in rows if (r["method"], r["kind"], r["measure"], r["model"]) == ("best", "all", "kl", "other")]
    assert [row["slots"] for row in best] == ["0", "2", "4", "16"]
    assert float(best[-1]["mean"]) == float(best[-1]["worst"]) == 0.0
    assert float(best[0]["ratio_to_first"]) > 0.0


def test_both_models_meet_the_same_suffixes_which_the_first_one_drew(finished, tiny_folder, text, tmp_path):
    _, out = finished
    assert run(arguments([f"one={tiny_folder}"], text, tmp_path)) == 0
    assert (tmp_path / "suffixes.json").read_bytes() == (out / "suffixes.json").read_bytes()
    values = {r.key[3:]: r.values for r in read_records(out) if r.model == "base"}
    assert {r.key[3:]: r.values for r in read_records(tmp_path)} == values


def test_the_same_command_again_adds_nothing_and_says_the_same(finished, capsys):
    argv, out = finished
    before = (out / "records.jsonl").read_bytes()
    said = []
    for _ in range(2):
        assert run(argv) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].splitlines()[-1] == str(out / "profile.svg")
    assert (out / "profile.md").read_text() in said[0]
    assert (out / "records.jsonl").read_bytes() == before


def test_a_stopped_profile_goes_on_to_the_same_records(
    finished, tiny_folder, other_folder, text, tmp_path, monkeypatch
):
    append, calls = ResultsFolder.append, []

    def stop(self, new):
        append(self, new)
        calls.append(new)
        if len(calls) == 3:
            raise KeyboardInterrupt

    argv = arguments([f"base={tiny_folder}", f"other={other_folder}"], text, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ResultsFolder, "append", stop)
        assert run(argv) == 130
    assert run(argv) == 0
    for name in ("records.jsonl", "profile.csv", "profile.md"):
        assert (tmp_path / name).read_bytes() == (finished[1] / name).read_bytes()


def test_suffixes_of_another_profile_serve_a_model_that_did_not_draw_them(finished, other_folder, text, tmp_path):
    given = finished[1] / "suffixes.json"
    assert run(arguments([f"other={other_folder}"], text, tmp_path, "--suffixes", given)) == 0
    assert (tmp_path / "suffixes.json").read_bytes() == given.read_bytes()
    own = {r.key: r.values for r in read_records(finished[1]) if r.model == "other"}
    assert {r.key: r.values for r in read_records(tmp_path)} == own


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--slots", 17], "17 slots are outside 1 to 16"),
        (["--slots", 0], "0 slots are outside 1 to 16"),
        (["--keep", 0.5], "give one of --slots and --keep"),
        (["--method", "nothing"], "no method 'nothing'"),
        (["--method", "first,size=3"], "first has no option 'size'"),
        (["--kinds", "poem"], "no kind of suffixes 'poem'"),
        (["--fit-kinds", "true"], "not fitted to the true continuation"),
        (["--epsilon", 0], "--epsilon is 0"),
        (["--prefix-len", 3000], "3000 + 4 tokens exceed the 256 positions"),
        (["--num-test-suffixes", 1000], "the text is too short for 1004 'other' suffixes of 4 tokens"),
        (["--prefix-len", 250], "the text is too short: a prefix of 250"),
        (["--suffixes", "nowhere.json"], "cannot read suffixes nowhere.json"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(options, told, tiny_folder, tmp_path, capsys):
    path = tmp_path / "short.txt"
    path.write_text("".join(sentences(5)))
    assert run(arguments([tiny_folder], path, tmp_path / "out", *options)) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_models_of_other_tokenizers_or_of_one_label_are_mistakes(tiny_folder, text, tmp_path, capsys):
    folder = write_tiny_model(tmp_path / "model", vocab_size=400)
    byte_tokenizer(290).save_pretrained(folder)
    assert run(arguments([f"base={tiny_folder}", folder], text, tmp_path / "out")) == 2
    assert "models 'base' and 'model' have different tokenizers" in capsys.readouterr().err
    assert run(arguments([tiny_folder, tiny_folder], text, tmp_path / "out")) == 2
    assert "two models have the same label" in capsys.readouterr().err
    assert run(arguments([f"={tiny_folder}"], text, tmp_path / "out")) == 2
    assert "names no label" in capsys.readouterr().err


def test_another_plan_in_the_same_folder_is_a_mistake(finished, capsys):
    argv, out = finished
    before = (out / "records.jsonl").read_bytes()
    for options, told in [
        (["--seed", "1"], "seed is 0 there, 1 here"),
        (["--slots", "8"], "slots is [2, 4, 16] there"),
    ]:
        assert run([*argv, *options]) == 2
        said = capsys.readouterr().err
        assert told in said
        assert len(said.splitlines()) == 1
    assert (out / "records.jsonl").read_bytes() == before


def test_fractions_stand_for_numbers_of_slots(tiny_folder, text, tmp_path):
    slots = QUICK.index("--slots")
    argv = ["theory", "profile", tiny_folder, "--text", text, "--out", tmp_path, *QUICK[:slots], "--keep", 0.1, 0.5]
    assert run([str(x) for x in argv]) == 0
    assert json.loads((tmp_path / "config.json").read_text())["slots"] == [2, 8]


def test_values_behind_one_another_belong_to_the_option_before_them_and_models_do_not():
    given = "--slots 1 2 ./model --method first gradient,num_steps=3 --text a b --kinds true x"
    wanted = "--slots 1 --slots 2 ./model --method first --method gradient,num_steps=3 --text a b --kinds true x"
    assert spread_values(["theory", *given.split(" ")]) == ["theory", *wanted.split(" ")]


def test_the_kinds_of_suffixes_that_the_command_knows_are_those_there_are():
    assert tuple(KINDS) == SUFFIX_KINDS
