"""Reads the files of ``torch.distributed.checkpoint`` without running code from them.

torch reads ``.metadata`` and values that are not tensors with pickle, which calls whatever function
a file names. A checkpoint that somebody else made could run a command.
"""

import pickle
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

# what torch writes into .metadata, besides the types of numbers
_ALLOWED = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
}


class SafeReader(FileSystemReader):
    """torch's reader of a folder; its ``.metadata`` may only hold what torch writes there."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:  # noqa: ARG002
        """The description of the tensors in the folder.

        Raises:
            UnpicklingError: the file names another class or a function.
        """
        with Path(self._get_metadata_path(options.get("rank"))).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds {type(metadata).__name__}, no metadata")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """torch's planner; values that are not tensors are read with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Set a value; ``UnpicklingError`` if its bytes name a function."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        """The class of that name, if it is one that torch writes."""
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member
        is_allowed = global_name in _ALLOWED.get(module_name, ())
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            is_allowed = True
        if not is_allowed:
            raise pickle.UnpicklingError(
                f"it names {module_name}.{global_name}, which no checkpoint holds"
            )
        return super().find_class(module_name, global_name)


def _member(owner: Any, name: str) -> Any:
    """A member of an enumeration, which Python writes with getattr before 3.11.4."""
    if not (isinstance(owner, type) and issubclass(owner, Enum)):
        raise pickle.UnpicklingError("it reads an attribute, which no checkpoint does")
    return owner[name]
