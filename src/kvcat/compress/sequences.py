"""Reconstruction sequences: supervision for a text that has no suffix."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from kvcat.errors import InputError
from kvcat.types import Int, Tensor

INSTRUCTION = "\nReproduce the preceding passage verbatim. Preserve every word, digit, and punctuation mark.\n"


@dataclass(frozen=True)
class Reconstruction:
    """A sequence <text><instruction><text> whose second copy supervises the compression of the first.

    Args:
        input_ids: the whole sequence, one row.
        prefix_len: tokens of the first copy.
        supervision_start: position of the first token of the second copy.
    """

    input_ids: Int[Tensor, "batch tokens"]
    prefix_len: int
    supervision_start: int


def reconstruction(tokenizer: PreTrainedTokenizerBase, text: str, *, instruction: str = INSTRUCTION) -> Reconstruction:
    """Token ids of <text><instruction><text>, joined as ids so that both copies are the same tokens.

    The first copy begins with whatever the tokenizer puts at the start of a text (such as a beginning-of-text token);
    instruction and second copy carry no special tokens.

    Args:
        tokenizer: of the model that will be traced.
        text: what to compress.
        instruction: stands between the copies.

    Raises:
        InputError: the text holds no token.

    References: KV-CAT, appendix "Needle-in-a-haystack retrieval", "Training the compact KV cache".
    """
    body = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if not body:
        raise InputError(f"the text {text[:20]!r} holds no token to compress")
    first = tokenizer.encode(text, verbose=False)
    middle = tokenizer.encode(instruction, add_special_tokens=False)
    ids = torch.tensor([[*first, *middle, *body]])
    return Reconstruction(ids, len(first), len(first) + len(middle))


def reconstruction_of_tokens(
    tokenizer: PreTrainedTokenizerBase, tokens: Int[Tensor, "batch prefix"], *, instruction: str = INSTRUCTION
) -> Reconstruction:
    """The same of texts that are token ids already and equally long, one sequence a row.

    Where a row begins with what the tokenizer puts at the start of a text, its second copy leaves that out.

    Args:
        tokenizer: of the model that will be traced.
        tokens: what to compress.
        instruction: stands between the copies.

    Raises:
        InputError: rows without tokens, or some rows with such a start and some without.
    """
    opening = opening_ids(tokenizer)
    opened = {row[: len(opening)] == opening for row in tokens.tolist()}
    if len(opened) > 1:
        raise InputError(f"some texts begin with {opening} and some do not: it must be all or none")
    body = tokens[:, len(opening) :] if True in opened else tokens
    if body.shape[1] == 0:
        raise InputError("the texts hold no token to compress")
    middle = tokens.new_tensor(tokenizer.encode(instruction, add_special_tokens=False))
    ids = torch.cat([tokens, middle.expand(len(tokens), -1), body], dim=1)
    return Reconstruction(ids, tokens.shape[1], tokens.shape[1] + len(middle))


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts at the start of a text, such as a beginning-of-text token; often nothing."""
    whole, body = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    return whole[: next(i for i in range(len(whole)) if whole[i : i + len(body)] == body)]
