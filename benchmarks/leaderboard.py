"""Methods on two real models: KL, right answers, seconds and bytes; every cell from its records.

    python benchmarks/leaderboard.py --model smollm2-135m NAME=FOLDER \\
        --data prose=FILE technical=FILE --out OUT   # measures, and puts the records away
    python benchmarks/leaderboard.py --write         # page, picture, README's tables from records
    python benchmarks/leaderboard.py --check         # exit code 1 if one of them is different

The figures are those of ``quality.py`` (a document alone: a cache that is made from a prefix
without knowing what follows) and of ``questions.py``. Methods that are fitted to queries use a
repetition of the document, as ``kvcat compress`` does. Both benchmarks write each cell to --out
when it is measured, and the same command continues. A method is added with --add METHOD; one of
another package works here as soon as the package is installed (docs/extend.md).

``records/`` has what is shown: a row for each window, method and size (``losses.csv.gz``), a row
for each question, condition and size (``answers.csv.gz``), and what made them (``about.json``).
"""

import argparse
import gzip
import hashlib
import io
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from named_models import add_model_option, parse_models
from peers import LEARNING, method_of
from PIL import Image
from questions import BASELINES, right
from windows import add_options

from kvcat.errors import run_script
from kvcat.files import read_json, read_jsonl, write_json
from kvcat.provenance import provenance
from kvcat.stats import (
    ClusterBootstrap,
    Estimate,
    holm,
    share,
    share_difference,
    sign_flip_p_value,
    swap_p_value,
)
from kvcat.stats.intervals import coverage_of_mean

DEFAULT = "attention-matching"
METHODS = {
    DEFAULT: "Attention Matching, the default",
    "attention-matching,budgets=equal": "the same, as many slots in every head",
    "attention-matching,preset=paper": "Attention Matching as in the KV-CAT paper",
    "kvpress:KVzipPress": "KVzip (kvpress)",
    "h2o": "H2O",
    "snapkv": "SnapKV",
    "streaming": "StreamingLLM",
}
"""Methods by specification, and their names in words."""
TRUNCATED = "truncated@text"
README_ROWS = {
    DEFAULT: "**kvcat, the default**",
    "kvpress:KVzipPress": "KVzip (kvpress)",
    "h2o": "H2O",
    "snapkv": "SnapKV",
    "attention-matching,preset=paper": "Attention Matching as in the KV-CAT paper",
}
README_KEEP = 0.2
README_SMALLER = (0.1, 0.05)
CLOSEST = "kvpress:KVzipPress"
TITLES = {"smollm2-135m": "SmolLM2-135M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B"}
UNPLOTTED = ("attention-matching,budgets=equal",)
MARKERS = "osD^vPX<>"
WAY = "reconstruction"
KEEPS = (0.05, 0.1, 0.2, 0.4)
SIGNIFICANT = 0.05
FEWEST = 4  # documents of a mean
LOSSES = (
    *("model", "window", "kind", "document", "method", "way", "keep", "seconds", "bytes"),
    *("kl_first", "kl_second"),
)
"""Columns of the records of KL; the last two are its means over the halves of the suffix."""
FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
RECORDS = FOLDER / "records"
PAGE = ROOT / "docs" / "leaderboard.md"
PICTURE = ROOT / "docs" / "quality.png"
README = ROOT / "README.md"
BLOCK = re.compile(
    r"<!-- table (?P<name>\S+) -->\n(?P<table>.*?)<!-- end of the table -->\n", re.DOTALL
)


def condition_of(method: str) -> str:
    """The condition of ``questions.py`` that a method is asked in."""
    return f"{method}@{WAY if method.startswith(LEARNING) else 'self'}"


def measure(options: argparse.Namespace, methods: Sequence[str]) -> None:
    """Run the two benchmarks for the methods; both skip what they have measured."""
    keeps = [f"{keep:g}" for keep in KEEPS]
    shared = ["--model", *options.model, "--threads", str(options.threads)]
    quality = ["--data", *options.data, "--out", str(options.out / "quality")]
    quality += ["--prefix", str(options.prefix), "--windows", str(options.windows)]
    quality += ["--per-document", str(options.per_document), "--half", options.half]
    quality += ["--seed", str(options.seed), "--keep", *keeps]
    if options.first is not None:
        quality += ["--first", str(options.first)]
    learning = [method for method in methods if method.startswith(LEARNING)]
    others = [method for method in methods if not method.startswith(LEARNING)]
    for some_methods, way in ((learning, WAY), (others, "suffix")):
        if some_methods:
            run("quality.py", *shared, *quality, "--ways", way, "--methods", *some_methods)
    asked = ["--out", str(options.out / "questions.jsonl"), "--keep", *keeps]
    asked += ["--documents", *map(str, options.documents)]
    conditions = list(map(condition_of, methods))
    run("questions.py", *shared, *asked, "--conditions", *conditions, TRUNCATED)


def run(script: str, *arguments: str) -> None:
    """Run a benchmark of this folder; where it fails, it has said why, and this program ends."""
    code = subprocess.run([sys.executable, str(FOLDER / script), *arguments], check=False)
    if code.returncode:
        sys.exit(code.returncode)


def put_away(options: argparse.Namespace) -> None:
    """Write the records of --out as they are kept, with the versions and the command."""
    RECORDS.mkdir(exist_ok=True)
    losses = []
    quality = options.out / "quality" / "records.jsonl"
    for record in read_jsonl(quality) if quality.exists() else []:
        first, second = record["halves"]
        cell = {name: record[name] for name in LOSSES[:-2]}
        losses.append(cell | {"kl_first": first, "kl_second": second})
    write_table("losses", pd.DataFrame(losses, columns=list(LOSSES)))
    rows = [
        {
            "model": record["model"],
            "document": record["document"],
            "kind": record["kind"],
            "length": record["length"],
            "condition": record["condition"],
            "keep": record["keep"],
            "question": name,
            "asked": code,
            "answer": answer,
            "right": int(right(answer, code)),
            "seconds": record["seconds"],
        }
        for record in read_jsonl(options.out / "questions.jsonl")
        for answer, (name, code) in zip(record["answers"], record["asked"], strict=True)
    ]
    write_table("answers", pd.DataFrame(rows))
    facts = provenance()
    facts["command"] = " ".join(command_of(options))
    write_json(RECORDS / "about.json", facts | {"date": options.date})


def command_of(options: argparse.Namespace) -> list[str]:
    """The command without the folders of this machine."""
    labels = [model.label for model in parse_models(options.model)]
    command = ["python benchmarks/leaderboard.py --model", *labels, "--data"]
    command += [f"{source.partition('=')[0]}=..." for source in options.data]
    command += [f"--half {options.half} --windows {options.windows}"]
    command += [f"--per-document {options.per_document}"]
    return [*command, f"--documents {' '.join(map(str, options.documents))}", "--out OUT"]


def write_table(name: str, frame: pd.DataFrame) -> None:
    """A table of records, compressed; equal records give equal bytes."""
    text = frame.to_csv(index=False).encode()
    (RECORDS / f"{name}.csv.gz").write_bytes(gzip.compress(text, mtime=0))


def add_to_table(name: str, frame: pd.DataFrame, key: list[str]) -> pd.DataFrame:
    """All rows of a table of records, with new ones added or in the place of old ones.

    Args:
        name: of the table.
        frame: the new rows.
        key: columns that two rows of the same cell have in common.
    """
    path = RECORDS / f"{name}.csv.gz"
    if path.exists():
        numbers = list(frame.select_dtypes("number"))
        texts = dict.fromkeys(frame.columns.difference(numbers), str)
        empty = {column: [""] for column in numbers}
        kept = pd.read_csv(path, dtype=texts, keep_default_na=False, na_values=empty)
        frame = pd.concat([kept, frame], ignore_index=True).drop_duplicates(key, keep="last")
    write_table(name, frame)
    return frame


@dataclass(frozen=True)
class Records:
    """What is kept of a measurement."""

    losses: pd.DataFrame
    answers: pd.DataFrame
    about: dict[str, Any]

    @classmethod
    def read(cls, folder: Path = RECORDS) -> "Records":
        """The records of a folder; answers and numbers that were asked are texts."""
        losses = pd.read_csv(folder / "losses.csv.gz")
        texts = dict.fromkeys(["question", "asked", "answer"], str)
        answers = pd.read_csv(folder / "answers.csv.gz", dtype=texts, keep_default_na=False)
        return cls(losses, answers, read_json(folder / "about.json"))

    @cached_property
    def labels(self) -> list[str]:
        """The models, in the order of the records."""
        return list(dict.fromkeys([*self.answers["model"], *self.losses["model"]]))

    def of_model(self, label: str) -> "OfModel":
        """The records of one model that are shown."""
        losses = self.losses[self.losses["model"] == label]
        return OfModel(label, losses, self.answers[self.answers["model"] == label])


@dataclass(frozen=True)
class OfModel:
    """The records of one model."""

    label: str
    losses: pd.DataFrame
    answers: pd.DataFrame

    @property
    def title(self) -> str:
        """The model's name on the first page."""
        return TITLES.get(self.label, self.label)

    @cached_property
    def kl(self) -> pd.DataFrame:
        """KL by window and document (rows), method and keep ratio.

        Of a document alone: methods that learn were fitted to a repetition, the others read it.
        Windows are those that every method of the first page has which can compress the model; a
        cell that lacks one of them is left out, and so is a model with fewer than ``FEWEST``
        documents.
        """
        learns = self.losses["method"].astype(str).str.startswith(LEARNING)
        alone = self.losses[(self.losses["way"] == WAY) == learns]
        alone = alone.assign(kl=(alone["kl_first"] + alone["kl_second"]) / 2)
        table = alone.pivot(index=["window", "document"], columns=["method", "keep"], values="kl")
        methods = [method for method in README_ROWS if method in set(alone["method"])]
        return complete_rows(table, [(method, README_KEEP) for method in methods])

    @property
    def documents(self) -> list[str]:
        """The document of each window of ``kl``."""
        return list(self.kl.index.get_level_values("document"))

    def kl_estimate(self, method: str, keep: float) -> Estimate | None:
        """Mean KL over windows with its interval; None where it was not measured."""
        if (method, keep) not in self.kl.columns or self.kl.empty:
            return None
        return ClusterBootstrap(self.documents).mean(self.kl[method, keep].to_numpy())

    @property
    def coverage(self) -> int:
        """What these intervals cover, per cent: the median over methods and sizes."""
        columns = self.kl.to_numpy().T
        return round(np.median([coverage_of_mean(column, self.documents) for column in columns]))

    def costs(self, method: str) -> tuple[float, float]:
        """Medians over windows: seconds of all sizes, fraction of the dense bytes at 10 %."""
        rows = self.losses[self.losses["method"] == method]
        seconds = rows.groupby("window")["seconds"].sum().median()
        return float(seconds), float(rows[rows["keep"] == 0.1]["bytes"].median())

    @cached_property
    def marks(self) -> pd.DataFrame:
        """Right answers by document and question (rows), condition and keep ratio.

        Documents are those on which every condition was asked at the first page's size. A cell
        that lacks one of them is left out, and so is a model with fewer than ``FEWEST`` documents
        or without a condition of the first page.
        """
        table = self.answers.pivot(
            index=["document", "question"], columns=["condition", "keep"], values="right"
        )
        conditions = [*map(condition_of, README_ROWS), TRUNCATED]
        first_page = [*((condition, README_KEEP) for condition in conditions), *BASELINES]
        return complete_rows(table, first_page)

    def right_answers(self, condition: str, keep: float) -> Estimate | None:
        """The fraction of right answers with its interval; None where it was not measured."""
        if (condition, keep) not in self.marks.columns or self.marks.empty:
            return None
        return share(self.marks[condition, keep].to_numpy(float), self.asked_documents)

    @property
    def asked_documents(self) -> list[str]:
        """The document of each question of ``marks``."""
        return list(self.marks.index.get_level_values("document"))

    def paired(self, condition: str, keep: float) -> tuple[Estimate, float]:
        """Right answers of the default minus those of a condition, with interval and p-value."""
        ours = self.marks[condition_of(DEFAULT), keep].to_numpy(float)
        theirs = self.marks[condition, keep].to_numpy(float)
        documents = self.asked_documents
        difference = share_difference(ours, theirs, documents)
        return difference, sign_flip_p_value(ours, theirs, documents)


def complete_rows(table: pd.DataFrame, needed: list[tuple[str, float]]) -> pd.DataFrame:
    """The rows that have all needed columns, and the columns that all of these rows have.

    There are none if a needed column is missing or the rows are of fewer than ``FEWEST`` documents.
    """
    if table.columns.isin(needed).sum() != len(needed):
        return table.iloc[:0]
    complete = table[table[needed].notna().all(axis=1)].dropna(axis=1)
    enough = complete.index.get_level_values("document").nunique() >= FEWEST
    return complete if enough else complete.iloc[:0]


def unclear(p_values: dict[tuple[str, float], float]) -> set[tuple[str, float]]:
    """The cells whose difference may be chance, after Holm's correction over those of one size.

    Args:
        p_values: by method or condition and keep ratio.
    """
    cells = set()
    for keep in {keep for _, keep in p_values}:
        of_size = {place: p for place, p in p_values.items() if place[1] == keep}
        corrected = holm(np.array(list(of_size.values())))
        cells |= {place for place, p in zip(of_size, corrected, strict=True) if p > SIGNIFICANT}
    return cells


def kl_table(model: OfModel, names: dict[str, str]) -> list[str]:
    """The lines of the table of KL."""
    p_values = {
        (method, keep): swap_p_value(
            np.asarray,
            [model.kl[method, keep].to_numpy()],
            [model.kl[DEFAULT, keep].to_numpy()],
            model.documents,
        )
        for method, keep in model.kl.columns
        if method != DEFAULT
    }
    same = unclear(p_values)
    head = " | ".join(f"{100 * keep:g} %" for keep in KEEPS)
    lines = [
        f"| slots kept | {head} | seconds | bytes at 10 % |",
        "|---" * (len(KEEPS) + 1) + "|---|---|",
    ]
    for method, name in names.items():
        if method not in model.kl.columns.get_level_values("method"):
            continue
        cells = []
        for keep in KEEPS:
            estimate = model.kl_estimate(method, keep)
            text = "-"
            if estimate is not None:
                text = f"{estimate.value:.2g} [{max(0.0, estimate.low):.2g}, {estimate.high:.2g}]"
            cells.append(f"{text}†" if (method, keep) in same else text)
        seconds, share_of_bytes = model.costs(method)
        cells += [f"{seconds:.1f}", f"{100 * share_of_bytes:.1f} %"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def conditions_by_name(names: dict[str, str]) -> dict[str, str]:
    """The conditions of the questions, and their names in words."""
    conditions = {condition_of(method): name for method, name in names.items()}
    return conditions | {TRUNCATED: "no compression: beginning and end of the text"}


def questions_table(model: OfModel, names: dict[str, str]) -> list[str]:
    """The lines of the table of right answers."""
    conditions = conditions_by_name(names)
    measured = [(c, keep) for c, keep in model.marks.columns if c in conditions]
    keeps = [keep for keep in KEEPS if (condition_of(DEFAULT), keep) in measured]
    p_values = {
        (condition, keep): model.paired(condition, keep)[1]
        for condition, keep in measured
        if condition != condition_of(DEFAULT) and keep in keeps
    }
    same = unclear(p_values)
    lines = [
        f"| slots kept | {' | '.join(f'{100 * keep:g} %' for keep in keeps)} |",
        "|---" * (len(keeps) + 1) + "|",
    ]
    for condition, name in conditions.items():
        cells = []
        for keep in keeps:
            text = percent(model.right_answers(condition, keep))
            cells.append(f"{text}†" if (condition, keep) in same else text)
        if set(cells) != {"-"}:
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def percent(estimate: Estimate | None) -> str:
    """A fraction with its interval in per cent; a dash where it was not measured."""
    if estimate is None:
        return "-"
    return f"{100 * estimate.value:.0f} [{100 * estimate.low:.0f}, {100 * estimate.high:.0f}]"


def section(model: OfModel, names: dict[str, str]) -> str:
    """The tables of one model."""
    lines = [f"## {model.label}", ""]
    if len(model.kl):
        documents = len(set(model.documents))
        about = (
            "KL(dense || compact), nats per token, on the 256 tokens after a prefix of 768 tokens "
            f"that was compressed without them: {len(model.kl)} windows of {documents} documents. "
            f"The intervals are nominally 95 % and cover about {model.coverage} %, because KL has "
            "a long tail over documents and these are few."
        )
        lines += [wrapped(about), "", *kl_table(model, names), ""]
    if len(model.marks):
        dense, none = (model.right_answers(*baseline) for baseline in BASELINES)
        about = (
            f"Right answers, per cent, to {len(model.marks)} questions about facts in "
            f"{len(set(model.asked_documents))} documents; the dense cache {percent(dense)}, "
            f"without the document {percent(none)}."
        )
        lines += [wrapped(about), "", *questions_table(model, names), ""]
    return "\n".join(lines)


def wrapped(text: str) -> str:
    """Prose in lines of at most 100 columns."""
    return textwrap.fill(text.strip(), 100, break_long_words=False, break_on_hyphens=False)


def page(records: Records, names: dict[str, str]) -> str:
    """docs/leaderboard.md."""
    models = [records.of_model(label) for label in records.labels]
    facts = records.about
    words = textwrap.wrap(facts["command"], 90, break_on_hyphens=False)
    about = (
        f"{facts['date']}, kvcat {facts['kvcat']}, torch {facts['torch']}, transformers "
        f"{facts['transformers']}, {facts['cpu']}, one thread of a machine that others used: "
        "seconds compare the rows of one model only. They are processor seconds for the four "
        "caches of a prefix, which share work, without the forward pass before. Bytes are those of "
        "the cache over the dense one in the same type. Every cell is computed from the records "
        "of its windows or questions, which are kept in `benchmarks/records`; "
        "`python benchmarks/leaderboard.py --check` does it again. `--add METHOD` measures one "
        "more method. What has no records is not shown; kvpress compresses all layers of a model "
        "or none, so that KVzip has no row where some layers have sliding windows."
    )
    tests = (
        "†: may be chance. The difference to the first row, on the same windows or questions, has "
        "p > .05 after Holm's correction over the column. The test exchanges the two methods on "
        "whole documents, in all ways, so with fewer than six documents every difference may be "
        "chance. Intervals of right answers are Wilson's with a design effect, because answers "
        "about one document are alike ([how](evaluation.md))."
    )
    lines = [
        "# Leaderboard",
        "",
        "Methods at several sizes on real models. Written by",
        "",
        "```sh",
        *(f"{line} \\" for line in words[:-1]),
        words[-1],
        "python benchmarks/leaderboard.py --write",
        "```",
        "",
        wrapped(about),
        "",
        wrapped(tests),
        "",
        *(section(model, names) for model in models if len(model.kl) or len(model.marks)),
    ]
    return "\n".join(lines)


def readme_table(records: Records) -> str:
    """The first table of README, and what its differences may be worth."""
    models = [records.of_model(label) for label in records.labels]
    models = [model for model in models if len(model.marks)]
    names = [f"{model.title}: right answers, % | KL, nats" for model in models]
    dense = [model.right_answers(*BASELINES[0]) for model in models]
    full = [f"{_first_page(estimate, 100, '.0f')} | 0" for estimate in dense]
    lines = [
        f"| | cache size | {' | '.join(names)} |",
        "|---" * (2 + 2 * len(models)) + "|",
        f"| full cache | 100 % | {' | '.join(full)} |",
    ]
    rows = [(condition_of(m), m, name, README_KEEP) for m, name in README_ROWS.items()]
    rows.append((TRUNCATED, "", "text cut to a fifth", README_KEEP))
    for keep in README_SMALLER:
        rows += [(condition_of(m), m, README_ROWS[m], keep) for m in (DEFAULT, CLOSEST)]
    for condition, method, name, keep in rows:
        cells = []
        for model in models:
            cells.append(_first_page(model.right_answers(condition, keep), 100, ".0f"))
            cells.append(_first_page(model.kl_estimate(method, keep), 1, ".2g"))
        figures = "".join(f" {cell} |" if cell else " |" for cell in cells)
        lines.append(f"| {name} | {100 * keep:g} % |{figures}")
    sentences = []
    for model in models:
        differences = []
        for keep in (README_KEEP, *README_SMALLER):
            if (condition_of(CLOSEST), keep) in model.marks.columns:
                difference, p = model.paired(condition_of(CLOSEST), keep)
                differences.append(
                    f"{round(100 * difference.value):+d} points "
                    f"[{round(100 * difference.low):+d}, {round(100 * difference.high):+d}], "
                    f"p {p:.2g}, at {100 * keep:g} %"
                )
        sentences.append(
            f"On {model.title} ({len(model.marks)} questions, {len(set(model.asked_documents))} "
            f"documents): {'; '.join(differences)}."
        )
    text = (
        f"The default's right answers minus KVzip's, on the same questions. {' '.join(sentences)}"
    )
    return "\n".join([*lines, "", wrapped(text), ""])


def _first_page(estimate: Estimate | None, factor: float, form: str) -> str:
    return "" if estimate is None else format(factor * estimate.value, form)


def with_tables(text: str, tables: dict[str, str]) -> str:
    """A page with the tables between its marks."""

    def replaced(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- table {name} -->\n\n{tables[name]}\n<!-- end of the table -->\n"

    return BLOCK.sub(replaced, text)


def write_or_check(page: Path, tables: dict[str, str], options: argparse.Namespace) -> None:
    """Write the tables of a page (``--write``), or exit with 1 if it has others (``--check``)."""
    text = page.read_text(encoding="utf-8")
    wanted = with_tables(text, tables)
    if wanted != text:
        print(page.relative_to(ROOT))
        if options.write:
            page.write_text(wanted, encoding="utf-8")
        else:
            sys.exit(1)


def curves(records: Records, names: dict[str, str]) -> dict[str, pd.DataFrame]:
    """What the picture shows: for each model the estimates of KL by method and keep ratio."""
    shown = {}
    for model in map(records.of_model, records.labels):
        rows = []
        for method, keep in model.kl.columns:
            estimate = model.kl_estimate(method, keep)
            if estimate is not None and method in names:
                rows.append((method, keep, estimate.value, estimate.low, estimate.high))
        if rows:
            columns = ["method", "keep", "value", "low", "high"]
            shown[model.label] = pd.DataFrame(rows, columns=columns)
    return shown


def fingerprint_of(shown: dict[str, pd.DataFrame]) -> str:
    """A hash of what a picture shows, in the digits that can be seen."""
    tables = [f"{label}\n{frame.to_csv(float_format='%.4g')}" for label, frame in shown.items()]
    return hashlib.sha256("\n".join(tables).encode()).hexdigest()


def plot(shown: dict[str, pd.DataFrame], names: dict[str, str]) -> bytes:
    """KL against the slots kept, a panel for each model, with intervals over documents, as PNG.

    The picture holds the hash of its numbers, by which it is checked.
    """
    figure, axes = plt.subplots(
        1,
        len(shown),
        figsize=(4.8 * len(shown), 4.6),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for axis, (label, frame) in zip(axes[0], shown.items(), strict=True):
        for index, (method, name) in enumerate(names.items()):
            curve = frame[frame["method"] == method].sort_values("keep")
            below = curve["value"] - curve["low"].clip(lower=curve["value"] / 10)
            axis.errorbar(
                100 * curve["keep"] * 1.02 ** (index - len(names) / 2),  # side by side
                curve["value"],
                yerr=[below, curve["high"] - curve["value"]],
                label=name,
                color=f"C{index}",
                marker=MARKERS[index % len(MARKERS)],
                capsize=2,
                linewidth=1.2,
            )
        axis.set(xscale="log", yscale="log", xlabel="KV slots kept, per cent", title=label)
        axis.set_xticks([100 * keep for keep in KEEPS], [f"{100 * keep:g}" for keep in KEEPS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(
        "loss of information: KL to the full cache,\nnats per token (lower is better)"
    )
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        fontsize="small",
    )
    return as_png(figure, shown)


def as_png(figure: Figure, shown: dict[str, pd.DataFrame]) -> bytes:
    """A figure as PNG, with the hash of the numbers that it shows."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, metadata={"Description": fingerprint_of(shown)})
    return picture.getvalue()


def shows(path: Path, shown: dict[str, pd.DataFrame]) -> bool:
    """Whether a picture has been made of these numbers."""
    if not path.exists():
        return False
    with Image.open(path) as picture:
        return picture.info.get("Description") == fingerprint_of(shown)


def different(records: Records, names: dict[str, str]) -> Iterator[tuple[Path, bytes]]:
    """The files that are not what the records give, and what they should be."""
    tables = {"leaderboard": readme_table(records)}
    texts = {
        PAGE: page(records, names),
        README: with_tables(README.read_text(encoding="utf-8"), tables),
    }
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            yield path, text.encode()
    plotted = {method: name for method, name in names.items() if method not in UNPLOTTED}
    shown = curves(records, plotted)
    if shown and not shows(PICTURE, shown):
        yield PICTURE, plot(shown, plotted)


def names_of(records: Records) -> dict[str, str]:
    """The methods that have records, the added ones under their specification."""
    added = [method for method in dict.fromkeys(records.losses["method"]) if method not in METHODS]
    return METHODS | {method: f"`{method}`" for method in added}


def main() -> None:
    """Measure, write or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_option(parser)
    add_options(parser, required=False)
    parser.add_argument("--out", type=Path, help="folder of the measurement, to go on in")
    parser.add_argument("--add", nargs="+", default=[], metavar="METHOD", help="further methods")
    parser.add_argument(
        "--documents", type=int, nargs=3, default=[2, 2, 2], metavar="N", help="with questions"
    )
    parser.add_argument("--first", type=int, help="measure so many windows alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--date", default="", help="of the measurement, for the page")
    parser.add_argument("--collect", action="store_true", help="measure nothing more")
    parser.add_argument("--write", action="store_true", help="page, picture and README's tables")
    parser.add_argument("--check", action="store_true", help="compare them with the records")
    options = parser.parse_args()
    if options.out is not None:
        if not options.collect:
            methods = [*METHODS, *options.add]
            for method in methods:
                method_of(method)  # an unknown method is rejected before a model is loaded
            measure(options, methods)
        put_away(options)
    if not (options.write or options.check):
        return
    records = Records.read()
    changed = list(different(records, names_of(records)))
    for path, content in changed:
        print(path.relative_to(ROOT))
        if options.write:
            path.write_bytes(content)
    sys.exit(bool(changed) and not options.write)


if __name__ == "__main__":
    run_script(main)
