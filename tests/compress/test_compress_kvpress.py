"""The presses of kvpress as compressors; most of these tests need kvpress installed."""

import importlib.util
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from presses import EXACT, PREFIX, PRESSES, SLOTS, distinct_texts, heads, needs_kvpress, press, random_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcat.cache import CompactCache
from kvcat.compress import compare, trace
from kvcat.compress.kvpress import KVPress, library, removed_fraction
from kvcat.errors import InputError
from kvcat.models import load
from tiny import stock_model

# fire 0.6, which kvpress pins, imports a module that Python 3.13 drops
pytestmark = pytest.mark.filterwarnings("ignore:'pipes' is deprecated:DeprecationWarning")
IMPORTED_WITH_KVCAT = "kvpress" in sys.modules
every_press = pytest.mark.parametrize("name", PRESSES)


def off_prefix(states, own):
    """Distance of every slot's keys or values from the nearest of the same head's prefix."""
    return torch.cdist(states, own, compute_mode="donot_use_mm_for_euclid_dist").amin(-1).max()


@pytest.fixture(scope="module", autouse=True)
def imported_without_its_patches():
    if importlib.util.find_spec("kvpress") is not None:
        library()


@pytest.fixture(scope="module")
def texts():
    return distinct_texts()


@pytest.fixture(scope="module")
def qwen(tiny_folder):
    return random_model(tiny_folder)


@pytest.fixture(scope="module")
def found(qwen, texts):
    return trace(qwen, texts, PREFIX)


def test_importing_kvcat_does_not_import_kvpress():
    assert not IMPORTED_WITH_KVCAT


def test_a_missing_kvpress_is_told_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(InputError, match=r"kvpress cannot be imported .*: pip install 'kvcat\[kvpress\]'"):
        KVPress("SnapKVPress")


@given(prefix=st.integers(2, 200_000), heads=st.integers(1, 4096), data=st.data())
def test_the_compression_ratio_makes_kvpress_keep_the_number_of_slots(prefix, heads, data):
    slots = data.draw(st.integers(1, prefix - 1))
    keeping = removed_fraction(slots, prefix, counts_removed=False)
    removing = removed_fraction(slots, prefix, counts_removed=True)
    assert int(prefix * (1 - keeping)) == slots
    assert int(heads * prefix * (1 - keeping)) == heads * slots
    assert int(heads * prefix * removing) == heads * (prefix - slots)


@needs_kvpress
@every_press
def test_a_press_makes_a_compact_cache_of_really_fewer_slots(found, name):
    cache = press(name, PRESSES[name])(found, num_slots=SLOTS)
    assert (cache.num_tokens, cache.batch_size, cache.fingerprint) == (PREFIX, 2, found.fingerprint)
    if name in EXACT:
        assert cache.mean_slots == SLOTS
    assert cache.mean_slots <= SLOTS
    assert cache.nbytes == found.dense_cache().nbytes * cache.mean_slots / PREFIX
    assert compare(found, cache).nll.isfinite().all()
    for layer, keys, values in zip(cache.layers, found.keys, found.values, strict=True):
        for row, head in ((0, 0), (1, 1)):
            kept_keys, kept_values, _ = layer.head(row, head)
            if name != "KeyRerotationPress":
                assert off_prefix(kept_keys, keys[row, head]) < 1e-3
            if name != "MergingPress":
                assert off_prefix(kept_values, values[row, head]) < 1e-3


@needs_kvpress
@every_press
def test_an_example_gives_the_same_alone_and_again_and_leaves_the_global_random_state(qwen, texts, found, name):
    state = torch.get_rng_state()
    together = press(name, PRESSES[name])(found, num_slots=SLOTS)
    alone = press(name, PRESSES[name])(trace(qwen, texts[1:], PREFIX), num_slots=SLOTS)
    assert torch.equal(torch.get_rng_state(), state)
    for left, right in zip(heads(together, 1), heads(alone, 0), strict=True):
        assert torch.equal(left, right)


@needs_kvpress
@every_press
def test_the_model_and_transformers_are_left_as_they_were(found, name):
    modules = dict(found.model.named_modules())
    before = {key: set(vars(module)) | set(module._modules) for key, module in modules.items()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules.values()]
    functions, config = dict(ALL_ATTENTION_FUNCTIONS), found.model.config.to_dict()
    found.model.train()
    try:
        press(name, PRESSES[name])(found, num_slots=SLOTS)
        assert found.model.training
        assert all(parameter.requires_grad and parameter.grad is None for parameter in found.model.parameters())
    finally:
        found.model.eval()
    assert dict(ALL_ATTENTION_FUNCTIONS) == functions
    assert not any(getattr(f, "__module__", "").startswith("kvpress") for f in functions.values())
    assert (found.model.config.to_dict(), found.model.config._attn_implementation) == (config, "kvcat")
    modules = dict(found.model.named_modules())
    assert {key: set(vars(module)) | set(module._modules) for key, module in modules.items()} == before
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules.values()] == hooks


@needs_kvpress
def test_layers_of_a_pyramid_and_heads_of_kvzip_hold_different_numbers_of_slots(found):
    pyramid = press("PyramidKVPress", EXACT["PyramidKVPress"])(found, num_slots=SLOTS)
    first, last = (layer.num_slots for layer in pyramid.layers)
    assert first > SLOTS > last
    zipped = press("KVzipPress", {})(found, num_slots=SLOTS)
    assert not zipped.is_uniform
    assert zipped.metadata["keep_ratio"] == f"{SLOTS / PREFIX:.6g}"
    assert zipped.metadata["num_slots"] == str(SLOTS)


@needs_kvpress
def test_duo_attention_keeps_retrieval_heads_whole_and_streaming_heads_short(found, monkeypatch):
    import numpy as np

    kind = library().presses["DuoAttentionPress"]
    pattern = (2, 6, np.array([[0.9, 0.1], [0.3, 0.8]]))
    monkeypatch.setattr(kind, "load_attention_pattern", staticmethod(lambda model: pattern))
    cache = KVPress("DuoAttentionPress")(found, num_slots=36)
    counts = [layer.counts[0].tolist() for layer in cache.layers]
    assert counts == [[PREFIX, 8], [8, PREFIX]]
    assert cache.mean_slots == 36
    ends = torch.cat([found.keys[0][0, 1, :2], found.keys[0][0, 1, -6:]])
    assert torch.allclose(cache.layers[0].head(0, 1)[0], ends, atol=1e-5)
    with pytest.raises(InputError, match="keeps 8 slots or more in every head: 7 are too few"):
        KVPress("DuoAttentionPress")(found, num_slots=7)


def give_filters(model, monkeypatch, tmp_path):
    filters = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(library().presses["QFilterPress"], "load_q_filters", staticmethod(lambda name: filters))
    return KVPress("QFilterPress")


def give_statistics(model, monkeypatch, tmp_path):
    from kvpress.presses.expected_attention_with_stats import ExpectedAttentionStats

    ExpectedAttentionStats(2, 4, 8, "", "", 1, 1, 4).save_pretrained(tmp_path)
    return KVPress("ExpectedAttentionStatsPress", stats_folder=str(tmp_path))


def give_surrogate(model, monkeypatch, tmp_path):
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel

    surrogate = KVzapModel(KVzapConfig(input_dim=32, output_dim=2, n_modules=2))
    monkeypatch.setattr(KVzapModel, "from_pretrained", lambda name: surrogate)
    return KVPress("KVzapPress")


def give_gates(model, monkeypatch, tmp_path):
    from kvpress.presses import fastkvzip_press

    gates = [fastkvzip_press.FastKVzipGate(i, 32, 2, 2, torch.float32) for i in range(2)]
    monkeypatch.setattr(fastkvzip_press, "load_fastkvzip", lambda model_name, device: gates)
    return KVPress("FastKVzipPress")


def give_budgets(model, monkeypatch, tmp_path):
    import numpy as np

    curves = np.tile(np.linspace(0.01, 0.99, 99)[:, None, None], (1, 2, 2))
    kind = library().presses.get("LUKVPress") or pytest.skip(f"kvpress {library().version} has no LUKVPress")
    monkeypatch.setattr(kind, "_load_budget_curves", lambda self, model: curves)
    return KVPress("LUKVPress", press=KVPress("KnormPress"))


@needs_kvpress
@pytest.mark.parametrize("give", [give_filters, give_statistics, give_surrogate, give_gates, give_budgets])
def test_presses_with_trained_parts_work_where_the_part_is_there(found, monkeypatch, tmp_path, give):
    cache = give(found.model, monkeypatch, tmp_path)(found, num_slots=32)
    assert cache.mean_slots == 32
    assert compare(found, cache).nll.isfinite().all()


@needs_kvpress
def test_a_ragged_cache_of_a_press_survives_the_disk(found, tmp_path):
    cache = KVPress("AdaKVPress", press=KVPress("SnapKVPress", window_size=8), alpha_safeguard=0.1)(
        found, keep_ratio=0.25
    )
    told = {key: cache.metadata[key] for key in ("method", "press.window_size", "alpha_safeguard", "kvpress")}
    assert told == {
        "method": "kvpress:AdaKVPress+SnapKVPress", "press.window_size": "8", "alpha_safeguard": "0.1",
        "kvpress": library().version,
    }  # fmt: skip
    cache.save(tmp_path / "c")
    loaded = CompactCache.load(tmp_path / "c", found.model)
    assert torch.equal(compare(found, loaded).kl, compare(found, cache).kl)


@needs_kvpress
def test_kvzip_finds_the_tokenizer_of_the_model_in_the_package():
    model, _ = load("kvcat-base")
    found = trace(model, torch.arange(48).unsqueeze(0), 32)
    assert KVPress("KVzipPress")(found, num_slots=8).mean_slots == 8
    assert model.config.name_or_path == "kvcat-base"


@needs_kvpress
def test_options_of_an_inner_press_can_be_given_by_name_as_the_cache_tells_them(found):
    nested = KVPress("AdaKVPress", press=KVPress("SnapKVPress", window_size=8))(found, num_slots=SLOTS)
    told = {"press.window_size": int(nested.metadata["press.window_size"])}
    flat = KVPress("AdaKVPress+SnapKVPress", **told)(found, num_slots=SLOTS)
    assert flat.metadata == nested.metadata
    assert all(torch.equal(left, right) for left, right in zip(heads(flat, 0), heads(nested, 0), strict=True))


@needs_kvpress
def test_keeping_everything_is_the_dense_cache(found):
    cache = KVPress("KVzipPress")(found, keep_ratio=1)
    assert torch.equal(cache.layers[1].keys, found.keys[1])


@needs_kvpress
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ZipPress", {}, r"kvpress .* has no press 'ZipPress'; there are AdaKVPress, "),
        ("ScorerPress", {}, "no press 'ScorerPress'"),
        ("ThinKPress", {}, "ThinKPress cannot make a compact cache: it zeroes channels"),
        ("DecodingPress+KnormPress", {}, "DecodingPress cannot make a compact cache: it compresses while"),
        ("SimLayerKVPress", {}, "its size follows from its own options"),
        ("SnapKVPress", {"compression_ratio": 0.5}, "compression_ratio follows from the keep ratio"),
        ("AdaKVPress+SnapKVPress", {"press.windows": 3}, "SnapKVPress: .*unexpected keyword argument 'windows'"),
        ("SnapKVPress", {"press.window_size": 3}, "SnapKVPress: .*unexpected keyword"),
        ("SnapKVPress", {"windows": 3}, "SnapKVPress: .*unexpected keyword argument 'windows'"),
        ("AdaKVPress", {}, "AdaKVPress: .*press"),
        ("AdaKVPress+KnormPress", {"press": "KnormPress"}, "give the inner press once"),
        ("AdaKVPress+AdaKVPress", {}, "AdaKVPress: .*press"),
        ("AdaKVPress+KVzipPress", {}, "AdaKVPress: AdaKVPress requires a ScorerPress"),
    ],
)
def test_presses_and_options_that_cannot_work_are_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        KVPress(name, **options)


@needs_kvpress
def test_prefixes_models_and_sizes_that_a_press_cannot_take_are_refused(found, texts):
    with pytest.raises(InputError, match=r"SnapKVPress on a prefix of 64 tokens: .*window size 64"):
        KVPress("SnapKVPress")(found, num_slots=SLOTS)
    with pytest.raises(InputError, match="DuoAttentionPress has no part trained for "):
        KVPress("DuoAttentionPress")(found, num_slots=SLOTS)
    with pytest.raises(InputError, match="KVzipPress gives no scores"):
        KVPress("KVzipPress").scores(found, SLOTS)
    with pytest.raises(InputError, match=r"num_slots must be in \[1, 64\], not 0"):
        KVPress("KnormPress")(found, num_slots=0)
    other = stock_model(
        "gpt_neox", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=256
    )
    with pytest.raises(InputError, match="kvpress does not support GPTNeoXForCausalLM"):
        KVPress("KnormPress")(trace(other.eval(), texts, PREFIX), num_slots=SLOTS)
