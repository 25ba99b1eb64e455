"""Compressibility profile: the error of the best cache found for a prefix against the number of its slots.

(N, epsilon, r)-compressibility asks for a cache of r(n) slots of every prefix a that serves every suffix b alike:
|| M([a, b]) - M_{C,a}(b) || < epsilon. Here one cache is fitted to some sampled suffixes of a prefix, and its
error, the KL of the next-token distributions, is taken on others: an upper bound on that of the best cache on these
suffixes, and its worst a lower bound on the maximum over all suffixes for this cache.

References: KV-CAT, section "KV Cache Compression: Problem Formulation", definition of (N, epsilon, r)-compressibility.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from transformers import DynamicCache, PreTrainedModel

from kvcat.cache import CompactCache
from kvcat.compress import Compressor, GradientCompression, Trace, trace
from kvcat.compress.compare import replay_hidden
from kvcat.compress.trace import joined
from kvcat.data import Split
from kvcat.errors import InputError
from kvcat.evals.suffix import corpus_documents, data_name
from kvcat.evals.task import Baseline, Method, Prepared, Step, Task, Values, check_fits, check_least
from kvcat.models import frozen, hidden_states, logits_from_hidden
from kvcat.types import Bool, Float, Int, Tensor

KINDS = {
    "model": "continuations drawn from one model, the same for all, behind the whole prefix, at temperature 1",
    "true": "the text that follows the prefix; one, never fitted to",
    "other": "pieces of the text from elsewhere",
    "random": "tokens drawn evenly from the vocabulary",
}
"""Kinds of suffixes: the definition asks for every suffix, of which these are samples."""

ROLES = ("fit", "choice", "test")
"""What suffixes are for: caches are fitted to the first, chosen by the second, and judged on the third."""

METHODS = (
    Method("attention-matching"),
    Method("gradient", {"init": "attention-matching", "num_steps": 40, "lr": 0.03, "schedule": "cosine"}),
    Method("snapkv"),
    Method("h2o"),
)
"""Methods among which the best cache is looked for where no others are named."""

_LOGITS_AT_ONCE = 2**21


@dataclass(frozen=True)
class Plan:
    """Lengths, at least 1 and 2, and how many suffixes are drawn behind every prefix, at least 1 in every role.

    Args:
        prefix_len: tokens n of a prefix.
        suffix_len: tokens of a suffix; its first k tokens are a suffix of length k as well.
        num_fit: suffixes of each kind but the true one that caches are fitted to.
        num_choice: further ones that choose between caches.
        num_test: suffixes of each kind that caches are judged on; of "true" there is one.
        seed: of the draw, at least 0.
    """

    prefix_len: int = 128
    suffix_len: int = 16
    num_fit: int = 16
    num_choice: int = 8
    num_test: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(0, seed=self.seed)
        check_least(2, suffix_len=self.suffix_len)
        check_least(1, **{name: value for name, value in asdict(self).items() if name != "seed"})

    def counts(self, kind: str) -> dict[str, int]:
        """Suffixes of a kind by role."""
        return {"test": 1} if kind == "true" else {role: getattr(self, f"num_{role}") for role in ROLES}


@dataclass(frozen=True)
class Prefix:
    """One prefix a and the suffixes b behind it.

    Args:
        document: name of the document, the unit that intervals resample.
        name: position of the prefix's first token in it.
        prefix: token ids.
        suffixes: kind to role to suffixes, token ids, all of one length.
        stratum: group that is reported apart; may be empty.
    """

    document: str
    name: str
    prefix: tuple[int, ...]
    suffixes: Mapping[str, Mapping[str, Sequence[Sequence[int]]]]
    stratum: str = ""

    def rows(self, *roles: str) -> list[Sequence[int]]:
        """All suffixes of some roles, of all kinds."""
        return [row for role in roles for own in self.suffixes.values() for row in own.get(role, ())]

    def held_out(self, kind: str, role: str) -> Bool[Tensor, "suffixes positions"]:
        """Which outputs of a kind's suffixes were not used before: to fit caches, and for the test to choose them.

        One suffix b gives as many outputs as it has tokens, those of its first k tokens for every k. Of a
        test suffix that begins as a fitted one does these outputs are no test. All outputs of fitted suffixes
        count as they are.
        """
        used = self.rows(*ROLES[: ROLES.index(role)])
        starts = {tuple(row[:k]) for row in used for k in range(1, len(row) + 1)}
        rows = self.suffixes[kind][role]
        return torch.tensor([[tuple(row[:k]) not in starts for k in range(1, len(row) + 1)] for row in rows])


@dataclass(frozen=True)
class ProfileTask(Task):
    """Prefixes whose caches are judged on suffixes that they were not fitted to; ``make_task`` makes it.

    Values, for every kind of suffix: ``KIND_kl`` and ``KIND_kl_worst``, KL(dense || compact) in nats over all
    held-out outputs (``Prefix.held_out``), and ``KIND_num_outputs`` of them; the same of the suffixes for the
    choice and for the fit as ``KIND_choice_kl``, ``KIND_fit_kl``; ``num_slots``; and ``kl``, the mean of the
    kinds' means.

    Args:
        examples: the prefixes, of equal length, in the tokens that all models share.
        dataset: name of the text.
        plan: what they were drawn by.

    Raises:
        InputError: suffixes for the choice or for the test that are all fitted to.
    """

    examples: tuple[Prefix, ...]
    dataset: str
    plan: Plan
    evaluation: ClassVar[str] = "profile"
    tokenized: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for text in self.examples:
            for role in ("choice", "test"):
                if not any(text.held_out(kind, role).any() for kind, own in text.suffixes.items() if role in own):
                    raise InputError(
                        f"every suffix for the {role} behind token {text.name} of {text.document!r} is one that "
                        "caches are fitted to or chosen by: longer suffixes, or fewer to fit to, leave some held out"
                    )

    def describe(self) -> Mapping[str, Any]:
        """The plan."""
        return asdict(self.plan)

    def batch_key(self, example: Prefix) -> tuple[str, str]:
        """Every prefix is its own batch."""
        return example.document, example.name

    def check(self, label: str, model: PreTrainedModel, tokenizer: Any) -> None:  # noqa: ARG002
        """Refuse a model with too few positions or another vocabulary."""
        largest = max(max(*text.prefix, *map(max, text.rows(*ROLES))) for text in self.examples)
        length = self.plan.prefix_len + self.plan.suffix_len
        check_fits(label, model, num_tokens=length, largest=largest, what="prefixes and suffixes")

    def prepare(self, model: PreTrainedModel, tokenizer: Any, batch: Sequence[Prefix]) -> "PreparedPrefix":  # noqa: ARG002
        """A prefix on a model."""
        return PreparedPrefix(model, batch[0])


@dataclass(frozen=True)
class PreparedPrefix(Prepared):
    """A prefix on a model."""

    model: PreTrainedModel
    text: Prefix

    @cached_property
    def _fitted(self) -> Trace:
        """The dense forward over the prefix and every suffix that caches are fitted to, a row each."""
        suffixes = torch.tensor(self.text.rows("fit"))
        whole = torch.cat([torch.tensor(self.text.prefix).expand(len(suffixes), -1), suffixes], 1)
        return trace(self.model, whole.to(self.model.device), len(self.text.prefix))

    @cached_property
    def trace(self) -> Trace:
        """One prefix with the queries of all these suffixes."""
        return joined([self._fitted])

    def caches(
        self, compressor: Compressor, keep_ratios: Sequence[float]
    ) -> Iterator[Iterator[tuple[Step, CompactCache]]]:
        """One cache for all suffixes at each keep ratio; of a method with steps the last."""
        if not isinstance(compressor, GradientCompression):
            yield from super().caches(compressor, keep_ratios)
            return
        for keep_ratio in keep_ratios:
            yield iter([(compressor.num_steps, compressor.shared([self._fitted], keep_ratio=keep_ratio))])

    def score(self, cache: CompactCache) -> list[Values]:
        """Errors of the cache on all suffixes."""
        return [self._values(replay_hidden(self.model, cache, self._suffixes), round(cache.mean_slots))]

    def baseline(self, baseline: Baseline) -> list[Values]:
        """Errors without any cache, its tokens at their own positions n + 1, n + 2, ..., and with the whole one."""
        length = len(self.text.prefix)
        if baseline.name == "dense":
            return [self._values(self._dense, length)]
        positions = torch.arange(length, length + self._suffixes.shape[1], device=self.model.device)
        with torch.no_grad(), frozen(self.model):
            alone = hidden_states(
                self.model, input_ids=self._suffixes, position_ids=positions.expand(self._suffixes.shape),
                use_cache=False,
            )  # fmt: skip
        return [self._values(alone, 0)]

    @cached_property
    def _suffixes(self) -> Int[Tensor, "suffixes positions"]:
        return torch.tensor(self.text.rows(*ROLES), device=self.model.device)

    @cached_property
    def _dense(self) -> Float[Tensor, "suffixes positions hidden"]:
        return replay_hidden(self.model, self.trace.dense_cache(), self._suffixes)

    def _values(self, outputs: Float[Tensor, "suffixes positions hidden"], num_slots: int) -> Values:
        errors, start = output_kl(self.model, self._dense, outputs), 0
        values = {"num_slots": float(num_slots)}
        for role, kind in ((role, kind) for role in ROLES for kind, own in self.text.suffixes.items() if role in own):
            counted = self.text.held_out(kind, role)
            own, head = (
                errors[start : start + len(counted)][counted],
                f"{kind}_" if role == "test" else f"{kind}_{role}_",
            )
            start += len(counted)
            values[f"{head}num_outputs"] = float(len(own))
            if len(own):
                values |= {f"{head}kl": float(own.mean()), f"{head}kl_worst": float(own.max())}
        means = [values[f"{kind}_kl"] for kind in self.text.suffixes if f"{kind}_kl" in values]
        return values | {"kl": sum(means) / len(means)}


@torch.no_grad()
def output_kl(
    model: PreTrainedModel,
    dense: Float[Tensor, "suffixes positions hidden"],
    compact: Float[Tensor, "suffixes positions hidden"],
) -> Float[Tensor, "suffixes positions"]:
    """KL(dense || compact), nats, for every suffix b and every length k of its beginning.

    In a causal model M([a, b_1 .. b_k]) is the output at the k-th position of the suffix, so that one suffix
    of K tokens gives the definition's error for K suffixes. In float64; what is not finite is infinitely wrong.
    """
    parts = []
    rows = max(1, _LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)
    for pair in zip(dense.flatten(0, 1).split(rows), compact.flatten(0, 1).split(rows), strict=True):
        log_p, log_q = (logits_from_hidden(model, part).double().log_softmax(-1) for part in pair)
        parts.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0.0))
    return torch.cat(parts).cpu().nan_to_num(nan=torch.inf, posinf=torch.inf).view(dense.shape[:2])


def make_task(
    models: Mapping[str, tuple[PreTrainedModel, Any]],
    data: Sequence[str],
    split: Split | Literal["all"] = "all",
    *,
    plan: Plan | None = None,
    num_prefixes: int = 2,
) -> ProfileTask:
    """The profile of at most so many prefixes of a text: of every document its beginning, then what comes behind.

    Several models, label to (model, tokenizer), meet the same prefixes and suffixes, drawn with the first
    one. Sources of text are those of ``corpus_documents``.

    Raises:
        InputError: no model, too little text, two documents of one name, a model with too few positions.
    """
    if not models:
        raise InputError("nothing to profile: no model given")
    plan = Plan() if plan is None else plan
    model, tokenizer = next(iter(models.values()))
    length = plan.prefix_len + plan.suffix_len
    for label, (own, _) in models.items():
        check_fits(label, own, num_tokens=length, largest=0, what="prefixes and suffixes")
    documents: dict[str, list[int]] = {}
    for source in data:
        for name, content in corpus_documents(source, split, 10 * num_prefixes):
            if sum(len(tokens) >= length for tokens in documents.values()) == num_prefixes:
                break
            if name in documents:
                raise InputError(f"two documents of {', '.join(data)} share the name {name!r}")
            documents[name] = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    vocab_size = min(min(own.config.get_text_config().vocab_size, len(words)) for own, words in models.values())
    dataset = "+".join(map(data_name, data)) + ("" if split == "all" else f":{split}")
    return ProfileTask(tuple(draw_prefixes(documents, plan, num_prefixes, model, vocab_size)), dataset, plan)


def draw_prefixes(
    documents: Mapping[str, Sequence[int]], plan: Plan, num_prefixes: int, model: PreTrainedModel, vocab_size: int
) -> list[Prefix]:
    """Prefixes that do not overlap, with the suffixes behind each; every kind has a random stream of its own.

    The first prefix of every document comes before the second of any. The model draws the suffixes of kind
    "model"; token ids drawn lie below ``vocab_size``.

    Raises:
        InputError: too little text for a prefix, or for the pieces from elsewhere.
    """
    check_least(1, num_prefixes=num_prefixes)
    length, size = plan.prefix_len + plan.suffix_len, plan.suffix_len
    longest = max(map(len, documents.values()), default=0)
    if longest < length:
        raise InputError(
            f"the text is too short: a prefix of {plan.prefix_len} and a suffix of {size} tokens need {length}, the "
            f"longest of {len(documents)} documents has {longest}"
        )
    ranked = enumerate(documents.items())
    places = sorted((at, rank, name) for rank, (name, own) in ranked for at in range(0, len(own) - length + 1, length))
    drawn = []
    for start, _, name in places[:num_prefixes]:
        window = tuple(documents[name][start : start + length])
        found: dict[str, dict[str, list[list[int]]]] = {}
        for kind in KINDS:
            counts, generator = plan.counts(kind), _generator(plan.seed, name, window, kind)
            total = sum(counts.values())
            if kind == "model":
                prefix = torch.tensor([window[: plan.prefix_len]])
                rows = sample_continuations(model, prefix, total, size, generator, vocab_size).tolist()
            elif kind == "true":
                rows = [list(window[plan.prefix_len :])]
            elif kind == "other":
                rows = _pieces(documents, name, range(start, start + length), total, size, generator)
            else:
                rows = torch.randint(vocab_size, (total, size), generator=generator).tolist()
            left = iter(rows)
            found[kind] = {role: [next(left) for _ in range(count)] for role, count in counts.items()}
        drawn.append(Prefix(name, str(start), window[: plan.prefix_len], found))
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
    """Continuations drawn at temperature 1 behind the whole prefix, of token ids below ``vocab_size``."""
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


def slot_ratios(slots: Sequence[int], prefix_len: int) -> list[float]:
    """Keep ratios of numbers of slots, 1, 2, 4, ... where none are given; the whole prefix is a baseline.

    Raises:
        InputError: one twice, or one outside [1, prefix_len].
    """
    slots = slots or [2**power for power in range((prefix_len - 1).bit_length())]
    if len(set(slots)) < len(slots):
        raise InputError(f"slots are {list(slots)}; give each once")
    for count in slots:
        if not 1 <= count <= prefix_len:
            raise InputError(f"{count} slots are outside 1 to {prefix_len}, the tokens of a prefix")
    return [count / prefix_len for count in sorted(slots) if count < prefix_len]


def _pieces(
    documents: Mapping[str, Sequence[int]], own: str, window: range, count: int, length: int, generator: torch.Generator
) -> list[list[int]]:
    """Pieces of the documents that overlap neither the window nor one another."""
    places = [
        tokens[start : start + length]
        for name, tokens in documents.items()
        for start in range(0, len(tokens) - length + 1, length)
        if name != own or start + length <= window.start or start >= window.stop
    ]
    if len(places) < count:
        raise InputError(
            f"the text is too short for {count} 'other' suffixes of {length} tokens: outside a prefix and what follows "
            f"it there is room for {len(places)}"
        )
    return [list(places[index]) for index in torch.randperm(len(places), generator=generator)[:count].tolist()]


def _generator(seed: int, document: str, window: tuple[int, ...], kind: str) -> torch.Generator:
    digest = hashlib.sha256(json.dumps([seed, kind, document, window]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
