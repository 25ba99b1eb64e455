"""An evaluation: look up prices in a list that was compressed before the question came."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcat.evals import (
    CompressingEvaluation,
    Question,
    QuestionTask,
    ReportFacts,
    Values,
    answer_ids,
    share_of_examples,
    vocabulary,
)
from kvcat.option_types import Count
from kvcat.text.encoder import TextEncoder, opening_ids


@dataclass(frozen=True)
class PriceTask(QuestionTask):
    """Questions about compressed price lists, answered greedily.

    Values of an answer: ``exact_match``, 1 if it begins with the price, else 0; ``first_digit``, 1
    if it begins with the price's first digit.
    """

    evaluation: ClassVar[str] = "price-list"  # the entry point's name

    @staticmethod
    def judge(answer: str, references: Sequence[str]) -> Values:
        """Values of a decoded answer."""
        (price,) = references
        number = re.match(r"\s*(\d*)", answer)[1]
        return {
            "exact_match": float(number == price),
            "first_digit": float(number[:1] == price[0]),
        }


@dataclass(frozen=True, kw_only=True)
class PriceList(CompressingEvaluation):
    """Compress a list of items with prices, then ask for one of the prices.

    Default keep ratios: 0.1 0.3.

    Example: kvcat eval price-list kvcat-base --items 10 --out prices
    """

    default_keeps = (0.1, 0.3)
    facts = ReportFacts(
        title="Prices in a list",
        metrics=("exact_match", "nll", "dense_exact_match", "nll_dense", "first_digit"),
        example_name="question",
        stratum_name="place",
        sizes="{items} items each",
    )
    new_metrics: ClassVar = {
        "first_digit": share_of_examples(
            label="first digit",
            description="Share of answers that begin with the first digit of the price.",
        )
    }

    items: Count = 20
    """Items of a list."""
    lists: Count = 20
    """Number of lists; each has one question."""

    def make_task(self, tokenizer: Any, value: Any) -> PriceTask:  # noqa: ARG002 no folder option
        """The lists in the tokens of a tokenizer."""
        opening = tuple(opening_ids(tokenizer))
        encoder = TextEncoder(tokenizer)
        examples = []
        for number in range(self.lists):
            draw = random.Random(f"{self.data_seed} {self.items} {number}")
            prices = [str(draw.randint(100, 999)) for _ in range(self.items)]
            lines = [f"item {item} costs {price}\n" for item, price in enumerate(prices)]
            chosen = draw.randrange(self.items)
            question, answer = answer_ids(tokenizer, f"item {chosen} costs", f" {prices[chosen]}")
            example = Question(
                document=f"list {number}",
                name="0",
                stratum="first half" if 2 * chosen < self.items else "second half",
                context=(*opening, *encoder("".join(lines))),
                question=question,
                answer=answer,
                references=(prices[chosen],),
                max_new_tokens=len(answer) + 2,
            )
            examples.append(example)
        options = {"items": self.items, "lists": self.lists, "seed": self.data_seed}
        return PriceTask("prices", tuple(examples), options, vocabulary(tokenizer), opening)
