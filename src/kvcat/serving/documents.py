"""Documents that an engine answers from: the cache files of a folder, or the documents of a store.

A request names one document or several, which then follow one another. Every name is looked up
again for every request, and a file is read again when it has changed, so that a document may be
added, replaced or removed while the engine runs.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from kvcat.cache import (
    CompactCache,
    check_same_model,
    document_digests,
    layer_windows,
    read_cache,
)
from kvcat.compress.compose import check_turn
from kvcat.corpus import Store
from kvcat.corpus.manifest import cache_file
from kvcat.corpus.store import SETTINGS as STORE_SETTINGS
from kvcat.errors import InputError
from kvcat.files import expanded
from kvcat.memory import return_freed_memory
from kvcat.models import positions_of

MOST_DOCUMENTS = 16
"""Documents that one request may name."""
_SUFFIX = ".safetensors"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
_MOST_KNOWN = 4096  # documents whose facts are remembered
_SECONDS_BETWEEN_READS = 60.0  # of the manifest of a store at an address
Fingerprints = Callable[[str], str]
"""The fingerprint of the served model with weights of a dtype."""


@dataclass(frozen=True)
class Document:
    """One document, or several one after the other, as a request names them.

    Args:
        names: of the documents.
        digest: a checksum of their caches, which distinguishes documents and their versions.
        num_tokens: of all documents.
        counts: slots of every layer and KV head, at most: joining drops some.
        has_log_bias: whether slots have a log-bias.
        longest_text: most tokens of documents, question and answer.
        chat: whether the first document opens a user's turn in the chat template.
        chat_template: digest of that template; empty: not known.
        text: digest of the tokens of one document; empty: not known, or there are several.
    """

    names: tuple[str, ...]
    digest: str
    num_tokens: int
    counts: tuple[tuple[int, ...], ...]
    has_log_bias: bool
    longest_text: int
    chat: bool = False
    chat_template: str = ""
    text: str = ""

    def check_is_no_document(self, ids: list[int]) -> None:
        """Raise an ``InputError`` if tokens after the document begin with it."""
        first = torch.tensor([ids[: self.num_tokens]])
        if document_digests(first)[0] == self.text:
            raise InputError(
                f"the prompt begins with the document, whose {self.num_tokens} tokens the cache "
                "holds: send only the text after it"
            )

    def check_length(self, num_tokens: int) -> None:
        """Raise an ``InputError`` if question and answer of this length cannot follow.

        Args:
            num_tokens: of the question, and the most of the answer.
        """
        if self.num_tokens + num_tokens > self.longest_text:
            raise InputError(
                f"{self.num_tokens} tokens of documents and {num_tokens} of question and answer "
                f"exceed the {self.longest_text} that the model and the cache allow: ask for fewer "
                "max_tokens"
            )

    def check_loaded(self, digest: str) -> None:
        """Raise an ``InputError`` if a cache that was read later has another digest."""
        if digest != self.digest:
            raise InputError(f"{_shown(self.names)} has changed since it was requested: ask again")


class _Read(NamedTuple):
    """A cache as it was read, and its digest."""

    cache: CompactCache
    digest: str


class Documents(ABC):
    """Documents by name.

    Args:
        fingerprints: of the served model.
    """

    def __init__(self, config: PreTrainedConfig, fingerprints: Fingerprints) -> None:
        self.config = config
        self.fingerprints = fingerprints
        self._known = lru_cache(maxsize=_MOST_KNOWN)(self._facts)

    @abstractmethod
    def read(self, name: str) -> _Read:
        """The cache of one document.

        Raises:
            InputError: no such document, or a damaged file.
        """

    @abstractmethod
    def version(self, name: object) -> tuple[Any, ...]:
        """What changes when the document's cache does.

        Raises:
            InputError: no name of a document, or no such document.
        """

    @abstractmethod
    def check_joined(self) -> None:
        """Raise an ``InputError`` if no documents of this collection can follow one another."""

    def find(self, name: object) -> Document:
        """The document of a name, or the documents of a list of names.

        Raises:
            InputError: a name that is wrong; a file that is damaged, of another model or of several
                examples; documents that cannot follow one another.
        """
        names = name if isinstance(name, list) else [name]
        if not 1 <= len(names) <= MOST_DOCUMENTS:
            raise InputError(f"a request names 1 to {MOST_DOCUMENTS} documents, not {len(names)}")
        documents = [self._known(str(each), self.version(each)) for each in names]
        if len(documents) == 1:
            return documents[0]
        self.check_joined()
        return _joined(documents)

    def load(self, document: Document) -> list[CompactCache]:
        """The caches of a document.

        Raises:
            InputError: as ``find``, or a cache has changed since the document was found.
        """
        read = [self.read(name) for name in document.names]
        document.check_loaded(_digest_of_all([each.digest for each in read]))
        return [each.cache for each in read]

    def _facts(self, name: str, version: tuple[Any, ...]) -> Document:  # noqa: ARG002
        """What the cache says; ``version`` makes ``lru_cache`` forget an earlier one."""
        document = self._read_facts(name)
        return_freed_memory()  # the cache's
        return document

    def _read_facts(self, name: str) -> Document:
        cache, digest = self.read(name)
        if cache.batch_size != 1:
            raise InputError(f"document {name!r} holds {cache.batch_size} examples, not one")
        dtype = str(cache.dtype).removeprefix("torch.")
        check_same_model(f"document {name!r}", cache.fingerprint, self.fingerprints(dtype))
        if any(not state.is_window for state in cache.states.values()):
            raise InputError(f"document {name!r} has recurrent states, which no engine reads")
        counts = {}
        for number, layer in zip(cache.layer_numbers, cache.layers, strict=True):
            counts[number] = tuple(layer.counts[0].tolist())
        for number, state in cache.states.items():
            _, num_heads, num_slots, _ = state.tensors["keys"].shape
            counts[number] = (num_slots,) * num_heads
        windows = layer_windows(self.config)
        limits = [windows[number] for number in cache.layer_numbers]
        limits.append(positions_of(self.config))
        return Document(
            names=(name,),
            digest=digest,
            num_tokens=cache.num_tokens,
            counts=tuple(counts[number] for number in sorted(counts)),
            has_log_bias=cache.has_log_bias,
            longest_text=min(limit for limit in limits if limit is not None),
            chat=bool(cache.record.chat),
            chat_template=cache.record.chat_template,
            text=cache.record.document[0] if cache.record.document else "",
        )


class DocumentFolder(Documents):
    """The files of ``kvcat compress`` in a folder; a name is that of the file, with or without
    ".safetensors".

    Args:
        folder: it exists.
        config, fingerprints: as in ``Documents``.
    """

    def __init__(self, folder: Path, config: PreTrainedConfig, fingerprints: Fingerprints) -> None:
        super().__init__(config, fingerprints)
        self.folder = folder

    def version(self, name: object) -> tuple[Any, ...]:
        """Time, size and number of the file."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(
                f"{str(name)[:50]!r} is no name of a document: letters, digits, '_', '-' and '.'"
            )
        return _version_of(self._path(name))

    def read(self, name: str) -> _Read:
        """The cache in the file of that name."""
        path = self._path(name)
        try:
            return _Read(*read_cache(path))
        except InputError as error:  # a client sees the message and need not know the folder
            raise InputError(
                f"document {name!r}: {str(error).replace(str(path), 'the file')}"
            ) from None

    def check_joined(self) -> None:
        """Any may."""

    def _path(self, name: str) -> Path:
        """The file of a name, which is no link out of the folder."""
        for path in (self.folder / name, self.folder / f"{name}{_SUFFIX}"):
            if path.is_file() and path.resolve().parent == self.folder.resolve():
                return path
        raise InputError(f"no document {name!r}")


class DocumentStore(Documents):
    """The documents of a store of ``kvcat corpus``, by their ids.

    Args:
        address: of the store.
        config, fingerprints: as in ``Documents``.

    Raises:
        InputError: no store, or one of another model.
    """

    def __init__(self, address: str, config: PreTrainedConfig, fingerprints: Fingerprints) -> None:
        super().__init__(config, fingerprints)
        self.store = Store(address)
        known = str(self.store.settings.get("fingerprint"))
        mine = fingerprints(str(self.store.settings.get("dtype", "float32")))
        check_same_model(f"store {address}", known, mine)

    def check_joined(self) -> None:
        """Raise an ``InputError`` for a store whose documents all open a turn."""
        self.store.check_joined()

    def version(self, name: object) -> tuple[Any, ...]:
        """Checksum of the text, and of a local store also what a file's version is."""
        if not isinstance(name, str):
            raise InputError(f"{str(name)[:50]!r} is no id of a document")
        is_remote = "://" in self.store.address
        if is_remote:  # a request for every document's version would take longer
            self.store.refresh(older_than=_SECONDS_BETWEEN_READS)
        try:
            row = self.store.row(name)
        except InputError:  # a client need not know where the store is
            raise InputError(f"no document {name[:80]!r}") from None
        if row.error is not None:
            raise InputError(f"document {name[:80]!r} has no cache: {row.error}")
        if is_remote:
            return (row.checksum,)
        return (row.checksum, *_version_of(Path(self.store.address, cache_file(name))))

    def read(self, name: str) -> _Read:
        """The cache of a document."""
        try:
            cache = self.store[name]
        except InputError as error:
            reason = str(error).replace(self.store.address, "the store")
            raise InputError(f"document {name[:80]!r}: {reason}") from None
        facts = f"{self.store.address}\0{name}\0{cache.record.to_json()}\0{_content(cache)}"
        return _Read(cache, hashlib.sha256(facts.encode()).hexdigest())


def open_documents(address: str, config: PreTrainedConfig, fingerprints: Fingerprints) -> Documents:
    """The documents of a folder of cache files or of a store.

    Args:
        address: of the folder, or of a store, which may be an address of fsspec.
        config, fingerprints: as in ``Documents``.

    Raises:
        InputError: neither of the two, or a store of another model.
    """
    folder = expanded(address)
    if "://" in address or (folder / STORE_SETTINGS).is_file():
        return DocumentStore(address, config, fingerprints)
    if not folder.is_dir():
        raise InputError(f"no folder of documents and no store {address}")
    return DocumentFolder(folder, config, fingerprints)


def _version_of(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced; of a missing file ()."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _content(cache: CompactCache) -> str:
    """A hash of the numbers of a cache."""
    digest = hashlib.sha256()
    for layer in cache.layers:
        for tensor in layer.tensors().values():
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest_of_all(digests: Sequence[str]) -> str:
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _joined(documents: Sequence[Document]) -> Document:
    """Several documents, one after the other.

    Raises:
        InputError: a later document that opens a turn of the chat template.
    """
    for number, document in enumerate(documents, start=1):
        check_turn(number, opens_turn=document.chat)
    counts = tuple(
        tuple(map(sum, zip(*of_layer, strict=True)))
        for of_layer in zip(*(document.counts for document in documents), strict=True)
    )
    return replace(
        documents[0],
        names=tuple(name for document in documents for name in document.names),
        digest=_digest_of_all([document.digest for document in documents]),
        num_tokens=sum(document.num_tokens for document in documents),
        counts=counts,
        has_log_bias=any(document.has_log_bias for document in documents),
        longest_text=min(document.longest_text for document in documents),
        text="",
    )


def _shown(names: Sequence[str]) -> str:
    return "document " + ", ".join(repr(name[:80]) for name in names)
