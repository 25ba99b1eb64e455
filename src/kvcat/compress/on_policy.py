"""Compression layer by layer, each layer fitted to what it is asked when the layers below are compact already."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from kvcat.attention import Carried, Recorder, attach, enable
from kvcat.cache import CompactCache, CompactLayer, Layer
from kvcat.compress.asking import LayerKeys
from kvcat.compress.freezing import frozen
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.models import hidden_states
from kvcat.types import Float, Tensor


@dataclass(eq=False, kw_only=True)
class OnPolicyRecorder(Recorder):
    """Compresses every layer as soon as its queries are there, and lets it attend to the result.

    Args:
        trace: of the windows; its prefixes are compressed.
        num_slots: slots per layer and head; each layer is handed so many keys before the new tokens' own.
        fit: the compact layer of a trace, whose queries of that layer are those to fit to, and of a mapping of the
            layer's index to the keys of the suffix there.
        layers: the compact layers so far, by index.
    """

    trace: Trace
    num_slots: int
    fit: Callable[[Trace, LayerKeys], Layer]
    layers: dict[int, Layer] = field(default_factory=dict)

    def record(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Float[Tensor, "batch kv_heads keys head_dim"], Float[Tensor, "batch kv_heads keys value_dim"]]:
        """Fits one layer; what it attends to are its compact slots and the new tokens.

        Args:
            layer_idx: which layer.
            query: of the suffix.
            key: of ``num_slots`` slots that are not looked at, and of the suffix.
            value: likewise.
            scale: factor on q.k.
        """
        queries = list(self.trace.queries)
        queries[layer_idx] = query[:, :, self.trace.supervision_start - self.trace.prefix_len :]
        later = {layer_idx: key[:, :, self.num_slots :]}
        layer = self.fit(replace(self.trace, queries=queries, _memo={}), later)
        self.layers[layer_idx], self.scales[layer_idx] = layer, scale
        layer = layer.padded()
        keys = torch.cat([layer.keys, key[:, :, self.num_slots :]], dim=2)
        values = torch.cat([layer.values, value[:, :, self.num_slots :]], dim=2)
        return keys if layer.log_bias is None else attach(keys, Carried(layer.log_bias)), values


@torch.no_grad()
def fit_on_policy(trace: Trace, num_slots: int, fit: Callable[[Trace, LayerKeys], Layer]) -> list[Layer]:
    """Compact layers, first to last, from one forward of the suffix through the unmodified model.

    The suffix runs over the prefix; in every layer its queries, which depend on the compact layers below, take the
    place of the trace's, ``fit`` makes the layer compact, and the suffix attends to that.

    Args:
        trace: with a suffix, or of a reconstruction sequence.
        num_slots: slots per layer and head.
        fit: the compact layer of a trace, and of a layer's index with the keys of the suffix there.

    Raises:
        InputError: the trace supervises itself.
    """
    if trace.supervision == "self":
        raise InputError(
            "on_policy needs a suffix or a reconstruction sequence: with supervision='self' the queries are the "
            "prefix's own, which never attend to a compact cache"
        )
    enable(trace.model)
    recorder = OnPolicyRecorder(trace=trace, num_slots=num_slots, fit=fit)
    # these slots only give masks and positions their shape
    slots = [
        CompactLayer(*(x.new_zeros(*x.shape[:2], num_slots, x.shape[3]) for x in states))
        for states in zip(trace.keys, trace.values, strict=True)
    ]
    placeholder = CompactCache(slots, trace.prefix_len, trace.fingerprint)
    with frozen(trace.model):
        hidden_states(
            trace.model, **placeholder.inputs(trace.model, trace.suffix_ids), use_cache=True, kv_recorder=recorder
        )
    return [recorder.layers[index] for index in range(len(trace.keys))]
