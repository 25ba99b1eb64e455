"""From the name of the data to what a trainer reads."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvcat.data.documents import Document, shard_documents
from kvcat.data.excerpts import excerpts
from kvcat.data.held_out import local_splits
from kvcat.data.packing import TokenTable, pack
from kvcat.data.prepared import is_prepared, open_prepared
from kvcat.data.shards import open_shards
from kvcat.data.source import TableSource, TokenSource
from kvcat.data.split import split_of
from kvcat.data.streams import TokenStreams
from kvcat.errors import InputError


@dataclass(frozen=True)
class TokenData:
    """What a run reads.

    Args:
        train: the sequences of each step.
        validation: sequences of documents that training never sees.
    """

    train: TokenSource
    validation: TokenTable


def open_tokens(
    data: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    batch_size: int,
    max_steps: int,
    validation_sequences: int,
    seed: int,
    streams: Iterable[int] | None = None,
    workers: int = 0,
    stop: Callable[[], bool] | None = None,
    check: bool = True,
) -> TokenData:
    """Training and validation tokens, disjoint by document.

    A folder that ``prepare`` made is mapped; ``hub:NAME`` and ``stream:PATH`` (a file, folder or pattern) are streamed;
    any other text is read whole, its documents in an order drawn by the seed, of which a run that is too short for all
    of them gets excerpts.

    Args:
        data: as said.
        tokenizer: with an EOS token.
        seq_len: tokens a sequence.
        batch_size: sequences a step, over all processes; the number of streams.
        max_steps: steps of the run.
        validation_sequences: sequences of validation, fewer where the text has fewer.
        seed: seed of the order.
        streams: those that this process reads; None for all.
        workers: processes that tokenise what is streamed.
        stop: see ``TokenStreams``.
        check: compare the checksums of a prepared folder; one process of a run is enough.

    Raises:
        InputError: no such data, too little text, or none that can be read.
    """
    if is_prepared(data):
        tables = open_prepared(data, tokenizer, seq_len, check=check)
        train = TableSource(tables["train"], batch_size, seed, streams=streams)
        return TokenData(train, tables["validation"].first(validation_sequences))
    counts = {"train": max_steps * batch_size, "validation": validation_sequences}
    if data.startswith(("hub:", "stream:")):
        shards = open_shards(data)
        held_out = (d for d in shard_documents(shards) if split_of(d.id) == "validation")
        validation = _packed("validation", held_out, data, tokenizer, seq_len, counts)
        train = TokenStreams(
            shards, tokenizer, seq_len=seq_len, num_streams=batch_size, seed=seed, streams=streams, workers=workers,
            stop=stop,
        )  # fmt: skip
        return TokenData(train, validation)
    splits = local_splits(data, seed)
    splits["train"] = list(excerpts(splits["train"], tokenizer, seq_len, counts["train"], seed))
    tables = {kind: _packed(kind, splits[kind], data, tokenizer, seq_len, counts) for kind in counts}
    return TokenData(TableSource(tables["train"], batch_size, seed, streams=streams), tables["validation"])


def _packed(
    kind: str,
    documents: Iterable[Document],
    data: str,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    counts: dict[str, int],
) -> TokenTable:
    try:
        return pack(documents, tokenizer, seq_len, max_sequences=counts[kind])
    except InputError as error:
        raise InputError(f"{kind} documents of {data}: {error}") from None
