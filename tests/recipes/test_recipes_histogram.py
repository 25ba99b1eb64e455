import dataclasses
import math

import pytest
import torch

from kvcat.attention import attend_reference
from kvcat.errors import InputError
from kvcat.losses import budget_loss
from kvcat.policies import RandomPolicy
from kvcat.recipes import histogram
from kvcat.recipes.histogram import (
    HistogramConfig,
    draw_sequences,
    make_network,
    running_histograms,
    task_errors,
    train_histogram,
)
from kvcat.recipes.histogram_network import dense_pass, masked_pass
from kvcat.theory.compression import answer, compress, prefix_cache
from kvcat.theory.definitions import sequences
from kvcat.theory.histogram import incompressible_histogram

TINY = HistogramConfig(longest=5, width=8, key_width=4, hidden_width=16, num_steps=30, batch_size=16)


class KeepAt(RandomPolicy):
    """Scores 1 at position 0 and the given ones, whatever the draw."""

    def __init__(self, *positions):
        super().__init__(0.5)
        self.positions = positions

    def forward(self, hidden, generator=None):
        scores = hidden.new_zeros(hidden.shape[:2])
        scores[:, [0, *self.positions]] = 1.0
        return scores


def network(**changes):
    made = make_network(dataclasses.replace(TINY, **changes))
    return made.requires_grad_(False).transformer()


def tokens(count=7, length=5, seed=3):
    return torch.randint(0, 3, (count, length), generator=torch.Generator().manual_seed(seed))


def test_every_position_of_the_dense_pass_is_the_transformer_on_the_beginning():
    model, rows = network(), tokens()
    outputs = dense_pass(model, rows)[-1]
    for length in range(1, 6):
        assert torch.allclose(outputs[:, length - 1], model(rows[:, :length]), atol=1e-13, rtol=0)


def test_a_masked_pass_that_keeps_everything_is_the_dense_pass():
    model, rows = network(), tokens()
    policies = {0: KeepAt(1, 2, 3, 4), 1: KeepAt(1, 2, 3, 4)}
    out = masked_pass(model, rows, policies, torch.Generator())
    assert torch.allclose(out.values, dense_pass(model, rows)[-1], atol=1e-13, rtol=0)


def test_behind_a_prefix_the_masked_pass_is_the_theorys_compressed_model_on_the_kept_slots():
    model, rows, n = network(), tokens(), 3
    kept = {0: [0, 2], 1: [0, 1]}
    policies = {0: KeepAt(2), 1: KeepAt(1)}
    out = masked_pass(model, rows, policies, torch.Generator(), dense=dense_pass(model, rows), prefix_len=n)
    evict = [lambda keys, values, at=at: (keys[at], values[at]) for at in kept.values()]
    for row, values in zip(rows, out.values, strict=True):
        cache = compress(evict, prefix_cache(model, row[:n]))
        for k in (1, 2):
            assert torch.allclose(values[k - 1], answer(model, cache, n, row[n : n + k]), atol=1e-13, rtol=0)
    assert not torch.allclose(out.values, dense_pass(model, rows)[-1][:, n:], atol=1e-3)


def test_a_masked_sequence_sees_the_kept_slots_of_earlier_tokens_in_its_own_keys_and_values():
    model, rows = network(), tokens()
    out = masked_pass(model, rows, {0: KeepAt(2), 1: KeepAt(3)}, torch.Generator())
    x = model.embed(rows)
    for block, kept in zip(model.blocks, ((0, 2), (0, 3)), strict=True):
        (head,) = block.heads
        keep = torch.zeros(len(rows), 5, dtype=torch.float64)
        keep[:, list(kept)] = 1
        q, k, v = ((x @ w)[:, None] for w in (head.w_q, head.w_k, head.w_v))
        x = block.feed_forward(attend_reference(q, k, v, keep)[:, 0] @ block.w_o + x)
    assert torch.allclose(out.values, x, atol=1e-13, rtol=0)
    assert out.keep[0].sum() == 2 * len(rows)


def test_blocks_before_the_first_group_stay_dense():
    model, rows, n = network(), tokens(), 3
    states = dense_pass(model, rows)
    out = masked_pass(model, rows, {1: KeepAt()}, torch.Generator(), dense=states, prefix_len=n)
    cache = prefix_cache(model, rows[0, :n])
    (keys, values), whole = cache[1][0], cache[0]
    expected = answer(model, (whole, ((keys[:1], values[:1]),)), n, rows[0, n:])
    assert torch.allclose(out.values[0, -1], expected, atol=1e-13, rtol=0)


def test_a_masked_pass_behind_a_prefix_needs_the_dense_states():
    with pytest.raises(ValueError, match="prefix of 3 tokens"):
        masked_pass(network(), tokens(), {0: KeepAt()}, torch.Generator(), prefix_len=3)


def test_running_histograms_are_those_of_the_construction():
    rows = sequences(3, 4)
    construction = incompressible_histogram(3, 4).with_causal_mask()
    assert torch.allclose(running_histograms(rows, 3), dense_pass(construction, rows)[-1], atol=1e-12, rtol=0)
    assert max(task_errors(construction)) < 1e-12


def test_the_task_error_of_a_model_that_answers_nothing_is_known():
    silent = network()
    last = silent.blocks[-1]
    mute = dataclasses.replace(last.feed_forward, w_2=torch.zeros_like(last.feed_forward.w_2))
    silent = dataclasses.replace(silent, blocks=(silent.blocks[0], dataclasses.replace(last, feed_forward=mute)))
    rms, worst = task_errors(silent)
    assert worst == pytest.approx(1.0, abs=1e-12)
    # E || hist ||^2 of n independent uniform symbols is 1/m + (1 - 1/m) / n
    expected = sum(1 / 3 + (2 / 3) / n for n in range(1, 6)) / 5
    assert rms == pytest.approx(math.sqrt(expected), abs=1e-12)


def test_drawn_sequences_have_every_count_vector_equally_often():
    rows = draw_sequences(30000, 3, 2, torch.Generator().manual_seed(0))
    counts = rows.sum(1).bincount(minlength=4) / 30000
    assert torch.allclose(counts, torch.full((4,), 0.25), atol=4 * math.sqrt(0.25 * 0.75 / 30000))


def test_methods_of_one_seed_start_from_the_same_weights_and_variants_differ_where_they_say():
    usual, random = (make_network(dataclasses.replace(TINY, method=method)) for method in ("usual", "random"))
    for mine, other in zip(usual.parameters(), random.parameters(), strict=True):
        assert torch.equal(mine, other)
    plain, uniform = network(), network(uniform=True, mixing=False)
    assert torch.equal(plain.blocks[1].heads[0].w_v, uniform.blocks[1].heads[0].w_v)
    assert not uniform.blocks[0].w_o.any()
    assert uniform.blocks[1].w_o.any()
    assert not any(block.heads[0].w_q.any() or block.heads[0].w_k.any() for block in uniform.blocks)
    assert not network(positions=False).embedding.diff(dim=1).any()


@pytest.mark.parametrize("method", ["usual", "router", "random"])
def test_training_is_a_function_of_its_configuration(method):
    config = dataclasses.replace(TINY, method=method, num_steps=6)
    first, second = train_histogram(config), train_histogram(config)
    assert first.parameters.keys() == second.parameters.keys()
    assert all(torch.equal(first.parameters[name], second.parameters[name]) for name in first.parameters)
    other = train_histogram(dataclasses.replace(config, seed=1))
    assert not torch.equal(first.parameters["symbol_table"], other.parameters["symbol_table"])
    assert len(first.kept) == (0 if method == "usual" else 2)


def test_fixed_weights_stay_fixed_while_the_others_learn():
    trained = train_histogram(dataclasses.replace(TINY, uniform=True, mixing=False, positions=False)).model
    untrained = network(uniform=True, mixing=False, positions=False)
    assert not trained.blocks[0].w_o.any()
    assert not trained.blocks[1].heads[0].w_q.any()
    assert not trained.embedding.diff(dim=1).any()
    assert not torch.equal(trained.blocks[1].w_o, untrained.blocks[1].w_o)


def test_a_mask_weight_of_zero_trains_as_the_usual_way_does():
    usual = train_histogram(dataclasses.replace(TINY, num_steps=5))
    masked = train_histogram(dataclasses.replace(TINY, num_steps=5, method="random", mask_weight=0.0))
    for name, tensor in usual.parameters.items():
        assert torch.allclose(tensor, masked.parameters[name], atol=1e-12, rtol=0), name


@pytest.mark.parametrize("method", ["router", "random"])
def test_the_objective_is_the_papers_with_squared_errors_and_a_teacher_without_gradient(method):
    config = dataclasses.replace(TINY, method=method, mask_weight=0.7, budget_weight=0.3, masking="sequence")
    made, policies = make_network(config), histogram._make_policies(config)
    parameters = [*made.parameters(), *(p for policy in policies.values() for p in policy.parameters())]
    data, masks = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    loss, (distance, *kept) = histogram._objective(config, made, policies, data, masks)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)

    data, masks = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    rows = draw_sequences(config.batch_size, config.longest, 3, data)
    model = made.transformer()
    dense = dense_pass(model, rows)[-1]
    coupling = "surrogate" if method == "router" else "none"
    out = masked_pass(model, rows, policies, masks, coupling=coupling)
    per_position = config.batch_size * config.longest
    task = ((dense - running_histograms(rows, 3)) ** 2).sum() / per_position
    teaching = ((dense.detach() - out.values) ** 2).sum() / per_position
    expected = task + 0.7 * teaching
    if method == "router":
        for scores in out.scores.values():
            expected = expected + 0.3 / 2 * budget_loss((scores > 0.5).double(), scores, config.target_keep)
    for mine, other in zip(gradients, torch.autograd.grad(expected, parameters, allow_unused=True), strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or torch.allclose(mine, other, atol=1e-12)
    assert distance == pytest.approx(float(teaching.detach()))
    assert kept == pytest.approx([float(mask.detach().mean()) for mask in out.keep.values()])


def test_a_heavier_distillation_brings_the_masked_pass_closer():
    light, heavy = (
        train_histogram(dataclasses.replace(TINY, method="random", num_steps=120, mask_weight=weight))
        for weight in (1e-4, 1.0)
    )
    assert heavy.masked_rms < 0.9 * light.masked_rms


def test_a_random_policy_keeps_its_share_and_a_router_moves_towards_its_target():
    random = train_histogram(dataclasses.replace(TINY, method="random", masking="sequence", target_keep=0.4))
    assert random.kept == pytest.approx((0.4, 0.4), abs=1e-12)
    start = dataclasses.replace(TINY, method="router", budget_weight=3.0, num_steps=10)
    first, later = train_histogram(start), train_histogram(dataclasses.replace(start, num_steps=150))
    assert all(b < a for a, b in zip(first.kept, later.kept, strict=True))


def test_a_small_network_learns_the_histogram():
    trained = train_histogram(dataclasses.replace(TINY, num_steps=300, batch_size=32, peak_lr=1e-2))
    always_the_mean = math.sqrt(sum((2 / 3) / n for n in range(1, 6)) / 5)
    assert trained.rms_error < 0.35 * always_the_mean < trained.max_error


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": "wizard"}, "wizard"),
        ({"masking": "never"}, "never"),
        ({"num_symbols": 1}, "num_symbols must be at least 2, got 1"),
        ({"longest": 2}, "longest must be at least 3, got 2"),
        ({"group_starts": (0, 2)}, "group start 2 does not exist"),
        ({"target_keep": 1.0}, r"target_keep must lie in \(0, 1\), got 1.0"),
    ],
)
def test_a_wrong_setting_is_named(wrong, message):
    with pytest.raises(InputError, match=message):
        HistogramConfig(**wrong)
