"""Activation checkpointing of a model's decoder layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kvcat.models.structure import decoder_layers


@contextmanager
def recomputing(model: PreTrainedModel, *, enabled: bool = True) -> Iterator[None]:
    """Inside the block, every decoder layer keeps only its input and runs again in the backward
    pass.

    transformers' activation checkpointing drops the cache. This one passes the cache on. The cache
    must be read-only, so that a layer's second run gets the same cache as the first.
    """
    layers = decoder_layers(model) if enabled else []
    replaced = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
        yield
    finally:
        for layer, forward in zip(layers, replaced, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
