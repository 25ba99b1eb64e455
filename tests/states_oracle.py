"""transformers' forward of a whole text, with masks in the layers of full attention.

The queries behind a prefix do not see the slots of the prefix that were evicted.
"""

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask


def oracle_attention(module, query, key, value, attention_mask, seen=None, s_aux=None, **options):
    """Attention written out, with the mask of a layer in ``seen`` in the place of transformers'."""
    repeats = query.shape[1] // key.shape[1]
    mask = attention_mask
    if seen is not None and module.layer_idx in seen:
        mask = seen[module.layer_idx].repeat_interleave(repeats, dim=1)
    keys = key.repeat_interleave(repeats, dim=1)
    values = value.repeat_interleave(repeats, dim=1)
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    mass = (query @ keys.mT * scaling).masked_fill(~mask, -torch.inf).exp()
    total = mass.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + s_aux.exp()[:, None, None]
    return (mass / total @ values).transpose(1, 2).contiguous(), None


def oracle_mask(**options):
    return sdpa_mask(**{**options, "allow_is_causal_skip": False})


AttentionInterface.register("oracle", oracle_attention)
AttentionMaskInterface.register("oracle", oracle_mask)


@torch.no_grad()
def stock_logits(model, ids, prefix, seen=None):
    """Logits behind the prefix by transformers' forward of the whole text."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager" if seen is None else "oracle")
    options = {} if seen is None else {"seen": seen}
    logits = model(input_ids=ids, use_cache=False, **options).logits[:, prefix:]
    model.set_attn_implementation(before)
    return logits


def visible(cache, num_tokens):
    """By layer, which keys each token sees: all earlier ones, but behind the prefix its slots."""
    seen = {}
    prefix = cache.num_tokens
    for number, layer in zip(cache.layer_numbers, cache.layers, strict=True):
        mask = torch.ones(*layer.counts.shape, num_tokens, num_tokens, dtype=torch.bool).tril()
        kept = torch.zeros(*layer.counts.shape, prefix, dtype=torch.bool)
        kept.scatter_(2, layer.positions, True)
        mask[:, :, prefix:, :prefix] = kept[:, :, None]
        seen[number] = mask
    return seen
