"""``kvcat eval profile``: a model's compressibility, measured."""

from pathlib import Path

from kvcat.cli import options as opt
from kvcat.cli.evaluate import Split
from kvcat.methods import parse_method


def profile(
    models: opt.Models,
    /,
    text: str,
    out: Path = Path("out/profile"),
    slots: opt.Ints = (),
    method: opt.Strings = (),
    prefix: int = 128,
    suffix: int = 128,
    windows: int = 16,
    split: Split = "all",
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    dtype: opt.Dtype = "float32",
) -> None:
    """Measure a model's compressibility on a text: the error of the best cache found against its slots.

    Every method fits a cache to the first half of what follows a prefix, the second half judges it, and for every
    window the smallest KL counts. A stopped evaluation continues.

    Example: kvcat eval profile kvcat-base --text book.txt --slots 1 4 16 64

    Args:
        text: A text file, .jsonl or .parquet, a folder of them, installed, or hub:NAME.
        out: Folder for records, tables and the plot; `kvcat report` reads it as well.
        slots: Slots per layer and head, from 1 to --prefix; 1 2 4 8 ... by default.
        method: Methods to choose from; attention-matching, 40 gradient steps from it, snapkv and h2o by default.
        prefix: Tokens of a prefix.
        suffix: Tokens behind it, at least 4.
        windows: Prefixes, of as many documents as there are.
        split: Documents of the text to use; test and validation by a hash of the document's name.
    """
    opt.check_least(0, seed=seed)
    opt.check_least(1, prefix=prefix, windows=windows)
    opt.check_least(4, suffix=suffix)
    opt.check_method(*opt.flat(method))
    folders = opt.labelled(models)
    opt.check_model(*folders.values())

    import kvcat
    from kvcat.compress import seeded_compressor
    from kvcat.evals import Method, evaluate
    from kvcat.evals.profile import METHODS, SUPERVISION, profile_markdown, profile_table, slot_ratios
    from kvcat.evals.suffix import make_task
    from kvcat.report.plots import save_profile_plot

    methods = [Method(*parse_method(spec)) for spec in opt.flat(method)] or list(METHODS)
    for wanted in methods:
        seeded_compressor(wanted.name, wanted.options, seed)
    keeps = slot_ratios(opt.flat(slots), prefix)
    loaded = {label: kvcat.load(folder, dtype=dtype, device=device) for label, folder in folders.items()}
    task = make_task(
        next(iter(loaded.values()))[1], text, split,
        prefix=prefix, suffix=suffix, windows=windows, per_document=windows, seed=seed, supervision=SUPERVISION,
    )  # fmt: skip
    records = evaluate(task, loaded, methods, keeps, out, seeds=[seed])
    table = profile_table([record for record in records if record.model in loaded], prefix)
    table.to_csv(out / "profile.csv", index=False)
    (out / "profile.md").write_text(tables := profile_markdown(table), encoding="utf-8")
    print(tables)
    for name in ("profile.csv", "profile.md"):
        print(out / name)
    print(save_profile_plot(table, out))
