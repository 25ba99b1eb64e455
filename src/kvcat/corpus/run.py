"""Compression of a corpus into a store, in this process."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import fingerprint
from kvcat.corpus.compressor import CorpusCompressor, EncodedDocument, encode_document
from kvcat.corpus.manifest import Row
from kvcat.corpus.plan import CorpusSize, missing_in, planned_batches
from kvcat.corpus.settings import CorpusSettings
from kvcat.corpus.sources import Corpus, CorpusDocument, corpus_files
from kvcat.corpus.store import StoreWriter, open_writer
from kvcat.errors import check_shard
from kvcat.models import check_supported, model_name, positions_of
from kvcat.progress import disable_bar


@dataclass(frozen=True)
class CorpusResult:
    """What a run did.

    Args:
        num_documents: documents of the corpus.
        num_made: caches that this run made.
        num_kept: caches that the store had already.
        failures: rows of documents that cannot have a cache.
        seconds: time of the run, without loading the model.
    """

    num_documents: int
    num_made: int
    num_kept: int
    failures: Sequence[Row]
    seconds: float


def compress_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str | Path,
    store: str | Path,
    settings: CorpusSettings | None = None,
    *,
    text_column: str = "text",
    id_column: str = "id",
    shard: tuple[int, int] | None = None,
    show_progress: bool = False,
) -> CorpusResult:
    """Compress every document of a corpus that a store does not have.

    A killed run continues: a cache is whole or absent, and finished documents are in a log.
    Documents whose text changed are made again. Documents of the store that the corpus does not
    have are left.

    Args:
        model, tokenizer: the ones that will answer.
        source: a folder of text files, a ``.jsonl`` or ``.parquet`` file, or ``hub:NAME``.
        store: a folder or an address of fsspec.
        settings: how caches are made; None: the default method with a fifth of the slots.
        text_column, id_column: columns of a table.
        shard: (number, count): make only every count-th batch, for processes that share a store.
        show_progress: show a bar on standard error.

    Raises:
        InputError: no such corpus, one with an id twice or without any text; a method's file of
            budgets of another model; a store that was made with another model or other settings;
            another process that writes to the store; a full disk.
    """
    files = corpus_files(
        str(source), text_column=text_column, id_column=id_column, store=str(store)
    )
    return fill_store(
        model,
        tokenizer,
        Corpus.read(files),
        store,
        settings or CorpusSettings(),
        shard=shard,
        show_progress=show_progress,
    )


def fill_store(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    store: str | Path,
    settings: CorpusSettings,
    *,
    shard: tuple[int, int] | None = None,
    show_progress: bool = False,
) -> CorpusResult:
    """Compress every document of a corpus that a store does not have.

    Args:
        corpus: a corpus that was read once.
        model, tokenizer, store, settings, shard, show_progress: as in ``compress_corpus``.

    Raises:
        InputError: as ``compress_corpus``; nothing is written if model, settings or shard do not
            fit.
    """
    if shard is not None:
        check_shard(*shard)
    check_supported(model)
    settings.check_supported(tokenizer, model.config)
    about = {"model": model_name(model), "fingerprint": fingerprint(model)}
    settings.check_model(about["fingerprint"], about["model"])

    def encode(document: CorpusDocument) -> EncodedDocument:
        return encode_document(document, tokenizer, settings, positions_of(model.config))

    about["tokenizer"] = settings.digest_of(tokenizer)
    recorded = {**settings.record(), "dtype": dtype_name(model), **about}
    with open_writer(store, recorded, shard) as writer:
        compressor = CorpusCompressor(model, tokenizer, settings, writer.storage)
        size = missing_in(writer.has, corpus)
        batches = planned_batches(corpus.documents(), encode, writer.has, shard)

        def made(batch: Sequence[EncodedDocument]) -> tuple[Sequence[EncodedDocument], list[Row]]:
            writer.replaces(one.document for one in batch)
            return batch, compressor(batch)

        return record_rows(writer, size, map(made, batches), show_progress=show_progress)


def dtype_name(model: PreTrainedModel) -> str:
    """The name of the model's type of numbers."""
    return str(model.dtype).removeprefix("torch.")


def record_rows(
    writer: StoreWriter,
    size: CorpusSize,
    batches: Iterator[tuple[Sequence[EncodedDocument], Sequence[Row]]],
    *,
    show_progress: bool,
) -> CorpusResult:
    """Write the rows of finished batches to the store's log, and count them.

    Args:
        batches: documents of each batch with their rows.
        show_progress: show a bar on standard error.
    """
    start = time.monotonic()
    num_made = 0
    failures = []
    with CorpusBar(size, shown=show_progress) as bar:
        for batch, rows in batches:
            writer.add(rows)
            failed = [row for row in rows if row.error is not None]
            failures += failed
            num_made += len(rows) - len(failed)
            texts = [one.document.text for one in batch if not one.is_made]
            bar.advance(len(rows), sum(map(len, texts)))
    seconds = time.monotonic() - start
    num_kept = size.num_documents - size.num_missing
    return CorpusResult(size.num_documents, num_made, num_kept, failures, seconds)


class CorpusBar:
    """A progress bar of documents with their number a minute and the time left.

    The time left follows from characters, because documents come in the order of their length.

    Args:
        shown: False shows nothing.
    """

    def __init__(self, size: CorpusSize, *, shown: bool) -> None:
        self._size = size
        self._start = time.monotonic()
        self._characters = 0
        self._bar: Any = tqdm(
            total=size.num_missing,
            desc="documents",
            disable=disable_bar(not shown),
            mininterval=0.1 if sys.stderr.isatty() else 10.0,
            file=sys.stderr,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
        )

    def __enter__(self) -> "CorpusBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, num_documents: int, num_characters: int) -> None:
        """Count finished documents with their characters."""
        self._characters += num_characters
        elapsed = max(1e-9, time.monotonic() - self._start)
        rate = 60 * (self._bar.n + num_documents) / elapsed
        left = self._size.missing_characters - self._characters
        seconds_left = elapsed * left / max(1, self._characters)
        text = f"{rate:.3g} documents/min, {tqdm.format_interval(seconds_left)} left"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(num_documents)
