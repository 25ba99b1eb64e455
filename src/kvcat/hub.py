"""Access to the Hugging Face Hub: models as local files, data sets, and a check that the Hub
answers.

The module loads neither torch nor transformers, so that a wrong name is reported at once.
"""

import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import get_session

from kvcat.errors import InputError, did_you_mean, one_line
from kvcat.files import expanded, read_json

BASE_NAME = "kvcat-base"
SMOLLM2 = "smollm2-135m"
HUB_PREFIX = "hub:"
"""The beginning of the name of a data set on the Hub."""
PATIENCE = 4.0  # seconds until the Hub counts as unreachable

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_WEIGHTS = ["model*.safetensors", "pytorch_model*.bin"]
_NO_WEIGHTS = ["*.json", "*.model", "*.txt", "*.jinja"]
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def models_home() -> Path:
    """The folder of ``kvcat get``: ``models`` in KVCAT_HOME, or else in the user's cache."""
    home = os.environ.get("KVCAT_HOME")
    if not home:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = Path(cache) / "kvcat"
    return expanded(home) / "models"


def local_folder(name_or_path: str | Path, *, weights: bool = True) -> Path:
    """The folder or .gguf file of a model, downloaded if it is not in the local Hub cache.

    Args:
        name_or_path: folder, .gguf file, Hub name such as "Qwen/Qwen2.5-0.5B", "kvcat-base" (the
            small model of the package) or "smollm2-135m" (from ``kvcat get``).
        weights: False downloads no weights of a Hub model, only its configuration and tokenizer.

    Raises:
        InputError: no such model, or no connection to the Hub, within seconds.
    """
    path = expanded(name_or_path)
    name = str(name_or_path)
    if path.exists():
        return _check_model_path(path, name)
    if name == BASE_NAME:
        return Path(str(files("kvcat") / "assets" / BASE_NAME))
    if name == SMOLLM2:
        folder = models_home() / name
        if not folder.is_dir():
            raise InputError(
                f"{name} is not on this machine: `kvcat get {name}` puts it into {folder}"
            )
        return folder
    if path.suffix == ".gguf":
        raise InputError(f"file {name} does not exist{_similar_file(path)}")
    is_path = path.is_absolute() or name.startswith((".", "~"))
    if is_path or not _HUB_NAME.fullmatch(name):
        raise InputError(f"model folder {name} does not exist{_similar_file(path)}")
    hint = did_you_mean(name, (BASE_NAME, SMOLLM2))
    if SMOLLM2 in hint and not (models_home() / SMOLLM2).is_dir():
        hint = hint.replace("?)", f", after `kvcat get {SMOLLM2}`?)")
    return _hub_folder(name, weights, hint or _similar_file(path))


def _similar_file(path: Path) -> str:
    """A hint at a file or folder next to a path that does not exist."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    return did_you_mean(path.name, names)


def _check_model_path(path: Path, name: str) -> Path:
    """The path, if it is a model folder or a .gguf file."""
    if path.is_dir():
        check_no_adapter(path)
        if not (path / "config.json").is_file():
            raise InputError(f"{path} is not a model folder: it has no config.json")
    elif path.suffix != ".gguf":
        raise InputError(f"{name} is a file, not a model folder and not a .gguf file")
    return path


def check_no_adapter(folder: Path) -> None:
    """Raise an ``InputError`` for a folder that holds a PEFT adapter.

    Whether transformers applies it depends on the packages that are installed.
    """
    for name in _ADAPTER_FILES:
        if (folder / name).is_file():
            raise InputError(
                f"{folder} holds an adapter ({name}), which kvcat does not apply: merge it into "
                "the model (peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()"
                ".save_pretrained(FOLDER)) and give that folder"
            )


def _hub_folder(name: str, weights: bool, hint: str) -> Path:
    """The folder of a model in the local Hub cache, downloaded if it is not complete there.

    Args:
        name: name on the Hub.
        weights: as in ``local_folder``.
        hint: at another name that was probably meant, for messages.
    """
    try:
        config = try_to_load_from_cache(name, "config.json")
        folder = Path(config).parent if isinstance(config, str) else None
        if folder is not None:
            is_complete = _is_complete(folder) if weights else _has_tokenizer(folder)
            if is_complete:
                return folder
        obstacle = hub_obstacle()
        if obstacle is None:
            patterns = _NO_WEIGHTS + _WEIGHTS if weights else _NO_WEIGHTS
            return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=PATIENCE))
        if folder is not None and (not weights or _weights(folder)):
            return folder  # the model may have no other files
        raise InputError(
            f"{name} is neither a folder nor in the local Hub cache{hint}, and {obstacle}"
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        message = " ".join(str(error).split())[:200]
        raise InputError(f"cannot get {name} from the Hub{hint}: {message}") from error


def _is_complete(folder: Path) -> bool:
    """Whether a cached model has a tokenizer and weights, with all files that an index names."""
    weights = _weights(folder)
    if not weights or not _has_tokenizer(folder):
        return False
    indices = list(folder.glob("*.index.json"))
    if not indices:
        return not any("-of-" in file.name for file in weights)
    for index in indices:
        for file in read_json(index)["weight_map"].values():
            if not (folder / file).exists():
                return False
    return True


def _has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any(folder.glob("tokenizer*"))


def _weights(folder: Path) -> list[Path]:
    """The files of weights in a folder."""
    return [file for pattern in _WEIGHTS for file in folder.glob(pattern)]


@dataclass(frozen=True)
class HubDataSet:
    """A data set on the Hub."""

    repository: str  # OWNER/NAME, or NAME alone
    config: str | None
    split: str

    @classmethod
    def parse(cls, source: str) -> "HubDataSet":
        """The data set that ``hub:OWNER/NAME[/CONFIG][@SPLIT]`` names; split ``train`` if absent.

        Raises:
            InputError: it names none.
        """
        path, _, split = source.removeprefix(HUB_PREFIX).partition("@")
        words = path.split("/")
        repository = "/".join(words[:2])
        config = "/".join(words[2:])
        if not _REPOSITORY.fullmatch(repository):
            raise InputError(
                f"{source} names no data set: write hub:OWNER/NAME, hub:OWNER/NAME/CONFIG or "
                "...@SPLIT"
            )
        return cls(repository, config or None, split or "train")

    def file_urls(self, revision: str | None = None) -> Sequence[str]:
        """The URLs of the split's files, sorted; nothing is downloaded but their list.

        Args:
            revision: commit; None: the newest.

        Raises:
            InputError: no such data set or split, a local folder of that name, or no connection to
                the Hub, within seconds.
        """
        self._check_is_not_here()
        obstacle = hub_obstacle()
        if obstacle is not None:
            raise InputError(f"data set {self.repository!r} is on the Hub, and {obstacle}")
        import datasets  # takes a second, which other users of this module need not wait

        try:
            builder = datasets.load_dataset_builder(self.repository, self.config, revision=revision)
        except (OSError, ValueError) as error:
            raise InputError(
                f"data set {self.repository!r} cannot be opened: {one_line(error)}"
            ) from None
        files_by_split: Mapping[Any, Iterable[Any]] = builder.config.data_files or {}
        urls = sorted(map(str, files_by_split.get(self.split) or ()))
        if not urls:
            splits = ", ".join(map(str, files_by_split)) or "none"
            raise InputError(
                f"data set {self.repository!r} has no split {self.split!r}; its splits: {splits}"
            )
        return urls

    def rows(self) -> Iterable[Any]:
        """All rows of the split; from the local cache alone if HF_HUB_OFFLINE is set.

        Raises:
            InputError: a local folder of that name, or no connection to the Hub, within seconds.
            OSError, ValueError, datasets.exceptions.DatasetsError: the data set cannot be read.
        """
        self._check_is_not_here()
        # with HF_HUB_OFFLINE datasets looks into its cache, at once
        obstacle = None if constants.HF_HUB_OFFLINE else hub_obstacle()
        if obstacle is not None:
            raise InputError(
                f"data set {self.repository!r} is on the Hub, and {obstacle}: name a local copy, "
                "or set HF_HUB_OFFLINE=1 to use the one that an earlier run left in the cache"
            )
        import datasets

        return datasets.load_dataset(self.repository, self.config, split=self.split)

    def _check_is_not_here(self) -> None:
        """Reject a data set that has the name of a local folder, which datasets would read."""
        if Path(self.repository).exists():
            raise InputError(
                f"hub:{self.repository} is also the name of a folder here: name the folder without "
                "hub:, or start elsewhere"
            )


def hub_obstacle() -> str | None:
    """The reason why the Hub cannot be used, as the end of a sentence; None if it answers within
    seconds.

    The clients of the Hub retry for minutes without a network.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    has_answered = threading.Event()

    def connect() -> None:
        with suppress(Exception):
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
            has_answered.set()

    # a thread, because name resolution has no timeout
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if has_answered.is_set():
        return None
    return f"{urlparse(constants.ENDPOINT).hostname} cannot be reached"
