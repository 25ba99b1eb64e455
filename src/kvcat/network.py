"""Whether the Hugging Face Hub can be reached, found out within seconds."""

import os
import socket
import threading
from urllib.parse import urlparse

PATIENCE = 4.0  # seconds until the Hub counts as unreachable


def hub_obstacle(patience: float = PATIENCE) -> str | None:
    """Why nothing can come from the Hub, as the end of a sentence; None where a connection opens.

    The clients of the Hub retry for minutes without a network.

    Args:
        patience: seconds to wait for the connection.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    host = urlparse(constants.ENDPOINT).hostname or "huggingface.co"
    return None if _reachable(host, patience) else f"{host} cannot be reached"


def _reachable(host: str, patience: float) -> bool:
    """Whether a connection opens in time; name resolution has no timeout of its own, hence the thread."""
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or os.environ.get("ALL_PROXY")
    target = urlparse(proxy if proxy and "//" in proxy else f"https://{proxy or host}")
    address = (target.hostname or host, target.port or 443)
    opened: list[bool] = []

    def attempt() -> None:
        try:
            with socket.create_connection(address, timeout=patience):
                opened.append(True)
        except OSError:
            pass

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(patience)
    return bool(opened)
