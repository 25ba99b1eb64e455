"""Middleware of vLLM's API server: the field ``kvcat`` of a request names documents."""

# pyright: reportMissingImports=false

import json
from typing import Any

from starlette.responses import JSONResponse
from vllm.tokenizers import get_tokenizer

from kvcat.errors import InputError
from kvcat.serving.documents import Document, Documents
from kvcat.serving.requests import FIELD, SALT, chat_ids, prompt_ids, request_fields
from kvcat.serving.residents import check_size
from kvcat.serving.vllm.connector import (
    NO_ADAPTERS,
    document_bytes,
    documents_of,
    memory_bytes,
)

_TEXT_FIELDS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
_PARAMETERS = "kv_transfer_params"
# what would change the text after the document; and vLLM forgets the document in a beam search
_NOT_IN_BOTH = ("truncate_prompt_tokens", "use_beam_search")
_NOT_IN_CHAT = (
    "tools", "tool_choice", "documents", "chat_template", "chat_template_kwargs",
    "continue_final_message", "reasoning_effort", "mm_processor_kwargs", "echo",
    "add_special_tokens", *_NOT_IN_BOTH,
)  # fmt: skip
_NOT_IN_COMPLETIONS = ("suffix", "prompt_embeds", *_NOT_IN_BOTH)
_LIMITS = ("max_completion_tokens", "max_tokens")
_USUAL_TOKENS = 16  # of an answer in /v1/completions
_STATUS = 400
_STATUS_OF_FAILURES = 500  # and all above
_STREAMED_ERROR = b'data: {"error"'  # vLLM's event of an answer that failed


class DocumentRequests:
    """Makes a request that names documents a prompt of the tokens that follow them.

    Args:
        app: of ASGI.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            return
        state = scope["app"].state
        try:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            document, new_body = _with_token_ids(state, path, body)
        except InputError as error:
            await JSONResponse(_error(error), _STATUS)(scope, receive, send)
            return
        if document is not None:
            headers = [
                (name, str(len(new_body)).encode() if name == b"content-length" else value)
                for name, value in scope["headers"]
            ]
            scope = {**scope, "headers": headers}
            send = _Reasons(state.kvcat[0], document, send)
        await self.app(scope, _replay(new_body, receive), send)


def _error(error: InputError) -> dict[str, Any]:
    """The JSON of a request's error, in vLLM's form."""
    return {
        "error": {
            "message": str(error),
            "type": "BadRequestError",
            "param": FIELD,
            "code": _STATUS,
        }
    }


class _Reasons:
    """Sends a response, in which a failure has the reason if it is the document's.

    vLLM says no more than that a load failed. So a document is read again if its request failed.

    Args:
        documents: of the server.
        document: as it was when it was requested.
        send: of ASGI.
    """

    def __init__(self, documents: Documents, document: Document, send: Any) -> None:
        self._documents = documents
        self._document = document
        self._send = send
        self._is_replaced = False

    async def __call__(self, message: Any) -> None:
        """Send a message of the response."""
        if self._is_replaced:  # the rest is the failure's
            return
        if message["type"] == "http.response.start" and message["status"] >= _STATUS_OF_FAILURES:
            error = self._error()
            if error is not None:
                self._is_replaced = True
                scope: Any = {"type": "http"}
                nothing: Any = None  # a JSON response reads nothing
                await JSONResponse(_error(error), _STATUS)(scope, nothing, self._send)
                return
        elif message.get("body", b"").startswith(_STREAMED_ERROR):
            error = self._error()
            if error is not None:
                event = f"data: {json.dumps(_error(error))}\n\n".encode()
                message = {**message, "body": event}
        await self._send(message)

    def _error(self) -> InputError | None:
        """Why the document cannot be loaded; None: it can."""
        try:
            self._documents.load(self._document)
        except InputError as error:
            return error
        return None


async def _read(receive: Any) -> bytes | None:
    """The body of a request; None: the client is gone."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def _replay(body: bytes, receive: Any) -> Any:
    """A function that returns the body, and then the messages after it."""
    is_read = False

    async def replay() -> Any:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _with_token_ids(state: Any, path: str, body: bytes) -> tuple[Document | None, bytes]:
    """What a request names, and its body as the connector needs it; None and the body itself if it
    names no document.

    Args:
        state: of the server's app; it keeps documents and tokenizer.
        path: of the request.
        body: JSON.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None, body
    name = _name_in(request)
    if name is None:
        _check_salt(request)
        return None, body
    if path not in _TEXT_FIELDS:
        raise InputError(f"{path} has no documents: use {' or '.join(_TEXT_FIELDS)}")
    if str(request.get("model")) in _adapter_names(state):
        raise InputError(NO_ADAPTERS)
    documents, tokenizer = _documents_and_tokenizer(state)
    document = documents.find(name)
    check_size(document_bytes(document, state.vllm_config), memory_bytes(state.vllm_config))
    text_field = _TEXT_FIELDS[path]
    is_chat = text_field == "messages"
    for field in _NOT_IN_CHAT if is_chat else _NOT_IN_COMPLETIONS:
        if request.get(field):
            raise InputError(f"{field} is not supported with a document")
    if is_chat and request.get("add_generation_prompt", True) is not True:
        raise InputError("add_generation_prompt must be true with a document")
    make_ids = chat_ids if is_chat else prompt_ids
    ids = make_ids(
        tokenizer,
        request.get(text_field),
        chat=document.chat,
        chat_template=document.chat_template,
        positions=document.longest_text,
    )
    document.check_is_no_document(ids)
    fields = request_fields(document, name, ids, str(request.get("cache_salt") or ""))
    request.pop(FIELD, None)
    most = state.vllm_config.model_config.max_model_len
    request |= _limits(request, document, len(ids), most, is_chat=is_chat)
    if is_chat:
        # this API has no token ids, but vLLM reads them from this field, if all messages are texts
        fields[_PARAMETERS]["prompt_token_ids"] = fields.pop("prompt")
        fields["messages"] = [{"role": "user", "content": ""}]
    return document, json.dumps({**request, **fields}).encode()


def _name_in(request: Any) -> Any:
    """What a request names; None: nothing."""
    if not isinstance(request, dict):
        return None
    name = request.get(FIELD)
    parameters = request.get(_PARAMETERS)
    if name is None and isinstance(parameters, dict):
        name = parameters.get(FIELD)
    return name


def _check_salt(request: Any) -> None:
    """Raise an ``InputError`` for a salt of the prompts of documents in another request."""
    salt = request.get("cache_salt") if isinstance(request, dict) else None
    if isinstance(salt, str) and salt.startswith(SALT):
        raise InputError(f"cache_salt begins with {SALT!r} and no document is named")


def _limits(
    request: dict[str, Any], document: Document, num_tokens: int, most_tokens: int, *, is_chat: bool
) -> dict[str, Any]:
    """The field with the length of the answer, where vLLM's default could be too long.

    A length that is no whole number is left to vLLM.

    Args:
        request: as the client sent it.
        document: that it names.
        num_tokens: of the question.
        most_tokens: of question and answer, in vLLM.
        is_chat: chat completions; False: completions.

    Raises:
        InputError: the request asks for more tokens than follow the document.
    """
    for field in _LIMITS if is_chat else _LIMITS[1:]:
        asked = request.get(field)
        if asked is not None:
            if type(asked) is int:
                document.check_length(num_tokens + asked)
            return {}
    document.check_length(num_tokens + 1)
    room = min(document.longest_text - document.num_tokens, most_tokens) - num_tokens
    if not is_chat and _LIMITS[1] not in request:
        room = min(room, _USUAL_TOKENS)
    return {_LIMITS[0 if is_chat else 1]: max(room, 1)}


def _documents_and_tokenizer(state: Any) -> tuple[Documents, Any]:
    """The server's, made for the first request."""
    if not hasattr(state, "kvcat"):
        tokenizer = get_tokenizer(state.vllm_config.model_config.tokenizer)
        state.kvcat = (documents_of(state.vllm_config), tokenizer)
    return state.kvcat


def _adapter_names(state: Any) -> set[str]:
    """The names of models with a LoRA adapter on this server."""
    requests = getattr(getattr(state, "openai_serving_models", None), "lora_requests", ())
    if isinstance(requests, dict):
        requests = requests.values()
    return {getattr(request, "lora_name", request) for request in requests}
