"""What each compressor promises beyond the contract."""

from pathlib import Path

import pytest
import torch

from kvcat.cache import CompactCache, CompactLayer
from kvcat.compress import (
    SNAPSHOT_STEPS,
    AttentionMatching,
    Eviction,
    GradientCompression,
    Reconstruction,
    compare,
    fit_log_bias,
    trace,
)  # fmt: skip
from kvcat.compress import attention_matching as matching
from kvcat.compress.heads import HeadBlock, draw_queries, head_groups, load_block
from kvcat.compress.scorers import received_mass
from kvcat.errors import InputError

ASSETS = Path(__file__).parents[3] / "shared" / "assets"
needs_assets = pytest.mark.skipif(not ASSETS.exists(), reason="../shared/assets is absent")


def structured_head(prefix=192, queries=160, dim=16, seed=0):
    """Keys in clusters, a sink, queries that look for a few clusters each."""
    draw = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(12, dim, generator=draw)
    topic = torch.randint(0, 12, (prefix,), generator=draw)
    keys = centres[topic] + 0.5 * torch.randn(prefix, dim, generator=draw)
    values = centres[topic].roll(1, -1) + torch.randn(prefix, dim, generator=draw)
    wanted = centres[torch.randint(0, 12, (queries,), generator=draw)]
    looks = (wanted + torch.randn(queries, dim, generator=draw)) * dim**-0.5
    return HeadBlock(looks[None], keys[None], values[None], None)


def output_error(block, slots, values, log_bias):
    return matching.output_error(block, matching.summarise(block), slots, values, log_bias)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_stable_fit_improves_with_every_slot_count_and_beats_eviction_of_the_same_keys(seed):
    block = structured_head(seed=seed)
    errors = []
    for num_slots in (8, 16, 32, 64, 128):
        fit = matching.fit_slots(block, matching.summarise(block), num_slots, matching.FitOptions())
        errors.append(output_error(block, *fit).item())
        kept = block.values.gather(1, fit[0].unsqueeze(-1).expand(-1, -1, 16))
        assert errors[-1] <= 1.0001 * output_error(block, fit[0], kept, torch.zeros_like(fit[2])).item()
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("num_slots", [8, 32, 64])
def test_the_stable_log_bias_is_solved_to_convergence(num_slots):
    block = structured_head()
    options = matching.FitOptions(guard=False)
    slots, _, log_bias = matching.fit_slots(block, matching.summarise(block), num_slots, options)
    every = slice(None)
    assert torch.allclose(log_bias, fit_log_bias(block.scores(every, slots), block.scores(every)), atol=1e-4)


def test_dropping_copies_of_a_token_loses_nothing_while_one_of_each_is_kept():
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 6, 8, generator=draw).repeat_interleave(5, 1)
    values = torch.randn(1, 6, 8, generator=draw).repeat_interleave(5, 1)
    block = HeadBlock(torch.randn(1, 50, 8, generator=draw), keys, values, None)
    dense = matching.summarise(block)
    fit = matching.fit_slots(block, dense, 26, matching.FitOptions())
    assert output_error(block, *fit).item() < 1e-3


def test_the_kept_keys_are_those_of_the_largest_rms_attention(traced):
    cache = AttentionMatching()(traced, num_slots=6)
    for index in range(2):
        queries = traced.queries[index].unflatten(1, (2, 2)).flatten(2, 3)
        weights = (queries @ traced.keys[index].mT * traced.scales[index]).softmax(-1)
        kept = weights.square().mean(2).sqrt().topk(6).indices.sort(-1).values
        expected = traced.keys[index].gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, 8))
        assert torch.equal(cache.layers[index].keys, expected)


def test_the_log_bias_makes_the_kept_mass_the_dense_mass(traced):
    layer = AttentionMatching()(traced, num_slots=24).layers[0]
    assert layer.log_bias.abs().max() <= 3 + 1e-5
    queries = traced.queries[0].unflatten(1, (2, 2)).flatten(2, 3) * traced.scales[0]
    dense = (queries @ traced.keys[0].mT).logsumexp(-1)
    plain = (queries @ layer.keys.mT).logsumexp(-1)
    fitted = (queries @ layer.keys.mT + layer.log_bias.unsqueeze(2)).logsumexp(-1)
    assert (fitted - dense).square().mean() < 0.25 * (plain - dense).square().mean()


def test_small_blocks_and_chunks_of_queries_change_nothing(traced, monkeypatch):
    whole = AttentionMatching()(traced, num_slots=9)
    monkeypatch.setattr("kvcat.compress.heads._BLOCK_ELEMENTS", 48 * 10)
    traced._memo.clear()
    pieces = AttentionMatching()(traced, num_slots=9)
    for left, right in zip(whole.layers, pieces.layers, strict=True):
        assert torch.equal(left.keys, right.keys)
        assert torch.allclose(left.log_bias, right.log_bias, atol=1e-3)
        assert torch.allclose(left.values, right.values, atol=1e-2, rtol=1e-2)


def test_a_query_of_the_prefix_sees_no_later_key(model, windows):
    found = trace(model, windows[:1, :20], supervision="self")
    block = load_block(found, head_groups(found)[0], None)
    scores = block.scores(slice(None))
    assert scores.shape == (4, 40, 20)
    assert torch.equal(scores[0] > -torch.inf, torch.ones(20, 20).tril().bool().repeat(2, 1))
    with torch.no_grad():
        eager = type(model)._from_config(model.config, attn_implementation="eager")
        eager.load_state_dict(model.state_dict())
        attention = eager(windows[:1, :20], output_attentions=True).attentions
    assert torch.allclose(scores[2].softmax(-1).view(2, 20, 20), attention[1][0, :2], atol=1e-5)


def test_queries_are_drawn_without_replacement_and_at_most_as_many_as_asked(traced):
    drawn = draw_queries(traced, 20, seed=0)
    assert {len(set(rows.tolist())) for rows in drawn.values()} == {20}
    assert {len(rows) for rows in draw_queries(traced, 999, seed=0).values()} == {32}
    other = draw_queries(traced, 20, seed=1)
    assert any(not torch.equal(drawn[head], other[head]) for head in drawn)


@pytest.mark.parametrize("name", ["first", "random", "keynorm", "snapkv", "h2o"])
def test_eviction_never_looks_at_the_suffix(model, windows, name):
    changed = windows.clone()
    changed[:, 48:] = (changed[:, 48:] + 1) % 67
    left, right = (Eviction(name)(trace(model, ids, 48), num_slots=10) for ids in (windows, changed))
    for a, b in zip(left.layers, right.layers, strict=True):
        assert torch.allclose(a.keys, b.keys, atol=1e-5)


def positions_of(kept, states):
    return (kept.unsqueeze(3) == states.unsqueeze(2)).all(-1).float().argmax(-1)


def test_first_random_and_keynorm_keep_what_their_names_say(traced):
    keys = traced.keys[1]
    assert torch.equal(Eviction("first")(traced, num_slots=5).layers[1].keys, keys[:, :, :5])
    small = keys.norm(dim=-1).topk(5, largest=False).indices.sort(-1).values
    assert torch.equal(positions_of(Eviction("keynorm")(traced, num_slots=5).layers[1].keys, keys), small)
    few, many = (positions_of(Eviction("random", seed=4)(traced, num_slots=n).layers[1].keys, keys) for n in (5, 9))
    assert all(set(f.tolist()) < set(m.tolist()) for f, m in zip(few.flatten(0, 1), many.flatten(0, 1), strict=True))
    other = positions_of(Eviction("random", seed=5)(traced, num_slots=5).layers[1].keys, keys)
    assert not torch.equal(few, other)


def test_received_mass_is_the_column_sum_of_the_models_attention(model, windows, traced):
    eager = type(model)._from_config(model.config, attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        attention = eager(windows[:, :48], output_attentions=True).attentions
    for start in (0, 40):
        for index, mass in enumerate(received_mass(traced, start)):
            expected = attention[index][:, :, start:].sum(2).unflatten(1, (2, 2)).sum(2)
            assert torch.allclose(mass, expected, atol=1e-4)


def test_snapkv_keeps_its_window_and_h2o_its_recent_half(traced):
    for name, recent in (("snapkv", 8), ("h2o", 6)):
        options = {"window": 8, "kernel_size": 1} if name == "snapkv" else {}
        cache = Eviction(name, **options)(traced, num_slots=12)
        mass = received_mass(traced, 40 if name == "snapkv" else 0)
        for index, layer in enumerate(cache.layers):
            kept = positions_of(layer.keys, traced.keys[index])
            assert torch.equal(kept[..., -recent:], torch.arange(48 - recent, 48).expand(3, 2, -1))
            heavy = mass[index][..., : 48 - recent].topk(12 - recent).indices.sort(-1).values
            assert torch.equal(kept[..., :-recent], heavy)


@pytest.mark.parametrize("options", [{"window": 0}, {"kernel_size": 4}, {"pooling": "min"}])
def test_snapkv_refuses_options_it_cannot_take(options):
    with pytest.raises(InputError, match=next(iter(options))):
        Eviction("snapkv", **options)


def test_gradient_snapshots_come_at_their_steps_and_the_loss_falls(traced):
    seen = {}
    for step, cache in GradientCompression(num_steps=12, lr=0.05).snapshots(traced, num_slots=6):
        seen[step] = compare(traced, cache).kl
    assert list(seen) == [step for step in SNAPSHOT_STEPS if step <= 10] + [12]
    assert (seen[12] < seen[5]).all()
    assert (seen[5] < seen[0]).all()


def test_gradient_compression_starts_from_the_first_slots_and_can_freeze_one(traced):
    method = GradientCompression(num_steps=2, freeze_first_slot=True)
    (_, start), _, (_, end) = method.snapshots(traced, num_slots=6)
    for index in range(2):
        assert torch.equal(start.layers[index].keys, traced.keys[index][:, :, :6])
        assert torch.equal(end.layers[index].values[:, :, 0], traced.values[index][:, :, 0])
        assert not torch.equal(end.layers[index].values[:, :, 1], traced.values[index][:, :, 1])


def test_the_first_gradient_step_is_adam_on_the_mean_kl(make_model, windows):
    """A step of AdamW is lr * sign(gradient): compare with autograd through the stock model on a plain cache."""
    found = trace(make_model(torch.float64), windows[:1], 48)
    after = GradientCompression(num_steps=1)(found, num_slots=4)
    from transformers import DynamicCache

    keys = [k[:, :, :4].clone().requires_grad_(True) for k in found.keys]
    past = DynamicCache()
    for index in range(2):
        past.update(keys[index], found.values[index][:, :, :4], index)
    mask = torch.cat([torch.ones(16, 4), torch.ones(16, 16).tril()], 1).bool()[None, None]
    logits = found.model(
        windows[:1, 48:], past_key_values=past, position_ids=torch.arange(48, 64)[None], attention_mask=mask
    ).logits
    teacher = found.logits.log_softmax(-1)
    loss = (teacher.exp() * (teacher - logits.log_softmax(-1))).sum(-1).mean()
    for index, gradient in enumerate(torch.autograd.grad(loss, keys)):
        moved = after.layers[index].keys - keys[index].detach()
        large = gradient.abs() > 1e-4
        assert torch.allclose(moved[large], -1e-2 * gradient.sign()[large], rtol=1e-2)


def test_a_reconstruction_trace_is_supervised_on_the_second_copy_only(model, windows):
    ids = windows[:1]
    late, early = (trace(model, Reconstruction(ids, 20, start)) for start in (44, 20))
    assert late.queries[0].shape[2] == 20
    a, b = (GradientCompression(num_steps=2)(found, num_slots=5).layers[0].keys for found in (late, early))
    assert not torch.allclose(a, b)


def test_gradient_compression_refuses_a_trace_without_predictions(model, windows):
    with pytest.raises(InputError, match="use AttentionMatching"):
        GradientCompression()(trace(model, windows, 48, supervision="self"), num_slots=5)


@pytest.mark.parametrize("options", [{"num_steps": -1}, {"lr": 0.0}, {"init": "last"}, {"max_norm": -1.0}])
def test_gradient_compression_refuses_options_it_cannot_take(options):
    with pytest.raises(InputError, match=next(iter(options))):
        GradientCompression(**options)


@pytest.mark.parametrize(
    "options", [{"preset": "fast"}, {"num_queries": 0}, {"ridge": -1.0}, {"bounds": (1.0, 1.0)}, {"num_iters": -2}]
)
def test_attention_matching_refuses_options_it_cannot_take(options):
    with pytest.raises(InputError, match=next(iter(options))):
        AttentionMatching(**options)


def test_no_head_of_the_stable_fit_loses_to_eviction_of_its_keys(traced):
    (heads,) = head_groups(traced)
    block = load_block(traced, heads, None)
    dense = matching.summarise(block)
    guarded = 0
    for num_slots, ridge in [(2, 1e-6), (10, 1e-6), (40, 1e-6), (47, 1e-6), (40, 1e-2), (47, 1.0)]:
        slots, values, log_bias = matching.fit_slots(block, dense, num_slots, matching.FitOptions(ridge=ridge))
        guarded += (log_bias == 0).all(-1).sum().item()
        kept = block.values.gather(1, slots.unsqueeze(-1).expand(-1, -1, 8))
        plain = matching.output_error(block, dense, slots, kept, torch.zeros_like(log_bias))
        found = matching.output_error(block, dense, slots, values, log_bias)
        assert (found <= 1.0001 * plain + 1e-9 * dense.outputs.square().sum((1, 2))).all()
    assert guarded > 0


@needs_assets
def test_on_a_real_model_stable_matching_improves_with_every_ratio_and_beats_eviction_of_its_keys():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ASSETS / "models" / "stories260K"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 20
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder).encode(text)[:256]])
    found = trace(model, ids, 192)
    losses = []
    for keep_ratio in (0.05, 0.1, 0.2, 0.4):
        cache = AttentionMatching()(found, keep_ratio=keep_ratio)
        losses.append(compare(found, cache).kl.item())
        plain = []
        for index, layer in enumerate(cache.layers):
            at = positions_of(layer.keys, found.keys[index]).unsqueeze(-1).expand(-1, -1, -1, 8)
            plain.append(CompactLayer(layer.keys, found.values[index].gather(2, at)))
        evicted = CompactCache(plain, found.num_tokens, found.fingerprint)
        assert losses[-1] < compare(found, evicted).kl.item()
    assert losses == sorted(losses, reverse=True)
