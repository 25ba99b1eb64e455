"""``kvcat eval``: what a compressed cache costs in quality."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvcat.cli.options import METHOD_HELP, DeviceOption, DtypeOption, SeedOption, check_keep, check_method
from kvcat.errors import InputError

eval_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure what a compressed cache costs in quality."
)


@eval_app.callback()
def _group() -> None:
    """Evaluations write append-only records and continue where they were stopped."""


@eval_app.command("suffix")
def suffix_command(
    models: Annotated[list[str], typer.Argument(help="Models to compare: FOLDER, Hub name, or LABEL=FOLDER.")],
    out: Annotated[Path, typer.Option(help="Folder for the records, the summary and the report.")],
    data: Annotated[
        str, typer.Option(help="installed, a text file, .jsonl or .parquet, a folder of them, or hub:NAME.")
    ] = "installed",
    split: Annotated[
        Literal["test", "validation", "train", "all"],
        typer.Option(help="Documents to use; test and validation are held out by a hash of the document's name."),
    ] = "test",
    method: Annotated[list[str] | None, typer.Option(help=f"Methods: {METHOD_HELP}")] = None,
    keep: Annotated[list[float] | None, typer.Option(help="Fractions of the slots to KEEP, each in (0, 1].")] = None,
    prefix: Annotated[int, typer.Option(min=2, help="Tokens of the compressed prefix.")] = 768,
    suffix: Annotated[int, typer.Option(min=2, help="Tokens of the scored suffix.")] = 256,
    windows: Annotated[int, typer.Option(min=1, help="Windows to evaluate.")] = 64,
    per_document: Annotated[int, typer.Option(min=1, help="Most windows from one document.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows a forward pass.")] = 8,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Compress the prefix of held-out windows and score the suffix on the compact cache.

    Reports NLL on the compact cache, delta NLL, delta PPL, KL, top-1 agreement, context gain and retention with 95 %
    intervals, paired between models. Killed and started again, it continues.

    Example: kvcat eval suffix base=./base kvcat=./runs/router/export --keep 0.05 0.1 --out results
    """
    methods, ratios = method or ["attention-matching"], keep or [0.05, 0.1, 0.2, 0.4]
    for ratio in ratios:
        check_keep(ratio)
    for name in methods:
        check_method(name)
    labelled = dict(_labelled(item) for item in models)
    if len(labelled) < len(models):
        raise InputError(f"two models have the same label; give them as LABEL=FOLDER: {', '.join(models)}")

    import kvcat
    from kvcat.compress import parse_method, seeded_compressor
    from kvcat.data import split_documents
    from kvcat.evals import Method, evaluate_suffix, read_records, summarise, windows_from_documents
    from kvcat.report import headline_text, write_report

    asked = [Method(*parse_method(spec)) for spec in methods]
    for wanted in asked:
        seeded_compressor(wanted.name, wanted.options, seed)
    loaded = {label: kvcat.load(folder, dtype=dtype, device=device) for label, folder in labelled.items()}
    tokenizer = next(iter(loaded.values()))[1]
    chosen = windows_from_documents(
        ((d.id, d.text) for d in split_documents(data, split, limit=10 * windows)),
        tokenizer,
        prefix_len=prefix,
        suffix_len=suffix,
        limit=windows,
        per_document=per_document,
        seed=seed,
    )
    evaluate_suffix(loaded, chosen, asked, ratios, out, dataset=f"{data}:{split}", batch_size=batch_size, seeds=[seed])
    page = write_report([out], out / "report", title="Suffix prediction on a compressed prefix")
    print(headline_text(summarise(read_records(out))))
    print(page)


def _labelled(item: str) -> tuple[str, str]:
    label, separator, folder = item.partition("=")
    if separator and not label:
        raise InputError(f"{item!r} names no label before the equals sign")
    return (label, folder) if separator else (Path(item).name or item, item)
