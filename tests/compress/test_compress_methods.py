"""What each compressor promises beyond the contract."""

import pytest
import torch

from kvcat.compress import SNAPSHOT_STEPS, Eviction, GradientCompression, Reconstruction, compare, trace
from kvcat.compress.scorer import received_mass
from kvcat.errors import InputError


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


@pytest.mark.parametrize("options", [{"num_steps": -1}, {"lr": 0.0}, {"init": "last"}])
def test_gradient_compression_refuses_options_it_cannot_take(options):
    with pytest.raises(InputError, match=next(iter(options))):
        GradientCompression(**options)
