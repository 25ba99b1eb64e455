"""The settings with which every cache of a store is made."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from kvcat.compress import Compressor
from kvcat.compress.calibration import budget_digests, load_budgets
from kvcat.compress.document_cache import document_compressor
from kvcat.compress.documents import reconstruction
from kvcat.compress.pieces import check_layers
from kvcat.errors import InputError
from kvcat.options import budget_files
from kvcat.settings import DEFAULT_BITS, CacheSettings
from kvcat.text.template import ChatTemplate

_PROBE = "The cat, 2 dogs: Caf\u00e9?\n\n  A tree."  # which tokenizers write in different ways


@dataclass(frozen=True, kw_only=True)
class CorpusSettings(CacheSettings):
    """How the caches of a store are made; a store has one such setting and one model.

    A document that is too long to be repeated gets the supervision "self", and its row says so.

    Args:
        check: measure each document's KL on held-out positions (``CorpusCompressor``).
        budgets: digest of the method's files of budgets when the settings were made, with which all
            caches are made; empty without such a file.

    Raises:
        InputError: a value that is not valid.
    """

    check: bool = False
    budgets: str = field(init=False, default="")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compressor  # noqa: B018 its options are checked, before a corpus is read
        object.__setattr__(self, "budgets", budget_digests(self.method))

    @cached_property
    def compressor(self) -> Compressor:
        """The method with its options, bits and seed."""
        return document_compressor(self)

    @property
    def learner(self) -> str | None:
        """The setting that needs the copy of a document which follows it in reconstruction."""
        return "check" if self.check else None

    def check_supported(self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        """Raise an ``InputError`` for settings that a model or its tokenizer does not support.

        Args:
            tokenizer: which may lack the chat template that documents need.
            config: of the model, whose layers may rule out documents in pieces.
        """
        if self.chat:
            ChatTemplate(tokenizer)
        if self.in_pieces:
            check_layers(config)

    def check_model(self, fingerprint: str, model: str) -> None:
        """Raise an ``InputError`` if the method's file of budgets belongs to another model.

        Args:
            fingerprint, model: fingerprint and name of the model.
        """
        for file in budget_files(self.method):
            load_budgets(file).check_fingerprint(fingerprint, model)

    def digest_of(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """A hash of how a tokenizer writes a text, and with ``chat`` of its chat template."""
        ids = reconstruction(tokenizer, _PROBE).input_ids.tolist()
        template = ChatTemplate(tokenizer).digest if self.chat else ""
        return hashlib.sha256(repr((ids, template)).encode()).hexdigest()[:16]

    def record(self) -> dict[str, Any]:
        """The settings as JSON values by name; with a file of budgets they hold its digest."""
        values = {**asdict(self), **self.size}
        if self.bits == "auto":  # a corpus has no size in bytes
            values["bits"] = str(self.compressor.bits or DEFAULT_BITS)
        if not self.budgets:
            del values["budgets"]
        return values

    def check_budgets(self) -> None:
        """Raise an ``InputError`` if a file of budgets has changed."""
        if budget_digests(self.method) != self.budgets:
            files = ", ".join(budget_files(self.method))
            raise InputError(
                f"the budgets in {files} changed during the run: caches of one store are made with "
                "one content; put the earlier file back, or choose another store"
            )


def check_same(address: str, recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise an ``InputError`` that names the first setting in which a store differs.

    Args:
        recorded: settings of the store.
        wanted: settings to compare; a "fingerprint" among them decides about the model, whose name
            does not count. A "tokenizer" that is not known is not compared.
    """
    for name, value in wanted.items():
        known = recorded.get(name)
        if name == "model" or known == value:
            continue
        if name == "tokenizer":
            if not known:
                continue
            name = "tokenizer or chat template"
        if name == "fingerprint":
            name = "model"
            known = f"{recorded.get('model')} ({str(known)[:12]})"
            value = f"{wanted.get('model')} ({str(value)[:12]})"
        raise InputError(
            f"store {address} was made with {name} {known}, not {value}: choose another store, or "
            "the same setting"
        )
