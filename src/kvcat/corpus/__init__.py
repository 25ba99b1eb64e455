"""Many documents: a store of their caches, and the runs that fill it.

corpus -> batches of equal length -> caches in a store, rows in its manifest
"""
# isort: skip_file

# fmt: off
from kvcat.corpus.compressor import CorpusCompressor as CorpusCompressor
from kvcat.corpus.manifest import Row as Row
from kvcat.corpus.run import (
    CorpusResult as CorpusResult, compress_corpus as compress_corpus, fill_store as fill_store,
)
from kvcat.corpus.settings import CorpusSettings as CorpusSettings
from kvcat.corpus.sources import (
    Corpus as Corpus, CorpusDocument as CorpusDocument, corpus_files as corpus_files,
    left_out as left_out, read_corpus as read_corpus,
)
from kvcat.corpus.store import Store as Store, check_store as check_store
# fmt: on
