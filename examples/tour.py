"""Attention Matching, written out: from a text to a compact cache and to attention over it.

    python examples/tour.py

Read it from top to bottom. Every step is plain linear algebra on the tensors of one KV head, and
the last step compares all of it with what kvcat computes. The equations are those of KV-CAT's
appendix "Suffix perplexity under prefix KV cache compression", paragraph "Attention-Matching"; the
method is AM-HighestAttnKeys of Zweiger et al. 2026 (arXiv:2602.16284).

Symbols: K, V are the keys and values of the prefix in one KV head, L of them; Q are the queries of
the text after it, of all query heads that read this KV head; C1, beta, C2 are the keys, the
log-bias and the values of the slots that are kept.
"""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AttentionInterface

import kvcat
from kvcat.compress import replay

PREFIX_LEN = 320
SUFFIX_LEN = 120
NUM_SLOTS = 32
LOW = math.exp(-3)  # the box of exp(beta)
HIGH = math.exp(3)
IDENTITY = torch.eye(NUM_SLOTS, dtype=torch.float64)


class Slots(NamedTuple):
    """What is kept of one KV head."""

    positions: Tensor  # of the tokens whose keys are kept, (slots,)
    keys: Tensor  # C1, (slots, head_dim)
    log_bias: Tensor  # beta, (slots,)
    values: Tensor  # C2, (slots, head_dim)


class Layer(NamedTuple):
    """What one layer's attention was given."""

    queries: Tensor  # after rotation, (query heads, tokens, head_dim)
    keys: Tensor  # after rotation, (KV heads, tokens, head_dim)
    values: Tensor  # (KV heads, tokens, head_dim)
    scale: float  # 1 / sqrt(head_dim)


# Step 1: attention, and what it reads.
#
# Equation (attention): softmax(Q K^T / sqrt(d)) V, where a token sees those up to itself. Several
# query heads read one KV head (grouped-query attention).
#
# With a compact cache, every token sees all slots as well. This is all that an engine has to do to
# use one: the softmax runs over [Q C1^T / sqrt(d) + beta, Q K_later^T / sqrt(d)], and the values
# are [C2, V_later]. The later tokens have their usual keys, without a bias.


def causal_mask(num_tokens: int) -> Tensor:
    """True where a token (row) does not see another one (column)."""
    return torch.ones(num_tokens, num_tokens).triu(1).bool()


def attention(layer: Layer, compact: list[Slots] | None) -> Tensor:
    """Outputs, (query heads, tokens, head_dim); the slots of each KV head come before the text."""
    is_later = causal_mask(layer.keys.shape[1])
    outputs = []
    for head, queries in enumerate(layer.queries):
        kv_head = head * len(layer.keys) // len(layer.queries)
        scores = layer.scale * queries @ layer.keys[kv_head].T
        scores = scores.masked_fill(is_later, -torch.inf)
        values = layer.values[kv_head]
        if compact is not None:
            slots = compact[kv_head]
            of_slots = layer.scale * queries @ slots.keys.T + slots.log_bias
            scores = torch.cat([of_slots, scores], dim=1)
            values = torch.cat([slots.values, values])
        outputs.append(scores.softmax(dim=1) @ values)
    return torch.stack(outputs)


@torch.no_grad()
def forward(
    model: torch.nn.Module, ids: Tensor, cache: list[list[Slots]] | None = None
) -> tuple[Tensor, list[Layer]]:
    """Logits of a text, (tokens, vocabulary), and what each layer's attention was given.

    With a compact cache the text follows the prefix: its first token has position PREFIX_LEN,
    because positions count tokens, not slots.
    """
    layers: list[Layer] = []

    def attend(module, query, key, value, _mask, scaling, **_):
        layer = Layer(query[0], key[0], value[0], scaling)
        layers.append(layer)
        compact = None if cache is None else cache[module.layer_idx]
        return attention(layer, compact).transpose(0, 1).unsqueeze(0), None

    AttentionInterface.register("tour", attend)
    model.set_attn_implementation("tour")
    first = 0 if cache is None else PREFIX_LEN
    positions = torch.arange(first, first + ids.shape[1]).unsqueeze(0)
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits[0], layers


# Step 2: the paper's method, for one KV head.


def match_as_in_the_paper(layer: Layer, kv_head: int) -> Slots:
    """The slots of one KV head, fitted to the queries of the text after the prefix."""
    keys = layer.keys[kv_head, :PREFIX_LEN]
    values = layer.values[kv_head, :PREFIX_LEN]
    queries = queries_after_the_prefix(layer, kv_head)

    # The dense attention over the prefix alone, which the slots are to reproduce:
    # softmax(Q K^T / sqrt(d)) V, (queries, L) times (L, head_dim).
    scores = layer.scale * queries @ keys.T
    weights = scores.softmax(dim=1)
    outputs = weights @ values

    # C1: the keys with the largest root-mean-square attention weight over the queries. They are
    # keys of the model, unchanged, so they keep their rotary positions.
    importance = weights.square().mean(dim=0).sqrt()
    positions = importance.topk(NUM_SLOTS).indices.sort().values
    kept = scores[:, positions]

    # beta: few slots carry too little attention mass. With w = exp(beta), find w so that
    # sum_j exp(q.c_j / sqrt(d)) w_j = sum_t exp(q.k_t / sqrt(d)) for every query q, the dense
    # normaliser: least squares with w in the box [e^-3, e^3]. Both sides are divided by the
    # exponential of the query's largest score, so that no number overflows. The paper takes two
    # steps of projected gradient from the clamped solution without a box.
    largest = scores.amax(dim=1, keepdim=True)
    design = (kept - largest).exp()
    mass = (scores - largest).exp().sum(dim=1)
    solution = torch.linalg.lstsq(design, mass.unsqueeze(1), driver="gelsd").solution
    w = solution.squeeze(1).clamp(LOW, HIGH)
    step = 1 / torch.linalg.matrix_norm(design, 2).square()
    for _ in range(2):
        gradient = design.T @ (design @ w - mass)
        w = (w - step * gradient).clamp(LOW, HIGH)
    log_bias = w.log()

    # C2: softmax(Q C1^T / sqrt(d) + beta) C2 = the dense outputs, by ridge least squares. The
    # ridge is 1e-4 of the squared spectral norm of the weights ("spectral scaling").
    compact_weights = (kept + log_bias).softmax(dim=1)
    gram = compact_weights.T @ compact_weights
    ridge = 1e-4 * torch.linalg.matrix_norm(compact_weights, 2).square()
    fitted = torch.linalg.solve(gram + ridge * IDENTITY, compact_weights.T @ outputs)
    return Slots(positions, keys[positions], log_bias, fitted)


def queries_after_the_prefix(layer: Layer, kv_head: int) -> Tensor:
    """Q: the queries of all query heads that read one KV head, one below the other."""
    of_heads = layer.queries.unflatten(0, (len(layer.keys), -1))[kv_head]
    return of_heads[:, PREFIX_LEN:].flatten(0, 1)


# Step 3: what kvcat's default changes.
#
# (a) A query that attends mostly to later text says little about the prefix: its error counts by
#     the share of its attention that goes to the prefix.
# (b) Few queries leave many solutions. The log-bias is pulled to 0 (w to 1), and the values to the
#     original ones, instead of to nothing. Both pulls are relative to the usual squared length of
#     a column: the squared spectral norm is nearly that of the attention sink alone.
# (c) The problem of the log-bias is solved, not left after two steps.
#
# The default also fits to the prefix's own queries, moved to positions right after it
# (own_weight; kvcat.compress.queries), and allocates more slots to heads that need them
# (budgets="adaptive"; kvcat.compress.budgets). Both are left out here.


def match_as_kvcat_does(layer: Layer, kv_head: int) -> Slots:
    """As ``match_as_in_the_paper``, with the changes (a) to (c)."""
    keys = layer.keys[kv_head, :PREFIX_LEN]
    values = layer.values[kv_head, :PREFIX_LEN]
    later_keys = layer.keys[kv_head, PREFIX_LEN:]
    queries = queries_after_the_prefix(layer, kv_head)
    scores = layer.scale * queries @ keys.T
    weights = scores.softmax(dim=1)

    # (a) The share of the prefix: exp(log_mass) / (exp(log_mass) + the mass on later text).
    log_mass = scores.logsumexp(dim=1)
    is_later = causal_mask(len(later_keys)).repeat(len(queries) // len(later_keys), 1)
    later = (layer.scale * queries @ later_keys.T).masked_fill(is_later, -torch.inf)
    share = (log_mass - later.logsumexp(dim=1)).sigmoid().unsqueeze(1)

    importance = (share * weights).square().mean(dim=0).sqrt()
    positions = importance.topk(NUM_SLOTS).indices.sort().values
    kept = scores[:, positions]

    # (b), (c) Every equation is divided by the query's whole mass, and multiplied by its share:
    # minimise |A w - share|^2 + 0.15 s |w - 1|^2 in the box, s the usual squared column.
    design = share * (kept - log_mass.unsqueeze(1)).exp()
    pull = 0.15 * usual_square(design)
    gram = design.T @ design + pull * IDENTITY
    target = (design.T @ share).squeeze(1) + pull
    # Columns of equal length make the steps of projected gradient large: w = v / length.
    length = gram.diagonal().sqrt()
    gram = gram / length / length.unsqueeze(1)
    step = 1 / torch.linalg.matrix_norm(gram, 2)
    v = length.clone()
    for _ in range(3_000):
        v = (v - step * (gram @ v - target / length)).clamp(LOW * length, HIGH * length)
    log_bias = (v / length).log()

    # (b) The ridge pulls each value to that of its key: solve for the change from it.
    compact_weights = share * (kept + log_bias).softmax(dim=1)
    missing = share * (weights @ values) - compact_weights @ values[positions]
    ridge = 0.05 * usual_square(compact_weights)
    gram = compact_weights.T @ compact_weights + ridge * IDENTITY
    change = torch.linalg.solve(gram, compact_weights.T @ missing)
    return Slots(positions, keys[positions], log_bias, values[positions] + change)


def usual_square(matrix: Tensor) -> Tensor:
    """Mean squared length of the columns without the longest one."""
    squares = matrix.square().sum(dim=0)
    return (squares.sum() - squares.max()) / (len(squares) - 1)


# Step 4: all heads, a file, and the text that follows.


def compress(layers: list[Layer], match: Callable[[Layer, int], Slots]) -> list[list[Slots]]:
    """The slots of all KV heads of all layers; no head depends on another one."""
    return [[match(layer, head) for head in range(len(layer.keys))] for layer in layers]


def save_and_load(cache: list[list[Slots]], path: Path) -> list[list[Slots]]:
    """The cache after a way through a file: four tensors a layer are all that it is."""
    tensors = {}
    for layer, heads in enumerate(cache):
        for name, of_heads in zip(Slots._fields, zip(*heads, strict=True), strict=True):
            tensors[f"{layer}.{name}"] = torch.stack(of_heads)  # (KV heads, slots, ...)
    save_file(tensors, path)
    loaded = load_file(path)
    of_layers = ([loaded[f"{n}.{name}"] for name in Slots._fields] for n in range(len(cache)))
    return [[Slots(*of_head) for of_head in zip(*layer, strict=True)] for layer in of_layers]


# Step 5: the same by kvcat.


def difference(ours: Tensor, kvcats: Tensor) -> float:
    """The relative difference |ours - kvcat's| / |kvcat's|."""
    return float((ours - kvcats).norm() / kvcats.norm())


def check(cache: list[list[Slots]], compact: kvcat.CompactCache) -> dict[str, float]:
    """The largest difference of any head from kvcat's cache; the kept tokens must be the same."""
    largest = {"keys": 0.0, "w": 0.0, "values": 0.0}
    for heads, layer in zip(cache, compact.layers, strict=True):
        for index, slots in enumerate(heads):
            same = layer.head(0, index)
            assert torch.equal(slots.positions, same.positions)
            # kvcat stops when a step moves no w by more than 1e-5
            w = (slots.log_bias.exp(), same.log_bias.exp())
            pairs = {"keys": (slots.keys, same.keys), "w": w}
            pairs["values"] = (slots.values, same.values)
            for name, both in pairs.items():
                largest[name] = max(largest[name], difference(*both))
    return largest


def main() -> None:
    """Compress a text in both forms, and compare every number with kvcat's."""
    model, tokenizer = kvcat.load("kvcat-base", dtype="float64")  # no rounding hides a mistake
    text = Path(__file__).with_name("minutes.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : PREFIX_LEN + SUFFIX_LEN]
    suffix = ids[:, PREFIX_LEN:]
    dense, layers = forward(model, ids)
    dense = dense[PREFIX_LEN:].log_softmax(dim=1)
    trace = kvcat.trace(model, ids, PREFIX_LEN)
    forms = {
        "paper": (match_as_in_the_paper, kvcat.AttentionMatching("paper", num_queries=None)),
        "kvcat": (match_as_kvcat_does, kvcat.AttentionMatching(budgets="equal", own_weight=0)),
    }
    print(f"{PREFIX_LEN} tokens in {NUM_SLOTS} slots; differences from kvcat, relative:")
    for name, (match, method) in forms.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache.safetensors"
            cache = save_and_load(compress(layers, match), path)
        logits, _ = forward(model, suffix, cache)
        compact = method(trace, num_slots=NUM_SLOTS)
        differences = check(cache, compact)
        differences["logits"] = difference(logits, replay(model, compact, suffix)[0])
        shown = ", ".join(f"{what} {number:.1e}" for what, number in differences.items())
        kl = (dense.exp() * (dense - logits.log_softmax(dim=1))).sum(dim=1).mean()
        print(f"{name}: {shown}; KL {kl:.4f} nats per token")
        assert max(differences.values()) < 1e-3, shown


if __name__ == "__main__":
    main()
