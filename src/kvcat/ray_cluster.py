"""A connection to a Ray cluster, and errors of its workers as one line."""

import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcat.errors import InputError, one_line
from kvcat.extras import install_command
from kvcat.files import full_path

try:
    import ray  # pyright: ignore[reportMissingImports]
    import ray.data  # pyright: ignore[reportMissingImports]
    import ray.exceptions  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise InputError(f"--ray needs Ray: {install_command('ray')} ({error})") from None

_SECONDS_TO_CONNECT = 10.0
_MISTAKE = re.compile(r"^kvcat\.errors\.InputError: (.+)$", re.MULTILINE)


def connect(address: str) -> None:
    """Connect to a cluster, unless this process is connected.

    Args:
        address: HOST:PORT of the cluster, or "auto" for the running one.

    Raises:
        InputError: there is no cluster at the address.
    """
    _quieten_console()
    if ray.is_initialized():
        return
    _check_listener(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
    # of this process alone; errors of the cluster arrive as exceptions
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        reason = " ".join(str(error).split())[:150]
        hint = "" if address == "auto" else "; a cluster with tokens needs RAY_AUTH_MODE=token"
        raise InputError(f"no Ray cluster at {address}: {reason}{hint}") from None


def _quieten_console() -> None:
    """Let Ray print errors alone; its log files stay complete."""
    logging.getLogger("ray").setLevel(logging.ERROR)  # it has no file
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.ERROR)


def _check_listener(address: str) -> None:
    """Raise an ``InputError`` if nothing listens at HOST:PORT: Ray would try for minutes."""
    host, separator, port = address.rpartition("://")[2].rpartition(":")
    if not separator:
        return
    try:
        with socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT):
            pass
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(f"no Ray cluster at {address}: {one_line(error)}") from None


def device_resources(device: str) -> dict[str, int]:
    """What a worker with one model needs of the cluster: an accelerator, or a processor."""
    return {"num_cpus": 1} if device == "cpu" else {"num_gpus": 1}


def num_devices(device: str) -> int:
    """The number of processors or accelerators of the cluster.

    Raises:
        InputError: there is none.
    """
    name = "CPU" if device == "cpu" else "GPU"
    count = int(ray.cluster_resources().get(name, 0))
    if count == 0:
        raise InputError(f"the Ray cluster has no {name} for device {device}")
    return count


def absolute(address: str | Path) -> str:
    """An address that means the same in another process."""
    text = str(address)
    return text if "://" in text else str(full_path(text))


@contextmanager
def worker_errors() -> Iterator[None]:
    """A block in which a user's mistake in a worker, or a lost cluster, becomes one line.

    A bug in a worker still shows its traceback.
    """
    try:
        yield
    except ray.exceptions.RayError as error:
        # the exceptions of Ray hold the worker's traceback as text
        mistakes = _MISTAKE.findall(str(error))
        if mistakes:
            raise InputError(mistakes[-1]) from None
        if isinstance(error, ray.exceptions.RayTaskError | ray.exceptions.ActorDiedError):
            raise
        raise InputError(f"the Ray cluster failed: {one_line(error)}") from None
