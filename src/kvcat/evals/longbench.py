"""LongBench v2 with a compressed context: four continuations by likelihood after the question."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache
from kvcat.compress import INSTRUCTION, Trace, slots_for, trace
from kvcat.compress.documents import reconstruction_of_tokens
from kvcat.errors import InputError
from kvcat.evals.choices import choice_log_likelihoods, choice_values
from kvcat.evals.longbench_prompt import LEAD, QUESTION, LongBenchPrompt, check_prompts, check_vocabulary, tokenised
from kvcat.evals.longbench_rows import LETTERS, LongBenchExample
from kvcat.evals.running import manifest
from kvcat.evals.task import Baseline, Values
from kvcat.models import model_name

MAX_TOKENS = 32_768


@dataclass(frozen=True)
class LongBenchTask:
    """Questions about long texts; the text is compressed, the question is read on the compact cache.

    Compressed is the prompt's first sentence with the context, fitted to the reconstruction sequence
    <prefix><instruction><prefix>. Then question and answers follow uncompressed, and "A)", "B)", "C)", "D)" after
    "The correct answer is (" are scored by total log-likelihood: ``choice_values``.

    Args:
        examples: ``longbench_examples``.
        dataset: name of the data set.
        max_tokens: longest reconstruction sequence, and longest prompt with its answer; longer contexts are cut in the
            middle. At most the positions of every model.
        keep_ratios: fractions of the prefix that the truncated baselines see as plain text, each in (0, 1]; 1 is the
            dense baseline.

    Raises:
        InputError: a keep ratio out of range.

    References: KV-CAT, appendix "Long-form question answering under KV cache compression"; Bai et al. 2025,
    arXiv:2412.15204 (LongBench v2).
    """

    examples: Sequence[LongBenchExample]
    dataset: str
    max_tokens: int = MAX_TOKENS
    keep_ratios: tuple[float, ...] = (0.1, 0.2, 0.5)
    evaluation: str = "longbench"
    tokenized: bool = False

    def __post_init__(self) -> None:
        for keep_ratio in self.keep_ratios:
            if not 0.0 < keep_ratio <= 1.0:
                raise InputError(f"keep ratio {keep_ratio:g} is outside (0, 1]")

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """Dense, no context, and as much plain text as each keep ratio's budget."""
        truncated = (Baseline("truncated", keep_ratio) for keep_ratio in self.keep_ratios if keep_ratio < 1.0)
        return Baseline("dense", 1.0), Baseline("no-context", 0.0), *truncated

    def describe(self) -> Mapping[str, Any]:
        """What the results depend on."""
        return {
            "max_tokens": self.max_tokens,
            "prompt": f"{LEAD}{{context}}{QUESTION}",
            "instruction": INSTRUCTION,
            "sub_domains": dict(sorted(Counter(example.stratum for example in self.examples).items())),
            "manifest": manifest(self.examples),
        }

    def batch_key(self, example: LongBenchExample) -> Hashable:
        """Every example is its own batch: contexts differ in length, and are as long as memory allows."""
        return example.name

    def check(self, label: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Refuses a model that cannot run these examples.

        Raises:
            InputError: no tokenizer, too few positions, a question that leaves no room, a token outside the vocabulary.
        """
        if tokenizer is None:
            raise InputError(f"model {label!r} has no tokenizer, which LongBench v2 needs")
        text = model.config.get_text_config(decoder=True)
        positions = getattr(text, "max_position_embeddings", None)
        if positions is not None and self.max_tokens > positions:
            raise InputError(f"max_tokens={self.max_tokens} exceeds the {positions} positions of model {label!r}")
        check_prompts(label, self.examples, tokenizer, max_tokens=self.max_tokens, vocab_size=text.vocab_size)

    def prepare(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, batch: Sequence[LongBenchExample]
    ) -> "PreparedLongBench":
        """The examples as token ids of the model, cut to ``max_tokens``.

        Raises:
            InputError: no tokenizer, no room for a context, prefixes of unequal lengths, or a token outside the model's
                vocabulary.
        """
        if tokenizer is None:
            raise InputError("LongBench v2 needs a tokenizer")
        prompts = [tokenised(example, tokenizer).fitted(self.max_tokens) for example in batch]
        if len(lengths := {len(prompt.prefix) for prompt in prompts}) > 1:
            raise InputError(f"prefixes of unequal lengths cannot share a batch: {sorted(lengths)} tokens")
        for prompt in prompts:
            vocab_size = model.config.get_text_config(decoder=True).vocab_size
            check_vocabulary(model_name(model), prompt.prefix, vocab_size)
        return PreparedLongBench(model, tokenizer, prompts, [LETTERS.index(example.answer) for example in batch])


@dataclass(frozen=True)
class PreparedLongBench:
    """Questions about contexts of one length on one model.

    Every value of ``choice_values`` comes twice: on the compact cache, and with the prefix ``dense_`` on the whole one.

    Args:
        model: what runs.
        tokenizer: its tokenizer.
        prompts: one per example, their contexts cut.
        right: index of each one's right answer.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[LongBenchPrompt]
    right: Sequence[int]

    @property
    def trace(self) -> Trace:
        """The dense forward over the reconstruction sequences; it runs when first asked for."""
        return self._traced

    @cached_property
    def _traced(self) -> Trace:
        prefixes = torch.tensor([prompt.prefix for prompt in self.prompts], device=self._device)
        return trace(self.model, reconstruction_of_tokens(self.tokenizer, prefixes))

    def score(self, cache: CompactCache) -> list[Values]:
        """Values of every question when the compact cache stands for its context.

        Args:
            cache: of this trace.
        """
        return self._beside_dense([self._values(row, cache.select([row])) for row in range(len(self.prompts))])

    def baseline(self, baseline: Baseline) -> list[Values]:
        """Values with the whole context, without any, or with as much of it as plain text as the budget has slots.

        Args:
            baseline: one of the task's.
        """
        if baseline.name == "dense":
            return self._beside_dense(self._dense)
        caches = (
            None if baseline.name == "no-context" else self._truncated(row, baseline.keep_ratio)
            for row in range(len(self.prompts))
        )
        return self._beside_dense([self._values(row, cache) for row, cache in enumerate(caches)])

    @cached_property
    def _dense(self) -> list[Values]:
        cache = self.trace.dense_cache()
        return [self._values(row, cache.select([row])) for row in range(len(self.prompts))]

    def _beside_dense(self, found: Sequence[Values]) -> list[Values]:
        return [
            {**own, **{f"dense_{name}": value for name, value in dense.items()}}
            for own, dense in zip(found, self._dense, strict=True)
        ]

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _values(self, row: int, cache: CompactCache | None) -> Values:
        prompt = self.prompts[row]
        question = prompt.alone if cache is None else prompt.question
        return choice_values(choice_log_likelihoods(self.model, cache, question, prompt.choices), self.right[row])

    def _truncated(self, row: int, keep_ratio: float) -> CompactCache:
        """Dense cache of the shortened prefix; the question stands behind it only because a trace wants a suffix."""
        prompt = self.prompts[row]
        prefix = prompt.shortened(slots_for(len(prompt.prefix), keep_ratio, None))
        ids = torch.tensor([[*prefix, *prompt.question]], device=self._device)
        return trace(self.model, ids, len(prefix)).dense_cache()
