"""Where a result comes from: command, versions and hardware, with no name of a person or a home folder."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def provenance() -> dict[str, str]:
    """Command line, versions and hardware of this process, as text.

    Paths in the command outside the working folder are shortened to ``.../`` and their last part.
    """
    import torch

    facts = {
        "command": command_line(sys.argv),
        "kvcat": _version("kvcat"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def command_line(arguments: list[str]) -> str:
    """A command as a person would type it again, with paths outside the working folder shortened."""
    program = Path(arguments[0]).name if arguments else ""
    if program == "__main__.py":
        program = f"python -m {Path(arguments[0]).parent.name}"
    return " ".join([program, *(_shortened(word) for word in arguments[1:])]).strip()


def _shortened(word: str) -> str:
    head, equals, value = word.rpartition("=")
    path = Path(value)
    if path.is_absolute():
        inside = path.is_relative_to(Path.cwd())
        value = path.relative_to(Path.cwd()).as_posix() if inside else f".../{path.name}"
    elif value.startswith("~") or ".." in path.parts:
        value = f".../{path.name}"
    return f"{head}{equals}{value}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
