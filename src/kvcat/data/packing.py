"""Tokens: documents encoded, BOS before and EOS after each, and packed into sequences of one length."""

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from kvcat.choices import Bos
from kvcat.data.documents import Document
from kvcat.data.split import name_seed
from kvcat.errors import InputError
from kvcat.tokenization import as_text, control_tokens, opening_ids, unknown_id

# scripts, digits, blanks, contractions, code, marks that combine, an emoji: where tokenizers differ
PROBE = (
    "The quick brown fox isn't 12345.678 km away\u2014it's HERE!\n\n\tdef f(x):\n\t\treturn x**2  # na\u00efve\r\n"
    "\u00dcber \u0434\u043e\u043c \u6771\u4eac \u0639\u0631\u0628\u064a e\u0301 "
    "\U0001f98a  <|endoftext|></s><s> _a__b CamelCase\u00a0x"
)
BATCH_DOCUMENTS = 64
MIN_SEQUENCES = 2  # an excerpt is at least so long, so that most sequences lie within one document
SAMPLE_DOCUMENTS, SAMPLE_CHARACTERS = 32, 1 << 14  # encoded to count characters per token
EXCERPT_MARGIN = 1.1


@dataclass(frozen=True)
class Encoder:
    """Text to the tokenizer's own ids, behind what begins a text (``opening``), EOS after them.

    A control token that the text spells becomes text (``kvcat.tokenization``).
    """

    backend: Tokenizer
    eos: int
    name: str
    opening: tuple[int, ...] = ()
    control: Mapping[int, str] = field(default_factory=dict)  # control tokens by id
    unknown: int | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, bos: Bos = "auto") -> "Encoder":
        """The encoder of a transformers tokenizer, which is copied.

        Raises:
            InputError: no EOS or no fast form; ``bos`` is "always" and there is no BOS.
        """
        name, eos = str(tokenizer.name_or_path), tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise InputError(f"tokenizer {name!r} has no EOS token to put between documents")
        core = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(core, Tokenizer):
            raise InputError(f"tokenizer {name!r} has no fast form (tokenizer.json)")
        backend = Tokenizer.from_str(core.to_str())
        backend.no_truncation()
        backend.no_padding()
        return cls(
            backend,
            eos,
            name,
            tuple(opening_ids(tokenizer, bos)),
            control_tokens(tokenizer),
            unknown_id(tokenizer),
        )

    @property
    def num_added(self) -> int:
        """Tokens before and after each document's own."""
        return len(self.opening) + 1

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The token ids of each document, EOS last, from all cores unless TOKENIZERS_PARALLELISM=false."""
        self.backend.encode_special_tokens = True  # as text
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        bodies = [
            as_text(document.ids, text, self._whole, self.control, self.unknown)
            for document, text in zip(encoded, texts, strict=True)
        ]
        return [np.array([*self.opening, *body, self.eos], self.dtype) for body in bodies]

    def _whole(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the vocabulary, EOS and the ids of a probe text, the same in all versions."""
        self.backend.encode_special_tokens = False
        probe = self.backend.encode(PROBE, add_special_tokens=False).ids
        vocabulary = sorted(self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps([vocabulary, self.eos, probe]).encode()).hexdigest()[:16]

    @cached_property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every token id: little-endian uint16 or int32."""
        largest = max(self.backend.get_vocab(with_added_tokens=True).values())
        return np.dtype("<u2" if largest < 1 << 16 else "<i4")


def pack(
    documents: Iterable[Document], encoder: Encoder, seq_len: int, *, max_sequences: int | None = None
) -> np.ndarray:
    """The documents' tokens, as ``encoder`` gives them, cut into (sequences, tokens); the remainder is dropped.

    Reads no further than ``max_sequences`` need; None takes all. ``InputError`` if the text is shorter than one
    sequence.
    """
    limit = math.inf if max_sequences is None else max_sequences
    parts: list[np.ndarray] = []
    total, iterator = 0, iter(documents)
    while total < limit * seq_len and (texts := [document.text for document in islice(iterator, BATCH_DOCUMENTS)]):
        encoded = encoder(texts)
        parts.extend(encoded)
        total += sum(map(len, encoded))
    if total < seq_len:
        raise InputError(f"the text has {total} tokens, fewer than one sequence of {seq_len}")
    count = int(min(total // seq_len, limit))
    return np.concatenate(parts)[: count * seq_len].reshape(count, seq_len)


def excerpts(
    documents: Sequence[Document], encoder: Encoder, seq_len: int, num_sequences: int, seed: int
) -> Iterator[Document]:
    """A short excerpt of every document, together about ``num_sequences`` sequences.

    A model that trains on all of a few files adapts to them and forgets the rest (docs/log.md). All excerpts have the
    same length in characters, at least two sequences; how many characters a token has is counted in the first 32
    documents. Seed and name draw where an excerpt begins, at the start of a line.
    """
    texts = [document.text[:SAMPLE_CHARACTERS] for document in documents[:SAMPLE_DOCUMENTS]]
    num_tokens = sum(len(ids) - encoder.num_added for ids in encoder(texts))
    characters_per_token = sum(map(len, texts)) / max(1, num_tokens)
    lengths = np.array([len(document.text) for document in documents])
    needed, longest = int(EXCERPT_MARGIN * characters_per_token * seq_len * num_sequences), int(lengths.max())
    enough = bisect_left(range(longest), needed, key=lambda length: np.minimum(lengths, length).sum())
    limit = max(enough, int(MIN_SEQUENCES * characters_per_token * seq_len))
    for document in documents:
        yield Document(document.id, _excerpt(document, limit, seed))


def _excerpt(document: Document, limit: int, seed: int) -> str:
    text = document.text
    if len(text) <= limit:
        return text
    place = int(np.random.default_rng([seed, name_seed(document.id)]).integers(len(text) - limit + 1))
    line = text.rfind("\n", 0, place) + 1
    start = line if place - line < limit // 4 else place
    return text[start : start + limit]
