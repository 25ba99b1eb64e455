"""The scripts in runs/ that compute figures themselves."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import kvcat
from kvcat import recipes
from kvcat.cache import cache_argument
from kvcat.training import TrainConfig
from kvcat.training.objective import make_masked_pass
from kvcat.training.plan import flops_per_token
from page_commands import parsed_options
from tiny import loud_model, refusal

FOLDER = Path(__file__).parents[1] / "runs" / "smollm2"


def script(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_scale_that_does_not_exist_is_rejected_by_every_script_of_the_paper():
    for file in sorted(FOLDER.parent.glob("*.sh")):
        if file.name in ("common.sh", "gpu.sh"):  # shared lines; its parts are not of the paper
            continue
        environment = {**os.environ, "SCALE": "medium"}
        run = subprocess.run(["sh", file], env=environment, capture_output=True, text=True)
        assert run.returncode in (1, 2), file.name
        assert run.stderr == "SCALE must be paper or small, not medium\n", file.name


PYTHON = """#!/bin/sh
echo "$*" >> NOTES
case "$*" in *${FAILING:---has}*) exit 1 ;; esac
while [ $# -gt 1 ]; do
  case $1 in --output | --out) mkdir -p "$2/export"; echo "{}" > "$2/config.json" ;; esac
  shift
done
"""


@pytest.fixture
def shell(tmp_path):
    """Runs a script with a Python that notes its arguments and makes the folders that they name;
    returns the run and the notes.
    """
    programs = tmp_path / "programs"
    programs.mkdir()
    notes = tmp_path / "notes"
    for name, text in {"python": PYTHON, "torchrun": 'shift 2; python "$@"\n'}.items():
        (programs / name).write_text(text.replace("NOTES", str(notes)))
        (programs / name).chmod(0o755)
    folders = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": str(programs / "python"),
        "OUT": str(tmp_path / "out"),
    }

    def run(script, *arguments, **variables):
        notes.write_text("")
        done = subprocess.run(
            ["sh", FOLDER.parent / script, *arguments],
            env={**os.environ, **folders, **variables},
            capture_output=True,
            text=True,
        )
        return done, notes.read_text().splitlines()

    return run


@pytest.mark.slow
def test_every_command_of_the_scripts_is_one_that_kvcat_takes(shell, tmp_path):
    peers = str(tmp_path / "out")
    texts = {"TEXT": "a", "BOOKS": "b", "TECH": "t", "QA": "q"}
    variants = re.findall(r"^  ([a-z-]+)\) options", (FOLDER / "branch.sh").read_text(), re.M)
    runs = [shell("all.sh", SCALE="small"), shell("all.sh"), shell("all.sh", GPUS="1")]
    runs += [shell("peers/compare.sh"), shell("price/compare.sh", PEERS=peers)]
    runs += [shell("scale/scratch.sh"), shell("scale/curve.sh")]
    runs += [shell("smollm2/gpu.sh", **texts)]
    runs += [shell("gpu.sh", PART=name) for name in ("train", "long")]
    runs += [shell("smollm2/branch.sh", variant, **texts) for variant in variants]
    runs += [shell("smollm2/evaluate.sh", "control-s0", "rand-w1-s0", **texts)]
    assert len(variants) == 10
    calls = set()
    for run, notes in runs:
        assert run.returncode == 0, run.stderr
        calls |= {call.partition("-m kvcat ")[2] for call in notes if "-m kvcat " in call}
        only = [call.partition("train_only.py k_proj,v_proj ")[2] for call in notes]
        calls |= {f"train {call}" for call in only if call}
    assert len(calls) > 200
    for call in sorted(calls):
        parsed_options(tuple(call.split()))


def test_a_queue_with_a_form_that_does_not_exist_trains_nothing(shell, tmp_path):
    queue = tmp_path / "queue.txt"
    queue.write_text("# form, tokens a parameter, steps, seed\ncontrol 1 3 1\n\nrand 1 3 2")
    run, calls = shell("scale/curve.sh", QUEUE=str(queue))
    trained = [re.findall("(?:--policy|--seed) ([^ ]*)", c) for c in calls if "kvcat train" in c]
    assert (run.returncode, trained) == (0, [["control", "1"], ["random", "2"]])
    for form in ("rooter", "rooter-kv"):
        queue.write_text(f"control 1 3 1\n{form} 1 3 1\n")
        run, calls = shell("scale/curve.sh", QUEUE=str(queue))
        assert (run.returncode, calls) == (2, [])
        assert run.stderr == f"no form {form}: see runs/scale/queue.txt\n"
    run, calls = shell("scale/curve.sh", QUEUE=str(tmp_path / "none.txt"))
    assert (run.returncode != 0, calls) == (True, [])
    assert "none.txt" in run.stderr


def test_a_failed_check_ends_the_script_of_the_gpu(shell, tmp_path):
    texts = {"TEXT": "a", "BOOKS": "b", "PART": "check"}
    run, calls = shell("smollm2/gpu.sh", FAILING="pytest", **texts)
    assert run.returncode == 1
    assert [call for call in calls if "benchmarks" in call] == []
    run, calls = shell("smollm2/gpu.sh", **texts)
    assert run.returncode == 0
    assert sum("training.py" in call for call in calls) == 2
    kept = sorted(file.stem for file in (tmp_path / "out").glob("*.txt"))
    assert kept == [f"gpu-{x}" for x in ("attention", "solve", "tests", "training")] + [
        "gpu-training-compiled"
    ]


def test_a_suffix_is_the_models_trace_only_where_the_same_model_wrote_the_prefix():
    writer = loud_model()
    reader = loud_model(std=0.2)
    ids = torch.randint(0, 67, (1, 40), generator=torch.Generator().manual_seed(0))
    written, by_reader = (kvcat.trace(model, ids, 30) for model in (writer, reader))
    same, crossed = (
        script("where").read_by(*pair)
        for pair in ((writer, written, written), (reader, written, by_reader))
    )
    for name in ("queries", "suffix_keys"):
        for actual, expected in zip(same.layers, written.layers, strict=True):
            torch.testing.assert_close(
                getattr(actual, name), getattr(expected, name), rtol=1e-4, atol=1e-5
            )
    torch.testing.assert_close(same.hidden, written.hidden, rtol=1e-4, atol=1e-5)
    out = reader(ids[:, 30:], **cache_argument(_dense(written))).logits
    torch.testing.assert_close(crossed.logits, out, rtol=1e-3, atol=1e-4)
    assert (crossed.logits - by_reader.logits).abs().max() > 0.1
    for name in ("queries", "suffix_keys"):  # the first layer sees no cache yet
        first, last = (
            getattr(crossed.layers[i], name) - getattr(by_reader.layers[i], name) for i in (0, -1)
        )
        assert first.abs().max() < 1e-4
        assert last.abs().max() > 0.1
    whole = kvcat.AttentionMatching()(crossed, keep_ratio=1.0)
    assert float(kvcat.compare(crossed, whole).kl) == pytest.approx(0, abs=1e-5)


def _dense(written):
    """transformers' own cache of the writer's keys and values."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(zip(written.keys, written.values, strict=True)):
        cache.update(keys, values, index)
    return cache


def test_every_token_is_of_one_kind_of_text():
    pieces = ["The", " cat", " saw", ",", " elephants", "ing", "\n", " Paul", " cat"]
    kinds_of_tokens = script("hidden").kinds(pieces, [0, 1, 2, 3, 4, 5, 6, 7, 1])
    known_kinds = {
        "inside a word",
        "short word",
        "long word",
        "punctuation",
        "line end",
        "name, capital",
    }
    kinds = [next(iter(token_kinds & known_kinds)) for token_kinds in kinds_of_tokens]
    assert list(zip(pieces, kinds, strict=True)) == [
        ("The", "inside a word"),
        (" cat", "short word"),
        (" saw", "short word"),
        (",", "punctuation"),
        (" elephants", "long word"),
        ("ing", "inside a word"),
        ("\n", "line end"),
        (" Paul", "name, capital"),
        (" cat", "short word"),
    ]
    assert ["seen before" in token_kinds for token_kinds in kinds_of_tokens] == [False] * 8 + [True]


def test_slots_of_a_run_with_masked_suffixes_are_kept_by_the_dense_pass_as_in_training():
    config = TrainConfig(
        model="m",
        output="o",
        seq_len=40,
        num_groups=2,
        feature_dim=8,
        router_noise=1.0,
        prefix_range=(0.5, 0.9),
    )
    model = loud_model()
    ids = torch.randint(0, 67, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), make_masked_pass(model, config) as masked_pass:
        kept = script("hidden").kept_slots(masked_pass, ids, config)
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        expected = {
            0: masked_pass.policies["0"](states[0]),
            1: masked_pass.policies["1"](states[1]),
        }
    for start, scores in expected.items():
        is_kept = scores[0, :-1] > config.tau
        is_kept[0] = True
        assert torch.equal(kept[start], is_kept)
        assert not is_kept.all()


def test_a_run_without_routers_has_none_to_show(tmp_path, monkeypatch, tiny_folder):
    (tmp_path / "export").symlink_to(tiny_folder)
    values = {"model": str(tiny_folder), "output": str(tmp_path), "policy": "random"}
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_groups": 1}))
    monkeypatch.setattr(sys, "argv", ["hidden.py", str(tmp_path), "--data", "none"])
    assert refusal(script("hidden").main) == f"{tmp_path} has no routers: its policy is random"


def test_a_document_shorter_than_a_window_has_no_gradient_of_a_window():
    options = argparse.Namespace(tokens=512, windows=2)
    starts = script("gradients").window_starts
    assert starts("long", 812, options).tolist() == [100, 200]
    assert "short has 300 tokens" in refusal(starts, "short", 300, options)


def test_the_interval_of_a_mean_by_leaving_one_out_is_students():
    values = np.array([0.3, 1.1, 0.4, 0.9, 0.2])
    without_one = [float(np.delete(values, one).mean()) for one in range(5)]
    low, high = scipy.stats.t.interval(0.95, 4, values.mean(), scipy.stats.sem(values))
    assert script("gradients").half_width(without_one) == pytest.approx((high - low) / 2)


@pytest.mark.parametrize(
    ("title", "headers"),
    [
        ("python-peps", ["PEP: 1\nTitle: A\n", "PEP: 20\nTitle: B\n"]),
        ("ethereum-eips", ["---\neip: 1\ntitle: A\n---\n", "---\neip: 20\ntitle: B\n---\n"]),
        (
            "rust-rfcs",
            [
                "- Start Date: 2014-03-11\n- RFC PR: 1\n",
                "- Feature Name: `b`\n- Start Date: 2018-08-03\n- RFC PR: 2\n",
            ],
        ),
    ],
)
def test_a_collection_is_cut_where_its_documents_begin(title, headers):
    bodies = [f"\n{word} --- PEP: 8 - Start Date: never\n" * 200 for word in ("one", "two")]
    short = headers[0] + "\ntoo short\n"
    collection = "preface\n" + headers[0] + bodies[0] + short + headers[1] + bodies[1]
    cut = script("cut_technical").documents(collection, title)
    texts = [headers[0] + bodies[0], headers[1] + bodies[1]]
    assert [document["text"] for document in cut] == texts
    assert [document["id"] for document in cut] == [f"{title}/0000", f"{title}/0002"]


SHAPE_OF_SIZE = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
}
HEADS_OF_SIZE = {"0.5B": 14, "1.5B": 12}
ROOFLINE = {"control": 0.40, "KV-CAT": 0.34}  # shares of the peak, with layers and loss compiled


def test_the_hours_of_training_are_tokens_times_operations_over_the_rooflines_share():
    page = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (.*B), (control|KV-CAT) \| (.*) \|$", page, re.MULTILINE)
    assert len(shown) == 4
    operations = {}
    for size, shape in SHAPE_OF_SIZE.items():
        shape = Qwen2Config(
            **shape,
            num_attention_heads=HEADS_OF_SIZE[size],
            num_key_value_heads=2,
            vocab_size=151936,
            tie_word_embeddings=True,
        )
        with torch.device("meta"):
            model = Qwen2ForCausalLM(shape)
        for name, policy in (("control", "control"), ("KV-CAT", "router")):
            run = recipes.qwen2_5_0_5b(policy=policy)
            operations[size, name] = flops_per_token(model, run)
    tokens = run.max_steps * run.tokens_per_step
    for size, name, cells in shown:
        share = ROOFLINE[name]
        rate = share * 989e12 / operations[size, name]
        assert cells == (
            f"{operations[size, name]:.2e} | {100 * share:.0f} % | "
            f"{round(rate, -2):,.0f} | {tokens / rate / 3600:.0f}"
        )
