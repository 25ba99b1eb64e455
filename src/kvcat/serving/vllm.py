"""Compact caches in vLLM: a connector that fills the first slots of a request from a packed cache.

A request names a cache in ``kv_transfer_params``: ``{"kvcat": NAME}``, or several in a list. The
middleware replaces its text by placeholders for the slots and the tokens of the question. It
answers a wrong name or file with status 400. Requests may bypass the middleware, so the connector
checks again: if a request does not fit, it alone fails.

The scheduler's side of the connector reports how many tokens the cache brings. The worker's side
writes keys and values with the attention implementation's ``do_kv_cache_update``, which knows the
layout of its pages. docs/serving.md shows the command.
"""

# pyright: reportMissingImports=false

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from starlette.responses import JSONResponse
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.tokenizers import get_tokenizer

from kvcat.errors import InputError
from kvcat.serving.prefix import LayerStates, Prefix
from kvcat.serving.requests import (
    FIELD,
    PLACEHOLDER,
    SALT,
    CacheFolder,
    chat_ids,
    prompt_ids,
    request_fields,
)
from kvcat.serving.several import JoinedPrefix, WideRotation
from kvcat.serving.widen import widened_fingerprint

logger = init_logger(__name__)
_NO_ADAPTERS = (
    "compact caches belong to the model itself: a request with a LoRA adapter cannot name one"
)
_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32")
_TEXT_FIELDS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}


class _Load(NamedTuple):
    """Slots of a cache to write into the cells of a request."""

    prefix: Prefix | JoinedPrefix
    start: int  # the first slot to write
    cells: torch.Tensor  # (slots to write): the cell of each
    blocks: list[int]  # the blocks of these cells


@dataclass
class _Step(base.KVConnectorMetadata):
    """Work for the workers before a forward pass: loads, and requests that fail."""

    loads: list[_Load] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


class CompactCacheConnector(base.KVConnectorBase_V1):
    """Gives requests the keys and values of the packed cache that they name.

    Raises:
        InputError: no folder of caches, a model that was not widened, or more than one worker.
    """

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.caches = open_folder(vllm_config)
        self.block_size = vllm_config.cache_config.block_size
        self.dtype = vllm_config.model_config.dtype
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
        self._prefixes: dict[str, Prefix | JoinedPrefix | None] = {}
        self._failed_requests: set[str] = set()
        self._invalid_blocks: set[int] = set()
        self._loaded = lru_cache(maxsize=16)(methodcaller("load"))

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
        return max(0, prefix.num_slots - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the load for the cells that the request received."""
        if num_external_tokens == 0 or request.request_id not in self._prefixes:
            return
        prefix = self._prefixes.pop(request.request_id)
        if prefix is None:
            self._step.failed.add(request.request_id)
            return
        block_ids = blocks.get_block_ids()[0]
        start = prefix.num_slots - num_external_tokens
        slots = torch.arange(start, prefix.num_slots)
        first_cells = torch.tensor(block_ids)[slots // self.block_size] * self.block_size
        first_block = start // self.block_size
        num_blocks = -(-prefix.num_slots // self.block_size)
        load = _Load(
            prefix=prefix,
            start=start,
            cells=first_cells + slots % self.block_size,
            blocks=block_ids[first_block:num_blocks],
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
                states = self._loaded(load.prefix)
            except InputError as error:
                logger.error("%s", error)
                self._invalid_blocks.update(load.blocks)
                continue
            for name, layer in layers.items():
                self._write(load, states[extract_layer_index(name)], layer)

    def _write(self, load: _Load, states: LayerStates, layer: Any) -> None:
        """Write the slots of a load into one layer."""
        device = layer.kv_cache.device
        keys, values = (
            # (kv_heads, slots, channels) to (slots to write, kv_heads, channels)
            tensor[:, load.start :].transpose(0, 1).to(device, self.dtype).contiguous()
            for tensor in states
        )
        cells = load.cells.to(device)
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, cells)

    def get_transfer_results(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> base.KVConnectorTransferResults:
        """The requests that fail."""
        failed = self._failed_requests
        self._failed_requests = set()
        return base.KVConnectorTransferResults(finished_recving=set(failed), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose cache could not be read."""
        invalid = self._invalid_blocks
        self._invalid_blocks = set()
        return invalid

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: no cache is saved, and loads end before the forward pass."""

    wait_for_layer_load = save_kv_layer = wait_for_save = _nothing  # type: ignore[assignment]

    def _named_prefix(self, request: Any) -> Prefix | JoinedPrefix | None:
        """The cache that a request names, if any; ``InputError`` if it does not fit."""
        name = (request.kv_transfer_params or {}).get(FIELD)
        salt = request.cache_salt or ""
        if name is None:
            if salt.startswith(SALT):
                raise InputError(f"cache_salt begins with {SALT!r} and no cache is named")
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
        return prefix


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


def open_folder(vllm_config: Any) -> CacheFolder:
    """The folder of caches that a configuration names.

    Raises:
        InputError: no folder is named, or the model was not widened.
    """
    config = vllm_config.model_config.hf_config
    transfer = vllm_config.kv_transfer_config
    folder = transfer.get_from_extra_config("caches", None) if transfer else None
    if not isinstance(folder, str):
        raise InputError(
            'kv_connector_extra_config must name the folder of packed caches: {"caches": FOLDER}'
        )
    shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    fingerprint = widened_fingerprint(config)
    return CacheFolder(folder, fingerprint, shape, WideRotation.of(config))


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
        state.kvcat = (open_folder(state.vllm_config), get_tokenizer(tokenizer_name))
    folder, tokenizer = state.kvcat
    prefix = folder.find(name)
    make_ids = prompt_ids if field_name == "prompt" else chat_ids
    ids = make_ids(tokenizer, request.get(field_name), chat=prefix.chat)
    fields = request_fields(prefix, name, ids, str(request.get("cache_salt") or ""))
    if field_name == "messages":  # this API has no token ids, but vLLM reads them from this field
        fields["kv_transfer_params"]["prompt_token_ids"] = fields.pop("prompt")
    return json.dumps({**request, **fields}).encode()
