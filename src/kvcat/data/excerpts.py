"""A short run reads a little of many documents, not all of few."""

from collections.abc import Iterator, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvcat.data.rows import Document
from kvcat.data.split import name_seed

MIN_SEQUENCES = 2  # an excerpt is at least so long, so that most sequences lie within one document
SAMPLE, SAMPLE_CHARACTERS = 32, 1 << 14  # documents whose tokens are counted to know how long the text is
MARGIN = 1.1


def excerpts(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    num_sequences: int,
    seed: int,
) -> Iterator[Document]:
    """Documents whose texts are cut so that together they give about so many sequences; whole where there is no more.

    A model that continues on all of a few files adapts to them and forgets the rest (docs/log.md). One length in
    characters holds for all documents, at least two sequences' worth; where an excerpt begins is drawn by seed and
    name, at the start of a line. Texts are read once for their lengths and again when they are yielded.

    Args:
        documents: in the order in which they are taken.
        tokenizer: counts the tokens of the first 32 documents.
        seq_len: tokens a sequence.
        num_sequences: sequences that are wanted.
        seed: seed of the places.
    """
    characters = _characters_per_token(documents, tokenizer)
    lengths = np.array([len(document.text) for document in documents])
    wanted = int(MARGIN * characters * seq_len * num_sequences)
    limit = max(_cap(lengths, wanted), int(MIN_SEQUENCES * characters * seq_len))
    for document in documents:
        yield Document(document.id, lambda document=document: _excerpt(document, limit, seed))


def _characters_per_token(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> float:
    texts = [document.text[:SAMPLE_CHARACTERS] for document in documents[:SAMPLE]]
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return sum(map(len, texts)) / max(1, sum(map(len, encoded["input_ids"])))


def _cap(lengths: np.ndarray, wanted: int) -> int:
    """The least L with sum(min(length, L)) >= wanted; the largest length where nothing reaches that."""
    ordered = np.sort(lengths)
    before = np.concatenate([[0], np.cumsum(ordered)[:-1]])
    left = len(ordered) - np.arange(len(ordered))
    reached = np.flatnonzero(before + left * ordered >= wanted)
    if not len(reached):
        return int(ordered[-1])
    first = reached[0]
    return int(np.ceil((wanted - before[first]) / left[first]))


def _excerpt(document: Document, limit: int, seed: int) -> str:
    text = document.text
    if len(text) <= limit:
        return text
    place = int(np.random.default_rng([seed, name_seed(document.id)]).integers(len(text) - limit + 1))
    line = text.rfind("\n", 0, place) + 1
    start = line if place - line < limit // 4 else place
    return text[start : start + limit]
