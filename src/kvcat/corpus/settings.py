"""The settings with which every cache of a store is made."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from transformers import PreTrainedTokenizerBase

from kvcat.choices import DocumentSupervision
from kvcat.compress import Compressor, seeded_compressor
from kvcat.compress.calibration import budget_digests, budget_files, load_budgets
from kvcat.errors import InputError, check_least, check_one_of, finite
from kvcat.options import parse_spec
from kvcat.text.template import ChatTemplate

DEFAULT_KEEP = 0.1


@dataclass(frozen=True, kw_only=True)
class CorpusSettings:
    """How the caches of a store are made; a store has one such setting and one model.

    Args:
        method: NAME or NAME,option=value,... as ``make_compressor`` reads it.
        keep_ratio: fraction of the slots to keep, in (0, 1]; 0.1 if no number of slots is named.
        num_slots: instead, slots per layer and head on average, at least 1.
        bits: bits of keys and values in packed codes ("8" or "4"); None: ordinary numbers.
        supervision: as in ``document_trace``; a document that is too long to be repeated gets
            "self", and its row says so.
        chat: documents open a user's turn in the tokenizer's chat template.
        room: tokens of question and answer, for rotary factors that depend on the length.
        seed: of randomised methods.
        check: measure each document's KL on held-out positions (``CorpusCompressor``).
        budgets: digest of the method's files of budgets when the settings were made, with which all
            caches are made; empty without such a file.

    Raises:
        InputError: a value that is not valid.
    """

    method: str = "attention-matching"
    keep_ratio: float | int | None = None
    num_slots: int | None = None
    bits: str | None = None
    supervision: str = "reconstruction"
    chat: bool = False
    room: int | None = None
    seed: int = 0
    check: bool = False
    budgets: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if self.keep_ratio is not None and self.num_slots is not None:
            raise InputError("give one of keep_ratio and num_slots")
        if self.keep_ratio is None and self.num_slots is None:
            object.__setattr__(self, "keep_ratio", DEFAULT_KEEP)
        if self.keep_ratio is not None and not 0 < finite("keep_ratio", self.keep_ratio) <= 1:
            raise InputError(f"keep_ratio must be in (0, 1], not {self.keep_ratio}")
        least = {"num_slots": 1, "room": 0, "seed": 0}
        for name, smallest in least.items():
            number = getattr(self, name)
            if number is not None:
                check_least(smallest, **{name: number})
                object.__setattr__(self, name, int(number))  # numpy's numbers are no JSON
        check_one_of("supervision", self.supervision, get_args(DocumentSupervision))
        name, options = parse_spec(self.method)
        if self.bits is not None and "bits" in options:
            raise InputError(f"bits {self.bits} and the bits of {self.method}: give one of them")
        if self.supervision == "self" and self.needs_copy:
            what = "check" if self.check else name
            raise InputError(
                f"{what} needs supervision reconstruction: the document alone leaves nothing to "
                "predict"
            )
        self.compressor()
        object.__setattr__(self, "budgets", budget_digests(self.method))

    @property
    def needs_copy(self) -> bool:
        """Whether a cache needs the copy of its document that follows it in reconstruction."""
        return self.check or self.compressor().needs_predictions

    def compressor(self) -> Compressor:
        """The method with its options, bits and seed.

        Raises:
            InputError: an unknown method or option, or a value that is not valid.
        """
        name, options = parse_spec(self.method)
        if self.bits is not None:
            options["bits"] = self.bits
        return seeded_compressor(name, options, self.seed)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise an ``InputError`` if documents need a chat template that the tokenizer lacks."""
        if self.chat:
            ChatTemplate(tokenizer)

    def check_model(self, fingerprint: str, model: str) -> None:
        """Raise an ``InputError`` if the method's file of budgets belongs to another model.

        Args:
            fingerprint, model: fingerprint and name of the model.
        """
        for file in budget_files(self.method):
            load_budgets(file).check_fingerprint(fingerprint, model)

    def record(self) -> dict[str, Any]:
        """The settings as JSON values by name; with a file of budgets they hold its digest."""
        values = asdict(self)
        if not self.budgets:
            del values["budgets"]
        return values

    def check_budgets(self) -> None:
        """Raise an ``InputError`` if a file of budgets is no longer what it was."""
        if budget_digests(self.method) != self.budgets:
            files = ", ".join(budget_files(self.method))
            raise InputError(
                f"the budgets in {files} changed during the run: caches of one store are made with "
                "one content; put the earlier file back, or choose another store"
            )


def check_same(address: str, recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise an ``InputError`` that names the first setting in which a store differs.

    Args:
        address: of the store.
        recorded: settings of the store.
        wanted: settings to compare; a "fingerprint" among them decides about the model, whose name
            does not count.
    """
    for name, value in wanted.items():
        if name == "model" or recorded.get(name) == value:
            continue
        known = recorded.get(name)
        if name == "fingerprint":
            name = "model"
            known = f"{recorded.get('model')} ({str(known)[:12]})"
            value = f"{wanted.get('model')} ({str(value)[:12]})"
        raise InputError(
            f"store {address} was made with {name} {known}, not {value}: choose another store, or "
            "the same setting"
        )
