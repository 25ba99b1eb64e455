"""The state of a gradient-based run on disk, from which it goes on after a kill."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvcat.cache import CompactCache, storage
from kvcat.cache.fingerprint import hash_tensor
from kvcat.compress.tracing import Trace
from kvcat.errors import InputError
from kvcat.types import Tensor

_FORMAT = "kvcat-gradient-state-1"


@dataclass(frozen=True)
class StateFile:
    """Where a run keeps its state: a safetensors file, written whole or not at all, with a checksum.

    Args:
        path: of the file; its folder must exist.
        settings: what identifies the run, as texts.
        every: steps between two writes, at least 1.

    Raises:
        InputError: every below 1, or a path that cannot be a file.
    """

    path: Path
    settings: dict[str, str]
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InputError(f"save_every must be at least 1, not {self.every}")
        if self.path.is_dir() or not self.path.parent.is_dir():
            reason = "it is a folder" if self.path.is_dir() else "no such folder"
            raise InputError(f"cannot keep the state of a run in {self.path}: {reason}")

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Replaces the file.

        Raises:
            InputError: no such folder, no permission, or the disk is full.
        """
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        settings = json.dumps(self.settings, sort_keys=True)
        header = {"format": _FORMAT, "settings": settings, "sha256": _checksum(tensors, settings)}
        storage.write_whole(self.path, *storage.packed(tensors, header))

    def read(self) -> dict[str, Tensor] | None:
        """The tensors last written; None where there is no file yet.

        Raises:
            InputError: not such a file, damaged, or of a run with other settings.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                header = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self.path} is truncated or not a state of a gradient-based run: {error}") from error
        if header.get("format") != _FORMAT:
            raise InputError(f"{self.path} is not a state of a gradient-based run, to be resumed by this version")
        if header.get("sha256") != _checksum(tensors, header.get("settings", "")):
            raise InputError(f"{self.path} is corrupt: its contents do not match its checksum")
        found = json.loads(header["settings"])
        for name in sorted(found.keys() | self.settings.keys()):
            theirs, ours = found.get(name), self.settings.get(name)
            if theirs != ours:
                raise InputError(f"{self.path} is the state of another run: its {name} is {theirs}, here it is {ours}")
        return tensors


def identity(traces: list[Trace]) -> dict[str, str]:
    """What tells the model and the tokens of some traces from others, as short texts."""
    digest = hashlib.sha256()
    for trace in traces:
        digest.update(f"{trace.prefix_len} {trace.supervision_start}\n".encode())
        hash_tensor(digest, "input_ids", trace.input_ids)
    return {"model": traces[0].fingerprint[:16], "tokens": digest.hexdigest()[:16]}


def cache_identity(cache: CompactCache) -> str:
    """What tells a compact cache from others, as a short text."""
    digest = hashlib.sha256(cache.fingerprint.encode())
    for index, layer in enumerate(cache.layers):
        for name, tensor in sorted(layer.tensors().items()):
            hash_tensor(digest, f"{index}.{name}", tensor)
    return f"cache {digest.hexdigest()[:16]}"


def _checksum(tensors: dict[str, Tensor], settings: str) -> str:
    digest = hashlib.sha256(settings.encode())
    for name in sorted(tensors):
        hash_tensor(digest, name, tensors[name])
    return digest.hexdigest()
