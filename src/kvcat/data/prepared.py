"""A folder of tokens that many processes map into memory: its format, and how it is opened.

``tokens.json`` describes the folder, ``train.bin`` and ``validation.bin`` hold token ids in little-endian, each
document followed by EOS, without gaps, so that sequences of any length can be cut from them.
"""

import json
import mmap
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvcat.data.encoding import Encoder
from kvcat.data.packing import TokenTable
from kvcat.errors import InputError

INDEX = "tokens.json"
FORMAT, VERSION = "kvcat tokens", 1
SPLITS = ("train", "validation")
BLOCK_BYTES = 1 << 23


def is_prepared(path: str | Path) -> bool:
    """Whether a folder was made by ``prepare``."""
    return (Path(path).expanduser() / INDEX).is_file()


def open_prepared(
    folder: str | Path, tokenizer: PreTrainedTokenizerBase, seq_len: int, *, check: bool = True
) -> dict[str, TokenTable]:
    """The tables ``train`` and ``validation`` of a prepared folder, mapped read-only.

    Args:
        folder: what ``prepare`` wrote.
        tokenizer: must be the one that the tokens were made with.
        seq_len: tokens a sequence; what remains at the end is left out.
        check: compare the checksums too, which reads the files once; sizes are always compared.

    Raises:
        InputError: not such a folder, a newer format, another tokenizer, a truncated or damaged file, fewer tokens
            than one sequence.
    """
    folder = Path(folder).expanduser()
    index = read_index(folder)
    encoder = Encoder.of(tokenizer)
    if index["tokenizer"] != encoder.fingerprint:
        raise InputError(
            f"{folder} holds tokens of tokenizer {index['tokenizer_name']!r} ({index['tokenizer']}), not of "
            f"{encoder.name!r} ({encoder.fingerprint})"
        )
    return {split: _open_table(folder, split, index, seq_len, check) for split in SPLITS}


def read_index(folder: Path) -> dict[str, Any]:
    """What ``tokens.json`` says.

    Raises:
        InputError: missing, not readable, or of a newer format.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is no folder of prepared tokens: {path.name}: {error}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InputError(f"{path} does not describe prepared tokens")
    if index["version"] > VERSION:
        raise InputError(f"{folder} has format {index['version']}, newer than {VERSION}, the newest this kvcat reads")
    return index


def file_checksum(path: Path) -> int:
    """CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _open_table(folder: Path, split: str, index: dict[str, Any], seq_len: int, check: bool) -> TokenTable:
    path, told = folder / f"{split}.bin", index["splits"][split]
    dtype = np.dtype(index["dtype"])
    expected = told["tokens"] * dtype.itemsize
    if not path.is_file():
        raise InputError(f"{folder} is incomplete: {path.name} is missing")
    if (size := path.stat().st_size) != expected:
        raise InputError(f"{path} is damaged: it has {size} bytes, not {expected}")
    if check and (found := file_checksum(path)) != told["crc32"]:
        raise InputError(f"{path} is damaged: its checksum is {found:08x}, not {told['crc32']:08x}")
    count = told["tokens"] // seq_len
    if not count:
        raise InputError(f"{path} has {told['tokens']} tokens, fewer than one sequence of {seq_len}")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sequences = np.frombuffer(mapped, dtype, count * seq_len).reshape(count, seq_len)
    return TokenTable(sequences, told["documents"], mapped)
