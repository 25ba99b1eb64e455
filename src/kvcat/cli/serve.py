"""The commands ``kvcat serve`` and ``kvcat chat``: a server, and a conversation in a terminal."""

import copy
import errno
import json
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from kvcat import option_types as opt
from kvcat.cli import early
from kvcat.cli.cache_files import check_caches, limit_note, model_and_cache
from kvcat.cli.generate import SamplingOptions, print_piece
from kvcat.errors import InputError
from kvcat.settings import Sampling

if TYPE_CHECKING:
    from kvcat.compress import Session

KEY_VARIABLE = "KVCAT_API_KEY"
_MOST_TOKENS = 256
_TAIL = 512  # last tokens of a conversation that are never compressed
_HELP = (
    "type a question; /save FILE writes the conversation, /reset forgets it, /quit ends it; Ctrl-C "
    "ends an answer"
)


def serve(
    model: opt.Model,
    /,
    store: str,
    host: str = "127.0.0.1",
    port: opt.Port = 8000,
    name: opt.Unset[str] = None,
    api_key: opt.Unset[str] = None,
    max_requests: opt.Count = 128,
    max_bytes: opt.Count = 1_048_576,
    max_tokens: opt.Count = 1024,
    cache_mb: opt.Megabytes = 1024.0,
    device: opt.Device = "cpu",
    dtype: opt.Unset[opt.Dtype] = None,
) -> None:
    """Serve the documents of a store with OpenAI's API, on plain transformers.

    It needs no engine and serves every model that kvcat compresses. For many requests at once use
    vLLM, which reads the same store (docs/serving.md).

    A request names its document, or several, in the field `kvcat`. Questions that wait for the same
    documents are answered in one batch, the others one after another.

    Example: kvcat serve ./my-model --store store

    Args:
        store: Store of `kvcat corpus`: a folder or an address.
        host: Address to listen on; 0.0.0.0 is every network of this machine.
        port: Port to listen on.
        name: Name of the model for clients; by default the last part of MODEL.
        api_key: Key that clients must send; by default that of the variable KVCAT_API_KEY, if set.
        max_requests: Most requests that may wait; further ones get status 429.
        max_bytes: Most bytes of a request; longer ones get status 413.
        max_tokens: Most tokens of an answer.
        cache_mb: Millions of bytes of caches in memory; those not used for longest are dropped.
        dtype: Data type of the weights; by default that of the store.
    """
    key = os.environ.get(KEY_VARIABLE) if api_key is None else api_key
    if key == "":
        raise InputError("the API key is empty")
    _check_port(host, port)
    early.check_device(device)
    early.check_model(model)

    import kvcat
    from kvcat.corpus import Store
    from kvcat.serving.engine import Engine
    from kvcat.serving.server import ServerLimits, make_app, run_server

    documents = Store(store)
    loaded, tokenizer = kvcat.load(
        model, dtype=dtype or str(documents.settings.get("dtype", "float32")), device=device
    )
    engine = Engine(
        loaded,
        tokenizer,
        documents,
        cache_bytes=int(cache_mb * 1e6),
        most_waiting=max_requests,
    )
    model_name = name or Path(os.path.abspath(model)).name  # also of "."
    app = make_app(engine, model_name, limits=ServerLimits(max_bytes, max_tokens), api_key=key)
    print(
        f"serving {len(documents)} documents as model {model_name!r} on http://{host}:{port}/v1",
        file=sys.stderr,
        flush=True,
    )
    run_server(app, engine, host, port)


def _check_port(host: str, port: int) -> None:
    """Raise an ``InputError`` for an address on which this process cannot listen."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} of {host} is in use: give another --port") from None
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def chat(
    model: opt.Model,
    /,
    cache: opt.Unset[Path] = None,
    store: opt.StoreOfCache = None,
    id: opt.DocumentId = None,
    *,
    sampling: tyro.conf.OmitArgPrefixes[SamplingOptions],
    device: opt.Device = "cpu",
    dtype: opt.Unset[opt.Dtype] = None,
) -> None:
    """Ask questions about a compressed document, one after another; answers see earlier turns.

    Turns stay as they are up to 4,096 tokens. Then the older ones are compressed, again and again,
    where the model's layers allow it. The document never changes.

    Type /save FILE to write the conversation as JSON, /reset to forget earlier turns. Type /quit,
    or end the input, to leave. Ctrl-C ends an answer, which is then no part of the conversation.

    Example: kvcat chat ./my-model --cache report.safetensors

    Args:
        cache: Cache file that `kvcat compress` wrote, best with --chat; or give --store.
        dtype: Data type of the weights; by default that of the cache.
    """
    settings = sampling.settings(_MOST_TOKENS)
    files = check_caches(() if cache is None else ((cache,),), store=store, id=id)
    early.check_device(device)
    early.check_model(model)

    from kvcat.compress import Session
    from kvcat.models import positions_of

    loaded, tokenizer, compact = model_and_cache(
        model, files, device=device, dtype=dtype, store=store, id=id
    )
    positions = positions_of(loaded.config)
    room = positions - compact.num_tokens
    if sampling.max_new_tokens is not None and sampling.max_new_tokens >= room:
        raise InputError(
            f"--max-new-tokens is {sampling.max_new_tokens}; the model's {positions} "
            f"positions leave {room} for questions and answers after the document"
        )
    conversation = _Conversation(Session(loaded, tokenizer, document=compact, tail=_TAIL), settings)
    print(f"{compact.num_tokens} tokens of document: {_HELP}", file=sys.stderr)
    num_failed = 0
    while True:
        line = _read_line()
        if line is None or line.strip() == "/quit":
            break
        try:
            if line.startswith("/"):
                conversation.run(line)
            elif line.strip():
                conversation.answer(line)
        except InputError as error:  # the conversation continues
            print(f"kvcat: {error}", file=sys.stderr)
            num_failed += 1
    if num_failed and not sys.stdin.isatty():
        raise InputError(f"lines of the input that failed, with the reasons above: {num_failed}")


def _read_line() -> str | None:
    """The next line of input; None at its end. Ctrl-C in a terminal drops the line.

    A file may begin with a byte order mark, and its lines may end with a carriage return.
    """
    is_terminal = sys.stdin.isatty()
    try:
        return input("> " if is_terminal else "").removeprefix("\ufeff").removesuffix("\r")
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        print()
        return ""


@dataclass
class _Conversation:
    """A conversation in a terminal.

    Args:
        empty: the session without turns.
        settings: of every answer.
        messages: turns so far.
        saved: files that it was saved to since the last /reset, which may be replaced.
    """

    empty: "Session"
    settings: Sampling
    messages: list[dict[str, str]] = field(default_factory=list)
    saved: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.session = copy.copy(self.empty)

    def answer(self, line: str) -> None:
        """Print the answer to a question as it comes."""
        num_compactions = self.session.num_compactions
        try:
            result = self.session.ask(line, self.settings, on_text=print_piece)
        except KeyboardInterrupt:
            print(flush=True)
            print("stopped: this question and its answer are not kept", file=sys.stderr)
            return
        print(flush=True)
        self.messages.append({"role": "user", "content": line})
        self.messages.append({"role": "assistant", "content": result.text})
        if result.finish_reason == "length":
            print(limit_note(len(result.ids)), file=sys.stderr)
        if self.session.num_compactions > num_compactions:
            print("the older turns were compressed", file=sys.stderr)

    def run(self, line: str) -> None:
        """Obey a line that begins with a slash."""
        command, _, argument = line.strip().partition(" ")
        if command == "/reset" and not argument:
            self.messages.clear()
            self.saved.clear()
            self.session = copy.copy(self.empty)
        elif command == "/save" and argument:
            self._save(argument.strip())
        else:
            raise InputError(f"{line.strip()[:40]} is not a command: {_HELP}")

    def _save(self, name: str) -> None:
        """Write the conversation to a new file, or to one of its earlier files."""
        from kvcat.files import expanded, reason, write_text

        content = json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False)
        try:
            path = expanded(name)
            if path.exists() and path.resolve() not in self.saved:
                raise InputError(f"{path} exists: name a new file")
            write_text(path, content + "\n")
        except InputError:
            raise
        except (OSError, ValueError) as error:  # no name of a file: too long, a zero byte
            raise InputError(f"cannot write {name[:80]!r}: {reason(error)}") from None
        self.saved.add(path.resolve())
        print(f"{path}: {len(self.messages)} messages", file=sys.stderr)
