"""The command, versions and hardware behind a result, without names of people or home folders."""

import os
import platform
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from kvcat import __version__

_PATH = re.compile(r"""(?:^|(?<=[=,"'[:]))(?:/|~|\.\./)[^=,"'\]]*""")


def provenance() -> dict[str, str]:
    """The command line, versions and hardware of this process, as text.

    In the command, paths outside the working folder are shortened to ``.../`` and their last part.
    """
    facts = {
        "command": command_line(sys.argv),
        "kvcat": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": f"{_processor()}, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    """The name of the processor."""
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        text = cpu_info.read_text(encoding="utf-8")
        model_name = re.search(r"^model name\s*: (.*)$", text, re.M)
        if model_name is not None:
            return model_name[1]
    return platform.processor() or "unknown"


def command_line(arguments: list[str]) -> str:
    """The command as a user would type it, with paths outside the working folder shortened."""
    program = Path(arguments[0]).name if arguments else ""
    if program == "__main__.py":
        program = f"python -m {Path(arguments[0]).parent.name}"
    # paths are also found after "=", ",", ":", a quote or a bracket
    words = [shlex.quote(_PATH.sub(_short_path, word)) for word in arguments[1:]]
    return " ".join([program, *words]).strip()


def _short_path(match: re.Match[str]) -> str:
    """The path relative to the working folder, or ``.../`` and its last part."""
    path = Path(match[0])
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return path.relative_to(Path.cwd()).as_posix()
    return f".../{path.name}"
