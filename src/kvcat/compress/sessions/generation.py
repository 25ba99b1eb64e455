"""Generation after all that a session holds, in several calls of ``model.generate``."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from kvcat.cache import PrefixCache, cache_argument
from kvcat.compress.sessions.state import SessionState
from kvcat.errors import InputError
from kvcat.models import frozen
from kvcat.models.generation import SAMPLING
from kvcat.types import Int, Tensor

_OF_ONE_TOKEN = SAMPLING | {
    "eos_token_id", "pad_token_id", "remove_invalid_values", "renormalize_logits",
    "suppress_tokens",
}  # fmt: skip


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ``InputError`` for generation settings that a session does not support.

    It generates one answer, in pieces between compactions. A setting that looks at earlier tokens
    would see those of the piece alone.
    """
    existing = vars(GenerationConfig())
    for name in settings:
        if name not in existing:
            raise InputError(f"there is no generation setting {name!r}")
        if name not in _OF_ONE_TOKEN:
            raise InputError(
                f"a session has no {name}: it generates one answer, in pieces between compactions; "
                f"there are {', '.join(sorted(_OF_ONE_TOKEN))}"
            )


def continued(
    model: PreTrainedModel, state: SessionState, config: GenerationConfig, streamer: Any
) -> Int[Tensor, " new"]:
    """New tokens after those of a state, by one call of ``model.generate``.

    Args:
        model: of the session.
        state: with at least one token; the call does not change it.
        config: of the generation.
        streamer: gets the new tokens alone; None: there is none.
    """
    last = state.ids[-1:].unsqueeze(0)
    past: Any = state.past(model)
    # generate runs the last token again
    past.crop(-1)
    if isinstance(past, PrefixCache):
        past.tokens = None
    mask = torch.ones(1, state.num_tokens, dtype=torch.long, device=last.device)
    options = {
        "input_ids": last,
        "attention_mask": mask,
        "generation_config": config,
        "streamer": None if streamer is None else _NewTokens(streamer),
        **cache_argument(past),
    }
    generate: Any = model.generate
    with frozen(model):
        output = generate(**options)
    return output[0, 1:]


class _NewTokens:
    """A streamer for one of several calls of ``generate``: without its prompt and its end."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Pass new tokens on."""
        if not self._is_prompt:
            self._streamer.put(value)
        self._is_prompt = False

    def end(self) -> None:
        """Nothing: more tokens may follow."""
