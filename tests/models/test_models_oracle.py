"""The masked pass against the paper's formulas, written out on a stock model: logits and all
gradients, float64.

The reference shares nothing with kvcat but the random policy's draw, which it is given: it runs the
two passes apart, forms every matrix of attention weights and reads the router from the paper's
appendix.
"""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from kvcat.losses import budget_loss, distillation_kl, next_token_loss
from kvcat.models import MaskedPass, logits_from_hidden
from kvcat.models.exact_copy import StaysDouble
from kvcat.policies import build_policies
from naive import allowed, attention_mass, masked_attention, router_scores
from tiny import stock_model

SIZES = {
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
STOCK = {
    "qwen2": {},
    "llama": {},
    "gemma": {"num_key_value_heads": 1, "head_dim": 6},
    "qwen3": {"head_dim": 6},
    "mistral": {"sliding_window": 5},
    "smollm3": {"pad_token_id": 0, "no_rope_layers": [1, 1, 0, 1]},
    "gpt_oss": {  # sinks, and every second layer with a window
        "pad_token_id": 0,
        "head_dim": 8,
        "sliding_window": 5,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
    },
}
TAU = 0.5
TARGET = 0.5
BUDGET_WEIGHT = 0.1
TOKENS = 19


@dataclass
class Naive:
    """What the reference's attention reads (prefix length, gates) and writes, by layer, in one
    pass.

    With a prefix_len only later tokens are affected by the mask, and only earlier slots are hidden.
    """

    prefix_len: int | None = None
    gates: dict[int, torch.Tensor] = field(default_factory=dict)
    # queries, keys, scale, window and sinks
    seen: dict[int, tuple] = field(default_factory=dict)


NAIVE = Naive()


def naive_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    sliding_window=None,
    s_aux=None,
    **kwargs,
):
    """Attention over {j <= t : m_j = 1}, the derivative by m at the dense attention."""
    layer = module.layer_idx
    tokens = query.shape[2]
    NAIVE.seen[layer] = query, key, scaling, sliding_window, s_aux
    m = torch.ones(())
    if layer in NAIVE.gates:
        m = NAIVE.gates[layer][:, None, None, :]
        if NAIVE.prefix_len is not None:
            m = functional.pad(m, (0, tokens - m.shape[-1]), value=1.0)
            m = torch.where(torch.arange(tokens)[:, None] >= NAIVE.prefix_len, m, 1.0)
    reach = allowed(tokens, sliding_window)
    out = masked_attention(query, key, value, m, reach, scaling, sinks=s_aux)
    return out.transpose(1, 2), None


AttentionInterface.register("naive-oracle", naive_attention)


def naive_attention_scores(layer, dense, prefix_len):
    """1 for position 0 and the slots with the largest attention received, TARGET of all, halves
    up."""
    *states, scale, window, sinks = dense.seen[layer]
    states = [x[:, :, :prefix_len].detach() for x in states]
    mass = attention_mass(*states, scale, window, sinks if sinks is None else sinks.detach())
    mass[:, 0] = torch.inf
    kept = mass.topk(int(TARGET * mass.shape[1] + 0.5), dim=1).indices
    return torch.zeros_like(mass).scatter(1, kept, 1.0)


def naive_objective(dense, masked, tokens, scores, prefix_len=None):
    """KL(sg dense || masked) + next-token loss of dense + 0.1 budget, each as the appendix writes
    it."""
    p = dense[:, :-1].softmax(-1).detach()
    log_p = dense[:, :-1].log_softmax(-1)
    kl = (p * (p.log() - masked[:, :-1].log_softmax(-1))).sum(-1)[:, prefix_len:].mean()
    anchor = -log_p.gather(-1, tokens[:, 1:, None]).mean()
    budgets = []
    for score in scores.values():
        F = (score > TAU).double().mean(1)
        G = score.mean(1)
        budgets.append((F * G / TARGET + (1 - F) * (1 - G) / (1 - TARGET)).mean())
    return kl + anchor + BUDGET_WEIGHT * sum(budgets) / len(budgets)


def naive_passes(model, policies, tokens, *, drawn=None, prefix_len=None):
    """Dense logits, masked logits, masks and scores of a stock model, from two separate passes.

    ``drawn`` are the scores of a policy that is neither learned nor reads attention.
    """
    global NAIVE
    model.set_attn_implementation("naive-oracle")
    NAIVE = dense_pass = Naive()
    dense = model(input_ids=tokens, use_cache=False).logits
    NAIVE = Naive(prefix_len)
    scores = {}

    def hook(layer):
        def decide(module, args, kwargs):
            if layer in policies:
                policy = policies[layer]
                hidden = (args[0] if args else kwargs["hidden_states"])[:, :prefix_len]
                if policy.reads == "attention":
                    scores[layer] = naive_attention_scores(layer, dense_pass, prefix_len)
                else:
                    scores[layer] = (
                        router_scores(policy, hidden) if list(policy.parameters()) else drawn[layer]
                    )
            group = max((c for c in policies if c <= layer), default=None)
            if group is not None:
                s = scores[group]
                m = (s > TAU).double() + (s - s.detach())
                NAIVE.gates[layer] = torch.cat([torch.ones_like(m[:, :1]), m[:, 1:]], 1)

        return decide

    hooks = [
        block.register_forward_pre_hook(hook(i), with_kwargs=True)
        for i, block in enumerate(model.model.layers)
    ]
    masked = model(input_ids=tokens, use_cache=False).logits
    for handle in hooks:
        handle.remove()
    return dense, masked, {layer: NAIVE.gates[layer].detach() for layer in policies}, scores


def tiny(name):
    """A random model, in float64, whose attention is far from uniform and whose biases are not
    zero."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = stock_model(name, **SIZES | STOCK[name]).double().eval()
        model.config._experts_implementation = "eager"  # others have no float64
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * (0.25 if parameter.ndim > 1 else 0.1)
    return model


def policies_for(name, group_starts):
    """Noise and seed are such that the routers keep about half of the tokens of every model."""
    made = build_policies(
        name,
        num_layers=4,
        hidden_size=16,
        group_starts=group_starts,
        target=TARGET,
        feature_dim=5,
        noise=20.0,
        seed=27,
    )
    for policy in made.values():
        policy.double()
        if list(policy.parameters()):
            nn.init.constant_(policy.alpha, 0.6)
    return made


def some_tokens():
    return torch.randint(41, (2, TOKENS), generator=torch.Generator().manual_seed(3))


def gradients(loss, modules):
    parameters = {
        f"{i}.{n}": p for i, module in enumerate(modules) for n, p in module.named_parameters()
    }
    return dict(
        zip(
            parameters,
            torch.autograd.grad(loss, list(parameters.values()), allow_unused=True),
            strict=True,
        )
    )


def sources(seed):
    """A source of chance for each of the two sequences."""
    return [torch.Generator().manual_seed(10 * seed + number) for number in range(2)]


def compare(model_name, policy_name, *, group_starts=(0, 2), prefix_len=None):
    tokens = some_tokens()
    policies = policies_for(policy_name, group_starts)
    stock = tiny(model_name)
    ours = tiny(model_name)
    with MaskedPass(ours, policies, tau=TAU) as masked_pass:
        out = masked_pass.hidden(tokens, sources(5), prefix_len=prefix_len)
        ours_dense, ours_masked = (
            logits_from_hidden(ours, h) for h in (out.dense_hidden, out.masked_hidden)
        )
    budgets = [budget_loss((out.scores[c] > TAU).double(), out.scores[c], TARGET) for c in policies]
    taught = distillation_kl(ours_dense[:, prefix_len:], ours_masked)
    loss = taught + next_token_loss(ours_dense, tokens)
    actual = gradients(
        loss + BUDGET_WEIGHT * sum(budgets) / len(budgets), [ours, *policies.values()]
    )
    dense, masked, keep, scores = naive_passes(
        stock, policies, tokens, drawn=out.scores, prefix_len=prefix_len
    )
    expected = gradients(
        naive_objective(dense, masked, tokens, scores, prefix_len), [stock, *policies.values()]
    )

    for layer in policies:
        assert 0.25 < keep[layer].mean() < 0.85
        torch.testing.assert_close(out.keep[layer].double(), keep[layer], rtol=0, atol=0)
        torch.testing.assert_close(out.scores[layer], scores[layer], rtol=1e-9, atol=1e-11)
    assert (dense - masked).abs().max() > 1e-2
    torch.testing.assert_close(ours_dense, dense, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(ours_masked, masked[:, prefix_len:], rtol=1e-9, atol=1e-10)
    for name, gradient in expected.items():
        assert (gradient is None) == (actual[name] is None), name
        if gradient is not None:
            # Gemma's norm casts its weight, and so the weight's gradient, to float32
            rtol, atol = (1e-5, 1e-7) if model_name == "gemma" and "norm" in name else (1e-7, 1e-9)
            torch.testing.assert_close(
                actual[name], gradient, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )
    return expected


@pytest.mark.parametrize("prefix_len", [None, 9])
@pytest.mark.parametrize(
    ("model", "policy"),
    [
        *((model, "router") for model in STOCK),
        ("qwen2", "random"),
        ("mistral", "attention"),
        pytest.param("gpt_oss", "attention", marks=pytest.mark.slow),
    ],
)
def test_the_masked_pass_equals_the_naive_reference_in_logits_and_all_gradients(
    model, policy, prefix_len
):
    starts = (1, 3) if model == "llama" else (0, 2)  # layers before the first group stay dense
    with (
        StaysDouble()
    ):  # the norms' float32 would round shared gradients before their sum, not after it
        expected = compare(model, policy, group_starts=starts, prefix_len=prefix_len)
    assert all(
        gradient is not None and gradient.abs().max() > 1e-6 for gradient in expected.values()
    )


def test_random_masks_differ_between_groups_and_sequences_and_repeat_with_the_seed():
    with MaskedPass(tiny("qwen2"), policies_for("random", (0, 2))) as masked_pass:
        made = [masked_pass.hidden(some_tokens(), sources(s)).keep for s in (5, 5, 6)]
    first, again, other = (torch.cat([keep[0], keep[2]]) for keep in made)
    assert torch.equal(first, again)
    assert (
        len(torch.cat([first, other]).unique(dim=0)) == 8
    )  # two groups of two sequences, two seeds
    assert (first.sum(1) == 10).all()
