"""The chunked objective against the naive one, which holds all logits, and against answers that are known."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcat import InputError
from kvcat.losses import (
    OutputHead,
    chunked_kl,
    chunked_objective,
    default_chunk_tokens,
    distillation_kl,
    next_token_loss,
)

BATCH, TOKENS, HIDDEN, VOCAB = 2, 9, 6, 13
HEADS = {
    "matrix": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -1.7},
    "soft-cap": {"softcap": 0.8},
    "bias, scale and soft-cap": {"bias": True, "scale": 2.5, "softcap": 1.5},
}
WEIGHTS = {"mask_weight": 0.7, "anchor_weight": 1.3}


def make_head(*, bias=False, scale=1.0, softcap=None, hidden=HIDDEN, vocab=VOCAB, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        linear = nn.Linear(hidden, vocab, bias=bias, dtype=dtype)
    return OutputHead(linear, scale, softcap)


def make_inputs(*, batch=BATCH, tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(batch, tokens, hidden, generator=generator, dtype=torch.float64)
    masked = dense + 0.5 * torch.randn(batch, tokens, hidden, generator=generator, dtype=torch.float64)
    ids = torch.randint(vocab, (batch, tokens), generator=generator)
    return dense.to(dtype).requires_grad_(), masked.to(dtype).requires_grad_(), ids


def naive_total(head, dense, masked, ids, *, mask_weight=1.0, anchor_weight=1.0):
    logits = head.logits(dense)
    total = anchor_weight * next_token_loss(logits, ids)
    return total if masked is None else total + mask_weight * distillation_kl(logits, head.logits(masked))


def gradients(total, head, *hidden):
    wanted = [x for x in (*hidden, *head.linear.parameters()) if x.requires_grad]
    return torch.autograd.grad(total, wanted)


def largest_difference(found, expected):
    assert len(found) == len(expected) > 0
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(found, expected, strict=True))
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "chunk"), [*((kind, 3) for kind in HEADS), ("bias, scale and soft-cap", None), ("matrix", 1000)]
)
def test_value_and_every_gradient_equal_the_naive_objective(kind, chunk):
    head, (dense, masked, ids) = make_head(**HEADS[kind]), make_inputs()
    expected = naive_total(head, dense, masked, ids, **WEIGHTS)
    found = chunked_objective(head, dense, masked, ids, **WEIGHTS, chunk_tokens=chunk).total
    assert abs(found.item() - expected.item()) < 1e-12
    reference = gradients(expected, head, dense, masked)
    assert all(gradient.abs().max() > 1e-4 for gradient in reference)
    assert largest_difference(gradients(found, head, dense, masked), reference) < 1e-12


@pytest.mark.parametrize("kind", ["matrix", "bias, scale and soft-cap"])
def test_the_control_is_the_next_token_loss_alone(kind):
    head, (dense, _, ids) = make_head(**HEADS[kind]), make_inputs()
    expected = naive_total(head, dense, None, ids, anchor_weight=1.3)
    losses = chunked_objective(head, dense, None, ids, anchor_weight=1.3, chunk_tokens=5)
    assert abs(losses.total.item() - expected.item()) < 1e-12
    assert largest_difference(gradients(losses.total, head, dense), gradients(expected, head, dense)) < 1e-12
    assert (losses.masked_loss, losses.kl, losses.top1) == (None, None, None)


@pytest.mark.parametrize("kind", ["matrix", "bias, scale and soft-cap"])
def test_the_parts_are_those_of_the_naive_objective_without_gradient(kind):
    head, (dense, masked, ids) = make_head(**HEADS[kind]), make_inputs(batch=4, tokens=40)
    losses = chunked_objective(head, dense, masked, ids, **WEIGHTS, chunk_tokens=7)
    logits, masked_logits = head.logits(dense), head.logits(masked)
    same = (logits[:, :-1].argmax(-1) == masked_logits[:, :-1].argmax(-1)).double().mean().item()
    assert losses.dense_loss.item() == pytest.approx(next_token_loss(logits, ids).item(), abs=1e-13)
    assert losses.masked_loss.item() == pytest.approx(next_token_loss(masked_logits, ids).item(), abs=1e-13)
    assert losses.kl.item() == pytest.approx(distillation_kl(logits, masked_logits).item(), abs=1e-13)
    assert 0.1 < same < 0.95
    assert losses.top1.item() == pytest.approx(same, abs=1e-15)
    assert not any(x.requires_grad for x in (losses.dense_loss, losses.masked_loss, losses.kl, losses.top1))


def with_parameters(head, weight, bias):
    linear = nn.Linear(1, 1, bias=False)
    del linear.weight, linear.bias
    linear.weight, linear.bias = weight, bias
    return OutputHead(linear, head.scale, head.softcap)


def test_equal_passes_have_no_kl_no_gradient_and_full_agreement():
    head, (dense, _, ids) = make_head(bias=True, softcap=2.0, dtype=torch.float32), make_inputs(dtype=torch.float32)
    masked = dense.detach().clone().requires_grad_()
    losses = chunked_objective(head, dense, masked, ids, anchor_weight=0.0, chunk_tokens=4)
    assert (losses.total.item(), losses.kl.item(), losses.top1.item()) == (0.0, 0.0, 1.0)
    assert losses.dense_loss.item() == losses.masked_loss.item() > 0
    assert all(gradient.abs().max() == 0 for gradient in gradients(losses.total, head, dense, masked))


def test_the_last_position_predicts_nothing_and_gets_no_gradient():
    head, (dense, masked, ids) = make_head(), make_inputs()
    losses = chunked_objective(head, dense, masked, ids)
    other = masked.detach().clone()
    other[:, -1] += 1
    assert chunked_objective(head, dense, other, ids).total.item() == losses.total.item()
    assert all(g[:, -1].abs().max() == 0 for g in torch.autograd.grad(losses.total, (dense, masked)))


def test_the_gradient_that_arrives_scales_all_gradients_as_often_as_asked():
    head, (dense, masked, ids) = make_head(bias=True), make_inputs()
    total = chunked_objective(head, dense, masked, ids, **WEIGHTS, chunk_tokens=5).total
    wanted = (dense, masked, head.weight, head.bias)
    once = torch.autograd.grad(total, wanted, retain_graph=True)
    scaled = torch.autograd.grad(total * -2048.0, wanted, retain_graph=True)
    again = torch.autograd.grad(total, wanted)
    assert all(torch.equal(b, -2048 * a) for a, b in zip(once, scaled, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("only", ["dense", "masked", "weight", "bias"])
def test_each_gradient_is_right_when_it_is_the_only_one(only):
    head, (dense, masked, ids) = make_head(bias=True, scale=2.0, softcap=1.0), make_inputs()
    candidates = {"dense": dense, "masked": masked, "weight": head.weight, "bias": head.bias}
    for name, tensor in candidates.items():
        tensor.requires_grad_(name == only)
    found = torch.autograd.grad(chunked_objective(head, dense, masked, ids, chunk_tokens=5).total, candidates[only])
    expected = torch.autograd.grad(naive_total(head, dense, masked, ids), candidates[only])
    assert largest_difference(found, expected) < 1e-12


def test_a_tied_weight_collects_the_gradients_of_both_its_uses():
    head, (_, _, ids) = make_head(), make_inputs()

    def passes():
        dense = nn.functional.embedding(ids, head.weight).sin()
        return dense, dense * 0.5

    found = torch.autograd.grad(chunked_objective(head, *passes(), ids, chunk_tokens=5).total, head.weight)
    expected = torch.autograd.grad(naive_total(head, *passes(), ids), head.weight)
    assert largest_difference(found, expected) < 1e-12


@contextmanager
def precision(dtype, autocast):
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        yield


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["matrix", "bias, scale and soft-cap"])
def test_half_precision_is_as_close_to_float64_as_the_naive_objective(kind, dtype, autocast):
    sizes = {"hidden": 32, "vocab": 101}
    stored = torch.float32 if autocast else dtype
    head = make_head(**HEADS[kind], **sizes, dtype=stored)
    dense, masked, ids = make_inputs(tokens=40, **sizes, dtype=stored)
    exact = OutputHead(nn.Linear(32, 101, bias=head.bias is not None, dtype=torch.float64), head.scale, head.softcap)
    exact.linear.load_state_dict(head.linear.state_dict())
    wide = [x.detach().double().requires_grad_() for x in (dense, masked)]
    reference = gradients(naive_total(exact, *wide, ids), exact, *wide)

    with precision(dtype, autocast):
        naive = naive_total(head, dense, masked, ids)
        losses = chunked_objective(head, dense, masked, ids, chunk_tokens=17)
    assert losses.total.dtype == torch.float32
    assert losses.total.item() == pytest.approx(naive.item(), rel=2e-3)
    scale = 2.0**10 if dtype == torch.float16 else 1.0
    found, plain = (gradients(total * scale, head, dense, masked) for total in (losses.total, naive))
    for ours, theirs, right in zip(found, plain, reference, strict=True):
        assert ours.dtype == theirs.dtype == stored
        error, allowed = ((x.double() / scale - right).norm() / right.norm() for x in (ours, theirs))
        assert error < 0.02
        assert error < 1.5 * allowed


def test_a_scaled_loss_saves_float16_gradients_from_underflow():
    sizes = {"hidden": 32, "vocab": 101}
    head = make_head(**sizes, dtype=torch.float16)
    dense, masked, ids = make_inputs(batch=1, tokens=200, **sizes, dtype=torch.float16)
    small = chunked_objective(head, dense, masked, ids, mask_weight=1e-5, anchor_weight=0.0).total
    large = chunked_objective(head, dense, masked, ids, mask_weight=1.0, anchor_weight=0.0).total
    found, expected = (torch.autograd.grad(x, masked)[0] for x in (small * 1e5, large))
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)


class LargeTensors(TorchDispatchMode):
    """Records every new tensor: the largest, and how many of at least ``size`` elements live at one time."""

    def __init__(self, size, known):
        super().__init__()
        self.size, self.largest, self.at_once = size, 0, 0
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.numel())
                if x.numel() >= self.size:
                    storage = StorageWeakRef(x.untyped_storage())
                    self.live[storage.cdata] = storage
        self.live = {data: storage for data, storage in self.live.items() if not storage.expired()}
        self.at_once = max(self.at_once, len(self.live))
        return out


@pytest.mark.parametrize(("softcap", "at_once"), [(None, 3), (2.0, 5)])
def test_no_tensor_is_larger_than_a_chunk_of_logits_and_few_of_those_live_at_once(softcap, at_once):
    chunk, vocab, sizes = 6, 97, {"hidden": 5, "vocab": 97}
    head = make_head(**sizes, bias=True, softcap=softcap, dtype=torch.float32)
    dense, masked, ids = make_inputs(batch=3, tokens=21, **sizes, dtype=torch.float32)
    known = (dense, masked, ids, head.weight, head.bias)
    with LargeTensors(chunk * vocab, known) as chunked:
        chunked_objective(head, dense, masked, ids, chunk_tokens=chunk).total.backward()
    with LargeTensors(chunk * vocab, known) as naive:
        naive_total(head, dense, masked, ids).backward()
    assert chunked.largest == chunk * vocab
    assert chunked.at_once == at_once
    assert naive.largest >= 60 * vocab


@pytest.mark.parametrize(
    ("device", "vocab", "tokens"),
    [("meta", 2**16, 2**10), ("meta", 2**27, 1), ("cpu", 11, 256), ("cpu", 2**20, 64)],
)
def test_the_default_chunk_has_two_to_the_26_logits_and_on_a_cpu_at_most_256_tokens(device, vocab, tokens):
    assert default_chunk_tokens(OutputHead(nn.Linear(1, vocab, bias=False, device=device))) == tokens


@pytest.mark.parametrize("why", ["no_grad", "nothing requires it"])
def test_no_gradient_is_made_where_none_is_wanted(why):
    sizes = {"hidden": 64, "vocab": 31}
    head = make_head(**sizes, bias=True)
    dense, masked, ids = make_inputs(batch=1, tokens=5, **sizes)
    known = (dense, masked, ids, head.weight, head.bias)
    expected = chunked_objective(head, dense, masked, ids).total
    for x in known if why != "no_grad" else ():
        x.requires_grad_(False)
    with torch.set_grad_enabled(why != "no_grad"), LargeTensors(0, known) as made:
        losses = chunked_objective(head, dense, masked, ids, chunk_tokens=2)
    assert not losses.total.requires_grad
    assert losses.total.item() == pytest.approx(expected.item(), abs=1e-13)
    assert made.largest < 31 * 64


@pytest.mark.parametrize("chunk", [0])
def test_a_chunk_without_tokens_is_refused_with_its_value(chunk):
    head, (dense, masked, ids) = make_head(), make_inputs()
    with pytest.raises(InputError, match=f"chunk_tokens must be at least 1, got {chunk}"):
        chunked_objective(head, dense, masked, ids, chunk_tokens=chunk)


@contextmanager
def one_process() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_a_sharded_weight_is_refused_and_an_unsharded_one_taken():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    head, (dense, masked, ids) = make_head(), make_inputs()
    expected = chunked_objective(head, dense, masked, ids).total.item()
    with one_process():
        sharded = distribute_tensor(head.weight.data, init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(InputError, match="sharded"):
            chunked_objective(with_parameters(head, sharded, None), dense, masked, ids)
        whole = with_parameters(head, sharded.full_tensor(), None)
        assert chunked_objective(whole, dense, masked, ids).total.item() == expected


def test_a_head_that_is_not_a_matrix_is_refused_by_name():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(InputError, match="Doubled"):
        OutputHead(Doubled(2, 3))
    with pytest.raises(InputError, match="Sequential"):
        OutputHead(nn.Sequential(nn.Linear(2, 3)))


@pytest.mark.parametrize("options", [{"scale": 0.0}, {"scale": float("nan")}, {"softcap": 0.0}, {"softcap": -30.0}])
def test_a_scale_or_soft_cap_out_of_range_is_refused_with_its_value(options):
    with pytest.raises(InputError, match=str(*options.values())):
        OutputHead(nn.Linear(2, 3), **options)


@pytest.mark.parametrize("chunk", [4, None])
def test_distillation_from_another_model_in_chunks_equals_the_whole_in_value_and_every_gradient(chunk):
    torch.manual_seed(0)
    teacher, student = (nn.Linear(width, 11, bias=bias).double() for width, bias in ((6, True), (5, False)))
    heads = OutputHead(teacher), OutputHead(student, scale=0.5, softcap=3.0)
    taught = torch.randn(2, 7, 6, dtype=torch.float64)
    learned = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    inputs = [learned, student.weight]
    ours = chunked_kl(heads[0], taught, heads[1], learned, chunk)
    naive = distillation_kl(heads[0].logits(taught), heads[1].logits(learned))
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=0)
    for a, b in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(naive, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
