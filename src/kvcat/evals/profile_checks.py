"""What a compressibility profile refuses before anything heavy runs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcat.errors import InputError
from kvcat.evals.profile_suffixes import ROLES, PrefixSuffixes, SuffixPlan
from kvcat.types import Tensor


def check_slots(slots: Sequence[int], prefix_len: int) -> None:
    """Nothing where the numbers of slots can be.

    Raises:
        InputError: none, one twice, or one outside [1, prefix_len].
    """
    if not slots:
        raise InputError("no number of slots given")
    for count in slots:
        if not 1 <= count <= prefix_len:
            raise InputError(f"{count} slots are outside 1 to {prefix_len}, the tokens of a prefix")
    if len(set(slots)) < len(slots):
        raise InputError(f"slots {', '.join(map(str, slots))}: give each number once")


def slot_grid(prefix_len: int) -> list[int]:
    """1, 2, 4, ... below the number of tokens, and that number.

    Args:
        prefix_len: tokens of a prefix, at least 1.
    """
    return [*(2**power for power in range((prefix_len - 1).bit_length())), prefix_len]


def check_models(
    models: Mapping[str, tuple[PreTrainedModel, Any]], plan: SuffixPlan, texts: Sequence[PrefixSuffixes] = ()
) -> int:
    """The number of token ids that all models have; nothing heavy runs.

    Args:
        models: label to (model, tokenizer); the tokenizer may be None.
        plan: lengths.
        texts: whose tokens are looked at; may be empty where there are none yet.

    Raises:
        InputError: no model, one with too few positions or without some token, or tokenizers that differ.
    """
    if not models:
        raise InputError("nothing to profile: no model given")
    length, sizes, hashes = plan.prefix_len + plan.suffix_len, {}, {}
    for label, (model, tokenizer) in models.items():
        config = model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and length > positions:
            raise InputError(
                f"{plan.prefix_len} + {plan.suffix_len} tokens exceed the {positions} positions of model {label!r}"
            )
        sizes[label] = config.vocab_size if tokenizer is None else min(config.vocab_size, len(tokenizer))
        if tokenizer is not None:
            words = json.dumps(sorted(tokenizer.get_vocab().items()))
            hashes[label] = hashlib.sha256(words.encode()).hexdigest()
            first = next(iter(hashes))
            if hashes[first] != hashes[label]:
                raise InputError(f"models {first!r} and {label!r} have different tokenizers: their texts differ")
    largest = max((int(rows.max()) for text in texts for rows in _every(text)), default=-1)
    for label, size in sizes.items():
        if largest >= size:
            raise InputError(f"token {largest} is outside the vocabulary of model {label!r}, {size} tokens")
    return min(sizes.values())


def check_held_out(texts: Sequence[PrefixSuffixes]) -> None:
    """Nothing where every prefix has held-out outputs, for the choice and for the test, of some kind at least.

    Raises:
        InputError: none are left.
    """
    for text in texts:
        for role in ("choice", "test"):
            if not any(text.held_out(kind, role).any() for kind in text.suffixes):
                raise InputError(
                    f"every suffix for the {role} behind token {text.name} of {text.document!r} is one that caches are "
                    "fitted to or chosen by: longer suffixes, or fewer to fit to, leave some held out"
                )


def _every(text: PrefixSuffixes) -> list[Tensor]:
    rows = [text.tokens(kind, role) for kind in text.suffixes for role in ROLES]
    return [torch.tensor(text.prefix), *(tokens for tokens in rows if tokens.numel())]
