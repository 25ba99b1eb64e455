"""Layers of two kinds in vLLM: long ones, and short ones whose slots are held in a sliding window.

vLLM holds as many cells in every layer, except in layers with a sliding window: of these it keeps
the cells in the window alone. A widened Llama model may get such a window in the layers that need
few slots. It computes the same as without, as long as the window holds the slots of the layer and
all text after them. Slots that only fill up a layer come first, outside the window.
"""

from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

from kvcat.compress import CalibratedBudgets
from kvcat.errors import InputError
from kvcat.serving.prefix import PackedDocument
from kvcat.serving.several import JoinedPrefix

_FULL = "full_attention"
_SLIDING = "sliding_attention"


def layer_overrides(
    model: PreTrainedModel, budgets: CalibratedBudgets, window: int
) -> dict[str, Any]:
    """Entries of a configuration with which vLLM holds the short layers in a window.

    They are for ``--hf-overrides``, and not in the widened checkpoint: in transformers the window
    would cut longer texts, which ``kvcat.serving.vllm`` rejects.

    Args:
        model: the original, not the widened one.
        budgets: of this model in two sizes.
        window: tokens.

    Raises:
        InputError: budgets of another model or without long layers; a window below 2.
    """
    budgets.check_model(model)
    if not budgets.long_layers:
        raise InputError(
            "the budgets have no long layers: make them with kvcat budgets --two-sizes"
        )
    if window < 2:
        raise InputError(f"the window must be at least 2 tokens, not {window}")
    num_layers = len(budgets.errors)
    kinds = [_FULL if layer in budgets.long_layers else _SLIDING for layer in range(num_layers)]
    return {"layer_types": kinds, "sliding_window": window}


class LayerWindow(NamedTuple):
    """The sliding window of the short layers of a served model.

    Args:
        layers: the short layers.
        size: tokens that a token sees in them, itself included.
    """

    layers: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "LayerWindow | None":
        """The window that a configuration describes; None if all layers are long."""
        kinds = getattr(config, "layer_types", None) or ()
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)
        size = getattr(config, "sliding_window", None)
        return cls(layers, size) if layers and size else None

    def check(self, prefix: PackedDocument | JoinedPrefix | None, num_tokens: int) -> None:
        """Reject a request of whose text or slots the window would lose some.

        Args:
            prefix: the document; None: the request names none.
            num_tokens: of question and answer at most.

        Raises:
            InputError: too many tokens or slots, or several documents.
        """
        num_slots = 0
        if isinstance(prefix, JoinedPrefix):
            raise InputError("a model with short layers serves one cache a request")
        if prefix is not None:
            slots = prefix.layer_slots or (prefix.num_slots,) * prefix.shape[0]
            num_slots = max(slots[layer] for layer in self.layers)
        if num_slots + num_tokens > self.size:
            raise InputError(
                f"question and answer of {num_tokens} tokens do not fit: the short layers have a "
                f"window of {self.size} tokens, {num_slots} of them slots of the document. Ask for "
                "fewer max_tokens, or serve with a larger window (vllm.json)"
            )
