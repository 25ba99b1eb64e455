"""``kvcat theory profile``: the error of the best cache found against its slots, for any model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvcat.cli.evaluate import data_name
from kvcat.cli.options import (
    METHOD_HELP,
    SUFFIX_KINDS,
    DeviceOption,
    DtypeOption,
    SeedOption,
    check_keep,
    check_method,
    labelled_models,
)
from kvcat.errors import InputError

if TYPE_CHECKING:
    from kvcat.evals.profile_suffixes import PrefixSuffixes, SuffixPlan

Split = Literal["all", "test", "validation", "train"]


def profile_command(
    models: Annotated[list[str], typer.Argument(help="Models to compare: FOLDER, Hub name, or LABEL=FOLDER.")],
    text: Annotated[
        list[str],
        typer.Option(help="The text: a text file, .jsonl or .parquet, a folder of them, installed, or hub:NAME."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for records, tables and the plot.")] = Path("out/profile"),
    slots: Annotated[
        list[int] | None,
        typer.Option(help="Slots per layer and head, from 1 to --prefix-len.", show_default="1 2 4 8 ... all"),
    ] = None,
    keep: Annotated[
        list[float] | None, typer.Option(help="In place of --slots: fractions of the slots to KEEP, each in (0, 1].")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Methods among which the best cache is chosen: {METHOD_HELP}",
            show_default="attention-matching, 40 gradient steps from it, snapkv, h2o",
        ),
    ] = None,
    prefix_len: Annotated[int, typer.Option(min=1, help="Tokens of a prefix.")] = 128,
    suffix_len: Annotated[int, typer.Option(min=2, help="Tokens of a suffix.")] = 16,
    num_prefixes: Annotated[
        int, typer.Option(min=1, help="Prefixes: the beginning of every document, then what comes behind.")
    ] = 2,
    split: Annotated[
        Split,
        typer.Option(help="Documents of the text to use; test and validation by a hash of the document's name."),
    ] = "all",
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            help="Suffixes to judge on: drawn from the first model, the true one, pieces of the text from elsewhere, "
            "random tokens.",
            show_default="all four",
        ),
    ] = None,
    fit_kinds: Annotated[
        list[str] | None,
        typer.Option(help="Those that caches are fitted to; never the true one.", show_default="all others"),
    ] = None,
    num_fit_suffixes: Annotated[
        int, typer.Option(min=1, help="Suffixes of each of these kinds that caches are fitted to.")
    ] = 16,
    num_choice_suffixes: Annotated[
        int, typer.Option(min=1, help="Further ones by which the best cache is chosen.")
    ] = 8,
    num_test_suffixes: Annotated[int, typer.Option(min=1, help="Further suffixes of every kind, to judge on.")] = 16,
    suffixes: Annotated[
        Path | None,
        typer.Option(help="suffixes.json of another profile of this text: its suffixes, whichever model drew them."),
    ] = None,
    measure: Annotated[
        Literal["kl", "tv", "log_prob", "output"],
        typer.Option(
            help="Error in tables and plot: KL, total variation, largest difference of log-probabilities, or norm of "
            "the output's difference. The CSV file has all."
        ),
    ] = "kl",
    epsilon: Annotated[
        list[float] | None,
        typer.Option(help="Errors for which the fewest slots are told.", show_default="1 0.3 0.1 0.03 0.01"),
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Measure a model's compressibility on a text: the error of the best cache found against its slots.

    The definition asks for one cache per prefix that serves every suffix. Here caches are fitted to some suffixes and
    judged on others, that no cache was fitted to or chosen by. Several models meet the same prefixes and suffixes.
    Killed and started again, it continues.

    Example: kvcat theory profile kvcat-base --text book.txt --slots 1 4 16 64
    """
    labelled = labelled_models(models)
    counts = _slots(slots, keep, prefix_len)
    for spec in method or []:
        check_method(spec)

    import kvcat
    from kvcat.compress import parse_method, seeded_compressor
    from kvcat.evals import Method
    from kvcat.evals.profile import PROFILE_METHODS, profile
    from kvcat.evals.profile_checks import check_models, check_slots, slot_grid
    from kvcat.evals.profile_suffixes import SuffixPlan

    judged = tuple(kinds or SUFFIX_KINDS)
    fitted = tuple(fit_kinds or (kind for kind in judged if kind != "true"))
    plan = SuffixPlan(
        prefix_len, suffix_len, judged, fitted, num_fit_suffixes, num_choice_suffixes, num_test_suffixes, seed
    )
    epsilons = _epsilons(epsilon)
    asked = [Method(*parse_method(spec)) for spec in method] if method else list(PROFILE_METHODS)
    for wanted in asked:
        seeded_compressor(wanted.name, wanted.options, seed)
    counts = counts or slot_grid(prefix_len)
    check_slots(counts, prefix_len)
    loaded = {label: kvcat.load(folder, dtype=dtype, device=device) for label, folder in labelled.items()}
    vocab_size = check_models(loaded, plan)
    first = next(iter(loaded.values()))
    texts = _texts(first, text, split, plan, num_prefixes, vocab_size, suffixes or _earlier(out))
    dataset = "+".join(data_name(source) for source in text) + ("" if split == "all" else f":{split}")
    records = profile(loaded, texts, plan, asked, counts, out, dataset=dataset)
    _write(out, [record for record in records if record.model in loaded], epsilons, measure)


def _write(out: Path, records: list[Any], epsilons: list[float], measure: str) -> None:
    from kvcat.evals.profile_summary import profile_rows, slots_needed
    from kvcat.evals.profile_tables import needed_csv, profile_csv, profile_markdown
    from kvcat.report.profile_plot import save_profile_plot

    rows = profile_rows(records)
    needed = slots_needed(rows, epsilons, measure=measure)
    tables = profile_markdown(rows, needed, measure=measure)
    files = {"profile.csv": profile_csv(rows), "epsilon.csv": needed_csv(needed), "profile.md": tables}
    for name, content in files.items():
        (out / name).write_text(content, encoding="utf-8")
    print(tables)
    for path in [*(out / name for name in files), *save_profile_plot(rows, out, measure=measure)]:
        print(path)


def _texts(
    first: tuple[Any, Any],
    sources: list[str],
    split: Split,
    plan: "SuffixPlan",
    num_prefixes: int,
    vocab_size: int,
    given: Path | None,
) -> "list[PrefixSuffixes]":
    """Prefixes and suffixes: those of a file, or drawn with the first model."""
    from kvcat.evals import corpus_documents
    from kvcat.evals.profile_suffixes import draw_suffixes, prefix_windows, read_suffixes

    model, tokenizer = first
    documents: dict[str, list[int]] = {}
    enough, length = 0, plan.prefix_len + plan.suffix_len
    for source in sources:
        for name, content in corpus_documents(source, split, 10 * num_prefixes):
            if enough == num_prefixes:
                break
            if name in documents:
                raise InputError(f"two documents of {', '.join(sources)} share the name {name!r}")
            documents[name] = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
            enough += len(documents[name]) >= length
    found = list(documents.items())
    windows = prefix_windows(found, plan, num_prefixes)
    if given is not None:
        return read_suffixes(given, plan, windows)
    return draw_suffixes(windows, found, plan, model, vocab_size)


def _earlier(out: Path) -> Path | None:
    from kvcat.evals.profile import SUFFIXES_FILE

    return out / SUFFIXES_FILE if (out / SUFFIXES_FILE).is_file() else None


def _slots(slots: list[int] | None, keep: list[float] | None, prefix_len: int) -> list[int]:
    """The numbers asked for; none: the default."""
    if slots and keep:
        raise InputError("give one of --slots and --keep")
    for ratio in keep or []:
        check_keep(ratio)
    from kvcat.compress import slots_for

    return slots or [slots_for(prefix_len, ratio, None) for ratio in keep or []]


def _epsilons(given: list[float] | None) -> list[float]:
    for epsilon in given or []:
        if not epsilon > 0:
            raise InputError(f"--epsilon is {epsilon:g}; it must be larger than 0")
    return given or [1.0, 0.3, 0.1, 0.03, 0.01]
