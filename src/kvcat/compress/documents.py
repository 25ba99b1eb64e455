"""Documents as token ids, plain or in a chat template, with a copy that supervises compression."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import NoneType
from typing import get_args

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CacheRecord, CompactCache
from kvcat.cache.ranges import Range
from kvcat.compress.parts import (
    longest_text,
    num_parts,
    num_positions_in_parts,
    trace_in_parts,
)
from kvcat.compress.trace import Reconstruction, Trace
from kvcat.compress.tracing import check_positions, trace
from kvcat.errors import InputError, check_kind, check_one_of
from kvcat.models import check_supported, positions_of
from kvcat.options import DocumentSupervision
from kvcat.text.encoder import Piece, TextEncoder, check_text, opening_ids
from kvcat.text.template import ChatTemplate
from kvcat.types import Int, Tensor

INSTRUCTION = (
    "\nReproduce the preceding passage verbatim. "
    "Preserve every word, digit, and punctuation mark.\n"
)

_LONGEST_TOKEN = 128  # characters


def reconstruction(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    head: str | None = None,
    chat: bool = False,
    positions: int = sys.maxsize,
) -> Reconstruction:
    """Token ids of ``<text><instruction><text>``, joined as ids: both copies are the same tokens.

    The first copy begins as the tokenizer begins a text, with a BOS token for example, and has
    nothing after it: not the EOS token that some tokenizers put at the end of a text.

    Args:
        head: text before the first copy, instead of the tokens that the tokenizer puts there.
        chat: the first copy opens a user's turn in the tokenizer's chat template.
        positions: of the model. A text with many more tokens is rejected before all of it is
            encoded; whether the sequence fits is checked later (``check_length``).

    Raises:
        InputError: a text without tokens, too long, or that no encoding can hold; no chat template,
            or one that does not write the text as it is.

    References: KV-CAT, appendix "Needle-in-a-haystack retrieval", "Training the compact KV cache".
    """
    check_kind(PreTrainedTokenizerBase, "a tokenizer of transformers", tokenizer=tokenizer)
    check_kind(str, "a text", text=text)
    check_kind((str, NoneType), "a text or None", head=head)
    encoder = TextEncoder(tokenizer)
    encoder.check_fits(text, positions)
    check_text(text, "the document")
    digest = ""
    if chat:
        template = ChatTemplate(tokenizer)
        digest = template.digest
        text = template.document(text)
        head = template.parts.head
    body = encoder(text)
    if not body:
        raise InputError(f"the text {text[:20]!r} holds no token to compress")
    if head is None:
        opening = opening_ids(tokenizer)
        begins_so = bool(opening) and body[: len(opening)] == opening
        first = body if begins_so else opening + body
    else:
        before = encoder.joined([Piece(head, is_markup=True)])
        first = encoder.joined([Piece(head, is_markup=True), Piece(text)])
        # after the head the text may have no space before it, for example
        if first[: len(before)] == before:
            body = first[len(before) :]
    middle = encoder.behind(INSTRUCTION)
    ids = torch.tensor([[*first, *middle, *body]])
    return Reconstruction(ids, len(first), len(first) + len(middle), chat, digest)


def reconstruction_of_tokens(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Int[Tensor, "batch prefix"],
    opening: Sequence[int] | None = None,
) -> Reconstruction:
    """The reconstruction sequences of texts in token ids of equal length, one per row.

    If a row begins with ``opening``, its second copy omits these tokens; None: the tokens that the
    tokenizer adds at the start of a text.

    Raises:
        InputError: rows without tokens, or some rows with such a start and some without.
    """
    start = opening_ids(tokenizer) if opening is None else list(opening)
    opened = {row[: len(start)] == start for row in tokens.tolist()}
    if len(opened) > 1:
        raise InputError(f"some texts begin with {start} and some do not: it must be all or none")
    body = tokens[:, len(start) :] if True in opened else tokens
    if body.shape[1] == 0:
        raise InputError("the texts hold no token to compress")
    middle = tokens.new_tensor(TextEncoder(tokenizer).behind(INSTRUCTION))
    ids = torch.cat([tokens, middle.expand(len(tokens), -1), body], dim=1)
    return Reconstruction(ids, tokens.shape[1], tokens.shape[1] + len(middle))


def document_trace(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    supervision: str = "reconstruction",
    chat: bool = False,
    room: int | None = None,
    in_parts: bool = True,
) -> Trace:
    """The trace from which a document's cache is compressed; a document has no suffix.

    Args:
        model, tokenizer: the ones that will answer.
        supervision: "reconstruction" matches the document repeated after an instruction, "self"
            its own queries.
        chat: the document opens a user's turn in the tokenizer's chat template; caches record it.
        room: tokens of question and answer that will follow (``trace``).
        in_parts: a long document is repeated part by part (``trace_in_parts``), without predictions
            to learn from; False: in one repetition, which needs twice its positions.

    Raises:
        InputError: an empty document, one too long for the model's positions; and as
            ``reconstruction``.
    """
    check_supported(model)
    check_one_of("supervision of a document", supervision, get_args(DocumentSupervision))
    sequence = reconstruction(tokenizer, text, chat=chat, positions=positions_of(model.config))
    return sequence_trace(model, sequence, supervision=supervision, room=room, in_parts=in_parts)


def sequence_trace(
    model: PreTrainedModel,
    sequence: Reconstruction,
    *,
    supervision: str = "reconstruction",
    room: int | None = None,
    in_parts: bool = True,
    on_read: Callable[[], None] = lambda: None,
) -> Trace:
    """The trace of one or several documents of equal length as token ids; else as
    ``document_trace``.

    ``on_read`` is called when a long document was read, before it is repeated in parts.
    """
    ids = sequence.input_ids.to(model.device)
    if supervision == "self":
        document = ids[:, : sequence.prefix_len]
        own_queries = trace(model, document, supervision="self", room=room)
        text = replace(own_queries.text, chat=sequence.chat, chat_template=sequence.chat_template)
        return replace(own_queries, text=text)
    check_length(model.config, sequence, supervision, in_parts=in_parts)
    sequence = replace(sequence, input_ids=ids)
    if in_parts and num_parts(sequence, positions_of(model.config)) > 1:
        return trace_in_parts(model, sequence, room=room, on_read=on_read)
    return trace(model, sequence, room=room)


def check_length(
    config: PreTrainedConfig, sequence: Reconstruction, supervision: str, *, in_parts: bool
) -> None:
    """Raise an ``InputError`` if a document is too long for the model's positions.

    Args:
        sequence: the document, with the copy that supervises.
        supervision, in_parts: as in ``document_trace``.
    """
    prefix_len = sequence.prefix_len
    if supervision == "self":
        check_positions(config, prefix_len, prefix_len, supervision)
        return
    positions = positions_of(config)
    num_in_parts = num_positions_in_parts(sequence, positions)
    num_needed = num_in_parts if in_parts else sequence.input_ids.shape[1]
    if num_needed <= positions:
        return
    text = f"the text has {prefix_len} tokens, and the model {positions} positions"
    num_repeated = num_needed - prefix_len
    if in_parts:
        longest = longest_text(sequence, positions)
    else:  # two copies, and what is between them and before the first
        longest = (positions - (num_needed - 2 * prefix_len)) // 2
    shorter = f"shorten the text to {longest}" if longest > 0 else "shorten the text"
    if prefix_len > positions:
        raise InputError(f"{text}: {shorter}, or split it into several")
    if num_in_parts <= positions:
        remedy = f"attention-matching, with --keep or --slots, repeats it in parts; or {shorter}"
    else:
        remedy = f"supervision self repeats nothing, or {shorter}"
    repetition = f"too few for it and {num_repeated} tokens of its repetition"
    raise InputError(f"{text}, {repetition}: {remedy}")


def protected_ranges(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    system: bool = False,
    passages: Sequence[str] = (),
    chat: bool = False,
) -> list[Range]:
    """Ranges of a document's tokens to protect (``protecting``), in a trace of ``document_trace``.

    Tokens that hold only a part of what is protected are protected as well.

    Args:
        system: all that the chat template writes before the document: the system turn and the
            opening of the user's turn.
        passages: texts, each of which is protected wherever it occurs in the document.
        chat: as in ``document_trace``.

    Raises:
        InputError: a passage without visible characters, or that does not occur in the document;
            ``system`` without ``chat``, or with a template that writes no system turn; and as
            ``reconstruction``.
    """
    if not system and not passages:
        return []
    sequence = reconstruction(tokenizer, text, chat=chat)
    tokens = sequence.input_ids[0, : sequence.prefix_len].tolist()
    encoder = TextEncoder(tokenizer)
    head: list[Piece] = []
    opening: list[int] = []
    if chat:
        template = ChatTemplate(tokenizer)
        text = template.document(text)
        head = [Piece(template.parts.head, is_markup=True)]
    else:
        opening = tokens[: len(tokens) - len(encoder(text))]

    def range_of(start: int, stop: int) -> Range:
        """The tokens that hold characters of the document from start to stop."""
        starts = range(start, max(0, start - _LONGEST_TOKEN) - 1, -1)
        before = ([*opening, *encoder.joined([*head, Piece(text[:end])])] for end in starts)
        stops = range(stop, min(len(text), stop + _LONGEST_TOKEN) + 1)
        after = (encoder.behind(text[begin:])[::-1] for begin in stops)
        num_before = _most_in_common(before, tokens)
        return num_before, len(tokens) - _most_in_common(after, tokens[::-1])

    ranges: list[Range] = []
    if system:
        if not head or "system" not in head[0].text:
            reason = "the chat template writes none" if chat else "only a chat template writes one"
            raise InputError(f"there is no system turn to protect: {reason}")
        ranges.append((0, range_of(0, 0)[1]))
    for passage in passages:
        if not passage.strip():
            raise InputError("a passage to protect is empty or only white space")
        place = text.find(passage)
        if place < 0:
            raise InputError(f"the passage to protect, {passage[:20]!r}, is not in the document")
        while place >= 0:
            ranges.append(range_of(place, place + len(passage)))
            place = text.find(passage, place + 1)  # occurrences may overlap
    return ranges


def _most_in_common(cut_texts: Iterable[Sequence[int]], tokens: Sequence[int]) -> int:
    """The largest number of tokens with which a cut text and ``tokens`` begin.

    Args:
        cut_texts: tokens of the text, cut shorter and shorter. A cut may go through a token, so
            that the last tokens before it are others; the first cut between two tokens is the last
            one to look at.
        tokens: of the whole text.
    """
    most = 0
    for cut_tokens in cut_texts:
        num_common = _num_common(cut_tokens, tokens)
        most = max(most, num_common)
        if num_common == len(cut_tokens):
            break
    return most


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens with which both sequences begin."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return number
    return min(len(first), len(second))


def question_ids(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    chat: bool = False,
    cache: CompactCache | None = None,
    positions: int = sys.maxsize,
) -> Int[Tensor, "batch tokens"]:
    """Token ids of the text after a document, one row, the same as in one text of both.

    Args:
        text: text after the document.
        chat: the text ends the user's turn that the document opened.
        cache: the document's; it records whether the document is in a chat template, and in which
            one.
        positions: of the model. A text with many more tokens is rejected before all of it is
            encoded.

    Raises:
        InputError: an empty text, one that is too long, or one that no encoding can hold; no chat
            template, one that does not write the text as it is, or another one than the cache was
            made with.
    """
    check_kind(PreTrainedTokenizerBase, "a tokenizer of transformers", tokenizer=tokenizer)
    check_kind(str, "a text", text=text)
    check_kind((CompactCache, NoneType), "a CompactCache or None", cache=cache)
    encoder = TextEncoder(tokenizer)
    encoder.check_fits(text, positions)
    check_text(text, "the prompt")
    if not text:
        raise InputError("the prompt is empty: nothing follows the document")
    record = CacheRecord() if cache is None else cache.record
    if chat or record.chat:
        template = template_of(tokenizer, record)
        question = Piece(template.question(text))
        _, between, tail = template.parts
        pieces = [Piece(between, is_markup=True), question, Piece(tail, is_markup=True)]
    else:
        pieces = [Piece(text)]
    ids = encoder.joined(pieces, behind=True)
    if not ids:
        raise InputError(f"the prompt {text[:20]!r} holds no token")
    return torch.tensor([ids])


def template_of(tokenizer: PreTrainedTokenizerBase, record: CacheRecord) -> ChatTemplate:
    """The chat template of a document.

    Raises:
        InputError: no chat template, or another one than the cache was made with.
    """
    if record.chat and not tokenizer.chat_template:
        raise InputError(
            f"the cache was made in a chat template, which tokenizer {tokenizer.name_or_path!r} "
            f"does not have: the cache belongs to another model, {record.model!r}"
        )
    template = ChatTemplate(tokenizer)
    template.check(record.chat_template)
    return template
