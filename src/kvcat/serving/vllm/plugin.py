"""What vLLM loads in each of its processes: the attention backends, the connector, the middleware.

Without the connector in vLLM's options nothing changes for a server.
"""

# pyright: reportMissingImports=false

import functools
import logging
from typing import Any

from kvcat.serving.vllm import CONNECTOR

VERSIONS = ("0.32.",)
"""Beginnings of the versions of vLLM whose names the package knows."""
_PACKAGE = "kvcat.serving.vllm"


def register() -> None:
    """Register everything; may be called several times.

    Other versions of vLLM run without kvcat.
    """
    from vllm.version import __version__

    if not __version__.removeprefix("v").startswith(VERSIONS):
        logging.getLogger("vllm.kvcat").warning(
            "kvcat serves documents in vLLM %s, not in %s: the connector %r is not registered",
            " and ".join(f"{version}x" for version in VERSIONS),
            __version__,
            CONNECTOR,
        )
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{_PACKAGE}.cpu.DocumentsBackend")
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{_PACKAGE}.cuda.DocumentsBackend")
    try:
        KVConnectorFactory.register_connector(
            CONNECTOR, f"{_PACKAGE}.connector", "DocumentConnector"
        )
    except ValueError:
        return  # it is registered
    _add_middleware()


def _add_middleware() -> None:
    """Give the API server the middleware, if its options name the connector.

    vLLM adds middleware that its own option names. Ours is inside of all others, so that it sees
    only requests with a valid key.
    """
    import vllm.entrypoints.launchers.app as launcher

    add_others = launcher.init_entrypoints_middleware

    @functools.wraps(add_others)
    def add_all(args: Any, app: Any, *arguments: Any) -> None:
        if _names_connector(getattr(args, "kv_transfer_config", None)):
            from kvcat.serving.vllm.requests import DocumentRequests

            app.add_middleware(DocumentRequests)
        add_others(args, app, *arguments)

    launcher.init_entrypoints_middleware = add_all


def _names_connector(transfer: Any) -> bool:
    """Whether the option --kv-transfer-config names the connector."""
    name = transfer.get("kv_connector") if isinstance(transfer, dict) else None
    return (name or getattr(transfer, "kv_connector", None)) == CONNECTOR
