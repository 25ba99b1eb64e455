"""What the masked pass guarantees apart from its numbers, which test_models_oracle.py compares."""

from functools import partial

import pytest
import torch
from models_zoo import BASE, some_ids, supported
from torch import nn
from torch.utils.checkpoint import checkpoint

from kvcat.cache import layer_windows
from kvcat.models import MaskedPass, decoder_layers, logits_from_hidden, self_test
from kvcat.policies import AttentionMassPolicy, RandomPolicy, SparsificationPolicy
from tiny import loud_model

STARTS = (1, 2)
WINDOWS_IN_MASKS = {
    "phimoe": {"sliding_window": 5, "num_local_experts": 2},
    "qwen2_moe": {
        "sliding_window": 5,
        "use_sliding_window": True,
        "max_window_layers": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
    },
}


class Sigmoid(SparsificationPolicy):
    """A policy with a gradient and a mask far from the dense one."""

    reads = "hidden"

    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        )

    def forward(self, hidden, generators=None):
        return torch.sigmoid(
            nn.functional.layer_norm(hidden.to(self.weight.dtype), (32,)) @ self.weight
        )


class Counting(AttentionMassPolicy):
    """Counts its calls and whether they wanted gradients."""

    def forward(self, *args, **kwargs):
        self.calls = [*getattr(self, "calls", []), torch.is_grad_enabled()]
        return super().forward(*args, **kwargs)


POLICIES = {
    "sigmoid": Sigmoid,
    "random": lambda _: RandomPolicy(0.5),
    "attention": lambda _: Counting(0.5),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_activation_checkpointing_changes_no_gradient_and_calls_attention_policies_once_a_pass(
    policy, monkeypatch
):
    def call(self, *args, **options):
        return checkpoint(partial(nn.Module.__call__, self, **options), *args, use_reentrant=False)

    gradients = []
    for checkpointed in (None, "forward", "call"):
        model = supported("qwen2").train()
        if checkpointed == "forward":
            # the name changed in transformers 5.23
            old_name = getattr(model, "gradient_checkpointing_enable", None)
            switch_on = getattr(model, "activation_checkpointing_enable", old_name)
            switch_on({"use_reentrant": False})
        if checkpointed == "call":  # hooks run again, as in some versions of transformers
            monkeypatch.setattr(type(decoder_layers(model)[0]), "__call__", call)
        with MaskedPass(model, {s: POLICIES[policy](s) for s in STARTS}) as masked_pass:
            # two passes before any backward: each uses its own gates again
            out = [
                masked_pass.hidden(some_ids(seed=i), [torch.Generator().manual_seed(i)] * 2)
                for i in (0, 1)
            ]
            losses = [logits_from_hidden(model, x.masked_hidden).square().mean() for x in out]
            (losses[0] + 2 * losses[1]).backward()
            assert all(
                p.calls == [False, False]
                for p in masked_pass.policies.values()
                if policy == "attention"
            )
            gradients.append([p.grad for p in (*model.parameters(), *masked_pass.parameters())])
    for plain, *recomputed in zip(*gradients, strict=True):
        assert all(torch.equal(plain, other) for other in recomputed)


class Windows(AttentionMassPolicy):
    """Records the windows that it gets."""

    def forward(self, *args, **kwargs):
        self.windows = [*getattr(self, "windows", []), kwargs["window"]]
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("prefix_len", [None, 8])
@pytest.mark.parametrize("kind", WINDOWS_IN_MASKS)
def test_a_window_that_a_model_applies_in_its_mask_alone_holds_in_both_passes(kind, prefix_len):
    options = {**BASE, **WINDOWS_IN_MASKS[kind], "pad_token_id": None}
    model = loud_model(kind, **options)
    ids = some_ids()
    with torch.no_grad():
        stock = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    policies = {0: Windows(1.0), 1: Windows(1.0), 2: Windows(1.0)}  # which keep every slot
    with MaskedPass(model, policies) as masked_pass, torch.no_grad():
        out = masked_pass.hidden(ids, prefix_len=prefix_len)
    torch.testing.assert_close(out.dense_hidden, stock, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.masked_hidden, stock[:, prefix_len:], rtol=1e-4, atol=1e-4)
    expected = layer_windows(model.config)
    assert [policy.windows for policy in policies.values()] == [[window] for window in expected]
    assert 5 in expected
    self_test(model, split=True)


def test_a_closed_pass_leaves_the_model_as_it_was():
    model = supported("llama").train()
    with MaskedPass(model, {0: Sigmoid(0)}) as masked_pass:
        masked_pass.hidden(some_ids())
    assert list(masked_pass.state_dict()) == ["policies.0.weight"]
    assert not any(layer._forward_pre_hooks for layer in decoder_layers(model))


def test_bfloat16_autocast_masks_the_same_slots_and_reaches_the_policies():
    model = supported("qwen2", dtype=torch.float32).train()
    ids = some_ids()
    with MaskedPass(model, {s: Sigmoid(s).float() for s in STARTS}) as masked_pass:
        whole = masked_pass.hidden(ids).masked_hidden
        with torch.autocast("cpu", torch.bfloat16):
            half = masked_pass.hidden(ids).masked_hidden
        half.float().square().mean().backward()
    assert (half.float() - whole).norm() < 0.05 * whole.norm()
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in masked_pass.parameters())


@pytest.mark.parametrize("policy", ["sigmoid", "random"])
def test_a_detached_prefix_learns_nothing_from_the_masked_pass_and_the_suffix_as_before(policy):
    # No token occurs twice.
    ids = torch.arange(3, 15)[None]
    gradients = {}
    for detached in (False, True):
        model = supported("qwen2")
        with MaskedPass(
            model, {s: POLICIES[policy](s) for s in STARTS}, detach_prefix=detached
        ) as masked_pass:
            out = masked_pass.hidden(
                ids, [torch.Generator().manual_seed(0)] * len(ids), prefix_len=8
            )
            out.masked_hidden.square().sum().backward()
            assert all(p.grad.abs().sum() > 0 for p in masked_pass.parameters())
        gradients[detached] = model.get_input_embeddings().weight.grad
    assert gradients[False][3:11].abs().amax(-1).min() > 0
    assert gradients[True][3:11].abs().max() == 0
    torch.testing.assert_close(gradients[True][11:15], gradients[False][11:15])
