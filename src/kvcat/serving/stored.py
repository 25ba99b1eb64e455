"""Documents of a store of ``kvcat corpus``, packed when a request first names them."""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache

from kvcat.cache import CompactCache
from kvcat.corpus import CHAT_STORE, Store
from kvcat.errors import InputError
from kvcat.serving.prefix import LayerStates, PackedDocument, known_first_slots, wide_layer
from kvcat.serving.requests import NamedCaches
from kvcat.serving.several import JoinedPrefix, WideRotation


@dataclass(frozen=True, kw_only=True)
class StoredPrefix(PackedDocument):
    """A document of a store as a prefix of the widened model.

    Args:
        address: of the store.
        id: of the document.
        checksum: of its text.
        rotation: of the widened model.
    """

    address: str
    id: str
    checksum: str
    rotation: WideRotation

    def load(self) -> list[LayerStates]:
        """Keys and values of every layer.

        Raises:
            InputError: the cache is damaged, or of another text than it was.
        """
        cache = _open(self.address)[self.id]
        _check_text(cache, self.id, self.checksum)
        return packed_states(cache, self.rotation, self.shape[2])


class CacheStore(NamedCaches):
    """The documents of a store by their ids, for a widened model.

    Args:
        address: of the store.
        fingerprint: fingerprint of the model that was widened.
        shape: layers, KV heads and channels of the served model.
        rotation: of the widened model.

    Raises:
        InputError: no store, or one of another model.
    """

    def __init__(
        self, address: str, fingerprint: str, shape: tuple[int, int, int], rotation: WideRotation
    ) -> None:
        super().__init__(rotation)
        self.shape = shape
        self._rotation = rotation
        self._store = _open(address)
        known = str(self._store.settings.get("fingerprint"))
        if known != fingerprint:
            raise InputError(
                f"store {address} belongs to another model: its fingerprint is {known[:12]}, the "
                f"served model's {fingerprint[:12]}"
            )
        self._prefix = lru_cache(maxsize=4096)(self._read)

    def find(self, name: object) -> PackedDocument | JoinedPrefix:
        """The cache of a document, or of a list of documents as one."""
        if isinstance(name, list) and len(name) > 1 and self._store.settings.get("chat"):
            raise InputError(f"{len(name)} documents cannot be joined: {CHAT_STORE}")
        return super().find(name)

    def find_one(self, name: object) -> StoredPrefix:
        """The cache of a document."""
        if not isinstance(name, str):
            raise InputError(f"{str(name)[:50]!r} is no id of a document")
        if name not in self._store:
            try:
                row = self._store.row(name)
            except InputError:  # a client need not know where the store is
                raise InputError(f"no document {name[:80]!r}") from None
            if row.error is not None:
                raise InputError(f"document {name[:80]!r} has no cache: {row.error}")
        return self._prefix(name, self._store.row(name).checksum)

    def _read(self, id: str, checksum: str) -> StoredPrefix:
        """The cache of a text under an id."""
        store = self._store
        try:
            cache = store[id]
        except InputError as error:
            reason = str(error).replace(store.address, "the store")
            raise InputError(f"document {id[:80]!r}: {reason}") from None
        _check_text(cache, id, checksum)
        if cache.states:
            raise InputError(
                f"document {id[:80]!r} has states of layers that vLLM has no place for"
            )
        how = json.dumps(dict(store.settings), sort_keys=True, default=str)
        digest = hashlib.sha256(f"{how}\0{id}\0{checksum}".encode()).hexdigest()
        return StoredPrefix(
            address=store.address,
            id=id,
            checksum=checksum,
            digest=digest,
            chat=bool(cache.record.chat),
            chat_template=cache.record.chat_template,
            num_slots=cache.max_slots,
            num_tokens=cache.num_tokens,
            shape=self.shape,
            first_slots=known_first_slots(cache),
            layer_slots=tuple(layer.max_slots for layer in cache.layers),
            rotation=self._rotation,
        )


def _check_text(cache: CompactCache, id: str, checksum: str) -> None:
    """Raise an ``InputError`` for a cache of another text.

    A store reads its manifest again, and returns the new cache, once a file does not fit it.
    """
    if cache.record.text_checksum != checksum:
        raise InputError(f"document {id[:80]!r} has changed since it was requested: ask again")


def packed_states(cache: CompactCache, rotation: WideRotation, wide: int) -> list[LayerStates]:
    """Keys and values of a cache for a widened model, as ``plain_prefix`` has them.

    Args:
        cache: of the model that was widened, of one example.
        rotation: of the widened model.
        wide: channels of its heads.
    """
    cache = cache.unpacked()
    num_slots = cache.max_slots
    shift = num_slots - cache.num_tokens
    states = []
    for layer, is_rotated in zip(cache.layers, rotation.rotated, strict=True):
        packed = wide_layer(layer.padded(), num_slots, wide)
        keys = packed.keys[0]
        if is_rotated:
            keys = rotation(keys, shift)
        states.append((keys, packed.values[0]))
    return states


@lru_cache(maxsize=4)
def _open(address: str) -> Store:
    return Store(address)
