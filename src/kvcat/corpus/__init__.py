"""Many documents: a store of their caches, and the runs that fill it.

corpus -> batches of equal length -> caches in a store, rows in its manifest
"""

from kvcat.corpus.compressor import CorpusCompressor
from kvcat.corpus.manifest import Row
from kvcat.corpus.run import CorpusResult, compress_corpus, fill_store
from kvcat.corpus.settings import CorpusSettings
from kvcat.corpus.sources import Corpus, CorpusDocument, corpus_files, left_out, read_corpus
from kvcat.corpus.store import CHAT_STORE, Store, check_store

__all__ = [
    "CHAT_STORE",
    "Corpus",
    "CorpusCompressor",
    "CorpusDocument",
    "CorpusResult",
    "CorpusSettings",
    "Row",
    "Store",
    "check_store",
    "compress_corpus",
    "corpus_files",
    "fill_store",
    "left_out",
    "read_corpus",
]
