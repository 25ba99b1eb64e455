"""Requests and answers in the form of OpenAI's API, as JSON values."""

import json
import random
import time
import uuid
from collections.abc import Mapping
from typing import Any

from kvcat.errors import InputError
from kvcat.serving.documents import MOST_DOCUMENTS
from kvcat.serving.engine import Question, RequestError, Usage
from kvcat.serving.requests import FIELD
from kvcat.settings import Sampling
from kvcat.text.encoder import repaired

_WITHOUT_EFFECT = frozenset({"metadata", "service_tier", "store", "stream_options", "user"})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
}
"""Fields that are accepted with the values that have no effect."""
_LENGTHS = frozenset({"max_completion_tokens", "max_tokens"})
_READ = _LENGTHS | {FIELD, "model", "seed", "stop", "stream", "temperature", "top_p"}


def parse_request(body: bytes, *, is_chat: bool, model: str, most_tokens: int) -> dict[str, Any]:
    """The fields of a request: "question", "is_streamed" and "has_usage".

    Args:
        body: JSON.
        is_chat: chat completions; False: completions.
        model: name of the served model.
        most_tokens: largest number of tokens in an answer.

    Raises:
        RequestError: not JSON, a field that is missing, has a wrong value or is not supported.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the request is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(400, "the request is no JSON object")
    fields = {name: value for name, value in fields.items() if value is not None}
    content_name = "messages" if is_chat else "prompt"
    _check_fields(fields, content_name)
    for name in ("model", content_name):
        if name not in fields:
            raise RequestError(400, f"the field {name} is missing")
    if fields["model"] != model:
        raise RequestError(404, f"no model {str(fields['model'])[:80]!r}; there is {model!r}")
    content = fields[content_name]
    if not is_chat and not isinstance(content, str):
        raise RequestError(400, "prompt must be one text")
    sampling = _sampling(fields, most_tokens)
    has_length = not _LENGTHS.isdisjoint(fields)
    question = Question(_documents(fields.get(FIELD)), content, is_chat, sampling, has_length)
    options = fields.get("stream_options", {})
    return {
        "question": question,
        "is_streamed": _typed(fields, "stream", bool, False),
        "has_usage": isinstance(options, dict) and options.get("include_usage") is True,
    }


def _check_fields(fields: Mapping[str, Any], content_name: str) -> None:
    """Reject fields that this server does not support, because ignoring them changes answers.

    Args:
        fields: of a request.
        content_name: the field with its text, which has another name in the other kind of request.
    """
    for name, value in fields.items():
        if name == content_name or name in _READ or name in _WITHOUT_EFFECT:
            continue
        if name not in _NEUTRAL:
            raise RequestError(400, f"the field {name[:80]!r} is not supported")
        # false is no number: in /v1/completions, logprobs 0 asks for those of the answer's tokens
        is_neutral = any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in _NEUTRAL[name]
        )
        if not is_neutral:
            raise RequestError(400, f"{name} is not supported with the value {str(value)[:80]}")


def _documents(value: object) -> tuple[str, ...]:
    """The documents that a request names: an id, or a list of ids."""
    named = value if isinstance(value, list) else [value]
    ids = tuple(id for id in named if isinstance(id, str))
    if not ids or len(ids) < len(named):
        raise RequestError(
            400, f"the field {FIELD} must name a document by its id, or several by a list of ids"
        )
    if len(ids) > MOST_DOCUMENTS:
        raise RequestError(400, f"{FIELD} names {len(ids)} documents; at most {MOST_DOCUMENTS}")
    return ids


def _sampling(fields: Mapping[str, Any], most_tokens: int) -> Sampling:
    """How to decode, with OpenAI's defaults; an answer has at most ``most_tokens`` tokens."""
    wanted = _typed(fields, "max_tokens", int, None)
    wanted = _typed(fields, "max_completion_tokens", int, wanted)
    if wanted is not None and not 1 <= wanted <= most_tokens:
        raise RequestError(400, f"max_tokens is {wanted}; this server allows 1 to {most_tokens}")
    stop = fields.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise RequestError(400, "stop must be a text or a list of texts")
    seed = _typed(fields, "seed", int, None)
    try:
        return Sampling(
            temperature=float(_typed(fields, "temperature", (int, float), 1.0)),
            top_p=float(_typed(fields, "top_p", (int, float), 1.0)),
            max_new_tokens=most_tokens if wanted is None else wanted,
            stop=tuple(stops),
            seed=random.SystemRandom().randrange(2**63) if seed is None else seed,
        )
    except (InputError, OverflowError) as error:  # a whole number too large for a float
        raise RequestError(400, str(error)) from None


def _typed(fields: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    """A field of a type; the default if it is absent."""
    if name not in fields:
        return default
    value = fields[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RequestError(400, f"{name} is {str(value)[:80]!r}, which has the wrong type")
    return value


class ResponseForm:
    """The JSON of one answer, whole or in chunks.

    Args:
        model: name of the served model.
        is_chat: chat completions; False: completions.
    """

    def __init__(self, model: str, *, is_chat: bool) -> None:
        kind = "chatcmpl" if is_chat else "cmpl"
        self._is_chat = is_chat
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._model = model

    def whole(self, text: str, finish_reason: str, usage: Usage) -> dict[str, Any]:
        """A complete answer."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        name = "chat.completion" if self._is_chat else "text_completion"
        return {**self._facts(name), "choices": [choice], "usage": usage_record(usage)}

    def chunk(
        self, text: str | None, finish_reason: str | None = None, *, is_first: bool = False
    ) -> dict[str, Any]:
        """A piece of an answer."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self._is_chat:
            delta = {} if text is None else {"content": text}
            choice["delta"] = {"role": "assistant", **delta} if is_first else delta
        else:
            choice["text"] = text or ""
        return {**self._facts(self._chunk_name), "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, if the client wants to know the number of tokens."""
        return {**self._facts(self._chunk_name), "choices": [], "usage": usage_record(usage)}

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _facts(self, kind: str) -> dict[str, Any]:
        return {**self._head, "object": kind, "model": self._model}


def usage_record(usage: Usage) -> dict[str, Any]:
    """The numbers of tokens: the prompt includes the document, whose tokens count as cached."""
    num_prompt = usage.document_tokens + usage.prompt_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": usage.answer_tokens,
        "total_tokens": num_prompt + usage.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.document_tokens},
    }


def error_record(error: RequestError) -> dict[str, Any]:
    """The JSON of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    message = repaired(error.message)  # JSON can spell half a character, and UTF-8 cannot
    return {"error": {"message": message, "type": kind, "param": None, "code": error.status}}
