"""Models in which only some layers see the whole text: the others keep their state whole.

The oracle is transformers' forward of the whole text, in which the queries of the suffix do not see
the slots that were evicted, in the layers of full attention alone.
"""

import pytest
import torch

import kvcat
from kvcat.cache import CompactCache
from kvcat.compress import Eviction, make_compressor, slots_and_bits, smallest_cache
from kvcat.evals.answers import greedy_answers
from kvcat.models import self_test
from kvcat.models.exact_copy import StaysDouble
from kvcat.models.rotation import KeyRotation
from states_oracle import stock_logits, visible
from tiny import TRANSFORMERS, loud_model, refusal

PREFIX, TOKENS, WINDOW = 30, 44, 8
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
GEMMA3 = {
    "num_hidden_layers": 3,
    "layer_types": SLIDING,
    "sliding_window": WINDOW,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
}
FAMILIES = {
    "gemma3_text": GEMMA3,
    "gemma4_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 67,
        "num_kv_shared_layers": 0,
    },
    "qwen2": {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "cohere2": {"num_hidden_layers": 4, "sliding_window": WINDOW},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": WINDOW},
    "exaone4": {"num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": 4},
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_next": {"num_hidden_layers": 4, "head_dim": 8, **LINEAR, **EXPERTS},
    "qwen3_5_text": {"num_hidden_layers": 4, "head_dim": 16, **LINEAR},
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
        **MAMBA,
    },
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], **MAMBA},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "pad_token_id": 0,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "pad_token_id": 0,
    },
    "granite_swa": {"num_hidden_layers": 4, "sliding_window": WINDOW},
}
RECURRENT = ("lfm2", "qwen3_next", "qwen3_5_text", "granitemoehybrid", "bamba", "jamba")
FEW = ("gemma3_text", "lfm2", "qwen3_next")
FEW_FIRST = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES
]
NEW_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "jamba", "bamba")]
ALL = [
    pytest.param(name, marks=pytest.mark.slow) if name == "granite_swa" else name
    for name in FAMILIES
]


def tokens(rows=2, length=TOKENS):
    return torch.randint(3, 67, (rows, length), generator=torch.Generator().manual_seed(0))


def small_model(name, dtype=torch.float64):
    if name not in ("gemma3_text", "qwen2", "cohere2") and TRANSFORMERS < (5, 23):
        pytest.skip("this transformers has other caches for such layers")
    model = loud_model(name, dtype, 0.2, **FAMILIES[name])
    model.config._experts_implementation = "eager"  # others have no float64
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.copy_(2 * torch.randn(len(parameter), generator=generator))
    return model


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", ALL)
def test_an_evicted_cache_answers_as_transformers_with_a_mask_in_the_layers_of_full_attention(
    name,
):
    model = small_model(name)
    ids = tokens()
    with StaysDouble():
        self_test(model)
        trace = kvcat.trace(model, ids, PREFIX)
        cache = Eviction("keynorm")(trace, num_slots=6)
        actual = kvcat.replay(model, cache, ids[:, PREFIX:])
        whole = kvcat.replay(model, trace.dense_cache(), ids[:, PREFIX:])
        expected = stock_logits(model, ids, PREFIX, visible(cache, TOKENS))
        dense = stock_logits(model, ids, PREFIX)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(whole, dense, rtol=0, atol=1e-8)
    torch.testing.assert_close(trace.logits, dense, rtol=0, atol=1e-8)
    assert (expected - dense).abs().max() > 1e-4
    assert cache.num_slots == 6


@pytest.mark.parametrize("name", FEW_FIRST)
def test_generation_continues_as_transformers_with_that_mask_and_serves_several_rows(name):
    model = small_model(name, torch.float32)
    ids = tokens(rows=1)
    cache = Eviction("keynorm")(kvcat.trace(model, ids, PREFIX), num_slots=6)
    questions = torch.cat([ids[:, PREFIX:], ids[:, PREFIX:].flip(1)])
    made = model.generate(
        **cache.inputs(model, questions), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    for question, row in zip(questions, made, strict=True):
        text = torch.cat([ids[0, :PREFIX], question])[None]
        for _ in range(4):
            logits = stock_logits(model, text, PREFIX, visible(cache, text.shape[1]))
            text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
        assert row.tolist() == text[0, PREFIX:].tolist()
    again = model.generate(
        **cache.inputs(model, questions), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert torch.equal(made, again)
    beams = cache.inputs(model, questions[:1])
    model.generate(**beams, max_new_tokens=3, num_beams=2, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("name", FEW_FIRST)
def test_a_file_and_the_counted_bytes_hold_the_slots_and_the_states(name, tmp_path):
    model = small_model(name, torch.float32)
    ids = tokens()
    cache = Eviction("keynorm")(kvcat.trace(model, ids, PREFIX), num_slots=6)
    cache.save(tmp_path / "cache")
    loaded = CompactCache.load(tmp_path / "cache", model)
    assert sorted(loaded.states) == sorted(cache.states)
    assert loaded.states
    logits = [kvcat.replay(model, each, ids[:, PREFIX:]) for each in (cache, loaded)]
    assert torch.equal(*logits)
    slots = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    states = sum(t.nbytes for state in cache.states.values() for t in state.tensors.values())
    assert cache.nbytes == slots + states
    for number, state in cache.states.items():
        if name not in RECURRENT:
            assert state.tensors["keys"].shape[2] == WINDOW - 1, number
    row = loaded.select([1])
    alone = kvcat.replay(model, row, ids[1:, PREFIX:])
    torch.testing.assert_close(alone, logits[0][1:], rtol=0, atol=1e-4)
    assert row.nbytes * 2 == cache.nbytes


METHODS = {
    "attention-matching": {},
    "refined": {"num_steps": 2},
    "gradient": {"num_steps": 3},
    "snapkv": {"window": 4},
    "h2o": {},
    "tova": {},
    "streaming": {},
    "random": {},
    "first": {},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", ["gemma3_text", pytest.param("lfm2", marks=pytest.mark.slow), *NEW_SLOW]
)
def test_every_method_compresses_the_layers_of_full_attention_alone(name, method):
    model = small_model(name, torch.float32)
    trace = kvcat.trace(model, tokens(), PREFIX)
    cache = make_compressor(method, **METHODS[method])(trace, num_slots=6)
    assert cache.states is trace.states
    assert cache.num_slots == 6
    assert kvcat.compare(trace, cache).kl.isfinite().all()
    whole = make_compressor(method, **METHODS[method])(trace, keep_ratio=1)
    assert kvcat.compare(trace, whole).kl.max() < 1e-5


@pytest.mark.parametrize("name", [*FEW, *NEW_SLOW])
def test_a_trace_of_the_document_alone_in_chunks_and_in_few_bits_works(name):
    model = small_model(name, torch.float32)
    ids = tokens()
    alone = kvcat.trace(model, ids[:, :PREFIX], supervision="self", room=TOKENS - PREFIX)
    in_chunks = kvcat.trace(
        model, ids[:, :PREFIX], supervision="self", room=TOKENS - PREFIX, chunk_tokens=11
    )
    method = kvcat.AttentionMatching()
    for trace in (alone, in_chunks):
        logits = kvcat.replay(model, method(trace, keep_ratio=1), ids[:, PREFIX:])
        torch.testing.assert_close(logits, stock_logits(model, ids, PREFIX), rtol=0, atol=1e-3)
    packed = make_compressor("attention-matching", bits=8)(alone, num_slots=10)
    assert packed.nbytes < method(alone, num_slots=10).nbytes
    assert kvcat.replay(model, packed, ids[:, PREFIX:]).isfinite().all()
    judged = kvcat.trace(model, ids, PREFIX)
    smallest = smallest_cache(judged, kvcat.AttentionMatching("known"), max_kl=1.0)
    assert smallest.kl <= 1.0


@pytest.mark.parametrize("name", [*FEW, *NEW_SLOW])
def test_a_conversation_grows_by_append_and_by_a_trace_with_a_past(name):
    model = small_model(name)
    ids = tokens(length=TOKENS + 6)
    with StaysDouble():
        first = kvcat.trace(model, ids, PREFIX).dense_cache()
        longer = kvcat.append(model, first, ids[:, PREFIX:TOKENS])
        actual = kvcat.replay(model, longer, ids[:, TOKENS:])
        expected = stock_logits(model, ids, PREFIX)[:, TOKENS - PREFIX :]
        grown = kvcat.trace(model, ids, TOKENS, past=first)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(grown.logits, expected, rtol=0, atol=1e-8)
    again = kvcat.replay(model, grown.dense_cache(), ids[:, TOKENS:])
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-4)


def test_gradient_rejects_one_token_after_a_recurrent_state():
    trace = kvcat.trace(small_model("lfm2", torch.float32), tokens()[:, : PREFIX + 1], PREFIX)
    assert "at least two tokens" in refusal(make_compressor("gradient"), trace, num_slots=6)


def test_a_number_of_bytes_holds_the_states_as_well():
    model = small_model("gemma3_text", torch.float32)
    traced = kvcat.trace(model, tokens(), PREFIX)
    state_bytes = sum(state.nbytes for state in traced.states.values())
    for bits in (None, 8):
        num_bytes = state_bytes + 2000
        num_slots, _ = slots_and_bits(traced, num_bytes, [bits])
        cache = Eviction("snapkv")(traced, num_slots=num_slots)
        nbytes = cache.nbytes if bits is None else cache.quantize(bits).nbytes
        assert num_bytes - 1000 < nbytes <= num_bytes
    message = refusal(slots_and_bits, traced, state_bytes)
    assert f"one slot in every head and {state_bytes} of states" in message


@pytest.mark.parametrize("name", ["gemma3_text", "lfm2"])
def test_padding_is_rejected_and_questions_of_unequal_length_are_answered_in_batches_of_equal_ones(
    name,
):
    model = small_model(name, torch.float32)
    ids = tokens()
    cache = Eviction("keynorm")(kvcat.trace(model, ids, PREFIX), num_slots=6)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    new = ids[:, PREFIX : PREFIX + 5]
    assert "rows of equal length" in refusal(cache.inputs, model, new, mask)
    inputs = cache.inputs(model, new)
    inputs["attention_mask"][0, -5:-3] = 0
    assert "rows of equal length" in refusal(model, **inputs)
    questions = [ids[0, PREFIX : PREFIX + 3].tolist(), ids[1, PREFIX : PREFIX + 5].tolist()]
    answers = greedy_answers(model, cache, questions, 3)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        text = torch.cat([ids[row, :PREFIX], torch.tensor(question)])[None]
        for _ in range(3):
            seen = visible(cache.select([row]), text.shape[1])
            text = torch.cat(
                [text, stock_logits(model, text, PREFIX, seen)[:, -1:].argmax(-1)], dim=1
            )
        assert answer == text[0, -3:].tolist()


def test_queries_of_jamba_stay_the_same_at_other_positions_and_learned_positions_are_rejected():
    queries = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(KeyRotation(small_model("jamba"), 5)(queries, 1, 3), queries)
    learned = loud_model("gpt2", n_embd=32, n_head=4, n_layer=2, n_positions=64)
    assert "no rotary position embedding" in refusal(KeyRotation, learned, 5)
