"""Budgets of a model: how many slots each head gets, measured once on some documents.

The mean error curves of the documents replace those of the document that is compressed, which then
need not be computed. Sizes are fractions of the text.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import fingerprint
from kvcat.compress.budgets import Curve, attention_and_curves, share_out, slot_sizes
from kvcat.compress.heads import HeadIndex, Heads
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import fitted_queries
from kvcat.compress.trace import Trace
from kvcat.compress.tracing import trace
from kvcat.errors import InputError
from kvcat.files import read_json, write_json
from kvcat.models import model_name
from kvcat.tokenization import TextEncoder, opening_ids
from kvcat.types import Int, Tensor

FORMAT = "kvcat-budgets-1"
GRID_STEP = 2**0.5
CHARACTERS_PER_TOKEN = 8  # more than any text needs on average
_BUDGETS = re.compile(r"\bbudgets=([^,\]]+)")
_LEAST_ERROR = 1e-9  # relative to that of the smallest size


class TwoSizes(NamedTuple):
    """Numbers of slots of two kinds of layers."""

    error: float  # total of all heads
    long: int
    short: int


@dataclass(frozen=True)
class CalibratedBudgets:
    """The mean error of every head of a model by number of slots.

    Args:
        model, fingerprint: name of the model, and the fingerprint of its weights.
        num_documents: documents that the errors are means of.
        num_tokens: tokens of each.
        sizes: numbers of slots of these, ascending from 1 to all.
        errors: by layer and KV head, the error at each size.
        long_layers: the heads of these layers all get the same number of slots, and those of the
            others another, smaller one, for engines with two kinds of layers; (): every head its
            own.
    """

    model: str
    fingerprint: str
    num_documents: int
    num_tokens: int
    sizes: tuple[int, ...]
    errors: tuple[tuple[tuple[float, ...], ...], ...]
    long_layers: tuple[int, ...] = ()

    def allocate(self, prefix: Prefix, num_slots: int) -> dict[HeadIndex, int]:
        """The number of slots of every head of a prefix; their average is ``num_slots``.

        A size is looked up by its fraction of the text, between the measured sizes on a logarithmic
        scale.

        Args:
            prefix: what is compressed.
            num_slots: in [1, slots of the fullest head].

        Raises:
            InputError: another model, or an average below the smallest size that was measured.
        """
        self.check_fingerprint(prefix.trace.fingerprint, model_name(prefix.trace.model))
        self._check_prefix(prefix, num_slots)
        prefix_len = prefix.max_slots
        counts_of_layers = [layer.present_counts().tolist() for layer in prefix.layers]
        if self.long_layers:
            _, long, short = self.two_sizes(num_slots, prefix_len)
            return {
                (layer, example, head): min(count, long if layer in self.long_layers else short)
                for layer, counts_of_examples in enumerate(counts_of_layers)
                for example, counts in enumerate(counts_of_examples)
                for head, count in enumerate(counts)
            }
        curves: dict[HeadIndex, Curve] = {}
        candidates = slot_sizes(num_slots, prefix_len)
        for layer, counts_of_examples in enumerate(counts_of_layers):
            for example, counts in enumerate(counts_of_examples):
                for head, count in enumerate(counts):
                    sizes = sorted({min(size, count) for size in candidates})
                    errors = self._errors_at(layer, head, sizes, prefix_len)
                    curves[layer, example, head] = dict(zip(sizes, errors, strict=True))
        return share_out(curves, num_slots, prefix_len, by_layer=False)

    def two_sizes(self, num_slots: int, prefix_len: int) -> TwoSizes:
        """The numbers of slots of the heads of long layers and of the others.

        Of all pairs whose average is at most ``num_slots``, the pair with the smallest total error.
        """
        sizes = np.arange(1, prefix_len + 1)
        errors = [np.zeros(prefix_len), np.zeros(prefix_len)]  # of short and of long layers
        num_heads = [0, 0]
        for layer, of_layer in enumerate(self.errors):
            is_long = layer in self.long_layers
            num_heads[is_long] += len(of_layer)
            for head in range(len(of_layer)):
                errors[is_long] += self._errors_at(layer, head, sizes.tolist(), prefix_len)
        short = sizes[:num_slots]
        num_left = sum(num_heads) * num_slots - num_heads[False] * short
        long = np.minimum(num_left // num_heads[True], prefix_len)
        totals = errors[False][short - 1] + errors[True][long - 1]
        best = totals.argmin()
        return TwoSizes(float(totals[best]), int(long[best]), int(short[best]))

    def check_model(self, model: PreTrainedModel) -> None:
        """Reject another model with an ``InputError``."""
        self.check_fingerprint(fingerprint(model), model_name(model))

    def check_fingerprint(self, known: str, name: str) -> None:
        """Reject a model of another fingerprint with an ``InputError``.

        Args:
            known: fingerprint of the model.
            name: of the model, for the message.
        """
        if self.fingerprint != known:
            raise InputError(
                f"the budgets belong to {self.model} (fingerprint {self.fingerprint[:12]}), not to "
                f"{name} ({known[:12]})"
            )

    def _check_prefix(self, prefix: Prefix, num_slots: int) -> None:
        """Reject a prefix of other layers and heads, and an average that was not measured."""
        heads = [layer.keys.shape[1] for layer in prefix.layers]
        measured = [len(of_layer) for of_layer in self.errors]
        if heads != measured:
            raise InputError(
                f"the budgets have {len(measured)} layers of {max(measured, default=0)} heads, the "
                f"prefix {len(heads)} of {max(heads)}"
            )
        smallest = self.sizes[0] / self.num_tokens
        if num_slots / prefix.max_slots < smallest:
            raise InputError(
                f"the budgets of {self.model} hold sizes from {smallest:.2g} of a text, measured "
                f"on {self.num_tokens} tokens; {num_slots} of {prefix.max_slots} slots are fewer: "
                "choose budgets=adaptive, or calibrate with more --tokens"
            )

    def _errors_at(self, layer: int, head: int, sizes: list[int], prefix_len: int) -> list[float]:
        """The errors of a head at numbers of slots of a prefix."""
        errors = np.array(self.errors[layer][head])
        floor = max(_LEAST_ERROR * errors[0], np.finfo(np.float64).tiny)
        log_errors = np.log(errors.clip(floor))
        log_fractions = np.log(np.array(self.sizes) / self.num_tokens)
        wanted = np.log(np.array(sizes) / prefix_len)
        return np.exp(np.interp(wanted, log_fractions, log_errors)).tolist()

    def in_two_sizes(self) -> "CalibratedBudgets":
        """The same budgets with long layers, chosen for a tenth of the text.

        Their number is such that the smaller kind of layers divides all: engines hold layers in
        groups of equally many.
        """
        num_slots = max(1, self.num_tokens // 10)
        curves: dict[HeadIndex, Curve] = {}
        sizes = slot_sizes(num_slots, self.num_tokens)
        for layer, of_layer in enumerate(self.errors):
            for head in range(len(of_layer)):
                errors = self._errors_at(layer, head, sizes, self.num_tokens)
                curves[layer, 0, head] = dict(zip(sizes, errors, strict=True))
        slots = share_out(curves, num_slots, self.num_tokens, by_layer=True)
        num_layers = len(self.errors)
        by_need = sorted(range(num_layers), key=lambda layer: -slots[layer, 0, 0])
        choices = []
        for num_long in range(1, num_layers):
            if num_layers % min(num_long, num_layers - num_long) == 0:
                choice = replace(self, long_layers=tuple(sorted(by_need[:num_long])))
                error = choice.two_sizes(num_slots, self.num_tokens).error
                choices.append((error, num_long, choice))
        if not choices:
            raise InputError("a model of one layer has no long and short layers")
        return min(choices)[2]

    @cached_property
    def digest(self) -> str:
        """A hash of the content."""
        return _checksum(self._content())

    def save(self, path: str | Path) -> None:
        """Write a JSON file with a checksum; it is replaced atomically."""
        write_json(Path(path), {**self._content(), "sha256": self.digest})

    def _content(self) -> dict[str, Any]:
        """The budgets as a JSON object."""
        return {"format": FORMAT, **json.loads(json.dumps(asdict(self)))}

    @classmethod
    def load(cls, path: str | Path) -> "CalibratedBudgets":
        """The budgets in a file of ``save``.

        Raises:
            InputError: no such file, another one, or a damaged one.
        """
        content = read_json(Path(path))
        if content.get("format") != FORMAT:
            raise InputError(
                f"{path} is no file of `kvcat budgets` of format {FORMAT}: make the budgets again"
            )
        checksum = content.pop("sha256", None)
        if checksum != _checksum(content):
            raise InputError(f"{path} is damaged: its content does not have its checksum")
        del content["format"]
        names = {field.name for field in fields(cls)}
        for name in sorted(names ^ set(content)):
            what = "lacks" if name in names else "has"
            raise InputError(f"{path} is of another version of kvcat: it {what} {name!r}")
        errors = tuple(
            tuple(tuple(of_head) for of_head in of_layer) for of_layer in content.pop("errors")
        )
        sizes = tuple(content.pop("sizes"))
        long_layers = tuple(content.pop("long_layers"))
        return cls(sizes=sizes, errors=errors, long_layers=long_layers, **content)


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    num_documents: int = 50,
    num_tokens: int = 1024,
    seed: int = 0,
) -> CalibratedBudgets:
    """The budgets of a model, from the mean error curves of documents.

    Args:
        model, tokenizer: the ones that will answer.
        texts, num_documents, num_tokens, seed: as in ``excerpts``.

    Raises:
        InputError: no document is long enough, or an excerpt too long for the model's positions.
    """
    return calibrate_on(
        model,
        excerpts(tokenizer, texts, num_documents=num_documents, num_tokens=num_tokens, seed=seed),
    )


def excerpts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    num_documents: int,
    num_tokens: int,
    seed: int = 0,
) -> list[Int[Tensor, "1 tokens"]]:
    """Token ids of an excerpt of each of the first texts that are long enough.

    Args:
        tokenizer: the model's.
        texts: documents.
        num_documents: most documents to use.
        num_tokens: of an excerpt, at a random place of each document; at least 2.
        seed: of the places.

    Raises:
        InputError: no document is long enough.
    """
    if num_documents < 1 or num_tokens < 2:
        raise InputError(
            "calibration needs a document of at least 2 tokens, not "
            f"{num_documents} of {num_tokens}"
        )
    sample = list(islice(_excerpts(tokenizer, texts, num_tokens, seed), num_documents))
    if not sample:
        raise InputError(f"no document has {num_tokens} tokens: name fewer --tokens")
    return sample


def calibrate_on(
    model: PreTrainedModel, documents: Sequence[Int[Tensor, "1 tokens"]]
) -> CalibratedBudgets:
    """The budgets of a model, from the mean error curves of documents of equal length.

    Args:
        model: the one that will answer.
        documents: token ids of at least one document.

    Raises:
        InputError: documents too long for the model's positions.
    """
    num_tokens = documents[0].shape[1]
    sizes = calibration_sizes(num_tokens)
    totals: dict[HeadIndex, np.ndarray] = {}
    for ids in documents:
        document = trace(model, ids.to(model.device), supervision="self")
        for head, curve in document_curves(document, sizes).items():
            totals[head] = totals.get(head, 0.0) + np.array(list(curve.values()))
    num_layers = 1 + max(layer for layer, _, _ in totals)
    by_layer: list[list[tuple[float, ...]]] = [[] for _ in range(num_layers)]
    for (layer, _, _), total in sorted(totals.items(), key=itemgetter(0)):
        by_layer[layer].append(tuple((total / len(documents)).tolist()))
    return CalibratedBudgets(
        model=model_name(model),
        fingerprint=fingerprint(model),
        num_documents=len(documents),
        num_tokens=num_tokens,
        sizes=tuple(sizes),
        errors=tuple(map(tuple, by_layer)),
    )


def _excerpts(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], num_tokens: int, seed: int
) -> Iterator[Int[Tensor, "1 tokens"]]:
    """Token ids of an excerpt of every text that is long enough."""
    draw = random.Random(seed)
    encode = TextEncoder(tokenizer)
    opening = opening_ids(tokenizer)
    length = num_tokens - len(opening)
    num_characters = CHARACTERS_PER_TOKEN * num_tokens
    for text in texts:
        start = draw.randint(0, max(0, len(text) - num_characters))
        ids = encode(text[start : start + num_characters])
        if len(ids) >= length:
            yield torch.tensor([[*opening, *ids[:length]]])


def calibration_sizes(num_tokens: int) -> list[int]:
    """Numbers of slots from 1 to all of a text, each about sqrt(2) times the one before."""
    sizes = {num_tokens}
    size = 1.0
    while size < num_tokens:
        sizes.add(round(size))
        size *= GRID_STEP
    return sorted(sizes)


def document_curves(trace: Trace, sizes: list[int]) -> dict[HeadIndex, Curve]:
    """The error curves of a trace, as ``AttentionMatching`` allocates slots by them."""
    prefix = Prefix.of(trace)
    heads = Heads(prefix, fitted_queries(prefix, own_weight=None, by_share=True))
    return attention_and_curves(heads, heads.groups_for_scores(), sizes)[1]


@lru_cache(maxsize=8)
def _load(path: Path, version: tuple[int, ...]) -> CalibratedBudgets:  # noqa: ARG001
    return CalibratedBudgets.load(path)


def load_budgets(path: str | Path) -> CalibratedBudgets:
    """As ``CalibratedBudgets.load``; a file is read again when it has changed.

    Raises:
        InputError: as there.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"no file of budgets {path}")
    status = path.stat()
    return _load(path.resolve(), (status.st_mtime_ns, status.st_size, status.st_ino))


def budget_files(method: str) -> list[str]:
    """The files of budgets in the text of a method, also in brackets."""
    return [text for text in _BUDGETS.findall(method) if text not in ("equal", "adaptive")]


def budget_digests(method: str) -> str:
    """The content of all files of budgets in the text of a method; empty without any.

    Results made with a file depend on it, and the name of the file may stay the same.

    Raises:
        InputError: as ``load_budgets``.
    """
    return ", ".join(load_budgets(file).digest[:16] for file in budget_files(method))


def _checksum(content: dict[str, Any]) -> str:
    """A hash of a JSON object."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
