"""Fused kernels with a bias per key, and kvcat's attention in a model whose caches need no mask."""

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch.nn.functional import pad
from transformers import DynamicCache, StaticCache

from kvcat.attention import attend_biased, attend_reference, enable, kvcat_attention
from kvcat.cache import CompactCache, CompactLayer, cache_argument, fingerprint
from kvcat.errors import InputError
from large_tensors import LargeTensors
from naive import with_gradients
from tiny import loud_model

# queries, keys, biased keys, channels of values, KV heads
SHAPES = {
    "a chunk behind a cache": (5, 12),
    "a bias of some of the queries' own keys": (5, 12, 9),
    "a bias without a cache": (6, 6, 6),
    "one query": (1, 6, 2),
    "many blocks": (130, 700, 90),
    "values narrower than keys": (5, 12, 3, 6),
    "values wider than keys": (5, 12, 3, 24),
    "a head for each": (5, 12, 3, 8, 4),
}


def example(queries, keys, biased=None, value_dim=8, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, queries, 8), (kv_heads, keys, 8), (kv_heads, keys, value_dim)]
    shapes += [(kv_heads, biased)] if biased else []
    return [torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def naive(q, k, v, log_bias=None):
    bias = None if log_bias is None else pad(log_bias, (0, k.shape[2] - log_bias.shape[-1]))
    return attend_reference(q, k, v, log_bias=bias, scale=0.3)


@pytest.mark.parametrize(
    ("name", "arguments", "results"),
    [
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "query key value dropout_p is_causal attn_mask scale",
            "output logsumexp",
        ),
        (
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
            "grad_query grad_key grad_value",
        ),
    ],
)
def test_this_torch_has_the_private_operator_with_the_arguments_that_are_used(
    name, arguments, results
):
    operator = getattr(torch.ops.aten, name, None)
    assert operator is not None, (
        f"torch {torch.__version__} has no aten::{name}, which _CpuKernel calls"
    )
    schema = operator.default._schema
    assert [argument.name for argument in schema.arguments] == arguments.split()
    assert [result.name for result in schema.returns] == results.split()


@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_all_gradients_equal_the_naive_twin(shape):
    tensors = example(*SHAPES[shape])
    expected = with_gradients(lambda *x: naive(*x), tensors)
    for cpu_kernel in (True, False):  # devices without the kernel use extra channels and a mask
        attend = partial(attend_biased, scale=0.3, cpu_kernel=cpu_kernel)
        actual = with_gradients(attend, tensors)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-11)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_as_near_as_its_inputs_are(autocast):
    tensors = example(queries=40, keys=90, biased=30)
    expected = with_gradients(naive, tensors)
    halves = [x.float() if autocast else x.bfloat16() for x in tensors]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual = with_gradients(lambda *x: attend_biased(*x, scale=0.3), halves)
    assert actual[0].dtype == torch.bfloat16
    for one, other in zip(actual, expected, strict=True):
        assert (one.double() - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("biased", [None, 500])
def test_no_tensor_of_queries_times_keys_is_made(biased):
    tensors = example(queries=400, keys=1500, biased=biased)
    with LargeTensors() as mode:
        with_gradients(lambda *x: attend_biased(*x, scale=0.3), tensors)
    assert mode.largest <= 2 * 4 * 1500 * (8 + 8) < 400 * 1500


@pytest.fixture(scope="module")
def model():
    made = loud_model(dtype=torch.float64)
    enable(made)
    return made


@pytest.fixture
def masks(model):
    """The masks that attention got, one per layer and forward."""
    seen = []

    def note(_module, _args, kwargs):
        seen.append(kwargs["attention_mask"])

    with ExitStack() as handles:
        for layer in model.model.layers:
            handles.enter_context(layer.self_attn.register_forward_pre_hook(note, with_kwargs=True))
        yield seen


IDS = torch.randint(0, 67, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_tokens_in_parts_get_the_logits_of_one_forward_whatever_the_cache(model, masks):
    expected = model(IDS).logits
    for past in (DynamicCache(), StaticCache(config=model.config, max_cache_len=40)):
        masks.clear()
        for start, stop in ((0, 9), (9, 10), (10, 24)):
            logits = model(IDS[:, start:stop], **cache_argument(past)).logits
            assert torch.allclose(logits, expected[:, start:stop], atol=1e-5)
        assert all(mask is None for mask in masks) == isinstance(past, DynamicCache)


@torch.no_grad()
def test_tokens_behind_slots_need_a_mask_only_where_there_is_padding(model, masks):
    draw = torch.Generator().manual_seed(3)
    shapes = ((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6))
    layers = [
        CompactLayer(*(torch.randn(s, generator=draw).double() for s in shapes)) for _ in range(2)
    ]
    cache = CompactCache(layers, 40, fingerprint(model))
    model(**cache.inputs(model, IDS))
    assert all(mask is None for mask in masks)
    model(**cache.inputs(model, IDS, torch.ones_like(IDS).index_fill(1, torch.arange(3), 0)))
    assert sum(mask is not None for mask in masks) == 2
    numbers = cache.inputs(model, IDS) | {"attention_mask": torch.zeros(2, 1, 24, 30).double()}
    with pytest.raises(InputError, match=r"a boolean attention mask, not torch\.float64"):
        model(**numbers)


def test_attention_that_the_fused_kernels_do_not_know_is_rejected(model):
    q, k, v = example(queries=5, keys=12)
    for option in ({"position_bias": torch.zeros(1, 4, 5, 12)}, {"dropout": 0.1}):
        with pytest.raises(
            InputError,
            match=f"LlamaAttention is not supported: its attention uses {next(iter(option))}",
        ):
            kvcat_attention(model.model.layers[0].self_attn, q, k, v, None, **option)
