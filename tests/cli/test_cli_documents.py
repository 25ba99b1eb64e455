"""prepare; compress, generate, pack: a document compressed once answers again and again."""

import dataclasses
import itertools
import json
import os
import re
import shlex
import shutil
from types import SimpleNamespace

import pytest
import safetensors
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcat as kvcat_library
from kvcat.cache import CacheRecord, CompactCache, CompactLayer, LayerState, fingerprint
from kvcat.cli.app import run
from kvcat.corpus import Store
from kvcat.data import prepare
from kvcat.models import load
from kvcat.serving import read_prefix
from tiny import layer_of, sentences, write_tiny_model

DOCUMENT = "".join(sentences(4, seed=7))


@pytest.fixture
def document(tmp_path):
    (tmp_path / "doc.txt").write_text(DOCUMENT)
    return tmp_path / "doc.txt"


@pytest.fixture(scope="module")
def saved(tiny_folder, tmp_path_factory):
    """A cache of the document with 30 % of its slots, made once."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "doc.txt").write_text(DOCUMENT)
    return compress(tiny_folder, folder / "doc.txt", "--keep", 0.3)


def kvcat(*words):
    return run([str(word) for word in words])


def compress(folder, document, *options):
    output = document.parent / "doc.safetensors"
    assert kvcat("compress", folder, "--text", document, "-o", output, *options) == 0
    return output


def generate(folder, cache, *options):
    return kvcat("generate", folder, "--cache", cache, "--max-new-tokens", 8, *options)


def answer(capsys, folder, cache, *options):
    capsys.readouterr()
    assert generate(folder, cache, *options) == 0
    return capsys.readouterr().out


def test_prepare_leaves_the_tokens_of_the_library_and_says_what_is_there(
    tiny_folder, texts_folder, tmp_path, capsys
):
    assert kvcat("prepare", texts_folder, "--model", tiny_folder, "-o", tmp_path / "tokens") == 0
    index = prepare(
        str(texts_folder), AutoTokenizer.from_pretrained(tiny_folder), tmp_path / "same"
    )
    assert f"{index['splits']['train']['tokens']:,} training tokens of" in capsys.readouterr().out
    assert (tmp_path / "tokens" / "train.bin").read_bytes() == (
        tmp_path / "same" / "train.bin"
    ).read_bytes()


def stock_answer(folder, text, tokens=8):
    """What unmodified transformers answers without a cache."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    stock = AutoModelForCausalLM.from_pretrained(folder)
    out = stock.generate(**ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("chat", [False, True])
def test_keep_one_answers_as_the_model_does_without_a_cache_plain_or_in_its_chat_template(
    chat, tiny_folder, document, capsys
):
    options = ["--keep", 1, "--bits", 16, *(["--chat"] if chat else [])]
    cache = compress(tiny_folder, document, *options)
    text = f"<user>{DOCUMENT}\n\nthe cat</user><assistant>" if chat else f"{DOCUMENT}the cat"
    assert (
        answer(capsys, tiny_folder, cache, "--prompt", "the cat")
        == stock_answer(tiny_folder, text) + "\n"
    )


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    "settings",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"num_return_sequences": 2, "num_beams": 2},
        {"stop_strings": ["a"]},
        {"repetition_penalty": 5.0},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"max_time": 1e-9},
        {"forced_bos_token_id": 5},
        {"suppress_tokens": list(range(200))},
        {"min_length": 50},
        {"dola_layers": "high"},
    ],
    ids=str,
)
def test_answers_are_greedy_whatever_the_folder_sets_and_what_is_left_out_is_named(
    settings, tiny_folder, tmp_path, capsys
):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (tmp_path / "doc.txt").write_text(DOCUMENT)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    if "use_cache" in settings:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "use_cache": False}))
    cache = compress(folder, tmp_path / "doc.txt", "--keep", 1, "--bits", 16)
    capsys.readouterr()
    assert generate(folder, cache, "--prompt", "the cat") == 0
    output = capsys.readouterr()
    assert output.out == stock_answer(tiny_folder, f"{DOCUMENT}the cat") + "\n"
    named = [
        name for name in settings if name not in ("use_cache", "cache_implementation", "top_k")
    ]
    assert all(f"{name} " in output.err for name in named)
    assert ("ignored generation settings of the model" in output.err) == bool(named)


@pytest.mark.parametrize("method", ["attention-matching", "gradient,num_steps=2"])
def test_a_cache_records_how_it_was_made_and_the_same_command_makes_the_same_one(
    method, tiny_folder, document, capsys
):
    options = [
        "--method",
        method,
        *shlex.split("--keep 0.25 --seed 3 --overwrite --dtype bfloat16"),
    ]
    first = compress(tiny_folder, document, *options).read_bytes()
    cache = compress(tiny_folder, document, *options)
    loaded = CompactCache.load(cache)
    assert cache.read_bytes() == first
    assert capsys.readouterr().out.startswith(
        f"{cache}: {loaded.num_tokens} tokens in {loaded.num_slots} slots"
    )
    facts = {"method": method.split(",")[0], "supervision": "reconstruction", "chat": "no"}
    assert facts.items() <= loaded.metadata.items()
    assert loaded.num_slots == -(-loaded.num_tokens // 4)
    assert str(loaded.layers[0].keys.dtype) == "torch.bfloat16"
    assert answer(capsys, tiny_folder, cache, "--prompt", "the cat").strip()


def test_a_document_may_come_from_standard_input(tiny_folder, document, mistake, tmp_path):
    target = tmp_path / "c"
    line = ["compress", tiny_folder, "--text", "-", "--keep", 0.5, "--overwrite", "-o", target]
    usual = os.dup(0)
    try:
        with document.open() as stream:
            os.dup2(stream.fileno(), 0)
        assert kvcat(*line) == 0
        content = target.read_bytes()
        assert "standard input is empty" in mistake(*line)  # it was read to its end
    finally:
        os.dup2(usual, 0)
        os.close(usual)
    line[3] = document
    assert kvcat(*line) == 0
    assert target.read_bytes() == content


def test_a_protected_passage_stays_exact_and_one_that_does_not_occur_is_rejected(
    tiny_folder, document, tmp_path, mistake
):
    passage = tmp_path / "rules.txt"
    passage.write_text("\n" + DOCUMENT[10:40] + "\n")
    cache = compress(tiny_folder, document, "--keep", 0.5, "--protect-text", passage)
    loaded = CompactCache.load(cache)
    ((start, stop),) = [map(int, loaded.metadata["protected"].split(":"))]
    assert loaded.bits == 8
    whole = compress(tiny_folder, document, "--keep", 1, "--bits", 16, "--overwrite")
    for layer, dense in zip(loaded.layers, CompactCache.load(whole).layers, strict=True):
        for head in range(2):
            kept = layer.head(0, head).keys[: stop - start]
            assert torch.equal(kept, dense.keys[0, head, start:stop])
    command = ["compress", tiny_folder, "--text", document, "-o", tmp_path / "c", "--protect-text"]
    passage.write_text("no such text")
    assert "is not in the document" in mistake(*command, passage)
    assert "protect system needs chat" in mistake(*command[:-1], "--protect", "system")


def test_the_search_for_the_smallest_cache_reports_every_size(tiny_folder, document, capsys):
    loaded = CompactCache.load(compress(tiny_folder, document, "--max-kl", 1e-3))
    assert "KL" in capsys.readouterr().err
    assert float(loaded.metadata["held_out_kl"]) <= 1e-3


def test_a_document_near_the_border_of_its_rotary_factors_needs_room_for_the_answer(
    tmp_path, mistake, capsys
):
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 5.0, 8.0, 11.0]}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        **factors,
    }
    folder = write_tiny_model(tmp_path / "model", rope_parameters=rope)
    (tmp_path / "doc.txt").write_text(DOCUMENT)
    num_tokens = len(AutoTokenizer.from_pretrained(folder)(DOCUMENT)["input_ids"])
    assert 50 < num_tokens < 62
    cache = compress(folder, tmp_path / "doc.txt", "--keep", 1)
    asked = ["generate", folder, "--cache", cache, "--prompt", "the cat", "--max-new-tokens", 40]
    said = mistake(*asked)
    assert "exceed the 64 for which the cache was made" in said
    room = said.partition("--room ")[2].partition(",")[0]
    compress(folder, tmp_path / "doc.txt", "--keep", 1, "--room", room, "--overwrite")
    assert kvcat("info", cache) == 0
    assert f"room {room}, rope long" in capsys.readouterr().out
    assert kvcat(*asked) == 0


def test_an_answer_that_may_leave_a_compacted_sliding_window_is_rejected_before_it_begins(
    tmp_path, mistake, capsys
):
    folder = write_tiny_model(
        tmp_path / "model",
        num_hidden_layers=2,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
    )
    (tmp_path / "doc.txt").write_text(DOCUMENT)
    cache = compress(folder, tmp_path / "doc.txt", "--keep", 1, "--supervision", "self")
    asked = ["generate", folder, "--cache", cache, "--prompt", "the cat", "--max-new-tokens", 40]
    capsys.readouterr()
    said = mistake(*asked)
    assert capsys.readouterr().out == ""
    assert "exceed the 64 for which the cache was made" in said
    room = said.partition("--room ")[2].partition(",")[0]
    again = ["--keep", 1, "--supervision", "self", "--room", room, "--overwrite"]
    compress(folder, tmp_path / "doc.txt", *again)
    assert kvcat(*asked) == 0


def test_every_prompt_starts_from_the_document_alone(tiny_folder, saved, mistake, capsys):
    alone = [
        answer(capsys, tiny_folder, saved, "--prompt", prompt)
        for prompt in ("the cat", "a dog sees")
    ]
    both = answer(capsys, tiny_folder, saved, "--prompt", "the cat", "a dog sees")
    assert both == f"> the cat\n{alone[0]}> a dog sees\n{alone[1]}"
    asked = ["generate", tiny_folder, "--cache", saved]
    assert "no prompt" in mistake(*asked)
    for bad, message in [("", "the prompt is empty"), (DOCUMENT * 9, "no position is left")]:
        assert message in mistake(
            *asked, "--prompt", "the cat", bad
        )  # all are checked before the first is answered


def test_sampling_is_a_function_of_the_seed(tiny_folder, saved, capsys):
    options = ("--prompt", "the cat", "--temperature", 2, "--seed")
    first, again, other = (answer(capsys, tiny_folder, saved, *options, seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("options", "fit"),
    [
        (["--keep", 0.3], " (fitted to a repetition of the text)"),
        (["--keep", 0.3, "--supervision", "self"], " (fitted to the text's own queries)"),
        (["--keep", 1], ""),
        (["--keep", 0.3, "--method", "random"], ""),
        (["--keep", 0.3, "--method", "snapkv"], ""),
    ],
)
def test_what_slots_were_fitted_to_is_said_only_where_they_were_fitted(
    tiny_folder, document, capsys, options, fit
):
    compress(tiny_folder, document, *options)
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"  [\w-]+, 8 bits, keep [\d.]+", last_line.removesuffix(fit))
    assert last_line.endswith(fit)


def test_a_command_without_a_cache_is_told_the_options_that_it_has(tiny_folder, mistake, tmp_path):
    assert "no cache: give --cache FILE, or --store STORE and --id ID" in mistake(
        "chat", tiny_folder
    )
    message = mistake("pack", tiny_folder, "-o", tmp_path / "packed")
    assert "no cache: give --cache FILE" in message
    assert "--store" not in message


@pytest.mark.parametrize("is_long", [False, True])
def test_a_document_is_repeated_in_parts_where_twice_its_length_is_too_long(
    is_long, tiny_folder, tmp_path, capsys, monkeypatch
):
    if is_long:
        monkeypatch.setattr("kvcat.compress.segments.SEGMENT_TOKENS", 60)
    document = tmp_path / "doc.txt"
    output = tmp_path / "c.safetensors"
    document.write_text("".join(sentences(7, seed=7)))
    assert kvcat("compress", tiny_folder, "--text", document, "-o", output) == 0
    cache = CompactCache.load(output)
    assert 2 * cache.num_tokens > 256 - 81 > cache.num_tokens  # the instruction has 81 tokens
    assert cache.record.supervision == "reconstruction"
    cost = r"[\d.]+ s, [\d.]+ times reading alone \([\d.]+ s\)"
    cost += r"; \d+ s for 10,000 tokens" if is_long else ""
    assert re.fullmatch(f"{cost}(; memory .*)?", capsys.readouterr().err.splitlines()[-1])


def test_the_cost_of_a_document_in_pieces_counts_the_reading_of_all_of_them(
    tiny_folder, tmp_path, capsys, monkeypatch
):
    seconds = itertools.count(0, 100)  # each piece takes 100 seconds to read
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    monkeypatch.setattr("kvcat.compress.pieces.time", clock)
    monkeypatch.setattr("kvcat.compress.pieces.PIECE_TOKENS", 40)
    document = tmp_path / "doc.txt"
    output = tmp_path / "c.safetensors"
    document.write_text("".join(sentences(7, seed=7)))
    assert kvcat("compress", tiny_folder, "--text", document, "--in-pieces", "-o", output) == 0
    count = -(-CompactCache.load(output).num_tokens // 40)
    assert count > 2
    assert f"times reading alone ({100 * count}.0 s)" in capsys.readouterr().err


def test_a_document_too_long_for_its_repetition_is_fitted_to_its_queries(
    tiny_folder, tmp_path, mistake
):
    document = tmp_path / "doc.txt"
    output = tmp_path / "c.safetensors"
    document.write_text("".join(sentences(9, seed=7)))
    argv = ["compress", tiny_folder, "--text", document, "-o", output]
    assert "tokens of its repetition: supervision self repeats nothing" in mistake(*argv)
    assert not output.exists()
    assert kvcat(*argv, "--supervision", "self") == 0


def test_answers_end_at_the_models_last_position_and_say_so(tiny_folder, tmp_path, capsys, mistake):
    document = tmp_path / "doc.txt"
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    document.write_text(
        tokenizer.decode(tokenizer("".join(sentences(60, seed=7)))["input_ids"][:250])
    )
    cache = compress(tiny_folder, document, "--supervision", "self", "--method", "snapkv")
    room = 256 - CompactCache.load(cache).num_tokens - len(tokenizer(" the")["input_ids"])
    assert 0 < room < 8
    capsys.readouterr()
    command = ["generate", tiny_folder, "--cache", cache, "--prompt", " the"]
    shown = []
    for options in (["--max-new-tokens", room], []):
        assert kvcat(*command, *options) == 0
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1]
    assert f"the answer ends at its limit of {room} tokens" in shown[0].err
    assert (
        f"--max-new-tokens is {room + 1}; the model's 256 positions hold {room} after"
        in mistake(*command, "--max-new-tokens", room + 1)
    )


def test_a_cache_is_packed_plain_without_its_log_bias_only_on_demand_or_for_a_widened_model(
    tiny_folder, document, tmp_path, capsys, mistake
):
    cache = compress(tiny_folder, document, "--slots", 5, "--method", "random")
    base = ["pack", tiny_folder, "--cache", cache, "-o"]
    assert kvcat(*base, tmp_path / "p") == 0
    assert capsys.readouterr().out.endswith("5 cells per head; the next token has position 5\n")
    with safetensors.safe_open(tmp_path / "p", "pt") as file:
        assert file.metadata()["format"] == "kvcat-prefix-2"
    assert "exists; --overwrite replaces it" in mistake(*base, tmp_path / "p")
    plain = CompactCache.load(cache)
    biased = [
        CompactLayer(x.keys, x.values, x.keys.new_ones(x.keys.shape[:3])) for x in plain.layers
    ]
    dataclasses.replace(plain, layers=biased).save(cache)
    assert "has a log-bias" in mistake(*base, tmp_path / "b")
    assert kvcat(*base, tmp_path / "b", "--drop-log-bias") == 0
    assert kvcat(*base, tmp_path / "w", "--head-dim", 12) == 0
    assert read_prefix(tmp_path / "w").shape[2] == 12
    unequal = compress(tiny_folder, document, "--slots", 5, "--overwrite")
    most = CompactCache.load(unequal).max_slots
    assert most > 5
    capsys.readouterr()
    assert kvcat(*base, tmp_path / "u", "--head-dim", 12) == 0
    assert f"{most} cells per head (the heads have 5 on average" in capsys.readouterr().out
    for name in ("wide", "wide.gguf"):
        assert kvcat("widen", tiny_folder, "--head-dim", 12, "-o", tmp_path / name) == 0
        assert capsys.readouterr().out.endswith(
            f"{name}: heads of 12 channels, 8 of them the model's\n"
        )
    assert load(tmp_path / "wide")[0].config.head_dim == 12
    for dtype in ("float32", "bfloat16"):  # caches know the model by its weights in their type
        words = ["widen", tiny_folder, "--head-dim", 12, "--dtype", dtype, "--overwrite"]
        assert kvcat(*words, "-o", tmp_path / "wide.gguf") == 0
        written = (tmp_path / "wide.gguf").read_bytes()
        assert written[:4] == b"GGUF"
        assert fingerprint(load(tiny_folder, dtype=dtype)[0]).encode() in written


def test_info_compares_with_a_dense_cache_that_has_values_of_other_width_and_whole_states(
    tmp_path, capsys
):
    window = LayerState({"keys": torch.ones(1, 2, 4, 8), "values": torch.ones(1, 2, 4, 6)})
    slots = CompactLayer(torch.ones(1, 2, 20, 8), torch.ones(1, 2, 20, 6))
    cache = CompactCache([slots], 20, "2:" + "c" * 64, CacheRecord("dense"), {1: window})
    cache.save(tmp_path / "c")
    assert kvcat("info", tmp_path / "c") == 0
    num_bytes = (20 + 4) * 2 * (8 + 6) * 4
    shown = capsys.readouterr().out
    assert f"{num_bytes:,}, 100.0 % of the {num_bytes:,} of the" in shown
    assert "1 example, 1 layer, 2 KV heads of 8 key and 6 value channels" in shown


def test_info_shows_the_different_numbers_of_heads_and_channels_of_the_layers(tmp_path, capsys):
    layers = []
    for num_heads, num_channels in ((4, 8), (1, 16)):
        states = torch.ones(1, num_heads, 3, num_channels)
        layers.append(CompactLayer(states, states.clone()))
    CompactCache(layers, 20, "2:" + "c" * 64, CacheRecord("dense")).save(tmp_path / "c")
    assert kvcat("info", tmp_path / "c") == 0
    assert "2 layers, 1 to 4 KV heads of 8 to 16 channels" in capsys.readouterr().out


def test_info_shows_what_a_file_holds_and_rejects_damaged_and_other_files_in_one_line(
    tmp_path, capsys, mistake
):
    heads = [[[torch.ones(n, 8) for n in counts]] for counts in ((2, 4), (1, 3))]
    record = CacheRecord("by hand", {"seed": "7"})
    cache = CompactCache([layer_of(x, x) for x in heads], 20, "2:0123456789" + "c" * 54, record)
    cache.save(tmp_path / "c")
    assert kvcat("info", tmp_path / "c") == 0
    shown = capsys.readouterr().out
    for line in (
        "20 tokens in 2.5 slots per layer and head (12.5 % kept), at most 4",
        "1 example, 2 layers, 2 KV heads of 8",
        f"{cache.nbytes:,}, 12.5 % of the 5,120 of the dense cache",
        "by hand",
        "unknown, fingerprint 2:0123456789",
        "seed 7",
        "slots by layer  3 2",
    ):
        assert line in shown
    content = (tmp_path / "c").read_bytes()
    (tmp_path / "c").write_bytes(content[:-5] + b"!" + content[-4:])
    assert "c is corrupt" in mistake("info", tmp_path / "c")
    assert "no store of caches" in mistake("info", tmp_path)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], {}),
        (["--keep", 0.5, "--seed", 3], {"keep_ratio": 0.5, "seed": 3}),
        (["--slots", 4, "--bits", 4], {"num_slots": 4, "bits": "4"}),
        pytest.param(
            ["--method", "gradient,num_steps=2", "--slots", 3],
            {"method": "gradient,num_steps=2", "num_slots": 3},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--keep", 0.5, "--in-pieces"],
            {"keep_ratio": 0.5, "in_pieces": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_command_the_function_and_a_corpus_of_one_text_make_the_same_file(
    options, settings, tmp_path, monkeypatch
):
    monkeypatch.setattr("kvcat.compress.pieces.PIECE_TOKENS", 24)
    text = "def add(first, second):\n    return first + second\n" * 3
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "doc.txt").write_text(text)
    made = compress("kvcat-base", folder / "doc.txt", *options).read_bytes()
    (folder / "doc.safetensors").unlink()
    python = kvcat_library.compress_document(
        *load("kvcat-base"), text, kvcat_library.DocumentSettings(**settings)
    )
    python.save(tmp_path / "python")
    assert (tmp_path / "python").read_bytes() == made
    assert kvcat("corpus", "kvcat-base", folder, "-o", tmp_path / "store", *options) == 0
    stored = Store(tmp_path / "store")["doc.txt"]
    dataclasses.replace(stored, record=python.record).save(tmp_path / "stored")
    assert (tmp_path / "stored").read_bytes() == made
    assert python.metadata.items() <= stored.metadata.items()


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["--chat"], {"chat": True}),
        (["--mb", 0.003], {"max_megabytes": 0.003}),
        (["--max-kl", 0.01, "--method", "snapkv"], {"max_kl": 0.01, "method": "snapkv"}),
    ],
)
def test_other_options_of_the_command_are_those_of_the_function(
    options, settings, tiny_folder, document, tmp_path
):
    made = compress(tiny_folder, document, *options).read_bytes()
    kvcat_library.compress_document(
        *load(tiny_folder), DOCUMENT, kvcat_library.DocumentSettings(**settings)
    ).save(tmp_path / "python")
    assert (tmp_path / "python").read_bytes() == made


def test_a_byte_order_mark_is_left_out_and_a_spelled_control_token_is_text_unless_allowed(
    tiny_folder, tmp_path
):
    document = tmp_path / "doc.txt"
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    length = len(tokenizer.encode(f"{DOCUMENT}", add_special_tokens=False))
    document.write_bytes(b"\xef\xbb\xbf" + DOCUMENT.encode())
    assert CompactCache.load(compress(tiny_folder, document)).num_tokens == length
    document.write_text(f"{DOCUMENT}<eos>")
    spelled = tokenizer.encode(
        f"{DOCUMENT}<eos>", add_special_tokens=False, split_special_tokens=True
    )
    options = ("--overwrite", "--supervision", "self")
    assert (
        CompactCache.load(compress(tiny_folder, document, *options)).num_tokens
        == len(spelled)
        > length + 1
    )


def test_a_prompt_or_a_document_that_is_no_unicode_is_rejected(
    tiny_folder, saved, tmp_path, mistake
):
    message = mistake("generate", tiny_folder, "--cache", saved, "--prompt", "the cat", "caf\udce9")
    assert (
        "--prompt is not Unicode text: character 3 is the byte 0xe9, which is not UTF-8" in message
    )
    (tmp_path / "doc.txt").write_bytes(b"caf\xe9")
    message = mistake("compress", tiny_folder, "--text", tmp_path / "doc.txt", "-o", tmp_path / "c")
    assert "is not UTF-8 text" in message


def test_an_output_that_is_a_link_stays_one(tiny_folder, document, tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "doc.safetensors"
    link.symlink_to(tmp_path / "there" / "c.safetensors")
    compress(tiny_folder, document)
    compress(tiny_folder, document, "--overwrite")
    assert link.is_symlink()
    assert [file.name for file in (tmp_path / "there").iterdir()] == ["c.safetensors"]


def test_a_command_never_replaces_the_file_that_it_reads(tiny_folder, tmp_path, mistake):
    document = tmp_path / "doc.txt"
    document.write_text("the cat sees a red house")
    argv = ["compress", tiny_folder, "--text", document, "-o", document, "--overwrite"]
    assert "is an input file" in mistake(*argv)
    assert document.read_text() == "the cat sees a red house"
