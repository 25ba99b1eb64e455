"""``kvcat generate``: answers from a saved compact cache."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcat.cli.options import MODEL_HELP, DeviceOption, SeedOption
from kvcat.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvcat.cache import CompactCache
    from kvcat.types import Int, Tensor


def generate_command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    cache: Annotated[Path, typer.Option(help="Cache file that `kvcat compress` wrote with the same model.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="What follows the document; may be given several times. Without it, one prompt a line is read."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily; from 0.001 to 1000 it samples.")] = 0.0,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="Type of the weights; the one that the cache was made with.")
    ] = None,
) -> None:
    """Answer prompts from a saved cache; every prompt starts from the document alone.

    A cache made with --chat wraps each prompt in the tokenizer's chat template.

    Example: kvcat generate ./my-model --cache report.safetensors --prompt "What was decided?"
    """
    if not cache.is_file():
        raise InputError(f"no cache file {cache}")
    if temperature != 0 and not 1e-3 <= temperature <= 1e3:
        raise InputError(f"--temperature is {temperature:g}; it must be 0, or lie in [0.001, 1000]")

    import kvcat

    compact = kvcat.CompactCache.load(cache)
    loaded, tokenizer = kvcat.load(model, dtype=dtype or compact.metadata.get("dtype", "float32"), device=device)
    compact.check_model(loaded, str(cache))
    answer = Answerer(loaded, tokenizer, compact.to(loaded.device), temperature, seed)
    for text in prompt or []:
        answer.question(text)
    for text in _prompts(prompt):
        if prompt and len(prompt) > 1:
            print(f"> {text}")
        answer(text, max_new_tokens)


@dataclass(frozen=True)
class Answerer:
    """Answers questions about one cached document on standard output.

    Args:
        model: the model the cache was made with.
        tokenizer: its tokenizer.
        cache: the document.
        temperature: 0 decodes greedily.
        seed: of the sampling, for every question anew.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    cache: "CompactCache"
    temperature: float
    seed: int

    def __call__(self, text: str, max_new_tokens: int) -> None:
        """Print the answer to one question as it is made.

        Raises:
            InputError: an empty question, or one that leaves no position for an answer.
        """
        import torch
        from transformers import TextStreamer

        ids, room = self.question(text)
        sampling = (
            {"do_sample": True, "temperature": self.temperature} if self.temperature > 0 else {"do_sample": False}
        )
        end, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        torch.manual_seed(self.seed)
        self.model.generate(  # type: ignore[operator]
            **self.cache.inputs(self.model, ids.to(self.model.device)),
            max_new_tokens=min(max_new_tokens, room),
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            pad_token_id=end if pad is None else pad,
            **sampling,
        )

    def question(self, text: str) -> tuple["Int[Tensor, 'batch tokens']", int]:
        """A question's token ids, (1, tokens), and the most tokens that its answer may have.

        Raises:
            InputError: an empty question, or one that leaves no position for an answer.
        """
        from kvcat.compress.documents import question_ids

        ids = question_ids(self.tokenizer, text, chat=self.cache.metadata.get("chat") == "yes")
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        room = positions - self.cache.num_tokens - ids.shape[1]
        if room < 1:
            raise InputError(
                f"no position is left for an answer: the document's {self.cache.num_tokens} tokens and the prompt's "
                f"{ids.shape[1]} fill the model's {positions}"
            )
        return ids, room


def _prompts(given: list[str] | None) -> Iterator[str]:
    if given:
        yield from given
        return
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
