"""What a cache and its file reject, each in one line."""

import pickle
from dataclasses import replace

import pytest
import torch

import kvcat
from kvcat.cache import CACHE_NAME, CompactCache, CompactLayer, PrefixLayer
from tiny import loud_model, refusal_with, rejections

LENGTH = 20
DOCUMENT, FIRST, SECOND = (
    torch.randint(3, 67, (1, count), generator=torch.Generator().manual_seed(count))
    for count in (LENGTH, 5, 4)
)
OWNER = "2:" + "ab" * 32
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 5.0, 8.0, 11.0],
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def model():
    return loud_model(dtype=torch.float64, pad_token_id=0)


@pytest.fixture
def cache(model):
    return dense(model, DOCUMENT)


@pytest.fixture
def both(model):
    """The cache of the document and of its tokens in reverse order."""
    return dense(model, torch.cat([DOCUMENT, DOCUMENT.flip(1)]))


def dense(model, text):
    return kvcat.trace(model, text, supervision="self").dense_cache()


def by_hand(*, owner=OWNER, dim=8, value=1.0, log_bias=None):
    """A cache of one head with four slots that hold one number."""
    states = torch.full((1, 1, 4, dim), value)
    bias = None if log_bias is None else torch.full((1, 1, 4), log_bias)
    return CompactCache([CompactLayer(states, states, bias)], LENGTH, owner)


def answered(model, inputs, **options):
    return model.generate(**{**inputs, "max_new_tokens": 4, "do_sample": False, **options})


@torch.no_grad()
def repeated(model, cache, tokens):
    """A forward of what the cache holds already, before these tokens."""
    inputs = cache.inputs(model, FIRST)
    turn = answered(model, inputs)
    return model(torch.cat([turn, tokens], 1), **{CACHE_NAME: inputs[CACHE_NAME]})


@torch.no_grad()
def forward_twice(model, inputs):
    model(**inputs)
    return model(**inputs)


def without_attention():
    """Two updates of a layer with a log-bias, without an attention between them."""
    slots = CompactLayer(*(torch.ones(1, 2, 3, 8) for _ in range(2)), torch.ones(1, 2, 3))
    layer = PrefixLayer(slots, LENGTH)
    for _ in range(2):
        layer.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))


def beyond_window(max_new_tokens):
    model = loud_model("mistral", sliding_window=24, pad_token_id=0)
    inputs = dense(model, DOCUMENT).inputs(model, FIRST[:, :3])
    return answered(model, inputs, max_new_tokens=max_new_tokens)


def beyond_factors():
    options = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    model = loud_model("phi3", max_position_embeddings=256, pad_token_id=0, **options)
    cache = dense(model, DOCUMENT.repeat(1, 3)[:, :58])
    return answered(model, cache.inputs(model, SECOND), max_new_tokens=8)


def asked_with_mask(model, cache, *shape):
    return cache.inputs(model, FIRST.expand(2, -1), torch.ones(shape, dtype=torch.long))


def of_other_bits(tmp_path):
    packed = by_hand().quantize(4)
    wrong = [replace(layer, bits=8) for layer in packed.layers]
    return replace(packed, layers=wrong).save(tmp_path / "doc")


def on_meta(tmp_path):
    model = loud_model("llama")
    dense(model, DOCUMENT).save(tmp_path / "c")
    model.model.layers[1].to("meta")
    return CompactCache.load(tmp_path / "c", model)


def begun_with(model, cache, document, rows=1):
    """A question whose last row begins with a document."""
    question = torch.cat([DOCUMENT.roll(1, 1), FIRST], 1).expand(rows, -1).clone()
    question[-1, :LENGTH] = document
    return cache.inputs(model, question)


def begun_with_padding(model, cache, document):
    """Two questions, the shorter of which begins with a document."""
    width = LENGTH + 9
    ids = torch.cat([DOCUMENT.roll(1, 1), DOCUMENT], 1)[:, :width].repeat(2, 1)
    ids[1, 4 : 4 + LENGTH] = document
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return cache.inputs(model, ids, mask)


@rejections(
    # examples of a cache
    ("the batch has examples 0 to 1", lambda both: both.select([2])),
    ("the batch has examples 0 to 1", lambda both: both.select([0, -3])),
    ("the batch has examples 0 to 1", lambda both: both.select(torch.tensor([7]))),
    ("the batch has examples 0 to 1", lambda both: both.select([0.5])),
    ("the batch has examples 0 to 1", lambda both: both.select([True, False])),
    ("no example is chosen", lambda both: both.select([])),
    ("no example is chosen", lambda both: both.select(slice(2, None))),
    ("no example is chosen", lambda both: both.select(torch.tensor([], dtype=torch.long))),
    # bits
    ("bits must be 8 or 4, not 3", lambda: by_hand().quantize(3)),
    ("bits must be 8 or 4, not 16", lambda: by_hand().quantize(16)),
    ("bits must be 8 or 4, not 0", lambda: by_hand().quantize(0)),
    ("bits must be 8 or 4, not '8/4'", lambda: by_hand().quantize("8/4")),
    ("bits must be 8 or 4, not True", lambda: by_hand().quantize(True)),
    ("the cache is in 8 bits already", lambda: by_hand().quantize(8).quantize(4)),
    ("of 5 channels do not fill whole bytes", lambda: by_hand(dim=5).quantize(4)),
    ("16 bits", lambda: by_hand(value=1e6).quantize(8)),
    ("a log-bias of up to 7e+04 does not fit in 16 bits",
     lambda: by_hand(log_bias=70_000.0).quantize(8)),
    ("a log-bias of up to 7e+04 does not fit in 16 bits",
     lambda: by_hand(log_bias=-70_000.0).quantize(8)),
    # files
    ("key_codes have shape", of_other_bits),
    ("fingerprint is 'abab", lambda tmp_path: by_hand(owner="ab" * 32).save(tmp_path / "c")),
    ("fingerprint is '3:abab",
     lambda tmp_path: by_hand(owner="3:" + "ab" * 32).save(tmp_path / "c")),
    ("model.layers.1.self_attn.q_proj.weight is on the meta device", on_meta),
    ("cannot be pickled: save the compact cache",
     lambda model, cache: pickle.dumps(cache.inputs(model, FIRST)[CACHE_NAME])),
    # questions
    ("input_ids hold no token", lambda model, cache: cache.inputs(model, FIRST[:, :0])),
    ("cache of 2 examples cannot serve 3 rows",
     lambda model, both: both.inputs(model, FIRST.expand(3, -1))),
    ("static_tokens is 0", lambda model, cache: cache.inputs(model, FIRST, static_tokens=0)),
    ("more tokens than the static cache has room for: 6",
     lambda model, cache: answered(model, cache.inputs(model, FIRST, static_tokens=6))),
    ("belongs to another model", lambda cache: cache.inputs(loud_model("qwen2"), FIRST)),
    ("attention_mask has shape (1, 5), input_ids (2, 5)",
     lambda model, cache: asked_with_mask(model, cache, 1, 5)),
    ("attention_mask has shape (2, 4), input_ids (2, 5)",
     lambda model, cache: asked_with_mask(model, cache, 2, 4)),
    ("attention_mask has shape (2, 25), input_ids (2, 5)",
     lambda model, cache: asked_with_mask(model, cache, 2, LENGTH + 5)),
    ("attention_mask has shape (2, 5, 1), input_ids (2, 5)",
     lambda model, cache: asked_with_mask(model, cache, 2, 5, 1)),
    # questions that repeat what the cache holds
    ("begin with the document", lambda model, cache: begun_with(model, cache, DOCUMENT)),
    (
        "begin with the document",
        lambda model: kvcat.Eviction("streaming")(
            kvcat.trace(model, DOCUMENT, supervision="self"), num_slots=5
        ).inputs(model, DOCUMENT),
    ),
    ("begin with the document",
     lambda model, both: begun_with(model, both.select([0]), DOCUMENT, rows=2)),
    ("begin with the document",
     lambda model, both: begun_with(model, both.select([1]), DOCUMENT.flip(1), rows=4)),
    ("begin with the document",
     lambda model, both: both.inputs(model, torch.cat([DOCUMENT, DOCUMENT.flip(1)]))),
    ("begin with the document", lambda model, cache: begun_with_padding(model, cache, DOCUMENT)),
    ("new tokens begin with the 8", lambda model, cache: repeated(model, cache, SECOND)),
    ("the cache holds 25 tokens, and 5 more do not fit",
     lambda model, cache: forward_twice(model, cache.inputs(model, FIRST))),
    ("the cache holds 25 tokens",
     lambda model, cache: answered(model, cache.inputs(model, FIRST), use_cache=False)),
    # attention that would be wrong
    ("did not reach attention", without_attention),
    ("25 tokens exceed the sliding window of 24", lambda: beyond_window(9)),
    ("at most 64 tokens, and here are 65", beyond_factors),
)  # fmt: skip
def test_what_would_be_answered_wrongly_is_rejected_in_one_line(message, call, request):
    assert message in refusal_with(request, call)
