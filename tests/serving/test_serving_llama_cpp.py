"""A compact cache in llama.cpp: its logits and its greedy answers are kvcat's, log-bias and unequal
heads included."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from evicted_caches import evicted, ids, make_model, our_logits, ragged
from scipy.linalg import hadamard

import kvcat
from gguf_files import write_gguf as write_plain_gguf
from kvcat.cache import CompactCache, CompactLayer
from kvcat.errors import InputError
from kvcat.models import load
from kvcat.serving import LlamaCpp, export_prefix, llama_abi, read_prefix, widen, write_gguf
from tiny import refusal

pytest.importorskip("xllamacpp", reason="needs xllamacpp")
NEW = 6
KINDS = {"qwen2": 24, "llama": 18, "mistral": 24, "kvcat-base": 32}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model of a kind and its widened GGUF file, made once."""
    made = {}

    def make(kind):
        if kind not in made:
            options = (
                {"hidden_size": 64, "sliding_window": None}
                if kind == "mistral"
                else {"hidden_size": 64}
            )
            model = (
                load(kind, tokenizer=False)[0]
                if kind == "kvcat-base"
                else make_model(kind, options)
            )
            path = tmp_path_factory.mktemp("gguf") / f"{kind}.gguf"
            write_gguf(widen(model, KINDS[kind]), path, dtype="float32")
            made[kind] = model, path
        return made[kind]

    return make


def pack(cache, model, path, head_dim=None):
    export_prefix(cache, model, path, head_dim=head_dim)
    return read_prefix(path)


def each_logits(engine, tokens):
    return torch.stack([engine.logits([token]) for token in tokens.tolist()])


@pytest.mark.slow_after(9)
@pytest.mark.parametrize("slots", ["equal", "unequal layers", "unequal heads"])
@pytest.mark.parametrize(
    ("kind", "cache_type", "tolerance"),
    [
        ("qwen2", "float32", 1e-3),
        ("llama", "float32", 1e-3),
        ("kvcat-base", "float32", 1e-3),
        ("mistral", "float32", 1e-3),
        ("qwen2", "float16", 5e-2),
        ("kvcat-base", "bfloat16", 0.3),  # these caches round
    ],
)
def test_logits_and_greedy_answers_behind_a_cache_with_log_bias_are_kvcats(
    served, tmp_path, kind, cache_type, tolerance, slots
):
    model, path = served(kind)
    suffix = ids(1, NEW, seed=6)
    num_layers = model.config.num_hidden_layers
    counts = tuple(8 + i % 2 for i in range(num_layers)) if slots == "unequal layers" else 9
    cache = evicted(model, ids(1, 60), counts, log_bias=True)
    cache = ragged(cache) if slots == "unequal heads" else cache
    prefix = pack(cache, model, tmp_path / "p", KINDS[kind])
    with closing(LlamaCpp(path, num_ctx=256, cache_type=cache_type)) as running:
        running.load(prefix)
        assert running.position == 9
        logits = each_logits(running, suffix[0])
        wanted = our_logits(model, cache, suffix)[0]
        assert (logits - wanted).abs().max() < tolerance
        running.load(prefix)
        made = list(running.generate(suffix[0].tolist(), 8))
        running.load(prefix)
        assert torch.equal(each_logits(running, suffix[0]), logits)
    expected = model.generate(
        **cache.inputs(model, suffix), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert made == expected[0, NEW:].tolist()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_plain_cache_answers_in_a_plain_model(tmp_path, kind):
    model = make_model(kind, {"hidden_size": 64, "head_dim": 16})
    cache = evicted(model, ids(1, 60), 9)
    suffix = ids(1, NEW, seed=6)
    prefix = pack(cache, model, tmp_path / "p")
    with closing(
        LlamaCpp(write_plain_gguf(model, tmp_path / "g"), num_ctx=64, cache_type="float32")
    ) as running:
        running.load(prefix)
        assert torch.allclose(
            each_logits(running, suffix[0]), our_logits(model, cache, suffix)[0], atol=1e-3
        )


@pytest.mark.parametrize("seam_tokens", [0, 3])
def test_composed_caches_are_one_state_of_the_engine(served, tmp_path, seam_tokens):
    """The default's unequal heads, of three documents one behind the other."""
    model, path = served("qwen2")
    caches = []
    for number, length in enumerate((24, 40, 31)):
        document = kvcat.trace(model, ids(1, length, seed=number), supervision="self")
        caches.append(kvcat.AttentionMatching()(document, num_slots=8))
    composed = kvcat.compose(model, caches, seam_tokens=seam_tokens)
    suffix = ids(1, NEW, seed=6)
    wanted = kvcat.replay(model, composed, suffix)[0]
    prefix = pack(composed, model, tmp_path / "p", KINDS["qwen2"])
    assert composed.num_tokens == 95
    with closing(LlamaCpp(path, num_ctx=256, cache_type="float32")) as running:
        running.load(prefix)
        assert running.position == composed.max_slots
        logits = each_logits(running, suffix[0])
    assert (logits - wanted).abs().max() < 1e-3


def test_what_does_not_fit_is_rejected_and_the_engine_still_works(served, tmp_path):
    model, path = served("qwen2")
    other = make_model(
        "qwen2", {"hidden_size": 64, "rope_parameters": {"rope_theta": 5e3, "rope_type": "default"}}
    )
    cache = evicted(model, ids(1, 60), 9, log_bias=True)
    good = pack(cache, model, tmp_path / "good", 24)
    foreign = pack(evicted(other, ids(1, 60), 9), other, tmp_path / "foreign", 24)
    narrow = pack(cache, model, tmp_path / "narrow", 20)
    large = CompactCache(
        [CompactLayer(x.keys, x.values * 1e9, x.log_bias) for x in cache.layers],
        60,
        cache.fingerprint,
    )
    large = pack(large, model, tmp_path / "large", 24)
    with closing(LlamaCpp(path, num_ctx=256)) as running:
        running.load(good)
        before = running.logits([5])
        for wrong, message in (
            (foreign, "the cache belongs to another model"),
            (narrow, "2 layers of 40 channels does not fit the engine's 2 layers of 48: pack it"),
            (large, r"too large for float16"),
            (
                pack(evicted(model, ids(1, 300), 256), model, tmp_path / "long", 24),
                "256 slots do not fit",
            ),
        ):
            with pytest.raises(InputError, match=message):
                running.load(wrong)
        known = running.layout
        running.layout = replace(running.layout, version=99)
        with pytest.raises(InputError, match=r"llama\.cpp rejects .*good: "):
            running.load(good)
        running.layout = known
        for tokens, message in (
            ([], "one or more tokens"),
            ([96], r"in 0\.\.95"),
            ([1] * 257, "do not fit: 0 of 256 cells"),
        ):
            with pytest.raises(InputError, match=message):
                running.logits(tokens)
        running.load(good)
        assert torch.equal(running.logits([5]), before)


def test_an_engine_that_is_not_understood_is_rejected(served, tmp_path, monkeypatch):
    _, path = served("qwen2")
    (tmp_path / "text").write_text("no model")
    for mistake, message in (
        (lambda: LlamaCpp(tmp_path / "gone"), "no model file"),
        (lambda: LlamaCpp(tmp_path / "text"), r"llama\.cpp cannot load"),
        (
            lambda: LlamaCpp(path, cache_type="q5_0"),
            "cache_type must be one of float32, float16, bfloat16, q8_0, q4_0, not 'q5_0'",
        ),
        (lambda: LlamaCpp(path, library=tmp_path / "text"), r"no library with llama\.cpp's C API"),
        (lambda: LlamaCpp(path, num_ctx=64, cache_type="q8_0"), "no context"),
        (
            lambda: llama_abi.context_parameters(llama_abi.Parameters(), 64, "float32"),
            "other parameters than expected",
        ),
        (
            lambda: llama_abi.StateLayout.read(b"qsgg\x09\0\0\0" + bytes(200), 2, "float16"),
            "version 9 have a layout",
        ),
    ):
        with pytest.raises(InputError, match=message):
            mistake()
    monkeypatch.setattr(llama_abi.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"llama\.cpp is not installed: pip install"):
        LlamaCpp(path)


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
def test_blocks_are_those_of_the_gguf_package(cache_type):
    quants = pytest.importorskip("gguf.quants")
    kind = quants.GGMLQuantizationType[cache_type.upper()]
    states = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    states[2] = 0.0
    expected = torch.from_numpy(quants.quantize(states.numpy(), kind)).view(-1)
    made = llama_abi._blocks(states, cache_type).view(-1)
    assert torch.equal(made, expected)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("cache_type", "tolerance"), [("q8_0", 0.5), ("q4_0", 5.0)])
@pytest.mark.parametrize(
    ("kind", "wide"), [("qwen2", 32), ("llama", 32), ("qwen2", 64), ("llama", 96), ("llama", 128)]
)
def test_types_in_blocks_answer_from_a_cache_in_few_bits(
    tmp_path, kind, wide, cache_type, tolerance
):
    """llama.cpp rotates heads of a multiple of 64 channels before it stores them in few bits."""
    model = make_model(kind, {"hidden_size": 64})
    cache = ragged(evicted(model, ids(1, 60), 9, log_bias=True)).quantize(8)
    path = tmp_path / "wide.gguf"
    write_gguf(widen(model, wide), path, dtype="float32")
    prefix = pack(cache, model, tmp_path / "p", wide)
    suffix = ids(1, NEW, seed=6)
    with closing(LlamaCpp(path, num_ctx=256, cache_type=cache_type)) as running:
        running.load(prefix)
        assert running.position == 9
        logits = each_logits(running, suffix[0])
        wanted = our_logits(model, cache, suffix)[0]
        assert (logits - wanted).abs().max() < tolerance
        # the same tokens without the document are further away
        running.clear()
        alone = each_logits(running, suffix[0])
        assert (logits - wanted).square().mean() < 0.5 * (alone - wanted).square().mean()
        running.load(prefix)
        assert torch.equal(each_logits(running, suffix[0]), logits)


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_plain_model_with_large_heads_reads_a_restored_cache_as_its_own(
    tmp_path, monkeypatch, head_dim, disabled, cache_type
):
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", str(int(disabled)))  # llama.cpp's own switch
    model = make_model("qwen2", {"hidden_size": 4 * head_dim})
    for weight in model.parameters():
        weight.data.mul_(0.3)  # so that 4 bits round less than half of the logits
    text = ids(1, 66)
    cache = evicted(model, text[:, :60], 60)
    prefix = pack(cache, model, tmp_path / "p")
    path = write_plain_gguf(model, tmp_path / "g")
    with closing(LlamaCpp(path, num_ctx=256, cache_type=cache_type)) as running:
        assert disabled or running.layout.key_block >= 64
        whole = running.logits(text[0].tolist())
        running.load(prefix)
        restored = running.logits(text[0, 60:].tolist())
    expected = our_logits(model, cache, text[:, 60:])[0, -1]
    rounding = (whole - expected).norm()
    assert (restored - expected).norm() < 2 * rounding
    assert rounding < 0.5 * expected.norm()


def test_the_rotation_is_found_and_what_is_not_known_is_rejected():
    plain = torch.randn(5, 384, generator=torch.Generator().manual_seed(0))
    for block in (1, 64, 128):
        matrix = torch.from_numpy(hadamard(block)).float() / block**0.5
        stored = (plain.view(5, -1, block) @ matrix).view(5, 384)
        torch.testing.assert_close(llama_abi.rotated(plain, block), stored)
        for cache_type in ("q8_0", "q4_0"):
            in_blocks = llama_abi._blocks(stored, cache_type).view(5, -1)
            rows = [llama_abi._numbers(row.numpy().tobytes(), cache_type) for row in in_blocks]
            assert llama_abi.rotation_block(torch.stack(rows), plain) == block
    message = refusal(llama_abi.rotation_block, plain.roll(1, -1), plain)
    assert 'cache_type="float16"' in message
