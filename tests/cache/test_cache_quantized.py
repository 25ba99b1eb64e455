"""Caches in 8 and 4 bits: packed codes, their file, and attention over them."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad
from transformers import DynamicCache

import kvcat
from kvcat.cache import (
    CacheRecord,
    CompactCache,
    CompactLayer,
    Grid,
    QuantizedLayer,
    cache_argument,
    fingerprint,
    key_groups,
)
from kvcat.cache.codes import most_bytes_per_slot, pack, unpack
from kvcat.compress import make_compressor
from kvcat.compress.prefix import protecting
from kvcat.errors import InputError
from tiny import layer_of, loud_model, refusal

PREFIX = 200
COUNTS = [[1, 5], [130, 2]]  # example, head


def random_states(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ragged_layer(seed=0, dim=8, counts=COUNTS):
    states = []
    for index, dims in enumerate(((dim,), (dim,), ())):
        rows = [[random_states(n, *dims, seed=seed + 7 * index + n) for n in row] for row in counts]
        states.append(rows)
    return layer_of(*states)


def example(*, equal=False, log_bias=True, model=None):
    """A cache of two layers and two examples, with heads of one slot among them."""
    layers = []
    for seed in range(2):
        layer = ragged_layer(seed, counts=[[6, 6], [6, 6]] if equal else COUNTS)
        layers.append(layer if log_bias else replace(layer, log_bias=None))
    owner = "2:" + "ab" * 32 if model is None else fingerprint(model)
    return CompactCache(layers, PREFIX, owner, CacheRecord("by hand"))


def heads_of(cache):
    for layer in cache.layers:
        for row in range(cache.batch_size):
            for head in range(layer.counts.shape[1]):
                slots = layer.head(row, head)
                yield slots.keys, slots.values, slots.log_bias


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_codes_unpack_to_themselves(bits):
    codes = torch.randint(0, 2**bits, (3, 5, 8), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.numel() * 8 == codes.numel() * bits
    assert torch.equal(unpack(packed, bits), codes)


def test_two_codes_of_four_bits_share_a_byte_the_first_in_the_low_half():
    assert pack(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8), 4).tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_on_a_grid_survive_exactly(bits):
    levels = 2**bits - 1
    codes = torch.randint(0, levels + 1, (1, 1, 20, 8), generator=torch.Generator().manual_seed(1))
    codes[0, 0, 1] = 0
    codes[0, 0, 2] = levels
    codes[..., 0] = 0
    codes[..., 1] = levels  # every key channel and every value has both ends
    codes[0, 0, 1, 1] = 0
    codes[0, 0, 2, 0] = levels
    codes[..., 0][0, 0, 3:] = 0
    states = -3.0 + codes.float() * 0.25
    cache = CompactCache([CompactLayer(states, states)], PREFIX, "2:" + "ab" * 32)
    layer = cache.quantize(bits).layers[0]
    assert torch.equal(layer.keys, states)
    assert torch.equal(layer.values, states)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 100.0]),
    offset=st.sampled_from([0.0, 1.0, -300.0]),
    bits=st.sampled_from([8, 4]),
)
def test_no_number_is_further_than_half_a_step_from_its_code(seed, scale, offset, bits):
    states = random_states(20, 6, seed=seed) * scale + offset
    grid = Grid.over(states, 0, bits)
    codes = grid.codes(states, bits)
    error = (grid.numbers(codes, torch.float64) - states.double()).abs()
    assert (error <= 0.5001 * grid.scales.double() + 1e-12).all()
    assert codes.max() <= 2**bits - 1


def test_protected_numbers_that_a_type_cannot_hold_are_rejected_quantised_or_not():
    trace = kvcat.trace(loud_model(), torch.arange(1, 31).unsqueeze(0), prefix_len=20)
    cache = make_compressor("streaming")(protecting(trace, [(3, 5)]), keep_ratio=0.5)
    cache.layers[0].values[:, :, 0] *= 1e6  # a protected slot's, exact in float32
    for each in (cache, cache.quantize(8)):
        assert "do not fit in torch.float16" in refusal(each.to, dtype=torch.float16)
        assert each.to(dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("bits", [8, 4])
def test_first_slots_survive_in_half_precision_and_the_others_within_a_step(bits):
    cache = example()
    packed = cache.quantize(bits)
    pairs = zip(heads_of(cache), heads_of(packed), strict=True)
    for (keys, values, bias), (new_keys, new_values, new_bias) in pairs:
        assert torch.equal(new_keys[:1], keys[:1].half().float())
        assert torch.equal(new_values[:1], values[:1].half().float())
        assert torch.equal(new_bias, bias.half().float())
        key_step = (keys.amax(0) - keys.amin(0)) / (2**bits - 1)
        assert ((new_keys - keys).abs() <= 0.51 * key_step + 1e-3).all()
        value_step = (values.amax(1) - values.amin(1)) / (2**bits - 1)
        assert ((new_values - values).abs() <= 0.51 * value_step[:, None] + 1e-3).all()


def test_an_outlier_in_the_first_slot_does_not_widen_the_steps_of_the_others():
    keys = random_states(1, 1, 12, 8)
    cache = CompactCache([CompactLayer(keys, keys)], PREFIX, "2:" + "ab" * 32)
    loud = keys.clone()
    loud[0, 0, 0] = 1000.0
    with_outlier = CompactCache([CompactLayer(loud, keys)], PREFIX, "2:" + "ab" * 32)
    expected = cache.quantize(4).layers[0].keys
    assert torch.equal(with_outlier.quantize(4).layers[0].keys[:, :, 1:], expected[:, :, 1:])


def test_groups_of_keys_are_about_equally_large_and_none_exceeds_the_limit():
    assert key_groups(0, 64) == []
    assert key_groups(64, 64) == [64]
    assert key_groups(65, 64) == [32, 33]
    assert sum(key_groups(1000, 64)) == 1000


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_file_gives_the_same_cache_and_has_as_many_bytes_as_are_counted(tmp_path, bits, equal):
    cache = example(equal=equal).quantize(bits)
    cache.save(tmp_path / "doc")
    loaded = CompactCache.load(tmp_path / "doc")
    assert loaded.bits == bits
    assert loaded.record == CacheRecord("by hand")
    assert loaded.metadata["bits"] == str(bits)
    assert "bits" not in loaded.unpacked().metadata
    for layer, other in zip(cache.layers, loaded.layers, strict=True):
        assert layer.dtype == other.dtype
        for name, tensor in layer.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), name
    content = (tmp_path / "doc").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    assert len(content) - header == cache.nbytes == loaded.nbytes


def test_bytes_by_hand():
    layer = example(equal=True).quantize(4).layers[0]
    heads = 4
    packed = heads * 5
    codes = packed * (8 + 8) // 2
    grids = heads * 8 * 4 + packed * 4  # one group of keys per head, one of each value
    first = heads * 16 * 2
    log_bias = heads * 6 * 2
    counts = heads * 4
    assert layer.nbytes == codes + grids + first + log_bias + counts
    per_slot, per_head = most_bytes_per_slot((8, 8), 4)
    assert layer.nbytes <= heads * (6 * per_slot + per_head)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("key_codes", lambda x: x[:-1], "key_codes have shape"),
        ("key_scales", lambda x: x * torch.nan, "not finite"),
        ("value_scales", lambda x: x.float(), "float32"),
        ("counts", lambda x: x * 0, "no slot"),
        ("counts", lambda x: x + 300, "slots for a prefix"),
        ("first_keys", None, "no first_keys"),
        ("first_keys", lambda x: x[:-1], "first_keys have shape"),
        ("first_keys", lambda x: x.int(), "int32"),
        ("first_keys", lambda x: x.repeat(2, 1), "a head has 1 slots, and 2 first ones"),
        ("keys", lambda _: torch.zeros(2), "which no cache"),
    ],
)
def test_a_damaged_layer_is_rejected_though_the_checksum_is_right(tmp_path, name, change, reason):
    cache = example().quantize(4)
    tensors = cache.layers[0].tensors()
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors.get(name))

    class Damaged(QuantizedLayer):
        def tensors(self):
            return tensors

    fields = {field: getattr(cache.layers[0], field) for field in vars(cache.layers[0])}
    fields.pop("_places", None)
    damaged = replace(cache, layers=[Damaged(**fields), cache.layers[1]])
    assert reason in refusal(damaged.save, tmp_path / "doc")
    assert not (tmp_path / "doc").exists()


@pytest.mark.slow
def test_a_kill_while_saving_leaves_the_old_file(tmp_path):
    path = tmp_path / "doc"
    example().quantize(8).save(path)
    before = path.read_bytes()
    script = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from kvcat.cache import CompactCache\n"
        "cache = CompactCache.load(sys.argv[1]).unpacked().quantize(4)\n"
        "Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "cache.save(sys.argv[1])\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(path)], env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert str(CompactCache.load(path).bits) == "8"


def naive_logits(model, cache, ids):
    """Stock eager attention over every head's unpacked slots, padded with hidden ones."""
    unpacked = cache.unpacked()
    wide = unpacked.max_slots
    past = DynamicCache()
    masks = []
    for index, layer in enumerate(unpacked.layers):
        full = layer.padded()
        missing = wide - full.keys.shape[2]
        keys, values = (pad(x, (0, 0, 0, missing)) for x in (full.keys, full.values))
        bias = torch.zeros(full.keys.shape[:3]) if full.log_bias is None else full.log_bias
        masks.append(pad(bias, (0, missing), value=-1e9).clamp_min(-1e9))
        past.update(keys, values, index)
    new = ids.shape[1]
    causal = torch.full((new, new), -1e9).triu(1)
    positions = PREFIX + torch.arange(new).expand(len(ids), -1)
    hooks = []
    for layer, bias in zip(model.model.layers, masks, strict=True):
        # (batch, heads, new, wide): each KV head's bias for its query heads
        of_slots = bias.repeat_interleave(2, 1).unsqueeze(2).expand(-1, -1, new, -1)
        of_new = causal.expand(len(ids), of_slots.shape[1], -1, -1)
        mask = torch.cat([of_slots, of_new], -1)

        def with_mask(_, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}

        hooks.append(layer.self_attn.register_forward_pre_hook(with_mask, with_kwargs=True))
    try:
        with torch.no_grad():
            return model(input_ids=ids, position_ids=positions, **cache_argument(past)).logits
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("equal", "log_bias"), [(False, True), (True, True), (True, False)])
def test_logits_are_those_of_stock_attention_over_the_unpacked_slots(packed, equal, log_bias):
    options = {"max_position_embeddings": 256, "head_dim": 8}
    model = loud_model(**options)
    stock = loud_model(**options)
    stock.set_attn_implementation("eager")
    cache = example(equal=equal, log_bias=log_bias, model=model).quantize(4)
    ids = torch.randint(0, 67, (2, 5), generator=torch.Generator().manual_seed(3))
    expected = naive_logits(stock, cache, ids)
    inputs = cache.inputs(model, ids, packed=packed)
    with torch.no_grad():
        logits = model(**inputs).logits
    assert torch.allclose(logits, expected, atol=1e-4)


def test_a_packed_cache_answers_and_grows_as_an_unpacked_one():
    model = loud_model(max_position_embeddings=256, head_dim=8)
    cache = example(model=model).select([1]).quantize(4)
    ids = torch.randint(0, 67, (4, 5), generator=torch.Generator().manual_seed(3))
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 2):
        answers = [
            model.generate(**cache.inputs(model, ids, packed=packed), **settings, num_beams=beams)
            for packed in (False, True)
        ]
        assert torch.equal(*answers)
    # in memory: the codes, and the new tokens in full precision
    past = cache.to_transformers(model, packed=True)
    held = past.layers[0]
    assert held.ragged is cache.layers[0]
    assert held.keys.shape[2] == 0
    assert held.keys.dtype == torch.float32


def test_selected_examples_are_those_of_the_ordinary_cache():
    cache = example()
    chosen = cache.quantize(4).select([1, 1, 0])
    expected = cache.select([1, 1, 0]).quantize(4)
    for layer, other in zip(chosen.layers, expected.layers, strict=True):
        for name, tensor in layer.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), name


def test_packed_needs_codes_and_no_static_cache():
    model = loud_model(max_position_embeddings=256, head_dim=8)
    cache = example(model=model)
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert "not in codes" in refusal(cache.inputs, model, ids, packed=True)
    packed = cache.quantize(8)
    assert "static" in refusal(packed.inputs, model, ids, packed=True, static_tokens=8)
    static = model.generate(
        **packed.inputs(model, ids, static_tokens=16), max_new_tokens=4, do_sample=False
    )
    plain = model.generate(**packed.inputs(model, ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(static, plain)


def test_another_type_or_model_does_not_change_the_codes():
    cache = example().quantize(8)
    half = cache.to(dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert half.layers[0].keys.dtype == torch.bfloat16
    assert torch.equal(half.layers[0].key_codes, cache.layers[0].key_codes)
    with pytest.raises(InputError, match="another model"):
        cache.check_model(loud_model())
