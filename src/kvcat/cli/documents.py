"""``kvcat compress``, ``generate``, ``pack``, ``widen`` and ``info``: what is done with a document's cache."""

import dataclasses
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvcat.cli import early
from kvcat.cli import options as opt
from kvcat.errors import InputError
from kvcat.files import check_new_folder, read_text
from kvcat.options import parse_spec
from kvcat.tokenization import check_text

if TYPE_CHECKING:
    from kvcat.cache import CompactCache


def compress(
    model: opt.Model,
    /,
    text: Path,
    output: opt.Output,
    method: str = "attention-matching",
    keep: opt.Fraction | None = None,
    slots: opt.Count | None = None,
    max_kl: opt.Nats | None = None,
    supervision: opt.Supervision = "reconstruction",
    chat: bool = False,
    allow_special: opt.AllowSpecial = False,
    room: opt.Count | None = None,
    overwrite: opt.Overwrite = False,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    dtype: opt.Dtype = "float32",
) -> None:
    """Compress a document's KV cache once; `kvcat generate` then answers from it again and again.

    Example: kvcat compress ./my-model --text report.txt --keep 0.1 -o report.safetensors

    For an engine that wants equally many slots in every head: --method attention-matching,budgets=equal.
    For one document with many questions: --method gradient,init=attention-matching,num_steps=50.

    Args:
        text: UTF-8 text file: the document.
        output: Cache file to write (.safetensors).
        method: NAME or NAME,option=value,...; docs/compress.md lists them.
        keep: Fraction of the KV slots to KEEP, in (0, 1]; 0.1 if no budget is given.
        slots: In place of --keep: slots per layer and head.
        max_kl: In place of --keep: the largest KL on held-out positions, in nats per token; finds the smallest cache.
        chat: Put the document into the tokenizer's chat template, as a user's turn; answers then follow it.
        room: Tokens of prompt and answer that will follow. Only for models whose rotary factors depend on the length.
    """
    keep = 0.1 if keep is slots is max_kl is None else keep
    if sum(budget is not None for budget in (keep, slots, max_kl)) > 1:
        raise InputError("give one of --keep, --slots and --max-kl")
    document = _read_text(text)
    opt.check_output(output, overwrite=overwrite)
    early.check_method(method)
    name, options = parse_spec(method)
    learns = "--max-kl" if max_kl is not None else name
    if supervision == "self" and learns in ("gradient", "--max-kl"):
        raise InputError(f"{learns} needs --supervision reconstruction: the document alone leaves nothing to predict")
    early.check_device(device)
    early.check_model(model)

    import kvcat
    from kvcat.compress import document_trace, seeded_compressor, smallest_cache
    from kvcat.evals import progress_bar

    compressor = seeded_compressor(name, options, seed)
    loaded, tokenizer = kvcat.load(model, dtype=dtype, device=device)
    trace = document_trace(
        loaded,
        tokenizer,
        document,
        supervision=supervision,
        chat=chat,
        allow_special=allow_special,
        room=room,
    )
    command = repr((model, document, method, keep, slots, seed, chat, allow_special, room, dtype))
    digest = hashlib.sha256(command.encode()).hexdigest()
    state = output.with_name(f".{output.name}.{digest[:8]}.state")  # the same command continues from it after a kill
    made: dict[str, str] = {}
    if max_kl is not None:

        def tell(slots: int, kl: float) -> None:
            print(f"{slots} slots: KL {kl:.5f} nats per token held out", file=sys.stderr, flush=True)

        found = smallest_cache(trace, compressor, max_kl, on_try=tell)
        cache = found.cache
        made = {"max_kl": f"{max_kl:g}", "held_out_kl": f"{found.kl:.6g}"}
    elif isinstance(compressor, kvcat.GradientCompression) and compressor.num_steps:
        with progress_bar(compressor.num_steps, "step") as bar:

            def show(_: int, kl: float) -> None:
                bar.set_postfix_str(f"KL {kl:.5f}", refresh=False)
                bar.update()

            cache = compressor(trace, keep_ratio=keep, num_slots=slots, resume=state, on_step=show)
    else:
        cache = compressor(trace, keep_ratio=keep, num_slots=slots)
    dataclasses.replace(cache, metadata={**cache.metadata, **made}).save(output)
    state.unlink(missing_ok=True)
    kept = cache.mean_slots
    print(
        f"{output}: {cache.num_tokens} tokens in {kept:g} slots a layer and head, {cache.nbytes / 1e6:.2f} MB "
        f"({method}, keep {kept / cache.num_tokens:.4g}, supervision {supervision})"
    )


def _read_text(path: Path) -> str:
    document = read_text(path)
    if not document.strip():
        raise InputError(f"text file {path} is empty")
    return document


def generate(
    model: opt.Model,
    /,
    cache: Path,
    prompt: opt.Strings = (),
    max_new_tokens: opt.Count = 64,
    temperature: float = 0.0,
    allow_special: opt.AllowSpecial = False,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    dtype: opt.Dtype | None = None,
) -> None:
    """Answer prompts from a saved cache; every prompt starts from the document alone.

    A cache made with --chat puts each prompt into the tokenizer's chat template. Of the model's own generation settings
    only the end-of-text tokens count; a line on the standard error names the others.

    Example: kvcat generate ./my-model --cache report.safetensors --prompt "What was decided?"

    Args:
        cache: Cache file that `kvcat compress` wrote.
        prompt: What follows the document; several may be given.
        max_new_tokens: Longest answer, in tokens.
        temperature: 0 decodes greedily; from 0.001 to 1000 it samples.
        dtype: Type of the weights; by default the one that the cache was made with.
    """
    prompts = opt.flat(prompt)
    if not prompts:
        raise InputError("no prompt: give --prompt TEXT, once or several times")
    for text in prompts:
        check_text(text, "--prompt")
    if temperature != 0 and not 1e-3 <= temperature <= 1e3:
        raise InputError(f"--temperature is {temperature:g}; it must be 0, or lie in [0.001, 1000]")
    early.check_file(cache, "cache file")
    early.check_device(device)
    early.check_model(model)

    import torch
    from transformers import TextStreamer

    from kvcat.compress import question_ids
    from kvcat.models import left_out, plain_generation, positions_of

    loaded, tokenizer, compact = _model_and_cache(model, cache, device=device, dtype=dtype)
    positions = positions_of(loaded.config)
    held = compact.longest_text(loaded)
    questions = [question_ids(tokenizer, text, cache=compact, allow_special=allow_special) for text in prompts]
    for ids in questions:
        if compact.num_tokens + ids.shape[1] >= positions:
            raise InputError(
                f"no position is left for an answer: the document's {compact.num_tokens} tokens and the prompt's "
                f"{ids.shape[1]} fill the model's {positions}"
            )
        compact.check_tokens(loaded, ids)
        length = compact.num_tokens + ids.shape[1] + max_new_tokens
        if held is not None and length > held:
            raise InputError(
                f"document, prompt and answer of {length} tokens exceed the {held} for which the rotary factors of the "
                f"cache hold: compress with --room {length - compact.num_tokens}, or give a smaller --max-new-tokens"
            )
    if unused := left_out(loaded, sampling=temperature > 0):
        print(f"left out of the model's generation settings: {', '.join(unused)}", file=sys.stderr)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    for text, ids in zip(prompts, questions, strict=True):
        if len(prompts) > 1:
            print(f"> {text}")
        torch.manual_seed(seed)
        most = min(max_new_tokens, positions - compact.num_tokens - ids.shape[1])
        with plain_generation(loaded, max_new_tokens=most, **sampling) as settings:
            loaded.generate(
                **compact.inputs(loaded, ids.to(loaded.device)),
                streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
                generation_config=settings,
            )


def _model_and_cache(
    model: str, file: Path, *, device: str, dtype: str | None = None, tokenizer: bool = True
) -> tuple[Any, Any, "CompactCache"]:
    """Model, tokenizer and cache on one device; that the cache is the model's is checked where it is used."""
    import kvcat

    compact = kvcat.CompactCache.load(file)
    own = str(compact.layers[0].keys.dtype).removeprefix("torch.")
    loaded, words = kvcat.load(model, dtype=dtype or own, device=device, tokenizer=tokenizer)
    return loaded, words, compact.to(loaded.device)


def pack(
    model: opt.Model,
    /,
    cache: Path,
    output: opt.Output,
    head_dim: int | None = None,
    drop_log_bias: bool = False,
    overwrite: opt.Overwrite = False,
    device: opt.Device = "cpu",
) -> None:
    """Write a saved cache as plain tensors for engines that know no kvcat; docs/serving.md shows how each reads them.

    With --head-dim the file is for the widened checkpoint (`kvcat widen`) and keeps the log-bias and unequal heads.
    Without it, the cache must have neither: compress with --method attention-matching,log_bias=false, or by eviction.

    Example: kvcat pack ./my-model --cache report.safetensors -o report.prefix --head-dim 80

    Args:
        cache: Cache file that `kvcat compress` wrote.
        output: File to write.
        head_dim: Channels of a head of the widened checkpoint that will read the file.
        drop_log_bias: Leave out the log-bias, which changes the answers.
    """
    opt.check_output(output, overwrite=overwrite)
    early.check_file(cache, "cache file")
    early.check_device(device)
    early.check_model(model)

    from kvcat.serving import export_prefix

    loaded, _, compact = _model_and_cache(model, cache, device=device, tokenizer=False)
    plain = export_prefix(compact, loaded, output, drop_log_bias=drop_log_bias, head_dim=head_dim)
    print(f"{output}: {compact.mean_slots:g} slots a head; the next token stands at {plain.num_tokens}")


def widen(
    model: opt.Model,
    /,
    output: opt.Output,
    head_dim: int | None = None,
    gguf_type: Literal["float16", "float32", "q8_0"] = "float16",
    dtype: opt.Dtype = "float32",
    overwrite: opt.Overwrite = False,
) -> None:
    """Write a checkpoint whose keys have room for a log-bias, so that stock engines can answer from any compact cache.

    Its logits are the model's own. Caches made with the model fit after `kvcat pack --head-dim`.

    Example: kvcat widen smollm2-135m -o wide

    Args:
        output: A Hugging Face folder, for vLLM and transformers; or NAME.gguf, for llama.cpp.
        head_dim: Channels of a head; by default the next size that vLLM's attention on a CPU has.
        gguf_type: Of the matrices in a .gguf file.
    """
    is_gguf = output.suffix == ".gguf"
    if is_gguf:
        opt.check_output(output, overwrite=overwrite)
    else:
        check_new_folder(output)
    early.check_model(model)

    import kvcat
    from kvcat.models import save
    from kvcat.serving import widen, write_gguf

    loaded, tokenizer = kvcat.load(model, dtype=dtype, tokenizer=not is_gguf)
    wide = widen(loaded, head_dim)
    if is_gguf:
        write_gguf(wide, output, dtype=gguf_type)
    else:
        save(wide, tokenizer, output)
    print(f"{output}: heads of {wide.config.head_dim} channels, {wide.config.kvcat_head_dim} of the model's own")


def info(file: Path, /) -> None:
    """Describe a cache file without loading a model: slots, bytes saved, method, model.

    Example: kvcat info report.safetensors

    Args:
        file: Cache file that `kvcat compress` wrote.
    """
    early.check_file(file, "cache file")

    from kvcat.cache import CompactCache

    cache = CompactCache.load(file)
    counts, keys, tokens = [layer.counts for layer in cache.layers], cache.layers[0].keys, cache.num_tokens
    dense = 2 * sum(own.numel() for own in counts) * tokens * keys.shape[-1] * keys.itemsize
    told = {"method": "unknown", "model": "unknown", **cache.metadata}
    rows = {
        "cache": f"{tokens} tokens in {cache.mean_slots:g} slots a layer and head ({cache.mean_slots / tokens:.1%} "
        f"kept), at most {cache.max_slots}",
        "shape": f"{cache.batch_size} examples, {len(counts)} layers, {counts[0].shape[1]} KV heads of "
        f"{keys.shape[-1]} channels, {keys.dtype}, {'with' if cache.has_log_bias else 'without'} log-bias",
        "bytes": f"{cache.nbytes:,}, {cache.nbytes / dense:.1%} of the {dense:,} of the dense cache",
        "method": told.pop("method"),
        "model": f"{told.pop('model')}, fingerprint {cache.fingerprint[:12]}",
        "settings": ", ".join(f"{key} {value}" for key, value in sorted(told.items())),
        "slots by layer": " ".join(f"{own.double().mean():.4g}" for own in counts),
    }
    print("\n".join(f"{name:<16}{text}" for name, text in rows.items()))
