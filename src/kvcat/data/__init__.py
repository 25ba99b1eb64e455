"""Documents and tokens: sources of text, held-out splits, and batches."""
# isort: skip_file

# fmt: off
from kvcat.data.documents import (
    SUFFIXES as SUFFIXES, Document as Document, SourceFile as SourceFile, is_hidden as is_hidden,
    open_documents as open_documents, open_rows as open_rows, open_source as open_source,
    row_columns as row_columns, text_or_bytes as text_or_bytes,
)
from kvcat.data.packing import Encoder as Encoder, pack as pack
from kvcat.data.split import (
    Split as Split, hash_order as hash_order, name_seed as name_seed,
    split_documents as split_documents, split_of as split_of,
)
from kvcat.data.streams import (
    TokenData as TokenData, TokenLoader as TokenLoader, merge_states as merge_states,
    open_tokens as open_tokens,
)
from kvcat.data.token_files import prepare as prepare
# fmt: on
