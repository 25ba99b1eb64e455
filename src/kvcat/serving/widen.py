"""Checkpoints whose heads have a few extra channels, so that a key can hold its log-bias.

Engines do not support a log-bias. With w channels instead of d, queries scaled by sqrt(w / d) and
the constant sqrt(w) in the first new channel of every query, the score is

    q' . k' / sqrt(w) = q . k / sqrt(d) + (first new channel of the key).

The first new channel is 0 in the keys of new tokens, so the model computes the same as before. In a
compact slot it is the log-bias, and ``UNSEEN`` there makes a slot that no query sees.

The new channels must not be rotated. A rotary embedding rotates pairs of channels: d/2 old ones
with their frequencies, and (w - d)/2 new ones of frequency 0. Keys therefore have the new channels
after each half of the old ones. Values have them after all old ones.
"""

import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvcat.cache import check_no_adapters, fingerprint, layer_windows
from kvcat.errors import InputError, check_one_of, whole
from kvcat.extras import install_command
from kvcat.files import append_seal, atomic_write
from kvcat.models.exact_copy import exact_copy
from kvcat.models.rotation import rotary_module
from kvcat.models.structure import relative_error
from kvcat.types import Float, Tensor

UNSEEN = -1000.0
_STEP = 16  # of the head sizes that are chosen; llama.cpp supports any
_TOLERANCE = 1e-3  # of logits: the wide model's rotary frequencies are rounded to float32
_STILL = 1e25  # a frequency divided by this rotates nothing within any context
# The type of the widened model, by the type of the original.
_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "llama", "smollm3": "smollm3"}
_COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_GGUF_TYPES = {"float32": "F32", "float16": "F16", "q8_0": "Q8_0"}


@torch.no_grad()
def widen(model: PreTrainedModel, head_dim: int | None = None) -> PreTrainedModel:
    """The same model with heads of ``head_dim`` channels; the first new one holds a log-bias.

    Its class is a stock class of transformers: ``LlamaForCausalLM``, or SmolLM3's. Its logits equal
    the original's up to rounding. Its configuration holds ``kvcat_head_dim`` and
    ``kvcat_fingerprint``, the original's fingerprint, by which engines recognise its caches.

    Args:
        model: a Llama, Mistral, Qwen2 or SmolLM model without sliding windows.
        head_dim: even, larger than the model's; None chooses the next multiple of 16.

    Raises:
        InputError: a model that cannot be widened, a head_dim that does not fit, or logits that
            differ from the original's.
    """
    check_no_adapters(model, "widened")
    config = model.config.get_text_config(decoder=True)
    _check_family(model, config)
    narrow = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wide = _STEP * (narrow // _STEP + 1) if head_dim is None else whole("head_dim", head_dim)
    if wide <= narrow or wide % 2 or narrow % 2:
        raise InputError(f"head_dim must be even and larger than the model's {narrow}, not {wide}")
    rotary: Any = rotary_module(model)
    wide_config = _wide_config(model, rotary, narrow, wide)
    _check_logits(model, narrow, wide)
    return _wide_model(model, wide_config, narrow, wide)


def _wide_model(
    model: PreTrainedModel, wide_config: PreTrainedConfig, narrow: int, wide: int
) -> PreTrainedModel:
    """The widened model, with the model's dtype and device."""
    wide_model: Any = AutoModelForCausalLM.from_config(wide_config)
    wide_model = wide_model.to(model.device, model.dtype).eval()
    weights = model.state_dict()
    rotary_scale = getattr(rotary_module(model), "attention_scaling", 1.0)
    for name, tensor in wide_model.state_dict().items():
        if name not in weights:  # a bias that the original does not have
            size = len(tensor) if ".o_proj." in name else len(tensor) // wide * narrow
            weights[name] = tensor.new_zeros(size)
        weights[name] = _widened(name, weights[name], narrow, wide, rotary_scale)
    wide_model.load_state_dict(weights)
    wide_model.generation_config = model.generation_config
    return wide_model


def _check_family(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Reject a model whose attention does not allow for constant channels."""
    if config.model_type not in _FAMILIES:
        # Qwen3, for example, normalises queries, so that no constant channel survives.
        raise InputError(
            f"{type(model).__name__} cannot be widened; what can: {', '.join(_FAMILIES)} models. "
            "Compress with attention-matching,log_bias=false,budgets=equal and pack without "
            "widening"
        )
    if any(window is not None for window in layer_windows(config)):
        raise InputError(
            f"{type(model).__name__} cannot be widened: its sliding windows would lose the slots"
        )


def _wide_config(model: PreTrainedModel, rotary: Any, narrow: int, wide: int) -> PreTrainedConfig:
    """The configuration of the widened model."""
    config = model.config.get_text_config(decoder=True)
    values: dict[str, Any] = {name: getattr(config, name) for name in _COPIED}
    values["head_dim"] = wide
    values["attention_bias"] = True
    values["mlp_bias"] = getattr(config, "mlp_bias", False)
    values["rope_parameters"] = _rope_parameters(config, rotary, narrow, wide)
    values["kvcat_fingerprint"] = fingerprint(model)
    values["kvcat_head_dim"] = narrow
    if config.model_type == "smollm3":
        values["no_rope_layers"] = config.no_rope_layers
    return AutoConfig.for_model(_FAMILIES[config.model_type], **values)


def widen_keys(keys: Float[Tensor, "*slots narrow"], wide: int) -> Float[Tensor, "*slots wide"]:
    """Keys of one head, or columns of their projection, with zeros after each half."""
    halves = keys.unflatten(-1, (2, -1))
    return pad(halves, (0, (wide - keys.shape[-1]) // 2)).flatten(-2)


def interleaved(states: Float[Tensor, "*slots channels"]) -> Float[Tensor, "*slots channels"]:
    """Channels of one head in llama.cpp's order.

    There a rotation combines neighbouring channels, in transformers the two halves of a head.
    """
    return states.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def widened_fingerprint(config: PreTrainedConfig) -> str:
    """Fingerprint of the model that a widened checkpoint was made from.

    Raises:
        InputError: the checkpoint is not a widened one.
    """
    original = getattr(config, "kvcat_fingerprint", None)
    if not isinstance(original, str):
        raise InputError(
            "the model is not a widened checkpoint: `kvcat widen MODEL -o WIDE` makes one"
        )
    return original


def write_gguf(model: PreTrainedModel, path: str | Path, *, dtype: str = "float16") -> None:
    """Write a widened model as a GGUF file of architecture ``llama``.

    The file has no vocabulary: llama.cpp reads token ids. A checksum, which ``LlamaCpp`` compares,
    follows the tensors.

    Args:
        model: a widened Llama.
        dtype: dtype of the matrices: "float32", "float16" or "q8_0".

    Raises:
        InputError: another model, an unknown dtype, or the ``gguf`` extra is not installed.
    """
    config = model.config
    if config.model_type != "llama" or config.hidden_act != "silu":
        raise InputError(
            f"llama.cpp has no architecture for a widened {config.model_type} "
            f"with {config.hidden_act}"
        )
    check_one_of("dtype", dtype, _GGUF_TYPES)
    original = widened_fingerprint(config)
    try:
        gguf: Any = import_module("gguf")
    except ImportError:
        raise InputError(
            f"writing a GGUF file needs the gguf package: {install_command('gguf')}"
        ) from None
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    vector_type = gguf.GGMLQuantizationType.F32
    matrix_type = gguf.GGMLQuantizationType[_GGUF_TYPES[dtype]]
    with atomic_write(Path(path)) as partial:
        writer = gguf.GGUFWriter(partial, "llama")
        for field, value in _gguf_fields(config).items():
            getattr(writer, f"add_{field}")(value)
        writer.add_string("kvcat.fingerprint", original)
        factors = torch.tensor(config.rope_parameters["short_factor"], dtype=torch.float32)
        writer.add_tensor("rope_freqs.weight", factors.numpy())
        for name, tensor in _gguf_tensors(model):
            data = tensor.float().contiguous().numpy()
            is_matrix = data.ndim > 1 and data.shape[-1] % 32 == 0
            kind = matrix_type if is_matrix else vector_type
            stem, _, suffix = name.rpartition(".")
            gguf_name = f"{names.get_name(stem)}.{suffix}"
            writer.add_tensor(gguf_name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        append_seal(partial)


def _gguf_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The header's fields, by the ends of the names of ``GGUFWriter``'s methods."""
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": config.head_dim,
        "value_length": config.head_dim,
        "rope_dimension_count": config.head_dim,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "tokenizer_model": "no_vocab",
    }


def _gguf_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and weights; those of queries and keys with channels in llama.cpp's order."""
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "q_proj" in name or "k_proj" in name:
            channels_last = tensor.unflatten(0, (-1, config.head_dim)).movedim(1, -1)
            yield name, interleaved(channels_last).movedim(-1, 1).flatten(0, 1)
        else:
            yield name, tensor


def _rope_parameters(
    config: PreTrainedConfig, rotary: Any, narrow: int, wide: int
) -> dict[str, Any]:
    """The original's rotary frequencies for the old channels, none for the new: LongRoPE's factors.

    A factor divides the frequency that a head of ``wide`` channels has without it.
    """
    narrow_theta = config.rope_parameters["rope_theta"]
    largest = math.log(torch.finfo(torch.float32).max, narrow_theta) * narrow
    if wide > largest:
        raise InputError(
            f"a head_dim of {wide} is too large: above {math.floor(largest)} the rotary base "
            f"{narrow_theta:g} ** ({wide} / {narrow}) is beyond float32"
        )
    theta = narrow_theta ** (wide / narrow)
    pairs = torch.arange(0, narrow, 2, dtype=torch.float64)
    unscaled = theta ** -(pairs / wide)
    factors = (unscaled / rotary.inv_freq.double().cpu()).tolist()
    factors += [_STILL] * ((wide - narrow) // 2)
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }


def _widened(name: str, tensor: Tensor, narrow: int, wide: int, rotary_scale: float) -> Tensor:
    """A weight of the wide model.

    Args:
        tensor: the original's weight.
        narrow, wide: channels of a head in the original and in the wide model.
        rotary_scale: YaRN's factor on cosines and sines.
    """
    if ".self_attn." not in name or name.endswith("o_proj.bias"):
        return tensor
    if ".o_proj." in name:
        columns = tensor.unflatten(-1, (-1, narrow))  # (outputs, heads, channels)
        return pad(columns, (0, wide - narrow)).flatten(-2)
    channels_last = tensor.unflatten(0, (-1, narrow)).movedim(1, -1)  # (heads, ..., channels)
    if ".v_proj." in name:
        wide_heads = pad(channels_last, (0, wide - narrow))
    else:
        query_scale = (wide / narrow) ** 0.5 if ".q_proj." in name else 1.0
        wide_heads = widen_keys(channels_last * rotary_scale * query_scale, wide)
    if name.endswith("q_proj.bias"):
        wide_heads[..., narrow // 2] = wide**0.5
    return wide_heads.movedim(-1, 1).flatten(0, 1)


def _check_logits(model: PreTrainedModel, narrow: int, wide: int) -> None:
    """Reject a model whose logits change, apart from rounding, in an exact copy of it."""
    exact = exact_copy(model).model
    wide_config = _wide_config(exact, rotary_module(exact), narrow, wide)
    wide_model = _wide_model(exact, wide_config, narrow, wide)
    ids = (torch.arange(16).unsqueeze(0) * 7 + 3) % exact.config.vocab_size
    before = exact(input_ids=ids, use_cache=False).logits
    after = wide_model(input_ids=ids, use_cache=False).logits
    change = relative_error(after, before)
    if not change <= _TOLERANCE:
        raise InputError(
            f"{type(model).__name__} cannot be widened: its logits change by {change:.2g}"
        )
