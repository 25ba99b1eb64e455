"""Packed caches that a server answers from: names to caches, requests to prompts.

A prompt begins with as many placeholder tokens as the cache has slots. A salt that holds the file's
checksum separates it from other prompts in the server's prefix cache, and from another document
under the same name.
"""

import re
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvcat.compress.chat import ChatTemplate
from kvcat.compress.documents import question_ids
from kvcat.errors import InputError
from kvcat.serving.prefix import PackedDocument, Prefix, read_prefix
from kvcat.serving.several import JoinedPrefix, WideRotation, join
from kvcat.tokenization import TextEncoder

FIELD = "kvcat"
SALT = "kvcat:"
PLACEHOLDER = 0


class NamedCaches(ABC):
    """Compact caches that requests name.

    Args:
        rotation: of the widened model, for requests that name several caches; None: they are
            rejected.
    """

    def __init__(self, rotation: WideRotation | None = None) -> None:
        self.rotation = rotation

    @abstractmethod
    def find_one(self, name: object) -> PackedDocument:
        """The cache of a name; ``InputError`` as in ``find``."""

    def find(self, name: object) -> PackedDocument | JoinedPrefix:
        """The cache of a name, or the caches of a list of names as one.

        Raises:
            InputError: no such name, a damaged file, a cache of another model or shape, or several
                caches that cannot be joined.
        """
        if isinstance(name, list) and name:
            return join([self.find_one(each) for each in name], self.rotation)
        return self.find_one(name)


class CacheFolder(NamedCaches):
    """The packed caches of one folder, each verified once, and again when its file changes.

    Args:
        folder: holds files of ``kvcat pack``; ``InputError`` if the folder does not exist.
        fingerprint: fingerprint of the model that the caches must belong to.
        shape: layers, KV heads and channels of the served model.
        rotation: as in ``NamedCaches``.
    """

    def __init__(
        self,
        folder: str | Path,
        fingerprint: str,
        shape: tuple[int, int, int],
        rotation: WideRotation | None = None,
    ):
        super().__init__(rotation)
        self.folder = Path(folder).expanduser()
        self.fingerprint = fingerprint
        self.shape = shape
        self._verified = lru_cache(maxsize=4096)(self._read)
        if not self.folder.is_dir():
            raise InputError(f"no folder of caches {folder}")

    def find_one(self, name: object) -> Prefix:
        """The cache in the file of that name."""
        is_name = isinstance(name, str)
        if not is_name or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}", name):
            raise InputError(
                f"{str(name)[:50]!r} is no name of a cache: letters, digits, '_', '-' and '.'"
            )
        path = self.folder / name
        if not (path.is_file() and path.resolve().parent == self.folder.resolve()):
            raise InputError(f"no cache {name!r}")
        status = path.stat()
        return self._verified(path, name, (status.st_mtime_ns, status.st_size, status.st_ino))

    def _read(self, path: Path, name: str, version: tuple[int, ...]) -> Prefix:  # noqa: ARG002
        """The cache of a file; ``version`` makes ``lru_cache`` read a changed file again."""
        try:
            prefix = read_prefix(path)
        except InputError as error:  # a client sees the message and need not know the folder
            reason = str(error).replace(str(path), "the file")
            raise InputError(f"cache {name!r}: {reason}") from None
        if prefix.fingerprint != self.fingerprint:
            raise InputError(f"cache {name!r} belongs to another model")
        if prefix.shape != self.shape:
            raise InputError(
                f"cache {name!r} has {prefix.shape[2]} channels a head, the served model "
                f"{self.shape[2]}: pack it with --head-dim {self.shape[2]}"
            )
        return prefix


def request_fields(
    prefix: PackedDocument | JoinedPrefix, name: str | list[str], ids: list[int], salt: str = ""
) -> dict[str, Any]:
    """The fields ``prompt``, ``cache_salt`` and ``kv_transfer_params`` of a request.

    Args:
        prefix: the cache.
        name: name of the cache's file, or the names of several.
        ids: tokens that follow the document.
        salt: the client's salt, which is appended to the cache's.
    """
    return {
        "prompt": [PLACEHOLDER] * prefix.num_slots + ids,
        "cache_salt": f"{SALT}{prefix.digest}{salt}",
        "kv_transfer_params": {FIELD: name},
    }


def prompt_ids(tokenizer: Any, prompt: object, *, chat: bool, chat_template: str = "") -> list[int]:
    """Token ids of the text after the document.

    Args:
        tokenizer: tokenizer of the served model.
        prompt: a text, or token ids, which are returned unchanged.
        chat: the document opens a user's turn in the chat template, and the text ends this turn.
        chat_template: digest of that template; empty: it is not known, and not checked.

    Raises:
        InputError: no prompt, or another chat template.
    """
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise InputError("prompt must be one text or one list of token ids")
    if chat:
        ChatTemplate(tokenizer).check(chat_template)
    return question_ids(tokenizer, prompt, chat=chat)[0].tolist()


def chat_ids(tokenizer: Any, messages: object, *, chat: bool, chat_template: str = "") -> list[int]:
    """Token ids of a conversation that continues the document's turn.

    All messages must be texts, and the first one the user's.

    Args:
        tokenizer: tokenizer of the served model.
        messages: of the conversation.
        chat, chat_template: as in ``prompt_ids``.

    Raises:
        InputError: a document compressed without ``--chat`` or in another chat template, other
            messages, or a message before the document.
    """
    if not chat:
        raise InputError("the document was compressed without --chat: use /v1/completions")
    template = ChatTemplate(tokenizer)
    template.check(chat_template)
    turns = messages if isinstance(messages, list) else []
    texts = [_text(turn.get("content")) if isinstance(turn, dict) else None for turn in turns]
    if not turns or None in texts or turns[0].get("role") != "user":
        raise InputError(
            "messages must be texts, and the first one the user's, which continues the document"
        )
    for number, turn in enumerate(turns, start=1):
        role = turn.get("role")
        if not isinstance(role, str):
            raise InputError(f"message {number} has the role {role!r}, which is no text")
    conversation = [{**turn, "content": text} for turn, text in zip(turns, texts, strict=True)]
    return template.conversation(conversation, TextEncoder(tokenizer))


def _text(content: object) -> str | None:
    """A message's text, or the joined texts of a list; None if it holds anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return None
    texts = [item.get("text") for item in content if isinstance(item, dict)]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        return None
    return "".join(map(str, texts))
