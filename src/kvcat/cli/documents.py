"""``kvcat compress``, ``generate``, ``pack``, ``widen`` and ``info``: commands on caches."""

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
    from kvcat.compress import Compressor, GradientCompression, Trace
    from kvcat.types import Tensor


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

    For an engine that needs equally many slots in every head: --method
    attention-matching,budgets=equal. For one document with many questions: --method
    gradient,init=attention-matching,num_steps=50.

    Args:
        text: UTF-8 text file: the document.
        output: Cache file to write (.safetensors).
        method: NAME or NAME,option=value,...; docs/compress.md lists them.
        keep: Fraction of the KV slots to KEEP, in (0, 1]; 0.1 if no budget is given.
        slots: Instead of --keep: slots per layer and head.
        max_kl: Instead of --keep: the largest KL on held-out positions, in nats per token. Finds
            the smallest cache.
        chat: Put the document into the tokenizer's chat template, as a user's turn; answers then
            follow it.
        room: Tokens of prompt and answer that will follow. Only for models whose rotary factors
            depend on the length.
    """
    num_budgets = sum(budget is not None for budget in (keep, slots, max_kl))
    if num_budgets > 1:
        raise InputError("give one of --keep, --slots and --max-kl")
    keep_ratio = keep if num_budgets else 0.1
    document = _read_text(text)
    opt.check_output(output, overwrite=overwrite, source=text)
    early.check_method(method)
    name, options = parse_spec(method)
    learner = "--max-kl" if max_kl is not None else name
    if supervision == "self" and learner in ("gradient", "--max-kl"):
        raise InputError(
            f"{learner} needs --supervision reconstruction: "
            "the document alone leaves nothing to predict"
        )
    early.check_device(device)
    early.check_model(model)

    import kvcat
    from kvcat.compress import document_trace, seeded_compressor

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
    command = (model, document, method, keep_ratio, slots, seed, chat, allow_special, room, dtype)
    state = _state_file(output, command)
    if max_kl is not None:
        cache = _smallest_cache(trace, compressor, max_kl)
    elif isinstance(compressor, kvcat.GradientCompression) and compressor.num_steps:
        cache = _trained_cache(trace, compressor, keep_ratio, slots, state)
    else:
        cache = compressor(trace, keep_ratio=keep_ratio, num_slots=slots)
    cache.save(output)
    state.unlink(missing_ok=True)
    mean_slots = cache.mean_slots
    print(
        f"{output}: {cache.num_tokens} tokens in {mean_slots:g} slots per layer and head, "
        f"{cache.nbytes / 1e6:.2f} MB ({method}, keep {mean_slots / cache.num_tokens:.4g}, "
        f"supervision {supervision})"
    )


def _read_text(path: Path) -> str:
    """The document in a file; ``InputError`` if it is blank."""
    document = read_text(path)
    if not document.strip():
        raise InputError(f"text file {path} is empty")
    return document


def _state_file(output: Path, command: tuple[Any, ...]) -> Path:
    """The file from which the same command continues after it was killed."""
    digest = hashlib.sha256(repr(command).encode()).hexdigest()
    return output.with_name(f".{output.name}.{digest[:8]}.state")


def _smallest_cache(trace: "Trace", compressor: "Compressor", max_kl: float) -> "CompactCache":
    """The smallest cache of at most that KL on held-out positions; prints every attempt."""
    from kvcat.compress import smallest_cache

    def show(num_slots: int, kl: float) -> None:
        line = f"{num_slots} slots: KL {kl:.5f} nats per token held out"
        print(line, file=sys.stderr, flush=True)

    smallest = smallest_cache(trace, compressor, max_kl, on_try=show)
    metadata = {
        **smallest.cache.metadata,
        "max_kl": f"{max_kl:g}",
        "held_out_kl": f"{smallest.kl:.6g}",
    }
    return dataclasses.replace(smallest.cache, metadata=metadata)


def _trained_cache(
    trace: "Trace",
    compressor: "GradientCompression",
    keep_ratio: float | None,
    num_slots: int | None,
    state: Path,
) -> "CompactCache":
    """The cache of a compressor that trains it, with a progress bar; continues from ``state``."""
    from kvcat.evals import progress_bar

    with progress_bar(compressor.num_steps, "step") as bar:

        def show(_: int, kl: float) -> None:
            bar.set_postfix_str(f"KL {kl:.5f}", refresh=False)
            bar.update()

        return compressor(
            trace, keep_ratio=keep_ratio, num_slots=num_slots, resume=state, on_step=show
        )


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

    A cache made with --chat puts each prompt into the tokenizer's chat template. Of the model's
    generation settings only the end-of-text tokens are used. A line on the standard error names the
    ignored ones.

    Example: kvcat generate ./my-model --cache report.safetensors --prompt "What was decided?"

    Args:
        cache: Cache file that `kvcat compress` wrote.
        prompt: Text that follows the document; several may be given.
        max_new_tokens: Longest answer, in tokens.
        temperature: 0 decodes greedily; a value from 0.001 to 1000 samples.
        dtype: Type of the weights; by default that of the cache.
    """
    prompts = [text.removeprefix("\ufeff") for text in opt.flat(prompt)]
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
    from kvcat.models import left_out, plain_generation

    loaded, tokenizer, compact = _model_and_cache(model, cache, device=device, dtype=dtype)
    questions = [
        question_ids(tokenizer, text, cache=compact, allow_special=allow_special)
        for text in prompts
    ]
    num_answer_tokens = [_answer_length(loaded, compact, ids, max_new_tokens) for ids in questions]
    ignored = left_out(loaded, sampling=temperature > 0)
    if ignored:
        print(f"left out of the model's generation settings: {', '.join(ignored)}", file=sys.stderr)
    sampling: dict[str, Any] = {}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    for text, ids, num_tokens in zip(prompts, questions, num_answer_tokens, strict=True):
        if len(prompts) > 1:
            print(f"> {text}")
        torch.manual_seed(seed)
        with plain_generation(loaded, max_new_tokens=num_tokens, **sampling) as settings:
            loaded.generate(
                **compact.inputs(loaded, ids.to(loaded.device)),
                streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
                generation_config=settings,
            )


def _answer_length(
    model: Any, cache: "CompactCache", question: "Tensor", max_new_tokens: int
) -> int:
    """Tokens that an answer may have: ``max_new_tokens``, or fewer where the positions end.

    Args:
        model: of the cache.
        cache: of the document.
        question: token ids, of shape (1, tokens).
        max_new_tokens: longest answer that the person wants.

    Raises:
        InputError: no position is left, or the text would be longer than the cache allows.
    """
    from kvcat.models import positions_of

    num_positions = positions_of(model.config)
    question_len = question.shape[1]
    num_read = cache.num_tokens + question_len
    if num_read >= num_positions:
        raise InputError(
            f"no position is left for an answer: the document's {cache.num_tokens} tokens and the "
            f"prompt's {question_len} fill the model's {num_positions}"
        )
    cache.check_tokens(model, question)
    longest_text = cache.longest_text(model)
    length = num_read + max_new_tokens
    if longest_text is not None and length > longest_text:
        raise InputError(
            f"document, prompt and answer of {length} tokens exceed the {longest_text} for which "
            "the rotary factors of the cache hold: compress with --room "
            f"{length - cache.num_tokens}, or give a smaller --max-new-tokens"
        )
    return min(max_new_tokens, num_positions - num_read)


def _model_and_cache(
    model: str, file: Path, *, device: str, dtype: str | None = None, tokenizer: bool = True
) -> tuple[Any, Any, "CompactCache"]:
    """Model, tokenizer and cache on one device.

    Whether the cache belongs to the model is checked where it is used.
    """
    import kvcat

    compact = kvcat.CompactCache.load(file)
    cache_dtype = str(compact.layers[0].keys.dtype).removeprefix("torch.")
    loaded, loaded_tokenizer = kvcat.load(
        model, dtype=dtype or cache_dtype, device=device, tokenizer=tokenizer
    )
    return loaded, loaded_tokenizer, compact.to(loaded.device)


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
    """Write a saved cache as plain tensors for engines without kvcat.

    docs/serving.md shows how each engine reads them. With --head-dim the file is for the widened
    checkpoint (`kvcat widen`) and keeps the log-bias and unequal heads. Without it, the cache must
    have neither: compress with --method attention-matching,log_bias=false, or by eviction.

    Example: kvcat pack ./my-model --cache report.safetensors -o report.prefix --head-dim 80

    Args:
        cache: Cache file that `kvcat compress` wrote.
        output: File to write.
        head_dim: Channels of a head of the widened checkpoint that will read the file.
        drop_log_bias: Leave out the log-bias, which changes the answers.
    """
    opt.check_output(output, overwrite=overwrite, source=cache)
    early.check_file(cache, "cache file")
    early.check_device(device)
    early.check_model(model)

    from kvcat.serving import export_prefix

    loaded, _, compact = _model_and_cache(model, cache, device=device, tokenizer=False)
    plain = export_prefix(compact, loaded, output, drop_log_bias=drop_log_bias, head_dim=head_dim)
    print(
        f"{output}: {compact.mean_slots:g} slots per head; "
        f"the next token has position {plain.num_tokens}"
    )


def widen(
    model: opt.Model,
    /,
    output: opt.Output,
    head_dim: int | None = None,
    gguf_type: Literal["float16", "float32", "q8_0"] = "float16",
    dtype: opt.Dtype = "float32",
    overwrite: opt.Overwrite = False,
) -> None:
    """Write a checkpoint with which stock engines can answer from any compact cache.

    Its keys have room for a log-bias, and its logits equal the model's. It can use caches made with
    the model after `kvcat pack --head-dim`.

    Example: kvcat widen smollm2-135m -o wide

    Args:
        output: A Hugging Face folder, for vLLM and transformers; or NAME.gguf, for llama.cpp.
        head_dim: Channels of a head; by default the next size that vLLM supports on a CPU.
        gguf_type: Type of the matrices in a .gguf file.
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
    config = wide.config
    print(
        f"{output}: heads of {config.head_dim} channels, "
        f"{config.kvcat_head_dim} of them the model's"
    )


def info(file: Path, /) -> None:
    """Describe a cache file without loading a model: slots, bytes saved, method, model.

    Example: kvcat info report.safetensors

    Args:
        file: Cache file that `kvcat compress` wrote.
    """
    early.check_file(file, "cache file")

    from kvcat.cache import CompactCache

    cache = CompactCache.load(file)
    keys = cache.layers[0].keys
    num_tokens = cache.num_tokens
    counts = [layer.counts for layer in cache.layers]  # of slots: (batch, kv_heads) per layer
    num_heads = sum(layer_counts.numel() for layer_counts in counts)
    dense_bytes = 2 * num_heads * num_tokens * keys.shape[-1] * keys.itemsize
    settings = dict(cache.metadata)
    method = settings.pop("method", "unknown")
    model = settings.pop("model", "unknown")
    for size in ("num_slots", "mean_slots"):  # which the row of the cache shows
        settings.pop(size, None)
    rows = {
        "cache": f"{num_tokens} tokens in {cache.mean_slots:g} slots per layer and head "
        f"({cache.mean_slots / num_tokens:.1%} kept), at most {cache.max_slots}",
        "shape": f"{cache.batch_size} examples, {len(counts)} layers, {counts[0].shape[1]} KV "
        f"heads of {keys.shape[-1]} channels, {keys.dtype}, "
        f"{'with' if cache.has_log_bias else 'without'} log-bias",
        "bytes": f"{cache.nbytes:,}, {cache.nbytes / dense_bytes:.1%} of the {dense_bytes:,} of "
        "the dense cache",
        "method": method,
        "model": f"{model}, fingerprint {cache.fingerprint[:12]}",
        "settings": ", ".join(f"{key} {value}" for key, value in sorted(settings.items())),
        "slots by layer": " ".join(
            f"{layer_counts.double().mean():.4g}" for layer_counts in counts
        ),
    }
    for name, text in rows.items():
        print(f"{name:<16}{text}")
