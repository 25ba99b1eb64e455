"""Model names to files on this machine, without loading torch, so that a wrong name costs no time."""

import os
import re
import threading
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlparse

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import get_session

from kvcat.errors import InputError
from kvcat.files import read_json

BASE_NAME = "kvcat-base"
SMOLLM2 = "smollm2-135m"
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
PATIENCE = 4.0  # seconds until the Hub counts as unreachable
_WEIGHTS = ["model*.safetensors", "pytorch_model*.bin"]
_PATTERNS = ["*.json", *_WEIGHTS, "*.model", "*.txt", "*.jinja"]


def models_home() -> Path:
    """Where ``kvcat get`` puts models: ``models`` in KVCAT_HOME, or in kvcat's folder of the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("KVCAT_HOME") or Path(cache) / "kvcat").expanduser() / "models"


def local_folder(name_or_path: str | Path, *, weights: bool = True) -> Path:
    """The folder or .gguf file of a model; a Hub name is taken from the local Hub cache, or else fetched.

    Args:
        name_or_path: folder, .gguf file, Hub name such as "Qwen/Qwen2.5-0.5B", "kvcat-base" (the small model of the
            package) or "smollm2-135m" (from ``kvcat get``).
        weights: False fetches no weights of a Hub model, only its configuration and tokenizer.

    Raises:
        InputError: no such model, or no way to the Hub, within seconds.
    """
    path, name = Path(name_or_path).expanduser(), str(name_or_path)
    if path.is_dir():
        check_no_adapter(path)
        if not (path / "config.json").is_file():
            raise InputError(f"{path} is not a model folder: it has no config.json")
        return path
    if path.exists():
        if path.suffix != ".gguf":
            raise InputError(f"{name} is a file, not a model folder and not a .gguf file")
        return path
    if name == BASE_NAME:
        return Path(str(files("kvcat") / "assets" / BASE_NAME))
    if name == SMOLLM2:
        if not (folder := models_home() / name).is_dir():
            raise InputError(f"{name} is not on this machine: `kvcat get {name}` puts it into {folder}")
        return folder
    if path.is_absolute() or name.startswith((".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(f"model folder {name} does not exist")
    return _hub_folder(name, weights)


def check_no_adapter(folder: Path) -> None:
    """Refuse a folder that holds a PEFT adapter, which transformers would apply or not by what is installed."""
    for name in _ADAPTER_FILES:
        if (folder / name).is_file():
            raise InputError(
                f"{folder} holds an adapter ({name}), which kvcat does not apply: merge it into the model "
                "(peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(FOLDER)) and give "
                "that folder"
            )


def _hub_folder(name: str, weights: bool) -> Path:
    try:
        config = try_to_load_from_cache(name, "config.json")
        folder = Path(config).parent if isinstance(config, str) else None
        if folder and (_is_complete(folder) if weights else _has_tokenizer(folder)):
            return folder
        if obstacle := hub_obstacle():
            if folder and (not weights or _weights(folder)):
                return folder  # perhaps all that the model has
            raise InputError(f"{name} is neither a folder nor in the local Hub cache, and {obstacle}")
        patterns = [pattern for pattern in _PATTERNS if weights or pattern not in _WEIGHTS]
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=PATIENCE))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise InputError(f"cannot get {name} from the Hub: {' '.join(str(error).split())[:200]}") from error


def _is_complete(folder: Path) -> bool:
    """Whether a cached model has a tokenizer and weights, all files of them that an index names."""
    named = [read_json(index)["weight_map"].values() for index in folder.glob("*.index.json")]
    found = _weights(folder)
    whole = all((folder / file).exists() for files in named for file in files)
    indexed = bool(named) or not any("-of-" in file.name for file in found)
    return whole and indexed and bool(found) and _has_tokenizer(folder)


def _has_tokenizer(folder: Path) -> bool:
    return any(folder.glob("tokenizer*"))


def _weights(folder: Path) -> list[Path]:
    return [file for pattern in _WEIGHTS for file in folder.glob(pattern)]


def hub_obstacle() -> str | None:
    """Why nothing can come from the Hub, as the end of a sentence; None where a connection opens within seconds.

    The clients of the Hub retry for minutes without a network.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    opened: list[bool] = []

    def attempt() -> None:
        with suppress(Exception):
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
            opened.append(True)

    thread = threading.Thread(target=attempt, daemon=True)  # name resolution has no timeout of its own
    thread.start()
    thread.join(PATIENCE)
    return None if opened else f"{urlparse(constants.ENDPOINT).hostname} cannot be reached"
