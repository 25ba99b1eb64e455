"""Compression layer by layer, each layer fitted to what it is asked when the layers below are compact already."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from kvcat.attention import Recorder, enable
from kvcat.cache import CompactCache, CompactLayer, attach_log_bias
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
        fit: the compact layer of a trace and a layer index, whose queries in the trace are those to fit to.
        layers: the compact layers so far, by index.
    """

    trace: Trace
    num_slots: int
    fit: Callable[[Trace, int], CompactLayer]
    layers: dict[int, CompactLayer] = field(default_factory=dict)

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
        layer = self.fit(replace(self.trace, queries=queries, _memo={}), layer_idx)
        self.layers[layer_idx], self.scales[layer_idx] = layer, scale
        keys = torch.cat([layer.keys, key[:, :, self.num_slots :]], dim=2)
        values = torch.cat([layer.values, value[:, :, self.num_slots :]], dim=2)
        return keys if layer.log_bias is None else attach_log_bias(keys, layer.log_bias), values


@torch.no_grad()
def fit_on_policy(trace: Trace, num_slots: int, fit: Callable[[Trace, int], CompactLayer]) -> list[CompactLayer]:
    """Compact layers, first to last, from one forward of the suffix through the unmodified model.

    The suffix runs over the prefix; in every layer its queries, which depend on the compact layers below, take the
    place of the trace's, ``fit`` makes the layer compact, and the suffix attends to that.

    Args:
        trace: with a suffix, or of a reconstruction sequence.
        num_slots: slots per layer and head.
        fit: the compact layer of a trace and a layer index.

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
        CompactLayer(k[:, :, :num_slots], v[:, :, :num_slots]) for k, v in zip(trace.keys, trace.values, strict=True)
    ]
    placeholder = CompactCache(slots, trace.prefix_len, trace.fingerprint)
    with frozen(trace.model):
        hidden_states(
            trace.model, **placeholder.inputs(trace.model, trace.suffix_ids), use_cache=True, kv_recorder=recorder
        )
    return [recorder.layers[index] for index in range(len(trace.keys))]
