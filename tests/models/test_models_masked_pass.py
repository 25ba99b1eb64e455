import pytest
import torch
from models_zoo import SUPPORTED, StaysDouble, supported
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvcat.attention import COUPLINGS, attend_coupled_reference
from kvcat.errors import InputError
from kvcat.models import MaskedPass, decoder_layers, logits_from_hidden, self_test
from kvcat.policies import AttentionMassPolicy, RandomPolicy, Router, SparsificationPolicy

STARTS = (1, 2)


class Sigmoid(SparsificationPolicy):
    """A policy with a gradient and a mask far from the dense one."""

    reads, learned = "hidden", True

    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))

    def forward(self, hidden, generator=None):
        return torch.sigmoid(nn.functional.layer_norm(hidden.to(self.weight.dtype), (32,)) @ self.weight)


POLICIES = {
    "sigmoid": Sigmoid,
    "random": lambda _: RandomPolicy(0.5),
    "attention": lambda _: AttentionMassPolicy(0.5),
}


def tokens(seed=0, batch=2, length=12):
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def eager_with_infinities(module, query, key, value, attention_mask, scaling=None, oracle=None, **kwargs):
    """An independent masked pass: only masked rows, softmax written out, -inf where a slot is hidden."""
    layer_keep, coupling = oracle
    start = max((s for s in STARTS if s <= module.layer_idx), default=None)
    window = kwargs.get("sliding_window")
    keep = torch.ones(query.shape[0], query.shape[2], dtype=torch.float64) if start is None else layer_keep(start)
    if coupling is not None and start is not None:
        out = attend_coupled_reference(query, key, value, keep, scale=scaling, window=window, coupling=coupling)
        return out.transpose(1, 2), None
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(groups, 1)) * scaling
    i, j = torch.arange(query.shape[2])[:, None], torch.arange(query.shape[2])[None]
    seen = (j <= i) & (j > i - (window or 10**6)) & (keep[:, None, None, :] > 0)
    seen = seen | (~seen.any(-1, keepdim=True) & (i == j))
    weights = torch.exp(scores.masked_fill(~seen, -torch.inf))
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bhqk,bhkd->bqhd", weights, value.repeat_interleave(groups, 1)), None


AttentionInterface.register("test-oracle", eager_with_infinities)
AttentionMaskInterface.register("test-oracle", sdpa_mask)


def oracle_logits(model, ids, keep, coupling=None):
    """The model's masked rows alone, through the independent attention; keep is a dict or a function of the start."""
    get = keep if callable(keep) else keep.__getitem__
    model.set_attn_implementation("test-oracle")
    try:
        with StaysDouble():
            return model(input_ids=ids, use_cache=False, oracle=(get, coupling)).logits
    finally:
        model.set_attn_implementation("kvcat")


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_supported_family_passes_its_self_test(kind):
    self_test(supported(kind, dtype=torch.float32))


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_supported_family_can_run_suffixes_again(kind):
    self_test(supported(kind, dtype=torch.float32), split=True)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma", "qwen3", "mistral"])
@pytest.mark.parametrize("policy", POLICIES)
def test_dense_rows_are_the_stock_model_and_masked_rows_are_eager_masking(kind, policy):
    model, ids = supported(kind), tokens()
    with StaysDouble():
        stock = model(input_ids=ids, use_cache=False).logits
        with MaskedPass(model, {s: POLICIES[policy](s) for s in STARTS}) as masked_pass:
            out = masked_pass(ids, torch.Generator().manual_seed(0))
    assert (out.dense_logits - stock).abs().max() < 1e-12
    keep = {s: k.detach() for s, k in out.keep.items()}
    assert all(0 < k[:, 1:].mean() < 1 and k[:, 0].all() for k in keep.values())
    assert (out.masked_logits - stock).abs().max() > 1e-2
    assert (out.masked_logits - oracle_logits(model, ids, keep)).abs().max() < 1e-10


@pytest.mark.parametrize("kind", ["qwen2", "gemma", "mistral"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_gradients_of_model_and_policies_equal_the_naive_twins(kind, coupling):
    model, ids = supported(kind), tokens()
    policies = {s: Sigmoid(s) for s in STARTS}
    weights = [p for p in model.parameters() if p.requires_grad]
    routers = [p.weight for p in policies.values()]
    coefficients = torch.randn(2, 12, 61, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    with StaysDouble(), MaskedPass(model, policies, coupling=coupling) as masked_pass:
        out = masked_pass(ids)
        fast = torch.autograd.grad((out.masked_logits * coefficients).sum(), weights + routers, allow_unused=True)

    inputs = {}
    handles = [
        layer.register_forward_pre_hook(lambda m, a, i=i: inputs.__setitem__(i, a[0]))
        for i, layer in enumerate(decoder_layers(model))
    ]
    gates = {}

    def keep(start):
        if start not in gates:
            scores = policies[start](inputs[start])
            straight_through = (scores.detach() > 0.5).double() + scores - scores.detach()
            gates[start] = torch.cat([torch.ones(2, 1, dtype=torch.float64), straight_through[:, 1:]], dim=1)
        return gates[start]

    naive_logits = oracle_logits(model, ids, keep, coupling)
    for handle in handles:
        handle.remove()
    naive = torch.autograd.grad((naive_logits * coefficients).sum(), weights + routers, allow_unused=True)
    for a, b in zip(fast, naive, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-7, atol=1e-7 * b.abs().max().item())
    assert all(g is not None for g in fast[-2:])


@pytest.mark.parametrize("policy", POLICIES)
def test_activation_checkpointing_changes_no_gradient(policy):
    gradients = []
    for checkpointed in (False, True):
        model = supported("qwen2").train()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        with MaskedPass(model, {s: POLICIES[policy](s) for s in STARTS}) as masked_pass:
            # two passes before any backward: each finds its own gates again
            losses = [
                masked_pass(tokens(i), torch.Generator().manual_seed(i)).masked_logits.square().mean() for i in (0, 1)
            ]
            (losses[0] + 2 * losses[1]).backward()
            gradients.append([p.grad for p in (*model.parameters(), *masked_pass.parameters())])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_an_attention_policy_is_asked_once_per_pass_even_when_layers_run_again():
    calls = []

    class Counting(AttentionMassPolicy):
        def forward(self, *args, **kwargs):
            calls.append(torch.is_grad_enabled())
            return super().forward(*args, **kwargs)

    model = supported("llama").train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    with MaskedPass(model, {0: Counting(0.5), 2: Counting(0.5)}) as masked_pass:
        masked_pass(tokens()).masked_logits.sum().backward()
    assert calls == [False, False]


def test_reentrant_checkpointing_is_refused():
    model = supported("llama").train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    with MaskedPass(model, {0: Sigmoid(0)}) as masked_pass, pytest.raises(InputError, match="use_reentrant"):
        masked_pass(tokens())


def test_a_fresh_router_leaves_the_masked_pass_dense():
    model = supported("qwen2", dtype=torch.float32)
    with MaskedPass(model, {s: Router(32) for s in STARTS}) as masked_pass:
        out = masked_pass(tokens())
    assert torch.allclose(out.dense_logits, out.masked_logits, atol=1e-5)
    assert all(k.all() for k in out.keep.values())


def test_no_masked_logit_depends_on_later_tokens():
    model, ids = supported("mistral"), tokens()
    changed = ids.clone()
    changed[:, 7:] = 5
    with MaskedPass(model, {s: Sigmoid(s) for s in STARTS}) as masked_pass:
        before, after = masked_pass(ids), masked_pass(changed)
    assert torch.allclose(before.masked_logits[:, :7], after.masked_logits[:, :7], atol=1e-6)
    assert not torch.allclose(before.masked_logits[:, 7:], after.masked_logits[:, 7:], atol=1e-2)


def test_one_seed_gives_one_mask_and_groups_draw_their_own():
    model, ids = supported("llama"), tokens(length=40)
    with MaskedPass(model, {s: RandomPolicy(0.5) for s in STARTS}) as masked_pass:
        a, b = (masked_pass(ids, torch.Generator().manual_seed(4)) for _ in range(2))
        generator = torch.Generator().manual_seed(4)
        masked_pass(ids, generator)
        c = masked_pass(ids, generator)
    assert torch.equal(a.keep[1], b.keep[1])
    assert not torch.equal(a.keep[1], a.keep[2])
    assert not torch.equal(a.keep[1], c.keep[1])


def test_closing_takes_every_hook_off():
    model, ids = supported("llama"), tokens()
    masked_pass = MaskedPass(model, {0: Sigmoid(0)})
    masked_pass.close()
    masked_pass.close()
    assert not any(layer._forward_pre_hooks for layer in decoder_layers(model))
    with pytest.raises(InputError, match="closed"):
        masked_pass(ids)


def test_its_parameters_are_the_policies_alone():
    with MaskedPass(supported("llama"), {0: Sigmoid(0)}) as masked_pass:
        assert [p.shape for p in masked_pass.parameters()] == [(32,)]
        assert list(masked_pass.state_dict()) == ["policies.0.weight"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": {3: Sigmoid(0)}}, "3"),
        ({"policies": {}}, "empty"),
        ({"tau": 1.0}, "1.0"),
        ({"coupling": "hard"}, "hard"),
    ],
)
def test_a_mistake_is_one_line(options, message):
    with pytest.raises(InputError, match=message):
        MaskedPass(supported("llama"), **{"policies": {0: Sigmoid(0)}, **options})


@pytest.mark.parametrize("kind", ["gemma3_text", "cohere2", "granite", "phi"])
def test_logits_from_hidden_apply_the_models_own_scale_and_cap(kind):
    model, ids = supported(kind), tokens()
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.allclose(logits_from_hidden(model, hidden), model(input_ids=ids, use_cache=False).logits, atol=1e-12)


def test_bfloat16_autocast_masks_the_same_slots_and_reaches_the_policies():
    model, ids = supported("qwen3", dtype=torch.float32).train(), tokens()
    with MaskedPass(model, {s: Sigmoid(s).float() for s in STARTS}) as masked_pass:
        whole = masked_pass(ids)
        with torch.autocast("cpu", torch.bfloat16):
            half = masked_pass(ids)
        half.masked_logits.float().square().mean().backward()
    assert (half.masked_logits.float() - whole.masked_logits).norm() < 0.05 * whole.masked_logits.norm()
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in masked_pass.parameters())
