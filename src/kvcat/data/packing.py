"""Documents encoded, with BOS and EOS around each, and packed into sequences of equal length."""

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from kvcat.data.documents import Document
from kvcat.data.split import name_seed
from kvcat.errors import InputError, check_least
from kvcat.options import Bos
from kvcat.text.encoder import as_text, control_tokens, opening_ids, unknown_id

# where tokenizers differ: scripts, digits, blanks, contractions, code, combining marks, an emoji
PROBE = (
    "The quick brown fox isn't 12345.678 km away\u2014it's HERE!\n\n"
    "\tdef f(x):\n\t\treturn x**2  # na\u00efve\r\n"
    "\u00dcber \u0434\u043e\u043c \u6771\u4eac \u0639\u0631\u0628\u064a e\u0301 "
    "\U0001f98a  <|endoftext|></s><s> _a__b CamelCase\u00a0x"
)
_PIECE_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 64
MIN_SEQUENCES = 2  # of an excerpt, so that most sequences lie within one document
# documents, and characters of each, that are encoded to count characters per token
SAMPLE_DOCUMENTS = 32
SAMPLE_CHARACTERS = 1 << 14
EXCERPT_MARGIN = 1.1


@dataclass(frozen=True)
class Encoder:
    """Text to token ids, the ``opening`` before them and EOS after them.

    A control token that the text spells becomes text (``kvcat.text.encoder``).
    """

    backend: Tokenizer
    eos: int
    name: str
    opening: tuple[int, ...] = ()  # token ids that begin a text, such as BOS
    control: Mapping[int, str] = field(default_factory=dict)  # control tokens by id
    unknown: int | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, bos: Bos = "auto") -> "Encoder":
        """The encoder of a transformers tokenizer, which is copied.

        Raises:
            InputError: no EOS or no fast form; ``bos`` is "always" and there is no BOS.
        """
        name = str(tokenizer.name_or_path)
        eos = tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise InputError(f"tokenizer {name!r} has no EOS token to put between documents")
        fast_tokenizer = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(fast_tokenizer, Tokenizer):
            raise InputError(f"tokenizer {name!r} has no fast form (tokenizer.json)")
        backend = Tokenizer.from_str(fast_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        return cls(
            backend,
            eos,
            name,
            opening=tuple(opening_ids(tokenizer, bos)),
            control=control_tokens(tokenizer),
            unknown=unknown_id(tokenizer),
        )

    @property
    def num_added(self) -> int:
        """The number of tokens added to those of a document's text."""
        return len(self.opening) + 1

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The token ids of each document, EOS last.

        All cores are used unless TOKENIZERS_PARALLELISM=false.
        """
        return [
            np.array([*self.opening, *body, self.eos], self.dtype) for body in self._bodies(texts)
        ]

    def _bodies(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of the texts alone.

        A very long text is encoded in pieces: encoding takes hundreds of bytes per character.
        """
        by_text = [_pieces(text) for text in texts]
        flat = [piece for pieces in by_text for piece in pieces]
        self.backend.encode_special_tokens = True  # as text
        encoded = iter(self.backend.encode_batch_fast(flat, add_special_tokens=False))
        bodies = []
        for pieces in by_text:
            body: list[int] = []
            for piece in pieces:
                ids = next(encoded).ids
                body += as_text(ids, piece, self._whole, self.control, self.unknown)
            bodies.append(body)
        return bodies

    def _whole(self, text: str) -> list[int]:
        """Token ids of a text, control tokens among them."""
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


def _pieces(text: str) -> list[str]:
    """A text as pieces of at most ``_PIECE_CHARACTERS``, cut at line ends where there are some."""
    pieces = []
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = start + _PIECE_CHARACTERS
        end = text.rfind("\n", start, end) + 1 or end
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def pack(
    documents: Iterable[Document],
    encoder: Encoder,
    seq_len: int,
    *,
    max_sequences: int | None = None,
) -> np.ndarray:
    """The documents' tokens one after another, cut into (sequences, tokens).

    Tokens after the last full sequence are dropped.

    Args:
        documents: read only as far as needed.
        seq_len: tokens of a sequence.
        max_sequences: None: as many as the documents give.

    Raises:
        InputError: the text is shorter than one sequence.
    """
    check_least(1, seq_len=seq_len, max_sequences=1 if max_sequences is None else max_sequences)
    limit = math.inf if max_sequences is None else max_sequences
    encoded: list[np.ndarray] = []
    num_tokens = 0
    remaining = iter(documents)
    while num_tokens < limit * seq_len:
        texts = [document.text for document in islice(remaining, BATCH_DOCUMENTS)]
        if not texts:
            break
        for ids in encoder(texts):
            encoded.append(ids)
            num_tokens += len(ids)
    if num_tokens < seq_len:
        raise InputError(f"the text has {num_tokens} tokens, fewer than one sequence of {seq_len}")
    num_sequences = int(min(num_tokens // seq_len, limit))
    tokens = np.concatenate(encoded)[: num_sequences * seq_len]
    return tokens.reshape(num_sequences, seq_len)


def excerpts(
    documents: Sequence[Document], encoder: Encoder, seq_len: int, num_sequences: int, seed: int
) -> Iterator[Document]:
    """A short excerpt of every document, together about ``num_sequences`` sequences.

    A model that trains on a few whole files adapts to them and forgets other text (docs/log.md).
    All excerpts have the same length in characters, at least two sequences. The characters per
    token are counted in the first 32 documents. The seed and the document's name determine where an
    excerpt begins, at the start of a line unless the line is long.
    """
    texts = [document.text[:SAMPLE_CHARACTERS] for document in documents[:SAMPLE_DOCUMENTS]]
    num_tokens = sum(len(ids) - encoder.num_added for ids in encoder(texts))
    characters_per_token = sum(map(len, texts)) / max(1, num_tokens)
    lengths = np.array([len(document.text) for document in documents])
    needed = int(EXCERPT_MARGIN * characters_per_token * seq_len * num_sequences)

    def total_length(limit: int) -> int:
        return int(np.minimum(lengths, limit).sum())

    shortest_enough = bisect_left(range(int(lengths.max())), needed, key=total_length)
    limit = max(shortest_enough, int(MIN_SEQUENCES * characters_per_token * seq_len))
    for document in documents:
        yield replace(document, text=_excerpt(document, limit, seed))


def _excerpt(document: Document, limit: int, seed: int) -> str:
    """At most ``limit`` characters of a document, drawn by its name and the seed."""
    text = document.text
    if len(text) <= limit:
        return text
    generator = np.random.default_rng([seed, name_seed(document.id)])
    start = int(generator.integers(len(text) - limit + 1))
    line_start = text.rfind("\n", 0, start) + 1
    if start - line_start < limit // 4:
        start = line_start
    return text[start : start + limit]
