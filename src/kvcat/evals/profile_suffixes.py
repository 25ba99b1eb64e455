"""Prefixes of a text and the suffixes behind them that a compressibility profile is measured on, drawn once for all."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvcat.errors import InputError
from kvcat.evals.suffix import Window
from kvcat.models import hidden_states, logits_from_hidden
from kvcat.types import Bool, Int, Tensor

KINDS = {
    "model": "continuations drawn from one model, the same for all, behind the whole prefix, at temperature 1",
    "true": "the text that follows the prefix; one, never fitted to",
    "other": "pieces of the text from elsewhere",
    "random": "tokens drawn evenly from the vocabulary",
}
"""Kinds of suffixes: the definition asks for every suffix, of which these are samples."""

ROLES = ("fit", "choice", "test")
"""What suffixes are for: caches are fitted to the first, chosen by the second, and judged on the third."""

TextTokens = Sequence[tuple[str, Sequence[int]]]
"""Name and tokens of every document."""


@dataclass(frozen=True)
class SuffixPlan:
    """How many suffixes of which kinds are drawn behind every prefix.

    Args:
        prefix_len: tokens n of a prefix, at least 1.
        suffix_len: tokens of a suffix, at least 2; its first k tokens are a suffix of length k as well.
        kinds: of the suffixes that are judged on, names in ``KINDS``.
        fit_kinds: those of them that caches are fitted to and chosen by; never "true".
        num_fit: suffixes of each fitted kind that caches are fitted to, at least 1.
        num_choice: further ones that choose between caches, at least 1.
        num_test: suffixes of each kind that caches are judged on, at least 1; of "true" there is one.
        seed: of the draw.

    Raises:
        InputError: a value out of its range, an unknown kind, or none that can be fitted to.
    """

    prefix_len: int = 128
    suffix_len: int = 16
    kinds: tuple[str, ...] = tuple(KINDS)
    fit_kinds: tuple[str, ...] = ("model", "other", "random")
    num_fit: int = 16
    num_choice: int = 8
    num_test: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"prefix_len": 1, "suffix_len": 2, "num_fit": 1, "num_choice": 1, "num_test": 1, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {bound}")
        for name in ("kinds", "fit_kinds"):
            given = getattr(self, name)
            for kind in given:
                if kind not in KINDS:
                    raise InputError(f"no kind of suffixes {kind!r}; there are {', '.join(KINDS)}")
            if not given or len(set(given)) < len(given):
                raise InputError(f"{name} must name at least one kind, each once, not {', '.join(given) or 'none'}")
        for kind in self.fit_kinds:
            if kind == "true":
                raise InputError("caches are not fitted to the true continuation: it is there to judge them")
            if kind not in self.kinds:
                raise InputError(f"caches are fitted to {kind!r} suffixes, which are not among those judged on")

    def count(self, kind: str, role: str) -> int:
        """Suffixes of a kind in a role."""
        if kind == "true":
            return int(role == "test")
        return getattr(self, f"num_{role}") if role == "test" or kind in self.fit_kinds else 0


@dataclass(frozen=True)
class PrefixSuffixes:
    """One prefix a and the suffixes b behind it.

    Args:
        document: name of the document, the unit that intervals resample.
        name: position of the prefix's first token in it.
        prefix: token ids.
        suffixes: kind to role to suffixes, token ids, all of one length.
    """

    document: str
    name: str
    prefix: tuple[int, ...]
    suffixes: Mapping[str, Mapping[str, Sequence[Sequence[int]]]]

    def tokens(self, kind: str, role: str) -> Int[Tensor, "suffixes positions"]:
        """Suffixes of a kind in a role; an empty tensor where there are none."""
        rows = self.suffixes[kind].get(role, ())
        return torch.tensor(rows, dtype=torch.int64) if rows else torch.zeros(0, 0, dtype=torch.int64)

    def every(self, *roles: str) -> Int[Tensor, "suffixes positions"]:
        """All suffixes of some roles, of all kinds."""
        return torch.cat([rows for role in roles for kind in self.suffixes if len(rows := self.tokens(kind, role))])

    def held_out(self, kind: str, role: str) -> Bool[Tensor, "suffixes positions"]:
        """Which outputs of a kind's suffixes were not used before: to fit caches, and for the test to choose them.

        One suffix b gives as many outputs as it has tokens, those of its first k tokens for every k. Of a test suffix
        that begins as a fitted one does these outputs are no test. All outputs of fitted suffixes count as they are.

        Args:
            kind: of the suffixes.
            role: of the suffixes.
        """
        rows = self.tokens(kind, role)
        if role == "fit" or not len(rows):
            return torch.ones_like(rows, dtype=torch.bool)
        used = self.every(*ROLES[: ROLES.index(role)])
        starts = {tuple(row[:k]) for row in used.tolist() for k in range(1, len(row) + 1)}
        return torch.tensor([[tuple(row[:k]) not in starts for k in range(1, len(row) + 1)] for row in rows.tolist()])


def prefix_windows(documents: TextTokens, plan: SuffixPlan, num_prefixes: int) -> list[Window]:
    """Prefixes with the text that follows: of every document its beginning, then what comes behind these windows.

    Windows do not overlap. The first of every document comes before the second of any.

    Args:
        documents: names, unique, and tokens.
        plan: lengths.
        num_prefixes: most windows in all, at least 1.

    Raises:
        InputError: no document is long enough, or a number out of range.
    """
    if num_prefixes < 1:
        raise InputError(f"num_prefixes is {num_prefixes}; it must be at least 1")
    length = plan.prefix_len + plan.suffix_len
    longest = max((len(tokens) for _, tokens in documents), default=0)
    if longest < length:
        raise InputError(
            f"the text is too short: a prefix of {plan.prefix_len} and a suffix of {plan.suffix_len} tokens need "
            f"{length}, the longest of {len(documents)} documents has {longest}"
        )
    starts = [
        (start, rank)
        for rank, (_, tokens) in enumerate(documents)
        for start in range(0, len(tokens) - length + 1, length)
    ]
    chosen = [(documents[rank], start) for start, rank in sorted(starts)[:num_prefixes]]
    return [
        Window(name, str(start), tuple(tokens[start : start + length]), plan.prefix_len)
        for (name, tokens), start in chosen
    ]


def draw_suffixes(
    windows: Sequence[Window], documents: TextTokens, plan: SuffixPlan, model: PreTrainedModel, vocab_size: int
) -> list[PrefixSuffixes]:
    """The suffixes behind every prefix, each kind from a random stream of its own.

    Args:
        windows: of ``prefix_windows``.
        documents: the same.
        plan: kinds and numbers.
        model: draws the suffixes of kind "model".
        vocab_size: token ids drawn lie below it.

    Raises:
        InputError: too little text for the pieces from elsewhere.
    """
    drawn = []
    for window in windows:
        prefix = window.tokens[: plan.prefix_len]
        found: dict[str, dict[str, list[list[int]]]] = {}
        for kind in plan.kinds:
            counts = {role: plan.count(kind, role) for role in ROLES}
            total = sum(counts.values())
            generator = _generator(plan.seed, window, kind)
            if kind == "model":
                ids = torch.tensor([prefix])
                rows = sample_continuations(model, ids, total, plan.suffix_len, generator, vocab_size).tolist()
            elif kind == "true":
                rows = [list(window.tokens[plan.prefix_len :])]
            elif kind == "other":
                rows = _pieces(documents, window, total, plan.suffix_len, generator)
            else:
                rows = torch.randint(vocab_size, (total, plan.suffix_len), generator=generator).tolist()
            ends = {role: sum(counts[r] for r in ROLES[: rank + 1]) for rank, role in enumerate(ROLES)}
            found[kind] = {role: rows[ends[role] - counts[role] : ends[role]] for role in ROLES if counts[role]}
        drawn.append(PrefixSuffixes(window.document, window.name, prefix, found))
    return drawn


@torch.no_grad()
def sample_continuations(
    model: PreTrainedModel,
    prefix: Int[Tensor, "1 prefix"],
    count: int,
    length: int,
    generator: torch.Generator,
    vocab_size: int,
) -> Int[Tensor, "count length"]:
    """Continuations drawn from the model at temperature 1 behind the whole prefix.

    Args:
        model: a causal LM.
        prefix: token ids.
        count: continuations, at least 1.
        length: tokens of each, at least 1.
        generator: of the draws, on the CPU.
        vocab_size: token ids from it on are never drawn.
    """
    past = DynamicCache(config=model.config)
    hidden = hidden_states(model, input_ids=prefix.to(model.device), past_key_values=past, use_cache=True)
    past.batch_repeat_interleave(count)
    hidden, drawn = hidden[:, -1:].expand(count, -1, -1), []
    while True:
        logits = logits_from_hidden(model, hidden[:, -1])[:, :vocab_size]
        drawn.append(torch.multinomial(logits.double().softmax(-1).cpu(), 1, generator=generator))
        if len(drawn) == length:
            return torch.cat(drawn, 1)
        hidden = hidden_states(model, input_ids=drawn[-1].to(model.device), past_key_values=past, use_cache=True)


def write_suffixes(path: Path, plan: SuffixPlan, texts: Sequence[PrefixSuffixes]) -> None:
    """A JSON file of the plan and all prefixes with their suffixes, there as a whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"plan": asdict(plan), "texts": [asdict(text) for text in texts]}), encoding="utf-8")
    partial.replace(path)


def read_suffixes(path: Path, plan: SuffixPlan, windows: Sequence[Window]) -> list[PrefixSuffixes]:
    """What ``write_suffixes`` wrote for the same plan and prefixes, so that other models meet the same suffixes.

    Raises:
        InputError: no such file, a damaged one, another plan or other prefixes.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        there: dict[str, Any] = content["plan"]
        texts = [
            PrefixSuffixes(row["document"], row["name"], tuple(row["prefix"]), row["suffixes"])
            for row in content["texts"]
        ]
    except OSError as error:
        raise InputError(f"cannot read suffixes {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no file of suffixes: {type(error).__name__} {error}") from None
    for name, value in json.loads(json.dumps(asdict(plan))).items():
        if there.get(name) != value:
            raise InputError(f"{path} holds suffixes of another plan: {name} is {there.get(name)} there, {value} here")
    asked = [(window.document, window.tokens[: window.prefix_len]) for window in windows]
    if [(text.document, text.prefix) for text in texts] != asked:
        raise InputError(f"{path} holds suffixes of other prefixes than those of this text")
    return texts


def _pieces(
    documents: TextTokens, window: Window, count: int, length: int, generator: torch.Generator
) -> list[list[int]]:
    """Pieces of the documents that overlap neither the window nor one another."""
    first, size = int(window.name), len(window.tokens)
    places = [
        (tokens, start)
        for name, tokens in documents
        for start in range(0, len(tokens) - length + 1, length)
        if name != window.document or start + length <= first or start >= first + size
    ]
    if len(places) < count:
        raise InputError(
            f"the text is too short for {count} 'other' suffixes of {length} tokens: outside a prefix and what follows "
            f"it there is room for {len(places)}"
        )
    order = torch.randperm(len(places), generator=generator)[:count].tolist()
    return [list(places[index][0][places[index][1] : places[index][1] + length]) for index in order]


def _generator(seed: int, window: Window, kind: str) -> torch.Generator:
    digest = hashlib.sha256(json.dumps([seed, kind, window.document, window.tokens]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
