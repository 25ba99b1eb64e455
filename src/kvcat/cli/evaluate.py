"""``kvcat eval`` and ``kvcat report``: what a compressed cache costs in quality."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from kvcat.cli import options as opt
from kvcat.errors import InputError
from kvcat.methods import parse_method

if TYPE_CHECKING:
    from kvcat.evals import Task

Split = Literal["all", "test", "validation", "train"]
BatchSize = Annotated[int, tyro.conf.arg(help="Examples a forward pass.")]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The options of every evaluation; a subclass adds those of its ``make_task``. Tyro makes both a command line."""

    keeps: ClassVar[tuple[float, ...]] = ()
    several: ClassVar[str] = ""
    """An option of several values, each of which gives a folder of its own."""
    models: tyro.conf.Positional[opt.Models]
    out: Path
    """Folder for records and report. A stopped evaluation continues; under torchrun, processes share the work."""
    device: opt.Device = "cpu"
    dtype: opt.Dtype = "float32"
    data_seed: int = 0
    """Seed of the choice of examples."""
    batch_size: BatchSize = 8

    def name(self) -> str:
        """As results folders call the evaluation."""
        return type(self).__name__.lower()

    def task(self, tokenizer: Any, value: Any) -> "Task":
        """The examples and how they are scored; ``value`` is one of ``several``."""
        raise NotImplementedError

    def own(self, *names: str) -> dict[str, Any]:
        """These options by name, as arguments of ``make_task``."""
        return {name: getattr(self, name) for name in names}

    def run(self) -> None:
        """Evaluate, report and print.

        Raises:
            InputError: a person's mistake, before heavy work.
        """
        compressing = self if isinstance(self, Compressing) else None
        specs = (opt.flat(compressing.method) or ["attention-matching"]) if compressing else []
        ratios = (opt.flat(compressing.keep) or list(self.keeps)) if compressing else []
        seeds = (opt.flat(compressing.seed) or [0]) if compressing else [0]
        self.check(specs, ratios, seeds)
        folders = opt.labelled(self.models)
        opt.check_model(*folders.values())

        import kvcat
        from kvcat.compress import seeded_compressor
        from kvcat.evals import Method, evaluate, plumbing, read_records, summarise
        from kvcat.report import headline_text, write_report
        from kvcat.report.results import EVALUATIONS

        methods = [Method(*parse_method(spec)) for spec in specs]
        for method in methods:
            seeded_compressor(method.name, method.options, seeds[0])
        index, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        settings: dict[str, Any] = {"batch_size": self.batch_size, "seeds": seeds, "shard": (index, count)}
        if compressing:
            settings |= {"speed": compressing.speed, "primary": compressing.primary_cell()}
        device = self.device if self.device != "cuda" else f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        loaded = {label: kvcat.load(folder, dtype=self.dtype, device=device) for label, folder in folders.items()}
        values = list(dict.fromkeys(opt.flat(getattr(self, self.several)))) if self.several else []
        tokenizer, tasks = next(iter(loaded.values()))[1], {}
        for value in values or [None]:
            folder = self.out / (re.sub(r"[^\w.-]+", "-", str(value)).strip("-.") if len(values) > 1 else "")
            if folder in tasks:
                raise InputError(f"two --{self.several} would write to the same folder {folder}")
            tasks[folder] = self.task(tokenizer, value)
        for folder, task in tasks.items():
            evaluate(task, loaded, methods, ratios, folder, **settings)
        if count > 1:
            print(f"shard {index} of {count} is done; when all are: kvcat report {' '.join(map(str, tasks))}")
            return
        page = write_report(list(tasks), self.out / "report", title=EVALUATIONS[self.name()].title)
        for folder in tasks:
            records = read_records(folder)
            print(headline_text(summarise(records)))
            for label, reason in plumbing(records).items():
                print(f"{label}: {reason}")
        print(page)

    def check(self, specs: Sequence[str], ratios: Sequence[float], seeds: Sequence[int]) -> None:
        """Refuse what is out of range, before torch is loaded."""
        opt.check_keep(*ratios)
        opt.check_method(*specs)
        opt.check_least(0, seed=min(seeds))
        for field in fields(self):
            if type(value := getattr(self, field.name)) is int:
                opt.check_least(0 if field.name == "data_seed" else 1, **{field.name: value})
        if isinstance(self, Compressing) and self.primary is not None:
            method, keep, _ = self.primary
            opt.check_method(method)
            if parse_method(method) not in map(parse_method, specs) or keep not in ratios:
                cells = f"methods: {' '.join(specs)}; keep ratios: {' '.join(f'{ratio:g}' for ratio in ratios)}"
                raise InputError(f"--primary {method} {keep:g} is not evaluated; {cells}")


@dataclass(frozen=True, kw_only=True)
class Compressing(Evaluation):
    """The options of every evaluation that compresses."""

    method: opt.Strings = ()
    """Methods, NAME or NAME,option=value,... (docs/compress.md); attention-matching if none is given."""
    keep: opt.Floats = ()
    """Fractions of the slots to KEEP, each in (0, 1]."""
    seed: opt.Ints = ()
    """Seeds of compressors that draw; several give a record each, averaged; 0 if none is given."""
    primary: Annotated[tuple[str, float, str] | None, tyro.conf.arg(metavar="METHOD KEEP METRIC")] = None
    """The one cell that decides, such as attention-matching 0.1 nll; the first of each by default."""
    speed: bool = False
    """Also time answers: seconds to the first token, tokens per second."""

    def primary_cell(self) -> tuple[str, float, str] | None:
        """The cell with the method's label as in tables.

        Raises:
            InputError: a metric that the evaluation does not have.
        """
        if self.primary is None:
            return None
        from kvcat.evals import Method
        from kvcat.report.results import EVALUATIONS

        (method, keep, metric), metrics = self.primary, EVALUATIONS[self.name()].metrics
        if metric not in metrics:
            raise InputError(f"--primary: this evaluation has no metric {metric!r}; it has {', '.join(metrics)}")
        return Method(*parse_method(method)).label, keep, metric


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
    split: Split = "test"
    """Documents to use; test and validation are held out by a hash of the document's name."""
    supervision: Literal["suffix", "first-half", "reconstruction"] = "suffix"
    """Caches fit the scored suffix (the paper), its first half (the rest is scored), or the prefix said again."""
    prefix: int = 768
    """Tokens of the compressed prefix."""
    suffix: int = 256
    """Tokens of the scored suffix."""
    windows: int = 64
    """Windows to evaluate."""
    per_document: int = 2
    """Most windows from one document."""

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: D102
        from kvcat.evals.suffix import make_task

        settings = self.own("prefix", "suffix", "windows", "per_document", "supervision")
        return make_task(tokenizer, value or "installed", self.split, seed=self.data_seed, **settings)


@dataclass(frozen=True, kw_only=True)
class Needle(Compressing):
    """Compress a haystack with a six-digit passkey, then ask for it: greedy answer, exact match.

    The paper's method: --method gradient,init=random. Default keep ratios: 0.05 to 0.4 in steps of 0.05, and 0.5.

    Example: kvcat eval needle base=./base kvcat=./export --method gradient,init=random --keep 0.1 0.2 --out needle
    """

    keeps = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)

    length: int = 1024
    """Tokens of the haystack, exactly."""
    per_depth: int = 20
    """Examples at each of five depths; 20 is the paper's, 100 carries claims."""

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.needle import make_task

        return make_task(tokenizer, seed=self.data_seed, **self.own("length", "per_depth"))


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
    max_tokens: int = 32_768
    """Longest sequence; contexts are cut in the middle so that their repetition fits."""
    limit: int | None = None
    """The first so many examples, a fair sample."""
    batch_size: BatchSize = 1

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.longbench import PAPER_SUB_DOMAINS, make_task

        chosen = tuple(opt.flat(self.sub_domain)) or PAPER_SUB_DOMAINS
        settings = {**self.own("limit", "max_tokens"), "keep_ratios": tuple(opt.flat(self.keep) or self.keeps)}
        return make_task(self.data, sub_domains=None if chosen == ("all",) else chosen, **settings)


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
    length: opt.Ints = ()
    """Tokens of the text, 4096 by default; several give a folder each."""
    per_task: int = 20
    """Examples of each task."""
    batch_size: BatchSize = 1

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: D102
        from kvcat.evals.ruler import make_task

        settings = {"per_task": self.per_task, "tasks": opt.flat(self.tasks) or None}
        return make_task(tokenizer, length=value or 4096, seed=self.data_seed, **settings)


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
    limit: int = 1000
    """Questions of each task, the same for every model."""
    batch_size: BatchSize = 32

    def task(self, tokenizer: Any, value: Any) -> "Task":  # noqa: ARG002, D102
        from kvcat.evals.qa import make_task

        settings = {"tasks": opt.flat(self.tasks) or None, "num_examples": self.limit}
        return make_task(self.data, seed=self.data_seed, **settings)


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
    if not folders and not run:
        raise InputError("name at least one folder that `kvcat eval` or `kvcat train` wrote")
    named = {label: Path(folder) for label, folder in opt.labelled(opt.flat(run)).items()} if run else {}
    for folder in [*folders, *named.values()]:
        if not folder.is_dir():
            raise InputError(f"no folder {folder}")
    trained = {folder.name: folder for folder in folders if (folder / "metrics.jsonl").exists()}
    evaluated = [folder for folder in folders if folder not in trained.values()]

    from kvcat.report import write_report

    print(write_report(evaluated, output, title=title, runs=trained | named, paper_model=paper_model))
