"""A tokenizer in a form that travels to worker processes, and its fingerprint."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcat.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# scripts, digits, blanks, contractions, code, marks that combine, an emoji: where tokenizers differ
PROBE = (
    "The quick brown fox isn't 12345.678 km away\u2014it's HERE!\n\n\tdef f(x):\n\t\treturn x**2  # na\u00efve\r\n"
    "\u00dcber \u0434\u043e\u043c \u6771\u4eac \u0639\u0631\u0628\u064a e\u0301 "
    "\U0001f98a  <|endoftext|></s><s> _a__b CamelCase\u00a0x"
)


@dataclass(frozen=True)
class Encoder:
    """Text to token ids with EOS after them, as the tokenizer itself gives without special tokens.

    Args:
        backend: the fast tokenizer's core; it needs neither transformers nor torch.
        eos: id of the token between documents.
        name: what the tokenizer was loaded from.
    """

    backend: Any
    eos: int
    name: str

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "Encoder":
        """The encoder of a transformers tokenizer, which stays as it is.

        Raises:
            InputError: no EOS token, or no fast form.
        """
        from tokenizers import Tokenizer

        eos = end_token(tokenizer)
        core = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(core, Tokenizer):
            raise InputError(f"tokenizer {tokenizer.name_or_path!r} has no fast form (tokenizer.json)")
        backend = Tokenizer.from_str(core.to_str())
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, eos, str(tokenizer.name_or_path))

    def __call__(self, text: str) -> np.ndarray:
        """The token ids of a document, int32, EOS last."""
        return np.array([*self.backend.encode(text, add_special_tokens=False).ids, self.eos], dtype=np.int32)

    @cached_property
    def fingerprint(self) -> str:
        """The same for tokenizers with one vocabulary and EOS that cut a probe text alike, whatever the versions."""
        probe = self.backend.encode(PROBE, add_special_tokens=False).ids
        vocabulary = sorted(self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps([vocabulary, self.eos, probe]).encode()).hexdigest()[:16]

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1


class BatchEncoder:
    """Encodes the texts of each split of a batch; picklable.

    Args:
        encoder: of one text.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def __call__(self, texts: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
        """The token ids of each document, EOS after each."""
        return {split: [self._encoder(text) for text in part] for split, part in texts.items()}


def end_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The id that stands after each document.

    Raises:
        InputError: the tokenizer has no EOS token.
    """
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise InputError(f"tokenizer {tokenizer.name_or_path!r} has no EOS token to put between documents")
    return eos
