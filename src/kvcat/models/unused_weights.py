"""Checks for weights in a model's folder that the model does not use."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from kvcat.errors import InputError
from kvcat.types import Float, Tensor

_FILES = ("model*.safetensors", "pytorch_model*.bin")  # transformers prefers the first


def check_weights(folder: Path, model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """Raise ``InputError`` for weights that the model does not use and that would change it.

    Buffers are harmless if the model computes the same numbers itself: rotary frequencies, position
    ids, causal masks. The model's class lists weights that it ignores, such as layers that predict
    further tokens; these are not among the unexpected ones. If the embeddings are tied, a stored
    output matrix must equal them.

    Args:
        unexpected: names of weights that transformers did not use.
    """
    stored = _stored_in(folder)
    # transformers drops frequencies without reporting them
    frequencies = {name for name in stored if name.endswith("inv_freq")}
    unused = frequencies.union(unexpected)
    harmful = [name for name in unused if not _is_harmless(stored, name, model)]
    if harmful:
        raise InputError(
            f"{folder} has {len(harmful)} weights that the model does not use, for example "
            f"{min(harmful)}: config.json describes another model"
        )
    _check_tied_head(folder, stored, model)


def _check_tied_head(folder: Path, stored: dict[str, Path], model: PreTrainedModel) -> None:
    """Reject an output matrix that differs from the embeddings to which config.json ties it."""
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if head is None or embedding is None:
        return
    if not model.config.get_text_config(decoder=True).tie_word_embeddings:
        return
    name = next((name for name in stored if name.endswith("lm_head.weight")), None)
    is_tied = head.weight is embedding.weight or torch.equal(head.weight, embedding.weight)
    if is_tied and (name is None or torch.equal(_read(stored, name).to(head.weight), head.weight)):
        return
    raise InputError(
        f"{folder} has {name or 'an output matrix'} that differs from the embeddings, "
        "but config.json ties the two (tie_word_embeddings)"
    )


def _is_harmless(stored: dict[str, Path], name: str, model: PreTrainedModel) -> bool:
    """Whether a tensor is a buffer that the model computes itself, with the same numbers."""
    if name not in stored:
        return False
    last = name.rpartition(".")[2]
    if last == "inv_freq":
        return _are_frequencies(_read(stored, name).float().flatten(), model)
    if last == "masked_bias":
        return _read(stored, name).numel() == 1
    if last == "position_ids":
        values = _read(stored, name).flatten()
        return torch.equal(values, torch.arange(len(values), dtype=values.dtype))
    if last == "bias":
        values = _read(stored, name)
        return values.dim() == 4 and torch.equal(values, values.new_ones(values.shape).tril())
    return False


def _are_frequencies(values: Float[Tensor, " pairs"], model: PreTrainedModel) -> bool:
    """Whether these are the model's rotary frequencies, before or after a scaling of them."""
    buffers = [
        buffer.float().cpu() for name, buffer in model.named_buffers() if name.endswith("inv_freq")
    ]
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    theta = parameters.get("rope_theta")
    if isinstance(theta, int | float):
        buffers.append(float(theta) ** -(torch.arange(len(values)) / len(values)))
    same_size = [buffer for buffer in buffers if buffer.shape == values.shape]
    # half precision rounds small frequencies by some per cent
    return any(torch.allclose(values, buffer, rtol=0.02, atol=1e-6) for buffer in same_size)


def _stored_in(folder: Path) -> dict[str, Path]:
    """The file of every weight in a folder, by the weight's name."""
    for pattern in _FILES:
        stored: dict[str, Path] = {}
        for file in sorted(folder.glob(pattern)):
            stored |= dict.fromkeys(_names(file), file)
        if stored:
            return stored
    return {}


def _names(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    return list(_unpickled(file))


def _read(stored: dict[str, Path], name: str) -> Tensor:
    if stored[name].suffix == ".safetensors":
        with safe_open(stored[name], framework="pt") as tensors:
            return tensors.get_tensor(name)
    return _unpickled(stored[name])[name]


def _unpickled(file: Path) -> dict[str, Any]:
    """The tensors of an older file of weights, mapped into memory if its format allows that."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        content = torch.load(file, map_location="cpu", weights_only=True)
    return content if isinstance(content, dict) else {}
