"""Training that masks the prefix for the suffix alone: what it computes, and that it trains like any other."""

import pytest
import torch
from runs import config, records

from kvcat.cache import CompactCache, CompactLayer, fingerprint
from kvcat.compress import replay, trace
from kvcat.errors import InputError
from kvcat.losses import distillation_kl, next_token_loss
from kvcat.models import MaskedPass, load, logits_from_hidden
from kvcat.policies import RandomPolicy
from kvcat.training import train
from kvcat.training.objective import Objective

PREFIX, TOKENS = 20, 32


def some_tokens():
    return torch.randint(3, 200, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def test_a_suffix_sees_what_it_would_see_on_a_compact_cache_of_the_kept_slots(tiny_folder):
    model, _ = load(tiny_folder)
    tokens = some_tokens()
    with torch.no_grad(), MaskedPass(model, {0: RandomPolicy(0.4)}) as passes:
        out = passes.hidden(tokens, torch.Generator().manual_seed(1), prefix_len=PREFIX)
    traced = trace(model, tokens, prefix_len=PREFIX)
    slots = out.keep[0].nonzero()[:, 1].view(2, 1, -1, 1)
    layers = [
        CompactLayer(*(x.gather(2, slots.expand(-1, x.shape[1], -1, x.shape[3])) for x in layer))
        for layer in zip(traced.keys, traced.values, strict=True)
    ]
    cache = CompactCache(layers, PREFIX, fingerprint(model))
    assert cache.num_slots == 8
    answered = replay(model, cache, tokens[:, PREFIX:])
    torch.testing.assert_close(logits_from_hidden(model, out.masked_hidden), answered, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("teacher", ["self", "frozen"])
def test_the_objective_is_the_kl_of_the_suffixes_and_the_anchor_of_everything(teacher, tiny_folder, tmp_path):
    run = config(
        tiny_folder, "data", tmp_path / "run", policy="random", mask_weight=0.7, num_groups=1, prefix_range=(0.6, 0.6),
        teacher=teacher,
    )  # fmt: skip
    assert run.prefix_len_at(0) == run.prefix_len_at(None) == PREFIX
    model, _ = load(tiny_folder)
    objective, tokens = Objective(model, run), some_tokens()
    generators = [[torch.Generator().manual_seed(i) for i in range(2)] for _ in range(2)]
    total, record = objective(tokens, generators[0], range(2), 0)
    with torch.no_grad(), MaskedPass(model, {0: RandomPolicy(0.5)}) as passes:
        out = passes.hidden(tokens, generators[1], prefix_len=PREFIX)
        dense = model(tokens).logits
        kl = distillation_kl(dense[:, PREFIX:], logits_from_hidden(model, out.masked_hidden))
        anchor = next_token_loss(dense, tokens)
    assert record["kl"].item() == pytest.approx(kl.item(), rel=1e-5)
    assert record["dense_loss"].item() == pytest.approx(anchor.item(), rel=1e-5)
    expected = 0.7 * kl + (anchor if teacher == "self" else 0)  # the frozen teacher is the dense pass itself, so far
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("policy", ["router", "attention"])
def test_micro_batches_and_recomputed_activations_change_nothing(policy, tiny_folder, texts_folder, tmp_path):
    ways = {"whole": {}, "split": {"micro_batch_size": 1}, "again": {"activation_checkpointing": True}}
    told = {}
    for name, options in ways.items():
        run = config(
            tiny_folder, texts_folder, tmp_path / name, policy=policy, prefix_range=(0.25, 0.9), max_steps=3,
            peak_lr=1e-3, keep_range=(0.3, 0.6), **options,
        )  # fmt: skip
        train(run, progress=False)
        told[name] = records(run.output)
    assert told["whole"] == told["again"]
    for one, other in zip(told["whole"], told["split"], strict=True):
        assert one["kl"] == pytest.approx(other["kl"], rel=1e-2, abs=1e-6)
        assert one["kl"] > 1e-4 or one["kind"] == "validation"
        assert one["dense_loss"] == pytest.approx(other["dense_loss"], rel=1e-4)


def test_the_split_is_drawn_anew_each_step_from_the_seed_alone():
    run = config("model", "data", "out", prefix_range=(0.25, 0.9), seq_len=1024, micro_batch_size=2)
    lengths = [run.prefix_len_at(step) for step in range(400)]
    assert lengths == [run.prefix_len_at(step) for step in range(400)]
    assert set(lengths) == {64 * i for i in range(4, 15)}
    assert run.masked_share == pytest.approx(1 - 0.575)
    assert config("m", "d", "o", prefix_range=(1.0, 1.0), seq_len=64).prefix_len_at(0) == 62
    assert config("m", "d", "o", prefix_range=(0.001, 0.01), seq_len=64).prefix_len_at(0) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"prefix_range": (0.9, 0.2)}, "prefix_range is 0.9, 0.2"),
        ({"prefix_range": (0.0, 0.5)}, "prefix_range is 0.0, 0.5"),
        ({"prefix_range": (0.5, 0.5), "masked_fraction": 0.5}, "splits every sequence"),
    ],
)
def test_values_out_of_range_are_named(options, told):
    with pytest.raises(InputError, match=told):
        config("model", "data", "out", **options)


@pytest.mark.parametrize("prefix_len", [0, 32])
def test_a_split_needs_both_sides(prefix_len, tiny_folder):
    model, _ = load(tiny_folder)
    with MaskedPass(model, {0: RandomPolicy(0.5)}) as passes, pytest.raises(InputError, match=r"lie in 1\.\.31"):
        passes.hidden(some_tokens(), prefix_len=prefix_len)
