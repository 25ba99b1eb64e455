"""Measure the smallest error of a cache for each number of slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from kvcat.evals.evaluation import Evaluation, LinePlot, ResultTable, parse_methods
from kvcat.evals.evaluations.suffix import Suffix
from kvcat.option_types import Bos, Count, Counts, Seed, Split, Strings, flat

if TYPE_CHECKING:
    from kvcat.evals.task import Task
    from kvcat.stats.records import Record


@dataclass(frozen=True, kw_only=True)
class Profile(Evaluation):
    """Measure a model's compressibility on a text: the smallest error for each number of slots.

    Every method fits a cache to the first half of the text after a prefix. The error is the KL on
    the second half, and for every window the smallest KL of all methods counts.

    Example: kvcat eval profile kvcat-base --data book.txt --slots 1 4 16 64
    """

    facts = Suffix.facts  # its records are those of the suffix evaluation
    new_metrics = Suffix.new_metrics

    out: Path = Path("out/profile")
    """Folder for records and the table. A stopped evaluation continues there."""
    data: str
    """A text, .jsonl or .parquet file, a folder of them, hub:NAME, or installed."""
    slots: Counts = ()
    """Slots per layer and head, from 1 to --prefix; 1 2 4 8 ... by default."""
    method: Strings = ()
    """Methods to choose from; default: attention-matching, gradient (40 steps), snapkv, h2o."""
    prefix: Count = 128
    """Number of tokens in a prefix."""
    suffix: Count = 128
    """Number of tokens after a prefix, at least 4."""
    windows: Count = 16
    """Number of prefixes, from as many different documents as possible."""
    split: Split = "all"
    bos: Bos = "auto"
    seed: Seed = 0
    batch_size: tyro.conf.Suppress[int] = 16

    def make_task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.profile import SUPERVISION
        from kvcat.evals.suffix import make_task

        return make_task(
            tokenizer,
            self.data,
            self.split,
            prefix=self.prefix,
            suffix=self.suffix,
            windows=self.windows,
            per_document=self.windows,
            seed=self.data_seed,
            supervision=SUPERVISION,
            bos=self.bos,
        )

    def method_specs(self) -> list[str]:  # noqa: D102
        return flat(self.method)

    def settings(self) -> dict[str, Any]:  # noqa: D102
        from kvcat.evals.profile import METHODS, slot_ratios

        return {
            "methods": parse_methods(self.method_specs()) or list(METHODS),
            "keep_ratios": slot_ratios(flat(self.slots), self.prefix),
            "seeds": [self.seed],
            "batch_size": self.batch_size,
        }

    def result_table(self, records: "Sequence[Record]") -> ResultTable:
        """The smallest errors by number of slots."""
        from kvcat.evals.profile import BEST, profile_table, profile_text

        table = profile_table(records, self.prefix)
        plot = LinePlot(
            title="Compressibility profile",
            rows=table[table["method"] == BEST],
            x="num_slots",
            panels={
                "mean": "Best cache found, mean over windows",
                "worst": "Best cache found, worst window",
            },
            x_label="slots per layer and head",
            y_label="KL",
            unit="nats/token",
        )
        return ResultTable(name="profile", frame=table, text=profile_text(table), plot=plot)
