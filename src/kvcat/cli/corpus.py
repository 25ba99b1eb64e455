"""The command ``kvcat corpus``: the caches of many documents, as a store."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from kvcat import option_types as opt
from kvcat.cli import early
from kvcat.errors import InputError
from kvcat.settings import CacheSettings

if TYPE_CHECKING:
    from kvcat.corpus import CorpusResult, CorpusSettings, Store

_SHOWN_FAILURES = 5


def corpus(
    model: opt.Model,
    source: str,
    /,
    output: opt.OutputAddress,
    settings: tyro.conf.OmitArgPrefixes[CacheSettings],
    check: bool = False,
    text_column: opt.TextColumn = "text",
    id_column: opt.IdColumn = "id",
    shard: opt.Unset[str] = None,
    ray: opt.Unset[str] = None,
    workers: opt.Unset[opt.Count] = None,
    device: opt.Device = "cpu",
    dtype: opt.Dtype = "float32",
) -> None:
    """Compress every document of a corpus into a store; the model is loaded once.

    The same command continues a stopped run, and compresses a document again if its text changed.

    Example: kvcat corpus ./my-model articles.parquet --keep 0.2 -o store

    {methods}

    Args:
        source: A folder of text files, a .jsonl or .parquet file, or hub:NAME.
        output: Store to write: a folder, or an address such as s3://bucket/store.
        check: Measure every document's KL on held-out positions; about doubles the time.
        shard: RANK/COUNT: compress part RANK of COUNT parts of a corpus, RANK from 0; several
            processes share a store. By default all of the corpus.
        ray: Compress the corpus on a Ray cluster: its address, or auto. By default in this process.
        workers: Most Ray workers at a time; by default as many as the cluster has devices.
    """
    if ray is not None and shard is not None:
        raise InputError("give one of --ray and --shard")
    if ray is None and workers is not None:
        raise InputError("--workers needs --ray")
    shard_numbers = None if shard is None else _parse_shard(shard)
    early.check_method(settings.method)
    early.check_device(device)
    early.check_model(model)

    from kvcat.corpus import (
        Corpus,
        CorpusSettings,
        check_store,
        corpus_files,
        fill_store,
        left_out,
    )

    shared = {entry.name: getattr(settings, entry.name) for entry in fields(settings)}
    corpus_settings = CorpusSettings(**shared, check=check)
    columns = {"text_column": text_column, "id_column": id_column}
    files = corpus_files(source, **columns, store=output)
    check_store(output, {**corpus_settings.record(), "dtype": dtype}, shard_numbers)
    _show_left_out(left_out(source, files))
    if ray is not None:
        from kvcat.corpus.ray_engine import compress_on_ray

        result = compress_on_ray(
            model,
            source,
            output,
            corpus_settings,
            address=ray,
            workers=workers,
            device=device,
            dtype=dtype,
            show_progress=True,
            **columns,
        )
    else:
        from kvcat.models import load, load_tokenizer, read_config

        config = read_config(model)
        tokenizer = load_tokenizer(model)
        corpus_settings.check_supported(tokenizer, config)
        documents = Corpus.read(files)
        loaded, _ = load(model, dtype=dtype, device=device, tokenizer=False)
        result = fill_store(
            loaded,
            tokenizer,
            documents,
            output,
            corpus_settings,
            shard=shard_numbers,
            show_progress=True,
        )
    _show(result, output, corpus_settings)
    num_failed = len(result.failures)
    if num_failed:
        look = shlex.join(["kvcat", "info", str(output)])
        raise InputError(
            f"{num_failed} of {result.num_documents} documents have no cache: `{look}`"
        )


def _parse_shard(text: str) -> tuple[int, int]:
    """Number and count of a part, from RANK/COUNT."""
    number, _, count = text.partition("/")
    is_number = all(word.isascii() and word.isdigit() for word in (number, count))
    if not is_number or not int(number) < int(count):
        raise InputError(f"--shard is {text!r}; it is RANK/COUNT with RANK from 0 to COUNT - 1")
    return int(number), int(count)


def _show_left_out(files: Sequence[Path]) -> None:
    """Name on standard error the kinds of files that are not documents."""
    if files:
        kinds = sorted({file.suffix or file.name for file in files})
        dots = ", ..." if len(kinds) > _SHOWN_FAILURES else ""
        shown = ", ".join(kinds[:_SHOWN_FAILURES])
        print(f"left out: {len(files)} files of other kinds ({shown}{dots})", file=sys.stderr)


def _show(result: "CorpusResult", output: str, settings: "CorpusSettings") -> None:
    """Print what a run did; failures go to standard error."""
    for row in result.failures[:_SHOWN_FAILURES]:
        print(f"no cache of {row.id[:80]!r}: {row.error}", file=sys.stderr)
    if len(result.failures) > _SHOWN_FAILURES:
        num_others = len(result.failures) - _SHOWN_FAILURES
        print(f"and {num_others} others: see the manifest", file=sys.stderr)
    rate = 60 * result.num_made / max(result.seconds, 1e-9)
    speed = f", {rate:.3g} documents a minute" if result.num_made else ""
    print(
        f"{output}: {result.num_made} caches made and {result.num_kept} kept of "
        f"{result.num_documents} documents, {len(result.failures)} without a cache "
        f"({settings.method}{speed})"
    )


def store_facts(store: "Store") -> dict[str, str]:
    """What ``kvcat info`` shows about a store, by name."""
    rows = store.rows
    made = [row for row in rows if row.error is None]
    failed = [row for row in rows if row.error is not None]
    settings: dict[str, Any] = dict(store.settings)
    model = settings.pop("model")
    fingerprint = settings.pop("fingerprint")
    method = settings.pop("method")
    shown = {name: value for name, value in settings.items() if value not in (None, False)}
    num_tokens = sum(row.tokens or 0 for row in made)
    num_slots = sum(row.slots or 0 for row in made)
    kls = [row.kl for row in made if row.kl is not None]
    facts = {
        "store": f"{len(made)} caches, {len(failed)} documents without one",
        "tokens": f"{num_tokens:,} in {num_slots:,.0f} slots per layer and head",
        "bytes": f"{sum(row.bytes or 0 for row in made):,}",
        "method": str(method),
        "model": f"{model}, fingerprint {fingerprint[:12]}",
        "settings": ", ".join(f"{name} {value}" for name, value in sorted(shown.items())),
        "time": f"{sum(row.seconds for row in made):.1f} s",
    }
    num_long = sum(row.supervision != settings.get("supervision") for row in made)
    if num_long:
        facts["too long"] = f"{num_long} for a copy of the document, so made with supervision self"
    if kls:
        facts["kl"] = f"{sum(kls) / len(kls):z.5f} nats per token on average, held out"
    for number, row in enumerate(failed[:_SHOWN_FAILURES], 1):
        facts[f"without {number}"] = f"{row.id[:80]!r}: {row.error}"
    if len(failed) > _SHOWN_FAILURES:
        facts["without"] = f"{len(failed) - _SHOWN_FAILURES} others: see the manifest"
    return facts
