"""A server with OpenAI's API: plain transformers that answer from the caches of a store."""

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from kvcat.errors import InputError
from kvcat.extras import install_command
from kvcat.serving.engine import Engine, RequestError, Ticket
from kvcat.serving.openai_api import ResponseForm, error_record, parse_request

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.requests import ClientDisconnect
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise InputError(
        f"kvcat serve needs FastAPI and uvicorn: {install_command('serve')} ({error})"
    ) from None

_SECONDS_TO_SHUT_DOWN = 5
_SECONDS_FOR_HEADERS = 10.0  # in which a client must send the headers of a request
_MOST_WITHOUT_HEADERS = 64  # connections that wait for headers
_HEADERS = {
    408: {"Connection": "close"},  # the rest of the request is not read
    413: {"Connection": "close"},
    429: {"Retry-After": "1"},
}


@dataclass(frozen=True)
class ServerLimits:
    """Bounds on requests.

    Args:
        most_bytes: bytes of a request.
        most_tokens: tokens of an answer.
        most_seconds: seconds in which a client must send its request.
    """

    most_bytes: int = 1 << 20
    most_tokens: int = 1024
    most_seconds: float = 60.0


def make_app(
    engine: Engine, name: str, *, limits: ServerLimits | None = None, api_key: str | None = None
) -> FastAPI:
    """The application with the routes of the server.

    Args:
        engine: what answers; it is closed when the application shuts down.
        name: name of the model for clients.
        limits: bounds on requests.
        api_key: what clients must send as a bearer token, except for /health; None: nothing.
    """
    routes = _Routes(engine, name, limits or ServerLimits(), api_key)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="kvcat", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestError, _reject)
    app.add_api_route("/v1/chat/completions", routes.chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", routes.completions, methods=["POST"])
    app.add_api_route("/v1/models", routes.models)
    app.add_api_route("/metrics", routes.metrics)
    app.add_api_route("/health", routes.health)
    return app


class _Routes:
    """What the server does for each path; arguments as in ``make_app``."""

    def __init__(
        self, engine: Engine, name: str, limits: ServerLimits, api_key: str | None
    ) -> None:
        self._engine = engine
        self._name = name
        self._limits = limits
        self._api_key = api_key

    async def chat_completions(self, request: Request) -> Response:
        """An answer to messages."""
        return await self._complete(request, is_chat=True)

    async def completions(self, request: Request) -> Response:
        """An answer to one text."""
        return await self._complete(request, is_chat=False)

    async def models(self, request: Request) -> Response:
        """The one model."""
        self._check_key(request)
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "kvcat"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self) -> Response:
        """Whether questions are answered."""
        is_alive = self._engine.is_alive
        return JSONResponse({"status": "ok" if is_alive else "closed"}, 200 if is_alive else 503)

    async def metrics(self, request: Request) -> Response:
        """Counters for Prometheus."""
        self._check_key(request)
        return PlainTextResponse(metrics_text(self._engine))

    def _check_key(self, request: Request) -> None:
        """Reject a request without the key."""
        if self._api_key is None:
            return
        sent = request.headers.get("authorization", "").encode("latin-1")  # the client's bytes
        if not secrets.compare_digest(sent, f"Bearer {self._api_key}".encode()):
            raise RequestError(401, "the API key is missing or wrong")

    async def _complete(self, request: Request, *, is_chat: bool) -> Response:
        """An answer, whole or as server-sent events."""
        self._check_key(request)
        body = await _read_body(request, self._limits)
        fields = parse_request(
            body, is_chat=is_chat, model=self._name, most_tokens=self._limits.most_tokens
        )
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Any] = asyncio.Queue()

        def on_event(event: Any) -> None:
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(events.put_nowait, event)

        ticket = Ticket(fields["question"], on_event)
        self._engine.submit(ticket)
        form = ResponseForm(self._name, is_chat=is_chat)
        async with _cancelled_if_gone(request, ticket, events):
            if not fields["is_streamed"]:
                return JSONResponse(await _whole_answer(events, form))
            first = await events.get()
        if isinstance(first, RequestError):
            raise first
        chunks = _chunks(ticket, events, form, first, has_usage=fields["has_usage"])
        return StreamingResponse(chunks, media_type="text/event-stream")


async def _reject(_: Request, error: Exception) -> Response:
    """The response to a request that cannot be answered."""
    if not isinstance(error, RequestError):
        raise error
    return JSONResponse(error_record(error), error.status, headers=_HEADERS.get(error.status))


def run_server(app: FastAPI, engine: Engine, host: str, port: int) -> None:
    """Answer requests until the process is asked to end (SIGINT, SIGTERM)."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=_Connection,
        ws="none",
        log_level="warning",
        timeout_graceful_shutdown=_SECONDS_TO_SHUT_DOWN,
    )
    with suppress(KeyboardInterrupt):
        _Server(config, engine).run()


class _Server(uvicorn.Server):
    """A server that rejects what has no answer yet as soon as it is asked to end."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the engine, so that all requests have a response, and then the connections."""
        with suppress(TimeoutError):  # the model is in a long forward pass
            await asyncio.wait_for(asyncio.to_thread(self._engine.close), _SECONDS_TO_SHUT_DOWN)
        await super().shutdown(sockets)


class _Connection(H11Protocol):
    """A connection that ends if the headers of a request do not come in time.

    uvicorn limits the time between two requests, but not that of the headers.
    """

    _headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request; end the longest wait if there are too many."""
        super().connection_made(transport)
        self._wait_for_headers()
        timers = [(each, getattr(each, "_headers_timer", None)) for each in self.connections]
        waiting = [(timer.when(), each.transport) for each, timer in timers if timer is not None]
        if len(waiting) > _MOST_WITHOUT_HEADERS:
            min(waiting, key=itemgetter(0))[1].close()

    def data_received(self, data: bytes) -> None:
        """Stop waiting at the end of the headers, or begin to wait for further ones."""
        super().data_received(data)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        """Begin to wait unless a request is being answered; further bytes give no more time."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._headers_timer is None:
            self._headers_timer = self.loop.call_later(_SECONDS_FOR_HEADERS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None


def metrics_text(engine: Engine) -> str:
    """Counters and gauges in the text format of Prometheus."""
    documents = engine.documents
    counters = {
        "answers": engine.num_answers,
        "batches": engine.num_batches,
        "errors": engine.num_errors,
        "prompt_tokens": engine.num_prompt_tokens,
        "answer_tokens": engine.num_answer_tokens,
        "busy_seconds": engine.busy_seconds,
        "cache_hits": documents.recent.num_hits,
        "cache_loads": documents.num_loads,
    }
    gauges = {
        "waiting_requests": engine.num_waiting,
        "cache_bytes": documents.recent.num_bytes,
        "documents": len(documents.store),
    }
    lines = []
    for name, value in counters.items():
        lines += [f"# TYPE kvcat_{name}_total counter", f"kvcat_{name}_total {value}"]
    for name, value in gauges.items():
        lines += [f"# TYPE kvcat_{name} gauge", f"kvcat_{name} {value}"]
    return "\n".join(lines) + "\n"


async def _read_body(request: Request, limits: ServerLimits) -> bytes:
    """The body of a request; ``RequestError`` once it is too long or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(limits.most_seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.most_bytes:
                    raise RequestError(413, f"the request is longer than {limits.most_bytes} bytes")
    except TimeoutError:
        raise RequestError(408, f"the request took longer than {limits.most_seconds:g} s") from None
    except ClientDisconnect:
        raise RequestError(499, "the client is gone") from None
    except asyncio.CancelledError:  # uvicorn ends, and waits no longer
        raise RequestError(503, "the server is shutting down") from None
    return bytes(body)


@asynccontextmanager
async def _cancelled_if_gone(
    request: Request, ticket: Ticket, events: asyncio.Queue[Any]
) -> AsyncIterator[None]:
    """A block that waits for events of an answer; the answer ends if the client is gone."""

    async def watch() -> None:
        # the body has been read: nothing else comes
        while (await request.receive())["type"] != "http.disconnect":
            pass
        ticket.cancel()
        events.put_nowait(RequestError(499, "the client is gone"))

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


async def _whole_answer(events: asyncio.Queue[Any], form: ResponseForm) -> dict[str, Any]:
    """The JSON of a complete answer."""
    event = ""
    while isinstance(event, str):
        event = await events.get()
    if isinstance(event, RequestError):
        raise event
    result, usage = event
    return form.whole(result.text, result.finish_reason, usage)


async def _chunks(
    ticket: Ticket,
    events: asyncio.Queue[Any],
    form: ResponseForm,
    first: Any,
    *,
    has_usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events of an answer; closing the iterator ends the answer."""
    event = first
    try:
        yield _line(form.chunk("", is_first=True))
        while isinstance(event, str):
            yield _line(form.chunk(event))
            event = await events.get()
        if isinstance(event, RequestError):
            yield _line(error_record(event))
            return
        result, usage = event
        yield _line(form.chunk(None, result.finish_reason))
        if has_usage:
            yield _line(form.usage_chunk(usage))
        yield "data: [DONE]\n\n"
    finally:
        ticket.cancel()


def _line(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
