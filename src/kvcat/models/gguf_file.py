"""Models in .gguf files: the configuration, and a check that the model uses every tensor.

transformers' reader leaves out what it does not know: scaled rotary embeddings, biases, the size of
heads. Therefore the configuration is made here by llama.cpp's rules, for architectures whose logits
were compared with llama.cpp. An error names a metadata key or a tensor that the model does not use.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from kvcat.errors import InputError, one_line
from kvcat.extras import install_command

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FREQS = "rope_freqs.weight"
_ROPE_FACTORS = {"short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OTHER_SIZES = (
    "attention.head_count_kv", "attention.key_length", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.original_context_length",
)  # fmt: skip
_MAY_BE_ZERO = ("attention.layer_norm_rms_epsilon", "rope.scale_linear", "rope.scaling.factor")
_FRACTIONS = (*_MAY_BE_ZERO, "rope.freq_base", "rope.scaling.attn_factor")
_TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "padding_token_id": "pad_token_id",
}
# read below, each by its own rule
_READ = (
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.original_context_length",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
)  # fmt: skip
# YaRN's constants: other values are not applied by llama.cpp as transformers applies them
_YARN = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
_WITHOUT_EFFECT = ("tensor_data_layout", "rope.scaling.finetuned", "pooling_type")
# settings of other architectures: with these values they change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "nextn_predict_layers": (0,),
}


@dataclass(frozen=True)
class _Header:
    """The metadata of a file without the architecture's prefix, and its tensors by name."""

    path: Path
    architecture: str
    settings: Mapping[str, Any]  # KEY of "ARCHITECTURE.KEY"
    tokens: Mapping[str, Any]  # KEY of "tokenizer.ggml.KEY", without lists
    shapes: Mapping[str, tuple[int, ...]]  # torch's order
    rope_tensors: Mapping[str, list[float]]  # numbers of the rotary factors that llama.cpp reads

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting; raises ``InputError`` if the file lacks it and there is no default."""
        value = self.settings.get(key, default)
        if value is None:
            raise InputError(f"{self.path} lacks the metadata key {self.architecture}.{key}")
        return value

    def rejection(
        self, key: str, reason: str = "which this version of kvcat cannot apply"
    ) -> InputError:
        """The error for a setting that changes the logits."""
        return InputError(
            f"{self.path} has {self.architecture}.{key} = {self.settings[key]!r}, {reason}"
        )


def check_gguf_reader(name: str | Path) -> None:
    """Raise ``InputError`` if the package that reads .gguf files is missing."""
    if find_spec("gguf") is None:
        raise InputError(f"{name} is in a GGUF file; to read it: {install_command('gguf')}")


def tokenizer_settings(path: Path) -> Mapping[str, Any]:
    """The settings of the tokenizer in a .gguf file, without its vocabulary: KEY of
    "tokenizer.ggml.KEY".
    """
    return _read_header(path).tokens


def gguf_config(path: Path) -> PreTrainedConfig:
    """The configuration of the model in a .gguf file, with rotary scaling, biases and head sizes.

    Raises:
        InputError: a damaged file, an adapter, one of several parts, an unknown architecture, or a
            setting that changes the logits and cannot be applied.
    """
    header = _read_header(path)
    _check_settings(header)
    for key in _SIZES:
        _check_size(header, key)
    for key in _OTHER_SIZES:
        if key in header.settings:
            _check_size(header, key)
    _check_tensors(header)
    heads = header.setting("attention.head_count")
    fields: dict[str, Any] = {name: header.setting(key) for key, name in _SIZES.items()}
    head_dim = header.setting("attention.key_length", fields["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.setting(key, head_dim) != head_dim:
            raise header.rejection(key, f"but keys have {head_dim} channels: this is not supported")
    fields |= {
        "num_key_value_heads": header.setting("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": header.shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in header.shapes,
        "rope_parameters": _rope_parameters(header, head_dim),
    }
    for key, name in _TOKENS.items():
        fields[name] = header.tokens.get(key)
    if header.architecture == "llama":
        fields["mlp_bias"] = "blk.0.ffn_down.bias" in header.shapes
    if header.architecture != "qwen2":  # it always has the biases of queries, keys and values
        fields["attention_bias"] = "blk.0.attn_q.bias" in header.shapes
    try:
        return AutoConfig.for_model(header.architecture, **fields)
    except Exception as error:  # sizes that do not fit each other
        raise InputError(f"{path} describes no model: {one_line(error)}") from error


def _check_tensors(header: _Header) -> None:
    """Reject sizes beyond those of the file's tensors: a model of them may need any memory."""
    blocks = {name.split(".")[1] for name in header.shapes if name.startswith("blk.")}
    sizes = {"block_count": len(blocks), "embedding_length": header.shapes["token_embd.weight"][-1]}
    if "blk.0.ffn_up.weight" in header.shapes:
        sizes["feed_forward_length"] = header.shapes["blk.0.ffn_up.weight"][0]
    for key, size in sizes.items():
        if header.setting(key) > size:
            raise header.rejection(key, f"but its tensors have {size}")


def _check_size(header: _Header, key: str) -> None:
    """Reject a setting that is not one number above 0; a few may be 0."""
    value = header.setting(key)
    if isinstance(value, list):
        raise header.rejection(key, "a number for every layer: this is not supported")
    kinds = (int, float) if key in _FRACTIONS else (int,)
    is_size = type(value) in kinds and math.isfinite(value)
    if not is_size or value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
        raise header.rejection(key, "which is not a size")


def check_all_used(path: Path, weights: Iterable[str], config: PreTrainedConfig) -> None:
    """Raise ``InputError`` if a .gguf file has a tensor that the model does not use, or lacks one
    that it needs.

    Args:
        weights: names of the model's weights.
    """
    gguf: Any = import_module("gguf")
    header = _read_header(path)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[header.architecture], config.num_hidden_layers)
    used = set(header.rope_tensors)
    for weight in weights:
        stem, _, kind = weight.rpartition(".")
        name = f"{names.get_name(stem)}.{kind}"
        is_tied = weight == "lm_head.weight" and config.tie_word_embeddings
        if name not in header.shapes and not is_tied:
            raise InputError(f"{path} lacks {name}, which the model needs as {weight}")
        used.add(name)
    unused = sorted(set(header.shapes) - used)
    if unused:
        raise InputError(
            f"{path} has {len(unused)} tensors that the model does not use, for example {unused[0]}"
        )


def _read_header(path: Path) -> _Header:
    try:
        metadata, shapes, rope_tensors = _read_contents(path)
    except Exception as error:  # whatever a damaged file makes the reader raise
        raise InputError(f"cannot load {path}: {one_line(error)}") from error
    architecture = str(metadata.get("general.architecture"))
    if metadata.get("general.type", "model") != "model":
        raise InputError(f"{path} is not a model: its general.type is {metadata['general.type']!r}")
    if metadata.get("split.count", 1) > 1:
        raise InputError(
            f"{path} is one of {metadata['split.count']} parts: "
            "join them with llama-gguf-split --merge"
        )
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"{path} has architecture {architecture!r}; kvcat reads .gguf files of "
            f"{', '.join(ARCHITECTURES)}: use the model's safetensors folder"
        )
    if "token_embd.weight" not in shapes:
        raise InputError(f"{path} lacks token_embd.weight")
    settings = _below(metadata, f"{architecture}.")
    tokens = _below(metadata, "tokenizer.ggml.")
    return _Header(path, architecture, settings, tokens, shapes, rope_tensors)


def _read_contents(
    path: Path,
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]], dict[str, list[float]]]:
    """The metadata, the shapes of all tensors, and the rotary factors that llama.cpp reads."""
    gguf: Any = import_module("gguf")
    reader = gguf.GGUFReader(path)
    metadata = {}
    for key, field in reader.fields.items():
        # lists of the tokenizer, such as its vocabulary, are long and not needed here
        is_long = len(field.data) != 1 and "ggml" in key
        if not is_long:
            metadata[key] = field.contents()
    architecture = metadata["general.architecture"]
    rotary_names: tuple[str, ...] = ()
    if architecture == "llama":
        is_longrope = metadata.get("llama.rope.scaling.type") == "longrope"
        rotary_names = tuple(_ROPE_FACTORS.values()) if is_longrope else (_ROPE_FREQS,)
    shapes = {}
    rope_tensors = {}
    for tensor in reader.tensors:
        shapes[tensor.name] = tuple(int(size) for size in reversed(tensor.shape))
        if tensor.name in rotary_names:
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
            rope_tensors[tensor.name] = numbers.flatten().tolist()
    return metadata, shapes, rope_tensors


def _below(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose keys begin with a prefix, without it."""
    entries = {}
    for key, value in metadata.items():
        if key.startswith(prefix):
            entries[key.removeprefix(prefix)] = value
    return entries


def _check_settings(header: _Header) -> None:
    """Reject a setting that is not known, or has a value that cannot be applied."""
    for key, value in header.settings.items():
        if key in _SIZES or key in _READ or key in _WITHOUT_EFFECT:
            continue
        if value not in _NEUTRAL.get(key, ()):
            raise header.rejection(key)
    rows = header.shapes["token_embd.weight"][0]
    if header.setting("vocab_size", rows) != rows:
        raise header.rejection("vocab_size", f"but token_embd.weight has {rows} rows")


def _rope_parameters(header: _Header, head_dim: int) -> dict[str, Any]:
    """llama.cpp's rotary embedding in transformers' terms.

    llama.cpp's type is linear where none is named. Factors of a tensor divide the frequencies,
    whatever the length of the text: these are transformers' LongRoPE with equal short and long
    factors.
    """
    kind = header.setting("rope.scaling.type", "linear")
    if any(len(factors) != head_dim // 2 for factors in header.rope_tensors.values()):
        raise InputError(
            f"{header.path}: its rotary factors do not fit heads of {head_dim} channels"
        )
    if kind == "longrope":
        parameters = _longrope_of_tensors(header)
    elif kind == "yarn":
        parameters = _yarn(header)
    elif kind in ("none", "linear"):
        parameters = _linear(header, kind)
    else:
        raise header.rejection("rope.scaling.type")
    parameters["rope_theta"] = header.setting("rope.freq_base", 10000.0)
    return parameters


def _scaling_factor(header: _Header) -> float:
    """The factor on the positions; 1 where the file has none or 0."""
    older_factor = header.setting("rope.scale_linear", 0.0)
    return header.setting("rope.scaling.factor", older_factor) or 1.0


def _original_length(header: _Header) -> int:
    """The length of the texts that the model was made for before its frequencies were scaled."""
    context_length = header.setting("context_length")
    return header.setting("rope.scaling.original_context_length", context_length)


def _longrope_of_tensors(header: _Header) -> dict[str, Any]:
    """LongRoPE with the factors from two tensors."""
    if _scaling_factor(header) != 1.0:
        raise header.rejection(
            "rope.scaling.factor", "together with type longrope: this is not supported"
        )
    missing = sorted(set(_ROPE_FACTORS.values()) - set(header.rope_tensors))
    if missing:
        raise InputError(
            f"{header.path} has rotary embeddings of type longrope and lacks {missing[0]}"
        )
    short = header.rope_tensors[_ROPE_FACTORS["short"]]
    long = header.rope_tensors[_ROPE_FACTORS["long"]]
    return _longrope(header, short, long)


def _linear(header: _Header, kind: str) -> dict[str, Any]:
    """Frequencies divided by one number (type linear), by the factors in a tensor, by both or by
    neither.
    """
    factor = 1.0 if kind == "none" else _scaling_factor(header)
    if _ROPE_FREQS in header.rope_tensors:
        factors = [factor * number for number in header.rope_tensors[_ROPE_FREQS]]
        return _longrope(header, factors, factors)
    if header.setting("rope.scaling.attn_factor", 1.0) != 1.0:
        raise header.rejection(
            "rope.scaling.attn_factor", f"with rotary embeddings of type {kind}: not supported"
        )
    if factor == 1.0:
        return {"rope_type": "default"}
    return {"rope_type": "linear", "factor": factor}


def _longrope(header: _Header, short: list[float], long: list[float]) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": 1.0,
        "attention_factor": header.setting("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": _original_length(header),
    }


def _yarn(header: _Header) -> dict[str, Any]:
    """YaRN with llama.cpp's constants, which are transformers' defaults."""
    if _ROPE_FREQS in header.rope_tensors:
        raise InputError(
            f"{header.path} has {_ROPE_FREQS} and rotary embeddings of type yarn: "
            "this is not supported"
        )
    for key, default in _YARN.items():
        if header.setting(key, default) != default:
            raise header.rejection(key, "which llama.cpp and kvcat do not apply alike")
    return {
        "rope_type": "yarn",
        "factor": _scaling_factor(header),
        "original_max_position_embeddings": _original_length(header),
    }
