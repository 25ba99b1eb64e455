"""A folder of packed caches that a server answers from: names to files, and requests to prompts of token ids.

A prompt begins with as many placeholder tokens as the cache has slots, whose keys and values the server takes from the
cache. They are kept apart from other prompts, in the server's prefix cache too, by a salt that holds the digest of the
file: another document under the same name has another salt.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcat.compress.documents import chat_parts, question_ids
from kvcat.errors import InputError
from kvcat.serving.transformers import Prefix, read_prefix

FIELD = "kvcat"
SALT = "kvcat:"
PLACEHOLDER = 0
_MARK = "\x02document\x03"


@dataclass(frozen=True)
class Entry:
    """One packed cache in the folder.

    Args:
        path: the file.
        num_slots: slots of every head, the number of placeholders.
        digest: of the file.
        chat: whether the document opens a user's turn in the chat template.
    """

    path: Path
    num_slots: int
    digest: str
    chat: bool

    @property
    def salt(self) -> str:
        """What a request's ``cache_salt`` must begin with."""
        return SALT + self.digest


class CacheFolder:
    """The packed caches of one folder, each read and verified once, and again when its file changes.

    Args:
        folder: holds files of ``kvcat pack``.
        fingerprint: of the model that the caches must belong to.
        shape: layers, KV heads and channels of the served model.

    Raises:
        InputError: no such folder.
    """

    def __init__(self, folder: str | Path, fingerprint: str, shape: tuple[int, int, int]):
        self.folder, self.fingerprint, self.shape = Path(folder).expanduser(), fingerprint, shape
        self._known: dict[str, tuple[tuple[int, ...], Entry]] = {}
        if not self.folder.is_dir():
            raise InputError(f"no folder of caches {folder}")

    def find(self, name: object) -> Entry:
        """The cache of a name.

        Args:
            name: of a file in the folder itself.

        Raises:
            InputError: not the name of a file in the folder, a damaged file, or a cache of another model or shape.
        """
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}", name):
            raise InputError(f"{str(name)[:50]!r} is no name of a cache: letters, digits, '_', '-' and '.'")
        path = self.folder / name
        if not path.is_file() or path.resolve().parent != self.folder.resolve():
            raise InputError(f"no cache {name!r}")
        status = path.stat()
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
        if self._known.get(name, ((), None))[0] != version:
            self._known[name] = version, self._read(path, name)
        return self._known[name][1]

    def load(self, path: Path, digest: str) -> Prefix:
        """The keys and values of a cache that was found.

        Raises:
            InputError: the file is damaged, or another one by now.
        """
        prefix = read_prefix(path)
        if prefix.digest != digest:
            raise InputError(f"{path.name} has changed since it was asked for")
        return prefix

    def _read(self, path: Path, name: str) -> Entry:
        try:
            prefix = read_prefix(path)
        except InputError as error:
            raise InputError(f"cache {name!r}: {str(error).replace(str(path), 'the file')}") from None
        if prefix.fingerprint != self.fingerprint:
            raise InputError(f"cache {name!r} belongs to another model")
        shape = (len(prefix.keys), prefix.keys[0].shape[0], prefix.keys[0].shape[2])
        if shape != self.shape:
            raise InputError(
                f"cache {name!r} has {shape[0]} layers, {shape[1]} KV heads and {shape[2]} channels, the served model "
                f"{self.shape[0]}, {self.shape[1]} and {self.shape[2]}: pack it with --head-dim {self.shape[2]}"
            )
        return Entry(path, prefix.num_slots, prefix.digest, prefix.chat)


def request_fields(entry: Entry, name: str, ids: Sequence[int], salt: str | None = None) -> dict[str, Any]:
    """What a request to the server must hold to be answered from a cache.

    Args:
        entry: the cache.
        name: its name.
        ids: tokens after the document, at least one.
        salt: the request's own ``cache_salt``.

    Returns:
        ``prompt`` (token ids), ``cache_salt`` and ``kv_transfer_params``.
    """
    prompt = [PLACEHOLDER] * entry.num_slots + list(ids)
    return {"prompt": prompt, "cache_salt": entry.salt + (salt or ""), "kv_transfer_params": {FIELD: name}}


def prompt_ids(tokenizer: Any, prompt: object, *, chat: bool) -> list[int]:
    """Token ids of what follows the document.

    Args:
        tokenizer: of the model.
        prompt: text, or token ids, which are taken as they are.
        chat: the document opens a user's turn, and the text becomes the rest of that turn.

    Raises:
        InputError: neither, or empty.
    """
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise InputError("prompt must be one text or one list of token ids")
    return question_ids(tokenizer, prompt, chat=chat)[0].tolist()


def chat_ids(tokenizer: Any, messages: object, *, chat: bool) -> list[int]:
    """Token ids of a conversation that goes on in the user's turn which the document opens.

    Args:
        tokenizer: of the model.
        messages: of the OpenAI API, texts only; the first is the user's.
        chat: whether the document was compressed with ``--chat``.

    Raises:
        InputError: a document without chat template, other messages, or one before the document.
    """
    if not chat:
        raise InputError("the document was compressed without --chat: use /v1/completions")
    turns = messages if isinstance(messages, list) else []
    texts = [turn.get("content") if isinstance(turn, dict) else None for turn in turns]
    if not turns or not all(isinstance(text, str) for text in texts) or turns[0].get("role") != "user":
        raise InputError("messages must be texts, and the first one the user's, which continues the document")
    first = {"role": "user", "content": f"{_MARK}\n\n{texts[0]}"}
    rendered = str(tokenizer.apply_chat_template([first, *turns[1:]], tokenize=False, add_generation_prompt=True))
    head, _, rest = rendered.partition(_MARK)
    if head != chat_parts(tokenizer)[0]:
        raise InputError("the chat template puts something else before the document than when it was compressed")
    return tokenizer.encode(rest, add_special_tokens=False)
