"""Public functions name an argument of a wrong type in one line."""

import pytest
import torch

import kvcat
from tiny import refusal


@pytest.fixture(scope="module")
def objects():
    """A model, a tokenizer, and what is made with them."""
    model, tokenizer = kvcat.load("kvcat-base")
    ids = tokenizer("def f(x):\n    return x\n" * 3, return_tensors="pt").input_ids
    trace = kvcat.trace(model, ids, 20)
    cache = kvcat.Eviction("first")(trace, num_slots=4)
    return model, tokenizer, ids, trace, cache


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("name_or_path is None", lambda *_: kvcat.load(None)),
        ("name_or_path is a Qwen2ForCausalLM", lambda model, *_: kvcat.load(model)),
        ("dtype must be one of", lambda *_: kvcat.load("kvcat-base", dtype=torch.float32)),
        ("device is None", lambda *_: kvcat.load("kvcat-base", device=None)),
        ("model is 'm'", lambda m, t, ids, *_: kvcat.trace("m", ids, 3)),
        ("model is a Qwen2Tok", lambda m, t, *_: kvcat.document_trace(t, m, "a")),
        ("prefix_len is '3'", lambda m, t, ids, *_: kvcat.trace(m, ids, "3")),
        ("prefix_len is True", lambda m, t, ids, *_: kvcat.trace(m, ids, True)),
        ("prefix_len is 3.0", lambda m, t, ids, *_: kvcat.trace(m, ids, 3.0)),
        ("room is 1.5", lambda m, t, ids, *_: kvcat.trace(m, ids, 3, room=1.5)),
        ("chunk_tokens is '2'", lambda m, t, ids, *_: kvcat.trace(m, ids, 3, chunk_tokens="2")),
        ("past is a Trace", lambda m, t, ids, trace, _: kvcat.trace(m, ids, 30, past=trace)),
        ("text is None", lambda m, t, *_: kvcat.document_trace(m, t, None)),
        ("text is None", lambda m, t, *_: kvcat.compress_document(m, t, None)),
        ("settings is a dict", lambda m, t, *_: kvcat.compress_document(m, t, "a", {})),
        ("num_slots is 1.5", lambda *_: kvcat.DocumentSettings(num_slots=1.5)),
        ("give one of keep_ratio and", lambda *_: kvcat.DocumentSettings(keep_ratio=1, max_kl=1)),
        ("max_megabytes must be", lambda *_: kvcat.DocumentSettings(max_megabytes=0)),
        ("protect system needs chat", lambda *_: kvcat.DocumentSettings(protect="system")),
        ("text is b'ab'", lambda m, t, *_: kvcat.reconstruction(t, b"ab")),
        ("tokenizer is a Qwen2For", lambda m, t, *_: kvcat.reconstruction(m, "a")),
        ("text is a list", lambda m, t, *_: kvcat.question_ids(t, ["a"])),
        ("cache is 'c'", lambda m, t, *_: kvcat.question_ids(t, "a", cache="c")),
        ("trace is a Tensor", lambda m, t, ids, *_: kvcat.AttentionMatching()(ids, num_slots=3)),
        ("num_slots is 1.5", lambda *g: kvcat.AttentionMatching()(g[3], num_slots=1.5)),
        ("num_slots is True", lambda *g: kvcat.AttentionMatching()(g[3], num_slots=True)),
        ("keep_ratio is '0.1'", lambda *g: kvcat.AttentionMatching()(g[3], keep_ratio="0.1")),
        ("keep_ratio is True", lambda *g: kvcat.AttentionMatching()(g[3], keep_ratio=True)),
        ("keep_ratios is 0.1", lambda *g: list(kvcat.AttentionMatching().each(g[3], 0.1))),
        ("ranges is 3", lambda *g: kvcat.AttentionMatching()(g[3], num_slots=3, protect=3)),
        ("name is None", lambda *_: kvcat.Eviction(None)),
        ("path is None", lambda *_: kvcat.CompactCache.load(None)),
        ("path is 3", lambda *g: g[4].save(3)),
        ("model is 'm'", lambda *g: g[4].inputs("m", g[2])),
        ("rows is 0", lambda *g: g[4].select(0)),
        ("cache is None", lambda *g: kvcat.append(g[0], None, g[2])),
        ("caches is a CompactCache", lambda *g: kvcat.compose(g[0], g[4])),
        ("document 1 is 'a'", lambda *g: kvcat.compose(g[0], ["a", "b"])),
        ("seam_tokens is 1.5", lambda *g: kvcat.compose(g[0], [g[4]], seam_tokens=1.5)),
        ("cache is a list", lambda *g: kvcat.compare(g[3], [g[4]])),
        ("cache is None", lambda *g: kvcat.replay(g[0], None, g[2])),
        ("config is a dict", lambda *_: kvcat.train({"model": "kvcat-base"})),
    ],
)
def test_a_wrong_type_is_named(message, call, objects):
    assert refusal(call, *objects).startswith(message)
