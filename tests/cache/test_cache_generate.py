"""A compact cache in transformers' generate, against a naive forward of the stock model."""

import pytest
import torch
from transformers import DynamicCache

from kvcat.cache import CompactCache, CompactLayer, fingerprint
from kvcat.errors import InputError
from tiny import stock_model

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "qwen2": {}, "llama": {}, "gemma": {}, "qwen3": {}, "gpt_neox": {}, "granite": {"attention_multiplier": 0.6},
    "mistral": {"sliding_window": 24},
}  # fmt: skip
PREFIX, SLOTS = 20, 5


def tiny(name="llama"):
    """A model whose weights are the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = stock_model(name, **SIZES, **MODELS[name])
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
    return model.double().eval()


def random_cache(model, batch=1, log_bias=True, seed=0):
    draw = torch.Generator().manual_seed(seed)
    heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    heads = 4 if model.config.model_type == "gpt_neox" else heads
    shape = (batch, heads, SLOTS, 8)
    bias = torch.randn(shape[:3], generator=draw) if log_bias else None
    layers = [
        CompactLayer(torch.randn(shape, generator=draw).double(), torch.randn(shape, generator=draw).double(), bias)
        for _ in range(model.config.num_hidden_layers)
    ]
    return CompactCache(layers, PREFIX, fingerprint(model))


def naive_logits(name, cache, ids, mask=None):
    """Stock attention on the slots and all new tokens, the log-bias as a 4-D additive mask."""
    stock = tiny(name)
    batch, new = ids.shape
    mask = torch.ones_like(ids) if mask is None else mask
    past = DynamicCache()
    for index, layer in enumerate(cache.layers):
        past.update(layer.keys.expand(batch, -1, -1, -1), layer.values.expand(batch, -1, -1, -1), index)
    heads, kv_heads = stock.config.num_attention_heads, cache.layers[0].keys.shape[1]
    bias = torch.zeros(batch, heads, new, SLOTS + new, dtype=torch.float64)
    if cache.has_log_bias:
        per_head = cache.layers[0].log_bias.repeat_interleave(heads // kv_heads, dim=1)
        bias[..., :SLOTS] += per_head.unsqueeze(2)
    causal = torch.ones(new, new).tril().bool() & mask.bool()[:, None, None, :]
    bias[..., SLOTS:].masked_fill_(~causal, -1e30)
    positions = PREFIX + (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return stock(ids, past_key_values=past, attention_mask=bias, position_ids=positions).logits


@pytest.mark.parametrize(
    ("name", "log_bias"), [("qwen2", True), ("llama", False), ("gemma", True), ("qwen3", True), ("gpt_neox", True)]
)
def test_a_forward_on_the_cache_equals_the_stock_model_with_the_bias_as_a_mask(name, log_bias):
    model = tiny(name)
    cache, ids = (
        random_cache(model, 2, log_bias),
        torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(3)),
    )
    with torch.no_grad():
        logits = model(**cache.inputs(model, ids)).logits
    assert torch.allclose(logits, naive_logits(name, cache, ids), atol=1e-12)


def test_the_scale_of_a_model_that_states_its_own_reaches_the_log_bias():
    model = tiny("granite")
    cache, ids = random_cache(model), torch.tensor([[5, 9, 2]])
    with torch.no_grad():
        logits = model(**cache.inputs(model, ids)).logits
    assert model.model.layers[0].self_attn.scaling == 0.6
    assert torch.allclose(logits, naive_logits("granite", cache, ids), atol=1e-12)


@pytest.mark.parametrize("log_bias", [False, True])
def test_greedy_generation_takes_the_naive_argmax_at_every_step(log_bias):
    model, ids = tiny(), torch.tensor([[4, 8, 15, 16]])
    cache = random_cache(model, log_bias=log_bias)
    out = model.generate(**cache.inputs(model, ids), max_new_tokens=8, do_sample=False)
    for _ in range(8):
        ids = torch.cat([ids, naive_logits("llama", cache, ids)[:, -1:].argmax(-1)], dim=1)
    assert out.tolist() == ids.tolist()


def test_sampled_generation_draws_from_the_naive_distribution():
    model, ids = tiny(), torch.tensor([[4, 8, 15]])
    cache = random_cache(model)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        out = model.generate(**cache.inputs(model, ids), max_new_tokens=6, do_sample=True, top_k=0)
        torch.manual_seed(7)
        for _ in range(6):
            drawn = torch.multinomial(naive_logits("llama", cache, ids)[:, -1].softmax(-1), 1)
            ids = torch.cat([ids, drawn], dim=1)
    assert out.tolist() == ids.tolist()


def test_left_padded_questions_on_one_cache_are_answered_as_each_would_be_alone():
    model = tiny()
    cache = random_cache(model)
    questions = [[7, 3], [11, 12, 13, 14], [9, 2, 5]]
    width = max(map(len, questions))
    ids = torch.tensor([[0] * (width - len(q)) + q for q in questions])
    mask = torch.tensor([[0] * (width - len(q)) + [1] * len(q) for q in questions])
    out = model.generate(**cache.inputs(model, ids, mask), max_new_tokens=6, do_sample=False)
    for row, question in zip(out, questions, strict=True):
        alone = torch.tensor([question])
        for _ in range(6):
            alone = torch.cat([alone, naive_logits("llama", cache, alone)[:, -1:].argmax(-1)], dim=1)
        assert row[width:].tolist() == alone[0, len(question) :].tolist()


def naive_beams(cache, ids, num_beams, steps):
    beams = [(0.0, ids)]
    for _ in range(steps):
        grown = []
        for total, sequence in beams:
            log_probs = naive_logits("llama", cache, sequence)[0, -1].log_softmax(-1)
            grown += [
                (total + p, torch.cat([sequence, torch.tensor([[t]])], 1)) for t, p in enumerate(log_probs.tolist())
            ]
        beams = sorted(grown, key=lambda beam: -beam[0])[:num_beams]
    return beams[0]


@pytest.mark.parametrize("cached", [1, 2])
def test_three_beams_find_what_a_naive_beam_search_finds(cached):
    model, ids = tiny(), torch.tensor([[4, 8, 15], [16, 23, 42]])
    cache = random_cache(model, cached)
    out = model.generate(
        **cache.inputs(model, ids), max_new_tokens=3, num_beams=3, do_sample=False,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    for row in range(2):
        total, best = naive_beams(cache.select([min(row, cached - 1)]), ids[row : row + 1], 3, 3)
        assert out.sequences[row].tolist() == best[0].tolist()
        assert out.sequences_scores[row].item() == pytest.approx(total / 3, abs=1e-6)


def test_decoding_leaves_the_compact_cache_as_it_was():
    model = tiny()
    cache = random_cache(model)
    before = [{name: tensor.clone() for name, tensor in layer.tensors().items()} for layer in cache.layers]
    ids = torch.tensor([[3, 1, 4]])
    first = model.generate(**cache.inputs(model, ids), max_new_tokens=5, do_sample=False)
    second = model.generate(**cache.inputs(model, ids), max_new_tokens=5, do_sample=False)
    assert torch.equal(first, second)
    for layer, tensors in zip(cache.layers, before, strict=True):
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in layer.tensors().items())


def test_a_full_cache_decodes_like_the_dense_model():
    model, ids = tiny(), torch.randint(1, 61, (1, PREFIX + 6), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        past = model(ids[:, :PREFIX], use_cache=True).past_key_values
        dense = model(ids).logits[:, PREFIX:]
    cache = CompactCache([CompactLayer(x.keys, x.values) for x in past.layers], PREFIX, fingerprint(model))
    with torch.no_grad():
        assert torch.allclose(model(**cache.inputs(model, ids[:, PREFIX:])).logits, dense, atol=1e-12)
    out = model.generate(**cache.inputs(model, ids[:, PREFIX:]), max_new_tokens=8, do_sample=False)
    assert out[0, 6:].tolist() == model.generate(ids, max_new_tokens=8, do_sample=False)[0, PREFIX + 6 :].tolist()


def test_a_cropped_layer_forgets_new_tokens_but_never_the_prefix():
    model = tiny()
    past = random_cache(model).to_transformers(model)
    with torch.no_grad():
        expected = model(torch.tensor([[3, 4]]), past_key_values=random_cache(model).to_transformers(model)).logits
        model(torch.tensor([[9, 9, 9]]), past_key_values=past)
        past.crop(-3)
        assert torch.equal(model(torch.tensor([[3, 4]]), past_key_values=past).logits, expected)
    with pytest.raises(InputError, match="cannot crop 3 tokens: 2 follow"):
        past.crop(-3)


def test_a_read_only_conversion_stores_nothing():
    model = tiny()
    past = random_cache(model).to_transformers(model, read_only=True)
    with torch.no_grad():
        first = model(torch.tensor([[3, 4]]), past_key_values=past).logits
        assert torch.equal(model(torch.tensor([[3, 4]]), past_key_values=past).logits, first)
    assert past.get_seq_length() == PREFIX


def test_a_sliding_window_that_no_longer_covers_everything_is_refused():
    model = tiny("mistral")
    cache = random_cache(model)
    model.generate(**cache.inputs(model, torch.tensor([[1, 2]])), max_new_tokens=2, do_sample=False)
    with pytest.raises(InputError, match="25 tokens exceed the sliding window of 24"):
        model.generate(**cache.inputs(model, torch.tensor([[1, 2]])), max_new_tokens=9, do_sample=False)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), "hold no token"),
        (torch.ones(3, 2, dtype=torch.long), "cache of 2 examples cannot serve 3 rows"),
    ],
)
def test_inputs_that_do_not_fit_the_cache_are_refused(ids, message):
    model = tiny()
    with pytest.raises(InputError, match=message):
        random_cache(model, 2).inputs(model, ids)


def test_another_model_is_refused():
    model = tiny()
    cache = random_cache(model)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(InputError, match="belongs to another model"):
        cache.inputs(model, torch.tensor([[1]]))
