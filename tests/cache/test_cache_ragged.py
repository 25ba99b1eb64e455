"""Heads and layers with slots of their own number, and caches with room allocated once."""

import pytest
import torch
from transformers import DynamicCache

from kvcat.cache import CompactCache, CompactLayer, PrefixLayer, RaggedLayer, fingerprint, next_turn
from kvcat.errors import InputError
from tiny import stock_model

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
PREFIX = 20
COUNTS = ([[1, 5], [4, 2]], [[3, 3], [7, 1]], [[2, 6], [6, 6]])  # layer, example, head


def tiny(name="llama"):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = stock_model(name, **SIZES)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
    return model.double().eval()


def ragged_layer(counts, seed, log_bias=True):
    draw = torch.Generator().manual_seed(seed)

    def states(*shape):
        return [[torch.randn(n, *shape, generator=draw).double() for n in row] for row in counts]

    return CompactLayer.ragged(states(8), states(8), states() if log_bias else None)


def ragged_cache(model, batch=2, log_bias=True):
    layers = [ragged_layer(counts[:batch], seed, log_bias) for seed, counts in enumerate(COUNTS)]
    return CompactCache(layers, PREFIX, fingerprint(model))


def naive_logits(cache, ids, name="llama", padding=None):
    """One example and one head after the other, in the attention of the stock model."""
    model = tiny(name)
    batch, new = ids.shape
    mask = torch.ones_like(ids) if padding is None else padding
    wide = max(layer.num_slots for layer in cache.layers)
    past, biases = DynamicCache(), []
    for index, layer in enumerate(cache.layers):
        keys, values = (torch.zeros(batch, 2, wide, 8).double() for _ in range(2))
        bias = torch.full((batch, 2, wide), -1e30).double()
        for row in range(batch):
            for head in range(2):
                k, v, b = layer.head(min(row, cache.batch_size - 1), head)
                keys[row, head, : len(k)], values[row, head, : len(k)] = k, v
                bias[row, head, : len(k)] = 0 if b is None else b
        past.update(keys, values, index)
        biases.append(bias)

    def own_mask(layer_index):
        full = torch.zeros(batch, 4, new, wide + new).double()
        full[..., :wide] = biases[layer_index].repeat_interleave(2, dim=1).unsqueeze(2)
        causal = torch.ones(new, new).tril().bool() & mask.bool()[:, None, None, :]
        full[..., wide:] = torch.where(causal, 0.0, -1e30)
        return lambda _module, args, kwargs: (args, {**kwargs, "attention_mask": full})

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(own_mask(index), with_kwargs=True)
    positions = PREFIX + (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(ids, past_key_values=past, position_ids=positions).logits


def questions(rows, length=7):
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("log_bias", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma", "qwen3"])
def test_a_forward_over_ragged_heads_equals_stock_attention_head_by_head(name, log_bias):
    model = tiny(name)
    cache, ids = ragged_cache(model, log_bias=log_bias), questions(2)
    with torch.no_grad():
        logits = model(**cache.inputs(model, ids)).logits
    assert torch.allclose(logits, naive_logits(cache, ids, name), atol=1e-10)


def test_many_queries_take_the_bias_through_channels_to_the_same_logits():
    model = tiny()
    cache, ids = ragged_cache(model), questions(2, 70)
    with torch.no_grad():
        logits = model(**cache.inputs(model, ids)).logits
    assert torch.allclose(logits, naive_logits(cache, ids), atol=1e-10)


@pytest.mark.parametrize("static_tokens", [None, 11])
@pytest.mark.parametrize("uniform", [False, True])
def test_generation_takes_the_naive_argmax_at_every_step(uniform, static_tokens):
    model, ids = tiny(), questions(2, 3)
    cache = ragged_cache(model)
    if uniform:
        layers = [CompactLayer(**layer.padded().select(slice(0, 2)).tensors()) for layer in cache.layers]
        cache = CompactCache(layers, PREFIX, cache.fingerprint)
    out = model.generate(**cache.inputs(model, ids, static_tokens=static_tokens), max_new_tokens=8, do_sample=False)
    for _ in range(8):
        ids = torch.cat([ids, naive_logits(cache, ids)[:, -1:].argmax(-1)], dim=1)
    assert out.tolist() == ids.tolist()


@pytest.mark.parametrize("static_tokens", [None, 12])
def test_left_padded_questions_are_answered_as_each_would_be_alone(static_tokens):
    model = tiny()
    cache = ragged_cache(model, 1)
    asked = [[7, 3], [11, 12, 13, 14], [9, 2, 5]]
    ids = torch.tensor([[0] * (4 - len(q)) + q for q in asked])
    mask = torch.tensor([[0] * (4 - len(q)) + [1] * len(q) for q in asked])
    out = model.generate(
        **cache.inputs(model, ids, mask, static_tokens=static_tokens), max_new_tokens=6, do_sample=False
    )
    for row, question in zip(out, asked, strict=True):
        alone = torch.tensor([question])
        for _ in range(6):
            alone = torch.cat([alone, naive_logits(cache, alone)[:, -1:].argmax(-1)], dim=1)
        assert row[4:].tolist() == alone[0, len(question) :].tolist()


@pytest.mark.parametrize("cached", [1, 2])
def test_beams_keep_the_slots_of_their_own_example(cached):
    model, ids = tiny(), questions(2, 3)
    cache = ragged_cache(model, cached)
    together = model.generate(**cache.inputs(model, ids), max_new_tokens=4, num_beams=3, do_sample=False)
    for row in range(2):
        own = cache.select([min(row, cached - 1)])
        alone = model.generate(**own.inputs(model, ids[row : row + 1]), max_new_tokens=4, num_beams=3, do_sample=False)
        assert together[row].tolist() == alone[0].tolist()


@pytest.mark.parametrize("kind", ["ragged", "uniform", "static"])
def test_a_second_turn_goes_on_from_the_first(kind):
    model, ids = tiny(), questions(1, 4)
    cache = ragged_cache(model, 1)
    if kind != "ragged":
        layers = [CompactLayer(**layer.padded().tensors()) for layer in cache.layers]
        cache = CompactCache(layers, PREFIX, cache.fingerprint)
    first = cache.inputs(model, ids, static_tokens=40 if kind == "static" else None)
    asked = model.generate(**first, max_new_tokens=5, do_sample=False)
    second = torch.cat([asked[:, -1:], torch.tensor([[3, 1, 4]])], dim=1)
    answer = model.generate(**next_turn(first["past_key_values"], second), max_new_tokens=5, do_sample=False)
    whole = torch.cat([asked, second[:, 1:]], dim=1)
    for _ in range(5):
        whole = torch.cat([whole, naive_logits(cache, whole)[:, -1:].argmax(-1)], dim=1)
    assert answer[0, -5:].tolist() == whole[0, -5:].tolist()
    with pytest.raises(InputError, match="hold no token"):
        next_turn(first["past_key_values"], second[:, :0])


def test_layers_of_unequal_slots_without_log_bias_are_masked_by_their_own_number():
    model, ids = tiny(), questions(1, 5)
    draw = torch.Generator().manual_seed(0)
    layers = [CompactLayer(*(torch.randn(1, 2, n, 8, generator=draw).double() for _ in range(2))) for n in (2, 9, 4)]
    cache = CompactCache(layers, PREFIX, fingerprint(model))
    with torch.no_grad():
        logits = model(**cache.inputs(model, ids)).logits
    assert torch.allclose(logits, naive_logits(cache, ids), atol=1e-10)


@pytest.mark.parametrize("selected", [False, True])
def test_ragged_heads_that_come_out_equal_are_an_ordinary_layer_on_a_stock_model(selected):
    model, ids = tiny(), questions(1, 1)
    counts = [[[3, 3], [2, 4]], [[3, 3], [1, 1]], [[3, 3], [5, 1]]] if selected else [[[3, 3]]] * 3
    layers = [ragged_layer(own, seed, log_bias=False) for seed, own in enumerate(counts)]
    cache = CompactCache(layers, PREFIX, fingerprint(model)).select([0])
    assert all(isinstance(layer, CompactLayer) for layer in cache.layers)
    with torch.no_grad():
        logits = model(**cache.inputs(model, ids)).logits
    assert torch.allclose(logits, naive_logits(cache, ids), atol=1e-10)


def test_equal_counts_in_a_ragged_layer_reach_attention():
    model, ids = tiny(), questions(1, 1)
    draw = torch.Generator().manual_seed(0)
    counts = torch.tensor([[3, 3]])
    layers = [
        RaggedLayer(*(torch.randn(6, 8, generator=draw).double() for _ in range(2)), None, counts) for _ in range(3)
    ]
    cache = CompactCache(layers, PREFIX, fingerprint(model))
    with torch.no_grad():
        logits = model(**cache.inputs(model, ids)).logits
    assert torch.allclose(logits, naive_logits(cache, ids), atol=1e-10)


def test_a_slot_of_log_bias_log_two_counts_as_that_slot_twice():
    model, ids = tiny(), questions(1, 5)
    draw = torch.Generator().manual_seed(0)
    once, twice = [], []
    for _ in range(3):
        keys, values = (torch.randn(1, 2, 4, 8, generator=draw).double() for _ in range(2))
        bias = torch.zeros(1, 2, 4).double()
        bias[..., 1] = torch.tensor(2.0).log()
        once.append(CompactLayer(keys, values, bias))
        again = [0, 1, 1, 2, 3]
        twice.append(CompactLayer(keys[:, :, again], values[:, :, again]))
    with torch.no_grad():
        biased, dense = (
            model(**CompactCache(layers, PREFIX, fingerprint(model)).inputs(model, ids)).logits
            for layers in (once, twice)
        )
    assert torch.allclose(biased, dense, atol=1e-12)


def test_a_ragged_cache_holds_its_slots_and_nothing_else(tmp_path):
    model = tiny()
    cache = ragged_cache(model)
    total = sum(sum(map(sum, counts)) for counts in COUNTS)
    assert (cache.num_slots, cache.mean_slots, cache.is_uniform) == (7, total / 12, False)
    assert cache.nbytes == total * (8 + 8 + 1) * 8
    past = cache.to_transformers(model)
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers) == 0
    cache.save(tmp_path / "c.safetensors")
    loaded = CompactCache.load(tmp_path / "c.safetensors", model)
    for ours, theirs in zip(cache.layers, loaded.layers, strict=True):
        assert isinstance(theirs, RaggedLayer)
        assert all(torch.equal(tensor, theirs.tensors()[name]) for name, tensor in ours.tensors().items())


def test_selected_examples_are_the_heads_they_were():
    cache = ragged_cache(tiny())
    swapped = cache.select([1, 0, 1])
    for layer, chosen in zip(cache.layers, swapped.layers, strict=True):
        for row, source in enumerate([1, 0, 1]):
            for head in range(2):
                pairs = zip(layer.head(source, head), chosen.head(row, head), strict=True)
                assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_static_cache_refuses_more_tokens_than_it_has_room_for():
    model = tiny()
    cache = ragged_cache(model, 1)
    with pytest.raises(InputError, match="more tokens than the static cache has room for: 4"):
        model.generate(**cache.inputs(model, questions(1, 3), static_tokens=4), max_new_tokens=8, do_sample=False)
    with pytest.raises(InputError, match="static_tokens is 0"):
        cache.inputs(model, questions(1, 3), static_tokens=0)


def test_a_static_cache_starts_anew_after_a_reset():
    model, ids = tiny(), questions(1, 5)
    past = ragged_cache(model, 1).to_transformers(model, static_tokens=6)
    mask = torch.ones(1, PREFIX + 5, dtype=torch.long)
    with torch.no_grad():
        first = model(ids, past_key_values=past, attention_mask=mask).logits
        past.reset()
        again = model(ids, past_key_values=past, attention_mask=mask).logits
    assert torch.equal(first, again)


def test_keys_that_lose_their_log_bias_on_the_way_are_noticed():
    layer = PrefixLayer(CompactLayer(*(torch.randn(1, 2, 3, 8) for _ in range(2)), torch.ones(1, 2, 3)), PREFIX)
    new = torch.randn(1, 2, 1, 8)
    layer.update(new, new)
    with pytest.raises(InputError, match="did not reach attention"):
        layer.update(new, new)


@pytest.mark.parametrize(
    ("lengths", "counts", "message"),
    [((3, 3), [[3, 0]], "a head without slots"), ((4, 4), [[1, 2]], r"heads of 3 slots in all do not fit")],
)
def test_ragged_layers_that_do_not_add_up_are_refused(lengths, counts, message):
    with pytest.raises(InputError, match=message):
        RaggedLayer(torch.zeros(lengths[0], 8), torch.zeros(lengths[1], 8), None, torch.tensor(counts))
