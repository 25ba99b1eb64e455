"""``kvcat eval``: what a compressed cache costs in quality."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from kvcat.cli.options import (
    Device,
    Dtype,
    Floats,
    Ints,
    Models,
    Seed,
    Strings,
    check_keep,
    check_least,
    check_method,
    check_model,
    flat,
    labelled,
)
from kvcat.errors import InputError
from kvcat.methods import parse_method

if TYPE_CHECKING:
    from kvcat.evals import Task

Split = Literal["all", "test", "validation", "train"]
Supervision = Literal["reconstruction", "self"]
NEEDLE_KEEPS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)


@dataclass(frozen=True)
class Running:
    """Where an evaluation runs and writes. Stopped and started again, it continues."""

    out: Path
    """Folder for the records, the summary and the report."""
    shard: str | None = None
    """INDEX/COUNT: only every COUNT-th batch, from 0; shards share one --out and `kvcat report` joins them. torchrun
    sets it by itself, one shard a process."""
    device: Device = "cpu"
    dtype: Dtype = "float32"


@dataclass(frozen=True)
class Compressing(Running):
    """Which caches are compared, and where. Stopped and started again, an evaluation continues."""

    method: Strings = ()
    """Methods, NAME or NAME,option=value,... (docs/compress.md); attention-matching if none is given."""
    keep: Floats = ()
    """Fractions of the slots to KEEP, each in (0, 1]."""
    seed: Ints = ()
    """Seeds of compressors that draw; several give a record each, averaged; 0 if none is given."""
    speed: bool = False
    """Also time answers: seconds to the first token, tokens per second."""


Common = tyro.conf.OmitArgPrefixes[Compressing]
Uncompressed = tyro.conf.OmitArgPrefixes[Running]


def suffix(
    models: Models,
    /,
    common: Common,
    data: Strings = (),
    split: Split = "test",
    supervision: Literal["suffix", "first-half", "reconstruction"] = "suffix",
    prefix: int = 768,
    suffix: int = 256,
    windows: int = 64,
    per_document: int = 2,
    window_seed: int = 0,
    batch_size: int = 8,
) -> None:
    """Compress the prefix of held-out windows and score the suffix on the compact cache.

    Reports NLL on the compact cache, delta NLL, delta PPL, KL, top-1 agreement, context gain and retention with 95 %
    intervals, paired between models. Default keep ratios: 0.05 0.1 0.2 0.4.

    Example: kvcat eval suffix base=./base kvcat=./runs/router/export --keep 0.05 0.1 --out results

    Args:
        data: installed (the default), a text file, .jsonl or .parquet, a folder of them, hub:NAME, or wikitext-103,
            pg-19, arxiv, fineweb-edu from the Hub; several give a folder each.
        split: Documents to use; test and validation are held out by a hash of the document's name.
        supervision: What caches are fitted to: the suffix that is scored (the paper's probe); its first half, and the
            rest is scored; or the prefix repeated after an instruction.
        prefix: Tokens of the compressed prefix.
        suffix: Tokens of the scored suffix.
        windows: Windows to evaluate.
        per_document: Most windows from one document.
        window_seed: Seed of the choice of windows.
        batch_size: Examples a forward pass.
    """
    check_least(2, prefix=prefix, suffix=suffix)
    check_least(1, windows=windows, per_document=per_document)
    sources = flat(data) or ["installed"]

    def tasks(tokenizer: Any) -> "dict[str, Task]":
        from kvcat.evals.suffix import make_task

        made: dict[str, Task] = {}
        for source in sources:
            name = re.sub(r"[^\w.-]+", "-", source).strip("-.") if len(sources) > 1 else ""
            if name in made:
                raise InputError(f"two --data would write to the same folder {name!r}")
            made[name] = make_task(
                tokenizer, source, split, prefix=prefix, suffix=suffix, windows=windows, per_document=per_document,
                seed=window_seed, supervision=supervision,
            )  # fmt: skip
        return made

    title = "Suffix prediction on a compressed prefix"
    _run(models, common, tasks, title, keeps=(0.05, 0.1, 0.2, 0.4), batch_size=batch_size)


def needle(
    models: Models,
    /,
    common: Common,
    length: int = 1024,
    per_depth: int = 20,
    filler: Path | None = None,
    needle_seed: int = 0,
    supervision: Supervision = "reconstruction",
    batch_size: int = 8,
) -> None:
    """Compress a haystack with a six-digit passkey, then ask for it: greedy answer, exact match.

    The paper's method: --method gradient,init=random. A model that cannot find the passkey with its whole cache has
    no figure here worth reading; the dense accuracy stands beside every other. Default keep ratios: 0.05 to 0.4 in
    steps of 0.05, and 0.5.

    Example: kvcat eval needle base=./base kvcat=./export --method gradient,init=random --keep 0.1 0.2 --out needle

    Args:
        length: Tokens of the haystack, exactly.
        per_depth: Examples at each of five depths; 20 is the paper's, 100 carries claims.
        filler: Text file whose sentences are the hay; sentences of our own otherwise.
        needle_seed: Seed of the examples.
        supervision: What caches are fitted to: the text repeated after an instruction (needs twice the positions), or
            its own queries.
        batch_size: Examples a forward pass.
    """
    check_least(1, length=length, per_depth=per_depth)

    def tasks(tokenizer: Any) -> "dict[str, Task]":
        from kvcat.evals.needle import make_task

        settings = {"length": length, "per_depth": per_depth, "filler": filler, "seed": needle_seed}
        return {"": make_task(tokenizer, **settings, supervision=supervision)}

    _run(models, common, tasks, "A passkey in a compressed haystack", keeps=NEEDLE_KEEPS, batch_size=batch_size)


def longbench(
    models: Models,
    /,
    common: Common,
    data: str = "hub:zai-org/LongBench-v2",
    sub_domain: Strings = (),
    max_tokens: int = 32_768,
    limit: int | None = None,
) -> None:
    """Compress long contexts by reconstruction, then answer the question on the compact cache.

    The four answers are scored by log-likelihood; dense, no context, and plain text of the same budget stand beside.
    The paper's method: --method gradient,activation_checkpointing=true. Figures of a model whose dense accuracy is not
    above chance are labelled plumbing. Default keep ratios: 0.1 0.2 0.5.

    Example: kvcat eval longbench base=./base kvcat=./export --method gradient --keep 0.1 0.2 0.5 --out longbench

    Args:
        data: hub:OWNER/NAME, or a .jsonl, .json or .parquet file in LongBench v2's schema.
        sub_domain: Sub-domains, or `all`; by default the paper's seven, 221 rows.
        max_tokens: Longest sequence; contexts are cut in the middle so that their repetition fits.
        limit: The first so many examples, a fair sample.
    """
    check_least(64, max_tokens=max_tokens)
    check_least(1, limit=limit)
    keeps = (0.1, 0.2, 0.5)

    def tasks(tokenizer: Any) -> "dict[str, Task]":  # noqa: ARG001 examples are text
        from kvcat.evals.longbench import PAPER_SUB_DOMAINS, make_task

        chosen = tuple(flat(sub_domain)) or PAPER_SUB_DOMAINS
        settings = {"limit": limit, "max_tokens": max_tokens, "keep_ratios": tuple(flat(common.keep) or keeps)}
        return {"": make_task(data, sub_domains=None if chosen == ("all",) else chosen, **settings)}

    _run(models, common, tasks, "LongBench v2 on compressed contexts", keeps=keeps, batch_size=1)


def ruler(
    models: Models,
    /,
    common: Common,
    task: Strings = (),
    length: Ints = (),
    per_task: int = 20,
    ruler_seed: int = 0,
    supervision: Supervision = "reconstruction",
    batch_size: int = 1,
) -> None:
    """Compress texts in which something is hidden, then ask for it: RULER's tasks that need no data.

    Score: the share of the right answers that the greedy answer contains, as in RULER (Hsieh et al. 2024). Default
    keep ratios: 0.05 0.1 0.2 0.4.

    Example: kvcat eval ruler ./model --length 4096 16384 --keep 0.1 0.2 --out ruler

    Args:
        task: niah_single, niah_multikey_1, niah_multikey_2, niah_multivalue, niah_multiquery, vt (variable tracking),
            cwe (common words), fwe (frequent words); all by default.
        length: Tokens of the text, 4096 by default; several give a folder each.
        per_task: Examples of each task.
        ruler_seed: Seed of the examples.
        supervision: What caches are fitted to: the text repeated after an instruction (needs twice the positions), or
            its own queries.
        batch_size: Examples a forward pass.
    """
    check_least(1, per_task=per_task)
    lengths = list(dict.fromkeys(flat(length))) or [4096]

    def tasks(tokenizer: Any) -> "dict[str, Task]":
        from kvcat.evals.ruler import make_task

        settings = {"tasks": flat(task) or None, "per_task": per_task, "seed": ruler_seed, "supervision": supervision}
        return {
            str(tokens) if len(lengths) > 1 else "": make_task(tokenizer, length=tokens, **settings)
            for tokens in lengths
        }

    keeps = (0.05, 0.1, 0.2, 0.4)
    _run(models, common, tasks, "RULER on compressed contexts", keeps=keeps, batch_size=batch_size)


def qa(
    models: Models,
    /,
    common: Uncompressed,
    data: Path | None = None,
    task: Strings = (),
    limit: int = 1000,
    winogrande: Literal["partial", "whole"] = "partial",
    question_seed: int = 0,
    batch_size: int = 32,
) -> None:
    """Zero-shot multiple choice with the whole model, nothing compressed: what training did to the model itself.

    The answer with the highest log-likelihood per character counts. Averages over the paper's six tasks, over seven
    with Social IQa, over eight with CommonsenseQA.

    Example: kvcat eval qa base=./base kvcat=./export --out qa

    Args:
        data: Folder of JSON lines, a file TASK*.jsonl each; the Hub by default.
        task: hellaswag, winogrande, piqa, social_i_qa, openbookqa, arc_easy, arc_challenge, commonsense_qa; all by
            default.
        limit: Questions of each task, the same for every model.
        winogrande: partial scores what follows the blank (lm-evaluation-harness), whole the option with it
            (LightEval, which the paper used).
        question_seed: Seed of the choice of questions.
        batch_size: Questions a forward pass.
    """
    check_least(1, limit=limit)

    def tasks(tokenizer: Any) -> "dict[str, Task]":  # noqa: ARG001 questions are text
        from kvcat.evals.qa import make_task

        settings = {"num_examples": limit, "seed": question_seed, "winogrande": winogrande}
        return {"": make_task(data, tasks=flat(task) or None, **settings)}

    _run(models, common, tasks, "Multiple choice without compression", keeps=(), batch_size=batch_size)


def profile(
    models: Models,
    /,
    text: Strings,
    out: Path = Path("out/profile"),
    slots: Ints = (),
    keep: Floats = (),
    method: Strings = (),
    prefix_len: int = 128,
    suffix_len: int = 16,
    num_prefixes: int = 2,
    split: Split = "all",
    num_fit_suffixes: int = 16,
    num_choice_suffixes: int = 8,
    num_test_suffixes: int = 16,
    measure: Literal["kl", "tv", "log_prob", "output"] = "kl",
    epsilon: Floats = (),
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
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
        keep: In place of --slots: fractions of the slots to KEEP, each in (0, 1].
        method: Methods among which the best cache is chosen; by default attention-matching, 40 gradient steps from it,
            snapkv, h2o.
        prefix_len: Tokens of a prefix.
        suffix_len: Tokens of a suffix.
        num_prefixes: Prefixes: the beginning of every document, then what follows it.
        split: Documents of the text to use; test and validation by a hash of the document's name.
        num_fit_suffixes: Suffixes of each kind but the true one that caches are fitted to.
        num_choice_suffixes: Further ones by which the best cache is chosen.
        num_test_suffixes: Further suffixes of every kind, to judge on.
        measure: Error in tables and plot: KL, total variation, largest difference of log-probabilities, or norm of the
            output's difference. The CSV file has all.
        epsilon: Errors for which the fewest slots are printed; 1 0.3 0.1 0.03 0.01 by default.
    """
    folders, epsilons, ratios = labelled(models), flat(epsilon) or [1.0, 0.3, 0.1, 0.03, 0.01], flat(keep)
    if slots and keep:
        raise InputError("give one of --slots and --keep")
    check_keep(*ratios)
    check_least(0, seed=seed)
    check_method(*flat(method))
    check_model(*folders.values())
    for value in epsilons:
        if not value > 0:
            raise InputError(f"--epsilon is {value:g}; it must be larger than 0")

    import kvcat
    from kvcat.compress import seeded_compressor, slots_for
    from kvcat.evals import Method, evaluate
    from kvcat.evals.profile import METHODS, Plan, make_task, slot_grid, slot_ratios
    from kvcat.evals.profile_summary import profile_markdown, profile_table, slots_needed
    from kvcat.report.profile_plot import save_profile_plot

    plan = Plan(prefix_len, suffix_len, num_fit_suffixes, num_choice_suffixes, num_test_suffixes, seed)
    methods = [Method(*parse_method(spec)) for spec in flat(method)] or list(METHODS)
    for wanted in methods:
        seeded_compressor(wanted.name, wanted.options, seed)
    counts = flat(slots) or [slots_for(prefix_len, ratio, None) for ratio in ratios] or slot_grid(prefix_len)
    keeps = slot_ratios(counts, prefix_len)
    loaded = {label: kvcat.load(folder, dtype=dtype, device=device) for label, folder in folders.items()}
    task = make_task(loaded, flat(text), split, plan=plan, num_prefixes=num_prefixes)
    records = evaluate(task, loaded, methods, keeps, out, batch_size=1, seeds=[seed])
    table = profile_table([record for record in records if record.model in loaded])
    tables = profile_markdown(table, epsilons, measure=measure)
    table.to_csv(out / "profile.csv", index=False)
    slots_needed(table, epsilons, measure=measure).to_csv(out / "epsilon.csv", index=False)
    (out / "profile.md").write_text(tables, encoding="utf-8")
    print(tables)
    names = ("profile.csv", "epsilon.csv", "profile.md")
    for path in [*(out / name for name in names), *save_profile_plot(table, out, measure=measure)]:
        print(path)


def _run(
    models: Models,
    common: Running,
    tasks: "Callable[[Any], Mapping[str, Task]]",
    title: str,
    *,
    keeps: Sequence[float],
    batch_size: int,
) -> None:
    """Evaluate, report, print.

    Args:
        models: FOLDER or LABEL=FOLDER.
        common: options of the command line.
        tasks: makes the tasks from the first model's tokenizer: folder in ``common.out`` ("" is itself) to task.
        title: of the report.
        keeps: keep ratios where the command line names none; none at all compresses nothing.
        batch_size: examples a forward pass.

    Raises:
        InputError: a person's mistake, before heavy work.
    """
    specs, ratios, seeds, speed = [], list(keeps), [0], False
    if isinstance(common, Compressing):
        specs = flat(common.method) or ["attention-matching"]
        ratios, seeds, speed = flat(common.keep) or ratios, flat(common.seed) or seeds, common.speed
    check_keep(*ratios)
    check_least(1, batch_size=batch_size)
    check_method(*specs)
    for seed in seeds:
        check_least(0, seed=seed)
    folders, (index, count) = labelled(models), _shard(common.shard)
    check_model(*folders.values())

    import kvcat
    from kvcat.compress import seeded_compressor
    from kvcat.evals import Method, evaluate, read_records, summarise
    from kvcat.report import headline_text, write_report

    methods = [Method(*parse_method(spec)) for spec in specs]
    for method in methods:
        seeded_compressor(method.name, method.options, seeds[0])
    device = common.device if common.device != "cuda" else f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    loaded = {label: kvcat.load(folder, dtype=common.dtype, device=device) for label, folder in folders.items()}
    written = []
    for name, task in tasks(next(iter(loaded.values()))[1]).items():
        written.append(common.out / name)
        evaluate(
            task, loaded, methods, ratios, written[-1],
            batch_size=batch_size, seeds=seeds, shard=(index, count), speed=speed,
        )  # fmt: skip
    if count > 1:
        print(f"shard {index} of {count} is done; when all are: kvcat report {' '.join(map(str, written))}")
        return
    page = write_report(written, common.out / "report", title=title)
    for folder in written:
        print(headline_text(summarise(read_records(folder))))
    print(page)


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    index, slash, count = text.partition("/")
    if not slash or not index.isdecimal() or not count.isdecimal() or int(index) >= int(count):
        raise InputError(f"--shard takes INDEX/COUNT with INDEX from 0 to COUNT - 1, not {text!r}")
    return int(index), int(count)
