"""The connector between vLLM's scheduler and its workers: which documents they hold, and which
request reads which.

A request whose document is not in memory waits in the scheduler until all workers have loaded it.
A request that does not fit waits for a load that fails, which is how vLLM ends a single request.
"""

# pyright: reportMissingImports=false

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1 import kv_cache_interface

from kvcat.attention.kernels import EXTRA_CHANNELS
from kvcat.errors import InputError
from kvcat.memory import return_freed_memory
from kvcat.models.rotation import KeyRotation
from kvcat.serving.documents import Document, Documents, open_documents
from kvcat.serving.fingerprints import CheckpointFingerprints
from kvcat.serving.placing import Share, num_bytes, place, rotation_model
from kvcat.serving.requests import FIELD, SALT
from kvcat.serving.residents import Orders, Residents
from kvcat.serving.vllm import CONNECTOR
from kvcat.serving.vllm.worker import WORKER

logger = init_logger(__name__)
NO_ADAPTERS = "documents belong to the model itself: a request with a LoRA adapter cannot name one"
DEFAULT_CACHE_MB = 1024
_NULL_BLOCK = 0  # of cells that no query sees any more: vLLM keeps none
_PAGES = (kv_cache_interface.FullAttentionSpec, kv_cache_interface.SlidingWindowSpec)


@dataclass
class _Step(base.KVConnectorMetadata):
    """What the workers need for a step.

    Args:
        orders: documents to drop and to load.
        digests: of the documents of running requests, by their first block, for every group of
            layers.
        failed: requests that fail.
    """

    orders: Orders
    digests: list[dict[int, str]]
    failed: set[str]


@dataclass
class _Loaded(base.KVConnectorWorkerMetadata):
    """What became of the orders of a step.

    Args:
        num_bytes: of every document that was loaded.
        failed: messages, by the digest of every document that could not be loaded.
    """

    num_bytes: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: Any) -> "_Loaded":
        """The results of several workers."""
        sizes = dict(self.num_bytes)
        for digest, size in other.num_bytes.items():
            sizes[digest] = max(size, sizes.get(digest, 0))
        return _Loaded(sizes, {**self.failed, **other.failed})


class DocumentStats(metrics.KVConnectorStats):
    """Figures of the documents in memory, for the log and for ``/metrics``."""

    def aggregate(self, other: metrics.KVConnectorStats) -> metrics.KVConnectorStats:
        """The later figures."""
        return other

    def reduce(self) -> dict[str, int | float]:
        """The figures."""
        return self.data

    def reset(self) -> None:
        """Forget the figures."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self.data


class DocumentMetrics(metrics.KVConnectorPromMetrics):
    """The figures for ``/metrics``."""

    def __init__(self, config: Any, types: Any, labels: list[str], engines: Any) -> None:
        super().__init__(config, types, labels, engines)
        explanations = {
            "documents": "Compact documents in the memory of the workers.",
            "bytes": "Bytes of the compact documents in the memory of one worker.",
            "most_bytes": "Bound on these bytes (cache_mb).",
            "loads": "Documents that were loaded since the start.",
            "drops": "Documents that made room for others since the start.",
        }
        self._gauges = {
            name: self._gauge_cls(
                name=f"kvcat:document_{name}" if name != "documents" else "kvcat:documents",
                documentation=text,
                labelnames=labels,
            )
            for name, text in explanations.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Show the figures of an engine."""
        for name, gauge in self._gauges.items():
            if name in transfer_stats_data:
                labels = self.per_engine_labelvalues[engine_idx]
                gauge.labels(*labels).set(transfer_stats_data[name])


class DocumentConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """Says to the attention layers which document a request reads, and loads the documents.

    Raises:
        InputError: no folder of documents, a store of another model, or a model or an option of
            vLLM with which answers would be wrong.
    """

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_options(vllm_config)
        self.config = vllm_config
        self.documents = documents_of(vllm_config)
        self.dtype = vllm_config.model_config.dtype
        self.num_workers = vllm_config.parallel_config.tensor_parallel_size
        groups = kv_cache_config.kv_cache_groups
        for group in groups:
            if type(group.kv_cache_spec) not in _PAGES:
                raise InputError(
                    f"documents next to pages of {type(group.kv_cache_spec).__name__} are not "
                    "supported"
                )
        self.num_groups = len(groups)
        self._residents = Residents(memory_bytes(vllm_config))
        # of every group of layers, by first block: the document, and the requests that read it;
        # those with the same beginning share the block
        self._readers: list[dict[int, tuple[str, set[str]]]] = [{} for _ in groups]
        self._found: dict[str, Document] = {}  # by request
        self._rejected: set[str] = set()  # requests that fail as soon as they have blocks
        self._failed: set[str] = set()
        self._skipping: list[Any] = []  # requests that must not read the prefix cache, and wait
        self._loaded = _Loaded()
        self._failing: set[str] = set()
        self.impls: dict[int, Any] = {}  # attention by the number of the layer
        if role == base.KVConnectorRole.WORKER:
            self.rotation = rotation_model(vllm_config.model_config.hf_text_config)
            # vLLM has decorated the class if it runs transformers' code itself; its configuration
            # leads to the served model, which no copy of the small one should contain
            decorated = vars(self.rotation.base_model)
            decorated["do_not_compile"] = True
            for name in ("vllm_config", "compilation_config"):
                decorated.pop(name, None)
            KeyRotation(self.rotation, -1)  # rejects a model whose keys cannot be rotated
            WORKER.group_of_layer = {
                name: number for number, group in enumerate(groups) for name in group.layer_names
            }

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003
        """True: attention to documents runs between the pieces of a graph."""
        return True

    # In the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """No tokens; None while the request waits for its document."""
        if request.request_id not in self._rejected:
            try:
                if self._has_document(request):
                    return 0, False
            except InputError as error:
                logger.error("request %s: %s", request.request_id, error)
                self._rejected.add(request.request_id)
                self._found.pop(request.request_id, None)
        if request.skip_reading_prefix_cache:  # with which vLLM lets no request wait or fail
            request.skip_reading_prefix_cache = False
            self._skipping.append(request)
        if request.request_id in self._rejected:
            return max(1, request.num_tokens - num_computed_tokens), True
        return None, False

    def _has_document(self, request: Any) -> bool:
        """Whether the workers hold the document that a request names, if any.

        Raises:
            InputError: the request fails.
        """
        document = self._document_of(request)
        if document is None:
            return True
        size = document_bytes(document, self.config)
        return self._residents.ask(request.request_id, document, size)

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: Any,
        num_external_tokens: int,  # noqa: ARG002
    ) -> None:
        """Remember the first blocks of the request; one that was rejected fails now.

        Without blocks it would not wait for the load that fails, and vLLM would end.
        """
        if request.request_id in self._rejected:
            self._failed.add(request.request_id)
        document = self._found.get(request.request_id)
        digest = None if document is None else document.digest
        for readers, block_ids in zip(self._readers, blocks.get_block_ids(), strict=True):
            if not block_ids or block_ids[0] == _NULL_BLOCK:
                continue
            of_block = readers.get(block_ids[0])
            if digest is None:
                readers.pop(block_ids[0], None)
            elif of_block is not None and of_block[0] == digest:
                of_block[1].add(request.request_id)
            else:
                # its earlier readers were preempted, or their window has left it
                readers[block_ids[0]] = (digest, {request.request_id})

    def build_connector_meta(self, scheduler_output: Any) -> _Step:  # noqa: ARG002
        """What the workers need for this step."""
        digests = [
            {block: digest for block, (digest, _) in readers.items()} for readers in self._readers
        ]
        step = _Step(self._residents.take_orders(), digests, self._failed)
        self._failed = set()
        for request in self._skipping:
            request.skip_reading_prefix_cache = True
        self._skipping = []
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """Take notice of what the workers have loaded."""
        loaded = connector_output.kv_connector_worker_meta
        if isinstance(loaded, _Loaded):
            for digest, size in loaded.num_bytes.items():
                if digest not in loaded.failed:
                    self._residents.on_loaded(digest, size)
            for digest, message in loaded.failed.items():
                self._residents.on_failed(digest, message)

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, None]:
        """Forget the request."""
        self._residents.release(request.request_id)
        self._found.pop(request.request_id, None)
        self._rejected.discard(request.request_id)
        for readers in self._readers:
            for block, (_, request_ids) in list(readers.items()):
                request_ids.discard(request.request_id)
                if not request_ids:
                    del readers[block]
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Forget the request; its blocks are freed at once in all groups."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def get_kv_connector_stats(self) -> DocumentStats | None:
        """Figures of the documents in memory; a worker has none."""
        if self.role != base.KVConnectorRole.SCHEDULER:
            return None
        residents = self._residents
        return DocumentStats(
            {
                "documents": len(residents),
                "bytes": residents.num_bytes,
                "most_bytes": residents.most_bytes,
                "loads": residents.num_loads,
                "drops": residents.num_drops,
            }
        )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DocumentStats:
        """The figures as the log reads them."""
        return DocumentStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> DocumentMetrics:
        """The figures as ``/metrics`` shows them."""
        return DocumentMetrics(*arguments)

    def _document_of(self, request: Any) -> Document | None:
        """The document that a request names, if any; ``InputError`` if it does not fit."""
        if request.request_id in self._found:
            return self._found[request.request_id]
        name = (request.kv_transfer_params or {}).get(FIELD)
        salt = request.cache_salt or ""
        if name is None:
            # also for requests that did not come by HTTP: with a document's salt, vLLM would give
            # this prompt pages whose keys attended to the document
            if salt.startswith(SALT):
                raise InputError(f"cache_salt begins with {SALT!r} and no document is named")
            return None
        # the document's keys and values are those of the model without the adapter
        if request.lora_request is not None:
            raise InputError(NO_ADAPTERS)
        document = self.documents.find(name)
        if not salt.startswith(SALT + document.digest):
            raise InputError(
                f"the prompt was not made for the document {name!r} as it is now: its salt differs"
            )
        document.check_length(len(request.prompt_token_ids or ()) + request.max_tokens)
        self._found[request.request_id] = document
        return document

    # In a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:  # noqa: ARG002
        """Check that every layer attends to documents, and free the memory reserved for them."""
        layers = self.config.compilation_config.static_forward_context
        for name in WORKER.group_of_layer:
            check_layer(name, layers[name].impl)
            self.impls[layer_number(name)] = layers[name].impl
        WORKER.reserve = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Follow the orders of the step, before its layers run."""
        super().bind_connector_metadata(connector_metadata)
        WORKER.digests = connector_metadata.digests
        self._failing |= connector_metadata.failed
        for digest in connector_metadata.orders.drop:
            WORKER.layers.pop(digest, None)
        for document in connector_metadata.orders.load:
            self._load(document)
            return_freed_memory()

    def clear_connector_metadata(self) -> None:
        """The step has ended: no rows have documents."""
        super().clear_connector_metadata()
        WORKER.digests = ()

    def build_connector_worker_meta(self) -> _Loaded | None:
        """What became of the orders."""
        loaded = self._loaded
        self._loaded = _Loaded()
        return loaded if loaded.num_bytes or loaded.failed else None

    def get_transfer_results(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> base.KVConnectorTransferResults:
        """The requests that fail."""
        failing = self._failing
        self._failing = set()
        return base.KVConnectorTransferResults(
            finished_recving=set(failing), failed_recving=set(failing)
        )

    def _load(self, document: Document) -> None:
        """Load a document; an error is one of its requests."""
        from vllm.distributed import get_tensor_model_parallel_rank

        share = Share(get_tensor_model_parallel_rank(), self.num_workers)
        device = torch.device(self.config.device_config.device)
        try:
            layers = place(
                self.documents.load(document),
                self.rotation,
                share=share,
                dtype=self.dtype,
                device=device,
            )
        except InputError as error:
            self._loaded.failed[document.digest] = str(error)
            return
        held: list[Any] = []
        for number, layer in enumerate(layers):
            prepare = getattr(self.impls[number], "prepare", None)
            held.append(layer if prepare is None else prepare(layer))
        WORKER.layers[document.digest] = held
        self._loaded.num_bytes[document.digest] = sum(layer.nbytes for layer in held)

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: no pages are loaded or saved."""

    start_load_kv = wait_for_layer_load = _nothing  # type: ignore[assignment]
    save_kv_layer = wait_for_save = _nothing  # type: ignore[assignment]


@functools.cache
def layer_number(name: str) -> int:
    """The number of a layer in its model."""
    return extract_layer_index(name)


def documents_of(vllm_config: Any) -> Documents:
    """The documents that a configuration names.

    Raises:
        InputError: none are named, or a store of another model.
    """
    address = _extra_config(vllm_config, "documents", None)
    if not isinstance(address, str):
        raise InputError(
            "kv_connector_extra_config must name the folder or the store of the documents: "
            '{"documents": FOLDER}'
        )
    model = vllm_config.model_config
    return open_documents(address, model.hf_text_config, CheckpointFingerprints(model.model))


def memory_bytes(vllm_config: Any) -> int:
    """Bytes of documents in the memory of one worker.

    Raises:
        InputError: not a number of at least 0.
    """
    megabytes = _extra_config(vllm_config, "cache_mb", DEFAULT_CACHE_MB)
    if type(megabytes) not in (int, float) or not 0 <= megabytes < math.inf:
        raise InputError(f"cache_mb must be a number of at least 0, not {megabytes!r}")
    return int(megabytes * 1e6)


def document_bytes(document: Document, vllm_config: Any) -> int:
    """Bytes of a document in the memory of the worker with the most of it."""
    head_dim = vllm_config.model_config.get_head_size()
    if vllm_config.device_config.device_type != "cpu":  # FlashAttention's keys hold the bias
        head_dim += EXTRA_CHANNELS
    return num_bytes(
        document.counts,
        head_dim,
        vllm_config.model_config.dtype,
        biased=document.has_log_bias,
        size=vllm_config.parallel_config.tensor_parallel_size,
    )


def reserved_bytes(vllm_config: Any) -> int:
    """Bytes that vLLM must leave for documents when it measures its memory."""
    transfer = None if vllm_config is None else vllm_config.kv_transfer_config
    is_ours = transfer is not None and transfer.kv_connector == CONNECTOR
    return memory_bytes(vllm_config) if is_ours else 0


def check_options(vllm_config: Any) -> None:
    """Raise an ``InputError`` for options of vLLM with which answers would be wrong."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    problems = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": max(
            getattr(parallel, "decode_context_parallel_size", 1),
            getattr(parallel, "prefill_context_parallel_size", 1),
        )
        > 1,
        "latent attention (MLA)": model.use_mla,
        "an encoder": model.is_encoder_decoder,
        "positions of several axes (M-RoPE)": model.uses_mrope,
        # a request whose document cannot be loaded would be computed without it, or for ever
        "kv_load_failure_policy recompute": (
            vllm_config.kv_transfer_config.kv_load_failure_policy != "fail"
        ),
    }
    for name, is_there in problems.items():
        if is_there:
            raise InputError(f"documents are not served with {name}")


def check_layer(name: str, impl: Any) -> None:
    """Raise an ``InputError`` for a layer whose attention to documents would be wrong."""
    if not type(impl).__module__.startswith("kvcat.serving.vllm."):
        raise InputError(
            f"layer {name}: the attention of {type(impl).__name__} does not read documents; on a "
            "GPU, serve with --attention-backend FLASH_ATTN"
        )
    problems = {
        "soft-capped scores": bool(getattr(impl, "logits_soft_cap", 0)),
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "keys and values of another layer": getattr(impl, "kv_sharing_target_layer_name", None)
        is not None,
        f"pages in {impl.kv_cache_dtype}": impl.kv_cache_dtype not in impl.page_dtypes,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise InputError(f"layer {name}: documents are not served with {problem}")


def _extra_config(vllm_config: Any, name: str, default: Any) -> Any:
    """An entry of ``kv_connector_extra_config``."""
    transfer = vllm_config.kv_transfer_config
    return transfer.get_from_extra_config(name, default) if transfer else default
