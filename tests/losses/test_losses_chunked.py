"""The chunked objective against the naive one, which holds all logits, and against answers that are
known."""

import pytest
import torch
from torch import nn

from kvcat import InputError
from kvcat.losses import (
    OutputHead,
    chunked_distillation,
    chunked_kl,
    chunked_objective,
    distillation_kl,
    next_token_loss,
)
from large_tensors import LargeTensors

BATCH = 2
TOKENS = 9
HIDDEN = 6
VOCAB = 13
ALL = {"bias": True, "scale": 2.5, "softcap": 1.5}
WIDE = {"hidden": 32, "vocab": 101}
WEIGHTS = {"mask_weight": 0.7, "anchor_weight": 1.3}


def make_head(
    *, bias=False, scale=1.0, softcap=None, hidden=HIDDEN, vocab=VOCAB, dtype=torch.float64
):
    linear = nn.Linear(hidden, vocab, bias=bias, dtype=dtype)
    for parameter, seed in zip(linear.parameters(), (7, 8), strict=False):
        values = torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        parameter.data = (values / hidden**0.5).to(dtype)
    return OutputHead(linear, scale, softcap)


def make_inputs(
    *, batch=BATCH, tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, dtype=torch.float64, seed=0
):
    generator = torch.Generator().manual_seed(seed)
    dense, noise = torch.randn(2, batch, tokens, hidden, generator=generator, dtype=torch.float64)
    ids = torch.randint(vocab, (batch, tokens), generator=generator)
    hidden = [x.detach().clone().to(dtype).requires_grad_() for x in (dense, dense + 0.5 * noise)]
    return *hidden, ids


def naive_total(head, dense, masked, ids, *, mask_weight=1.0, anchor_weight=1.0):
    logits = head.logits(dense)
    total = anchor_weight * next_token_loss(logits, ids)
    return (
        total
        if masked is None
        else total + mask_weight * distillation_kl(logits, head.logits(masked))
    )


def objective(head, dense, masked, ids, **options):
    """The chunked objective of the naive one's arguments: the state at t predicts the token at t +
    1."""
    masked = None if masked is None else masked[:, :-1]
    return chunked_objective(head, dense[:, :-1], masked, ids[:, 1:], **options)


def gradients(total, head, *hidden, **options):
    wanted = [x for x in (*hidden, *head.linear.parameters()) if x is not None and x.requires_grad]
    return torch.autograd.grad(total, wanted, **options)


def assert_equal(actual, expected, head, *hidden, **options):
    """Values and gradients agree to the rounding of float64."""
    assert abs(actual.item() - expected.item()) < 1e-12
    both = (gradients(total, head, *hidden, **options) for total in (actual, expected))
    for one, other in zip(*both, strict=True):
        assert one.dtype == other.dtype
        assert other.abs().max() > 1e-4
        assert (one - other).abs().max() < 1e-12


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize(
    ("options", "chunk"), [({}, 1000), ({"scale": -1.7}, 3), ({"softcap": 0.8}, 5), (ALL, None)]
)
def test_value_and_every_gradient_equal_the_naive_objective(options, chunk, control):
    head = make_head(**options)
    dense, masked, ids = make_inputs()
    masked = None if control else masked
    losses = objective(head, dense, masked, ids, **WEIGHTS, chunk_tokens=chunk, block_tokens=2)
    assert_equal(
        losses.total, naive_total(head, dense, masked, ids, **WEIGHTS), head, dense, masked
    )
    assert losses.dense_loss.item() == pytest.approx(
        next_token_loss(head.logits(dense), ids).item(), abs=1e-13
    )
    assert ((losses.masked_loss, losses.kl, losses.top1) == (None, None, None)) == control
    if not control:
        logits = head.logits(dense)
        masked_logits = head.logits(masked)
        same = (
            (logits[:, :-1].argmax(-1) == masked_logits[:, :-1].argmax(-1)).double().mean().item()
        )
        expected = [
            next_token_loss(masked_logits, ids).item(),
            distillation_kl(logits, masked_logits).item(),
            same,
        ]
        reported = (losses.masked_loss, losses.kl, losses.top1)
        assert [figure.item() for figure in reported] == pytest.approx(expected, abs=1e-13)
        assert 0.1 < same < 0.95
        assert not any(figure.requires_grad for figure in (*reported, losses.dense_loss))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch itself
@pytest.mark.parametrize(("options", "control"), [({}, False), (ALL, False), ({}, True)])
def test_a_compiled_block_gives_the_naive_value_and_every_gradient(options, control):
    head = make_head(**options)
    dense, masked, ids = make_inputs()
    masked = None if control else masked
    expected = naive_total(head, dense, masked, ids, **WEIGHTS)
    for chunk in (1000, 5):  # all positions at once; a last chunk of one position
        losses = objective(head, dense, masked, ids, **WEIGHTS, chunk_tokens=chunk, compiled=True)
        assert_equal(losses.total, expected, head, dense, masked, retain_graph=True)
    plain = objective(head, dense, masked, ids, **WEIGHTS)
    for name in ("dense_loss", "masked_loss", "kl", "top1"):
        torch.testing.assert_close(getattr(losses, name), getattr(plain, name))


@pytest.mark.parametrize("only", range(4), ids=["dense", "masked", "weight", "bias"])
def test_each_gradient_is_right_when_it_is_the_only_one(only):
    head = make_head(**ALL)
    dense, masked, ids = make_inputs()
    for number, tensor in enumerate((dense, masked, head.weight, head.bias)):
        tensor.requires_grad_(number == only)
    total = objective(head, dense, masked, ids, chunk_tokens=5).total
    assert_equal(total, naive_total(head, dense, masked, ids), head, dense, masked)


def test_equal_passes_have_no_kl_no_gradient_and_full_agreement():
    head = make_head(bias=True, softcap=2.0, dtype=torch.float32)
    dense, _, ids = make_inputs(dtype=torch.float32)
    losses = objective(head, dense, dense, ids, anchor_weight=0.0, chunk_tokens=4)
    assert (losses.total.item(), losses.kl.item(), losses.top1.item()) == (0.0, 0.0, 1.0)
    assert losses.dense_loss.item() == losses.masked_loss.item() > 0
    assert all(gradient.abs().max() == 0 for gradient in gradients(losses.total, head, dense))


def test_the_gradient_that_arrives_scales_all_gradients_in_every_backward():
    head = make_head(bias=True)
    dense, masked, ids = make_inputs()
    total = objective(head, dense, masked, ids, **WEIGHTS, chunk_tokens=5).total
    once, scaled, again = (
        gradients(total * x, head, dense, masked, retain_graph=True) for x in (1.0, -2048.0, 1.0)
    )
    assert all(torch.equal(b, -2048 * a) for a, b in zip(once, scaled, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_float64_as_the_naive_objective(dtype, autocast):
    stored = torch.float32 if autocast else dtype
    head = make_head(**ALL, **WIDE, dtype=stored)
    exact = make_head(**ALL, **WIDE)
    exact.linear.load_state_dict(head.linear.state_dict())
    dense, masked, ids = make_inputs(tokens=40, **WIDE, dtype=stored)
    wide = [x.detach().double().requires_grad_() for x in (dense, masked)]
    reference = gradients(naive_total(exact, *wide, ids), exact, *wide)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        naive = naive_total(head, dense, masked, ids)
        total = objective(head, dense, masked, ids, chunk_tokens=17).total
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(naive.item(), rel=2e-3)
    actual, plain = (gradients(x, head, dense, masked) for x in (total, naive))
    for ours, theirs, right in zip(actual, plain, reference, strict=True):
        assert ours.dtype == theirs.dtype == stored
        error, allowed = ((x.double() - right).norm() / right.norm() for x in (ours, theirs))
        assert error < min(0.02, 1.5 * allowed)


def test_a_scaled_loss_saves_float16_gradients_from_underflow():
    head = make_head(**WIDE, dtype=torch.float16)
    dense, masked, ids = make_inputs(batch=1, tokens=200, **WIDE, dtype=torch.float16)
    actual, expected = (
        torch.autograd.grad(
            objective(head, dense, masked, ids, mask_weight=w, anchor_weight=0.0).total / w, masked
        )[0]
        for w in (1e-5, 1.0)
    )
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("softcap", "block", "at_once"), [(None, 6, 5), (2.0, 6, 7), (None, 5, 2), (2.0, 5, 2)]
)
def test_no_tensor_is_larger_than_a_chunk_of_logits_and_few_of_those_live_at_once(
    softcap, block, at_once
):
    chunk = 6
    vocab = 97
    sizes = {"hidden": 5, "vocab": 97}
    head = make_head(**sizes, bias=True, softcap=softcap, dtype=torch.float32)
    dense, masked, ids = make_inputs(batch=3, tokens=21, **sizes, dtype=torch.float32)
    known = (dense, masked, ids, head.weight, head.bias)
    with LargeTensors(chunk * vocab, known) as chunked:
        losses = objective(head, dense, masked, ids, chunk_tokens=chunk, block_tokens=block)
        losses.total.backward()
    assert (chunked.largest, chunked.at_once) == (chunk * vocab, at_once)


def test_no_gradient_is_made_where_none_is_wanted():
    sizes = {"hidden": 64, "vocab": 31}
    head = make_head(**sizes, bias=True)
    dense, masked, ids = make_inputs(batch=1, tokens=5, **sizes)
    known = (dense, masked, ids, head.weight, head.bias)
    expected = objective(head, dense, masked, ids).total
    for enabled in (False, True):  # switched off; not required by any tensor
        with torch.set_grad_enabled(enabled), LargeTensors(0, known) as made:
            losses = objective(head, dense, masked, ids, chunk_tokens=2)
        assert not losses.total.requires_grad
        assert losses.total.item() == pytest.approx(expected.item(), abs=1e-13)
        assert made.largest < 31 * 64
        for x in known:
            x.requires_grad_(False)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_what_is_no_head_and_a_chunk_without_tokens_are_rejected_by_name():
    plain = nn.Linear(2, 3)
    for arguments, message in (
        ((Doubled(2, 3),), "Doubled"),
        ((nn.Sequential(plain),), "Sequential"),
        ((plain, 0.0), "0.0"),
        ((plain, torch.nan), "nan"),
        ((plain, 1.0, 0.0), "0.0"),
        ((plain, 1.0, -30.0), "-30.0"),
    ):
        with pytest.raises(InputError, match=message):
            OutputHead(*arguments)
    dense, masked, ids = make_inputs()
    for name in ("chunk_tokens", "block_tokens"):
        with pytest.raises(InputError, match=f"{name} is 0; it must be at least 1"):
            objective(make_head(), dense, masked, ids, **{name: 0})
    sharded = make_head()
    sharded.weight.placements = ()  # as a DTensor has them
    with pytest.raises(InputError, match="sharded"):
        objective(sharded, dense, masked, ids)


@pytest.mark.parametrize("chunk", [4, 256])
def test_distillation_from_another_model_in_chunks_equals_the_whole_in_value_and_every_gradient(
    chunk,
):
    teacher = make_head(bias=True)
    student = make_head(hidden=5, scale=0.5, softcap=3.0)
    taught = make_inputs()[0]
    learned = make_inputs(hidden=5, seed=1)[0]
    actual = chunked_kl(
        teacher, taught[:, :-1].detach(), student, learned[:, :-1], chunk_tokens=chunk
    )
    assert_equal(
        actual,
        distillation_kl(teacher.logits(taught.detach()), student.logits(learned)),
        student,
        learned,
    )


def test_distillation_under_one_head_equals_the_whole_and_gives_the_teacher_no_gradient():
    head = make_head(**ALL)
    teacher, hidden, _ = make_inputs()
    total = chunked_distillation(head, teacher[:, :-1], hidden[:, :-1])
    expected = distillation_kl(head.logits(teacher), head.logits(hidden))
    assert gradients(total, head, teacher, allow_unused=True, retain_graph=True)[0] is None
    assert_equal(total, expected, head, hidden)
    with pytest.raises(InputError, match="no position"):
        chunked_distillation(head, teacher[:, :0], hidden[:, :0])
