"""Attention heads with structure, and where kept keys come from (a helper of the tests)."""

from dataclasses import replace

import torch

from kvcat.compress.heads import HeadBatch
from tiny import layer_of


def structured_head(prefix=192, queries=160, dim=16, seed=0):
    """Keys in clusters, a sink, queries that look for a few clusters each."""
    draw = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(12, dim, generator=draw)
    topic = torch.randint(0, 12, (prefix,), generator=draw)
    keys = centres[topic] + 0.5 * torch.randn(prefix, dim, generator=draw)
    values = centres[topic].roll(1, -1) + torch.randn(prefix, dim, generator=draw)
    wanted = centres[torch.randint(0, 12, (queries,), generator=draw)]
    looks = (wanted + torch.randn(queries, dim, generator=draw)) * dim**-0.5
    return head_batch(looks[None], keys[None], values[None])


def head_batch(queries, keys, values, factors=None):
    """Heads whose queries give all attention to the prefix."""
    factors = torch.ones_like(queries[..., 0]) if factors is None else factors
    return HeadBatch(queries, factors, torch.full_like(factors, -torch.inf), keys, values)


def tensors(cache, *names):
    """All tensors of a cache by layer and name, or those of some names, as ``assert_close``
    compares them."""
    return [
        {name: x for name, x in layer.tensors().items() if not names or name in names}
        for layer in cache.layers
    ]


def first_slots(cache, counts):
    """The first slots of every head, as many as ``counts`` (layer, example, head) says."""
    layers = []
    for layer, rows in zip(cache.layers, counts, strict=True):
        states = (layer.keys, layer.values, layer.log_bias, layer.positions)
        chosen = [
            [[states_of_kind[b, h, :n] for h, n in enumerate(row)] for b, row in enumerate(rows)]
            for states_of_kind in states
        ]
        layers.append(layer_of(*chosen))
    return replace(cache, layers=layers)


def positions_of(kept, states):
    """The position of every kept key or value among all of them."""
    return (kept.unsqueeze(3) == states.unsqueeze(2)).all(-1).float().argmax(-1)


def plain_error(block, dense, slots):
    """Output error of the kept keys with their original values and no log-bias, by the formula."""
    take = slots.unsqueeze(-1)
    keys = block.keys.gather(1, take.expand(-1, -1, block.keys.shape[-1]))
    values = block.values.gather(1, take.expand(-1, -1, block.values.shape[-1]))
    attended = (block.queries @ keys.mT).softmax(-1) @ values
    return (attended - dense.outputs).square().sum((1, 2))


def eager_attention(model, ids, is_seen=None):
    """Attention weights of every layer by transformers' own eager path: (batch, heads, tokens,
    tokens); ``is_seen`` is False for tokens that no query sees."""
    eager = type(model)._from_config(model.config, attn_implementation="eager").to(model.dtype)
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        mask = None if is_seen is None else is_seen.expand_as(ids)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        return eager(
            ids, attention_mask=mask, position_ids=positions, output_attentions=True
        ).attentions
