"""Documents and tokens: where text comes from, what is held out, and how it becomes batches.

Names are imported on first use, so that a worker process that only reads and tokenises starts without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcat.data.documents import Document, file_documents, hub_documents, open_documents, shard_documents
    from kvcat.data.encoding import Encoder
    from kvcat.data.held_out import local_splits, split_documents
    from kvcat.data.installed import installed_documents
    from kvcat.data.opening import TokenData, open_tokens
    from kvcat.data.packing import TokenTable, encode_documents, pack
    from kvcat.data.prepared import is_prepared, open_prepared
    from kvcat.data.preparing import prepare
    from kvcat.data.shards import Shard, Shards, open_shards
    from kvcat.data.source import TableSource, TokenSource, merge_states
    from kvcat.data.split import Split, drop_near_duplicates, hash_order, split_of, split_position
    from kvcat.data.streams import ReadingStopped, TokenStreams

_HOME = {
    "Document": "documents",
    "Encoder": "encoding",
    "ReadingStopped": "streams",
    "Shard": "shards",
    "Shards": "shards",
    "Split": "split",
    "TableSource": "source",
    "TokenData": "opening",
    "TokenSource": "source",
    "TokenStreams": "streams",
    "TokenTable": "packing",
    "drop_near_duplicates": "split",
    "encode_documents": "packing",
    "file_documents": "documents",
    "hash_order": "split",
    "hub_documents": "documents",
    "installed_documents": "installed",
    "is_prepared": "prepared",
    "local_splits": "held_out",
    "merge_states": "source",
    "open_documents": "documents",
    "open_prepared": "prepared",
    "open_shards": "shards",
    "open_tokens": "opening",
    "pack": "packing",
    "prepare": "preparing",
    "shard_documents": "documents",
    "split_documents": "held_out",
    "split_of": "split",
    "split_position": "split",
}

__all__ = [
    "Document", "Encoder", "ReadingStopped", "Shard", "Shards", "Split", "TableSource", "TokenData", "TokenSource",
    "TokenStreams", "TokenTable", "drop_near_duplicates", "encode_documents", "file_documents", "hash_order",
    "hub_documents", "installed_documents", "is_prepared", "local_splits", "merge_states", "open_documents",
    "open_prepared", "open_shards", "open_tokens", "pack", "prepare", "shard_documents", "split_documents", "split_of",
    "split_position",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"kvcat.data.{_HOME[name]}"), name)
    raise AttributeError(f"module 'kvcat.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
