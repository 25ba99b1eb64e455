"""Rotary factors that depend on the length (LongRoPE, dynamic NTK): a cache has one set for its
whole life."""

import copy
import gc

import pytest
import torch

import kvcat
from kvcat.cache import CACHE_NAME, CompactCache, fingerprint, held_factors, rope_factors
from kvcat.compress.trace import Reconstruction
from kvcat.evals.answers import greedy_answers, token_nll
from kvcat.models import self_test
from tiny import TRANSFORMERS, loud_model, refusal

BORDER = 64
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 5.0, 8.0, 11.0],
    "original_max_position_embeddings": BORDER,
}
KINDS = {
    "phi3": {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": BORDER,
        "pad_token_id": 0,
    },
    "llama": {"rope_parameters": LONGROPE},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 512,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": LONGROPE,
        },
    },
}


def pair(kind="phi3", **options):
    """The same model twice: as kvcat runs it, and stock with eager attention."""
    if kind == "gemma3_text" and TRANSFORMERS < (5, 21):
        pytest.skip("transformers itself cannot run LongRoPE for one type of layers")
    settings = {"max_position_embeddings": 256, **KINDS.get(kind, {}), **options}
    model, stock = (loud_model(kind, torch.float64, std=0.2, **settings) for _ in range(2))
    self_test(model)
    stock.set_attn_implementation("eager")
    return model, stock


def tokens(count, seed=0):
    return torch.randint(3, 67, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def stock_logits(stock, *pieces):
    return stock(torch.cat(pieces, 1), use_cache=False).logits


def error(logits, expected):
    return float((logits - expected).norm() / expected.norm())


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("kind", "length", "question"),
    [
        ("phi3", 30, 5),
        ("phi3", 50, 14),
        ("phi3", 50, 40),
        ("phi3", 64, 3),
        ("phi3", 100, 6),
        ("llama", 63, 2),
        ("llama", 50, 14),
        ("gemma3_text", 50, 10),
        ("gemma3_text", 60, 10),
    ],
)
def test_a_dense_cache_answers_as_the_stock_model_or_says_that_it_cannot(kind, length, question):
    model, stock = pair(kind)
    document = tokens(length)
    asked = tokens(question, 1)
    instruction = tokens(5, 2)
    sequence = Reconstruction(torch.cat([document, instruction, document], 1), length, length + 5)
    expected = stock_logits(stock, document, asked)[:, length:]
    crosses = length <= BORDER < length + question
    for chunk in (4096, 16):
        for whole in (sequence, document):
            options = {
                "chunk_tokens": chunk,
                **({"supervision": "self"} if whole is document else {}),
            }
            cache = kvcat.trace(model, whole, **options).dense_cache()
            if crosses:
                assert "room for the text that follows" in refusal(cache.inputs, model, asked)
                cache = kvcat.trace(model, whole, room=question, **options).dense_cache()
            with torch.no_grad():
                assert error(model(**cache.inputs(model, asked)).logits, expected) < 1e-5
            assert error(kvcat.replay(model, cache, asked), expected) < 1e-5


@pytest.mark.parametrize("prefix", [40, 70])
def test_dense_logits_of_a_trace_are_those_of_the_stock_model_whatever_the_chunks(prefix):
    model, stock = pair()
    text = tokens(90)
    expected = stock_logits(stock, text)[:, prefix:]
    for chunk in (4096, 32):
        made = kvcat.trace(model, text, prefix, chunk_tokens=chunk)
        assert made.text.rope == "long"
        assert error(made.logits, expected) < 1e-5
        assert float(kvcat.compare(made, made.dense_cache()).kl) < 1e-9


@pytest.mark.parametrize(("length", "room"), [(40, 20), (60, 30), (40, 60)])
def test_greedy_answers_are_the_stock_models_even_where_its_own_rule_would_drop_the_cache(
    length, room
):
    model, stock = pair()
    document = tokens(length)
    asked = tokens(room - 5, 1)  # the last one is longer than the border by itself when room is
    if room == 60:
        asked = tokens(70, 1)
        room = 80
    cache = kvcat.trace(model, document, supervision="self", room=room).dense_cache()
    text = torch.cat([document, asked], 1)
    for _ in range(5):
        text = torch.cat([text, stock_logits(stock, text)[:, -1:].argmax(-1)], 1)
    made = model.generate(**cache.inputs(model, asked), max_new_tokens=5, do_sample=False)
    assert made.tolist() == text[:, length:].tolist()
    answer = text[0, length + asked.shape[1] :].tolist()
    assert greedy_answers(model, cache, [asked[0].tolist()], 5) == [answer]
    nll = token_nll(model, cache, [asked[0].tolist()], [answer])[0]
    log_probs = stock_logits(stock, text)[0, -6:-1].log_softmax(-1)
    assert torch.allclose(nll, -log_probs[torch.arange(5), answer], atol=1e-4)


def test_a_short_text_gets_long_factors_only_where_room_was_requested():
    model, stock = pair()
    document = tokens(40)
    asked = tokens(6, 1)
    implied = kvcat.trace(model, torch.cat([document, tokens(50, 2)], 1), 40).dense_cache()
    assert "for more than 64 tokens, and here are 46" in refusal(implied.inputs, model, asked)
    cache = kvcat.trace(model, document, supervision="self", room=50).dense_cache()
    # the stock model has the long factors where a later token lies beyond the border
    expected = stock_logits(stock, document, asked, tokens(30, 3))[:, 40:46]
    with torch.no_grad():
        assert error(model(**cache.inputs(model, asked)).logits, expected) < 1e-5


@pytest.mark.parametrize("method", ["attention-matching", "gradient", "snapkv"])
def test_every_cache_and_its_file_record_the_factors(method, tmp_path):
    model, _ = pair()
    instruction = tokens(5, 2)
    document = tokens(40)
    made = kvcat.trace(
        model, Reconstruction(torch.cat([document, instruction, document], 1), 40, 45)
    )
    options = {"num_steps": 2} if method == "gradient" else {}
    compressor = kvcat.compress.make_compressor(method, **options)
    cache = compressor(made, keep_ratio=0.5)
    cache.save(tmp_path / "doc.safetensors")
    loaded = CompactCache.load(tmp_path / "doc.safetensors", model)
    assert loaded.metadata["rope"] == "short"
    kl = kvcat.compare(made, loaded).kl
    assert kl.isfinite().all()
    assert "room for the text that follows" in refusal(loaded.inputs, model, tokens(30, 1))
    silent = CompactCache(cache.layers, 40, fingerprint(model))
    assert "does not say which" in refusal(silent.inputs, model, tokens(3))
    assert "leave out static_tokens" in refusal(loaded.inputs, model, tokens(3), static_tokens=9)


def test_a_cache_that_grows_keeps_its_factors_and_those_of_another_trace_are_rejected():
    model, stock = pair()
    text = tokens(90)
    short = kvcat.trace(model, text[:, :30], supervision="self").dense_cache()
    assert "short rotary factors" in refusal(kvcat.trace, model, text, 50, past=short)
    long = kvcat.trace(model, text[:, :30], supervision="self", room=60).dense_cache()
    made = kvcat.trace(model, text, 50, past=long)
    assert error(made.logits, stock_logits(stock, text)[:, 50:]) < 1e-5
    other = kvcat.trace(model, text[:, :50], supervision="self").dense_cache()
    assert "the cache has the short rotary factors and the trace the long ones" in refusal(
        kvcat.compare, made, other
    )


def test_dynamic_factors_are_those_of_short_texts_and_longer_texts_are_rejected():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model, stock = pair("llama", max_position_embeddings=BORDER, rope_parameters=rope)
    document = tokens(50)
    asked = tokens(14, 1)
    with torch.no_grad():
        model(tokens(100))  # leaves other factors in the modules
    cache = kvcat.trace(model, document, supervision="self").dense_cache()
    with torch.no_grad():
        logits = model(**cache.inputs(model, asked)).logits
    assert error(logits, stock_logits(stock, document, asked)[:, 50:]) < 1e-5
    assert "change with every length beyond 64" in refusal(cache.inputs, model, tokens(15, 1))


def test_factors_are_held_for_a_block_and_models_that_choose_them_otherwise_are_rejected():
    model, _ = pair()
    rotary = model.model.rotary_emb
    far, near = (torch.tensor([positions]) for positions in ([0, 5, BORDER], [0, 5]))
    like = torch.zeros(1)
    long, short = (rotary(like, at)[0][:, :2].clone() for at in (far, near))
    assert not torch.equal(long, short)
    for factors, expected in (("long", long), ("short", short)):
        with held_factors(model, factors):
            assert torch.equal(rotary(like, far)[0][:, :2], expected)
            assert torch.equal(rotary(like, near)[0], expected)
    assert torch.equal(rotary(like, near)[0], short)
    assert [rope_factors(model.config, count) for count in (64, 65)] == ["short", "long"]
    model.config.rope_parameters = {
        **LONGROPE,
        "long_factor": LONGROPE["short_factor"],
    }  # as kvcat widen leaves it
    assert rope_factors(model.config, 65) is None
    phimoe = loud_model(
        "phimoe",
        torch.float32,
        num_local_experts=2,
        max_position_embeddings=256,
        rope_parameters={**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
    )
    assert "PhimoeForCausalLM is not supported: its rotary factors" in refusal(self_test, phimoe)


def test_a_copy_of_a_cache_holds_its_factors_when_the_cache_is_gone():
    model, _ = pair()
    document = kvcat.trace(model, tokens(30), supervision="self", room=BORDER)
    cache = kvcat.AttentionMatching()(document, num_slots=10)
    with torch.no_grad():
        expected = model(**cache.inputs(model, tokens(5, seed=1))).logits
        inputs = cache.inputs(model, tokens(5, seed=1))
        inputs[CACHE_NAME] = copy.deepcopy(inputs[CACHE_NAME])
        gc.collect()
        assert torch.equal(model(**inputs).logits, expected)
