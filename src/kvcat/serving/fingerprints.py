"""The fingerprint of a checkpoint that an engine serves, which the documents must have.

A fingerprint depends on the weights as transformers loads them, in a dtype. An engine holds them in
another form, so that the checkpoint is read once more, in a process of its own: an engine may have
changed the model's class in this one. The result is remembered in a file of the user's cache until
a file of the checkpoint changes.

    python -m kvcat.serving.fingerprints FOLDER DTYPE
"""

import hashlib
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from kvcat.cache import fingerprint
from kvcat.cache.fingerprint import FORM, SCHEME
from kvcat.errors import InputError, run_script
from kvcat.files import write_text
from kvcat.hub import local_folder, models_home
from kvcat.models import load


class CheckpointFingerprints:
    """Fingerprints of one checkpoint, by the dtype of its weights.

    Args:
        name: folder or Hub name.

    Raises:
        InputError: no such checkpoint.
    """

    def __init__(self, name: str) -> None:
        self.folder = local_folder(name)
        self._of_dtype = lru_cache(maxsize=None)(self._find)

    def __call__(self, dtype: str) -> str:
        """The fingerprint with weights of a dtype.

        Raises:
            InputError: a model that kvcat does not support.
        """
        return self._of_dtype(dtype)

    def _find(self, dtype: str) -> str:
        remembered = models_home().parent / "fingerprints" / self._key(dtype)
        try:
            known = remembered.read_text()
        except OSError:
            known = ""
        if not re.fullmatch(FORM, known):
            known = _in_another_process(self.folder, dtype)
            try:
                remembered.parent.mkdir(parents=True, exist_ok=True)
                write_text(remembered, known)
            except (OSError, InputError):
                pass  # the next process reads the checkpoint again
        return known

    def _key(self, dtype: str) -> str:
        """A name for the checkpoint as it is now."""
        facts = [SCHEME, dtype, str(self.folder.resolve())]
        files = sorted(self.folder.iterdir()) if self.folder.is_dir() else [self.folder]
        for file in files:
            status = file.stat()
            facts.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _in_another_process(folder: Path, dtype: str) -> str:
    """The fingerprint of a checkpoint.

    Raises:
        InputError: a model that kvcat does not support.
    """
    command = [sys.executable, "-m", "kvcat.serving.fingerprints", str(folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.split() or [""]
    if not re.fullmatch(FORM, lines[-1]):
        reasons = done.stderr.strip().splitlines() or ["no reason was given"]
        raise InputError(f"the fingerprint of {folder} cannot be computed: {reasons[-1]}")
    return lines[-1]


def _main() -> None:
    """Print the fingerprint of the checkpoint that the command line names."""
    folder, dtype = sys.argv[1:]
    model, _ = load(folder, dtype=dtype, tokenizer=False)
    print(fingerprint(model))


if __name__ == "__main__":
    run_script(_main)
