"""Model names to local folders."""

import re
from importlib.resources import files
from pathlib import Path

from kvcat.errors import InputError
from kvcat.network import PATIENCE, hub_obstacle

BASE_NAME = "kvcat-base"
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.bin"]
_PATIENCE = PATIENCE


def local_folder(name_or_path: str | Path, *, weights: bool = True) -> Path:
    """The folder of a model: a folder as it is, a Hub name from the local Hub cache or else from the Hub.

    Args:
        name_or_path: folder, Hub name such as "Qwen/Qwen2.5-0.5B", or "kvcat-base", the small model of the package.
        weights: False fetches no more of a Hub model than its config.json.

    Raises:
        InputError: no such folder, no such model on the Hub, or no way to the Hub (told within seconds).
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{name_or_path} is a file, not a model folder")
    name = str(name_or_path)
    if name == BASE_NAME:
        return Path(str(files("kvcat") / "assets" / BASE_NAME))
    if path.is_absolute() or name.startswith((".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(f"model folder {name_or_path} does not exist")
    if (cached := _cached(name, weights)) is not None:
        return cached
    return _download(name, _PATTERNS if weights else ["config.json"])


def _cached(name: str, weights: bool) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return folder if (has_weights or not weights) and (folder / "config.json").is_file() else None


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if obstacle := hub_obstacle(_PATIENCE):
        raise InputError(f"{name} is neither a folder nor in the local Hub cache, and {obstacle}")
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=_PATIENCE))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        line = " ".join(str(error).split())[:200]
        raise InputError(f"cannot get {name} from the Hub: {line}") from error
