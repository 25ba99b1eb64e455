"""Which layers see only a sliding window."""

from typing import Any

from kvcat.errors import InputError


def layer_windows(config: Any) -> list[int | None]:
    """Sliding window of every layer in tokens, None where a layer sees everything before it.

    Args:
        config: a transformers configuration.

    Raises:
        InputError: a layer keeps no keys and values (linear attention, state space) or shares another layer's.
    """
    config = config.get_text_config(decoder=True)
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if window else "chunked_attention" if chunk else "full_attention"]
        types = types * config.num_hidden_layers
    windows = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    for kind in types:
        if kind not in windows:
            raise InputError(f"{config.model_type}: layers of type {kind!r} keep no keys and values to compress")
    if getattr(config, "num_kv_shared_layers", 0):
        raise InputError(f"{config.model_type}: layers that share keys and values are not supported")
    return [windows[kind] for kind in types]
