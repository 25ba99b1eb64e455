"""The presses of kvpress as compressors, and our methods against them; most tests need kvpress
installed."""

import importlib
import importlib.util
import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structured_heads import positions_of, tensors
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcat.cache import cache_argument
from kvcat.compress import Eviction, compare, replay, trace
from kvcat.compress.base import received_mass
from kvcat.compress.kvpress import (
    KVPress,
    _press_prefix,
    library,
    presses,
    removed_fraction,
    version,
)
from kvcat.compress.press_arguments import with_cache_position, with_old_names
from kvcat.errors import InputError
from kvcat.models import load
from tiny import byte_tokenizer, loud_model, stock_model

IMPORTED_WITH_KVCAT = "kvpress" in sys.modules
needs_kvpress = pytest.mark.skipif(
    importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed"
)
PREFIX = 64
SLOTS = 20
SNAPKV = {"press.window_size": 8}
CHUNKED = {
    "ChunkKVPress+SnapKVPress": {**SNAPKV, "chunk_length": 4},
    "ChunkPress+KnormPress": {"chunk_length": 16},
    "EntropyGatedChunkKVPress+KnormPress": {},
}
# presses that need no trained weights, each with options that fit a prefix of 64 tokens
PRESSES = {
    **{
        f"{name}+SnapKVPress": SNAPKV
        for name in ("AdaKVPress", "CriticalAdaKVPress", "CriticalKVPress")
    },
    "BlockPress+KeyDiffPress": {"block_size": 16},
    "KeyRerotationPress+StreamingLLMPress": {},
    "LagKVPress": {"lag_size": 8},
    "MergingPress+KnormPress": {},
    "SnapKVPress": {"window_size": 8},
    "PyramidKVPress": {"window_size": 2, "beta": 4},
    **CHUNKED,
    **{
        f"{name}Press": {}
        for name in (
            "Cap",
            "Compactor",
            "CUR",
            "ExpectedAttention",
            "KeyDiff",
            "Knorm",
            "KVCompose",
            "KVgrad",
            "KVzip",
            "LeverageScore",
            "NonCausalAttn",
            "ObservedAttention",
            "Random",
            "StreamingLLM",
            "TOVA",
        )
    },
}


def press(name):
    """A ``KVPress``; skips where the installed kvpress is too old to have it."""
    if missing := {*name.split("+")} - presses().keys():
        pytest.skip(f"kvpress {version()} has no {missing}")
    return KVPress(name, **PRESSES[name])


def off_prefix(states, prefix_states):
    """Distance of every slot's keys or values from the nearest of the same head's prefix."""
    return (
        torch.cdist(states, prefix_states, compute_mode="donot_use_mm_for_euclid_dist")
        .amin(-1)
        .max()
    )


@pytest.fixture(scope="module", autouse=True)
def imported_without_its_patches():
    if importlib.util.find_spec("kvpress") is not None:
        library()


@pytest.fixture(scope="module")
def texts():
    """Two of 80 tokens, none twice: in the first layer, keys of one token tie in norm, and ties
    break freely."""
    draw = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(250, generator=draw)[:80] for _ in range(2)])


@pytest.fixture(scope="module")
def qwen(tiny_folder):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def traced(qwen, texts):
    return trace(qwen, texts, PREFIX)


def test_importing_kvcat_does_not_import_kvpress_and_a_missing_one_is_reported(monkeypatch):
    assert not IMPORTED_WITH_KVCAT
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(
        InputError, match=r"kvpress cannot be imported .*: pip install .*\[kvpress\]'"
    ):
        KVPress("SnapKVPress")


@given(prefix=st.integers(2, 200_000), heads=st.integers(1, 4096), data=st.data())
def test_the_compression_ratio_makes_kvpress_keep_the_number_of_slots(prefix, heads, data):
    slots = data.draw(st.integers(1, prefix - 1))
    keeping = removed_fraction(slots, prefix, counts_removed=False)
    removing = removed_fraction(slots, prefix, counts_removed=True)
    assert int(prefix * (1 - keeping)) == slots
    assert int(heads * prefix * (1 - keeping)) == heads * slots
    assert int(heads * prefix * removing) == heads * (prefix - slots)


def traces_of_use(model):
    """Everything that a press might leave behind on a model and in transformers."""
    modules = dict(model.named_modules())
    names = {key: set(vars(module)) | set(module._modules) for key, module in modules.items()}
    hooks = [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules.values()
    ]
    config = model.config.to_dict(), model.config._attn_implementation
    return (
        names,
        hooks,
        config,
        dict(ALL_ATTENTION_FUNCTIONS),
        model.training,
        torch.get_rng_state().tolist(),
    )


@needs_kvpress
@pytest.mark.parametrize("name", PRESSES)
def test_a_press_makes_a_cache_of_really_fewer_slots_and_leaves_everything_as_it_was(
    qwen, texts, traced, name
):
    traced.model.train()
    before = traces_of_use(traced.model)
    try:
        cache = press(name)(traced, num_slots=SLOTS)
        assert traces_of_use(traced.model) == before
    finally:
        traced.model.eval()
    assert all(
        parameter.requires_grad and parameter.grad is None
        for parameter in traced.model.parameters()
    )
    assert not any(getattr(f, "__module__", "").startswith("kvpress") for f in before[3].values())
    assert (cache.num_tokens, cache.batch_size, cache.fingerprint) == (
        PREFIX,
        2,
        traced.fingerprint,
    )
    assert cache.mean_slots <= SLOTS if name in CHUNKED else cache.mean_slots == SLOTS
    assert cache.nbytes == traced.dense_cache().nbytes * cache.mean_slots / PREFIX
    assert compare(traced, cache).nll.isfinite().all()
    for layer, keys, values in zip(cache.layers, traced.keys, traced.values, strict=True):
        for row, head in ((0, 0), (1, 1)):
            kept = layer.head(row, head)
            kept_keys, kept_values = kept.keys, kept.values
            assert "Rerotation" in name or off_prefix(kept_keys, keys[row, head]) < 1e-3
            assert "Merging" in name or off_prefix(kept_values, values[row, head]) < 1e-3
    alone = press(name)(trace(qwen, texts[1:], PREFIX), num_slots=SLOTS)
    torch.testing.assert_close(tensors(cache.select([1])), tensors(alone), rtol=0, atol=0)


@needs_kvpress
def test_layers_of_a_pyramid_and_heads_of_kvzip_hold_different_numbers_of_slots(
    traced,
):
    pyramid = press("PyramidKVPress")(traced, num_slots=SLOTS)
    first, last = (layer.max_slots for layer in pyramid.layers)
    assert first > SLOTS > last
    zipped = press("KVzipPress")(traced, num_slots=SLOTS)
    assert not zipped.is_uniform
    expected = {
        "method": "kvpress:SnapKVPress",
        "kvpress": version(),
        "window_size": "8",
        "num_slots": str(SLOTS),
    }
    assert expected.items() <= press("SnapKVPress")(traced, num_slots=SLOTS).metadata.items()
    model, _ = load("kvcat-base")
    short_trace = trace(model, torch.arange(48).unsqueeze(0), 32)
    assert KVPress("KVzipPress")(short_trace, num_slots=24).mean_slots == 24
    assert model.config.name_or_path == "kvcat-base"


@needs_kvpress
def test_a_head_that_a_press_leaves_without_slots_keeps_the_first_token(traced):
    cache = KVPress("AdaKVPress+KnormPress", alpha_safeguard=0.0)(traced, num_slots=1)
    was_empty = 0
    for layer, dense in zip(cache.layers, traced.layers, strict=True):
        for example in range(traced.batch_size):
            counts = layer.counts[example].tolist()
            if sum(counts) > len(counts):  # more than the press had to give
                kv_head = counts.index(1)
                kept = layer.head(example, kv_head).keys
                assert torch.equal(kept, dense.slots.keys[example, kv_head, :1])
                was_empty += 1
    assert was_empty


@needs_kvpress
@pytest.mark.parametrize("name", ["KVzipPress", "KVgradPress"])
def test_the_opening_of_the_chat_template_counts_only_in_a_prefix_that_begins_with_it(
    name, qwen, texts, tmp_path, monkeypatch
):
    system = "<system>Be brief.</system>"

    def kept(opening, ids):
        """The caches of a model whose chat template has an opening before the user's words."""
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = opening + "{{ messages[0]['content'] }}</user>"
        tokenizer.save_pretrained(tmp_path)
        monkeypatch.setattr(qwen.config, "name_or_path", str(tmp_path))
        return press(name)(trace(qwen, ids, PREFIX), num_slots=SLOTS)

    plain_caches = [tensors(kept(opening, texts)) for opening in (system, "")]
    torch.testing.assert_close(*plain_caches, rtol=0, atol=0)
    opening_ids = torch.tensor([byte_tokenizer().encode(system)])
    chat = torch.cat([opening_ids, texts[:1]], 1)[:, : texts.shape[1]]
    other = chat.clone()
    other[0, 5] += 1
    # what kvpress drops of its own template: all tokens of the opening after the four sinks
    num_kept = [
        sum(
            (torch.cdist(prefix_keys[0, head, 4 : opening_ids.shape[1]], layer.head(0, head).keys))
            .amin(-1)
            .lt(1e-4)
            .sum()
            .item()
            for layer, prefix_keys in zip(cache.layers, traced.keys, strict=True)
            for head in range(2)
        )
        for ids in (chat, other)
        for cache, traced in [(kept(system, ids), trace(qwen, ids, PREFIX))]
    ]
    assert num_kept[0] == 0 < num_kept[1]


@needs_kvpress
@pytest.mark.parametrize("name", ["KVzipPress", "KVgradPress"])
def test_a_repetition_of_the_prefix_has_the_rotary_factors_of_the_prefix(name, tmp_path):
    """One of two models has its short factors at every length; the repetition is beyond the
    border."""
    byte_tokenizer(chat=False).save_pretrained(tmp_path)
    ids = torch.randint(3, 250, (1, 48), generator=torch.Generator().manual_seed(0))
    short = [1.0, 1.0, 1.0, 1.0]

    def kept(long):
        rope = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": short,
            "long_factor": long,
        }
        sizes = {"vocab_size": 300, "pad_token_id": 0, "max_position_embeddings": 256}
        border = {"original_max_position_embeddings": 64}
        model = loud_model("phi3", rope_parameters={**rope, **border}, **border, **sizes)
        model.config.name_or_path = str(tmp_path)
        return tensors(press(name)(trace(model, ids, supervision="self"), num_slots=12))

    torch.testing.assert_close(kept([8.0, 9.0, 10.0, 12.0]), kept(short), rtol=0, atol=0)


@needs_kvpress
@pytest.mark.parametrize("name", ["KVzipPress", "KVgradPress", "KVComposePress"])
def test_a_repetition_of_the_prefix_beyond_the_models_positions_is_rejected(name, tmp_path):
    byte_tokenizer(chat=False).save_pretrained(tmp_path)
    model = loud_model(vocab_size=300, max_position_embeddings=96)
    model.config.name_or_path = str(tmp_path)
    attention = model.config._attn_implementation
    ids = torch.arange(3, 67).unsqueeze(0)
    message = f"{name} on a prefix of 64 tokens: it repeats .* exceed the model's 96 positions"
    with pytest.raises(InputError, match=message):
        press(name)(trace(model, ids, supervision="self"), num_slots=SLOTS)
    trace(model, ids, supervision="self")
    assert model.config._attn_implementation in (attention, "kvcat")


@needs_kvpress
@pytest.mark.parametrize(
    ("kind", "options", "is_moved"),
    [
        ("granite", {"attention_multiplier": 0.02}, True),  # another scale
        ("olmo2", {}, False),  # norms
        ("cohere", {}, False),  # a rotation of neighbouring channels
        ("smollm3", {"num_hidden_layers": 4}, False),  # a layer without positions
    ],
)
def test_a_press_that_computes_other_queries_than_the_model_is_rejected(kind, options, is_moved):
    model = loud_model(kind, std=0.12, pad_token_id=0, **options)
    traced = trace(model, torch.arange(3, 67).unsqueeze(0), 40)
    for name in ("TOVAPress", "NonCausalAttnPress", "AdaKVPress+ExpectedAttentionPress"):
        with pytest.raises(InputError, match="kvpress computes other queries and keys, or scores"):
            KVPress(name)(traced, num_slots=12)
    for name in ("KnormPress", "ObservedAttentionPress"):
        assert KVPress(name)(traced, num_slots=12).mean_slots == 12
    moving = KVPress("KeyRerotationPress+StreamingLLMPress")
    if is_moved:
        assert moving(traced, num_slots=12).mean_slots == 12
    else:
        with pytest.raises(InputError, match="KeyRerotationPress on a prefix of 40 tokens"):
            moving(traced, num_slots=12)
    snapkv = importlib.import_module("kvpress.presses.snapkv_press")
    kvpress_utils = importlib.import_module("kvpress.utils")
    assert snapkv.get_prerope_query_states is kvpress_utils.get_prerope_query_states


@needs_kvpress
@pytest.mark.parametrize("name", ["KVzipPress", "KVgradPress", "SnapKVPress"])
def test_several_sizes_at_once_are_those_made_alone(traced, name):
    method = press(name)
    ratios = (0.25, 0.75, 0.5)
    for ratio, cache in zip(ratios, method.each(traced, ratios), strict=True):
        torch.testing.assert_close(
            tensors(cache), tensors(method(traced, keep_ratio=ratio)), rtol=0, atol=0
        )


@needs_kvpress
def test_presses_options_prefixes_and_models_that_cannot_work_are_rejected(
    traced, texts, monkeypatch
):
    for name, options, message in (
        (
            "ZipPress",
            {},
            r"no press of kvpress .* 'ZipPress' \(did you mean KVzipPress",
        ),
        ("ScorerPress", {}, "no press of kvpress .* 'ScorerPress'"),
        ("SimLayerKVPress", {}, "its options set its size"),
        (
            "DecodingPress+KnormPress",
            {},
            "DecodingPress cannot make a compact cache: it compresses while",
        ),
        (
            "SnapKVPress",
            {"compression_ratio": 0.5},
            "compression_ratio follows from the keep ratio",
        ),
        (
            "AdaKVPress+SnapKVPress",
            {"press.windows": 3},
            "SnapKVPress: .*unexpected keyword argument 'windows'",
        ),
        ("AdaKVPress", {}, "AdaKVPress: .*press"),
        ("AdaKVPress+KVzipPress", {}, "AdaKVPress: AdaKVPress requires a ScorerPress"),
    ):
        with pytest.raises(InputError, match=message):
            KVPress(name, **options)
    filters = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(
        presses()["QFilterPress"], "load_q_filters", staticmethod(lambda name: filters)
    )
    assert (
        KVPress("QFilterPress")(traced, num_slots=32).mean_slots == 32
    )  # its trained part is there
    monkeypatch.setattr(
        presses()["QFilterPress"], "load_q_filters", staticmethod(lambda name: {}[name])
    )
    with pytest.raises(InputError, match=r"SnapKVPress on a prefix of 64 tokens: .*window size 64"):
        KVPress("SnapKVPress")(traced, num_slots=SLOTS)
    with pytest.raises(InputError, match="QFilterPress has no trained component for "):
        KVPress("QFilterPress")(traced, num_slots=SLOTS)
    other = stock_model(
        "gpt_neox",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=256,
    )
    with pytest.raises(InputError, match="kvpress does not support GPTNeoXForCausalLM"):
        KVPress("KnormPress")(trace(other.eval(), texts, PREFIX), num_slots=SLOTS)


@needs_kvpress
@pytest.mark.parametrize(
    "name",
    [
        "SnapKVPress",
        "AdaKVPress+SnapKVPress",
        "KVzipPress",
        "MergingPress+KnormPress",
        "KeyRerotationPress+StreamingLLMPress",
    ],
)
def test_the_suffix_scores_as_in_a_run_of_kvpress(qwen, texts, traced, monkeypatch, name):
    """kvpress itself: prefill under the press, then the suffix on its cache, hidden slots masked by
    its own patch."""
    method = press(name)
    cache = method(traced, num_slots=SLOTS)
    kvpress_press = method._build()
    kvpress = importlib.import_module("kvpress")
    kvpress_press.compression_ratio = removed_fraction(
        SLOTS, PREFIX, counts_removed=name == "KVzipPress"
    )
    stock = AutoModelForCausalLM.from_pretrained(
        qwen.name_or_path, attn_implementation="sdpa"
    ).eval()
    stock.load_state_dict(qwen.state_dict())
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS,
        "sdpa",
        kvpress.attention_patch.attention_patch(ALL_ATTENTION_FUNCTIONS["sdpa"]),
    )
    for layer in stock.model.layers:
        layer.self_attn.register_forward_pre_hook(
            partial(with_cache_position, config=stock.config), with_kwargs=True
        )
    with_old_names(stock, [layer.self_attn for layer in stock.model.layers])
    past = DynamicCache()
    with torch.no_grad(), kvpress_press(stock):
        if name == "KVzipPress":
            # the texts are no chats, so that no token of theirs is an opening
            kvpress_press.prefix_length = 0
        stock.model(input_ids=texts[:1, :PREFIX], **cache_argument(past))
    start = SLOTS if "Rerotation" in name else PREFIX
    steps = []
    for i in range(6):  # one by one: kvpress finds no key that all of many queries ignore
        inputs = {**cache_argument(past), "position_ids": torch.tensor([[start + i]])}
        steps.append(stock(texts[:1, PREFIX + i, None], **inputs).logits.detach())
    logits = replay(qwen, cache.select([0]), texts[:1, PREFIX : PREFIX + 6])
    assert torch.allclose(logits, torch.cat(steps, dim=1), atol=2e-4)


@needs_kvpress
@pytest.mark.parametrize("num_slots", [9, 16, 40])
@pytest.mark.parametrize(
    ("name", "options", "theirs", "their_options"),
    [
        ("keynorm", {}, "KnormPress", {}),
        ("streaming", {"num_sinks": 4}, "StreamingLLMPress", {"n_sink": 4}),
        ("streaming", {"num_sinks": 1}, "StreamingLLMPress", {"n_sink": 1}),
        # the paper's experiments: window 32, kernel 7, max pooling; kvpress: 64, 5, average
        (
            "snapkv",
            {"window": 8, "kernel_size": 5, "pooling": "average"},
            "SnapKVPress",
            {"window_size": 8, "kernel_size": 5},
        ),
    ],
)
def test_our_method_keeps_the_positions_that_kvpress_keeps(
    traced, name, options, theirs, their_options, num_slots
):
    ours = Eviction(name, **options)(traced, num_slots=num_slots)
    press = KVPress(theirs, **their_options)(traced, num_slots=num_slots)
    for our_layer, press_layer, keys in zip(ours.layers, press.layers, traced.keys, strict=True):
        assert torch.equal(
            our_layer.positions, positions_of(press_layer.keys, keys).sort(-1).values
        )


@needs_kvpress
def test_scores_are_those_of_kvpress_but_for_tovas_last_position_and_h2os_division(traced):
    """TOVAPress always keeps the last position; ObservedAttentionPress divides by the queries that
    see a position."""

    def theirs(name):
        kvpress_press = KVPress(name)._build()
        seen = []
        score = kvpress_press.score
        kvpress_press.score = lambda *arguments: (seen.append(score(*arguments)), seen[-1])[1]
        _press_prefix(kvpress_press, traced, 0, [SLOTS])
        return seen

    for our_scores, press_scores in zip(
        Eviction("tova").scorer.measure(traced), theirs("TOVAPress"), strict=True
    ):
        assert torch.allclose(our_scores[:1, ..., :-1], press_scores[..., :-1], atol=1e-6)
        assert torch.equal(press_scores[..., -1], press_scores.amax(-1))
    for mass, scores in zip(
        received_mass(traced, 0), theirs("ObservedAttentionPress"), strict=True
    ):
        assert torch.allclose(mass[:1] / torch.arange(PREFIX, 0, -1) / 2, scores, atol=1e-5)
