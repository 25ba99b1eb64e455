"""The command ``kvcat generate``: answers from a saved cache."""

import sys
from typing import TYPE_CHECKING, Any

from kvcat.choices import SEAM_TOKENS
from kvcat.cli import early
from kvcat.cli import options as opt
from kvcat.cli.cache_files import check_caches, model_and_cache
from kvcat.errors import InputError
from kvcat.tokenization import check_text

if TYPE_CHECKING:
    from kvcat.cache import CompactCache
    from kvcat.types import Tensor


def generate(
    model: opt.Model,
    /,
    cache: opt.Files,
    prompt: opt.Strings = (),
    max_new_tokens: opt.Count = 64,
    temperature: float = 0.0,
    allow_special: opt.AllowSpecial = False,
    packed: bool = False,
    seam_tokens: opt.SeamTokens = SEAM_TOKENS,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    dtype: opt.Dtype | None = None,
) -> None:
    """Answer prompts from saved caches; prompts do not see each other or their answers.

    Several caches are composed: their documents follow one another in this order. A cache made with
    --chat puts each prompt into the tokenizer's chat template. Of the model's
    generation settings, only the end-of-text tokens are used; the ignored ones are listed on
    standard error.

    Example: kvcat generate ./my-model --cache report.safetensors --prompt "What was decided?"

    Args:
        cache: Cache files that `kvcat compress` wrote, one or several.
        prompt: Text that follows the document; may be given several times.
        max_new_tokens: Largest number of tokens in an answer.
        temperature: 0 for greedy decoding; 0.001 to 1000 for sampling.
        packed: Keep a cache of 8 or 4 bits packed in memory; attention unpacks a head at a time,
            which is slower.
        dtype: Data type of the weights; by default that of the cache.
    """
    prompts = [text.removeprefix("\ufeff") for text in opt.flat(prompt)]
    if not prompts:
        raise InputError("no prompt: give --prompt TEXT, once or several times")
    for text in prompts:
        check_text(text, "--prompt")
    if temperature != 0 and not 1e-3 <= temperature <= 1e3:
        raise InputError(f"--temperature is {temperature:g}; it must be 0, or lie in [0.001, 1000]")
    files = check_caches(cache, seam_tokens)
    if packed and len(files) > 1:
        raise InputError("--packed is for a single cache: composed caches are unpacked")
    early.check_device(device)
    early.check_model(model)

    import torch
    from transformers import TextStreamer

    from kvcat.compress import question_ids
    from kvcat.models import left_out, plain_generation

    loaded, tokenizer, compact = model_and_cache(
        model, files, device=device, dtype=dtype, seam_tokens=seam_tokens
    )
    if packed and compact.bits is None:
        raise InputError(f"--packed: {files[0]} is not in 8 or 4 bits")
    questions = [
        question_ids(tokenizer, text, cache=compact, allow_special=allow_special)
        for text in prompts
    ]
    num_answer_tokens = [_answer_length(loaded, compact, ids, max_new_tokens) for ids in questions]
    ignored = left_out(loaded, sampling=temperature > 0)
    if ignored:
        print(f"ignored generation settings of the model: {', '.join(ignored)}", file=sys.stderr)
    sampling: dict[str, Any] = {}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    for text, ids, num_tokens in zip(prompts, questions, num_answer_tokens, strict=True):
        if len(prompts) > 1:
            print(f"> {text}")
        torch.manual_seed(seed)
        with plain_generation(loaded, max_new_tokens=num_tokens, **sampling) as settings:
            loaded.generate(
                **compact.inputs(loaded, ids.to(loaded.device), packed=packed),
                streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
                generation_config=settings,
            )


def _answer_length(
    model: Any, cache: "CompactCache", question: "Tensor", max_new_tokens: int
) -> int:
    """The largest number of tokens in an answer: ``max_new_tokens``, or the positions left.

    Args:
        model: model of the cache.
        cache: cache of the document.
        question: token ids, of shape (1, tokens).
        max_new_tokens: largest number of tokens that the user wants.

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
