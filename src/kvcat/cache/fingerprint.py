"""The fingerprint of a model, from its configuration, weights and buffers.

A fingerprint begins with the number of its scheme, ``2:``.
"""

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig

from kvcat.attention import exclusive
from kvcat.cache.adapters import check_no_adapters
from kvcat.errors import InputError, check_kind
from kvcat.types import Tensor

SCHEME = "2:"
FORM = f"{SCHEME}[0-9a-f]{{64}}"
# Settings that cannot change the logits: names, types of storage, training, what is returned,
# generation, special tokens; and whether weights are tied, which the weights themselves show.
IGNORED = frozenset({
    "architectures", "auto_map", "chunk_size_feed_forward", "custom_pipelines", "dtype",
    "fusion_config", "id2label", "initializer_factor", "initializer_range", "label2id",
    "num_labels", "output_attentions", "output_hidden_states", "output_router_logits",
    "pretraining_tp", "problem_type", "quantization_config", "return_dict", "tie_word_embeddings",
    "torch_dtype", "transformers_version", "use_cache", "use_return_dict", "router_aux_loss_coef",
    "router_z_loss_coef", "aux_loss_alpha", "router_jitter_noise", "seq_aux", "attention_dropout",
    "attention_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "attn_pdrop",
    "classifier_dropout", "classifier_dropout_prob", "dropout", "dropout_p", "embd_pdrop",
    "embedding_dropout", "ffn_dropout", "hidden_dropout", "hidden_dropout_prob", "layerdrop",
    "resid_dropout", "resid_pdrop", "residual_dropout", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "mask_token_id",
    "pad_token_id", "sep_token_id", "unk_token_id",
})  # fmt: skip
# how a model is spread over devices: base_model_tp_plan and its like. Up to transformers 5.19 a
# model with tied weights has another plan than its class
_PLAN = re.compile(r"base_model_\w+_plan")
_PER_LAYER = "_heterogeneity_spec"  # where transformers keeps settings of single layers
_ROPE_IGNORED = ("type",)  # the older name of rope_type
_STATE = ("dynamic", "longrope")  # rotary embeddings whose frequencies follow the last text
_INPUT_BUFFERS = ("position_ids", "token_type_ids", "attn.bias", "masked_bias", "transformer.bias")
_SAMPLED_NUMBERS = 16
_State = tuple[Any, ...]
_known: WeakKeyDictionary[nn.Module, dict[str, tuple[_State, str]]] = WeakKeyDictionary()


def hash_tensor(digest: Any, name: str, tensor: Tensor) -> None:
    """Add name, dtype, shape and bytes of a tensor to a hashlib digest."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def fingerprint(model: nn.Module) -> str:
    """``2:`` and a SHA-256 of a model: class, configuration, parameters and buffers.

    - All settings of the configuration count, nested ones too, except those in ``IGNORED``, plans
      of parallelism, and those with their class's default: a newer transformers adds settings with
      defaults that do not change a model.
    - Rotary frequencies count if they are not those that the configuration gives.

    The hash of the tensors is kept until one of them is replaced or written to. Autograd does not
    notice a write through ``.data``. Such a write is noticed here if it changes one of 16 numbers
    spread over the tensor.

    Raises:
        InputError: a wrapper of a model, PEFT adapters, or weights on the meta device.
    """
    check_kind(nn.Module, "a model", model=model)
    check_no_adapters(model, "identified")
    with exclusive(model):  # others hold rotary factors and settings for a while
        stored, computed = _tensors_with_data(model)
        config = getattr(model, "config", None)
        texts = [
            type(model).__name__,
            str(getattr(config, "model_type", None)),
            json.dumps(_settings(config, type(model)), sort_keys=True),
            _remembered(model, "weights", stored),
            *_rotary_changes(model),
            _remembered(model, "buffers", computed),
        ]
        return SCHEME + hashlib.sha256("".join(texts).encode()).hexdigest()


def check_same_model(name: str, theirs: str, ours: str) -> None:
    """Raise an ``InputError`` for something that was made with another model.

    Args:
        name: of the thing, such as "store caches/laws".
        theirs: the fingerprint that it records.
        ours: that of the model in use.
    """
    if theirs != ours:
        raise InputError(
            f"{name} belongs to another model: its fingerprint is {theirs[:12]}, the model's "
            f"{ours[:12]}"
        )


def _tensors_with_data(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters and buffers by name: those that a file of the model has, and the others.

    The others are computed by their class. Rotary frequencies are not among them
    (``_rotary_changes``), nor are positions.
    """
    stored: dict[str, Tensor] = {}
    computed: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise InputError(
                f"{type(model).__name__}: {name} is on the meta device and holds no numbers: load "
                "the model without offloading"
            )
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if last not in module._non_persistent_buffers_set:
            stored[name] = tensor
        elif not _is_rotary(module) and not name.endswith(_INPUT_BUFFERS):
            computed[name] = tensor
    return stored, computed


def _remembered(model: nn.Module, group: str, tensors: dict[str, Tensor]) -> str:
    """A hash of tensors, computed again only after one of them has changed.

    Args:
        model: the tensors are part of it.
        group: name under which the hash is kept for this model.
        tensors: by name.
    """
    if any(tensor.is_inference() for tensor in tensors.values()):
        return _hash_of(tensors)  # tensors of inference mode have no version
    versions = [(name, tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()]
    state = (*versions, _sample(tensors.values()))
    known = _known.setdefault(model, {})
    if group in known:
        known_state, known_hash = known[group]
        if known_state == state:
            return known_hash
    new_hash = _hash_of(tensors)
    known[group] = (state, new_hash)
    return new_hash


def _hash_of(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        hash_tensor(digest, name, tensors[name])
    return digest.hexdigest()


def _sample(tensors: Iterable[Tensor]) -> bytes:
    """A sample of the numbers of every tensor.

    It shows writes through ``.data``, as peft merges adapters: these change no version.
    """
    # by device and dtype, so that each group is copied at once
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLED_NUMBERS)
        group = groups.setdefault((flat.device, flat.dtype), [])
        group.append(flat[::step][:_SAMPLED_NUMBERS])
    joined = [torch.cat(samples).cpu().view(torch.uint8) for samples in groups.values()]
    return b"".join(samples.numpy().tobytes() for samples in joined)


def _settings(config: PreTrainedConfig | None, reader: type) -> dict[str, Any]:
    """The settings that may change the logits of the model of class ``reader``."""
    if config is None:
        return {}
    declared = set(getattr(type(config), "__dataclass_fields__", ()))
    values = _plain_settings(config, reader)
    usual = _plain_settings(_default_config(type(config)), reader)
    settings = {}
    for name, value in values.items():
        # a setting that neither the configuration's class nor the model knows has no effect
        is_known = name in declared or name == _PER_LAYER or _mentions(reader, name)
        if is_known and value != usual.get(name):
            settings[name] = value
    return settings


def _plain_settings(config: PreTrainedConfig | None, reader: type) -> dict[str, Any]:
    """All settings of a configuration except the ignored ones, with those of single layers."""
    if config is None:
        return {}
    values = vars(config)  # reading an attribute that differs between layers is an error
    num_layers = values.get("num_hidden_layers")
    settings = {}
    for name, value in values.items():
        # model_type belongs to the class; a configuration read from a file repeats it
        is_ignored = name in IGNORED or name == "model_type" or _PLAN.fullmatch(name)
        if not name.startswith("_") and not is_ignored:
            settings[name] = _normal(value, num_layers, reader)
    if _PER_LAYER in values:
        settings[_PER_LAYER] = _normal(values[_PER_LAYER].per_layer_overrides, None, reader)
    return settings


@lru_cache(maxsize=256)
def _default_config(kind: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    """A configuration with its class's defaults; None where the class has none."""
    try:
        return kind()
    except (AttributeError, TypeError, ValueError):
        return None


@lru_cache(maxsize=4096)
def _mentions(reader: type, name: str) -> bool:
    """Whether the source of a model's class mentions a setting."""
    try:
        source = inspect.getsource(sys.modules[reader.__module__])
    except (OSError, TypeError):
        return True
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def _normal(value: Any, num_layers: int | None, reader: type) -> Any:
    """A setting as a JSON value, equal for all values with the same meaning."""
    if isinstance(value, PreTrainedConfig):
        return _settings(value, reader)
    if isinstance(value, dict):
        entries = {}
        for key, item in value.items():
            normal_item = _normal(item, num_layers, reader)
            if normal_item is not None and str(key) not in _ROPE_IGNORED:
                entries[str(key)] = normal_item
        return entries
    if isinstance(value, list | tuple | set):
        items = [_normal(item, num_layers, reader) for item in value]
        # a class may write the same default once or once for every layer
        has_one_per_layer = len(items) == num_layers
        if has_one_per_layer and all(item == items[0] for item in items):
            return items[0]
        return items
    if value is None or isinstance(value, bool | str):
        return value
    return repr(float(value)) if isinstance(value, int | float) else str(value)


def _is_rotary(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _rotary_changes(model: nn.Module) -> list[str]:
    """Lines about rotary embeddings that are not those of the configuration.

    Differences in the last digits do not count, because frequencies computed on another device or
    by another version have them.
    """
    lines = []
    for path, module in model.named_modules():
        if not _is_rotary(module):
            continue
        fresh = _fresh(module)
        for name, buffer in module.named_buffers(recurse=False):
            if _follows_text(module, name):
                continue
            usual = getattr(fresh, name, None)
            values = buffer.detach().float().cpu()
            # computed again, on another device or by another version, they may differ in rounding
            if (
                usual is None
                or values.shape != usual.shape
                or not torch.allclose(values, usual.cpu().to(values), rtol=1e-4, atol=0)
            ):
                lines.append(f"{path}.{name} {values.flatten().tolist()}\n")
        for name, value in vars(module).items():
            if name.endswith("attention_scaling") and value != getattr(fresh, name, None):
                lines.append(f"{path}.{name} {value}\n")
    return lines


def _follows_text(module: nn.Module, name: str) -> bool:
    """Whether a buffer changes with the length of the last text."""
    types = getattr(module, "rope_type", "default")
    kinds = types.values() if isinstance(types, dict) else [types]
    if not name.endswith("inv_freq") or "original" in name:
        return False
    return any(kind in _STATE for kind in kinds)


def _fresh(module: Any) -> nn.Module | None:
    """The same rotary embedding, made again from its configuration; None if that fails."""
    config = getattr(module, "config", None)
    if config is None:
        return None
    try:
        return type(module)(config)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
