"""Several documents' caches as one, and tokens appended, against plain transformers in float64."""

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import kvcat
from kvcat.cache import (
    CacheRecord,
    CompactCache,
    HeadSlots,
    cache_argument,
    count_before,
    first_slots,
)
from kvcat.compress import AttentionMatching, Eviction, GradientCompression, make_compressor
from kvcat.compress.prefix import protecting
from kvcat.models.exact_copy import StaysDouble
from tiny import byte_tokenizer, loud_model, refusal

FIRST, SECOND, LATER = 20, 24, 9
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.3,
}
ROTARY = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gpt_neox, partial": {"rotary_pct": 0.5},
    "phi, partial": {"partial_rotary_factor": 0.5},
    "llama, llama3": {"rope_parameters": LLAMA3},
    "qwen2, yarn": {"rope_parameters": YARN},
}


def tokens(length, seed, rows=2):
    return torch.randint(3, 67, (rows, length), generator=torch.Generator().manual_seed(seed))


ONE_HEAD = torch.ones(1, 1, dtype=torch.long)
A, B, QUESTION = tokens(FIRST, 1), tokens(SECOND, 2), tokens(LATER, 3)


def made_apart(model, ids, start):
    """Keys and values of a document alone, at positions from ``start`` on, by transformers."""
    past = DynamicCache()
    positions = torch.arange(start, start + ids.shape[1])[None]
    model(input_ids=ids, position_ids=positions, use_cache=True, **cache_argument(past))
    return [(layer.keys, layer.values) for layer in past.layers]


def logits_behind(model, states, ids, start):
    """Logits of tokens at positions from ``start`` on, behind given keys and values."""
    past = DynamicCache()
    for index, (keys, values) in enumerate(states):
        past.update(keys, values, index)
    positions = torch.arange(start, start + ids.shape[1])[None].expand(len(ids), -1)
    mask = torch.ones(len(ids), states[0][0].shape[2] + ids.shape[1], dtype=torch.long)
    options = {"attention_mask": mask, "use_cache": True, **cache_argument(past)}
    return model(input_ids=ids, position_ids=positions, **options).logits


def whole(model, ids):
    return kvcat.trace(model, ids, supervision="self").dense_cache()


@pytest.fixture(scope="module")
def pair(double):
    return [kvcat.trace(double, ids, supervision="self") for ids in (A, B)]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", ROTARY)
def test_whole_documents_composed_equal_keys_made_apart_by_transformers_at_their_new_positions(
    name,
):
    model = loud_model(name.partition(",")[0], torch.float64, 0.2, **ROTARY[name])
    with StaysDouble(), torch.no_grad():
        composed = kvcat.compose(model, [whole(model, A), whole(model, B)], seam_tokens=0)
        actual = kvcat.replay(model, composed, QUESTION)
        model.set_attn_implementation("eager")
        states = [
            tuple(torch.cat([one, two[:, :, 1:]], dim=2) for one, two in zip(*both, strict=True))
            for both in zip(made_apart(model, A, 0), made_apart(model, B, FIRST), strict=True)
        ]
        expected = logits_behind(model, states, QUESTION, FIRST + SECOND)
        unturned = logits_behind(model, made_apart(model, A, 0), QUESTION, FIRST + SECOND)
    assert composed.num_tokens == FIRST + SECOND
    assert composed.num_slots == FIRST + SECOND - 1
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    assert (actual - unturned).abs().max() > 1e-2


@pytest.mark.parametrize("seam_tokens", [1, 5, 16])
def test_the_seam_is_encoded_behind_the_first_document_and_the_rest_stays_as_made_apart(
    double, seam_tokens
):
    with StaysDouble(), torch.no_grad():
        caches = [whole(double, A), whole(double, B)]
        composed = kvcat.compose(double, caches, seam_tokens=seam_tokens)
        actual = kvcat.replay(double, composed, QUESTION)
        joint = made_apart(double, torch.cat([A, B[:, :seam_tokens]], dim=1), 0)
        apart = made_apart(double, B, FIRST)
        states = [
            tuple(
                torch.cat([one, two[:, :, seam_tokens:]], dim=2)
                for one, two in zip(*both, strict=True)
            )
            for both in zip(joint, apart, strict=True)
        ]
        expected = logits_behind(double, states, QUESTION, FIRST + SECOND)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def test_appended_tokens_continue_as_the_dense_model_does(double):
    with StaysDouble():
        longer = kvcat.append(double, whole(double, A), B)
        longer = kvcat.append(double, longer, QUESTION[:, :3])
        actual = kvcat.replay(double, longer, QUESTION[:, 3:])
        with torch.no_grad():
            text = torch.cat([A, B, QUESTION], dim=1)
            expected = double(input_ids=text).logits[:, FIRST + SECOND + 3 :]
    assert longer.num_tokens == FIRST + SECOND + 3
    assert longer.metadata["appended"] == str(SECOND + 3)
    assert "document" not in longer.metadata
    assert float(longer.metadata["keep_ratio"]) == pytest.approx(
        longer.mean_slots / longer.num_tokens, abs=1e-6
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", ["attention-matching", "streaming", "refined"])
def test_appending_to_a_small_cache_predicts_as_running_the_tokens_behind_it(double, pair, method):
    small = make_compressor(method)(pair[0], num_slots=6)
    longer = kvcat.append(double, small, B)
    followed = kvcat.replay(double, small, torch.cat([B, QUESTION], dim=1))[:, SECOND:]
    assert torch.allclose(kvcat.replay(double, longer, QUESTION), followed, atol=1e-9)
    counts = [layer.counts.tolist() for layer in longer.layers]
    assert counts == [(layer.counts + SECOND).tolist() for layer in small.layers]


def test_composing_one_cache_is_that_cache(double, pair):
    small = AttentionMatching()(pair[0], num_slots=6)
    assert kvcat.compose(double, [small]) is small


def test_three_documents_stand_in_their_order_and_slots_keep_values_and_log_bias(double, pair):
    caches = [AttentionMatching()(trace, num_slots=7) for trace in (*pair, pair[0])]
    composed = kvcat.compose(double, caches, seam_tokens=4)
    assert composed.num_tokens == 2 * FIRST + SECOND
    assert composed.metadata["documents"] == f"{FIRST} {SECOND} {FIRST}"
    for index, layer in enumerate(composed.layers):
        positions = layer.positions
        firsts = layer.positions[: int(layer.counts[0, 0])]
        assert (firsts.diff() > 0).all()
        seams = [(positions >= FIRST) & (positions < FIRST + 4)]
        seams.append((positions >= FIRST + SECOND) & (positions < FIRST + SECOND + 4))
        for seam in seams:
            assert int(seam.sum()) == 4 * layer.counts.numel()
            assert not layer.log_bias[seam].any()
        kept = caches[1].layers[index]
        moved = (positions >= FIRST + 4) & (positions < FIRST + SECOND)
        assert torch.equal(layer.values[moved], _flat(kept, "values"))
        assert torch.equal(layer.log_bias[moved], _flat(kept, "log_bias"))


def _flat(layer, name):
    """A tensor of a layer's slots behind its first four tokens, head by head."""
    tensor = getattr(layer, name)
    return tensor[layer.positions >= 4]


def test_a_composed_cache_composed_again_records_the_length_of_each_document(double, pair):
    one, two = (AttentionMatching()(trace, num_slots=10) for trace in pair)
    both = kvcat.compose(double, [one, two])
    assert kvcat.compose(double, [both, one]).record.documents == (FIRST, SECOND, FIRST)
    assert kvcat.compose(double, [one, both]).record.documents == (FIRST, FIRST, SECOND)
    longer = kvcat.append(double, both, QUESTION)
    lengths = (FIRST + SECOND + LATER, FIRST)
    assert kvcat.compose(double, [longer, one]).record.documents == lengths


@pytest.mark.parametrize("seam_tokens", [0, 4])
def test_documents_longer_than_a_window_in_which_each_was_compressed_are_rejected(seam_tokens):
    types = ["sliding_attention", "full_attention"]
    caches = {}
    for window in (2 * FIRST, 2 * FIRST - 1):
        model = loud_model("gemma3_text", layer_types=types, sliding_window=window, head_dim=8)
        cache = Eviction("first")(kvcat.trace(model, A, supervision="self"), num_slots=7)
        caches[window] = (model, [cache, cache])
    model, both = caches[2 * FIRST]
    assert kvcat.compose(model, both, seam_tokens=seam_tokens).num_tokens == 2 * FIRST
    message = refusal(kvcat.compose, *caches[2 * FIRST - 1], seam_tokens=seam_tokens)
    assert "exceed the sliding window of 39" in message


def test_a_row_of_a_batch_is_composed_as_it_is_alone(double, pair):
    caches = [AttentionMatching()(trace, num_slots=7) for trace in pair]
    row = kvcat.compose(double, [cache.select([1]) for cache in caches])
    together = kvcat.compose(double, caches).select([1])
    first, second = (kvcat.replay(double, cache, QUESTION[1:]) for cache in (row, together))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("seam_tokens", [0, 4])
def test_a_later_document_that_protects_a_passage_composes_as_one_that_does_not(seam_tokens):
    model = loud_model("llama")
    first, second = (
        kvcat.trace(model, tokens(20, seed, rows=1), supervision="self") for seed in (1, 2)
    )
    method = kvcat.AttentionMatching()
    # all slots are kept, in another order
    protecting = method(second, keep_ratio=1.0, protect=[(8, 12)])
    caches = [method(first, keep_ratio=1.0), method(second, keep_ratio=1.0)]
    plain = kvcat.compose(model, caches, seam_tokens=seam_tokens)
    composed = kvcat.compose(model, [caches[0], protecting], seam_tokens=seam_tokens)
    ids = tokens(5, 3, rows=1)
    torch.testing.assert_close(
        kvcat.replay(model, composed, ids), kvcat.replay(model, plain, ids), rtol=0, atol=1e-5
    )
    # the promise to keep these slots exact is not forgotten
    assert composed.metadata["protected_later"] == "28:32"
    assert "protected slots" in refusal(composed.quantize, 8)
    longer = torch.cat([tokens(20, 1, rows=1), tokens(20, 2, rows=1), ids], dim=1)
    message = refusal(kvcat.trace, model, longer, supervision="self", past=composed)
    assert "protected slots behind others, of a later document" in message


@pytest.mark.parametrize("seam_tokens", [0, 4])
@pytest.mark.parametrize("again", [[(8, 12)], [(8, 12), (17, 19)], []])
def test_a_grown_whole_document_composes_as_one_text_whatever_it_protects(
    double, again, seam_tokens
):
    text = tokens(20, 2, rows=1)
    method = kvcat.AttentionMatching()
    start = kvcat.trace(double, text[:, :15], supervision="self")
    past = method(start, keep_ratio=1.0, protect=[(8, 12)])
    grown = kvcat.trace(double, text, supervision="self", past=past)
    cache = method(grown, keep_ratio=1.0, protect=again)
    first = whole(double, tokens(FIRST, 1, rows=1))
    caches = [
        kvcat.compose(double, [first, later], seam_tokens=seam_tokens)
        for later in (cache, whole(double, text))
    ]
    actual, expected = (kvcat.replay(double, made, tokens(LATER, 3, rows=1)) for made in caches)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", ["dense", "session"])
def test_a_composed_whole_document_with_a_protected_passage_composes_again_as_one_without(
    double, make
):
    short, passage = tokens(4, 4, rows=1), kvcat.trace(double, B[:1], supervision="self")
    opening = whole(double, short)
    if make == "session":
        session = kvcat.Session(double, byte_tokenizer(), budget=30, tail=6)
        session.append(short[0])
        opening = session.cache
    method = kvcat.AttentionMatching()
    first = whole(double, A[:1])
    logits = []
    for options in ({}, {"protect": [(15, 19)]}):
        later = method(passage, keep_ratio=1.0, **options)
        composed = kvcat.compose(double, [opening, later], seam_tokens=1)
        assert composed.mean_slots == composed.num_tokens
        again = kvcat.compose(double, [first, composed], seam_tokens=8)
        assert again.mean_slots == again.num_tokens
        logits.append(kvcat.replay(double, again, QUESTION[:1]))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-9)


def test_a_whole_session_after_a_short_document_composes_as_one_text_whatever_it_protects(double):
    first, opening = (whole(double, tokens(n, n, rows=1)) for n in (FIRST, 5))
    logits = []
    for protect in ([], [(3, 5)]):
        session = kvcat.Session(
            double, byte_tokenizer(), document=opening, budget=30, tail=2, protect=protect
        )
        session.append(B[0, :12])
        session.compact(10)  # all slots, the protected ones first
        assert session.cache.mean_slots == session.cache.num_tokens
        again = kvcat.compose(double, [first, session.cache], seam_tokens=7)
        logits.append(kvcat.replay(double, again, QUESTION[:1]))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-9)


def test_slots_out_of_order_are_not_recorded_as_those_of_the_first_tokens():
    slots = torch.zeros(3, 4)
    ascending = [[HeadSlots(slots, slots, positions=torch.tensor([0, 1, 5]))]]
    protected_first = [[HeadSlots(slots, slots, positions=torch.tensor([5, 0, 1]))]]
    for layers, num_protected in (([ascending], 0), ([ascending, protected_first], 1)):
        recorded = first_slots(layers, num_protected)
        counts = count_before(recorded, 2, [ONE_HEAD for _ in layers])
        assert [count.item() for count in counts] == [2 for _ in layers]
    assert first_slots([ascending, protected_first], 0) == ()
    assert first_slots([ascending, [[HeadSlots(slots, slots)]]], 0) == ()


def test_caches_in_few_bits_are_unpacked_and_know_the_slots_of_their_first_tokens(double, pair):
    for method in ("attention-matching", "streaming"):
        exact, packed = (
            [make_compressor(method, **bits)(trace, num_slots=9) for trace in pair]
            for bits in ({}, {"bits": 8})
        )
        composed = kvcat.compose(double, packed)
        assert composed.bits is None
        assert "bits" not in composed.metadata
        expected = kvcat.compose(double, exact)
        for layer, like in zip(composed.layers, expected.layers, strict=True):
            assert torch.equal(layer.counts, like.counts)
        logits = [kvcat.replay(double, cache, QUESTION) for cache in (composed, expected)]
        assert (logits[0] - logits[1]).abs().mean() < 0.1 * logits[1].std()


@pytest.mark.parametrize("make", ["append", "compose", "compose, second in few bits"])
def test_a_cache_of_one_in_few_bits_and_more_knows_the_slots_of_its_first_tokens(
    double, pair, make
):
    exact = [kvcat.Eviction("streaming")(trace, num_slots=9) for trace in pair]
    first, second = exact[0], exact[1].quantize(8)
    if make != "compose, second in few bits":
        first = first.quantize(8)
    if make == "append":
        packed = kvcat.append(double, first, QUESTION)
        like = kvcat.append(double, exact[0], QUESTION)
    else:
        packed = kvcat.compose(double, [first, second])
        like = kvcat.compose(double, exact)
    for seam_tokens in (0, 8):
        options = {"seam_tokens": seam_tokens}
        composed = kvcat.compose(double, [exact[1], packed], **options)
        expected = kvcat.compose(double, [exact[1], like], **options)
        for layer, layer_like in zip(composed.layers, expected.layers, strict=True):
            assert torch.equal(layer.counts, layer_like.counts)
        logits = [kvcat.replay(double, cache, QUESTION) for cache in (composed, expected)]
        assert (logits[0] - logits[1]).abs().mean() < 0.1 * logits[1].std()


@pytest.mark.parametrize("protect", [[(0, 3)], [(8, 12)], [(2, 5), (8, 12)]])
def test_a_document_in_few_bits_composes_without_the_protected_slots_of_its_first_tokens(
    double, pair, protect
):
    plain = kvcat.Eviction("streaming")(pair[1], num_slots=14, protect=protect)
    first = kvcat.Eviction("streaming")(pair[0], num_slots=9)
    for seam_tokens in (0, 4, 16):
        options = {"seam_tokens": seam_tokens}
        composed = kvcat.compose(double, [first, plain.quantize(8)], **options)
        expected = kvcat.compose(double, [first, plain], **options)
        for layer, like in zip(composed.layers, expected.layers, strict=True):
            for name in ("keys", "values"):
                step = getattr(like, name).abs().max() / 100
                torch.testing.assert_close(
                    getattr(layer, name), getattr(like, name), rtol=0, atol=step.item()
                )


def test_a_composed_cache_is_saved_loaded_and_composed_again(double, pair, tmp_path):
    caches = [AttentionMatching()(trace, num_slots=7) for trace in pair]
    loaded = []
    for number, cache in enumerate(caches):
        cache.save(tmp_path / f"{number}.safetensors")
        loaded.append(CompactCache.load(tmp_path / f"{number}.safetensors", double))
    composed = kvcat.compose(double, loaded)
    composed.save(tmp_path / "both.safetensors")
    both = CompactCache.load(tmp_path / "both.safetensors", double)
    again = kvcat.compose(double, [caches[0], both])
    at_once = kvcat.compose(double, [caches[0], *caches])
    assert again.num_tokens == at_once.num_tokens == 2 * FIRST + SECOND
    assert again.mean_slots == at_once.mean_slots


@pytest.mark.parametrize("make", ["append", "compose", "session"])
def test_a_short_document_and_what_follows_it_compose_as_one_text(double, make):
    short, following = tokens(5, 4, rows=1), tokens(14, 5, rows=1)
    first, cache = whole(double, tokens(FIRST, 1, rows=1)), whole(double, short)
    if make == "append":
        longer = kvcat.append(double, cache, following)
    elif make == "compose":  # of which all tokens are encoded again
        longer = kvcat.compose(double, [cache, whole(double, following)], seam_tokens=14)
    else:
        session = kvcat.Session(double, byte_tokenizer(), budget=30, tail=6, room=10)
        for ids in (short, following[:, :8]):
            session.append(ids[0])
        session.compact(num_slots=7)  # all of the first tokens, fewer than a cache records
        session.append(following[0, 8:])
        longer = session.cache
    text = torch.cat([short, following], dim=1)
    wanted = kvcat.compose(double, [first, whole(double, text)], seam_tokens=16)
    composed = kvcat.compose(double, [first, longer], seam_tokens=16)
    assert composed.num_slots == composed.num_tokens == wanted.num_tokens
    actual, expected = (
        kvcat.replay(double, made, tokens(LATER, 3, rows=1)) for made in (composed, wanted)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def test_a_joint_refit_fits_the_documents_read_together_better(double, pair):
    caches = [AttentionMatching()(trace, num_slots=10) for trace in pair]
    text = torch.cat([A, B, QUESTION], dim=1)
    joint = kvcat.trace(double, text, FIRST + SECOND)
    plain = kvcat.compose(double, caches)
    fitted = kvcat.compose(double, caches, refit=joint)
    kls = [kvcat.compare(joint, cache).kl.mean() for cache in (plain, fitted)]
    assert kls[1] < 0.7 * kls[0]
    for layer, like in zip(fitted.layers, plain.layers, strict=True):
        assert torch.equal(layer.keys, like.keys)


@pytest.mark.parametrize(("room", "num_later"), [(20, 8), (0, 20)])
def test_a_refit_that_compresses_other_layers_than_the_cache_is_rejected(room, num_later):
    """With room for its text a layer with a window is kept whole, and compressed without it."""
    types = ["sliding_attention", "full_attention"]
    model = loud_model("gemma3_text", layer_types=types, sliding_window=30, head_dim=8)
    cache = Eviction("first")(
        kvcat.trace(model, A, supervision="self", room=room), num_slots=FIRST - 1
    )
    text = torch.cat([A, tokens(num_later, 4)], dim=1)
    message = refusal(kvcat.compose, model, [cache], refit=kvcat.trace(model, text, FIRST))
    assert "refit compresses the layers" in message
    again = kvcat.trace(model, text[:, : FIRST + 8], FIRST, room=room)
    assert kvcat.compose(model, [cache], refit=again).layer_numbers == cache.layer_numbers


@pytest.mark.parametrize(("room", "num_later"), [(20, 8), (0, 20)])
def test_a_refit_with_other_rotary_factors_than_the_cache_is_rejected(room, num_later):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [4.0, 5.0, 6.0, 7.0],
        "original_max_position_embeddings": 30,
        "factor": 2.0,
    }
    model = loud_model(
        "phi3", pad_token_id=0, original_max_position_embeddings=30, rope_parameters=rope
    )
    cache = Eviction("first")(
        kvcat.trace(model, A, supervision="self", room=room), num_slots=FIRST - 1
    )
    text = torch.cat([A, tokens(num_later, 4)], dim=1)
    message = refusal(kvcat.compose, model, [cache], refit=kvcat.trace(model, text, FIRST))
    assert "rotary factors" in message
    fitted = kvcat.compose(model, [cache], refit=kvcat.trace(model, text, FIRST, room=room))
    assert fitted.record.rope == cache.record.rope


def test_a_refit_must_be_a_trace_without_protected_tokens(double, pair):
    caches = [AttentionMatching()(trace, num_slots=10) for trace in pair]
    joint = kvcat.trace(double, torch.cat([A, B, QUESTION], dim=1), FIRST + SECOND)
    message = refusal(kvcat.compose, double, caches, refit=protecting(joint, [(2, 5)]))
    assert "protected tokens" in message
    assert "a Trace" in refusal(kvcat.compose, double, caches, refit=caches[0])


def test_without_a_seam_a_document_needs_no_record_of_its_first_tokens(double, pair):
    one, two = (AttentionMatching()(trace, num_slots=7) for trace in pair)
    bare = replace(two, record=CacheRecord())
    assert kvcat.compose(double, [one, bare], seam_tokens=0).num_tokens == FIRST + SECOND
    suffixed = kvcat.trace(double, torch.cat([B, QUESTION], dim=1), SECOND)
    trained = GradientCompression(num_steps=1)(suffixed, num_slots=7)
    assert kvcat.compose(double, [one, trained], seam_tokens=0).mean_slots == 14
    fewer = replace(two, record=replace(two.record, first_ids=((5, 6, 7), (8, 9, 10))))
    assert kvcat.compose(double, [one, fewer], seam_tokens=3).num_tokens == FIRST + SECOND


def test_a_cache_whose_keys_cannot_be_rotated_grows():
    model = loud_model("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64)
    cache = Eviction("streaming")(kvcat.trace(model, A, supervision="self"), num_slots=5)
    assert kvcat.append(model, cache, B).num_tokens == FIRST + SECOND
