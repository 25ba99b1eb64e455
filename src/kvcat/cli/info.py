"""``kvcat info``: what a cache file holds and what it saves, without loading a model, or torch."""

from array import array
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path

from kvcat.cachefile import FileHeader, TensorEntry, read_header
from kvcat.errors import InputError


def info(file: Path, /, json: bool = False, fast: bool = False) -> None:
    """Describe a cache file without loading a model: slots, bytes saved, method, model.

    Example: kvcat info report.safetensors

    Args:
        file: Cache file that `kvcat compress` or `kvcat pack` wrote.
        json: Print one JSON object.
        fast: Do not compare the file with its checksum.
    """
    facts = describe(file, verify=not fast)
    print(dumps(asdict(facts)) if json else "\n".join(_lines(facts)))


@dataclass(frozen=True)
class CacheFacts:
    """What a cache file says of itself: sizes in bytes, slots per layer and KV head.

    ``num_slots`` are those of the fullest head, ``layer_slots`` the mean of each layer, ``mean_slots`` of all;
    ``dense_bytes`` is the dense cache of the same tokens, examples and dtype, ``saved_bytes`` the difference.
    """

    file: str
    format: str
    verified: bool
    file_bytes: int
    cache_bytes: int
    dense_bytes: int
    saved_bytes: int
    num_tokens: int
    num_slots: int
    mean_slots: float
    keep_ratio: float
    layer_slots: list[float]
    num_layers: int
    batch_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    log_bias: bool
    fingerprint: str
    metadata: dict[str, str]


def describe(path: Path, *, verify: bool = True) -> CacheFacts:
    """What a compact cache or an exported prefix says of itself.

    Args:
        path: file to read.
        verify: whether the whole file is compared with its checksum.

    Raises:
        InputError: missing, damaged, not ours, of a newer kvcat, or without the facts.
    """
    header = read_header(path, verify=verify)
    try:
        return _facts(path, header, verify)
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise InputError(f"{path} is not whole: {type(error).__name__} {error}") from error


def _facts(path: Path, header: FileHeader, verify: bool) -> CacheFacts:
    tensors, num_tokens = header.tensors, int(header.entries["num_tokens"])
    slots, layer_slots, dense = 0, [], 0
    for index in range(int(header.entries["num_layers"])):
        keys, values = (tensors[f"layers.{index}.{part}"] for part in ("keys", "values"))
        heads, total, fullest = _slots(path, keys, tensors.get(f"layers.{index}.counts"))
        slots = max(slots, fullest)
        layer_slots.append(total / heads)
        dense += (keys.nbytes + values.nbytes) * heads * num_tokens // total
    first, counts = tensors["layers.0.keys"], tensors.get("layers.0.counts")
    batch, kv_heads = (first if counts is None else counts).shape[:2]
    mean = sum(layer_slots) / len(layer_slots)
    kept = sum(t.nbytes for name, t in tensors.items() if name.endswith((".keys", ".values", ".log_bias")))
    return CacheFacts(
        file=str(path), format=f"{header.kind}-{header.version}", verified=verify, file_bytes=header.file_size,
        cache_bytes=kept, dense_bytes=dense, saved_bytes=dense - kept, num_tokens=num_tokens, num_slots=slots,
        mean_slots=mean, keep_ratio=mean / num_tokens, layer_slots=layer_slots, num_layers=len(layer_slots),
        batch_size=batch, num_kv_heads=kv_heads, head_dim=first.shape[-1], dtype=first.dtype,
        log_bias=any(name.endswith(".log_bias") for name in tensors), fingerprint=header.entries["fingerprint"],
        metadata=dict(loads(header.entries["metadata"])),
    )  # fmt: skip


def _slots(path: Path, keys: TensorEntry, counts: TensorEntry | None) -> tuple[int, int, int]:
    """Heads of all examples, their slots in all, and the slots of the fullest."""
    if counts is None:
        batch, kv_heads, slots, _ = keys.shape
        return batch * kv_heads, batch * kv_heads * slots, slots
    with path.open("rb") as file:
        file.seek(counts.start)
        numbers = array("q" if counts.dtype == "I64" else "i", file.read(counts.nbytes))
    return len(numbers), sum(numbers), max(numbers)


def _lines(facts: CacheFacts) -> list[str]:
    even = facts.mean_slots == facts.num_slots
    told = {"method": "unknown", "model": "unknown", **facts.metadata}
    slots = f"{facts.num_slots}" if even else f"{facts.mean_slots:.1f} on average, at most {facts.num_slots}"
    rows = {
        "file": f"{facts.file}, {_size(facts.file_bytes)}, format {facts.format}, "
        + ("whole (checksum compared)" if facts.verified else "checksum not compared"),
        "cache": f"{facts.num_tokens} tokens in {slots} slots a layer and head ({facts.keep_ratio:.1%} kept)",
        "shape": f"{facts.batch_size} example{'s' * (facts.batch_size > 1)}, {facts.num_layers} layers, "
        f"{facts.num_kv_heads} KV heads of {facts.head_dim} channels, {facts.dtype}, "
        f"{'with' if facts.log_bias else 'without'} log-bias",
        "bytes": f"{_size(facts.cache_bytes)}; the dense cache has {_size(facts.dense_bytes)}: "
        f"{_size(facts.saved_bytes)} saved ({facts.saved_bytes / facts.dense_bytes:.1%})",
        "method": told.pop("method"),
        "model": f"{told.pop('model')}, fingerprint {facts.fingerprint[:12]}",
        "settings": ", ".join(f"{key} {value}" for key, value in sorted(told.items())) or "none told",
    }
    if len(set(facts.layer_slots)) > 1:
        rows["slots by layer"] = " ".join(f"{slots:.4g}" for slots in facts.layer_slots)
    return [f"{name:<16}{text}" for name, text in rows.items()]


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
