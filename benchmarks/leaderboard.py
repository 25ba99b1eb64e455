"""Every method on two real models: KL, right answers, seconds and bytes, as one page.

    python benchmarks/leaderboard.py --model smollm2-135m NAME=FOLDER \\
        --data prose=FILE tech=FILE code=installed:test --out OUT --page docs/leaderboard.md

A method is added with --add METHOD; what is measured already is not measured again. The figures are
those of ``quality.py`` (a document alone: a cache that is made from a prefix without knowing what
follows), of ``questions.py`` and, with --tools, of ``kvcat eval tools``; the records stay in --out.
Methods that are fitted to queries use a repetition of the document, as ``kvcat compress`` does. A
method of another package works here as soon as the package is installed (docs/extend.md).
"""

import argparse
import platform
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
import transformers
from leaderboard_tools import measure_tool_calls, run_python, tool_calls_section
from named_models import add_model_option, parse_models
from peers import LEARNING, method_of
from quality import table
from questions import BASELINES, right, share
from windows import add_options

import kvcat
from kvcat.errors import run_script
from kvcat.files import append_jsonl, read_jsonl
from kvcat.stats.intervals import ClusterBootstrap

METHODS = {
    "attention-matching": "Attention Matching, the default",
    "attention-matching,budgets=equal": "the same, as many slots in every head",
    "attention-matching,preset=paper": "Attention Matching as in the KV-CAT paper",
    "kvpress:KVzipPress": "KVzip (kvpress)",
    "kvpress:ExpectedAttentionPress": "Expected Attention (kvpress)",
    "h2o": "H2O",
    "snapkv": "SnapKV",
    "tova": "TOVA",
    "streaming": "StreamingLLM",
}
"""Methods by specification, and their names in words."""
UNPLOTTED = ("attention-matching,budgets=equal", "tova")
MARKERS = "osD^vPX<>"
WAY = "reconstruction"
KEEPS = (0.05, 0.1, 0.2, 0.4)
FOLDER = Path(__file__).parent


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
    if options.tools:
        cases, functions = options.tools
        models = parse_models(options.model)
        measure_tool_calls(models, methods, KEEPS, options.out, cases=cases, functions=functions)
    if not any(options.documents):
        return
    conditions = list(map(condition_of, methods))
    asked = ["--out", str(options.out / "questions.jsonl"), "--keep", *keeps]
    asked += ["--documents", *map(str, options.documents)]
    run("questions.py", *shared, *asked, "--conditions", *conditions, "truncated@text")


def condition_of(method: str) -> str:
    """The condition of ``questions.py`` that a method is asked in."""
    return f"{method}@{WAY if method.startswith(LEARNING) else 'self'}"


def run(script: str, *arguments: str) -> None:
    """Run a benchmark of this folder."""
    run_python(str(FOLDER / script), *arguments)


def of_documents(records: list[dict]) -> list[dict]:
    """The records of caches that were made from the document alone."""
    return [
        record
        for record in records
        if (record["way"] == WAY) == record["method"].startswith(LEARNING)
    ]


def losses(records: list[dict], methods: Sequence[str]) -> pd.DataFrame:
    """KL of a document alone on the windows that every method has: by window (rows), method and
    keep ratio."""
    return table(record for record in records if record["method"] in methods)[WAY]


def estimates(kl: pd.DataFrame) -> pd.DataFrame:
    """The means over windows with their intervals, by method and keep ratio."""
    bootstrap = ClusterBootstrap(list(kl.index.get_level_values("document")))
    rows = []
    for method, keep in kl.columns:
        estimate = bootstrap.mean(kl[method, keep].to_numpy())
        rows.append((method, keep, estimate.value, estimate.low, estimate.high))
    return pd.DataFrame(rows, columns=["method", "keep", "value", "low", "high"])


def costs(records: list[dict]) -> pd.DataFrame:
    """Medians over windows by method: processor seconds for all sizes, and the share of the dense
    cache's bytes at 10 %."""
    frame = pd.DataFrame(records)
    seconds = frame.groupby(["method", "window"]).seconds.sum().groupby("method").median()
    shares = frame[frame.keep == 0.1].groupby("method").bytes.median()
    return pd.DataFrame({"seconds": seconds, "bytes": shares})


def answers(records: list[dict], condition: str, keep: float) -> str:
    """Percent of right answers with its interval."""
    rows = [
        {"document": record["document"], "right": float(right(answer, code))}
        for record in records
        if record["condition"] == condition and record["keep"] == keep
        for answer, (_, code) in zip(record["answers"], record["asked"], strict=True)
    ]
    return share(pd.DataFrame(rows)) if rows else ""


def section(
    label: str, quality: list[dict], asked: list[dict], methods: dict[str, str], out: Path
) -> str:
    """The tables of one model."""
    by_window = losses(quality, list(methods))
    kl = estimates(by_window).set_index(["method", "keep"])
    cost = costs(quality)
    windows = len(by_window)
    documents = by_window.index.get_level_values("document").nunique()
    head = " | ".join(f"{100 * keep:g} %" for keep in KEEPS)
    rule = "|---" * (len(KEEPS) + 1)
    lines = [
        f"## {label}",
        "",
        wrapped(
            "KL(dense || compact), nats per token, on the 256 tokens after a prefix compressed "
            f"without them: {windows} windows of {documents} documents, 95 % intervals over "
            "documents."
        ),
        "",
        f"| slots kept | {head} | seconds | bytes at 10 % |",
        f"{rule}|---|---|",
    ]
    for method, name in methods.items():
        cells = []
        for keep in KEEPS:
            estimate = kl.loc[(method, keep)]
            cells.append(f"{estimate.value:.2g} [{estimate.low:.2g}, {estimate.high:.2g}]")
        seconds, share_of_bytes = cost.loc[method]
        cells += [f"{seconds:.1f}", f"{100 * share_of_bytes:.1f} %"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if asked:
        lines += questions_table(asked, methods)
    sentence, table_lines = tool_calls_section(out, label, methods, KEEPS)
    if sentence:
        lines += ["", wrapped(sentence)]
    if table_lines:
        lines += ["", *table_lines]
    return "\n".join(lines)


def whole_documents(asked: list[dict]) -> list[dict]:
    """The records of the documents on which every condition has answered that a model was asked
    in.
    """
    conditions: dict[str, set[str]] = {}
    answered: dict[tuple[str, str], set] = {}
    for record in asked:
        conditions.setdefault(record["model"], set()).add(record["condition"])
        place = (record["model"], record["document"])
        answered.setdefault(place, set()).add((record["condition"], record["keep"]))
    baselines = [condition for condition, _ in BASELINES]
    whole = set()
    for (model, document), cells in answered.items():
        compact = conditions[model].difference(baselines)
        wanted = {(condition, keep) for condition in compact for keep in KEEPS} | set(BASELINES)
        if cells >= wanted:
            whole.add((model, document))
    return [record for record in asked if (record["model"], record["document"]) in whole]


def questions_table(asked: list[dict], methods: dict[str, str]) -> list[str]:
    """The lines of the table of right answers, a row for every condition that was asked in."""
    dense, none = (answers(asked, condition, keep) for condition, keep in BASELINES)
    questions = sum(len(r["asked"]) for r in asked if r["condition"] == BASELINES[0][0])
    lines = [
        "",
        wrapped(
            f"Right answers, per cent, to {questions} questions about facts in a document; the "
            f"dense cache {dense}, without the document {none}."
        ),
        "",
        f"| slots kept | {' | '.join(f'{100 * keep:g} %' for keep in KEEPS)} |",
        "|---" * (len(KEEPS) + 1) + "|",
    ]
    conditions = {condition_of(method): name for method, name in methods.items()}
    conditions["truncated@text"] = "no compression: beginning and end of the text"
    asked_in = {record["condition"] for record in asked}
    for condition, name in conditions.items():
        if condition not in asked_in:
            continue
        cells = [answers(asked, condition, keep) for keep in KEEPS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def plot(quality: list[dict], labels: Sequence[str], methods: dict[str, str], path: Path) -> None:
    """KL against the slots kept, a panel for each model, with 95 % intervals over documents."""
    figure, axes = plt.subplots(
        1,
        len(labels),
        figsize=(4.8 * len(labels), 4.6),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for axis, label in zip(axes[0], labels, strict=True):
        of_model = [record for record in quality if record["model"] == label]
        kl = estimates(losses(of_model, list(methods))).set_index("method")
        for index, (method, name) in enumerate(methods.items()):
            curve = kl.loc[method].sort_values("keep")
            below = curve["value"] - curve["low"].clip(lower=curve["value"] / 10)
            axis.errorbar(
                100 * curve["keep"] * 1.02 ** (index - len(methods) / 2),  # side by side
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
    figure.savefig(path, dpi=150)


def wrapped(text: str) -> str:
    """Prose in lines of at most 100 columns."""
    return textwrap.fill(text.strip(), 100, break_long_words=False, break_on_hyphens=False)


def page(options: argparse.Namespace, methods: dict[str, str]) -> str:
    """The whole page."""
    quality = of_documents(read_jsonl(options.out / "quality" / "records.jsonl"))
    questions = options.out / "questions.jsonl"
    asked = whole_documents(read_jsonl(questions) if questions.exists() else [])
    labels = [model.label for model in parse_models(options.model)]
    sections = [
        section(
            label,
            [record for record in quality if record["model"] == label],
            [record for record in asked if record["model"] == label],
            methods,
            options.out,
        )
        for label in labels
    ]
    sources = " ".join(f"{source.partition('=')[0]}=..." for source in options.data)
    data = textwrap.wrap(f"--data {sources}", 90, break_on_hyphens=False)
    documents = " ".join(map(str, options.documents))
    tools = f" --tools {options.tools[0]} {options.tools[1]}" if options.tools else ""
    about = (
        "with `--add METHOD` for one more method. Seconds are processor seconds of one thread for "
        "the four caches of a prefix, which share work, without the forward pass before. Bytes are "
        f"those of the cache over the dense one in the same type. kvcat {kvcat.__version__}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}, {platform.machine()}. "
        f"{options.note}"
    )
    return "\n".join(
        [
            "# Leaderboard",
            "",
            "Every method at four sizes on real models. Written by",
            "",
            "```sh",
            f"python benchmarks/leaderboard.py --model {' '.join(labels)} \\",
            *(f"  {line} \\" for line in data),
            f"  --half {options.half} --windows {options.windows} "
            f"--per-document {options.per_document} --documents {documents}{tools} \\",
            "  --out OUT --page docs/leaderboard.md --plot docs/quality.png",
            "```",
            "",
            wrapped(about),
            "",
            "\n\n".join(sections),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_option(parser)
    add_options(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file to write")
    parser.add_argument("--add", nargs="+", default=[], metavar="METHOD", help="further methods")
    parser.add_argument(
        "--documents", type=int, nargs=3, default=[4, 4, 4], metavar="N", help="with questions"
    )
    parser.add_argument(
        "--tools",
        type=int,
        nargs=2,
        metavar=("CASES", "FUNCTIONS"),
        help="also measure tool calls: number of contexts, and of functions in each",
    )
    parser.add_argument("--note", default="", help="a sentence for the page")
    parser.add_argument("--only-write", action="store_true", help="measure nothing")
    parser.add_argument("--first", type=int, help="measure so many windows alone")
    parser.add_argument("--plot", type=Path, help="picture of KL against the slots kept")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    added = options.out / "added.jsonl"
    append_jsonl(added, *({"method": method} for method in options.add))
    earlier = [record["method"] for record in read_jsonl(added)]
    methods = METHODS | {method: f"`{method}`" for method in earlier}
    if not options.only_write:
        for method in methods:
            method_of(method)  # an unknown method is rejected before a model is loaded
        measure(options, list(methods))
    options.page.write_text(page(options, methods), encoding="utf-8")
    if options.plot:
        quality = of_documents(read_jsonl(options.out / "quality" / "records.jsonl"))
        labels = [model.label for model in parse_models(options.model)]
        shown = {method: name for method, name in METHODS.items() if method not in UNPLOTTED}
        plot(quality, labels, shown, options.plot)


if __name__ == "__main__":
    run_script(main)
