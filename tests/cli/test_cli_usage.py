"""Help texts, exit codes, and one line for each mistake, of every command."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcat.cli import app
from kvcat.cli.app import commands, run
from kvcat.cli.options import labelled, parse
from kvcat.option_types import Fractions, Strings, flat
from tiny import refusal, sentences

CONTROL = "this variant of small has policy 'control', not 'router': name another recipe"
FILES = {
    "t.txt": "a text",
    "empty.txt": " \n",
    "doc.txt": "".join(sentences(4, seed=7)),
    "rows.jsonl": '{"text": "A text.", "id": "a"}\n',
    "texts/a.txt": "A text.\n",
    "config.json": '{"policy": "router", "model": "kvcat-base"}',
}


def test_streams_take_bytes_that_are_not_text_and_write_all_characters():
    code = "from kvcat.cli import app; app._accept_all_bytes(); print(input() + '\\u20ac')"
    for encoding, written in (("utf-8:strict", "\u20ac".encode()), ("ascii", b"\\u20ac")):
        child = subprocess.run(
            [sys.executable, "-c", code],
            input=b"caf\xe9\n",
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            check=True,
        )
        assert child.stdout == b"caf\xe9" + written + os.linesep.encode()


def test_a_label_has_a_name():
    for item in ("=folder", "@1=folder"):
        assert f"{item!r} has no label before its =" in refusal(labelled, [item])
    assert labelled(["a@1=folder", "b"]) == {"a@1": "folder", "b": "b"}


def test_the_overview_imports_nothing_heavy():
    code = "import sys; from kvcat.cli.app import run; assert run(['--help']) == 0\n"
    code += (
        "print(sorted({'torch', 'transformers', 'numpy', 'datasets', 'tyro'} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.splitlines()[-1] == "[]"


def test_the_overview_names_every_command_and_help_version_and_completion_are_printed(
    capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    for argv in ([], ["--help"], ["-h"]):
        assert run(argv) == 0
        listed = capsys.readouterr().out.split("commands:\n")[1].split("\n\n")[0].splitlines()
        rows = [re.split(r"\s{2,}", line.strip()) for line in listed]
        assert rows == [[name, line] for name, line in commands().items()]
    for command in commands():
        assert run([*command.split(), "--help"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: kvcat {command}")
        assert f"Example: kvcat {command}" in shown
        assert not re.search(r"default:[\s│]*(None)?\)", shown), command
        lines = shown.splitlines()
        prose = [line for line in lines if not line.startswith(("usage:", "Example:"))]
        assert max(map(len, prose)) <= 80, command  # columns of the terminal
    assert run(["eval"]) == 0
    shown = capsys.readouterr().out
    assert "eval needle" in shown
    assert "theory" not in shown
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvcat 0.")
    assert run(["--tyro-print-completion", "bash"]) == 0
    shown = capsys.readouterr().out
    for word in ("needle", "--supervision", "theorem", "--mask-weight"):
        assert word in shown


@given(
    st.lists(st.floats(0.01, 1), min_size=1),
    st.lists(st.sampled_from(["h2o", "gradient,num_steps=3"]), min_size=1),
)
def test_values_after_one_option_equal_options_written_each_time(ratios, methods):
    def lists(keep: Fractions = (), method: Strings = ()):
        return flat(keep), flat(method)

    together = ["--keep", *map(str, ratios), "--method", *methods]
    apart = [x for r in ratios for x in ("--keep", str(r))] + [f"--method={m}" for m in methods]
    assert parse(lists, "x", together) == parse(lists, "x", apart) == (ratios, methods)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "no command 'nonsense'; commands: demo, get, "),
        ("compres m", "no command 'compres' (did you mean compress?); commands: "),
        ("theroy errata", "no command 'theroy' (did you mean theory?); "),
        ("eval nedle m", "no command 'eval nedle' (did you mean eval needle?); "),
        ("train large --help", "no recipe 'large'; there are small, "),
        ("train smal --model m", "no recipe 'smal' (did you mean small?); there are small, "),
        ("train small --model m --target-keep 1.5", "--target-keep is 1.5"),
        ("train small --model m --max-step 3", "--max-step 3 (did you mean --max-steps?)"),
        ("train small --model m --policy rooter", "no policy 'rooter' (did you mean router?)"),
        ("generate m --chache a", "unknown argument --chache a (did you mean --cache?)"),
        ("compress m --txt a", "missing --text, --output; unknown: --txt a (did you mean --text?)"),
        ("compress m --text t.txt -o c --dtype float", "'float' (did you mean float32?); it must"),
        (
            "compress m --text t.txt -o c --method atention-matching",
            "no compressor 'atention-matching' (did you mean attention-matching?); there are ",
        ),
        (
            "compress kvcat-base --text t.txt -o c --method attention-matching,preset=papr",
            "not 'papr' (did you mean paper?)",
        ),
        (
            "compress kvcat-base --text t.txt -o c --method snapkv,windw=3",
            "snapkv has no option 'windw' (did you mean window?); its options: ",
        ),
        ("compress kvcat-base --text t.txt -o c --slots 99", "--slots must be in [1, 3], not 99"),
        ("widen kvcat-base -o w --head-dim 7", "--head-dim must be even and larger"),
        ("compress m", "missing --text, --output"),
        ("compress m --text gone.txt -o c", "cannot use gone.txt: No such file or directory"),
        (
            "compress m --text t.txt -o c --keep 0.1 --slots 3",
            "give one of --keep and --slots",
        ),
        ("compress m --text t.txt -o c --max-kl -1", "--max-kl takes NATS>=0, not -1"),
        ("compress model.gguf --text t.txt -o c", "file model.gguf does not exist"),
        (
            "compress smollm2 --text t.txt -o c",
            "Hub cache (did you mean smollm2-135m, after `kvcat get smollm2-135m`?), and",
        ),
        ("compress kvcat-bas --text t.txt -o c", "Hub cache (did you mean kvcat-base?), and"),
        ("compress kvcat-base --text /dev/zero -o c", "/dev/zero is not text: it has a zero byte"),
        ("widen m -o .", "output folder . is not empty"),
        ("widen m -o /dev/null", "/dev/null is a file: name a folder to write"),
        ("widen m -o wide --gguf-type q8_0", "--gguf-type is for a .gguf file, and wide is a"),
        ("widen ./m -o W.GGUF --gguf-type q8_0", "folder ./m does not exist"),
        ("widen m -o wide --overwrite", "--overwrite is for a .gguf file, and wide is a folder"),
        ("eval suffix m --out o --keep", "--keep takes [0<FRACTION<=1 [0<FRACTION<=1 ...]] (see"),
        ("eval needle m --seed --out o", "--seed takes [INT>=0 [INT>=0 ...]] (see"),
        ("eval ruler m --out o --task --length 9", "--task takes [STR [STR ...]] (see"),
        ("generate m --cache t.txt --prompt x --stop", "--stop takes [STR [STR ...]] (see"),
        ("theory theorem --function --out o", "--function takes [STR [STR ...]] (see"),
        (
            "compress kvcat-base --text t.txt -o c --method gradient --supervision self",
            "gradient needs supervision",
        ),
        ("compress m --text empty.txt -o c", "empty.txt is empty"),
        ("compress kvcat-base --text t.txt -o c --chat", "has no chat template"),
        ("compress m --text t.txt -o t.txt", "t.txt exists; --overwrite replaces it"),
        ("compress m --text t.txt -o /dev/null --overwrite", "/dev/null is a device: name the"),
        (
            "eval suffix m --keep 0.1 x --out o",
            "--keep takes [0<FRACTION<=1 [0<FRACTION<=1 ...]], not x "
            "(see kvcat eval suffix --help)",
        ),
        (
            "compress m --text t.txt -o c --keep 20",
            "--keep takes 0<FRACTION<=1, not 20",
        ),
        ("eval suffix m --out o --windows 0", "--windows takes INT>=1, not 0"),
        (
            "eval needle m --out o --primary h2o 0.1",
            "--primary takes METHOD KEEP METRIC, not h2o 0.1",
        ),
        ("eval needle kvcat-base --out o --method nothing", "no compressor 'nothing'; there are"),
        (
            "eval needle kvcat-base nowhere/at/all --out o",
            "model folder nowhere/at/all does not exist",
        ),
        ("report", "nothing to report: no results folder and no run given"),
        ("eval needle kvcat-base --out o --length 900", "positions"),
        ("eval ruler kvcat-base --out o --task maze", "no RULER task 'maze'"),
        ("eval qa kvcat-base --out o --data . --task maths", "maths"),
        ("prepare nowhere --tokenizer kvcat-base -o o", "no such text file or folder: nowhere"),
        ("prepare t.txt --tokenizer . -o o", "has no tokenizer (tokenizer.json)"),
        (
            "prepare t.txt --tokenizer nobody/nothing -o o",
            "neither a folder nor in the local Hub cache",
        ),
        ("export . --step 3 -o o", "kvcat: . holds no checkpoint\n"),
        ("export . -o -", "--output is -: nothing is written to standard output"),
        ("corpus m texts --output=-", "--output is -: nothing is written to standard output"),
        ("train small --output -", "--output is -: nothing is written to standard output"),
        ("eval needle m --out -", "--out is -: nothing is written to standard output"),
        ("compress m --text t.txt -o c --device meta", "--device is 'meta'; it must be one of cpu"),
        (
            "theory theorem --budget half --out o",
            "--budget is 'half'; it must be a number, n-1 or n/2",
        ),
        (
            "theory theorem --symbols 4 --length 9 --out o",
            "4 symbols and N = 9: at most 256 sequences",
        ),
        ("theory theorem --symbols 0 --out o", "--symbols is 0; it must be at least 1"),
        ("theory histogram --length -9 --out o", "--length is -9; it must be at least 1"),
        (
            "theory histogram --scaling 2 8 --out o",
            "--scaling needs at least two values, 3 to 256, not [2, 8]",
        ),
        # threads
        ("compress m --threads 0", "--threads takes INT from 1 to "),
        ("compress m --threads", "--threads takes INT from 1 to "),
        ("compress m --threads=two", "--threads takes INT from 1 to "),
        ("compress m --threads -1", "--threads takes INT from 1 to "),
        (f"compress m --threads {'9' * 9999}", "--threads takes INT from 1 to "),
        # bits and sizes
        ("compress TINY --text doc.txt -o c --bits 3", "--bits is '3'"),
        (
            "compress TINY --text doc.txt -o c --bits 4 --method snapkv,bits=8",
            "give one of them",
        ),
        ("compress TINY --text doc.txt -o c --method snapkv,bits=5", "bits must be 8 or 4"),
        ("compress TINY --text doc.txt -o c --keep 0.1 --mb 1", "give one of --keep and --mb"),
        ("compress TINY --text doc.txt -o c --mb -1", "--mb"),
        ("compress TINY --text doc.txt -o c --mb 0.00001", "one slot in every head"),
        # a corpus
        ("corpus TINY gone -o c --max-kl 0.1", "unknown argument --max-kl"),
        ("corpus TINY gone -o c --overwrite", "unknown argument --overwrite"),
        ("corpus TINY gone -o c --keep 0.1 --slots 3", "give one of --keep and --slots"),
        ("corpus TINY gone -o c --shard 3/3", "--shard is '3/3'"),
        ("corpus TINY gone -o c --shard 0/2 --ray auto", "one of --ray and --shard"),
        ("corpus TINY gone -o c --workers 2", "--workers needs --ray"),
        ("corpus TINY gone -o c", "no such text file or folder"),
        ("corpus TINY gone -o c --check --supervision self", "check needs supervision"),
        ("corpus TINY rows.jsonl -o c --text-column ''", "the name of a column is empty"),
        ("corpus TINY rows.jsonl -o c --id-column ''", "the name of a column is empty"),
        ("budgets TINY --corpus rows.jsonl -o c --text-column ''", "name of a column is empty"),
        ("budgets TINY --corpus rows.jsonl -o c --id-column ''", "name of a column is empty"),
        ("corpus TINY texts -o c --text-column a", "text files alone, which have no columns"),
        ("corpus TINY texts -o c --id-column a", "text files alone, which have no columns"),
        ("budgets TINY --corpus texts -o c --text-column a", "text files alone, which have no"),
        # the control
        ("train small-control --config config.json", CONTROL),
        ("train small-control --model kvcat-base --policy router", CONTROL),
        # an option given twice that has no list
        ("chat m --cache a --cache=b", "--cache is given 2 times; kvcat chat takes it once"),
        ("compress m --text a --text b -o c", "--text is given 2 times"),
        (
            "compress m --text a --protect-text b --protect_text c -o d",
            "--protect-text is given 2 times",
        ),
        ("corpus m a --slots 1 --slots 2 -o c", "--slots is given 2 times"),
        ("generate m --store s --id a --id b --prompt x", "--id is given 2 times"),
        ("serve m --store a --store b", "--store is given 2 times; kvcat serve takes it once"),
        ("budgets m --corpus a --corpus b -o c", "--corpus is given 2 times"),
        ("eval profile m --data a --data b", "--data is given 2 times"),
        ("train small --config a.toml --config b.toml", "--config is given 2 times"),
        ("train small --output a --max-steps 3 --output b", "--output is given 2 times"),
        ("train small --data a --data b", "--data is given 2 times"),
        ("generate m --cache a --prompt x --seed 1 --seed=2", "--seed is given 2 times"),
        ("compress m --text a -o b --output c", "--output is given 2 times"),
        ("eval needle m --out a --out b", "--out is given 2 times"),
        ("demo --quick --quick", "--quick is given 2 times"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_and_nothing_is_written(
    line, message, mistake, tiny_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("KVCAT_HOME", str(tmp_path / "home"))
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert message in mistake(*shlex.split(line.replace("TINY", str(tiny_folder))))
    written = (path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert sorted(map(str, written)) == sorted(FILES)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no folder in which nobody can write")
def test_a_folder_in_which_nothing_can_be_written_is_named_before_any_work(mistake, tmp_path):
    (tmp_path / "t.txt").write_text("a")
    for output in ("/proc/c", "/proc/self/c"):
        message = mistake("compress", "m", "--text", tmp_path / "t.txt", "-o", output)
        assert f"cannot write {output}: " in message


def test_a_mistake_in_the_text_or_the_request_is_reported_before_weights_are_read(
    tiny_folder, texts_folder, mistake, tmp_path
):
    model = shutil.copytree(
        tiny_folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    for kind, option, extra_options in (
        ("suffix", "--data", ("--split", "all")),
        ("profile", "--data", ("--slots", 1)),
    ):
        line = [
            "eval",
            kind,
            model,
            "--prefix",
            20,
            "--suffix",
            8,
            *extra_options,
            "--out",
            tmp_path / "out",
            option,
        ]
        assert "no such text file or folder: nowhere" in mistake(*line, "nowhere")
        assert "cannot load" in mistake(*line, texts_folder)  # the weights, which are not there
    needle = ["eval", "needle", model, "--length", 130, "--per-depth", 1, "--out", tmp_path / "out"]
    message = "primary cell: h2o at keep ratio 0.3 is not evaluated"
    assert message in mistake(*needle, "--keep", 0.2, "--primary", "h2o", 0.3, "kl")


class Stopped(Exception):  # noqa: N818
    signum = 15


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (
            MemoryError(),
            2,
            "kvcat: this machine has not enough memory for it: take a smaller model, "
            "text or batch\n",
        ),
        (
            RuntimeError("unable to mmap 4 bytes from file <m>: Cannot allocate memory (12)"),
            2,
            "kvcat: this machine has not enough memory for it: take a smaller model, "
            "text or batch\n",
        ),
        (PermissionError(13, "Denied", "out/x"), 2, "kvcat: cannot use out/x: Denied\n"),
        (KeyboardInterrupt(), 130, "kvcat: interrupted\n"),
        (Stopped("saved\nat step 3"), 143, "kvcat: saved at step 3\n"),
    ],
    ids=["memory", "mapped memory", "not allowed", "Ctrl-C", "signal"],
)
def test_what_ends_a_command_from_outside_gives_one_line_and_a_specific_exit_code(
    raised, code, message, capsys, monkeypatch
):
    def command(*folders: str):
        raise raised

    def buggy_command(*folders: str):
        return {}["missing"]

    report = f"kvcat.{app.COMMANDS['report'][0]}"
    monkeypatch.setattr(report, command)
    assert run(["report"]) == code
    assert capsys.readouterr().err == message
    monkeypatch.setattr(report, buggy_command)
    with pytest.raises(KeyError):  # a bug shows its traceback
        run(["report"])


def test_options_override_a_file_and_a_file_the_recipe(tiny_folder, texts_folder, tmp_path, capsys):
    from kvcat.recipes import small

    (tmp_path / "fields.toml").write_text(
        "seq_len = 32\nbatch_size = 4\nmax_steps = 1\ngroup_starts = [1]\n"
    )
    argv = [
        "--config",
        tmp_path / "fields.toml",
        "--batch-size=2",
        "--betas",
        0.8,
        0.9,
        "--prefix-range",
        0.5,
        0.9,
    ]
    argv += [
        "--model",
        tiny_folder,
        "--data",
        texts_folder,
        "--output",
        tmp_path / "run",
        "--activation-checkpointing",
    ]
    assert run([str(x) for x in ["train", "small", *argv]]) == 0
    assert capsys.readouterr().out == f"exported to {tmp_path / 'run' / 'export'}\n"
    expected = small(
        model=str(tiny_folder),
        data=str(texts_folder),
        output=str(tmp_path / "run"),
        seq_len=32,
        batch_size=2,
        max_steps=1,
        group_starts=(1,),
        betas=(0.8, 0.9),
        prefix_range=(0.5, 0.9),
        activation_checkpointing=True,
    )
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    del written["checksum"]
    assert written == json.loads(json.dumps(vars(expected)))


def test_a_file_that_a_command_reads_is_not_its_output(mistake, tmp_path):
    document = tmp_path / "t.txt"
    document.write_text("A text to protect.\n")
    passage = tmp_path / "passage.txt"
    passage.write_text("text")
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "A text."}\n')
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    cache = tmp_path / "a.safetensors"
    cache.write_bytes(b"cache")
    compress = ["compress", model, "--text", document]
    budgets = ["budgets", "kvcat-base", "--corpus"]
    for output, *argv in (
        (document, *compress),
        (passage, *compress, "--protect-text", passage),
        (model, *compress),
        (corpus, *budgets, corpus),
        (model, "budgets", model, "--corpus", corpus),
        (model, "widen", model),
        (cache, "pack", model, "--cache", cache),
        (model, "pack", model, "--cache", cache),
    ):
        content = output.read_bytes()
        assert f"{output} is an input file" in mistake(*argv, "-o", output, "--overwrite")
        assert output.read_bytes() == content


def test_the_files_of_a_model_are_not_replaced_but_other_files_in_its_folder_are(
    tiny_folder, tmp_path, mistake
):
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    text = tmp_path / "t.txt"
    text.write_text("the cat sees a red house")
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "the cat sees a red house"}\n')
    cache = model / "cache.safetensors"
    compress = ["compress", model, "--text", text, "--slots", 2, "--method", "snapkv"]
    for _ in range(2):
        assert run([str(word) for word in (*compress, "-o", cache, "--overwrite")]) == 0
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        content = (model / name).read_bytes()
        for argv in (
            compress,
            ["budgets", model, "--corpus", corpus],
            ["pack", model, "--cache", cache],
        ):
            message = mistake(*argv, "-o", model / name, "--overwrite")
            assert f"{model / name} is a file of the model {model}" in message
        assert (model / name).read_bytes() == content
