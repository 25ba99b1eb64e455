"""The presses of NVIDIA's kvpress as compressors, with slots that are really gone."""

from dataclasses import dataclass
from typing import Any

import torch

from kvcat.cache import CompactCache, CompactLayer, RaggedLayer
from kvcat.compress.common import compact_cache, slots_for
from kvcat.compress.kvpress.library import build, library
from kvcat.compress.kvpress.running import Kept, press_prefix, score_prefix
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.types import Float, Tensor


@dataclass(frozen=True, init=False)
class KVPress:
    """A press of kvpress: what it keeps of the prefix becomes a compact cache of as many slots.

    Presses that choose per head only hide the other slots in kvpress; here they are removed, and heads hold as many
    slots as the press left them. Each example is pressed alone, in one more forward over its prefix (some presses take
    several). kvpress is imported when the first press is made, and its patches of transformers are undone.

    Args:
        name: class name of the press; a wrapper and the press inside it are joined by a plus: "SnapKVPress",
            "AdaKVPress+SnapKVPress".
        options: fields of the press but not its compression_ratio, which is 1 - keep ratio. Those of the press after
            the plus begin with "press."; or ``press`` is another ``KVPress``.

    Raises:
        InputError: kvpress is not installed, an unknown press, one that cannot make a compact cache, or options that
            it does not take.
    """

    name: str
    options: dict[str, Any]

    def __init__(self, name: str, **options: Any):
        outer, _, inner = name.partition("+")
        if inner and "press" in options:
            raise InputError(f"{name} with press={options['press']}: give the inner press once")
        if inner:
            its = {key: options.pop(key) for key in list(options) if key.startswith("press.")}
            options["press"] = KVPress(inner, **{key.removeprefix("press."): value for key, value in its.items()})
        object.__setattr__(self, "name", outer)
        object.__setattr__(self, "options", options)
        self._build()

    def __call__(
        self, trace: Trace, *, keep_ratio: float | int | None = None, num_slots: int | None = None
    ) -> CompactCache:
        """The compact cache with ceil(keep_ratio * prefix_len) or num_slots slots per layer and head.

        Presses that choose per layer or per head keep so many on average; presses that keep whole chunks come near it.

        Args:
            trace: of the windows to compress; its suffix plays no part.
            keep_ratio: fraction kept, in (0, 1]; 1 returns the dense cache.
            num_slots: number kept, in [1, prefix_len].

        Raises:
            InputError: keep_ratio or num_slots out of range, or a model or size that the press does not take.
        """
        if trace.past_len:
            raise InputError("kvpress presses whole prefixes, and part of this one is compact already")
        slots = slots_for(trace.prefix_len, keep_ratio, num_slots)
        if slots >= trace.num_slots:
            return trace.dense_cache()
        examples = [press_prefix(self._build(), trace, row, slots) for row in range(trace.batch_size)]
        layers = [_layer([kept[index] for kept in examples]) for index in range(len(trace.keys))]
        return compact_cache(trace, layers, f"kvpress:{self}", {"kvpress": library().version, **self._told()})

    def scores(self, trace: Trace, num_slots: int) -> list[Float[Tensor, "batch kv_heads prefix"]]:
        """Per layer the score of each position and KV head: a press that scores keeps the highest.

        Args:
            trace: of the windows; its suffix plays no part.
            num_slots: slots per head; some scores depend on it.

        Raises:
            InputError: a press that ranks nothing, or a model or size that it does not take.
        """
        slots_for(trace.prefix_len, None, num_slots)
        examples = [score_prefix(self._build(), trace, row, num_slots) for row in range(trace.batch_size)]
        return [torch.cat(rows) for rows in zip(*examples, strict=True)]

    def __str__(self) -> str:
        inner = self.options.get("press")
        return self.name if inner is None else f"{self.name}+{inner}"

    def _told(self) -> dict[str, object]:
        told: dict[str, object] = {}
        for key, option in self.options.items():
            inner = option._told() if isinstance(option, KVPress) else {}
            told |= {f"{key}.{name}": value for name, value in inner.items()}
            told |= {} if isinstance(option, KVPress) else {key: option}
        return told

    def _build(self) -> Any:
        made = {key: option._build() if isinstance(option, KVPress) else option for key, option in self.options.items()}
        return build(self.name, made)


def _layer(examples: list[Kept]) -> CompactLayer | RaggedLayer:
    keys, values = ([getattr(kept, name) for kept in examples] for name in ("keys", "values"))
    if not all(len(head) for row in keys for head in row):
        raise InputError("the press leaves a head without slots: ask for more, or set its option for a lower bound")
    return CompactLayer.ragged(keys, values)


__all__ = ["KVPress", "library"]
