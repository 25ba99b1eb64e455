"""``kvcat eval`` and ``kvcat report``: what a compressed cache costs in quality."""

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
DataSeed = Annotated[opt.Seed, tyro.conf.arg(help="Seed of the choice of examples.")]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The options of every evaluation; a subclass adds those of its ``make_task``. Tyro makes both a command line."""

    several: ClassVar[str] = ""  # an option of several values, each of which gives a folder of its own
    models: tyro.conf.Positional[opt.Models]
    out: Path
    """Folder for records and report. A stopped evaluation continues; under torchrun, processes share the work."""
    device: opt.Device = "cpu"
    dtype: opt.Dtype = "float32"
    data_seed: DataSeed = 0
    batch_size: BatchSize = 8

    def task(self, tokenizer: Any, value: Any) -> "Task":
        """The examples and how they are scored; ``value`` is one of ``several``."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse options that are wrong whatever the models, before torch is imported."""
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
        from kvcat.report import headline_text, read_results, write_report

        settings = self.settings()
        speed = settings.pop("speed", False)
        index, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        device = self.device if self.device != "cuda" else f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        tokenizer = load_tokenizer(next(iter(folders.values())))
        values = list(dict.fromkeys(opt.flat(getattr(self, self.several)))) if self.several else []
        tasks: dict[Path, Task] = {}
        for value in values or [None]:
            folder = self.out / (re.sub(r"[^\w.-]+", "-", str(value)).strip("-.") if len(values) > 1 else "")
            if folder in tasks:
                raise InputError(f"two --{self.several} would write to the same folder {folder}")
            tasks[folder] = self.task(tokenizer, value)
            configuration(tasks[folder], batch_size=self.batch_size, **settings)  # refuses what cannot be evaluated
        models = load_models(folders, device, self.dtype)
        for task in tasks.values():  # each of them before the first one runs
            for label, model in models.items():
                task.check(label, *model)
        settings |= {"batch_size": self.batch_size, "shard": (index, count), "speed": speed}
        for folder, task in tasks.items():
            evaluate(task, models, out_dir=folder, **settings)
        if count > 1:
            print(f"shard {index} of {count} is done; when all are: kvcat report {' '.join(map(str, tasks))}")
            return
        results = [read_results(folder) for folder in tasks]
        page = write_report(results, self.out / "report")
        for result in results:
            print(headline_text(result))
        print(page)


def find_models(items: tuple[str, ...]) -> dict[str, str]:
    """Name or folder by label, once it is certain that each can be found."""
    folders = opt.labelled(items)
    for folder in folders.values():
        early.check_model(folder)
    return folders


def load_models(folders: dict[str, str], device: str, dtype: str) -> dict[str, Any]:
    """Model and tokenizer by label."""
    import kvcat

    return {label: kvcat.load(folder, dtype=dtype, device=device) for label, folder in folders.items()}


@dataclass(frozen=True, kw_only=True)
class Compressing(Evaluation):
    """The options of every evaluation that compresses."""

    keeps: ClassVar[tuple[float, ...]] = ()
    method: opt.Strings = ()
    """Methods, NAME or NAME,option=value,... (docs/compress.md); attention-matching if none is given."""
    keep: opt.Fractions = ()
    """Fractions of the slots to KEEP, each in (0, 1]."""
    seed: opt.Seeds = ()
    """Seeds of compressors that draw; several give a record each, averaged; 0 if none is given."""
    primary: Annotated[tuple[str, float, str] | None, tyro.conf.arg(metavar="METHOD KEEP METRIC")] = None
    """The one cell that decides, such as attention-matching 0.1 nll; the first of each by default."""
    speed: bool = False
    """Also time answers: seconds to the first token, tokens per second."""

    def check(self) -> None:  # noqa: D102
        super().check()
        for method in opt.flat(self.method):
            early.check_method(method)

    def settings(self) -> dict[str, Any]:  # noqa: D102
        method, keep_ratio, metric = self.primary or (None, 0.0, "")
        return {
            "methods": parse_methods(opt.flat(self.method) or ["attention-matching"]),
            "keep_ratios": opt.flat(self.keep) or list(self.keeps),
            "seeds": opt.flat(self.seed) or [0],
            "speed": self.speed,
            "primary": (parse_methods([method])[0].label, keep_ratio, metric) if method else None,
        }


def parse_methods(specs: list[str]) -> list["Method"]:
    """The methods of a command line, all of which exist and take their options."""
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

    keeps = (0.05, 0.1, 0.2, 0.4)
    several = "data"

    data: opt.Strings = ()
    """installed, a file or folder of texts, hub:NAME, wikitext-103, pg-19, arxiv, fineweb-edu; several may be given."""
    split: opt.Split = "test"
    supervision: SuffixSupervision = "suffix"
    """Caches fit the scored suffix (the paper), its first half (the rest is scored), or the prefix said again."""
    prefix: opt.Count = 768
    """Tokens of the compressed prefix."""
    suffix: opt.Count = 256
    """Tokens of the scored suffix."""
    windows: opt.Count = 64
    """Windows to evaluate."""
    per_document: opt.Count = 2
    """Most windows from one document."""
    bos: opt.Bos = "auto"

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: D102
        from kvcat.evals.suffix import make_task

        return make_task(
            tokenizer, value or "installed", self.split, prefix=self.prefix, suffix=self.suffix, windows=self.windows,
            per_document=self.per_document, seed=self.data_seed, supervision=self.supervision, bos=self.bos,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Needle(Compressing):
    """Compress a haystack with a six-digit passkey, then ask for it: greedy answer, exact match.

    The paper's method: --method gradient,init=random. Default keep ratios: 0.05 to 0.4 in steps of 0.05, and 0.5.

    Example: kvcat eval needle base=./base kvcat=./export --method gradient,init=random --keep 0.1 0.2 --out needle
    """

    keeps = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)

    length: opt.Count = 1024
    """Tokens of the haystack, exactly."""
    per_depth: opt.Count = 20
    """Examples at each of five depths; 20 is the paper's, 100 carries claims."""
    bos: opt.Bos = "auto"

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.needle import make_task

        return make_task(tokenizer, length=self.length, per_depth=self.per_depth, seed=self.data_seed, bos=self.bos)


@dataclass(frozen=True, kw_only=True)
class LongBench(Compressing):
    """Compress long contexts by reconstruction, then answer the question on the compact cache.

    The four answers are scored by log-likelihood; dense, no context, and plain text of the same budget stand beside.
    The paper's method: --method gradient,activation_checkpointing=true. Default keep ratios: 0.1 0.2 0.5.

    Example: kvcat eval longbench base=./base kvcat=./export --method gradient --keep 0.1 0.2 0.5 --out longbench
    """

    keeps = (0.1, 0.2, 0.5)

    data: str = "hub:zai-org/LongBench-v2"
    """hub:OWNER/NAME, or a .jsonl, .json or .parquet file in LongBench v2's schema."""
    sub_domain: opt.Strings = ()
    """Sub-domains, or `all`; by default the paper's seven, 221 rows."""
    max_tokens: opt.Count = 32_768
    """Longest sequence; contexts are cut in the middle so that their repetition fits."""
    limit: opt.Count | None = None
    """The first so many examples, a fair sample."""
    bos: opt.Bos = "auto"
    batch_size: tyro.conf.Suppress[int] = 1
    data_seed: tyro.conf.Suppress[int] = 0  # nothing is drawn: the order follows from the rows' names

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.longbench import PAPER_SUB_DOMAINS, make_task

        chosen = tuple(opt.flat(self.sub_domain)) or PAPER_SUB_DOMAINS
        ratios = opt.flat(self.keep) or self.keeps
        domains = None if chosen == ("all",) else chosen
        return make_task(
            self.data, sub_domains=domains, limit=self.limit, max_tokens=self.max_tokens, keep_ratios=ratios,
            bos=self.bos,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ruler(Compressing):
    """Compress texts in which something is hidden, then ask for it: RULER's tasks that need no data.

    Score: the share of right answers that the greedy answer contains. Default keep ratios: 0.05 0.1 0.2 0.4.

    Example: kvcat eval ruler ./model --length 4096 16384 --keep 0.1 0.2 --out ruler
    """

    keeps = (0.05, 0.1, 0.2, 0.4)
    several = "length"

    tasks: Annotated[opt.Strings, tyro.conf.arg(name="task")] = ()
    """niah_single, niah_multikey_1, niah_multikey_2, niah_multivalue, niah_multiquery, vt, cwe, fwe; all by default."""
    length: opt.Counts = ()
    """Tokens of the text, 4096 by default; several give a folder each."""
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
    """Zero-shot multiple choice with the whole model, nothing compressed: what training did to the model itself.

    The answer with the highest log-likelihood per character counts.

    Example: kvcat eval qa base=./base kvcat=./export --out qa
    """

    data: Path | None = None
    """Folder of JSON lines, a file TASK*.jsonl each; the Hub by default."""
    tasks: Annotated[opt.Strings, tyro.conf.arg(name="task")] = ()
    """hellaswag, winogrande, piqa, social_i_qa, openbookqa, arc_easy, arc_challenge, commonsense_qa; all by default."""
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
    """Measure a model's compressibility on a text: the error of the best cache found against its slots.

    Every method fits a cache to the first half of what follows a prefix, the second half judges it, and for every
    window the smallest KL counts. A stopped evaluation continues.

    Example: kvcat eval profile kvcat-base --data book.txt --slots 1 4 16 64

    Args:
        data: A text file, .jsonl or .parquet, a folder of them, installed, or hub:NAME.
        out: Folder for records and the table; `kvcat report` reads it as well.
        slots: Slots per layer and head, from 1 to --prefix; 1 2 4 8 ... by default.
        method: Methods to choose from; attention-matching, 40 gradient steps from it, snapkv and h2o by default.
        prefix: Tokens of a prefix.
        suffix: Tokens behind it, at least 4.
        windows: Prefixes, of as many documents as there are.
    """
    early.check_device(device)
    for spec in opt.flat(method):
        early.check_method(spec)
    folders = find_models(models)

    from kvcat.evals import evaluate
    from kvcat.evals.profile import METHODS, SUPERVISION, profile_table, profile_text, slot_ratios
    from kvcat.evals.suffix import make_task
    from kvcat.models import load_tokenizer
    from kvcat.report.plots import save_profile_plot

    methods = parse_methods(opt.flat(method)) or list(METHODS)
    keeps = slot_ratios(opt.flat(slots), prefix)
    task = make_task(
        load_tokenizer(next(iter(folders.values()))), data, split,
        prefix=prefix, suffix=suffix, windows=windows, per_document=windows, seed=data_seed, supervision=SUPERVISION,
        bos=bos,
    )  # fmt: skip
    loaded = load_models(folders, device, dtype)
    records = evaluate(task, loaded, methods, keeps, out, seeds=[seed])
    table = profile_table([record for record in records if record.model in loaded], prefix)
    table.to_csv(out / "profile.csv", index=False)
    print(profile_text(table))
    print(out / "profile.csv", save_profile_plot(table, out), sep="\n")


def report(
    folders: tuple[Path, ...],
    /,
    output: opt.Output = Path("report"),
    run: opt.Strings = (),
    paper_model: Literal["Qwen2.5-0.5B", "Qwen2.5-1.5B"] | None = None,
    title: str = "KV cache compression",
) -> None:
    """Write tables (Markdown, CSV, LaTeX), plots and one self-contained HTML page of evaluations and training runs.

    Example: kvcat report results needle --run KV-CAT=runs/router -o report

    Args:
        folders: Folders that `kvcat eval` or `kvcat train` wrote.
        output: Folder for tables, plots and report.html.
        run: LABEL=FOLDER of a training run, for its diagnostics; several may be given.
        paper_model: What the models labelled base, kvcat, rand and attn are, to show the paper's figures beside ours.
        title: Title of the page.
    """
    from kvcat.report import write_report

    trained = [str(folder) for folder in folders if (folder / "metrics.jsonl").exists()]
    evaluated = [folder for folder in folders if str(folder) not in trained]
    labels = [*trained, *opt.flat(run)]
    runs = {label: Path(folder) for label, folder in (opt.labelled(labels).items() if labels else ())}
    print(write_report(evaluated, output, title=title, runs=runs, paper_model=paper_model))
