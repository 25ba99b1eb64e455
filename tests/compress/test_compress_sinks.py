"""What compression methods read from a model with attention sinks (gpt-oss).

The oracle is transformers: its attention weights, in which the sink has its share, and its logits.
"""

import pytest
import torch

import kvcat
from kvcat.compress.base import received_mass
from kvcat.compress.head_attention import dense_attention
from kvcat.compress.heads import Heads
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import fitted_queries
from kvcat.models import MaskedPass
from kvcat.models.exact_copy import StaysDouble
from kvcat.policies import SparsificationPolicy
from tiny import byte_tokenizer, loud_model, refusal

PREFIX, TOKENS = 24, 34
FULL = ["full_attention", "full_attention"]


def model_with_sinks(**options):
    """Two layers of full attention with loud sinks."""
    sizes = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}
    made = loud_model("gpt_oss", torch.float64, 0.2, layer_types=FULL, **{**sizes, **options})
    made.config._experts_implementation = "eager"
    for layer in made.model.layers:
        layer.self_attn.sinks.data = torch.tensor([-1.0, 0.5, 2.0, 3.0], dtype=torch.float64)
    return made


@pytest.fixture(scope="module")
def model():
    return model_with_sinks()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 67, (2, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def stock(ids):
    """Attention weights of every layer, without the sink's column, and logits."""
    model = model_with_sinks()
    model.set_attn_implementation("eager")
    with StaysDouble(), torch.no_grad():
        return model(input_ids=ids, output_attentions=True, use_cache=False)


def traced(model, ids, **options):
    with StaysDouble():
        return kvcat.trace(model, ids, **options)


def test_a_querys_error_counts_by_the_share_of_its_attention_that_goes_to_the_prefix(
    model, ids, stock
):
    trace = traced(model, ids, prefix_len=PREFIX)
    heads = Heads(Prefix.of(trace), fitted_queries(Prefix.of(trace), 0.0, by_share=True))
    for layer, weights in enumerate(stock.attentions):
        batch = heads.load([(layer, 1, head) for head in range(2)])
        attention = dense_attention(batch)
        # (query heads, suffix, prefix), then rows of a KV head by position and query head
        of_prefix = weights[1, :, PREFIX:, :PREFIX].unflatten(0, (2, 2)).transpose(1, 2)
        of_prefix = of_prefix.flatten(1, 2)
        torch.testing.assert_close(attention.weights, of_prefix.sum(-1))
        torch.testing.assert_close(attention.importance, of_prefix.square().sum(1))
        torch.testing.assert_close(attention.outputs, of_prefix @ batch.values)


def test_protected_slots_and_the_sink_are_both_outside_the_share(model, ids, stock):
    trace = kvcat.compress.protecting(traced(model, ids, prefix_len=PREFIX), [(0, 4)])
    heads = Heads(Prefix.of(trace), fitted_queries(Prefix.of(trace), 0.0, by_share=True))
    attention = dense_attention(heads.load([(1, 0, 0)]))
    of_others = stock.attentions[1][0, :2, PREFIX:, 4:PREFIX].transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(attention.weights[0], of_others.sum(-1))


def test_a_prefix_alone_counts_its_sink(ids, stock):
    learned = model_with_sinks()
    trace = traced(learned, ids[:, :PREFIX], supervision="self")
    heads = Heads(
        Prefix.of(trace), fitted_queries(Prefix.of(trace), 0.0, by_share=True)
    )  # at their own positions
    attention = dense_attention(heads.load([(0, 0, 1)]))
    shares = stock.attentions[0][0, 2:, :PREFIX, :PREFIX].sum(-1)
    torch.testing.assert_close(attention.weights[0], shares.T.flatten())


def test_eviction_scores_are_the_models_attention_weights(model, ids, stock):
    trace = traced(model, ids, prefix_len=PREFIX)
    for start in (0, PREFIX - 3):
        for mass, weights in zip(received_mass(trace, start), stock.attentions, strict=True):
            expected = weights[:, :, start:PREFIX, :PREFIX].sum(2).unflatten(1, (2, 2)).sum(2)
            torch.testing.assert_close(mass, expected)


def test_a_composed_cache_of_all_slots_has_the_keys_of_shifted_positions(model, ids):
    with StaysDouble():
        caches = [
            kvcat.trace(model, row, supervision="self").dense_cache()
            for row in (ids[:1, :10], ids[1:, :12])
        ]
        both = kvcat.compose(model, caches, seam_tokens=0)
        model.set_attn_implementation("eager")
        positions = torch.arange(10, 22)[None]
        with torch.no_grad():
            past = model(input_ids=ids[1:, :12], position_ids=positions, use_cache=True)[1]
    for layer, plain in zip(both.layers, past.layers, strict=True):
        # the second document's first token is left out
        torch.testing.assert_close(layer.keys[:, :, 10:], plain.keys[:, :, 1:], rtol=0, atol=1e-6)


def test_a_session_that_fits_its_budget_scores_as_the_model_and_a_smaller_one_compacts(model, ids):
    dense = model_with_sinks()
    dense.set_attn_implementation("eager")
    with StaysDouble(), torch.no_grad():
        expected = dense(input_ids=ids[:1], use_cache=False).logits[0, PREFIX:]
        session = kvcat.Session(model, byte_tokenizer(), budget=64, tail=8)
        session.append(ids[0, :10])
        session.append(ids[0, 10:PREFIX])
        actual = session.score(ids[0, PREFIX:])
    torch.testing.assert_close(actual.view_as(expected), expected, rtol=0, atol=1e-8)
    small = kvcat.Session(model, byte_tokenizer(), budget=14, tail=4)
    for start in range(0, PREFIX, 6):
        small.append(ids[0, start : start + 6])
    assert small.cache.num_slots <= 14
    assert small.score(ids[0, PREFIX:]).isfinite().all()


def test_what_leaves_out_sinks_is_rejected_by_name(model, ids):
    trace = traced(model, ids, prefix_len=PREFIX)
    cache = kvcat.Eviction("keynorm")(trace, num_slots=6)
    assert "GptOssForCausalLM" in refusal(kvcat.serving.plain_prefix, cache, model)

    class Blind(SparsificationPolicy):
        reads = "attention"

        def forward(self, queries, keys, *, scale, window=None, generators=None):
            return torch.ones(keys.shape[0], keys.shape[2])

    with MaskedPass(model, {0: Blind()}) as masked_pass:
        assert "Blind" in refusal(masked_pass.hidden, ids)


def test_kvpress_is_rejected(model, ids):
    pytest.importorskip("kvpress")
    method = kvcat.compress.make_compressor("kvpress:SnapKVPress")
    message = refusal(method, traced(model, ids, prefix_len=PREFIX), num_slots=6)
    assert "sinks of GptOssForCausalLM" in message
