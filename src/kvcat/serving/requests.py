"""Requests that name documents: the tokens that follow a document, and the fields of a request.

A salt that holds the document's checksum separates its prompts from others in an engine's prefix
cache, and from those of another document under the same name.
"""

import sys
from typing import Any

from kvcat.compress.documents import question_ids
from kvcat.errors import InputError
from kvcat.serving.documents import Document
from kvcat.text.encoder import TextEncoder
from kvcat.text.template import ChatTemplate

FIELD = "kvcat"
"""The field of a request that names its documents."""
SALT = "kvcat:"


def request_fields(
    document: Document, name: str | list[str], ids: list[int], salt: str = ""
) -> dict[str, Any]:
    """The fields ``prompt``, ``cache_salt`` and ``kv_transfer_params`` of a request.

    Args:
        document: the document, or several.
        name: of the document, or a list of names.
        ids: tokens that follow the document.
        salt: the client's salt, which is appended to the document's.
    """
    return {
        "prompt": ids,
        "cache_salt": f"{SALT}{document.digest}{salt}",
        "kv_transfer_params": {FIELD: name},
    }


def prompt_ids(
    tokenizer: Any,
    prompt: object,
    *,
    chat: bool,
    chat_template: str = "",
    positions: int = sys.maxsize,
) -> list[int]:
    """Token ids of the text after the document.

    Args:
        tokenizer: tokenizer of the served model.
        prompt: a text, or token ids, which are returned unchanged.
        chat: the document opens a user's turn in the chat template, and the text ends this turn.
        chat_template: digest of that template; empty: it is not known, and not checked.
        positions: of the model. A text with many more tokens is rejected before all of it is
            encoded.

    Raises:
        InputError: no prompt, one that is too long, or another chat template.
    """
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise InputError("prompt must be one text or one list of token ids")
    if chat:
        ChatTemplate(tokenizer).check(chat_template)
    return question_ids(tokenizer, prompt, chat=chat, positions=positions)[0].tolist()


def chat_ids(
    tokenizer: Any,
    messages: object,
    *,
    chat: bool,
    chat_template: str = "",
    positions: int = sys.maxsize,
) -> list[int]:
    """Token ids of a conversation that continues the document's turn.

    All messages must be texts, and the first one the user's.

    Args:
        tokenizer: tokenizer of the served model.
        chat, chat_template, positions: as in ``prompt_ids``.

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
    encoder = TextEncoder(tokenizer)
    encoder.check_fits("".join(map(str, texts)), positions)
    return template.conversation(conversation, encoder)


def _text(content: object) -> str | None:
    """A message's text, or the joined texts of a list; None if it holds anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return None
    texts = [
        item.get("text")
        for item in content
        if isinstance(item, dict) and item.get("type", "text") == "text"
    ]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        return None
    return "".join(map(str, texts))
