"""Where a result comes from: command, versions and hardware, with no name of a person or a home folder."""

import os
import platform
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from kvcat import __version__


def provenance() -> dict[str, str]:
    """Command line, versions and hardware of this process, as text.

    Paths in the command outside the working folder are shortened to ``.../`` and their last part.
    """
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(encoding="utf-8"), re.M) if info.exists() else []
    facts = {
        "command": command_line(sys.argv),
        "kvcat": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": f"{names[0] if names else platform.processor() or 'unknown'}, {os.cpu_count()} cores",
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
    """A word whose paths, also behind "=", ",", ":", a quote or a bracket, are shortened; quoted for a shell."""
    return shlex.quote(re.sub(r"""(?:^|(?<=[=,"'[:]))(?:/|~|\.\./)[^=,"'\]]*""", _short_path, word))


def _short_path(found: re.Match[str]) -> str:
    path = Path(found[0])
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return path.relative_to(Path.cwd()).as_posix()
    return f".../{path.name}"
