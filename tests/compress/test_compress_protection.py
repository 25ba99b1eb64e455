"""Protected slots: exact in every head and layer, by every method, inside the budget."""

import importlib.util
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import example as with_example
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_compress_contract import RAGGED, ROWS, table

from kvcat.attention.fast import attend_ragged
from kvcat.cache import CompactCache
from kvcat.compress import (
    Eviction,
    KVPress,
    make_compressor,
    protected_ranges,
    reconstruction,
    trace,
)
from kvcat.compress.prefix import Prefix, joined_ranges, protecting
from kvcat.compress.queries import fitted_queries
from tiny import WORDS, byte_tokenizer, loud_model, refusal

RANGES = [(0, 2), (20, 23)]
POSITIONS = torch.tensor([0, 1, 20, 21, 22])
needs_kvpress = pytest.mark.skipif(
    importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed"
)


def assert_protected(cache, traced, positions, *, rtol=0.0):
    """The first slots of every head are the dense ones at these positions, without log-bias."""
    count = len(positions)
    for layer, keys, values in zip(cache.layers, traced.keys, traced.values, strict=True):
        for example in range(keys.shape[0]):
            for head in range(keys.shape[1]):
                kept = layer.head(example, head)
                kept_keys, kept_values, bias = kept.keys, kept.values, kept.log_bias
                assert len(kept_keys) >= count
                assert torch.equal(kept_keys[:count], keys[example, head, positions])
                assert torch.equal(kept_values[:count], values[example, head, positions])
                assert bias is None or not bias[:count].any()


@pytest.mark.parametrize("bits", [None, 8])
@table([*ROWS, *RAGGED])
def test_every_compressor_keeps_protected_slots_exactly_and_inside_its_budget(
    traced, name, options, bits
):
    method = make_compressor(name, **options)
    if bits is not None:
        method = method.in_bits(bits)
    for slots in (5, 6, 48):
        cache = method(traced, num_slots=slots, protect=RANGES)
        assert cache.bits == bits
        assert_protected(cache, traced, POSITIONS)
        counts = torch.cat([layer.counts.flatten() for layer in cache.layers])
        assert counts.sum() == slots * len(counts)
        assert counts.min() >= min(slots, 6)
        assert cache.metadata["protected"] == "0:2,20:23"
        for layer in cache.layers:
            if layer.positions is not None:
                first = layer.positions.flatten()[:5]
                assert torch.equal(first.cpu(), POSITIONS)
    message = refusal(method, traced, num_slots=4, protect=RANGES)
    assert message.startswith("4 slots are fewer than the 5 protected ones (tokens 0:2,20:23)")


@pytest.mark.parametrize("preset", ["stable", "known", "paper"])
@pytest.mark.parametrize("supervision", ["suffix", "self"])
def test_attention_matching_protects_with_every_preset_and_supervision(
    double, windows, preset, supervision
):
    ids = windows if supervision == "suffix" else windows[:, :48]
    traced = trace(double, ids, 48, supervision=supervision)
    cache = make_compressor("attention-matching", preset=preset)(
        traced, num_slots=9, protect=RANGES
    )
    assert_protected(cache, traced, POSITIONS)
    assert all(layer.values.isfinite().all() for layer in cache.layers)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 47), st.integers(1, 12)), min_size=1, max_size=4),
    extra=st.integers(0, 4),
)
def test_any_ranges_are_joined_kept_and_counted(traced, pairs, extra):
    ranges = [(start, min(48, start + length)) for start, length in pairs]
    wanted = sorted({position for start, stop in ranges for position in range(start, stop)})
    joined = joined_ranges(ranges, 48)
    assert [position for start, stop in joined for position in range(start, stop)] == wanted
    assert all(end < start for (_, end), (start, _) in pairwise(joined))
    slots = min(48, len(wanted) + extra)
    for name in ("attention-matching", "streaming"):
        cache = make_compressor(name)(traced, num_slots=slots, protect=ranges)
        assert_protected(cache, traced, torch.tensor(wanted))
        assert cache.mean_slots == slots


def test_eviction_with_protection_is_dense_attention_over_the_kept_tokens(double, windows):
    # an oracle without compact caches: plain transformers with a mask over the kept tokens
    traced = trace(double, windows[:1], 48)
    cache = Eviction("streaming", num_sinks=2)(traced, num_slots=12, protect=[(10, 14)])
    kept = cache.layers[0].positions[0, 0].tolist()
    assert kept == [10, 11, 12, 13, 0, 1, *range(42, 48)]
    is_kept = torch.zeros(48, dtype=torch.bool)
    is_kept[kept] = True
    num_tokens = windows.shape[1]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    causal[48:, :48] &= is_kept
    mask = torch.zeros(num_tokens, num_tokens, dtype=torch.float64)
    mask = mask.masked_fill(~causal, -torch.inf)[None, None]
    before = double.config._attn_implementation
    double.set_attn_implementation("sdpa")
    try:
        masked = double(input_ids=windows[:1], attention_mask=mask).logits[:, 48:]
    finally:
        double.set_attn_implementation(before)
    inputs = cache.inputs(double, windows[:1, 48:])
    torch.testing.assert_close(double(**inputs).logits, masked, rtol=0, atol=1e-10)


def test_values_solve_the_least_squares_of_what_the_protected_slots_leave(double, windows):
    # by hand for one head: protected slots fixed, the others' values by NumPy's least squares
    traced = trace(double, windows[:1], 48)
    method = make_compressor(
        "attention-matching", own_weight=0.0, ridge=1e-9, log_bias=False, budgets="equal"
    )
    cache = method(traced, num_slots=9, protect=RANGES)
    layer = cache.layers[1]
    kept = layer.positions[0, 0]
    scale = traced.scales[1]
    keys = traced.keys[1][0, 0]
    queries = traced.queries[1][0, :2].reshape(-1, keys.shape[-1])
    scores = queries @ keys.T * scale
    later = traced.queries[1][0, :2] @ traced.layers[1].suffix_keys[0, 0].T * scale
    seen = torch.ones(16, 16, dtype=torch.bool).tril()
    later_mass = later.masked_fill(~seen, -torch.inf).logsumexp(-1).reshape(-1)
    others = [position for position in range(48) if position not in POSITIONS.tolist()]
    total = torch.logaddexp(scores.logsumexp(-1), later_mass)
    share = (scores[:, others].logsumexp(-1) - total).exp()
    target = scores[:, others].softmax(-1) @ traced.values[1][0, 0, others]
    fitted_rows = scores[:, kept[5:]].softmax(-1)
    weighted = (share[:, None] * fitted_rows).detach().numpy()
    solution = np.linalg.lstsq(weighted, (share[:, None] * target).detach().numpy(), rcond=None)[0]
    torch.testing.assert_close(
        layer.values[0, 0, 5:], torch.from_numpy(solution), rtol=0, atol=1e-5
    )


def test_queries_count_by_the_share_of_attention_that_protected_slots_leave(double, windows):
    traced = trace(double, windows, 48)
    (plain,) = fitted_queries(Prefix.of(traced), 0.0, by_share=True)
    (protected,) = fitted_queries(Prefix.of(protecting(traced, RANGES)), 0.0, by_share=True)
    for layer, keys in enumerate(traced.keys):
        of_query_heads = keys[:, :, POSITIONS].repeat_interleave(2, dim=1)
        scores = traced.queries[layer] @ of_query_heads.mT * traced.scales[layer]
        mass = plain.log_elsewhere[layer].exp() + scores.exp().sum(-1)
        torch.testing.assert_close(protected.log_elsewhere[layer], mass.log())


def test_a_grown_cache_protects_the_same_tokens_again_and_new_ones(double, windows):
    method = make_compressor("attention-matching")
    past = method(trace(double, windows, 32), num_slots=9, protect=RANGES)
    grown = trace(double, windows, 48, past=past)
    for name in ("attention-matching", "streaming", "gradient"):
        options = {"num_steps": 2} if name == "gradient" else {}
        again = make_compressor(name, **options)(grown, num_slots=12, protect=[*RANGES, (40, 42)])
        assert_protected(again, trace(double, windows, 32), POSITIONS)
        for layer, keys in zip(again.layers, grown.keys, strict=True):
            assert torch.equal(layer.head(0, 0).keys[5:7], keys[0, 0, -8:-6])
    assert "protected" not in method(grown, num_slots=12).metadata
    message = refusal(method, grown, num_slots=12, protect=[(0, 3)])
    assert "protect=0:3 of the 32 tokens in the compact cache, which protects 0:2,20:23" in message


def numbers_of_file(path, layer):
    """Keys, values and log-bias of every head of a layer, from the bytes of a file in 8 bits.

    A head has at most 64 slots in codes, which share the scales of their keys.
    """
    tensors = load_file(path)
    prefix = f"layers.{layer}."
    of_layer = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    counts = of_layer["counts"].flatten().tolist()
    num_first = len(of_layer["first_keys"]) // len(counts)
    first, packed, groups, slots = 0, 0, 0, 0
    for count in counts:
        exact = slice(first, first + num_first)
        coded = slice(packed, packed + count - num_first)
        states = []
        for name in ("key", "value"):
            codes = of_layer[f"{name}_codes"][coded].double()
            rows = slice(groups, groups + bool(len(codes))) if name == "key" else coded
            scales = of_layer[f"{name}_scales"][rows].double()
            numbers = of_layer[f"{name}_offsets"][rows].double() + scales * codes
            states.append(torch.cat([of_layer[f"first_{name}s"][exact].double(), numbers]))
        yield *states, of_layer["half_bias"][slots : slots + count].double()
        first, packed, slots = exact.stop, coded.stop, slots + count
        groups += bool(count > num_first)


@pytest.mark.parametrize("budgets", ["adaptive", "equal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_in_8_bits_attends_with_exact_protected_slots_and_the_numbers_of_its_codes(
    windows, tmp_path, dtype, budgets
):
    traced = trace(loud_model(dtype=dtype), windows, 48)
    method = make_compressor("attention-matching", bits=8, budgets=budgets)
    made = method(traced, num_slots=16, protect=RANGES)
    made.save(tmp_path / "doc")
    cache = CompactCache.load(tmp_path / "doc", traced.model)
    assert cache.nbytes == made.nbytes
    assert cache.record == made.record
    assert_protected(cache, traced, POSITIONS)
    cache.to(dtype=torch.float16).save(tmp_path / "half")  # another type loses nothing
    again = CompactCache.load(tmp_path / "half")
    assert again.dtype == torch.float16
    assert_protected(again.to(dtype=dtype), traced, POSITIONS)
    draw = torch.Generator().manual_seed(0)
    for number, layer in enumerate(cache.layers):
        batch, kv_heads = layer.counts.shape
        keys, values = traced.keys[number], traced.values[number]
        q = torch.randn(batch, 2 * kv_heads, 3, keys.shape[-1], generator=draw).to(dtype)
        k = torch.randn(batch, kv_heads, 3, keys.shape[-1], generator=draw).to(dtype)
        v = torch.randn(batch, kv_heads, 3, values.shape[-1], generator=draw).to(dtype)
        out = attend_ragged(q, k, v, layer.example, torch.arange(batch), None, scale=0.3)
        for place, slots in enumerate(numbers_of_file(tmp_path / "doc", number)):
            example, head = divmod(place, kv_heads)
            of_keys, of_values, bias = slots
            of_keys[:5] = keys[example, head, POSITIONS].double()
            of_values[:5] = values[example, head, POSITIONS].double()
            of_keys = torch.cat([of_keys, k[example, head].double()])
            of_values = torch.cat([of_values, v[example, head].double()])
            for query in range(3):
                for query_head in (2 * head, 2 * head + 1):
                    scores = of_keys @ q[example, query_head, query].double() * 0.3
                    scores[: len(bias)] += bias
                    weights = scores[: len(bias) + query + 1].exp()
                    expected = weights @ of_values[: len(weights)] / weights.sum()
                    torch.testing.assert_close(
                        out[example, query_head, query].double(),
                        expected,
                        rtol=0,
                        atol=1e-5 if dtype == torch.float32 else 0.03,
                    )


@pytest.mark.parametrize("bits", [8, 4])
def test_unprotected_slots_are_within_half_a_step_of_those_that_are_not_rounded(traced, bits):
    options = {"num_slots": 16, "protect": RANGES}
    plain = Eviction("streaming")(traced, **options)
    for packed in (plain.quantize(bits), Eviction("streaming", bits=bits)(traced, **options)):
        assert_protected(packed, traced, POSITIONS)
        for layer, exact in zip(packed.layers, plain.layers, strict=True):
            for head in range(2):
                made, wanted = layer.head(1, head), exact.head(1, head)
                # the first slot that is not protected has no codes
                assert torch.equal(made.keys[5], wanted.keys[5].half().float())
                for states, like, dim in (
                    (made.keys[6:], wanted.keys[6:], 0),
                    (made.values[6:], wanted.values[6:], 1),
                ):
                    step = (like.amax(dim, True) - like.amin(dim, True)) / (2**bits - 1)
                    # the grid's ends are in half precision
                    rounding = like.abs().amax() * 2**-10
                    assert ((states - like).abs() <= 0.5 * step + rounding).all()


def test_a_cache_in_few_bits_grows_and_keeps_its_protected_slots(double, windows):
    method = make_compressor("attention-matching", bits=8)
    cache = method(trace(double, windows, 32), num_slots=9, protect=RANGES)
    exact = trace(double, windows, 32)
    for prefix_len in (40, 48):
        grown = trace(double, windows, prefix_len, past=cache)
        cache = method(grown, num_slots=12, protect=RANGES)
        assert cache.bits == 8
        assert_protected(cache, exact, POSITIONS)


SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}[system]be kind<eos>{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@cache
def system_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SYSTEM
    return tokenizer


@settings(max_examples=25, deadline=None)
@with_example(words=["sees", "the", "the"], bounds=(1, 1), chat=False)  # "se" is one token
@given(
    words=st.lists(st.sampled_from(WORDS), min_size=3, max_size=20),
    bounds=st.tuples(st.integers(0, 60), st.integers(1, 12)),
    chat=st.booleans(),
)
def test_a_protected_passage_is_the_fewest_tokens_that_hold_it_wherever_it_occurs(
    words, bounds, chat
):
    tokenizer = system_tokenizer()
    text = " ".join(words)
    start = bounds[0] % len(text)
    passage = text[start : start + bounds[1]]
    assume(passage.strip())
    ids = reconstruction(tokenizer, text, chat=chat)
    pieces = [tokenizer.decode(token) for token in ids.input_ids[0, : ids.prefix_len].tolist()]
    head = "[system]be kind<eos>[user]" if chat else ""
    ends = [sum(map(len, pieces[: n + 1])) - len(head) for n in range(len(pieces))]
    assert "".join(pieces) == head + text
    wanted = set()
    place = text.find(passage)
    while place >= 0:
        for number, end in enumerate(ends):
            if place < end and end - len(pieces[number]) < place + len(passage):
                wanted.add(number)
        place = text.find(passage, place + 1)  # occurrences may overlap
    ranges = protected_ranges(tokenizer, text, passages=[passage], chat=chat)
    assert {number for first, stop in ranges for number in range(first, stop)} == wanted


def test_occurrences_of_a_protected_passage_may_overlap():
    tokenizer = byte_tokenizer()
    ranges = protected_ranges(tokenizer, "ab ab ab ab. It was.", passages=["ab ab"])
    ids = tokenizer.encode("ab ab ab ab. It was.", add_special_tokens=False)
    held = {number for first, stop in ranges for number in range(first, stop)}
    assert tokenizer.decode([ids[number] for number in sorted(held)]) == "ab ab ab ab"


def test_the_system_turn_is_all_that_the_template_writes_before_the_document():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SYSTEM
    ((start, stop),) = protected_ranges(tokenizer, "the cat sees", system=True, chat=True)
    ids = reconstruction(tokenizer, "the cat sees", chat=True).input_ids[0]
    assert start == 0
    assert tokenizer.decode(ids[:stop]) == "[system]be kind<eos>[user]"
    assert "no system turn to protect: only a chat template writes one" in refusal(
        protected_ranges, tokenizer, "the cat", system=True
    )
    plain = byte_tokenizer()
    assert "the chat template writes none" in refusal(
        protected_ranges, plain, "the cat", system=True, chat=True
    )
    assert "'a dog', is not in the document" in refusal(
        protected_ranges, tokenizer, "the cat", passages=["a dog"]
    )
    for passage in ("", "  ", "\n"):
        assert "is empty or only white space" in refusal(
            protected_ranges, tokenizer, "the  \ncat", passages=[passage]
        )


@needs_kvpress
def test_a_press_cannot_protect(model, windows):
    traced = trace(model, windows[:1], 48)
    message = refusal(KVPress("KnormPress"), traced, num_slots=16, protect=RANGES)
    assert message == "kvpress:KnormPress protects no slots: leave out protect"
