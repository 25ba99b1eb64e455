"""Generation after all that a session holds, in several calls of ``model.generate``."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from kvcat.cache import PrefixCache, cache_argument
from kvcat.compress.sessions.read_tokens import ReadTokens
from kvcat.compress.sessions.state import SessionState
from kvcat.errors import InputError
from kvcat.generate import SAMPLING, Row

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


class SessionRow(Row):
    """The next tokens of an answer, which a streamer of transformers may get as they come."""

    def __init__(self, ends: Collection[int], max_new_tokens: int, streamer: Any) -> None:
        super().__init__(ends, max_new_tokens)
        self.streamer = streamer

    def take(self, token: int) -> None:
        """Take the next token, and pass it on."""
        super().take(token)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))


def inputs_after(model: PreTrainedModel, state: SessionState | ReadTokens) -> dict[str, Any]:
    """Arguments of ``model.generate`` after the tokens of a state, which the call does not change.

    Args:
        model: of the session.
        state: with at least one token.
    """
    last = state.ids[-1:].unsqueeze(0)
    past: Any = state.past_before_last(model)  # generate runs the last token again
    if isinstance(past, PrefixCache):
        past.tokens = None
    num_tokens = int(past.get_seq_length()) + 1
    mask = torch.ones(1, num_tokens, dtype=torch.long, device=last.device)
    return {"input_ids": last, "attention_mask": mask, **cache_argument(past)}
