"""A conversation behind a compact cache whose heads hold other numbers of slots, compressed together with it."""

from dataclasses import replace

import pytest
import torch

from kvcat.cache import CompactCache, CompactLayer, RaggedLayer, next_turn
from kvcat.compress import (
    AttentionMatching,
    Eviction,
    GradientCompression,
    compare,
    refit_without_log_bias,
    replay,
    smallest_cache,
    trace,
)
from kvcat.compress.fitting import fit_slots
from kvcat.compress.heads import HeadBlock, head_groups, load_block
from kvcat.compress.selection import summarise

COUNTS = [[[1, 7], [4, 2], [3, 3]], [[2, 2], [9, 5], [1, 8]]]  # layer, example, head
NEW = 16
EVERY = slice(None)
MATCHING = [
    {}, {"preset": "paper"}, {"log_bias": False}, {"values": "original"}, {"selection": "omp", "picks": 4},
    {"selection": "max", "kernel_size": 3}, {"on_policy": True}, {"budgets": "adaptive"},
]  # fmt: skip
METHODS = {
    **{f"matching {options}": AttentionMatching(**options) for options in MATCHING},
    **{name: Eviction(name) for name in ("first", "random", "streaming", "keynorm")},
    **{f"gradient {name}": GradientCompression(num_steps=2, init=name) for name in ("first", "random")},
    "gradient matching": GradientCompression(num_steps=2, init="attention-matching"),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@pytest.fixture(scope="module")
def double(make_model):
    return make_model(torch.float64)


def shortened(cache, counts):
    """The first slots of every head, as many as counted."""
    layers = []
    for layer, rows in zip(cache.layers, counts, strict=True):
        heads = [[layer.head(b, h) for h in range(2)] for b in range(len(rows))]
        parts = [
            [[heads[b][h][part][: rows[b][h]] for h in range(2)] for b in range(len(rows))] for part in range(3)
        ]  # fmt: skip
        layers.append(CompactLayer.ragged(*parts))
    return replace(cache, layers=layers)


@pytest.fixture(scope="module")
def document(double, windows):
    return AttentionMatching()(trace(double, windows, 32), num_slots=9)


@pytest.fixture(scope="module")
def ragged(document):
    return shortened(document, COUNTS)


@pytest.fixture
def grown(double, windows, ragged):
    return trace(double, windows, 48, past=ragged)


def own_slots(grown, past, layer, example, head):
    """Keys, values and log-bias of one head: those of the past, and those of the tokens behind it."""
    keys, values, bias = past.layers[layer].head(example, head)
    new = [states[layer][example, head, -NEW:] for states in (grown.keys, grown.values)]
    bias = torch.zeros(len(keys), dtype=torch.float64) if bias is None else bias
    return torch.cat([keys, new[0]]), torch.cat([values, new[1]]), torch.cat([bias, bias.new_zeros(NEW)])


def every_head():
    return [(layer, example, head) for layer in range(2) for example in range(3) for head in range(2)]


def test_every_head_has_its_own_slots_and_those_of_the_new_tokens(grown, ragged):
    assert grown.num_slots == 9 + NEW
    for layer, example, head in every_head():
        found = grown.head(layer, example, head)
        expected = own_slots(grown, ragged, layer, example, head)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        count = COUNTS[layer][example][head] + NEW
        assert int(grown.counts(layer)[example, head]) == count
        ranks = grown.ranks(layer)[example, head]
        assert ranks[ranks >= 0].tolist() == list(range(count))
        assert torch.equal(ranks < 0, grown.log_bias[layer][example, head] == -torch.inf)


def test_all_slots_of_a_grown_ragged_cache_replay_what_follows_it(double, windows, ragged, grown):
    cache = grown.dense_cache()
    assert [layer.counts.tolist() for layer in cache.layers] == (torch.tensor(COUNTS) + NEW).tolist()
    assert not any((layer.log_bias == -torch.inf).any() for layer in cache.layers)
    assert cache.metadata == {"method": "dense", "num_slots": f"{cache.mean_slots:.6g}"}
    followed = replay(double, ragged, windows[:, 32:])[:, NEW:]
    assert torch.allclose(grown.logits, followed, atol=1e-12)
    assert torch.allclose(replay(double, cache, windows[:, 48:]), followed, atol=1e-12)


@pytest.mark.parametrize("supervision", ["suffix", "self"])
@pytest.mark.parametrize("chunk_tokens", [1, 7])
def test_tokens_behind_a_ragged_past_run_in_chunks_as_at_once(double, windows, ragged, chunk_tokens, supervision):
    whole = trace(double, windows, 48, past=ragged, supervision=supervision)
    parts = trace(double, windows, 48, past=ragged, supervision=supervision, chunk_tokens=chunk_tokens)
    for name in ("keys", "values", "queries", "tail_queries", "log_bias"):
        for left, right in zip(getattr(whole, name), getattr(parts, name), strict=True):
            assert torch.allclose(left, right, atol=1e-12)
    assert torch.allclose(whole.logits_at(-1, 16), parts.logits_at(-1, 16), atol=1e-12)


@pytest.mark.parametrize("supervision", ["suffix", "self"])
def test_attention_matching_fits_every_head_as_it_would_alone(double, windows, ragged, supervision):
    """The twin: one head at a time, in tensors put together by hand."""
    seen = trace(double, windows, 48, past=ragged, supervision=supervision)
    method = AttentionMatching("paper", num_queries=None)
    cache = method(seen, num_slots=12)
    for layer, example, head in every_head():
        keys, values, bias = (part[None] for part in own_slots(seen, ragged, layer, example, head))
        queries = seen.queries[layer][example, 2 * head : 2 * head + 2]
        at = None
        if supervision == "self":
            at = (torch.arange(NEW) + keys.shape[1] - NEW).repeat(2)[None]
        block = HeadBlock(queries.flatten(0, 1)[None] * seen.scales[layer], keys, values, at, bias)
        slots, fitted, log_bias = fit_slots(block, summarise(block), 12, method.fit_options())
        expected = keys[0, slots[0]], fitted[0], log_bias[0] + bias[0, slots[0]]
        for left, right in zip(cache.layers[layer].head(example, head), expected, strict=True):
            assert torch.allclose(left, right, atol=1e-9)


@every_method
def test_no_head_keeps_a_slot_that_it_does_not_have(grown, ragged, method):
    slots = 20
    cache = method(grown, num_slots=slots)
    have = torch.stack([layer.counts for layer in cache.layers])
    assert (have <= torch.tensor(COUNTS) + NEW).all()
    if getattr(method, "budgets", "equal") == "equal":
        assert have.tolist() == (torch.tensor(COUNTS) + NEW).clamp(max=slots).tolist()
        assert any(isinstance(layer, RaggedLayer) for layer in cache.layers)
    assert (have.sum((0, 2)) <= 4 * slots).all()
    assert cache.metadata["num_slots"] == f"{cache.mean_slots:.6g}"
    for layer, example, head in every_head():
        keys, _, bias = cache.layers[layer].head(example, head)
        assert (bias > -torch.inf).all()
        if not isinstance(method, GradientCompression):
            theirs = own_slots(grown, ragged, layer, example, head)[0]
            at = (keys.unsqueeze(1) == theirs).all(-1)
            assert at.any(-1).all()
            assert len(at.float().argmax(-1).unique()) == len(keys)


@pytest.mark.parametrize("options", [{}, {"on_policy": True}], ids=str)
def test_heads_with_no_more_than_is_asked_for_stay_as_they_are(grown, ragged, options):
    cache = AttentionMatching(**options)(grown, num_slots=20)
    whole = 0
    for layer, example, head in every_head():
        expected = own_slots(grown, ragged, layer, example, head)
        found = cache.layers[layer].head(example, head)
        if len(found[0]) == len(expected[0]):
            whole += 1
            assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, expected, strict=True))
    assert whole > 0


@pytest.mark.parametrize(
    ("method", "by"),
    [*((m, "example") for m in METHODS.values()), *((METHODS[n], "layer") for n in ("matching {}", "random"))],
)
def test_unequal_slots_together_give_what_equal_ones_give_alone(double, windows, document, method, by):
    """Alone, an example's past is an ordinary one: the same number of slots in every head."""
    sizes = [2, 9, 5]
    counts = [[[n, n] for n in sizes]] * 2 if by == "example" else [[[4, 4]] * 3, [[9, 9]] * 3]
    past, slots = shortened(document, counts), 20 if by == "example" else 14  # 20: all that one example has
    together = method(trace(double, windows, 48, past=past), num_slots=slots)
    for row in range(3):
        own = past.select([row])
        assert own.is_uniform == (by == "example")
        alone = method(trace(double, windows[[row]], 48, past=own), num_slots=slots)
        for left, right in zip(together.select([row]).layers, alone.layers, strict=True):
            assert left.counts.tolist() == right.counts.tolist()
            for name, tensor in right.tensors().items():
                assert torch.allclose(left.tensors()[name].to(tensor), tensor, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"on_policy": True}], ids=str)
def test_more_slots_bring_a_cache_closer_to_the_grown_one(grown, options):
    losses = [compare(grown, AttentionMatching(**options)(grown, num_slots=n)).kl.mean().item() for n in (3, 12, 24)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1 * losses[0]


def test_as_many_slots_as_the_fullest_head_has_are_all_slots(grown):
    for slots in (9 + NEW, 48):
        cache = AttentionMatching()(grown, num_slots=slots)
        assert cache.metadata["method"] == "dense"
    found = smallest_cache(grown, AttentionMatching(), 1e9)
    assert found.num_slots == 1


def test_queries_of_the_prefix_itself_see_their_heads_own_slots(double, windows, ragged):
    seen = trace(double, windows[:, :48], supervision="self", past=ragged)
    for heads in head_groups(seen):
        block = load_block(seen, heads, None)
        old = block.keys.shape[1] - NEW
        visible = torch.ones(NEW, old + NEW).tril(old).bool().repeat(2, 1)
        assert all(torch.equal(scores > -torch.inf, visible) for scores in block.scores(EVERY))


def test_a_refit_behind_a_ragged_past_reads_the_heads_own_slots(grown):
    cache = AttentionMatching("paper", num_queries=None)(grown, num_slots=12)
    refitted = refit_without_log_bias(grown, cache)
    dropped = replace(cache, layers=[replace(layer, log_bias=None) for layer in cache.layers])
    assert not refitted.has_log_bias
    assert compare(grown, refitted).kl.mean() < compare(grown, dropped).kl.mean()


def test_a_talk_of_two_turns_behind_unequal_heads_is_compressed_and_goes_on(double, windows, tmp_path):
    ids = windows[:1]
    document = shortened(AttentionMatching()(trace(double, ids, 32), num_slots=12), [[[12, 7]], [[9, 11]]])
    first = document.inputs(double, ids[:, 32:38])
    said = double.generate(**first, max_new_tokens=4, do_sample=False)
    second = torch.cat([said[:, -1:], ids[:, 38:44]], dim=1)
    answer = double.generate(**next_turn(first["past_key_values"], second), max_new_tokens=5, do_sample=False)
    talk = torch.cat([ids[:, :32], said, answer[:, 1:-1]], dim=1)
    third = ids[:, 50:]
    after = trace(double, torch.cat([talk, third], dim=1), talk.shape[1], past=document)
    kept = double(**next_turn(first["past_key_values"], torch.cat([answer[:, -1:], third], dim=1))).logits
    more = trace(
        double, torch.cat([talk, answer[:, -1:], third], dim=1), talk.shape[1] + 1, past=document
    )  # what the transformers cache held by then
    assert torch.allclose(more.logits_at(-1, third.shape[1]), kept, atol=1e-9)

    AttentionMatching()(after, num_slots=29).save(tmp_path / "talk")
    again = CompactCache.load(tmp_path / "talk", double)
    assert (again.num_tokens, again.num_slots, again.is_uniform) == (talk.shape[1], 29, False)
    whole = replay(double, after.dense_cache(), third)
    forgotten = replace(document, num_tokens=talk.shape[1])
    errors = [(replay(double, cache, third) - whole).square().mean() for cache in (again, forgotten)]
    assert errors[0] < 0.25 * errors[1]


def test_an_example_that_keeps_all_its_slots_stays_as_it_is_beside_one_that_is_trained(model, windows):
    document = AttentionMatching()(trace(model, windows, 32), num_slots=9)
    past = shortened(document, [[[n, n] for n in (2, 9, 5)]] * 2)
    grown = trace(model, windows, 48, past=past)
    cache = GradientCompression(num_steps=3)(grown, num_slots=20)
    kept, whole = cache.select([0]), grown.dense_cache().select([0])
    for left, right in zip(kept.layers, whole.layers, strict=True):
        assert all(torch.equal(left.tensors()[name], tensor) for name, tensor in right.tensors().items())
