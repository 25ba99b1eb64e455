"""Models from folders and the Hub, and back into folders."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, overload

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from kvcat.errors import InputError
from kvcat.models.hub import local_folder
from kvcat.models.self_test import self_test

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


@overload
def load(
    name_or_path: str | Path, *, dtype: str = "float32", device: str = "cpu", tokenizer: Literal[True] = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]: ...


@overload
def load(
    name_or_path: str | Path, *, dtype: str = "float32", device: str = "cpu", tokenizer: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]: ...


def load(
    name_or_path: str | Path, *, dtype: str = "float32", device: str = "cpu", tokenizer: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A decoder-only causal LM in evaluation mode with kvcat's attention, and its tokenizer.

    The model is transformers' own class with the weights of the folder, all of them; it has passed ``self_test``. No
    code of the folder runs.

    Args:
        name_or_path: folder, or Hub name (taken from the local Hub cache where it lies there).
        dtype: "float32", "bfloat16", "float16" or "float64".
        device: a torch device.
        tokenizer: False loads none and returns None in its place.

    Raises:
        InputError: unknown dtype or absent device; missing, incomplete or corrupt folder; a Hub name without network;
            encoder-decoder, unknown or unsupported architecture.
    """
    torch_dtype = parse_dtype(dtype)
    where = parse_device(device)
    folder = local_folder(name_or_path)
    _check_config(folder)
    _check_weights(folder)
    if tokenizer and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(f"{folder} has no tokenizer (tokenizer.json): save one there, or pass tokenizer=False")
    with _quiet():
        model = _load_model(folder, torch_dtype)
        words = _load_tokenizer(folder) if tokenizer else None
    model.config.name_or_path = str(name_or_path)
    model.to(where).eval()  # type: ignore[arg-type]
    self_test(model)
    return model, words


def read_config(name_or_path: str | Path) -> PreTrainedConfig:
    """The configuration of a decoder-only causal LM, without its weights.

    Args:
        name_or_path: as in ``load``.

    Raises:
        InputError: missing folder, a Hub name without network, or no causal LM that transformers knows.
    """
    folder = local_folder(name_or_path, weights=False)
    _check_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # whatever the file's content makes transformers raise is the file's fault
        raise InputError(f"cannot read {folder / 'config.json'}: {_one_line(error)}") from error


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path) -> Path:
    """An ordinary Hugging Face folder, complete or not there at all; returns its path.

    ``AutoModelForCausalLM.from_pretrained`` loads it without any code of ours. It is written beside the target and
    renamed at the end.

    Args:
        model: its weights and configuration are written as they are; kvcat's attention is not recorded.
        tokenizer: saved with the model; None saves none.
        folder: must not exist or be empty.

    Raises:
        InputError: the folder is not empty, or cannot be written.
    """
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"output folder {target} is not empty")
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        with _quiet():
            model.save_pretrained(partial)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {target}: {_one_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def parse_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of that name.

    Raises:
        InputError: no such dtype, or none that a model computes in.
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: str) -> torch.device:
    """The torch device of that name, present on this machine.

    Raises:
        InputError: no such device.
    """
    try:
        parsed = torch.device(device)
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {device!r} is not there: {_one_line(error)}") from error
    return parsed


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} is not a model folder: it has no config.json")
    fields = _read_json(path)
    kind = fields.get("model_type")
    named = ", ".join(fields.get("architectures") or []) or kind
    if fields.get("is_encoder_decoder"):
        raise InputError(f"{named} in {folder} is an encoder-decoder; only decoder-only causal LMs are supported")
    if kind is None:
        raise InputError(f"{path} names no model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        remote = " (it needs code from its folder, which is never run)" if "auto_map" in fields else ""
        raise InputError(f"{named} in {folder} is no causal LM that transformers knows{remote}")


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise InputError(f"{index} has no weight_map")
        files = [folder / name for name in sorted(set(shards.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files and not any(folder.glob("pytorch_model*.bin")):
        raise InputError(f"{folder} has no weights (model.safetensors)")
    for file in files:
        if not file.is_file():
            raise InputError(f"{folder} is incomplete: {file.name} is missing")
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} is corrupt or truncated: {_one_line(error)}") from error


def _load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the refusal below can name the weight
        )
    except Exception as error:
        # whatever the folder's content makes transformers raise, down to AttributeError, is the folder's fault
        raise InputError(f"cannot load {folder}: {_one_line(error)}") from error
    model, info = loaded
    mismatched = sorted(str(key) for key in info.get("mismatched_keys", ()))
    if mismatched:
        raise InputError(f"{folder} has weights of another shape than config.json says, for example {mismatched[0]}")
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(f"{folder} lacks {len(missing)} of the model's weights, for example {missing[0]}")
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    numbers = ((key, re.search(r"\.(\d+)\.", key)) for key in sorted(info["unexpected_keys"]))
    if surplus := [key for key, number in numbers if number and int(number[1]) >= layers]:
        raise InputError(f"{folder} has weights of more layers than config.json's {layers}, for example {surplus[0]}")
    if broken := [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]:
        raise InputError(f"{folder} has weights that are not finite numbers, for example {broken[0]}")
    return model


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise InputError(f"cannot load the tokenizer of {folder}: {_one_line(error)}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not valid JSON: {_one_line(error)}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{path} is not a JSON object")
    return fields


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Reports and progress bars of transformers off: what matters of them is raised as an error."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


__all__ = ["DTYPES", "load", "parse_device", "parse_dtype", "read_config", "save"]
