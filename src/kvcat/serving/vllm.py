"""Compact caches in vLLM: a connector that fills the first slots of a request from a packed cache.

A request names a cache in ``kv_transfer_params``: ``{"kvcat": NAME}``, or several in a list. NAME
is a file in a folder of packed caches, or the id of a document in a store. The
middleware replaces its text by placeholders for the slots and the tokens of the question. It
answers a wrong name or file with status 400. Requests may bypass the middleware, so the connector
checks again: if a request does not fit, it alone fails.

The scheduler's side of the connector reports how many tokens the cache brings. The worker's side
writes keys and values with the attention implementation's ``do_kv_cache_update``, which knows the
layout of its pages. docs/serving.md shows the command.
"""

# pyright: reportMissingImports=false

import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from starlette.responses import JSONResponse
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.tokenizers import get_tokenizer

from kvcat.corpus.store import SETTINGS as STORE_SETTINGS
from kvcat.errors import InputError
from kvcat.serving.pages import SlotsInCells, cells_of, check_pages, write_slots
from kvcat.serving.prefix import LayerStates, PackedDocument
from kvcat.serving.recent import RecentlyUsed
from kvcat.serving.requests import (
    FIELD,
    PLACEHOLDER,
    SALT,
    CacheFolder,
    NamedCaches,
    chat_ids,
    prompt_ids,
    request_fields,
)
from kvcat.serving.several import JoinedPrefix, WideRotation
from kvcat.serving.stored import CacheStore
from kvcat.serving.widen import widened_fingerprint
from kvcat.serving.windows import LayerWindow

logger = init_logger(__name__)
_NO_ADAPTERS = (
    "compact caches belong to the model itself: a request with a LoRA adapter cannot name one"
)
DEFAULT_CACHE_MB = 1024
_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32")
_TEXT_FIELDS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}


class _Load(NamedTuple):
    """Slots of a cache to write into the cells of a request."""

    request_id: str
    prefix: PackedDocument | JoinedPrefix
    places: list[SlotsInCells]  # of every group of layers
    blocks: list[int]  # of the first group, the blocks of these cells
    is_awaited: bool  # the request waits until its slots are written


@dataclass
class _Step(base.KVConnectorMetadata):
    """Work for the workers before a forward pass: loads, and requests that fail."""

    loads: list[_Load] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


class CompactCacheConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """Gives requests the keys and values of the packed cache that they name.

    Layers in several groups (full attention, sliding windows) have pages of their own. vLLM maps a
    block that could not be loaded to its request with one group alone, so with several groups a
    request waits for its slots.

    Raises:
        InputError: no folder of caches, a model that was not widened, more than one worker, or
            pages of an unknown layout.
    """

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.caches = open_caches(vllm_config)
        self.shape = served_shape(vllm_config)
        self.window = LayerWindow.of(vllm_config.model_config.hf_config)
        self.dtype = vllm_config.model_config.dtype
        groups = kv_cache_config.kv_cache_groups
        self.block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self.group_of_layer = {
            name: index for index, group in enumerate(groups) for name in group.layer_names
        }
        if vllm_config.parallel_config.world_size > 1:
            raise InputError(
                "compact caches are served by one worker: no tensor or pipeline parallelism"
            )
        cache_dtype = str(getattr(vllm_config.cache_config, "cache_dtype", "auto"))
        if cache_dtype not in _CACHE_DTYPES:
            raise InputError(
                f"compact caches are not written into cells of {cache_dtype}: "
                "leave out --kv-cache-dtype"
            )
        self._step = _Step()
        # The cache that each new request names, by request; None: the request fails.
        self._prefixes: dict[str, PackedDocument | JoinedPrefix | None] = {}
        self._written_requests: set[str] = set()
        self._failed_requests: set[str] = set()
        self._invalid_blocks: set[int] = set()
        self._states = RecentlyUsed(memory_bytes(vllm_config), _num_bytes)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Slots that the request's cache adds to the computed ones; whether they load later.

        A request that does not fit waits for a load, which then fails before anything is computed
        or kept.
        """
        try:
            prefix = self._named_prefix(request)
        except InputError as error:
            logger.error("request %s: %s", request.request_id, error)
            self._prefixes[request.request_id] = None
            request.skip_reading_prefix_cache = False
            return max(1, request.num_tokens - num_computed_tokens), True
        if prefix is None:
            return 0, False
        self._prefixes[request.request_id] = prefix
        num_new = max(0, prefix.num_slots - num_computed_tokens)
        return num_new, num_new > 0 and len(self.block_sizes) > 1

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the load for the cells that the request received."""
        if num_external_tokens == 0 or request.request_id not in self._prefixes:
            return
        prefix = self._prefixes.pop(request.request_id)
        if prefix is None:
            self._step.failed.add(request.request_id)
            return
        start = prefix.num_slots - num_external_tokens
        by_group = blocks.get_block_ids()
        first_block = start // self.block_sizes[0]
        num_blocks = -(-prefix.num_slots // self.block_sizes[0])
        load = _Load(
            request_id=request.request_id,
            prefix=prefix,
            places=[
                cells_of(block_ids, start, prefix.num_slots, block_size)
                for block_ids, block_size in zip(by_group, self.block_sizes, strict=True)
            ],
            blocks=by_group[0][first_block:num_blocks],
            is_awaited=len(by_group) > 1,
        )
        self._step.loads.append(load)

    def build_connector_meta(self, scheduler_output: Any) -> _Step:  # noqa: ARG002
        """The work recorded since the last step."""
        step = self._step
        self._step = _Step()
        return step

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, None]:
        """Forget the request."""
        self._prefixes.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Forget the request; its blocks are freed at once in all groups."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Check the layout of the pages of every layer."""
        _, num_kv_heads, head_dim = self.shape
        for name, pages in kv_caches.items():
            check_pages(
                name,
                pages.shape,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=self.block_sizes[self.group_of_layer.get(name, 0)],
            )

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Write the slots of this step's requests."""
        step: Any = self._get_connector_metadata()
        self._failed_requests |= step.failed
        layers = {
            name: layer
            for name, layer in forward_context.no_compile_layers.items()
            if hasattr(getattr(layer, "impl", None), "do_kv_cache_update")
        }
        for load in step.loads:
            try:
                states = self._states.get(load.prefix.digest, load.prefix.load)
            except InputError as error:
                logger.error("request %s: %s", load.request_id, error)
                if load.is_awaited:
                    self._failed_requests.add(load.request_id)
                else:
                    self._invalid_blocks.update(load.blocks)
                continue
            for name, layer in layers.items():
                places = load.places[self.group_of_layer.get(name, 0)]
                write_slots(layer, states[extract_layer_index(name)], places, self.dtype)
            if load.is_awaited:
                self._written_requests.add(load.request_id)

    def get_transfer_results(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> base.KVConnectorTransferResults:
        """The requests that no longer wait for their slots, and those of them that fail."""
        failed = self._failed_requests
        written = self._written_requests
        self._failed_requests = set()
        self._written_requests = set()
        return base.KVConnectorTransferResults(
            finished_recving=failed | written, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose cache could not be read."""
        invalid = self._invalid_blocks
        self._invalid_blocks = set()
        return invalid

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: no cache is saved, and loads end before the forward pass."""

    wait_for_layer_load = save_kv_layer = wait_for_save = _nothing  # type: ignore[assignment]

    def _named_prefix(self, request: Any) -> PackedDocument | JoinedPrefix | None:
        """The cache that a request names, if any; ``InputError`` if it does not fit."""
        name = (request.kv_transfer_params or {}).get(FIELD)
        salt = request.cache_salt or ""
        if name is None:
            if salt.startswith(SALT):
                raise InputError(f"cache_salt begins with {SALT!r} and no cache is named")
            self._check_window(None, request)
            return None
        if getattr(request, "lora_request", None) is not None:
            raise InputError(_NO_ADAPTERS)
        prefix = self.caches.find(name)
        if not salt.startswith(SALT + prefix.digest):
            raise InputError(
                f"the prompt was not made for the cache {name!r} as it is now: its salt differs"
            )
        num_slots = prefix.num_slots
        prompt = list(request.prompt_token_ids or ())
        if len(prompt) <= num_slots or any(token != PLACEHOLDER for token in prompt[:num_slots]):
            raise InputError(f"the prompt must be {num_slots} placeholders and at least one token")
        if request.skip_reading_prefix_cache:
            raise InputError(
                "logprobs of the prompt need the tokens of the prompt, which a cache does not have"
            )
        self._check_window(prefix, request)
        return prefix

    def _check_window(self, prefix: PackedDocument | JoinedPrefix | None, request: Any) -> None:
        """Reject a request that does not fit into the window of the short layers."""
        if self.window is not None:
            num_slots = 0 if prefix is None else prefix.num_slots
            num_prompt_tokens = len(request.prompt_token_ids or ())
            self.window.check(prefix, num_prompt_tokens - num_slots + request.max_tokens)


async def compact_caches(request: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
    """Middleware of vLLM's server: makes a request that names a cache a prompt of token ids."""
    field_name = _TEXT_FIELDS.get(request.url.path)
    state = request.app.state
    if field_name is None or not _is_authorized(request):  # the server rejects the latter
        return await call_next(request)
    try:
        request._body = _with_token_ids(state, field_name, await request.body())
    except InputError as error:
        details = {
            "message": str(error),
            "type": "BadRequestError",
            "param": "kv_transfer_params",
            "code": 400,
        }
        return JSONResponse({"error": details}, 400)
    return await call_next(request)


def _is_authorized(request: Any) -> bool:
    """Whether the request has one of the server's API keys, or the server has none."""
    api_keys = getattr(request.app.state.args, "api_key", None)
    authorization = request.headers.get("authorization", "")
    return not api_keys or authorization.removeprefix("Bearer ") in api_keys


def open_caches(vllm_config: Any) -> NamedCaches:
    """The folder or the store of caches that a configuration names.

    Raises:
        InputError: none is named, the model was not widened, or a store of another model.
    """
    config = vllm_config.model_config.hf_config
    address = _extra_config(vllm_config, "caches", None)
    if not isinstance(address, str):
        raise InputError(
            "kv_connector_extra_config must name the folder of packed caches, or a store: "
            '{"caches": FOLDER}'
        )
    shape = served_shape(vllm_config)
    fingerprint = widened_fingerprint(config)
    rotation = WideRotation.of(config)
    if "://" in address or (Path(address).expanduser() / STORE_SETTINGS).is_file():
        return CacheStore(address, fingerprint, shape, rotation)
    return CacheFolder(address, fingerprint, shape, rotation)


def served_shape(vllm_config: Any) -> tuple[int, int, int]:
    """Layers, KV heads and channels of the served model."""
    config = vllm_config.model_config.hf_config
    return config.num_hidden_layers, config.num_key_value_heads, config.head_dim


def memory_bytes(vllm_config: Any) -> int:
    """Bytes of caches that are held in memory.

    Raises:
        InputError: not a number of at least 0.
    """
    megabytes = _extra_config(vllm_config, "cache_mb", DEFAULT_CACHE_MB)
    if type(megabytes) not in (int, float) or not 0 <= megabytes < math.inf:
        raise InputError(f"cache_mb must be a number of at least 0, not {megabytes!r}")
    return int(megabytes * 1e6)


def _extra_config(vllm_config: Any, name: str, default: Any) -> Any:
    """An entry of ``kv_connector_extra_config``."""
    transfer = vllm_config.kv_transfer_config
    return transfer.get_from_extra_config(name, default) if transfer else default


def _num_bytes(states: list[LayerStates]) -> int:
    return sum(tensor.nbytes for of_layer in states for tensor in of_layer)


def _adapter_names(state: Any) -> set[str]:
    """The names of models with a LoRA adapter on this server."""
    requests = getattr(getattr(state, "openai_serving_models", None), "lora_requests", ())
    return {getattr(request, "lora_name", request) for request in requests}


def _with_token_ids(state: Any, field_name: str, body: bytes) -> bytes:
    """The body of a request as the connector needs it.

    A body that names no cache or that is not understood is returned unchanged.

    Args:
        state: state of the server's app; it keeps the folder and the tokenizer.
        field_name: the field with the text, ``prompt`` or ``messages``.
        body: JSON.
    """
    try:
        request = json.loads(body)
        name = request["kv_transfer_params"][FIELD]
    except (ValueError, KeyError, TypeError, RecursionError):
        return body
    if request.get("model") in _adapter_names(state):
        raise InputError(_NO_ADAPTERS)
    if not hasattr(state, "kvcat"):
        tokenizer_name = state.vllm_config.model_config.tokenizer
        state.kvcat = (open_caches(state.vllm_config), get_tokenizer(tokenizer_name))
    folder, tokenizer = state.kvcat
    prefix = folder.find(name)
    make_ids = prompt_ids if field_name == "prompt" else chat_ids
    ids = make_ids(
        tokenizer,
        request.get(field_name),
        chat=prefix.chat,
        chat_template=prefix.chat_template,
    )
    fields = request_fields(prefix, name, ids, str(request.get("cache_salt") or ""))
    if field_name == "messages":  # this API has no token ids, but vLLM reads them from this field
        fields["kv_transfer_params"]["prompt_token_ids"] = fields.pop("prompt")
    return json.dumps({**request, **fields}).encode()
