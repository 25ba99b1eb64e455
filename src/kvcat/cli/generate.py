"""The command ``kvcat generate``: answers from a saved cache."""

import dataclasses
import json as json_module
import sys

import tyro

from kvcat import option_types as opt
from kvcat.cli import early
from kvcat.cli.cache_files import check_caches, limit_note, model_and_cache
from kvcat.errors import InputError
from kvcat.options import SEAM_TOKENS
from kvcat.settings import Sampling
from kvcat.text.encoder import check_text

_MOST_TOKENS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How an answer is decoded.

    Args:
        max_new_tokens: Largest number of tokens in an answer; by default 64, in a conversation 256,
            or as many as fit.
    """

    max_new_tokens: opt.Unset[opt.Count] = None
    temperature: opt.Temperature = 0.0
    top_p: opt.TopP = 1.0
    stop: opt.Stop = ()
    seed: opt.Seed = 0

    def settings(self, most_tokens: int) -> Sampling:
        """The settings of an answer, with at most ``most_tokens`` unless a number was given."""
        most_tokens = self.max_new_tokens or most_tokens
        stop = tuple(opt.flat(self.stop))
        settings = Sampling(self.temperature, self.top_p, most_tokens, stop, self.seed)
        early.check_sampling(settings)
        return settings


def generate(
    model: opt.Model,
    /,
    cache: opt.Files = (),
    store: opt.StoreOfCache = None,
    id: opt.DocumentId = None,
    prompt: opt.Strings = (),
    *,
    sampling: tyro.conf.OmitArgPrefixes[SamplingOptions],
    json: bool = False,
    packed: bool = False,
    seam_tokens: opt.SeamTokens = SEAM_TOKENS,
    device: opt.Device = "cpu",
    dtype: opt.Unset[opt.Dtype] = None,
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
        json: Print one JSON object for each answer, when it is complete.
        packed: Keep a cache of 8 or 4 bits packed in memory; attention unpacks a head at a time,
            which is slower.
        dtype: Data type of the weights; by default that of the cache.
    """
    prompts = [text.removeprefix("\ufeff") for text in opt.flat(prompt)]
    if not prompts:
        raise InputError("no prompt: give --prompt TEXT, once or several times")
    for text in prompts:
        check_text(text, "--prompt")
    settings = sampling.settings(_MOST_TOKENS)
    files = check_caches(cache, seam_tokens=seam_tokens, store=store, id=id)
    if packed and len(files) > 1:
        raise InputError("--packed is for a single cache: composed caches are unpacked")
    early.check_device(device)
    early.check_model(model)

    from kvcat.compress import question_ids
    from kvcat.generate import answer, answer_length, left_out
    from kvcat.models import positions_of

    loaded, tokenizer, compact = model_and_cache(
        model, files, device=device, dtype=dtype, seam_tokens=seam_tokens, store=store, id=id
    )
    if packed and compact.bits is None:
        raise InputError(f"--packed: {files[0] if files else id} is not in 8 or 4 bits")
    positions = positions_of(loaded.config)
    questions = [
        question_ids(tokenizer, text, cache=compact, positions=positions) for text in prompts
    ]
    most_tokens = settings.max_new_tokens
    num_answer_tokens = [answer_length(loaded, compact, ids, most_tokens) for ids in questions]
    fitting = min(num_answer_tokens)
    if sampling.max_new_tokens is not None and fitting < sampling.max_new_tokens:
        raise InputError(
            f"--max-new-tokens is {most_tokens}; the model's {positions} positions hold "
            f"{fitting} after the document and the prompt"
        )
    ignored = left_out(loaded, sampling=sampling.temperature > 0)
    if ignored:
        print(f"ignored generation settings of the model: {', '.join(ignored)}", file=sys.stderr)
    for text, ids, num_tokens in zip(prompts, questions, num_answer_tokens, strict=True):
        if len(prompts) > 1 and not json:
            print(f"> {text}")
        result = answer(
            loaded,
            tokenizer,
            compact.inputs(loaded, ids.to(loaded.device), packed=packed),
            dataclasses.replace(settings, max_new_tokens=num_tokens),
            on_text=None if json else print_piece,
        )
        if json:
            facts = {
                "prompt": text,
                "answer": result.text,
                "finish_reason": result.finish_reason,
                "document_tokens": compact.num_tokens,
                "prompt_tokens": ids.shape[1],
                "answer_tokens": len(result.ids),
            }
            print(json_module.dumps(facts), flush=True)
        else:
            print()
        if result.finish_reason == "length":
            print(limit_note(num_tokens), file=sys.stderr)


def print_piece(text: str) -> None:
    """Print a piece of an answer at once."""
    print(text, end="", flush=True)
