"""``kvcat info``: what a cache file holds and what it saves, without loading a model, or torch."""

from array import array
from json import loads
from pathlib import Path
from typing import Any

from kvcat.cachefile import FileHeader, TensorEntry, read_header
from kvcat.errors import InputError


def info(file: Path, /) -> None:
    """Describe a cache file without loading a model: slots, bytes saved, method, model.

    Example: kvcat info report.safetensors

    Args:
        file: Cache file that `kvcat compress` or `kvcat pack` wrote.
    """
    facts = describe(file)
    most, mean, layers = facts["num_slots"], facts["mean_slots"], facts["layer_slots"]
    told = {"method": "unknown", "model": "unknown", **facts["metadata"]}
    slots = f"{most}" if mean == most else f"{mean:.1f} on average, at most {most}"
    sizes = {name: _size(facts[name]) for name in ("file_bytes", "cache_bytes", "dense_bytes", "saved_bytes")}
    rows = {
        "file": f"{file}, {sizes['file_bytes']}, format {facts['format']}, whole (checksum compared)",
        "cache": f"{facts['num_tokens']} tokens in {slots} slots a layer and head ({facts['keep_ratio']:.1%} kept)",
        "shape": f"{facts['batch_size']} example{'s' * (facts['batch_size'] > 1)}, {len(layers)} layers, "
        f"{facts['num_kv_heads']} KV heads of {facts['head_dim']} channels, {facts['dtype']}, "
        f"{'with' if facts['log_bias'] else 'without'} log-bias",
        "bytes": f"{sizes['cache_bytes']}; the dense cache has {sizes['dense_bytes']}: {sizes['saved_bytes']} saved "
        f"({facts['saved_bytes'] / facts['dense_bytes']:.1%})",
        "method": told.pop("method"),
        "model": f"{told.pop('model')}, fingerprint {facts['fingerprint'][:12]}",
        "settings": ", ".join(f"{key} {value}" for key, value in sorted(told.items())) or "none told",
    }
    if len(set(layers)) > 1:
        rows["slots by layer"] = " ".join(f"{slots:.4g}" for slots in layers)
    print("\n".join(f"{name:<16}{text}" for name, text in rows.items()))


def describe(path: Path) -> dict[str, Any]:
    """What a compact cache or an exported prefix says of itself; sizes in bytes, slots per layer and KV head.

    ``num_slots`` are those of the fullest head, ``layer_slots`` the mean of each layer, ``mean_slots`` of all;
    ``dense_bytes`` is the dense cache of the same tokens, examples and dtype, ``saved_bytes`` the difference.

    Raises:
        InputError: missing, damaged, not ours, of a newer kvcat, or without the facts.
    """
    header = read_header(path)
    try:
        return _facts(path, header)
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise InputError(f"{path} is not whole: {type(error).__name__} {error}") from error


def _facts(path: Path, header: FileHeader) -> dict[str, Any]:
    tensors, num_tokens = header.tensors, int(header.entries["num_tokens"])
    most, means, dense = 0, [], 0
    for index in range(int(header.entries["num_layers"])):
        keys, values = (tensors[f"layers.{index}.{part}"] for part in ("keys", "values"))
        heads, total, fullest = _slots(path, keys, tensors.get(f"layers.{index}.counts"))
        most, means = max(most, fullest), [*means, total / heads]
        dense += (keys.nbytes + values.nbytes) * heads * num_tokens // total
    first, counts = tensors["layers.0.keys"], tensors.get("layers.0.counts")
    batch, kv_heads = (first if counts is None else counts).shape[:2]
    mean = sum(means) / len(means)
    kept = sum(t.nbytes for name, t in tensors.items() if name.endswith((".keys", ".values", ".log_bias")))
    return {
        "format": f"{header.kind}-{header.version}", "file_bytes": header.file_size, "cache_bytes": kept,
        "dense_bytes": dense, "saved_bytes": dense - kept, "num_tokens": num_tokens, "mean_slots": mean,
        "num_slots": most, "layer_slots": means, "keep_ratio": mean / num_tokens, "batch_size": batch,
        "num_kv_heads": kv_heads, "head_dim": first.shape[-1], "dtype": first.dtype,
        "log_bias": any(name.endswith(".log_bias") for name in tensors), "fingerprint": header.entries["fingerprint"],
        "metadata": dict(loads(header.entries["metadata"])),
    }  # fmt: skip


def _slots(path: Path, keys: TensorEntry, counts: TensorEntry | None) -> tuple[int, int, int]:
    """Heads of all examples, their slots in all, and the slots of the fullest."""
    if counts is None:
        batch, kv_heads, slots, _ = keys.shape
        return batch * kv_heads, batch * kv_heads * slots, slots
    with path.open("rb") as file:
        file.seek(counts.start)
        numbers = array("q" if counts.dtype == "I64" else "i", file.read(counts.nbytes))
    return len(numbers), sum(numbers), max(numbers)


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
