"""``kvcat eval profile``: a model's compressibility, measured."""

from pathlib import Path
from typing import Literal

from kvcat.cli import options as opt
from kvcat.methods import parse_method


def profile(
    models: opt.Models,
    /,
    text: opt.Strings,
    out: Path = Path("out/profile"),
    slots: opt.Ints = (),
    method: opt.Strings = (),
    prefix_len: int = 128,
    suffix_len: int = 16,
    num_prefixes: int = 2,
    split: Literal["all", "test", "validation", "train"] = "all",
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    dtype: opt.Dtype = "float32",
) -> None:
    """Measure a model's compressibility on a text: the error of the best cache found against its slots.

    The definition asks for one cache per prefix that serves every suffix. Here caches are fitted to some suffixes and
    judged on others, that no cache was fitted to or chosen by. Several models meet the same prefixes and suffixes; the
    first one draws some of these. Killed and started again, it continues.

    Example: kvcat eval profile kvcat-base --text book.txt --slots 1 4 16 64

    Args:
        text: A text file, .jsonl or .parquet, a folder of them, installed, or hub:NAME; several may be given.
        out: Folder for records, tables and the plot.
        slots: Slots per layer and head, from 1 to --prefix-len; 1 2 4 8 ... by default.
        method: Methods among which the best cache is chosen; by default attention-matching, 40 gradient steps from it,
            snapkv, h2o.
        prefix_len: Tokens of a prefix.
        suffix_len: Tokens of a suffix.
        num_prefixes: Prefixes: the beginning of every document, then what follows it.
        split: Documents of the text to use; test and validation by a hash of the document's name.
    """
    opt.check_least(0, seed=seed)
    opt.check_method(*opt.flat(method))
    folders = opt.labelled(models)
    opt.check_model(*folders.values())

    import kvcat
    from kvcat.compress import seeded_compressor
    from kvcat.evals import Method, evaluate
    from kvcat.evals.profile import METHODS, Plan, make_task, slot_ratios
    from kvcat.evals.profile_table import profile_markdown, profile_table
    from kvcat.report.plots import save_profile_plot

    methods = [Method(*parse_method(spec)) for spec in opt.flat(method)] or list(METHODS)
    for wanted in methods:
        seeded_compressor(wanted.name, wanted.options, seed)
    plan, keeps = Plan(prefix_len, suffix_len, seed=seed), slot_ratios(opt.flat(slots), prefix_len)
    loaded = {label: kvcat.load(folder, dtype=dtype, device=device) for label, folder in folders.items()}
    task = make_task(loaded, opt.flat(text), split, plan=plan, num_prefixes=num_prefixes)
    records = evaluate(task, loaded, methods, keeps, out, batch_size=1, seeds=[seed])
    table = profile_table([record for record in records if record.model in loaded])
    table.to_csv(out / "profile.csv", index=False)
    (out / "profile.md").write_text(tables := profile_markdown(table), encoding="utf-8")
    print(tables)
    for name in ("profile.csv", "profile.md"):
        print(out / name)
    print(save_profile_plot(table, out))
