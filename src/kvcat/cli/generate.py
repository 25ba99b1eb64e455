"""``kvcat generate``: answers from a saved compact cache."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcat.cli.options import Device, Dtype, Model, Seed, Strings, check_least, flat
from kvcat.errors import InputError

if TYPE_CHECKING:
    from kvcat.cache import CompactCache


def generate(
    model: Model,
    /,
    cache: Path,
    prompt: Strings = (),
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype | None = None,
) -> None:
    """Answer prompts from a saved cache; every prompt starts from the document alone.

    A cache made with --chat puts each prompt into the tokenizer's chat template.

    Example: kvcat generate ./my-model --cache report.safetensors --prompt "What was decided?"

    Args:
        cache: Cache file that `kvcat compress` wrote.
        prompt: What follows the document; several may be given. Without it, one prompt a line is read from standard
            input.
        max_new_tokens: Longest answer, in tokens.
        temperature: 0 decodes greedily; from 0.001 to 1000 it samples.
        dtype: Type of the weights; by default the one that the cache was made with.
    """
    if not cache.is_file():
        raise InputError(f"no cache file {cache}")
    check_least(1, max_new_tokens=max_new_tokens)
    check_least(0, seed=seed)
    if temperature != 0 and not 1e-3 <= temperature <= 1e3:
        raise InputError(f"--temperature is {temperature:g}; it must be 0, or lie in [0.001, 1000]")

    import kvcat

    compact = kvcat.CompactCache.load(cache)
    loaded, tokenizer = kvcat.load(model, dtype=dtype or compact.metadata.get("dtype", "float32"), device=device)
    compact.check_model(loaded, str(cache))
    compact = compact.to(loaded.device)
    prompts = flat(prompt)
    questions = [_question(loaded, tokenizer, compact, text) for text in prompts]
    sampling = {"do_sample": temperature > 0, "temperature": temperature or None, "seed": seed}
    for text, (ids, room) in zip(prompts, questions, strict=True):
        if len(prompts) > 1:
            print(f"> {text}")
        _answer(loaded, tokenizer, compact, ids, min(max_new_tokens, room), **sampling)
    if not prompts:
        for text in _standard_input():
            ids, room = _question(loaded, tokenizer, compact, text)
            _answer(loaded, tokenizer, compact, ids, min(max_new_tokens, room), **sampling)


def _question(model: Any, tokenizer: Any, cache: "CompactCache", text: str) -> tuple[Any, int]:
    """A prompt's token ids, (1, tokens), and the most tokens that its answer may have.

    Raises:
        InputError: an empty prompt, or one that leaves no position for an answer.
    """
    from kvcat.compress.documents import question_ids

    ids = question_ids(tokenizer, text, chat=cache.metadata.get("chat") == "yes")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    room = positions - cache.num_tokens - ids.shape[1]
    if room < 1:
        raise InputError(
            f"no position is left for an answer: the document's {cache.num_tokens} tokens and the prompt's "
            f"{ids.shape[1]} fill the model's {positions}"
        )
    return ids, room


def _answer(
    model: Any, tokenizer: Any, cache: "CompactCache", ids: Any, num_tokens: int, *, seed: int, **sampling: Any
) -> None:
    """Print the answer while it is made."""
    import torch
    from transformers import TextStreamer

    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(seed)
    model.generate(
        **cache.inputs(model, ids.to(model.device)),
        max_new_tokens=num_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        pad_token_id=end if pad is None else pad,
        **{name: value for name, value in sampling.items() if value is not None},
    )


def _standard_input() -> Iterator[str]:
    if sys.stdin.isatty():
        print("one prompt a line, an empty line ends", file=sys.stderr)
    count = 0
    for line in sys.stdin:
        if not line.strip():
            break
        count += 1
        yield line.rstrip("\n")
    if count == 0:
        raise InputError("no prompt: give --prompt, or one prompt a line on standard input")
