"""Attention without a mask: behind a cache, with a bias per key, and inside transformers models."""

import pytest
import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from kvcat.attention import attend_biased, attend_reference, enable, kvcat_attention, reachable
from kvcat.attention.compact import attend_compact, attend_ragged
from kvcat.cache import CompactCache, CompactLayer, fingerprint

SHAPES = {
    "a chunk behind a cache": {"queries": 5, "keys": 12},
    "slots of a bias before tokens without": {"queries": 5, "keys": 12, "biased": 3},
    "a bias up to the queries": {"queries": 5, "keys": 12, "biased": 7},
    "a bias of some of the queries' own keys": {"queries": 5, "keys": 12, "biased": 9},
    "a bias of every key": {"queries": 5, "keys": 12, "biased": 12},
    "a bias without a cache": {"queries": 6, "keys": 6, "biased": 6},
    "one query": {"queries": 1, "keys": 6, "biased": 2},
    "many blocks": {"queries": 130, "keys": 700, "biased": 90},
    "values narrower than keys": {"queries": 5, "keys": 12, "biased": 3, "value_dim": 6},
    "values wider than keys": {"queries": 5, "keys": 12, "biased": 3, "value_dim": 24},
    "a head for each": {"queries": 5, "keys": 12, "biased": 3, "kv_heads": 4},
}


def example(*, queries, keys, biased=None, value_dim=8, kv_heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = [normal(2, 4, queries, 8), normal(2, kv_heads, keys, 8), normal(2, kv_heads, keys, value_dim)]
    return tensors if biased is None else [*tensors, 2 * normal(2, kv_heads, biased)]


def naive(q, k, v, log_bias=None, *, causal=True):
    bias = None if log_bias is None else pad(log_bias, (0, k.shape[2] - log_bias.shape[-1]))
    return attend_reference(q, k, v, log_bias=bias, causal=causal, scale=0.3)


def with_gradients(function, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_all_gradients_equal_the_naive_twin(shape, causal):
    tensors = example(**SHAPES[shape])
    expected = with_gradients(lambda *x: naive(*x, causal=causal), tensors)
    # a dropout that drops nothing takes the way of devices without the kernel: extra channels and a lower-right mask
    for dropout in (0.0, 1e-14):
        found = with_gradients(lambda *x, p=dropout: attend_biased(*x, causal=causal, scale=0.3, dropout=p), tensors)
        for name, one, other in zip(["out", "q", "k", "v", "bias"][: len(found)], found, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-11), (name, dropout)


def test_a_bias_without_gradient_gives_the_others_theirs():
    *tensors, bias = example(queries=5, keys=12, biased=9)
    expected = with_gradients(lambda *x: naive(*x, bias), tensors)
    found = with_gradients(lambda *x: attend_biased(*x, bias, scale=0.3), tensors)
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_as_near_as_its_inputs_are(autocast):
    tensors = example(queries=40, keys=90, biased=30)
    expected = with_gradients(naive, tensors)
    halves = [x.float() if autocast else x.bfloat16() for x in tensors]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = with_gradients(lambda *x: attend_biased(*x, scale=0.3), halves)
    assert found[0].dtype == torch.bfloat16
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() < 0.02 * other.norm()


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        found = [x.numel() for x in (result if isinstance(result, tuple | list) else [result]) if hasattr(x, "numel")]
        self.elements = max(self.elements, *found, 0)
        return result


@pytest.mark.parametrize("biased", [None, 500])
def test_no_tensor_of_queries_times_keys_is_made(biased):
    tensors = example(queries=400, keys=1500, biased=biased)
    with Largest() as mode:
        with_gradients(lambda *x: attend_biased(*x, scale=0.3), tensors)
    assert mode.elements <= 2 * 4 * 1500 * (8 + 8) < 400 * 1500
    with Largest() as mode:
        naive(*tensors)
    assert mode.elements >= 400 * 1500


@pytest.mark.parametrize("queries", [1, 7, 70])
def test_slots_without_a_mask_are_what_they_are_with_a_causal_one(queries):
    q, k, v, bias = example(queries=queries, keys=80 + queries, biased=60)
    bias[:, :, 5] = -torch.inf
    mask = reachable(queries, 20 + queries)[None, None]
    expected = attend_compact(q, k, v, bias, mask, scale=0.3)
    assert torch.allclose(attend_compact(q, k, v, bias, None, scale=0.3), expected, atol=1e-10)
    k[:, :, 5] += 7
    assert torch.allclose(attend_compact(q, k, v, bias, None, scale=0.3), expected, atol=1e-10)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [1, 7, 70])
def test_heads_of_unequal_slots_attend_as_each_by_itself(queries, masked):
    q, k, v = example(queries=queries, keys=queries + 4)
    counts, generator = [(3, 60), (12, 1)], torch.Generator().manual_seed(2)
    kinds = [
        [[torch.randn(n, *more, generator=generator, dtype=torch.float64) for n in row] for row in counts]
        for more in ((8,), (8,), ())
    ]
    slots, rows = CompactLayer.ragged(*kinds), torch.tensor([1, 0])
    seen = reachable(queries, queries + 4).repeat(2, 1, 1, 1)
    seen[1, :, :, : 2 * masked] = False  # padding of one row
    mask = seen if masked or queries == 1 else None
    out = attend_ragged(q, k, v, slots, rows, mask, scale=0.3)
    for row, example_of in enumerate(rows.tolist()):
        for head in range(2):
            keys, values, bias = (kind[example_of][head] for kind in kinds)
            behind = 2 * row if masked else 0
            whole = [torch.cat([a, b[row, head, behind:]])[None, None] for a, b in ((keys, k), (values, v))]
            own = slice(2 * head, 2 * head + 2)
            alone = naive(q[row : row + 1, own], *whole, bias.expand(1, 1, -1))
            assert torch.allclose(out[row, own], alone[0], atol=1e-10)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    made = LlamaForCausalLM(config).double().eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    enable(made)
    return made


@pytest.fixture
def masks(model):
    """The masks that attention got, one per layer and forward."""
    seen = []
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda _module, _args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    yield seen
    for handle in handles:
        handle.remove()


IDS = torch.randint(0, 67, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_tokens_in_parts_get_the_logits_of_one_forward_whatever_the_cache(model, masks, kind):
    expected = model(IDS).logits
    past = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=40)
    masks.clear()
    for start, stop in ((0, 9), (9, 10), (10, 24)):
        logits = model(IDS[:, start:stop], past_key_values=past).logits
        assert torch.allclose(logits, expected[:, start:stop], atol=1e-5)
    assert all(mask is None for mask in masks) == (kind == "dynamic")


@torch.no_grad()
def test_tokens_behind_slots_need_a_mask_only_where_there_is_padding(model, masks):
    generator = torch.Generator().manual_seed(3)
    layers = [
        CompactLayer(*(torch.randn(1, 2, 6, 8, generator=generator, dtype=torch.float64) for _ in range(2)),
                     torch.randn(1, 2, 6, generator=generator))
        for _ in range(2)
    ]  # fmt: skip
    cache = CompactCache(layers, 40, fingerprint(model))
    whole = model(**cache.inputs(model, IDS)).logits
    assert all(mask is None for mask in masks)
    padding = torch.ones_like(IDS)
    padding[1, :5] = 0
    masks.clear()
    padded = model(**cache.inputs(model, IDS, padding)).logits
    assert all(mask is not None for mask in masks)
    assert torch.allclose(padded[0], whole[0], atol=1e-5)
    positions = {"position_ids": torch.arange(40, 40 + 24)[None]}
    without = model(**cache.inputs(model, IDS[1:, 5:]), position_ids=positions["position_ids"][:, 5:]).logits
    assert torch.allclose(padded[1, 5:], without[0], atol=1e-5)


def test_a_bias_of_the_model_s_own_comes_on_top_of_causality(model):
    q, k, v = example(queries=5, keys=12)
    bias = torch.randn(1, 4, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    mask = reachable(5, 12)[None, None]
    attention = model.model.layers[0].self_attn
    found, expected = (kvcat_attention(attention, q, k, v, m, position_bias=bias)[0] for m in (None, mask))
    assert torch.equal(found, expected)
    assert not torch.allclose(found, kvcat_attention(attention, q, k, v, mask)[0], atol=1e-3)
