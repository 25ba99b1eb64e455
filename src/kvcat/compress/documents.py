"""Documents as token ids: with a second copy that supervises their compression, plain or in a chat template."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.compress.trace import Reconstruction, Trace, trace
from kvcat.errors import InputError
from kvcat.types import Int, Tensor

INSTRUCTION = "\nReproduce the preceding passage verbatim. Preserve every word, digit, and punctuation mark.\n"
DOCUMENT, _QUESTION = "\x02document\x03", "\x02question\x03"


def reconstruction(tokenizer: PreTrainedTokenizerBase, text: str, *, head: str | None = None) -> Reconstruction:
    """Token ids of <text><instruction><text>, joined as ids so that both copies are the same tokens.

    ``head`` stands before the first copy; None: what the tokenizer puts there, such as a beginning-of-text token.
    Refuses a text without tokens.

    References: KV-CAT, appendix "Needle-in-a-haystack retrieval", "Training the compact KV cache".
    """
    body = _encode(tokenizer, text)
    if not body:
        raise InputError(f"the text {text[:20]!r} holds no token to compress")
    first = tokenizer.encode(text, verbose=False) if head is None else _encode(tokenizer, head + text)
    middle = _encode(tokenizer, INSTRUCTION)
    return Reconstruction(torch.tensor([[*first, *middle, *body]]), len(first), len(first) + len(middle))


def reconstruction_of_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Int[Tensor, "batch prefix"]) -> Reconstruction:
    """The same of texts that are token ids already and equally long, one sequence a row.

    Where a row begins with what the tokenizer puts at the start of a text, its second copy leaves that out.

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
    middle = tokens.new_tensor(_encode(tokenizer, INSTRUCTION))
    ids = torch.cat([tokens, middle.expand(len(tokens), -1), body], dim=1)
    return Reconstruction(ids, tokens.shape[1], tokens.shape[1] + len(middle))


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts at the start of a text, such as a beginning-of-text token; often nothing."""
    whole, body = tokenizer.encode("a"), _encode(tokenizer, "a")
    return whole[: next(i for i in range(len(whole)) if whole[i : i + len(body)] == body)]


def document_trace(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    supervision: str = "reconstruction",
    chat: bool = False,
) -> Trace:
    """The trace from which a document's cache is compressed; a document has no suffix.

    Args:
        model, tokenizer: that will answer.
        text: the document.
        supervision: "reconstruction" matches the document repeated after an instruction, "self" its own queries.
        chat: the document opens a user's turn in the tokenizer's chat template.

    Raises:
        InputError: an empty document, one too long for the model's positions, no chat template.
    """
    sequence = reconstruction(tokenizer, text, head=chat_parts(tokenizer)[0] if chat else None)
    sequence = replace(sequence, input_ids=sequence.input_ids.to(model.device))
    if supervision == "self":
        return trace(model, sequence.input_ids[:, : sequence.prefix_len], supervision="self")
    return trace(model, sequence)


def question_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool = False) -> Int[Tensor, "batch tokens"]:
    """Token ids of what follows a document, one row; with ``chat`` it ends the user's turn that the document opened.

    Raises:
        InputError: an empty text, no chat template.
    """
    if chat:
        _, between, tail = chat_parts(tokenizer)
        text = between + text + tail
    ids = _encode(tokenizer, text)
    if not ids:
        raise InputError("the prompt is empty: nothing follows the document")
    return torch.tensor([ids])


def chat_parts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    """What the chat template puts before the document, between document and question, and after the question."""
    if not tokenizer.chat_template:
        raise InputError(f"tokenizer {tokenizer.name_or_path!r} has no chat template: leave out --chat")
    turn = [{"role": "user", "content": f"{DOCUMENT}\n\n{_QUESTION}"}]
    rendered = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    head, _, rest = rendered.partition(DOCUMENT)
    between, _, tail = rest.partition(_QUESTION)
    return head, between, tail


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)
