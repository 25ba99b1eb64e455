"""``kvcat compress --corpus``: the caches of many documents, as a store."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcat.cli import early
from kvcat.errors import InputError

if TYPE_CHECKING:
    from kvcat.corpus import CorpusResult, CorpusSettings, Store

_SHOWN_FAILURES = 5


def compress_to_store(
    model: str,
    output: str,
    corpus: str,
    *,
    text: Path | None,
    method: str,
    keep: float | None,
    slots: int | None,
    bits: str,
    unsupported: Mapping[str, object],
    supervision: str,
    chat: bool,
    room: int | None,
    seed: int,
    device: str,
    dtype: str,
    text_column: str | None,
    id_column: str | None,
    check: bool,
    shard: str | None,
    ray: str | None,
    workers: int | None,
) -> None:
    """Compress a corpus into a store with the options of ``kvcat compress``."""
    if text is not None:
        raise InputError("give one of --text and --corpus")
    for name, value in unsupported.items():
        if value is not None:
            raise InputError(f"{name} is for one document (--text), not for --corpus")
    if keep is not None and slots is not None:
        raise InputError("give one of --keep and --slots")
    if ray is not None and shard is not None:
        raise InputError("give one of --ray and --shard")
    if ray is None and workers is not None:
        raise InputError("--workers needs --ray")
    shard_numbers = None if shard is None else _parse_shard(shard)
    early.check_method(method)
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
    from kvcat.corpus.sources import DEFAULT_ID_COLUMN, DEFAULT_TEXT_COLUMN

    settings = CorpusSettings(
        method=method,
        keep_ratio=keep,
        num_slots=slots,
        bits=None if bits in ("auto", "16") else bits,
        supervision=supervision,
        chat=chat,
        room=room,
        seed=seed,
        check=check,
    )
    columns = {
        "text_column": DEFAULT_TEXT_COLUMN if text_column is None else text_column,
        "id_column": DEFAULT_ID_COLUMN if id_column is None else id_column,
    }
    files = corpus_files(corpus, **columns, store=output)
    check_store(output, {**settings.record(), "dtype": dtype}, shard_numbers)
    _show_left_out(left_out(corpus, files))
    if ray is not None:
        from kvcat.corpus.ray_engine import compress_on_ray

        result = compress_on_ray(
            model,
            corpus,
            output,
            settings,
            address=ray,
            workers=workers,
            device=device,
            dtype=dtype,
            show_progress=True,
            **columns,
        )
    else:
        from kvcat.models import load, load_tokenizer, read_config

        read_config(model)
        tokenizer = load_tokenizer(model)
        settings.check_tokenizer(tokenizer)
        documents = Corpus.read(files)
        loaded, _ = load(model, dtype=dtype, device=device, tokenizer=False)
        result = fill_store(
            loaded,
            tokenizer,
            documents,
            output,
            settings,
            shard=shard_numbers,
            show_progress=True,
        )
    _show(result, output, settings)
    if shard_numbers is None and result.num_made + result.num_kept == 0:
        raise InputError(f"none of the {result.num_documents} documents has a cache")


def _parse_shard(text: str) -> tuple[int, int]:
    """Number and count of a part, from RANK/COUNT."""
    number, _, count = text.partition("/")
    is_number = all(word.isascii() and word.isdigit() for word in (number, count))
    if not is_number or not int(number) < int(count):
        raise InputError(f"--shard is {text!r}; it is RANK/COUNT with RANK from 0 to COUNT - 1")
    return int(number), int(count)


def _show_left_out(files: Sequence[Path]) -> None:
    """Name on standard error the kinds of files that are no documents."""
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
    if kls:
        facts["kl"] = f"{sum(kls) / len(kls):.5f} nats per token on average, held out"
    for row in failed[:_SHOWN_FAILURES]:
        facts[f"no {row.id[:40]!r}"] = str(row.error)
    return facts
