"""Compact caches in vLLM: a connector that fills the first slots of a request from a packed cache.

A request names a cache in ``kv_transfer_params``: ``{"kvcat": NAME}``. The middleware turns its text into placeholders
for the slots and the question's tokens, and answers a wrong name or file with status 400. The connector checks again,
since requests may come without it: what does not fit fails that request alone. The scheduler's side of the connector
says how many tokens the cache brings; the worker's side writes keys and values through the attention implementation's
own ``do_kv_cache_update``, which knows its pages' layout. docs/serving.md shows the command.
"""

# pyright: reportMissingImports=false

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from starlette.responses import JSONResponse
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.tokenizers import get_tokenizer

from kvcat.errors import InputError
from kvcat.serving.prefix import Prefix
from kvcat.serving.requests import FIELD, PLACEHOLDER, SALT, CacheFolder, chat_ids, prompt_ids, request_fields
from kvcat.serving.widen import widened_fingerprint

logger = init_logger(__name__)
_NO_ADAPTERS = "compact caches belong to the model itself: a request with a LoRA adapter cannot name one"
_TEXTS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}


class _Load(NamedTuple):
    prefix: Prefix
    start: int  # the first slot to write
    cells: torch.Tensor  # where the slots go
    blocks: list[int]  # that hold these cells


@dataclass
class _Step(base.KVConnectorMetadata):
    """What the workers do before a forward: loads, and requests that fail."""

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
        self.block_size, self.dtype = vllm_config.cache_config.block_size, vllm_config.model_config.dtype
        if vllm_config.parallel_config.world_size > 1:
            raise InputError("compact caches are served by one worker: no tensor or pipeline parallelism")
        self._step = _Step()
        self._named: dict[str, Prefix | None] = {}
        self._failed_requests: set[str] = set()
        self._invalid_blocks: set[int] = set()
        self._loaded = lru_cache(maxsize=16)(Prefix.load)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Slots that the request's cache brings beyond those that are there.

        A request that does not fit waits for a load, which then fails before anything is computed or kept.
        """
        try:
            prefix = self._prefix(request)
        except InputError as error:
            logger.error("request %s: %s", request.request_id, error)
            self._named[request.request_id], request.skip_reading_prefix_cache = None, False
            return max(1, request.num_tokens - num_computed_tokens), True
        if prefix is None:
            return 0, False
        self._named[request.request_id] = prefix
        return max(0, prefix.num_slots - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note what to load into the cells that the request was given."""
        if num_external_tokens == 0 or request.request_id not in self._named:
            return
        prefix = self._named.pop(request.request_id)
        if prefix is None:
            self._step.failed.add(request.request_id)
            return
        ids, start = blocks.get_block_ids()[0], prefix.num_slots - num_external_tokens
        places = torch.arange(start, prefix.num_slots)
        cells = torch.tensor(ids)[places // self.block_size] * self.block_size + places % self.block_size
        new = ids[start // self.block_size : -(-prefix.num_slots // self.block_size)]
        self._step.loads.append(_Load(prefix, start, cells, new))

    def build_connector_meta(self, scheduler_output: Any) -> _Step:  # noqa: ARG002
        """What was noted since the last step."""
        step, self._step = self._step, _Step()
        return step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:  # noqa: ARG002
        """Forget the request."""
        self._named.pop(request.request_id, None)
        return False, None

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Write the slots of this step's requests."""
        step: Any = self._get_connector_metadata()
        self._failed_requests |= step.failed
        modules = forward_context.no_compile_layers.items()
        layers = {n: x for n, x in modules if hasattr(getattr(x, "impl", None), "do_kv_cache_update")}
        for load in step.loads:
            try:
                states = self._loaded(load.prefix)
            except InputError as error:
                logger.error("%s", error)
                self._invalid_blocks.update(load.blocks)
                continue
            for name, layer in layers.items():
                device = layer.kv_cache.device
                keys, values = (
                    part[:, load.start :].transpose(0, 1).to(device, self.dtype).contiguous()
                    for part in states[extract_layer_index(name)]
                )
                layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, load.cells.to(device))

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:  # noqa: ARG002
        """The requests that fail."""
        failed, self._failed_requests = self._failed_requests, set()
        return base.KVConnectorTransferResults(finished_recving=set(failed), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose cache could not be read."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Nothing is saved, and what is loaded is there before the forward."""

    wait_for_layer_load = save_kv_layer = wait_for_save = _nothing  # type: ignore[assignment]

    def _prefix(self, request: Any) -> Prefix | None:
        """The cache that a request names, if any; ``InputError`` where it does not fit."""
        named, salt = (request.kv_transfer_params or {}).get(FIELD), request.cache_salt or ""
        if named is None:
            if salt.startswith(SALT):
                raise InputError(f"cache_salt begins with {SALT!r} and no cache is named")
            return None
        if getattr(request, "lora_request", None) is not None:
            raise InputError(_NO_ADAPTERS)
        prefix = self.caches.find(named)
        slots, prompt = prefix.num_slots, list(request.prompt_token_ids or ())
        if not salt.startswith(SALT + prefix.digest):
            raise InputError(f"the prompt was not made for the cache {named!r} as it is now: its salt differs")
        if len(prompt) <= slots or any(token != PLACEHOLDER for token in prompt[:slots]):
            raise InputError(f"the prompt must be {slots} placeholders and at least one token")
        if request.skip_reading_prefix_cache:
            raise InputError("logprobs of the prompt need the tokens of the prompt, which a cache does not have")
        return prefix


async def compact_caches(request: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
    """Middleware of vLLM's server: turns a request that names a cache into a prompt of token ids."""
    field, app, given = _TEXTS.get(request.url.path), request.app, request.headers.get("authorization", "")
    keys = getattr(app.state.args, "api_key", None)
    if field is None or (keys and given.removeprefix("Bearer ") not in keys):  # the server itself refuses the latter
        return await call_next(request)
    try:
        request._body = _prepared(app.state, field, await request.body())
    except InputError as error:
        told = {"message": str(error), "type": "BadRequestError", "param": "kv_transfer_params", "code": 400}
        return JSONResponse({"error": told}, 400)
    return await call_next(request)


def open_folder(vllm_config: Any) -> CacheFolder:
    """The folder of caches that a configuration names; ``InputError`` without one, or if the model was not widened."""
    config, transfer = vllm_config.model_config.hf_config, vllm_config.kv_transfer_config
    folder = transfer.get_from_extra_config("caches", None) if transfer else None
    if not isinstance(folder, str):
        raise InputError('kv_connector_extra_config must name the folder of packed caches: {"caches": FOLDER}')
    shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    return CacheFolder(folder, widened_fingerprint(config), shape)


def _adapter_names(state: Any) -> set[str]:
    """Names under which the server answers with a LoRA adapter."""
    requests = getattr(getattr(state, "openai_serving_models", None), "lora_requests", ())
    return {getattr(request, "lora_name", request) for request in requests}


def _prepared(state: Any, field: str, body: bytes) -> bytes:
    """The request as the connector takes it; unchanged if it names no cache or is not understood."""
    try:
        request = json.loads(body)
        name = request["kv_transfer_params"][FIELD]
    except (ValueError, KeyError, TypeError, RecursionError):
        return body
    if request.get("model") in _adapter_names(state):
        raise InputError(_NO_ADAPTERS)
    if not hasattr(state, "kvcat"):
        state.kvcat = open_folder(state.vllm_config), get_tokenizer(state.vllm_config.model_config.tokenizer)
    folder, tokenizer = state.kvcat
    prefix, make = folder.find(name), prompt_ids if field == "prompt" else chat_ids
    ids = make(tokenizer, request.get(field), chat=prefix.chat)
    fields = request_fields(prefix, name, ids, str(request.get("cache_salt") or ""))
    if field == "messages":  # the API has no token ids here, but vLLM takes them from this field
        fields["kv_transfer_params"]["prompt_token_ids"] = fields.pop("prompt")
    return json.dumps({**request, **fields}).encode()
