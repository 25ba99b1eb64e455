"""Budgets of a model: how many slots each head gets, measured once on some documents.

The mean error curves of the documents replace those of the document that is compressed, which then
need not be computed. Sizes are fractions of the text.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import fingerprint
from kvcat.compress.budgets import Curve, attention_and_curves, share_out_segments, slot_sizes
from kvcat.compress.heads import HeadIndex, Heads
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import fitted_queries
from kvcat.compress.trace import Trace
from kvcat.compress.tracing import trace
from kvcat.errors import InputError, whole
from kvcat.files import expanded, read_json, write_json
from kvcat.models import model_name
from kvcat.options import budget_files, typed_fields
from kvcat.text.encoder import TextEncoder, opening_ids
from kvcat.types import Int, Tensor

FORMAT = "kvcat-budgets-1"
GRID_STEP = 2**0.5
CHARACTERS_PER_TOKEN = 8  # more than any text needs on average
_LEAST_ERROR = 1e-9  # relative to that of the smallest size


@dataclass(frozen=True)
class CalibratedBudgets:
    """The mean error of every head of a model by number of slots.

    Args:
        model, fingerprint: name of the model, and the fingerprint of its weights.
        num_documents: documents that the errors are means of.
        num_tokens: tokens of each.
        sizes: numbers of slots of these, ascending from 1 to all.
        errors: by layer and KV head, the error at each size.
    """

    model: str
    fingerprint: str
    num_documents: int
    num_tokens: int
    sizes: tuple[int, ...]
    errors: tuple[tuple[tuple[float, ...], ...], ...]

    def allocate(self, prefix: Prefix, num_slots: int) -> dict[HeadIndex, int]:
        """The number of slots of every head of a prefix; their average is ``num_slots``.

        A size is looked up by its fraction of the text, between the measured sizes on a logarithmic
        scale.

        Args:
            num_slots: in [1, slots of the fullest head].

        Raises:
            InputError: another model, or an average below the smallest size that was measured.
        """
        self.check_fingerprint(prefix.trace.fingerprint, model_name(prefix.trace.model))
        self._check_prefix(prefix, num_slots)
        prefix_len = prefix.max_slots
        counts_of_layers = [layer.present_counts().tolist() for layer in prefix.layers]
        curves: dict[HeadIndex, Curve] = {}
        candidates = slot_sizes(num_slots, prefix_len)
        for layer, counts_of_examples in enumerate(counts_of_layers):
            for example, counts in enumerate(counts_of_examples):
                for head, count in enumerate(counts):
                    sizes = sorted({min(size, count) for size in candidates})
                    errors = self._errors_at(layer, head, sizes, prefix_len)
                    curves[layer, example, head] = dict(zip(sizes, errors, strict=True))
        (slots,) = share_out_segments([curves], num_slots, candidates, by_head=False)
        return slots

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
        # with all slots the error is 0, which has no logarithm
        floor = max(_LEAST_ERROR * errors[0], np.finfo(np.float64).tiny)
        log_errors = np.log(errors.clip(floor))
        log_fractions = np.log(np.array(self.sizes) / self.num_tokens)
        wanted = np.log(np.array(sizes) / prefix_len)
        return np.exp(np.interp(wanted, log_fractions, log_errors)).tolist()

    @cached_property
    def digest(self) -> str:
        """A hash of the content."""
        text = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a JSON file with a checksum; it is replaced atomically."""
        write_json(Path(path), self._content())

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
        del content["format"]
        return cls(**typed_fields(get_type_hints(cls), content, path))


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
        texts: documents.
        num_documents: most documents to use.
        num_tokens: of an excerpt, at a random place of each document; at least 2.

    Raises:
        InputError: no document is long enough.
    """
    if whole("num_documents", num_documents) < 1 or whole("num_tokens", num_tokens) < 2:
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
    return attention_and_curves(heads, sizes)[1]


@lru_cache(maxsize=8)
def _load(path: Path, version: tuple[int, ...]) -> CalibratedBudgets:  # noqa: ARG001
    return CalibratedBudgets.load(path)


def load_budgets(path: str | Path) -> CalibratedBudgets:
    """As ``CalibratedBudgets.load``; a file is read again when it has changed.

    Raises:
        InputError: as there.
    """
    path = expanded(path)
    status = path.stat()
    return _load(path.resolve(), (status.st_mtime_ns, status.st_size, status.st_ino))


def budget_digests(method: str) -> str:
    """The content of all files of budgets in the text of a method; empty without any.

    Results made with a file depend on it, and the name of the file may stay the same.

    Raises:
        InputError: as ``load_budgets``.
    """
    return ", ".join(load_budgets(file).digest[:16] for file in budget_files(method))
