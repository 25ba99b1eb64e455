"""Documents and tokens: where text comes from, what is held out, and how it becomes batches."""

from kvcat.data.documents import Document, file_documents, hub_documents, open_documents
from kvcat.data.held_out import split_documents
from kvcat.data.installed import installed_documents
from kvcat.data.packing import TokenTable, encode_documents, pack
from kvcat.data.split import Split, drop_near_duplicates, hash_order, split_of, split_position

__all__ = [
    "Document",
    "Split",
    "TokenTable",
    "drop_near_duplicates",
    "encode_documents",
    "file_documents",
    "hash_order",
    "hub_documents",
    "installed_documents",
    "open_documents",
    "pack",
    "split_documents",
    "split_of",
    "split_position",
]
