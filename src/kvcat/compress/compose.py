"""Compact caches of several documents as one, and tokens appended to a compact cache."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcat.cache import (
    CacheRecord,
    CompactCache,
    CompactLayer,
    FirstSlots,
    HeadGrid,
    HeadSlots,
    Layer,
    LayerState,
    check_batch_of_ids,
    count_before,
    first_ids,
    first_slots,
)
from kvcat.cache.ranges import num_positions
from kvcat.compress.prefix import clipped
from kvcat.compress.refit import refit_slots
from kvcat.compress.trace import Trace
from kvcat.errors import InputError, check_in, check_kind, whole
from kvcat.models import capture, check_length, frozen
from kvcat.models.rotation import KeyRotation
from kvcat.options import NUM_FIRST, SEAM_TOKENS
from kvcat.types import Int, Tensor


@torch.no_grad()
def compose(
    model: PreTrainedModel,
    caches: Sequence[CompactCache],
    *,
    seam_tokens: int = SEAM_TOKENS,
    refit: Trace | None = None,
) -> CompactCache:
    """The compact cache of several documents, one after the other.

    The keys of every later document are rotated to their new positions. The first document's first
    token is the attention sink of all: the slots of a later document's first token are left out.
    Instead, or with ``seam_tokens`` instead of the first ones, these tokens are encoded again
    after the documents before them, and keep exact slots in every head. The order of the documents
    is that of ``caches``. A single cache is returned unchanged; quantised caches are unpacked.

    Args:
        model: the model that the caches were made with.
        caches: at least one, with equally many examples each.
        seam_tokens: first tokens of every later document that are encoded again, 0 to 16.
        refit: trace of all documents' tokens as one prefix, to which log-bias and values are fitted
            again (``refit_slots``); None: they stay as they are.

    Raises:
        InputError: no caches; a cache of another model or batch; keys that cannot be rotated; a
            seam of tokens that a cache does not record; a later document that opens a chat turn;
            more tokens than the model has positions, or than a sliding window in which they were
            compressed; or a refit of other documents, of protected slots, or of other layers or
            rotary factors than the caches have.
    """
    _check(model, caches, seam_tokens)
    check_states(model, caches)
    if refit is not None:
        _check_refit(refit, caches)
    if len(caches) == 1:
        return caches[0] if refit is None else refit_slots(refit, caches[0].unpacked())
    num_seams = [min(seam_tokens, cache.num_tokens) for cache in caches]
    # at least the first token, which was its document's attention sink: composed, the text has one
    later = [
        slots_behind(cache, max(1, num_seam), f"document {number}", required=num_seam > 0)
        for number, (cache, num_seam) in enumerate(zip(caches, num_seams, strict=True), start=1)
    ]
    composed = caches[0].unpacked()
    for cache, num_seam, slots in zip(caches[1:], num_seams[1:], later[1:], strict=True):
        start = composed.num_tokens
        layers = [[layer] for layer in composed.heads_of_layers()]
        if num_seam:
            ids = torch.tensor(cache.record.first_ids)[:, :num_seam]
            seam, _ = _encoded(model, composed, ids)
            for layer, added in zip(layers, seam, strict=True):
                layer.append(added)
        # the keys of a pass over all documents, without what the earlier ones would change in them
        rotation = KeyRotation(model, start)
        for index, (layer, heads) in enumerate(zip(layers, slots, strict=True)):
            layer.append(_moved(heads, rotation, index))
        joined = [_joined(sections) for sections in layers]
        composed = replace(composed, layers=joined, num_tokens=start + cache.num_tokens)
    composed = replace(composed, record=_record(caches, composed, seam_tokens))
    return composed if refit is None else refit_slots(refit, composed)


@torch.no_grad()
def append(
    model: PreTrainedModel, cache: CompactCache, input_ids: Int[Tensor, "batch new"]
) -> CompactCache:
    """The compact cache of a prefix and of the tokens after it, whose slots are exact.

    A quantised cache is unpacked.

    Args:
        model: the model that the cache was made with.
        input_ids: tokens that follow the prefix, one row for each example of the cache.

    Raises:
        InputError: another model or batch, no tokens, tokens without an embedding, or more tokens
            than the model has positions.
    """
    check_kind(CompactCache, "a CompactCache", cache=cache)
    check_batch_of_ids(input_ids)
    cache.check_tokens(model, input_ids)
    if len(input_ids) != cache.batch_size:
        raise InputError(f"{len(input_ids)} rows of tokens for {cache.batch_size} examples")
    num_tokens = cache.num_tokens + input_ids.shape[1]
    check_length("the document and the text after it", num_tokens, model.config)
    added, states = _encoded(model, cache, input_ids)
    pairs = zip(cache.heads_of_layers(), added, strict=True)
    layers = [_joined([held, new]) for held, new in pairs]
    longer = replace(cache, layers=layers, num_tokens=num_tokens, states=states)
    record = replace(
        cache.record.longer(cache.num_tokens, first_ids(input_ids)),
        first_slots=_first_slots_of_longer(cache, longer),
        appended=cache.record.appended + input_ids.shape[1],
    )
    return replace(longer, record=record)


def _joined(sections: Sequence[HeadGrid]) -> Layer:
    """A layer of the slots of all sections, one after the other in every head."""
    heads = [
        [HeadSlots.joined(pieces) for pieces in zip(*sections_of_example, strict=True)]
        for sections_of_example in zip(*sections, strict=True)
    ]
    return CompactLayer.of_heads(heads)


def slots_behind(
    cache: CompactCache, num_tokens: int, name: str, *, required: bool
) -> list[HeadGrid]:
    """The slots of a cache without those of its first ``num_tokens`` tokens, per layer.

    If the cache does not record which slots these are, all slots are returned.

    Raises:
        InputError: it does not record them, and ``required`` says that it must.
    """
    layers = cache.heads_of_layers()
    heads = [head for layer in layers for row in layer for head in row]
    if all(head.positions is not None for head in heads):
        return [[[_from(head, num_tokens) for head in row] for row in layer] for layer in layers]
    if cache.record.first_slots:
        counts_of_layers = [layer.counts for layer in cache.layers]
        counts = count_before(cache.record.first_slots, num_tokens, counts_of_layers)
    elif required:
        raise InputError(
            f"{name} does not record which tokens its slots represent (method "
            f"{cache.record.method or 'unknown'}), so that its first tokens cannot be encoded "
            "again: give seam_tokens=0"
        )
    else:
        return layers
    protected = cache.record.protected
    edges = (num_positions(clipped(protected, 0, num_tokens)), num_positions(protected))
    return [
        _without_first(layer, layer_counts, edges)
        for layer, layer_counts in zip(layers, counts, strict=True)
    ]


def _from(head: HeadSlots, position: int) -> HeadSlots:
    """The slots of the tokens at a position and after."""
    positions: Any = head.positions
    return head.kept(positions >= position)


def _without_first(
    heads: HeadGrid, counts: Int[Tensor, "batch kv_heads"], edges: tuple[int, int]
) -> HeadGrid:
    """The heads of a layer, each without the slots of the first tokens, of which ``counts`` has the
    number.

    Args:
        edges: how many of these are protected, and how many slots are; those come first.
    """
    first_protected, num_protected = edges
    rows = []
    for row, counts_of_row in zip(heads, counts.tolist(), strict=True):
        kept = []
        for head, count in zip(row, counts_of_row, strict=True):
            numbers = torch.arange(len(head), device=head.keys.device)
            first_other = num_protected + count - first_protected
            is_later = (numbers >= first_protected) & (numbers < num_protected)
            kept.append(head.kept(is_later | (numbers >= first_other)))
        rows.append(kept)
    return rows


def _moved(heads: HeadGrid, rotation: KeyRotation, layer: int) -> HeadGrid:
    """The heads with keys and positions ``rotation.shift`` tokens later."""
    moved = []
    for row in heads:
        of_example = []
        for head in row:
            keys = head.keys
            if len(keys):
                keys = rotation(keys[None, None], layer)[0, 0]
            of_example.append(replace(head.moved(rotation.shift), keys=keys))
        moved.append(of_example)
    return moved


def _encoded(
    model: PreTrainedModel, cache: CompactCache, input_ids: Int[Tensor, "batch new"]
) -> tuple[list[HeadGrid], dict[int, LayerState]]:
    """The exact slots of tokens that follow a compact cache, per layer, and the states then."""
    num_new = input_ids.shape[1]
    # padded to equal heads, so that the new keys and values are the last ones of every head
    padded = replace(cache, layers=[layer.padded() for layer in cache.ordinary_layers()])
    past = padded.to_transformers(model)
    with frozen(model):
        captured = capture(
            model,
            input_ids.to(model.device),
            query_positions=torch.arange(0),
            hidden_start=num_new - 1,
            past=past,
            layers=cache.layer_numbers,
        )
    states = {number: LayerState.of(past.layers[number]) for number in cache.states}
    positions = torch.arange(cache.num_tokens, cache.num_tokens + num_new, device=model.device)
    layers = []
    for keys, values in zip(captured.keys, captured.values, strict=True):
        layer = CompactLayer(
            keys[:, :, -num_new:].to(cache.dtype),
            values[:, :, -num_new:].to(cache.dtype),
            None,
            positions.expand(*keys.shape[:2], -1),
        )
        layers.append(layer.heads())
    return layers, states


def _record(
    caches: Sequence[CompactCache], composed: CompactCache, seam_tokens: int
) -> CacheRecord:
    """What the composed cache records."""
    record = caches[0].record
    protected_later = list(record.protected_later)
    num_tokens = caches[0].num_tokens
    for cache in caches[1:]:
        later = cache.record
        protected_later += [
            (start + num_tokens, stop + num_tokens)
            for start, stop in (*later.protected, *later.protected_later)
        ]
        record = record.longer(num_tokens, later.first_ids)
        num_tokens += cache.num_tokens
    return replace(
        record,
        method=_different([cache.record.method for cache in caches]),
        supervision=_different([cache.record.supervision for cache in caches]),
        first_slots=_first_slots_of_longer(caches[0], composed),
        protected_later=tuple(protected_later),
        documents=tuple(length for cache in caches for length in _document_lengths(cache)),
        seam_tokens=seam_tokens,
    )


def _document_lengths(cache: CompactCache) -> tuple[int, ...]:
    """The tokens of each document of a cache, which may be composed itself.

    A composed cache to which tokens were appended counts as one document.
    """
    lengths = cache.record.documents
    return lengths if sum(lengths) == cache.num_tokens else (cache.num_tokens,)


def _different(words: Sequence[str]) -> str:
    """Each word once."""
    return " + ".join(dict.fromkeys(word or "unknown" for word in words))


def _first_slots_of_longer(cache: CompactCache, longer: CompactCache) -> FirstSlots:
    """Which first tokens have a slot in a cache that begins with the slots of another.

    It is not recorded if the longer cache knows all positions, or if some of the first tokens are
    not in the other cache.
    """
    knows_positions = all(layer.positions is not None for layer in longer.layers)
    if knows_positions or cache.num_tokens < NUM_FIRST:
        return ()
    num_protected = num_positions(cache.record.protected)
    return cache.record.first_slots or first_slots(cache.heads_of_layers(), num_protected)


def _check(model: PreTrainedModel, caches: Sequence[CompactCache], seam_tokens: int) -> None:
    """Raise an ``InputError`` for caches that cannot be composed."""
    check_kind(Sequence, "a sequence of CompactCaches", caches=caches)
    if not caches:
        raise InputError("no caches to compose: give at least one")
    check_in(f"[0, {NUM_FIRST}]", seam_tokens=whole("seam_tokens", seam_tokens))
    for number, cache in enumerate(caches, start=1):
        check_kind(CompactCache, "a CompactCache", **{f"document {number}": cache})
        cache.check_model(model, f"document {number}")
        if cache.batch_size != caches[0].batch_size:
            raise InputError(
                f"document {number} holds {cache.batch_size} examples, document 1 "
                f"{caches[0].batch_size}"
            )
        if number > 1:
            _check_later(cache, seam_tokens, number)
    if len(caches) > 1:
        KeyRotation(model, 0)  # rejects a model whose keys cannot be rotated
        num_tokens = sum(cache.num_tokens for cache in caches)
        check_length(f"{len(caches)} documents", num_tokens, model.config)
        longest = caches[0].longest_text(model)
        if longest is not None and num_tokens > longest:
            raise InputError(
                f"{len(caches)} documents: {num_tokens} tokens exceed the sliding window of "
                f"{longest}, in which each document was compressed: compress them as one text"
            )


def check_states(model: PreTrainedModel, caches: Sequence[CompactCache]) -> None:
    """Raise an ``InputError`` for several caches of which a layer can have one alone."""
    if len(caches) > 1 and any(cache.states for cache in caches):
        raise InputError(
            f"{type(model).__name__}: layers with a sliding window shorter than the document or "
            "with a recurrent state keep the state of one document: compress them as one text"
        )


def check_turn(number: int, *, opens_turn: bool | None) -> None:
    """Raise an ``InputError`` if a document after the first one opens a turn."""
    if number > 1 and opens_turn:
        raise InputError(
            f"document {number} opens a turn of the chat template: compress all documents but the "
            "first without --chat"
        )


def _check_later(cache: CompactCache, seam_tokens: int, number: int) -> None:
    """Raise an ``InputError`` for a cache that cannot follow another one."""
    check_turn(number, opens_turn=cache.record.chat)
    num_seam = min(seam_tokens, cache.num_tokens)
    num_recorded = len(cache.record.first_ids[0]) if cache.record.first_ids else 0
    if num_recorded < num_seam:
        raise InputError(
            f"document {number} does not record its first tokens ({num_recorded} of {num_seam}): "
            "compress it again, or give seam_tokens=0"
        )


def _check_refit(refit: Trace, caches: Sequence[CompactCache]) -> None:
    """Raise an ``InputError`` for a trace of other documents, or of other keys of the same ones."""
    check_kind(Trace, "a Trace", refit=refit)
    num_tokens = sum(cache.num_tokens for cache in caches)
    if refit.prefix_len != num_tokens or refit.batch_size != caches[0].batch_size:
        raise InputError(
            f"refit is a trace of {refit.batch_size} prefixes of {refit.prefix_len} tokens, the "
            f"documents are {caches[0].batch_size} of {num_tokens}"
        )
    if refit.past is not None:
        raise InputError("refit must be a dense trace, not one with a past")
    if refit.protected:
        raise InputError("refit is a trace with protected tokens, to which no slots are fitted")
    if refit.fingerprint != caches[0].fingerprint:
        raise InputError("refit is a trace of another model")
    if refit.layer_numbers != caches[0].layer_numbers:
        raise InputError(
            f"refit compresses the layers {refit.layer_numbers} and the documents "
            f"{caches[0].layer_numbers}: trace both with room for the same text (room=)"
        )
    factors = caches[0].rotary_factors(refit.model)
    if factors != refit.text.rope:
        raise InputError(
            f"the documents have the {factors} rotary factors and refit the {refit.text.rope} "
            "ones: trace both with the same room for the text that follows (room=)"
        )
    if any(cache.record.has_protected for cache in caches):
        raise InputError("a document has protected slots, which a refit would change: leave it out")
    start = 0
    for number, cache in enumerate(caches, start=1):
        stop = start + cache.num_tokens
        cache.check_document(refit.input_ids[:, start:stop], f"document {number}, to refit,")
        start = stop
