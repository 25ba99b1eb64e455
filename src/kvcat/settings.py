"""How a document is compressed and an answer decoded, for Python and for the command line.

Nothing here imports torch, so that help texts and errors about options appear immediately.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, get_args

import tyro

from kvcat.errors import InputError, check_in, check_least, check_one_of, finite, whole
from kvcat.option_types import (
    CacheBits,
    Count,
    Fraction,
    Megabytes,
    Nats,
    Protect,
    Seed,
    Supervision,
    Unset,
)
from kvcat.options import DocumentSupervision, parse_spec

MOST_STOPS = 16
DEFAULT_METHOD = "attention-matching"
"""The method if none is named."""
DEFAULT_KEEP = 0.2
"""Fraction of the slots that is kept if no size is given."""
DEFAULT_BITS = 8
"""Bits of keys and values if neither bits nor a size in bytes is given."""
_KEEP_HELP = f"Fraction of the KV slots to KEEP, in (0, 1]; {DEFAULT_KEEP} if no size is given."


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """How caches are made: what one document and the documents of a corpus have in common.

    Args:
        method: NAME or NAME,option=value,...; docs/compress.md describes the options.
        keep_ratio: Fraction of the KV slots to keep, in (0, 1]; a fifth if no size is given.
        num_slots: Instead of --keep: number of slots per layer and head.
        bits: Bits of keys and values; 16: the type of the model; auto: 8 or, for a
            size in bytes, 8 or 4, as is best for it.
        supervision: Queries that caches are fitted to: those of the text repeated after an
            instruction (reconstruction), or those of the text itself (self).
        chat: Put document and prompts into the tokenizer's chat template, as user turns.
        room: Number of tokens that prompt and answer may have. Only models whose rotary factors
            depend on the length (LongRoPE), or with sliding windows, need it.
        in_pieces: Compress each piece of a long document, 2,048 tokens, before the next one is
            read: bounded memory and less time, but less exact (docs/long-documents.md).
        seed: Seed of all random draws.

    Raises:
        InputError: a value that is not valid, or two that exclude each other.
    """

    method: str = DEFAULT_METHOD
    keep_ratio: Annotated[Unset[Fraction], tyro.conf.arg(name="keep", help=_KEEP_HELP)] = None
    num_slots: Annotated[Unset[Count], tyro.conf.arg(name="slots")] = None
    bits: CacheBits = "auto"
    supervision: Supervision = "reconstruction"
    chat: bool = False
    room: Unset[Count] = None
    in_pieces: bool = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        sizes = [name for name in self._size_names if getattr(self, name) is not None]
        if len(sizes) > 1:
            raise InputError(f"give one of {' and '.join(sizes)}")
        if self.keep_ratio is not None:
            check_in("(0, 1]", keep_ratio=self.keep_ratio)
        least = {"num_slots": 1, "room": 0, "seed": 0}
        for name, smallest in least.items():
            number = getattr(self, name)
            if number is not None:
                check_least(smallest, **{name: number})
                object.__setattr__(self, name, int(number))  # JSON does not take numpy's numbers
        check_one_of("supervision", self.supervision, get_args(DocumentSupervision))
        check_one_of("bits", self.bits, get_args(CacheBits))
        name, options = parse_spec(self.method)
        if self.bits != "auto" and "bits" in options:
            raise InputError(f"bits {self.bits} and the bits of {self.method}: give one of them")
        self.check_learner(self.learner)
        if self.in_pieces and self.of_whole:
            raise InputError(
                f"in_pieces and {self.of_whole}: the latter needs the whole document at once"
            )

    def check_learner(self, learner: str | None) -> None:
        """Raise an ``InputError`` if a setting or a method has no predictions to learn from."""
        if self.supervision == "self" and learner is not None:
            raise InputError(
                f"{learner} needs supervision reconstruction: the document alone leaves nothing "
                "to predict"
            )

    @property
    def _size_names(self) -> tuple[str, ...]:
        """The settings of which one says how large a cache is."""
        return ("keep_ratio", "num_slots")

    @property
    def learner(self) -> str | None:
        """The setting that needs the copy of the document which follows it in reconstruction.

        What the method needs is an attribute of its class (``document_compressor``).
        """
        return None

    @property
    def size(self) -> dict[str, Any]:
        """The keep ratio or the number of slots, as the arguments of a compressor."""
        if self.num_slots is not None:
            return {"num_slots": self.num_slots}
        return {"keep_ratio": DEFAULT_KEEP if self.keep_ratio is None else self.keep_ratio}

    @property
    def of_whole(self) -> str:
        """A setting that is given and needs the whole document at once; empty: there is none."""
        return self.learner or ("supervision self" if self.supervision == "self" else "")

    def method_options(self) -> tuple[str, dict[str, Any]]:
        """The name of the method and its options, with the bits."""
        name, options = parse_spec(self.method)
        if self.bits not in ("auto", "16"):
            options["bits"] = self.bits
        return name, options


@dataclass(frozen=True, kw_only=True)
class DocumentSettings(CacheSettings):
    """How the cache of a document is made (``kvcat.compress_document``).

    Args:
        max_kl: Instead of --keep: find the smallest cache with at most this held-out KL per token.
        max_megabytes: Instead of --keep: largest size of keys, values, scales and log-bias in
            millions of bytes; chooses slots and, unless --bits is given, bits.
        protect: What stays exact in every head and layer, inside the budget: system, all that the
            chat template writes before the document (needs --chat). By default nothing.
        passages: Texts that stay exact wherever they occur in the document.

    Raises:
        InputError: a value that is not valid, or two that exclude each other.
    """

    max_kl: Unset[Nats] = None
    max_megabytes: Annotated[Unset[Megabytes], tyro.conf.arg(name="mb")] = None
    protect: Unset[Protect] = None
    passages: Annotated[tuple[str, ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_kl is not None:
            check_in("[0, inf)", max_kl=self.max_kl)
        if self.max_megabytes is not None:
            check_in("(0, inf)", max_megabytes=self.max_megabytes)
        if self.protect is not None:
            check_one_of("protect", self.protect, get_args(Protect))
            if not self.chat:
                raise InputError(
                    "protect system needs chat: only a chat template has a system turn"
                )

    @property
    def has_protection(self) -> bool:
        """Whether some slots stay exact."""
        return self.protect is not None or bool(self.passages)

    @property
    def _size_names(self) -> tuple[str, ...]:
        return ("keep_ratio", "num_slots", "max_kl", "max_megabytes")

    @property
    def learner(self) -> str | None:
        """The setting that needs the copy of the document which follows it in reconstruction."""
        return "max_kl" if self.max_kl is not None else None

    @property
    def of_whole(self) -> str:
        """A setting that is given and needs the whole document at once; empty: there is none."""
        if self.passages:
            return "passages to protect"
        for name in ("max_megabytes", "protect"):
            if getattr(self, name) is not None:
                return name
        return super().of_whole

    @classmethod
    def of(cls, settings: CacheSettings) -> "DocumentSettings":
        """The settings of each document of a corpus."""
        names = CacheSettings.__dataclass_fields__
        values = asdict(settings)
        return cls(**{name: values[name] for name in names})


@dataclass(frozen=True)
class Sampling:
    """How an answer is decoded.

    Args:
        temperature: 0 for greedy decoding, or from 0.001 to 1000.
        top_p: sample from the most likely tokens with this total probability, in (0, 1].
        max_new_tokens: largest number of tokens, at least 1.
        stop: texts or control tokens at which the answer ends, without them; at most 16.
        seed: of the draws.

    Raises:
        InputError: a value that is not valid.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        temperature = finite("temperature", self.temperature)
        if temperature != 0 and not 1e-3 <= temperature <= 1e3:
            raise InputError(
                f"temperature is {self.temperature:g}; it must be 0, or lie in [0.001, 1000]"
            )
        check_in("(0, 1]", top_p=self.top_p)
        check_least(1, max_new_tokens=self.max_new_tokens)
        if "" in self.stop or len(self.stop) > MOST_STOPS:
            raise InputError(f"stop texts must not be empty, and at most {MOST_STOPS}")
        if not 0 <= whole("seed", self.seed) < 2**63:
            raise InputError(f"seed is {self.seed}; it must be at least 0 and below 2^63")
