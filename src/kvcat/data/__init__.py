"""Documents and tokens: sources of text, held-out splits, and batches."""

from kvcat.data.documents import (
    SUFFIXES,
    Document,
    SourceFile,
    open_documents,
    open_rows,
    open_source,
    row_columns,
    text_or_bytes,
)
from kvcat.data.packing import Encoder, pack
from kvcat.data.split import Split, hash_order, name_seed, split_documents, split_of
from kvcat.data.streams import TokenData, TokenLoader, merge_states, open_tokens
from kvcat.data.token_files import prepare

__all__ = [
    "SUFFIXES",
    "Document",
    "Encoder",
    "SourceFile",
    "Split",
    "TokenData",
    "TokenLoader",
    "hash_order",
    "merge_states",
    "name_seed",
    "open_documents",
    "open_rows",
    "open_source",
    "open_tokens",
    "pack",
    "prepare",
    "row_columns",
    "split_documents",
    "split_of",
    "text_or_bytes",
]
