"""Traces, replays and comparisons."""

import pytest
import torch

from kvcat.cache import CACHE_NAME
from kvcat.compress import (
    AttentionMatching,
    Eviction,
    Reconstruction,
    Session,
    compare,
    compress_document,
    document_trace,
    reconstruction,
    replay,
    trace,
)
from kvcat.compress.compare import replay_hidden, supervised_kl
from kvcat.corpus import compress_corpus
from kvcat.errors import InputError
from tiny import byte_tokenizer, loud_model, refusal


def test_a_trace_holds_what_the_model_computes(model, windows, traced):
    with torch.no_grad():
        past = model(windows[:, :48], use_cache=True)[CACHE_NAME]
        logits = model(windows).logits
    states = [[layer.keys for layer in past.layers], [layer.values for layer in past.layers]]
    torch.testing.assert_close([traced.keys, traced.values], states, rtol=0, atol=1e-5)
    assert [q.shape for q in traced.queries] == [(3, 4, 16, 8)] * 2
    assert torch.allclose(traced.logits, logits[:, 48:], atol=1e-5)


def test_the_figures_are_those_of_their_definitions(model, windows, traced):
    cache = Eviction("random")(traced, num_slots=5)
    with torch.no_grad():
        dense = model(windows).logits.double().log_softmax(-1)
        compact = replay(model, cache, windows[:, 48:]).double().log_softmax(-1)
    scores = compare(traced, cache)
    target = windows[:, 48:, None]
    nll_dense = -dense[:, 47:-1].gather(-1, target)[..., 0].mean(1)
    seen = torch.cat([dense[:, 47:48], compact[:, :-1]], 1)
    nll = -seen.gather(-1, target)[..., 0].mean(1)
    kl = (dense[:, 48:].exp() * (dense[:, 48:] - compact)).sum(-1).mean(1)
    top1 = (dense[:, 48:].argmax(-1) == compact.argmax(-1)).double().mean(1)
    pairs = [
        (scores.nll_dense, nll_dense),
        (scores.nll, nll),
        (scores.delta_nll, nll - nll_dense),
        (scores.kl, kl),
        (scores.delta_ppl, nll.exp() - nll_dense.exp()),
        (scores.top1, top1),
    ]
    for actual, expected in pairs:
        assert torch.allclose(actual.double(), expected, rtol=1e-4, atol=1e-4)
    assert (scores.kl > 1e-3).all()
    full = compare(traced, traced.dense_cache())
    assert torch.allclose(full.kl, torch.zeros(3), atol=1e-6)
    assert torch.equal(full.top1, torch.ones(3))


@pytest.mark.parametrize(
    "begin",
    [
        lambda model, _: trace(model, torch.arange(3, 15)[None], 8),
        lambda model, _: document_trace(model, byte_tokenizer(), "a red cat"),
        lambda model, _: compress_document(model, byte_tokenizer(), "a red cat"),
        lambda model, folder: compress_corpus(
            model, byte_tokenizer(), folder / "texts", folder / "store"
        ),
        lambda model, _: Session(model, byte_tokenizer()),
    ],
)
def test_a_model_of_transformers_is_tested_before_its_first_use(begin, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a red cat")
    # its attention splits heads in two: what follows a compact cache would be wrong
    model = loud_model("diffllama", vocab_size=300)
    message = "DiffLlamaForCausalLM is not supported: tokens after a compact cache"
    assert message in refusal(begin, model, tmp_path)
    assert not (tmp_path / "store").exists()


REPLAYED = [Eviction("streaming"), AttentionMatching(), AttentionMatching(budgets="adaptive")]


@pytest.mark.parametrize(
    "method", REPLAYED, ids=["slots", "slots with a log-bias", "unequal slots"]
)
def test_a_suffix_in_chunks_fares_as_in_one_piece(windows, method):
    model = loud_model(dtype=torch.float64)
    traced = trace(model, windows, 48)
    cache = method(traced, num_slots=9)
    inputs = cache.inputs(model, windows[:, 48:])
    expected = model(**inputs, use_cache=True, output_hidden_states=True).hidden_states[-1]
    for chunk_tokens in (1, 7):
        for start in (0, 6):
            whole = compare(traced, cache, start=start)
            in_chunks = compare(traced, cache, start=start, chunk_tokens=chunk_tokens)
            hidden = replay_hidden(model, cache, windows[:, 48:], chunk_tokens=chunk_tokens)
            torch.testing.assert_close(vars(whole), vars(in_chunks), rtol=0, atol=1e-12)
            assert torch.allclose(hidden, expected, atol=1e-12)
    assert torch.allclose(supervised_kl(traced, cache), compare(traced, cache).kl, atol=1e-12)
    one = cache.select([0])
    alone = replay(model, one, windows[1:2, 48:])
    assert torch.allclose(replay(model, one, windows[:, 48:])[1:2], alone, atol=1e-12)


def test_a_reconstruction_repeats_the_same_tokens_and_its_second_copy_gives_the_queries():
    tokenizer = byte_tokenizer()
    text = "the cat sees a river."
    sequence = reconstruction(tokenizer, text)
    ids = sequence.input_ids[0].tolist()
    length = sequence.prefix_len
    assert ids[:length] == ids[sequence.supervision_start :] == tokenizer.encode(text)
    assert "verbatim" in tokenizer.decode(ids[length : sequence.supervision_start])
    with pytest.raises(InputError, match="holds no token"):
        reconstruction(tokenizer, "")
    traced = trace(loud_model(vocab_size=300, max_position_embeddings=256), sequence)
    assert traced.prefix_len == length
    assert traced.queries[0].shape[2] == len(ids) - sequence.supervision_start
    assert traced.logits.shape[1] == len(ids) - length


@pytest.mark.parametrize("source", ["suffix", "self", "reconstruction"])
def test_a_trace_in_chunks_is_that_of_one_forward_and_holds_no_more_than_its_tensors(
    windows, source
):
    model = loud_model(dtype=torch.float64)
    ids = Reconstruction(windows[:1], 28, 36) if source == "reconstruction" else windows
    options = {} if source == "reconstruction" else {"prefix_len": 40, "supervision": source}
    whole = trace(model, ids, **options)
    for chunk_tokens in (1, 7):
        in_chunks = trace(model, ids, **options, chunk_tokens=chunk_tokens)
        whole_tensors, chunked_tensors = (
            [*x.keys, *x.values, *x.queries, *(each.prefix_queries for each in x.layers), x.hidden]
            for x in (whole, in_chunks)
        )
        torch.testing.assert_close(whole_tensors, chunked_tensors, rtol=0, atol=1e-12)
        assert all(
            x.untyped_storage().nbytes() == x.nbytes
            for x in (*whole_tensors[:-1], *chunked_tensors[:-1])
        )


def test_a_text_within_the_sliding_window_is_traced(windows):
    model = loud_model("mistral", sliding_window=20)
    assert trace(model, windows[:, :20], 12).prefix_len == 12
