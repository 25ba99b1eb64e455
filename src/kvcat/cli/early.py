"""Checks of arguments that run before the slow imports of torch and transformers."""

import re
from pathlib import Path

from kvcat.cli.names import method_names
from kvcat.errors import InputError, unknown_name
from kvcat.files import expanded
from kvcat.options import parse_spec
from kvcat.settings import Sampling

_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia")


def check_model(name: str) -> None:
    """Reject a model that is not a folder, a file or a Hub name.

    Weights are not downloaded.
    """
    from kvcat.hub import local_folder

    local_folder(name, weights=False)


def check_tokenizer(name: str) -> None:
    """Reject a model as ``check_model`` does, but accept any folder, which may hold a tokenizer."""
    if not expanded(name).is_dir():
        check_model(name)


def check_device(device: str) -> None:
    """Reject a text that is not a torch device; whether the device exists is checked later."""
    kind = device.partition(":")[0]
    if kind not in _DEVICES or not re.fullmatch(r"[a-z]+(:\d+)?", device):
        raise InputError(
            f"device is {device!r}; it must be one of {', '.join(_DEVICES)}, or such as cuda:1"
        )


def check_method(spec: str) -> None:
    """Reject a method that does not exist, or a text other than NAME,option=value,...

    The options are checked later.
    """
    name, _ = parse_spec(spec)
    if name.startswith("kvpress:"):
        return
    names = method_names()
    if name not in names:
        raise unknown_name("compressor", name, [*names, "kvpress:PRESS"])


def check_file(file: Path, what: str) -> None:
    """Reject a file to read that does not exist."""
    if not file.is_file():
        raise InputError(f"no {what} {file}")


def check_sampling(sampling: Sampling) -> None:
    """Reject ``--top-p`` without a temperature, where a server ignores it."""
    if sampling.temperature == 0 and sampling.top_p != 1:
        raise InputError("--top-p needs a --temperature above 0: without one, nothing is sampled")
