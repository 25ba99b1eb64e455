"""``kvcat eval``: what a compressed cache costs in quality; what all evaluations share on the command line."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvcat.cli.options import METHOD_HELP, check_keep, check_method, labelled_models
from kvcat.errors import InputError

if TYPE_CHECKING:
    from kvcat.evals import Method, Task

eval_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure what a compressed cache costs in quality."
)

ModelsArgument = Annotated[list[str], typer.Argument(help="Models to compare: FOLDER, Hub name, or LABEL=FOLDER.")]
OutOption = Annotated[Path, typer.Option(help="Folder for the records, the summary and the report.")]
MethodOption = Annotated[list[str] | None, typer.Option(help=f"Methods: {METHOD_HELP}")]
KeepOption = Annotated[list[float] | None, typer.Option(help="Fractions of the slots to KEEP, each in (0, 1].")]
BatchOption = Annotated[int, typer.Option(min=1, help="Examples a forward pass.")]
SeedsOption = Annotated[
    list[int] | None,
    typer.Option("--seed", min=0, help="Seed of compressors that draw; several give a record each, averaged."),
]
ShardOption = Annotated[
    str | None,
    typer.Option(
        help="INDEX/COUNT: every COUNT-th batch alone, from 0; the shards share one --out, `kvcat report` joins them. "
        "torchrun sets it by itself, one shard a process."
    ),
]
ContextSupervisionOption = Annotated[
    Literal["reconstruction", "self"],
    typer.Option(
        help="What caches are fitted to: the text repeated after an instruction (needs twice the positions), or its "
        "own queries."
    ),
]
SpeedOption = Annotated[
    bool, typer.Option("--speed", help="Also time answers: seconds to the first token, tokens per second.")
]


@eval_app.callback()
def _group() -> None:
    """Evaluations write append-only records and continue where they were stopped."""


@dataclass(frozen=True)
class EvalRequest:
    """What every evaluation is told on the command line.

    Args:
        models: FOLDER or LABEL=FOLDER.
        out: results folder.
        methods: methods with their options, may be empty.
        keep_ratios: fractions kept.
        batch_size: examples a forward pass.
        seeds: of the compressors.
        shard: INDEX/COUNT or None.
        speed: time answers.
        device: torch device.
        dtype: of the weights.
        title: of the report.
    """

    models: list[str]
    out: Path
    methods: list[str]
    keep_ratios: list[float]
    batch_size: int
    seeds: list[int]
    shard: str | None
    speed: bool
    device: str
    dtype: str
    title: str

    def run(
        self,
        tasks: Callable[[Any], Mapping[str, "Task"]],
        *,
        method: "Callable[[Method], Method]" = lambda method: method,
    ) -> None:
        """Evaluate, report, print.

        Args:
            tasks: makes the tasks from the models' tokenizer: name of a folder in ``out`` to task; "" is ``out``.
            method: what becomes of a method that was asked for.

        Raises:
            InputError: a person's mistake, before heavy work.
        """
        for ratio in self.keep_ratios:
            check_keep(ratio)
        for spec in self.methods:
            check_method(spec)
        labelled = labelled_models(self.models)
        shard = _shard(self.shard)

        import kvcat
        from kvcat.compress import parse_method, seeded_compressor
        from kvcat.evals import Method, evaluate, read_records
        from kvcat.evals.rows import summarise

        asked = [method(Method(*parse_method(spec))) for spec in self.methods]
        for wanted in asked:
            seeded_compressor(wanted.name, wanted.options, self.seeds[0])
        device = self.device if self.device != "cuda" else f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        loaded = {label: kvcat.load(folder, dtype=self.dtype, device=device) for label, folder in labelled.items()}
        folders = []
        for name, task in tasks(next(iter(loaded.values()))[1]).items():
            folders.append(self.out / name)
            evaluate(
                task, loaded, asked, self.keep_ratios, folders[-1],
                batch_size=self.batch_size, seeds=self.seeds, shard=shard, speed=self.speed,
            )  # fmt: skip
        if shard[1] > 1:
            print(f"shard {shard[0]} of {shard[1]} is done; when all are: kvcat report {' '.join(map(str, folders))}")
            return
        from kvcat.report import headline_text, write_report

        page = write_report(folders, self.out / "report", title=self.title)
        for folder in folders:
            print(headline_text(summarise(read_records(folder))))
        print(page)


def seeds_or_default(seeds: Sequence[int] | None) -> list[int]:
    """The seeds asked for, or 0."""
    return list(seeds) if seeds else [0]


def data_name(source: str) -> str:
    """What records call a source: a file by its name alone, so that results do not depend on where it lies."""
    return source if source.startswith("hub:") else Path(source).name


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    index, separator, count = text.partition("/")
    if not separator or not index.isdecimal() or not count.isdecimal() or int(index) >= int(count):
        raise InputError(f"--shard takes INDEX/COUNT with INDEX from 0 to COUNT - 1, not {text!r}")
    return int(index), int(count)
