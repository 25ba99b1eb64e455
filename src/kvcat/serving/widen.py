"""Checkpoints whose heads have a few constant channels more, so that a key can hold its own log-bias.

Engines know no log-bias. With w channels in place of d, queries scaled by sqrt(w / d) and the constant sqrt(w) in the
first new channel of every query, the score is

    q' . k' / sqrt(w) = q . k / sqrt(d) + (first new channel of the key).

New tokens have 0 there, so the model computes what it did before; a compact slot holds its log-bias there, and
``UNSEEN`` makes a slot that no query sees. The new channels must not be rotated: the pairs of channels that a rotary
embedding turns are d/2 old ones with their frequencies and (w - d)/2 new ones of frequency 0. Keys therefore have
the new channels behind each half of the old ones, values behind all.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvcat.cache import check_no_adapters, fingerprint, layer_windows
from kvcat.errors import InputError
from kvcat.files import atomic_write
from kvcat.models import frozen
from kvcat.models.rotation import rotary_module
from kvcat.models.structure import relative_error, same
from kvcat.types import Float, Tensor

UNSEEN = -1000.0
_ENGINE_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on a CPU; llama.cpp takes any
_STILL = 1e25  # a frequency divided by this turns nothing within any context
_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "llama", "smollm3": "smollm3"}  # and what they become
_COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip


@torch.no_grad()
def widen(model: PreTrainedModel, head_dim: int | None = None) -> PreTrainedModel:
    """The same model with heads of ``head_dim`` channels, of which the first new one takes a slot's log-bias.

    A stock class of transformers (``LlamaForCausalLM``; SmolLM3's own), whose logits equal the original's up to
    rounding. Its configuration names the original's ``kvcat_fingerprint``, by which engines know its caches, and
    ``kvcat_head_dim``.

    Args:
        model: a Llama, Mistral, Qwen2 or SmolLM model without sliding windows.
        head_dim: even, larger than the model's; None takes the next size that vLLM's attention on a CPU has.

    Raises:
        InputError: a model that cannot be widened, a head_dim that does not fit, or logits that come out different.
    """
    check_no_adapters(model, "widened")
    config = model.config.get_text_config(decoder=True)
    if config.model_type not in _FAMILIES:  # Qwen3 normalises queries, so that no constant channel survives
        raise InputError(
            f"{type(model).__name__} cannot be widened; what can: {', '.join(_FAMILIES)} models. Compress with "
            "attention-matching,log_bias=false,budgets=equal and pack without widening"
        )
    if any(window is not None for window in layer_windows(config)):
        raise InputError(f"{type(model).__name__} cannot be widened: its sliding windows would lose the slots")
    old = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wide = next((size for size in _ENGINE_SIZES if size > old), 0) if head_dim is None else head_dim
    if wide <= old or wide % 2 or old % 2:
        raise InputError(f"head_dim must be even and larger than the model's {old}, not {wide}")
    rotary: Any = rotary_module(model)
    named = {name: getattr(config, name) for name in _COPIED} | {
        "head_dim": wide, "attention_bias": True, "mlp_bias": getattr(config, "mlp_bias", False),
        "rope_parameters": _rope(config, rotary, old, wide), "kvcat_fingerprint": fingerprint(model),
        "kvcat_head_dim": old,
    }  # fmt: skip
    if config.model_type == "smollm3":
        named["no_rope_layers"] = config.no_rope_layers
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(_FAMILIES[config.model_type], **named))
    made = made.to(model.device, model.dtype).eval()
    weights, scale = model.state_dict(), getattr(rotary, "attention_scaling", 1.0)
    for name, tensor in made.state_dict().items():
        if name not in weights:  # a bias that the original does not have
            narrow = len(tensor) if ".o_proj." in name else len(tensor) // wide * old
            weights[name] = tensor.new_zeros(narrow)
        weights[name] = _widened(name, weights[name], old, wide, scale)
    made.load_state_dict(weights)
    made.generation_config = model.generation_config
    _check_logits(model, made)
    return made


def widen_keys(keys: Float[Tensor, "*slots old"], wide: int) -> Float[Tensor, "*slots wide"]:
    """Keys of one head, or columns of their projection, with zeros in the new channels behind each half."""
    return pad(keys.unflatten(-1, (2, -1)), (0, (wide - keys.shape[-1]) // 2)).flatten(-2)


def interleaved(states: Float[Tensor, "*slots channels"]) -> Float[Tensor, "*slots channels"]:
    """Channels of one head in llama.cpp's order: a rotation turns neighbours, in transformers the halves of a head."""
    return states.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def widened_fingerprint(config: PreTrainedConfig) -> str:
    """Fingerprint of the model that a widened checkpoint was made from; ``InputError`` if it is none."""
    found = getattr(config, "kvcat_fingerprint", None)
    if not isinstance(found, str):
        raise InputError("the model is not a widened checkpoint: `kvcat widen MODEL -o WIDE` makes one")
    return found


def write_gguf(model: PreTrainedModel, path: str | Path, *, dtype: str = "float16") -> None:
    """Write a widened model as a GGUF file of architecture ``llama``, without a vocabulary: llama.cpp reads token ids.

    ``dtype`` of the matrices is "float32", "float16" or "q8_0". ``InputError`` for a model that is no widened Llama,
    an unknown dtype, or without the ``gguf`` extra.
    """
    config, types = model.config, {"float32": "F32", "float16": "F16", "q8_0": "Q8_0"}
    if config.model_type != "llama" or config.hidden_act != "silu":
        raise InputError(f"llama.cpp has no architecture for a widened {config.model_type} with {config.hidden_act}")
    if dtype not in types:
        raise InputError(f"dtype must be one of {', '.join(types)}, not {dtype!r}")
    owner = widened_fingerprint(config)
    try:
        gguf: Any = import_module("gguf")
    except ImportError:
        raise InputError("writing a GGUF file needs the gguf package: pip install 'kvcat[gguf]'") from None
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    plain, wanted = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType[types[dtype]]
    with atomic_write(Path(path)) as partial:
        writer = gguf.GGUFWriter(partial, "llama")
        for field, value in (
            ("context_length", config.max_position_embeddings), ("embedding_length", config.hidden_size),
            ("block_count", config.num_hidden_layers), ("feed_forward_length", config.intermediate_size),
            ("head_count", config.num_attention_heads), ("head_count_kv", config.num_key_value_heads),
            ("key_length", config.head_dim), ("value_length", config.head_dim),
            ("rope_dimension_count", config.head_dim), ("rope_freq_base", config.rope_parameters["rope_theta"]),
            ("layer_norm_rms_eps", config.rms_norm_eps), ("vocab_size", config.vocab_size),
            ("tokenizer_model", "no_vocab"),
        ):  # fmt: skip
            getattr(writer, f"add_{field}")(value)
        writer.add_string("kvcat.fingerprint", owner)
        factors = torch.tensor(config.rope_parameters["short_factor"], dtype=torch.float32)
        writer.add_tensor("rope_freqs.weight", factors.numpy())
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if "q_proj" in name or "k_proj" in name:
                heads = interleaved(tensor.unflatten(0, (-1, config.head_dim)).movedim(1, -1))
                tensor = heads.movedim(-1, 1).flatten(0, 1)
            data, stem = tensor.float().contiguous().numpy(), name.rpartition(".")
            kind = wanted if data.ndim > 1 and data.shape[-1] % 32 == 0 else plain
            writer.add_tensor(f"{names.get_name(stem[0])}.{stem[2]}", gguf.quants.quantize(data, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _rope(config: PreTrainedConfig, rotary: Any, old: int, wide: int) -> dict[str, Any]:
    """The rotary embedding's own frequencies for the old channels and none for the new, as LongRoPE's factors."""
    theta = config.rope_parameters["rope_theta"] ** (wide / old)
    plain = theta ** -(torch.arange(0, old, 2, dtype=torch.float64) / wide)
    factors = [*(plain / rotary.inv_freq.double().cpu()).tolist(), *[_STILL] * ((wide - old) // 2)]
    return {
        "rope_type": "longrope", "rope_theta": theta, "short_factor": factors, "long_factor": factors, "factor": 1.0,
        "attention_factor": 1.0, "original_max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip


def _widened(name: str, tensor: Tensor, old: int, wide: int, scale: float) -> Tensor:
    """A weight of the wide model; ``scale`` is YaRN's factor on cosines and sines."""
    if ".self_attn." not in name or name.endswith("o_proj.bias"):
        return tensor
    if ".o_proj." in name:
        return pad(tensor.unflatten(-1, (-1, old)), (0, wide - old)).flatten(-2)
    heads = tensor.unflatten(0, (-1, old)).movedim(1, -1)
    if ".v_proj." in name:
        return pad(heads, (0, wide - old)).movedim(-1, 1).flatten(0, 1)
    heads = widen_keys(heads * scale * ((wide / old) ** 0.5 if ".q_proj." in name else 1.0), wide)
    if name.endswith("q_proj.bias"):
        heads[..., old // 2] = wide**0.5
    return heads.movedim(-1, 1).flatten(0, 1)


def _check_logits(model: PreTrainedModel, made: PreTrainedModel) -> None:
    """Refuse a wide model whose logits differ by more than its dtype rounds."""
    config = model.config.get_text_config(decoder=True)
    ids = (torch.arange(16, device=model.device).unsqueeze(0) * 7 + 3) % config.vocab_size
    with frozen(model), frozen(made):
        before, after = (run(input_ids=ids, use_cache=False).logits for run in (model, made))
    if not same(after, before):
        change = relative_error(after, before)
        raise InputError(f"{type(model).__name__} cannot be widened: its logits change by {change:.2g}")
