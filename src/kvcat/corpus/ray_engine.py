"""Compression of a corpus on a Ray cluster: batches as rows of a data set, one model an actor.

Scheduling, retries of lost work and the number of actors are Ray Data's.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcat.cache import fingerprint
from kvcat.corpus.compressor import CorpusCompressor, EncodedDocument, encode_document
from kvcat.corpus.manifest import Row
from kvcat.corpus.plan import missing_in, planned_batches
from kvcat.corpus.run import CorpusResult, record_rows
from kvcat.corpus.settings import CorpusSettings
from kvcat.corpus.sources import Corpus, CorpusDocument, corpus_files
from kvcat.corpus.storage import open_storage
from kvcat.corpus.store import open_writer
from kvcat.files import expanded
from kvcat.models import load, load_tokenizer, model_name, positions_of, read_config
from kvcat.ray_cluster import (
    absolute,
    connect,
    device_resources,
    num_devices,
    ray,
    worker_errors,
)

_BATCH = "batch"
_ROWS = "rows"
_MOST_BLOCKS = 2000  # what a lost worker repeats is one block


class RayCompressor:
    """An actor of Ray Data: loads the model once, then compresses batches.

    Args:
        model: folder or Hub name, readable on every node.
        store: address, writable on every node.
        dtype: type of the weights.
    """

    def __init__(
        self, model: str, store: str, settings: CorpusSettings, device: str, dtype: str
    ) -> None:
        loaded, self._tokenizer = load(model, dtype=dtype, device=device)
        self._settings = settings
        self._positions = positions_of(loaded.config)
        storage = open_storage(store)
        self._compress = CorpusCompressor(loaded, self._tokenizer, settings, storage)

    def __call__(self, table: dict[str, Any]) -> dict[str, list[str]]:
        """For every batch, as JSON, the rows of its documents, whose caches are then stored."""
        results = []
        for content in table[_BATCH]:
            batch = []
            for record in json.loads(content):
                is_made = record.pop("is_made")
                document = CorpusDocument(**record)
                encoded = encode_document(
                    document, self._tokenizer, self._settings, self._positions
                )
                batch.append(replace(encoded, is_made=is_made))
            rows = [row.record() for row in self._compress(batch)]
            results.append(json.dumps(rows))
        return {_BATCH: list(table[_BATCH]), _ROWS: results}


def compress_on_ray(
    model: str,
    source: str | Path,
    store: str | Path,
    settings: CorpusSettings,
    *,
    address: str = "auto",
    workers: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    text_column: str = "text",
    id_column: str = "id",
    show_progress: bool = False,
) -> CorpusResult:
    """Compress a corpus as ``compress_corpus`` does, on a Ray cluster.

    An actor has one accelerator, or one processor if the device is "cpu". If an actor dies, Ray
    starts another, which repeats its batch: caches have the same names and the manifest has one row
    per document, so that nothing is lost and nothing exists twice. The texts of the corpus pass
    through Ray's object store.

    Args:
        model: folder or Hub name, readable on every node.
        source, store, settings, text_column, id_column, show_progress: as in ``compress_corpus``.
        address: of the cluster, or "auto" for the running one.
        workers: most actors; None: one for every device of the cluster.
        device: torch device of the actors.
        dtype: type of the weights.

    Raises:
        InputError: no cluster at the address; and as ``compress_corpus``.
    """
    store = absolute(store)
    model = absolute(model) if expanded(model).exists() else model
    files = corpus_files(str(source), text_column=text_column, id_column=id_column, store=store)
    corpus = Corpus.read(files)
    tokenizer = load_tokenizer(model)
    config = read_config(model)
    settings.check_supported(tokenizer, config)
    positions = positions_of(config)
    connect(address)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    resources = device_resources(device)
    identify: Any = ray.remote(**resources)(_identity)
    with worker_errors():
        identity = ray.get(identify.remote(model, device, dtype))
    settings.check_model(identity["fingerprint"], identity["model"])
    digest = settings.digest_of(tokenizer)
    about = {**settings.record(), "dtype": dtype, "tokenizer": digest, **identity}

    def encode(document: CorpusDocument) -> EncodedDocument:
        return encode_document(document, tokenizer, settings, positions)

    with open_writer(store, about) as writer:
        size = missing_in(writer.has, corpus)
        batches = list(planned_batches(corpus.documents(), encode, writer.has))
        for batch in batches:
            writer.replaces(encoded.document for encoded in batch)
        most = workers or num_devices(device)
        texts = [
            json.dumps([_record(encoded.document, encoded.is_made) for encoded in batch])
            for batch in batches
        ]
        data = ray.data.from_items(
            [{_BATCH: text} for text in texts],  # Ray passes texts to other processes
            override_num_blocks=max(1, min(len(batches), _MOST_BLOCKS)),
        ).map_batches(
            RayCompressor,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
            fn_constructor_args=(model, store, settings, device, dtype),
            **resources,
        )
        results = _results(data) if batches else iter(())
        return record_rows(writer, size, results, show_progress=show_progress)


def _identity(model: str, device: str, dtype: str) -> dict[str, str]:
    """The name and fingerprint of a model, computed on the cluster."""
    loaded, _ = load(model, dtype=dtype, device=device, tokenizer=False)
    return {"model": model_name(loaded), "fingerprint": fingerprint(loaded)}


def _record(document: CorpusDocument, is_made: bool) -> dict[str, Any]:
    return {
        "id": document.id,
        "text": document.text,
        "problem": document.problem,
        "is_made": is_made,
    }


def _results(data: Any) -> Iterator[tuple[list[EncodedDocument], list[Row]]]:
    """Documents and rows of the batches, as they are finished."""
    with worker_errors():
        for result in data.iter_rows():
            batch = []
            for record in json.loads(result[_BATCH]):
                is_made = record.pop("is_made")
                batch.append(EncodedDocument(CorpusDocument(**record), is_made=is_made))
            yield batch, [Row.of(record) for record in json.loads(result[_ROWS])]
