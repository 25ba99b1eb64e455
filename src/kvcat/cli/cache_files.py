"""The commands ``kvcat info``, ``pack`` and ``widen``: cache files, and checkpoints for them."""

import json as json_module
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvcat import option_types as opt
from kvcat.cli import early
from kvcat.cli.options import check_output
from kvcat.errors import InputError
from kvcat.files import check_new_folder, expanded
from kvcat.options import SEAM_TOKENS

if TYPE_CHECKING:
    from kvcat.cache import CompactCache

_MOST_CHARACTERS = 200  # of a value that ``kvcat info`` shows


def check_caches(
    cache: opt.Files,
    *,
    seam_tokens: int = SEAM_TOKENS,
    store: str | None = None,
    id: str | None = None,
) -> list[Path]:
    """The files of ``--cache``, which exist; none if a document of a store is named instead."""
    files = opt.flat(cache)
    if files and store is not None:
        raise InputError("give either --cache FILE, or --store STORE and --id ID")
    if (store is None) != (id is None):
        raise InputError("--store and --id belong together")
    if not files and store is None:
        raise InputError("no cache: give --cache FILE, or --store STORE and --id ID")
    for file in files:
        early.check_file(file, "cache file")
    if seam_tokens != SEAM_TOKENS and len(files) < 2:
        raise InputError("--seam-tokens is for several cache files: one has no seam")
    return files


def model_and_cache(
    model: str,
    files: Sequence[Path],
    *,
    device: str,
    dtype: str | None = None,
    tokenizer: bool = True,
    seam_tokens: int = SEAM_TOKENS,
    store: str | None = None,
    id: str | None = None,
) -> tuple[Any, Any, "CompactCache"]:
    """The model, the tokenizer and the cache, on one device; several caches are composed.

    The cache is that of a document in a store if one is named, and that in the files otherwise.

    Raises:
        InputError: a cache belongs to another model.
    """
    import kvcat

    if store is not None and id is not None:
        caches = [kvcat.Store(store)[id]]
    else:
        caches = [kvcat.CompactCache.load(file) for file in files]
    compact = caches[0]
    cache_dtype = str(compact.dtype).removeprefix("torch.")
    loaded, loaded_tokenizer = kvcat.load(
        model, dtype=dtype or cache_dtype, device=device, tokenizer=tokenizer
    )
    for each, name in zip(caches, files or [id], strict=True):
        each.check_model(loaded, str(name))
    caches = [each.to(loaded.device) for each in caches]
    if len(caches) == 1:
        return loaded, loaded_tokenizer, caches[0]
    return loaded, loaded_tokenizer, kvcat.compose(loaded, caches, seam_tokens=seam_tokens)


def limit_note(num_tokens: int) -> str:
    """A line about an answer that its largest number of tokens ended."""
    return f"the answer ends at its limit of {num_tokens} tokens (--max-new-tokens)"


def pack(
    model: opt.Model,
    /,
    cache: opt.Files,
    output: opt.Output,
    head_dim: opt.Unset[int] = None,
    drop_log_bias: bool = False,
    seam_tokens: opt.SeamTokens = SEAM_TOKENS,
    overwrite: opt.Overwrite = False,
    device: opt.Device = "cpu",
) -> None:
    """Write a saved cache, or several as one, as plain tensors for llama.cpp and transformers.

    docs/serving.md shows how each engine reads the file. With --head-dim the file is for the
    widened checkpoint (`kvcat widen`), and keeps the log-bias and unequal numbers of slots per
    head. Without it the cache must have neither: compress with --method
    attention-matching,log_bias=false,budgets=equal, or by eviction.

    Example: kvcat pack ./my-model --cache report.safetensors -o report.prefix --head-dim 80

    Args:
        cache: Cache files that `kvcat compress` wrote, one or several.
        output: File to write.
        head_dim: Head dimension of the widened checkpoint that will read the file; by default the
            file is for the model itself.
        drop_log_bias: Leave out the log-bias; this changes the answers.
    """
    if not opt.flat(cache):
        raise InputError("no cache: give --cache FILE, one or several")
    files = check_caches(cache, seam_tokens=seam_tokens)
    check_output(output, overwrite=overwrite, sources=[*files, model])
    early.check_device(device)
    early.check_model(model)

    from kvcat.serving import export_prefix

    loaded, _, compact = model_and_cache(
        model, files, device=device, tokenizer=False, seam_tokens=seam_tokens
    )
    plain = export_prefix(compact, loaded, output, drop_log_bias=drop_log_bias, head_dim=head_dim)
    note = ""
    if plain.mean_slots > compact.mean_slots:  # filled up with slots that no query sees
        note = (
            f" (the heads have {compact.mean_slots:g} on average, and the engine as many in every "
            "head as the fullest needs)"
        )
    print(
        f"{output}: {plain.mean_slots:g} cells per head{note}; "
        f"the next token has position {plain.num_tokens}"
    )


def widen(
    model: opt.Model,
    /,
    output: opt.Output,
    head_dim: opt.Unset[int] = None,
    gguf_type: opt.Unset[Literal["float16", "float32", "q8_0"]] = None,
    dtype: opt.Unset[opt.Dtype] = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Write a checkpoint with which llama.cpp can answer from any compact cache.

    Its keys have extra channels for the log-bias. Its logits equal those of the model. It can use
    the model's caches after `kvcat pack --head-dim`.

    vLLM needs none: it reads compact caches as they are (docs/serving.md).

    Example: kvcat widen smollm2-135m -o wide.gguf

    Args:
        output: NAME.gguf, for llama.cpp; or a Hugging Face folder, for transformers without kvcat.
            An existing folder is not replaced.
        head_dim: Head dimension to write; by default the next multiple of 16.
        gguf_type: Data type of the matrices in a .gguf file; by default float16.
        dtype: Data type of the weights in a folder; for a .gguf file, the --dtype with which its
            caches are compressed. By default float32.
    """
    is_gguf = output.suffix.lower() == ".gguf"
    if gguf_type is not None and not is_gguf:
        raise InputError(f"--gguf-type is for a .gguf file, and {output} is a folder: give --dtype")
    if is_gguf:
        check_output(output, overwrite=overwrite, sources=[model])
    elif overwrite:
        raise InputError(f"--overwrite is for a .gguf file, and {output} is a folder")
    else:
        check_new_folder(output)
    early.check_model(model)

    import kvcat
    from kvcat.models import save
    from kvcat.serving import widen, write_gguf

    loaded, tokenizer = kvcat.load(model, dtype=dtype or "float32", tokenizer=not is_gguf)
    wide = widen(loaded, head_dim)
    if is_gguf:
        write_gguf(wide, output, dtype=gguf_type or "float16")
    else:
        save(wide, tokenizer, output)
    config = wide.config
    print(
        f"{output}: heads of {config.head_dim} channels, "
        f"{config.kvcat_head_dim} of them the model's"
    )


def _numbers(cache: "CompactCache") -> str:
    """How a cache holds its numbers: their type, or the bits of their codes."""
    if cache.bits is None:
        return str(cache.dtype)
    return f"keys and values in {cache.bits} bits, unpacked to {cache.dtype}"


def info(file: opt.Several[str], /, id: opt.Unset[str] = None, json: bool = False) -> None:
    """Describe cache files or a store without loading a model: slots, bytes saved, method, model.

    Example: kvcat info report.safetensors

    Args:
        file: Cache files that `kvcat compress` wrote, one or several, or a store of
            `kvcat corpus`.
        id: Id of a document in the store, to describe its cache alone.
        json: Print one JSON object for each cache or store: the same rows as texts by name.
    """
    if not file:
        raise InputError("no cache file: name one or several, or a store")
    first, *others = file
    is_store = "://" in first or expanded(first).is_dir()
    if is_store and others:
        raise InputError(f"{first} is a store: describe it alone")
    if id is not None and not is_store:
        raise InputError(f"--id needs a store, and {first} is none")
    if is_store:
        rows = _store_rows(first, id)
        _print_json(rows) if json else _print_rows(rows)
    else:
        _describe_files([Path(path) for path in file], json=json)


def _store_rows(address: str, id: str | None) -> dict[str, str]:
    """What a store holds, or one document's cache."""
    from kvcat.cli.corpus import store_facts
    from kvcat.corpus import Store

    store = Store(address)
    return store_facts(store) if id is None else _cache_facts(store[id])


def _describe_files(files: Sequence[Path], *, json: bool) -> None:
    """Print what every cache file holds, and of several what they hold together."""
    for path in files:
        early.check_file(path, "cache file")

    from kvcat.cache import CompactCache

    caches = [CompactCache.load(path) for path in files]
    if json:
        for path, cache in zip(files, caches, strict=True):
            _print_json({"file": str(path), **_cache_facts(cache)})
        return
    for path, cache in zip(files, caches, strict=True):
        if len(files) > 1:
            print(f"{path}:")
        _print_rows(_cache_facts(cache))
    if len(files) > 1:
        num_tokens = sum(cache.num_tokens for cache in caches)
        slots = sum(cache.mean_slots for cache in caches)
        print(
            f"together: {num_tokens} tokens in {slots:g} slots per layer and head, "
            f"{sum(cache.nbytes for cache in caches):,} bytes"
        )


def _print_json(rows: dict[str, str]) -> None:
    print(json_module.dumps(rows))


def _print_rows(rows: dict[str, str]) -> None:
    width = max(15, *map(len, rows))
    for name, text in rows.items():
        print(f"{name:<{width}} {text}")


def _shown(value: str) -> str:
    """A value on one line of a terminal, shortened."""
    short = value if len(value) <= _MOST_CHARACTERS else f"{value[:_MOST_CHARACTERS]}..."
    return short if short.isprintable() else repr(short)


def _span(numbers: Iterable[int]) -> str:
    """The smallest and the largest number, or the one number that all are."""
    different = sorted(set(numbers))
    if len(different) == 1:
        return f"{different[0]}"
    return f"{different[0]} to {different[-1]}"


def _counted(numbers: Iterable[int], noun: str) -> str:
    """The span of numbers with their noun, which has no plural if all of them are 1."""
    span = _span(numbers)
    return f"{span} {noun}" if span == "1" else f"{span} {noun}s"


def _channels(of_keys: Sequence[int], of_values: Sequence[int]) -> str:
    """The numbers of channels of keys and values, in words."""
    if list(of_keys) == list(of_values):
        return _counted(of_keys, "channel")
    return f"{_span(of_keys)} key and {_counted(of_values, 'value channel')}"


def _cache_facts(cache: "CompactCache") -> dict[str, str]:
    """What ``kvcat info`` shows about a cache, by name."""
    item_size = cache.dtype.itemsize if cache.bits is None else 2
    num_tokens = cache.num_tokens
    counts = [layer.counts for layer in cache.layers]  # slots per head, (batch, kv_heads) per layer
    dense_bytes = 0
    key_channels = []
    value_channels = []
    for layer in cache.layers:  # which may have different numbers of heads and channels
        first = layer.head(0, 0)
        key_channels.append(first.keys.shape[-1])
        value_channels.append(first.values.shape[-1])
        num_channels = first.keys.shape[-1] + first.values.shape[-1]
        dense_bytes += layer.counts.numel() * num_tokens * num_channels * item_size
    dense_bytes += sum(state.nbytes for state in cache.states.values())
    settings = cache.metadata
    method = settings.pop("method", "unknown")
    model = settings.pop("model", "unknown")
    # which other rows show
    for size in ("num_slots", "mean_slots", "bits"):
        settings.pop(size, None)
    return {
        "cache": f"{num_tokens} tokens in {cache.mean_slots:g} slots per layer and head "
        f"({100 * cache.mean_slots / num_tokens:.1f} % kept), at most {cache.max_slots}",
        "shape": f"{_counted([cache.batch_size], 'example')}, {_counted([len(counts)], 'layer')}, "
        f"{_counted((layer_counts.shape[1] for layer_counts in counts), 'KV head')} of "
        f"{_channels(key_channels, value_channels)}, {_numbers(cache)}, "
        f"{'with' if cache.has_log_bias else 'without'} log-bias",
        "bytes": f"{cache.nbytes:,}, {100 * cache.nbytes / dense_bytes:.1f} % of the "
        f"{dense_bytes:,} of the dense cache in {8 * item_size} bits",
        "method": method,
        "model": f"{model}, fingerprint {cache.fingerprint[:12]}",
        "settings": ", ".join(f"{key} {_shown(value)}" for key, value in sorted(settings.items())),
        "slots by layer": " ".join(
            f"{layer_counts.double().mean():.4g}" for layer_counts in counts
        ),
    }
