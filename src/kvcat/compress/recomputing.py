"""Activations made anew in the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kvcat.models import decoder_layers


@contextmanager
def recomputing(model: PreTrainedModel, enabled: bool = True) -> Iterator[None]:
    """Inside, every decoder layer keeps only its input for the backward pass and runs again there.

    transformers' own activation checkpointing drops the cache. This one hands it on, so it must be a read-only one:
    a layer's second run meets it as the first did.

    Args:
        model: its layers' forwards are wrapped for the time being.
        enabled: False changes nothing.
    """
    layers = decoder_layers(model) if enabled else []
    before = [(layer, layer.__dict__.get("forward")) for layer in layers]
    try:
        for layer, _ in before:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for layer, own in before:
            if own is None:
                del layer.forward
            else:
                layer.forward = own
