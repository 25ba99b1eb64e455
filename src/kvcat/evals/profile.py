"""Compressibility profile: the error of the best cache found for a prefix against the number of its slots.

(N, epsilon, r)-compressibility asks for a cache of r(n) slots of every prefix a that serves every suffix b alike:
|| M([a, b]) - M_{C,a}(b) || < epsilon. Here one cache is fitted to some sampled suffixes of a prefix, and its error is
taken on others. Both samples err on one side each: a better cache may exist, so the error is an upper bound on that of
the best cache on these suffixes; a worse suffix may exist, so the worst of them is a lower bound on the maximum over
all suffixes for this cache.

References: KV-CAT, section "KV Cache Compression: Problem Formulation", definition of (N, epsilon, r)-compressibility.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from kvcat.evals.task import Baseline, Method, Prepared, Step, Task, Values, check_fits
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

MEASURES = {
    "kl": "KL(dense || compact) of the next-token distributions, nats",
    "tv": "total variation of the next-token distributions, in [0, 1]",
    "log_prob": "largest |log p_dense - log p_compact| over the vocabulary, nats",
    "output": "Euclidean norm of the difference of the last token's representation (what the head reads): the "
    "definition to the letter, on the model's own scale",
}
"""Error measures: all are 0 where compression changes nothing."""

METHODS = (
    Method("attention-matching"),
    Method("gradient", {"init": "attention-matching", "num_steps": 40, "lr": 0.03, "schedule": "cosine"}),
    Method("snapkv"),
    Method("h2o"),
)
"""Methods among which the best cache is looked for where no others are named."""

_TOKENS_AT_ONCE = 2**15
_LOGITS_AT_ONCE = 2**21


@dataclass(frozen=True)
class Plan:
    """Lengths, and how many suffixes are drawn behind every prefix.

    Args:
        prefix_len: tokens n of a prefix, at least 1.
        suffix_len: tokens of a suffix, at least 2; its first k tokens are a suffix of length k as well.
        num_fit: suffixes of each kind but the true one that caches are fitted to, at least 1.
        num_choice: further ones that choose between caches, at least 1.
        num_test: suffixes of each kind that caches are judged on, at least 1; of "true" there is one.
        seed: of the draw, at least 0.

    Raises:
        InputError: a value out of its range.
    """

    prefix_len: int = 128
    suffix_len: int = 16
    num_fit: int = 16
    num_choice: int = 8
    num_test: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"prefix_len": 1, "suffix_len": 2, "num_fit": 1, "num_choice": 1, "num_test": 1, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {bound}")

    def count(self, kind: str, role: str) -> int:
        """Suffixes of a kind in a role."""
        return int(role == "test") if kind == "true" else getattr(self, f"num_{role}")


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
        """
        rows = self.tokens(kind, role)
        if role == "fit" or not len(rows):
            return torch.ones_like(rows, dtype=torch.bool)
        used = self.every(*ROLES[: ROLES.index(role)])
        starts = {tuple(row[:k]) for row in used.tolist() for k in range(1, len(row) + 1)}
        return torch.tensor([[tuple(row[:k]) not in starts for k in range(1, len(row) + 1)] for row in rows.tolist()])


@dataclass(frozen=True)
class ProfileTask(Task):
    """Prefixes whose caches are judged on suffixes that they were not fitted to; ``make_task`` makes it.

    Values, for every kind of suffix and every name in ``MEASURES``: ``KIND_MEASURE`` and
    ``KIND_MEASURE_worst`` over all held-out outputs (``Prefix.held_out``), ``KIND_num_outputs`` of them;
    the same of the suffixes for the choice and for the fit as ``KIND_choice_MEASURE``,
    ``KIND_fit_MEASURE``; ``num_slots``; and ``kl``, the mean of the kinds' means.

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
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline("no-context", 0.0), Baseline("dense", 1.0))

    def __post_init__(self) -> None:
        for text in self.examples:
            for role in ("choice", "test"):
                if not any(text.held_out(kind, role).any() for kind in text.suffixes):
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
        """Refuse a model with too few positions or another vocabulary.

        Raises:
            InputError: with the numbers.
        """
        largest = max(max(*text.prefix, int(text.every(*ROLES).max())) for text in self.examples)
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
    def traces(self) -> list[Trace]:
        """Dense forwards over the prefix and every suffix that caches are fitted to; the prefix is held once."""
        suffixes = self.text.every("fit")
        whole = torch.cat([torch.tensor(self.text.prefix).expand(len(suffixes), -1), suffixes], 1)
        made: list[Trace] = []
        for rows in whole.split(max(1, _TOKENS_AT_ONCE // whole.shape[1])):
            seen = trace(self.model, rows.to(self.model.device), len(self.text.prefix))
            one = made[0] if made else seen
            states = {name: [x[:1].clone() for x in getattr(one, name)] for name in ("keys", "values")}
            spread = {name: [x.expand(len(rows), -1, -1, -1) for x in own] for name, own in states.items()}
            made.append(replace(seen, **spread))
        return made

    @cached_property
    def trace(self) -> Trace:
        """One prefix with the queries of all these suffixes."""
        return joined(self.traces)

    def caches(
        self, compressor: Compressor, keep_ratios: Sequence[float]
    ) -> Iterator[Iterator[tuple[Step, CompactCache]]]:
        """One cache for all suffixes at each keep ratio; of a method with steps the last."""
        if not isinstance(compressor, GradientCompression):
            yield from super().caches(compressor, keep_ratios)
            return
        for keep_ratio in keep_ratios:
            yield iter([(compressor.num_steps, compressor.shared(self.traces, keep_ratio=keep_ratio))])

    def score(self, cache: CompactCache) -> list[Values]:
        """Errors of the cache on all suffixes."""
        return [self._values(self._outputs(cache), round(cache.mean_slots))]

    def baseline(self, baseline: Baseline) -> list[Values]:
        """Errors without any cache, its tokens at their own positions n + 1, n + 2, ..., and with the whole one."""
        whole = baseline.name == "dense"
        outputs = self._dense if whole else without_prefix(self.model, self._suffixes, len(self.text.prefix))
        return [self._values(outputs, len(self.text.prefix) if whole else 0)]

    @cached_property
    def _groups(self) -> dict[tuple[str, str], Tensor]:
        """Suffixes by kind and role."""
        every = {(kind, role): self.text.tokens(kind, role) for kind in self.text.suffixes for role in ROLES}
        return {group: rows for group, rows in every.items() if len(rows)}

    @property
    def _suffixes(self) -> Int[Tensor, "suffixes positions"]:
        return torch.cat(list(self._groups.values())).to(self.model.device)

    @cached_property
    def _dense(self) -> Float[Tensor, "suffixes positions hidden"]:
        return self._outputs(self.trace.dense_cache())

    def _outputs(self, cache: CompactCache) -> Float[Tensor, "suffixes positions hidden"]:
        """Representations M_{C,a}(b) of all suffixes, group after group."""
        return replay_hidden(self.model, cache, self._suffixes)

    def _values(self, outputs: Float[Tensor, "suffixes positions hidden"], num_slots: int) -> Values:
        errors = output_errors(self.model, self._dense, outputs)
        values, start = {"num_slots": float(num_slots)}, 0
        for (kind, role), rows in self._groups.items():
            head = f"{kind}_" if role == "test" else f"{kind}_{role}_"
            counted = self.text.held_out(kind, role)
            values[f"{head}num_outputs"] = float(counted.sum())
            for name, every in errors.items():
                own = every[start : start + len(rows)][counted]
                if len(own):
                    values |= {f"{head}{name}": float(own.mean()), f"{head}{name}_worst": float(own.max())}
            start += len(rows)
        means = [values[f"{kind}_kl"] for kind in self.text.suffixes if f"{kind}_kl" in values]
        return values | {"kl": sum(means) / len(means)}


@torch.no_grad()
def output_errors(
    model: PreTrainedModel,
    dense: Float[Tensor, "suffixes positions hidden"],
    compact: Float[Tensor, "suffixes positions hidden"],
) -> dict[str, Float[Tensor, "suffixes positions"]]:
    """Every measure for every suffix b and every length k: at position k stands the output of b's first k tokens.

    In a causal model M([a, b_1 .. b_k]) is the output at the k-th position of the suffix, so that one suffix of K
    tokens gives the definition's error for K suffixes. In float64; what is not finite is infinitely wrong.

    Args:
        model: whose head reads the representations.
        dense: with the whole cache.
        compact: with the compact one.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in MEASURES}
    rows = max(1, _LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)
    for whole, small in zip(dense.flatten(0, 1).split(rows), compact.flatten(0, 1).split(rows), strict=True):
        log_p, log_q = (logits_from_hidden(model, part).double().log_softmax(-1) for part in (whole, small))
        p, q = log_p.exp(), log_q.exp()
        parts["kl"].append((p * (log_p - log_q)).sum(-1).clamp_min(0.0))
        parts["tv"].append((p - q).abs().sum(-1) / 2)
        parts["log_prob"].append((log_p - log_q).abs().amax(-1))
        parts["output"].append((whole.double() - small.double()).norm(dim=-1))
    infinite = {"nan": torch.inf, "posinf": torch.inf}
    return {name: torch.cat(own).cpu().nan_to_num(**infinite).view(dense.shape[:2]) for name, own in parts.items()}


@torch.no_grad()
def without_prefix(
    model: PreTrainedModel, suffixes: Int[Tensor, "suffixes positions"], prefix_len: int
) -> Float[Tensor, "suffixes positions hidden"]:
    """The suffix's representations with an empty cache: r(n) = 0, its tokens at their own positions n + 1, ..."""
    positions = torch.arange(prefix_len, prefix_len + suffixes.shape[1], device=model.device).expand(suffixes.shape)
    with frozen(model):
        return hidden_states(model, input_ids=suffixes, position_ids=positions, use_cache=False)


def make_task(
    models: Mapping[str, tuple[PreTrainedModel, Any]],
    data: Sequence[str],
    split: Split | Literal["all"] = "all",
    *,
    plan: Plan | None = None,
    num_prefixes: int = 2,
) -> ProfileTask:
    """The profile of prefixes of a text: of every document its beginning, then what comes behind.

    Several models meet the same prefixes and suffixes, drawn with the first model.

    Args:
        models: label to (model, tokenizer), at least one.
        data: sources of text, each as in ``corpus_documents``.
        split: of the documents.
        plan: None: the defaults.
        num_prefixes: most prefixes, at least 1.

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

    The first prefix of every document comes before the second of any.

    Args:
        documents: name to token ids.
        plan: lengths and numbers.
        num_prefixes: most prefixes, at least 1.
        model: draws the suffixes of kind "model".
        vocab_size: token ids drawn lie below it.

    Raises:
        InputError: too little text for a prefix, or for the pieces from elsewhere.
    """
    if num_prefixes < 1:
        raise InputError(f"num_prefixes is {num_prefixes}; it must be at least 1")
    length = plan.prefix_len + plan.suffix_len
    longest = max(map(len, documents.values()), default=0)
    if longest < length:
        raise InputError(
            f"the text is too short: a prefix of {plan.prefix_len} and a suffix of {plan.suffix_len} tokens need "
            f"{length}, the longest of {len(documents)} documents has {longest}"
        )
    starts = [
        (start, rank, name)
        for rank, (name, tokens) in enumerate(documents.items())
        for start in range(0, len(tokens) - length + 1, length)
    ]
    drawn = []
    for start, _, name in sorted(starts)[:num_prefixes]:
        window = tuple(documents[name][start : start + length])
        found: dict[str, dict[str, list[list[int]]]] = {}
        for kind in KINDS:
            counts = {role: plan.count(kind, role) for role in ROLES}
            total, size = sum(counts.values()), plan.suffix_len
            generator = _generator(plan.seed, name, window, kind)
            if kind == "model":
                prefix = torch.tensor([window[: plan.prefix_len]])
                rows = sample_continuations(model, prefix, total, size, generator, vocab_size).tolist()
            elif kind == "true":
                rows = [list(window[plan.prefix_len :])]
            elif kind == "other":
                rows = _pieces(documents, name, range(start, start + length), total, size, generator)
            else:
                rows = torch.randint(vocab_size, (total, size), generator=generator).tolist()
            ends = {role: sum(counts[r] for r in ROLES[: rank + 1]) for rank, role in enumerate(ROLES)}
            found[kind] = {role: rows[ends[role] - counts[role] : ends[role]] for role in ROLES if counts[role]}
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


def slot_grid(prefix_len: int) -> list[int]:
    """1, 2, 4, ... below the number of tokens of a prefix."""
    return [2**power for power in range((prefix_len - 1).bit_length())]


def slot_ratios(slots: Sequence[int], prefix_len: int) -> list[float]:
    """Keep ratios of numbers of slots, without the whole prefix, which is a baseline.

    Raises:
        InputError: none, one twice, or one outside [1, prefix_len].
    """
    if not slots or len(set(slots)) < len(slots):
        raise InputError(f"slots are {list(slots)}; give at least one number, and each once")
    for count in slots:
        if not 1 <= count <= prefix_len:
            raise InputError(f"{count} slots are outside 1 to {prefix_len}, the tokens of a prefix")
    return [count / prefix_len for count in sorted(slots) if count < prefix_len]


def _pieces(
    documents: Mapping[str, Sequence[int]],
    own: str,
    window: range,
    count: int,
    length: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """Pieces of the documents that overlap neither the window nor one another."""
    places = [
        (tokens, start)
        for name, tokens in documents.items()
        for start in range(0, len(tokens) - length + 1, length)
        if name != own or start + length <= window.start or start >= window.stop
    ]
    if len(places) < count:
        raise InputError(
            f"the text is too short for {count} 'other' suffixes of {length} tokens: outside a prefix and what follows "
            f"it there is room for {len(places)}"
        )
    order = torch.randperm(len(places), generator=generator)[:count].tolist()
    return [list(places[index][0][places[index][1] : places[index][1] + length]) for index in order]


def _generator(seed: int, document: str, window: tuple[int, ...], kind: str) -> torch.Generator:
    digest = hashlib.sha256(json.dumps([seed, kind, document, window]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
