"""``kvcat eval`` and ``kvcat report``: the loss of quality through compressed caches."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from kvcat.choices import SuffixSupervision
from kvcat.cli import early
from kvcat.cli import options as opt
from kvcat.errors import InputError

if TYPE_CHECKING:
    from kvcat.evals import Method, Task

BatchSize = Annotated[opt.Count, tyro.conf.arg(help="Examples per forward pass.")]
DataSeed = Annotated[opt.Seed, tyro.conf.arg(help="Seed of the draw of examples.")]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The options of every evaluation; a subclass adds those of its ``make_task``.

    Tyro makes a subclass a command.
    """

    folder_option: ClassVar[str] = ""
    """The option of which every value is evaluated in its own folder; empty: there is none."""

    models: tyro.conf.Positional[opt.Models]
    out: Path
    """Folder to write; a stopped evaluation continues. Processes of torchrun share the work."""
    device: opt.Device = "cpu"
    dtype: opt.Dtype = "float32"
    data_seed: DataSeed = 0
    batch_size: BatchSize = 8

    def task(self, tokenizer: Any, value: Any) -> "Task":
        """The examples and how they are scored.

        Args:
            tokenizer: of the first model.
            value: of the ``folder_option``; None: its default.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Reject options that are wrong for every model, before torch is imported."""
        early.check_device(self.device)

    def settings(self) -> dict[str, Any]:
        """Further arguments of ``evaluate``."""
        return {"methods": [], "keep_ratios": []}

    def run(self) -> None:
        """Evaluate, report and print."""
        self.check()
        folders = find_models(self.models)

        from kvcat.evals import configuration, evaluate
        from kvcat.models import load_tokenizer

        settings = self.settings()
        settings["batch_size"] = self.batch_size
        speed = settings.pop("speed", False)
        tokenizer = load_tokenizer(next(iter(folders.values())))
        tasks = self._tasks(tokenizer)
        for task in tasks.values():
            configuration(task, **settings)  # rejects what cannot be evaluated
        process = int(os.environ.get("RANK", 0))
        num_processes = int(os.environ.get("WORLD_SIZE", 1))
        models = load_models(folders, self._process_device(), self.dtype)
        for task in tasks.values():  # all of them before the first one is evaluated
            for label, model in models.items():
                task.check(label, *model)
        shard = (process, num_processes)
        for folder, task in tasks.items():
            evaluate(task, models, out_dir=folder, shard=shard, speed=speed, **settings)
        if num_processes > 1:
            names = " ".join(map(str, tasks))
            print(
                f"shard {process} of {num_processes} is done; "
                f"when all are done: kvcat report {names}"
            )
            return
        _print_report(list(tasks), self.out / "report")

    def _process_device(self) -> str:
        """The device; under torchrun, ``cuda`` is the GPU of this process."""
        if self.device != "cuda":
            return self.device
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}"

    def _tasks(self, tokenizer: Any) -> dict[Path, "Task"]:
        """Tasks by folder, one for every value of the ``folder_option``."""
        values: list[Any] = []
        if self.folder_option:
            values = list(dict.fromkeys(opt.flat(getattr(self, self.folder_option))))
        if len(values) < 2:
            return {self.out: self.task(tokenizer, values[0] if values else None)}
        tasks: dict[Path, Task] = {}
        for value in values:
            folder = self.out / re.sub(r"[^\w.-]+", "-", str(value)).strip("-.")
            if folder in tasks:
                raise InputError(
                    f"two --{self.folder_option} would write to the same folder {folder}"
                )
            tasks[folder] = self.task(tokenizer, value)
        return tasks


def _print_report(folders: list[Path], output: Path) -> None:
    """Write the report of evaluations; print the main figures and the page's path."""
    from kvcat.report import headline_text, read_results, write_report

    results = [read_results(folder) for folder in folders]
    page = write_report(results, output)
    for result in results:
        print(headline_text(result))
    print(page)


def find_models(items: tuple[str, ...]) -> dict[str, str]:
    """Hub names or folders of models by label; ``InputError`` if one cannot be found."""
    folders = opt.labelled(items)
    for folder in folders.values():
        early.check_model(folder)
    return folders


def load_models(folders: dict[str, str], device: str, dtype: str) -> dict[str, Any]:
    """Model and tokenizer by label."""
    import kvcat

    return {
        label: kvcat.load(folder, dtype=dtype, device=device) for label, folder in folders.items()
    }


@dataclass(frozen=True, kw_only=True)
class Compressing(Evaluation):
    """The options of every evaluation that compresses."""

    default_keeps: ClassVar[tuple[float, ...]] = ()

    method: opt.Strings = ()
    """Methods, NAME or NAME,option=value,... (docs/compress.md); attention-matching by default."""
    keep: opt.Fractions = ()
    """Fractions of the slots to KEEP, each in (0, 1]."""
    seed: opt.Seeds = ()
    """Seeds of compressors that draw; the report averages the records of several. 0 by default."""
    primary: Annotated[
        tuple[str, float, str] | None,
        tyro.conf.arg(metavar="METHOD KEEP METRIC"),
    ] = None
    """The cell that decides, such as attention-matching 0.1 nll; by default the first of each."""
    speed: bool = False
    """Also time answers: seconds to the first token, tokens per second."""

    def check(self) -> None:  # noqa: D102
        super().check()
        for method in opt.flat(self.method):
            early.check_method(method)

    def settings(self) -> dict[str, Any]:  # noqa: D102
        settings: dict[str, Any] = {
            "methods": parse_methods(opt.flat(self.method) or ["attention-matching"]),
            "keep_ratios": self.keep_ratios(),
            "seeds": opt.flat(self.seed) or [0],
            "speed": self.speed,
        }
        if self.primary is not None:
            spec, keep_ratio, metric = self.primary
            method = parse_methods([spec])[0]
            settings["primary"] = (method.label, keep_ratio, metric)
        return settings

    def keep_ratios(self) -> list[float]:
        """The fractions of the slots that caches keep."""
        return opt.flat(self.keep) or list(self.default_keeps)


def parse_methods(specs: list[str]) -> list["Method"]:
    """The methods of a command line; ``InputError`` for an unknown one or wrong options."""
    from kvcat.compress import make_compressor, parse_method
    from kvcat.evals import Method

    methods = [Method(*parse_method(spec)) for spec in specs]
    for method in methods:
        make_compressor(method.name, **method.options)
    return methods


@dataclass(frozen=True, kw_only=True)
class Suffix(Compressing):
    """Compress the prefix of held-out windows and score the suffix on the compact cache.

    Default keep ratios: 0.05 0.1 0.2 0.4.

    Example: kvcat eval suffix base=./base kvcat=./runs/router/export --keep 0.05 0.1 --out results
    """

    default_keeps = (0.05, 0.1, 0.2, 0.4)
    folder_option = "data"

    data: opt.Strings = ()
    """installed, a file or folder of texts, hub:NAME, wikitext-103, pg-19, arxiv, fineweb-edu;
    several may be given."""
    split: opt.Split = "test"
    supervision: SuffixSupervision = "suffix"
    """Text that caches are fitted to: the scored suffix (the paper), its first half (only the
    second is scored), or a repetition of the prefix."""
    prefix: opt.Count = 768
    """Tokens of the compressed prefix."""
    suffix: opt.Count = 256
    """Tokens of the scored suffix."""
    windows: opt.Count = 64
    """Number of windows to evaluate."""
    per_document: opt.Count = 2
    """Largest number of windows from one document."""
    bos: opt.Bos = "auto"

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: D102
        from kvcat.evals.suffix import make_task

        return make_task(
            tokenizer,
            value or "installed",
            self.split,
            prefix=self.prefix,
            suffix=self.suffix,
            windows=self.windows,
            per_document=self.per_document,
            seed=self.data_seed,
            supervision=self.supervision,
            bos=self.bos,
        )


@dataclass(frozen=True, kw_only=True)
class Needle(Compressing):
    """Compress a haystack with a six-digit passkey, then ask for it: greedy answer, exact match.

    The paper's method: --method gradient,init=random. Default keep ratios: 0.05 to 0.4 in steps of
    0.05, and 0.5.

    Example: kvcat eval needle base=./base kvcat=./export --keep 0.1 0.2 --out needle
    """

    default_keeps = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)

    length: opt.Count = 1024
    """Tokens of the haystack, exactly."""
    per_depth: opt.Count = 20
    """Examples at each of five depths; the paper has 20, use 100 for results you publish."""
    bos: opt.Bos = "auto"

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.needle import make_task

        return make_task(
            tokenizer,
            length=self.length,
            per_depth=self.per_depth,
            seed=self.data_seed,
            bos=self.bos,
        )


@dataclass(frozen=True, kw_only=True)
class LongBench(Compressing):
    """Compress long contexts by reconstruction, then answer the question on the compact cache.

    The four answers are scored by log-likelihood. Baselines are the dense cache, no context, and
    plain text of the same budget. The paper's method: --method
    gradient,activation_checkpointing=true. Default keep ratios: 0.1 0.2 0.5.

    Example: kvcat eval longbench base=./base kvcat=./export --method gradient --out longbench
    """

    default_keeps = (0.1, 0.2, 0.5)

    data: str = "hub:zai-org/LongBench-v2"
    """hub:OWNER/NAME, or a .jsonl, .json or .parquet file in LongBench v2's schema."""
    sub_domain: opt.Strings = ()
    """Sub-domains, or `all`; by default the paper's seven, 221 rows."""
    max_tokens: opt.Count = 32_768
    """Longest sequence, in tokens; contexts are cut in the middle so that their repetition fits."""
    limit: opt.Count | None = None
    """Number of examples; the first ones are a fair sample. All by default."""
    bos: opt.Bos = "auto"
    batch_size: tyro.conf.Suppress[int] = 1
    data_seed: tyro.conf.Suppress[int] = (
        0  # nothing is drawn: the order follows from the rows' names
    )

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.longbench import PAPER_SUB_DOMAINS, make_task

        sub_domains = tuple(opt.flat(self.sub_domain)) or PAPER_SUB_DOMAINS
        return make_task(
            self.data,
            sub_domains=None if sub_domains == ("all",) else sub_domains,
            limit=self.limit,
            max_tokens=self.max_tokens,
            keep_ratios=self.keep_ratios(),
            bos=self.bos,
        )


@dataclass(frozen=True, kw_only=True)
class Ruler(Compressing):
    """Compress texts in which something is hidden, then ask for it.

    These are RULER's tasks that need no data. The score is the share of right answers that the
    greedy answer contains. Default keep ratios: 0.05 0.1 0.2 0.4.

    Example: kvcat eval ruler ./model --length 4096 16384 --keep 0.1 0.2 --out ruler
    """

    default_keeps = (0.05, 0.1, 0.2, 0.4)
    folder_option = "length"

    tasks: Annotated[opt.Strings, tyro.conf.arg(name="task")] = ()
    """niah_single, niah_multikey_1, niah_multikey_2, niah_multivalue, niah_multiquery, vt, cwe,
    fwe; all by default."""
    length: opt.Counts = ()
    """Tokens of the text, 4096 by default; each of several values has its own folder."""
    per_task: opt.Count = 20
    """Examples of each task."""
    bos: opt.Bos = "auto"
    batch_size: BatchSize = 1

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: D102
        from kvcat.evals.ruler import make_task

        tasks = opt.flat(self.tasks) or None
        return make_task(
            tokenizer,
            length=value or 4096,
            tasks=tasks,
            per_task=self.per_task,
            seed=self.data_seed,
            bos=self.bos,
        )


@dataclass(frozen=True, kw_only=True)
class QA(Evaluation):
    """Answer multiple-choice questions without examples and without compression.

    Shows how training changed the model itself. The model's answer is the one with the highest
    log-likelihood per character.

    Example: kvcat eval qa base=./base kvcat=./export --out qa
    """

    data: Path | None = None
    """Folder with a file TASK*.jsonl of JSON lines for each task; the Hub by default."""
    tasks: Annotated[opt.Strings, tyro.conf.arg(name="task")] = ()
    """hellaswag, winogrande, piqa, social_i_qa, openbookqa, arc_easy, arc_challenge,
    commonsense_qa; all by default."""
    limit: opt.Count = 1000
    """Questions of each task, the same for every model."""

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.qa import make_task

        tasks = opt.flat(self.tasks) or None
        return make_task(self.data, tasks=tasks, num_examples=self.limit, seed=self.data_seed)


def profile(
    models: opt.Models,
    /,
    data: str,
    out: Path = Path("out/profile"),
    slots: opt.Counts = (),
    method: opt.Strings = (),
    prefix: opt.Count = 128,
    suffix: opt.Count = 128,
    windows: opt.Count = 16,
    split: opt.Split = "all",
    bos: opt.Bos = "auto",
    seed: opt.Seed = 0,
    data_seed: DataSeed = 0,
    device: opt.Device = "cpu",
    dtype: opt.Dtype = "float32",
) -> None:
    """Measure a model's compressibility on a text: the smallest error for each number of slots.

    Every method fits a cache to the first half of the text after a prefix. The error is the KL on
    the second half, and for every window the smallest KL of all methods counts. A stopped
    evaluation continues.

    Example: kvcat eval profile kvcat-base --data book.txt --slots 1 4 16 64

    Args:
        data: A text file, .jsonl or .parquet, a folder of them, installed, or hub:NAME.
        out: Folder for records and the table; `kvcat report` reads it as well.
        slots: Slots per layer and head, from 1 to --prefix; 1 2 4 8 ... by default.
        method: Methods to choose from; by default attention-matching, 40 gradient steps from it,
            snapkv and h2o.
        prefix: Tokens of a prefix.
        suffix: Tokens after a prefix, at least 4.
        windows: Number of prefixes, from as many documents as there are.
    """
    early.check_device(device)
    for spec in opt.flat(method):
        early.check_method(spec)
    folders = find_models(models)

    from kvcat.evals import evaluate
    from kvcat.evals.profile import (
        METHODS,
        SUPERVISION,
        profile_table,
        profile_text,
        slot_ratios,
    )
    from kvcat.evals.suffix import make_task
    from kvcat.models import load_tokenizer
    from kvcat.report.plots import save_profile_plot

    methods = parse_methods(opt.flat(method)) or list(METHODS)
    keep_ratios = slot_ratios(opt.flat(slots), prefix)
    task = make_task(
        load_tokenizer(next(iter(folders.values()))),
        data,
        split,
        prefix=prefix,
        suffix=suffix,
        windows=windows,
        per_document=windows,
        seed=data_seed,
        supervision=SUPERVISION,
        bos=bos,
    )
    loaded = load_models(folders, device, dtype)
    records = evaluate(task, loaded, methods, keep_ratios, out, seeds=[seed])
    table = profile_table([record for record in records if record.model in loaded], prefix)
    table_file = out / "profile.csv"
    table.to_csv(table_file, index=False)
    plot_file = save_profile_plot(table, out)
    print(profile_text(table))
    print(table_file)
    print(plot_file)


def report(
    folders: tuple[Path, ...],
    /,
    output: opt.Output = Path("report"),
    run: opt.Strings = (),
    paper_model: Literal["Qwen2.5-0.5B", "Qwen2.5-1.5B"] | None = None,
    title: str = "KV cache compression",
) -> None:
    """Write a report on evaluations and training runs.

    It has tables (Markdown, CSV, LaTeX), plots and one self-contained HTML page.

    Example: kvcat report results needle --run KV-CAT=runs/router -o report

    Args:
        folders: Folders that `kvcat eval` or `kvcat train` wrote.
        output: Folder for tables, plots and report.html.
        run: LABEL=FOLDER of a training run, to show its diagnostics; several may be given.
        paper_model: Model that those labelled base, kvcat, rand and attn were made from, to show
            the paper's figures next to yours.
        title: Title of the page.
    """
    from kvcat.report import write_report

    trained = [str(folder) for folder in folders if (folder / "metrics.jsonl").exists()]
    evaluated = [folder for folder in folders if str(folder) not in trained]
    items = [*trained, *opt.flat(run)]
    runs: dict[str, Path] = {}
    if items:
        runs = {label: Path(folder) for label, folder in opt.labelled(items).items()}
    print(write_report(evaluated, output, title=title, runs=runs, paper_model=paper_model))
