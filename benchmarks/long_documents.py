"""Cost and quality by length of a document: python benchmarks/long_documents.py --out FILE.

A document is a passage of a book of --data with eight facts at even depths, such as "The phone
number of Anna is 48213." It is compressed by every method to every --keep. One thread measures

    seconds       processor time of the trace and of the method, over that of a plain forward that
                  fills a cache ("reading")
    memory        peak of both over the loaded model, over the bytes of the dense cache
    KL            KL(dense || compact) on the 256 tokens of the book that follow, nats per token
    right         greedy answers that contain the fact's whole number, asked one by one as the
                  beginning of the sentence

    attention-matching, snapkv, h2o, ...   any method; with one that is fitted to queries the
                   document is repeated, a long one in parts
    one-fit        attention-matching fitted to all parts together: the oracle of fits by part
    in-pieces      attention-matching, each piece before the next one is read (--in-pieces)
    one-repetition one repetition of the whole document, which needs twice its positions
    truncated      both ends of the text, as many tokens as the others have slots

Every cell is written to --out when it is measured, and the same command continues.

    python benchmarks/long_documents.py --collect OUT    # puts the records away
    python benchmarks/long_documents.py --write          # docs/long-documents.md and its picture
    python benchmarks/long_documents.py --check          # exit code 1 if they are different
"""

import argparse
import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from leaderboard import (
    MARKERS,
    RECORDS,
    ROOT,
    add_to_table,
    as_png,
    shows,
    wrapped,
    write_or_check,
)
from named_models import NamedModel, add_record_options, for_each_model
from peers import LEARNING
from questions import DIGITS, LINE, NAMES, right
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvcat
from kvcat.cache import CompactCache
from kvcat.compress import (
    AttentionMatching,
    Trace,
    make_compressor,
    parse_method,
    segments,
    slots_for,
)
from kvcat.compress.compare import replay_hidden
from kvcat.compress.documents import reconstruction, sequence_trace
from kvcat.compress.pieces import compress_in_pieces
from kvcat.errors import InputError, run_script
from kvcat.evals.answers import greedy_answers
from kvcat.evals.haystacks import draws, number, shuffled
from kvcat.files import append_jsonl, read_json, read_jsonl, write_json
from kvcat.losses import score_positions
from kvcat.models import output_head
from kvcat.provenance import provenance
from kvcat.stats import share

FACTS = 8
CELL = (
    "model", "dtype", "cpu", "document", "tokens", "method", "keep", "reading", "trace",
    "method_seconds", "peak", "dense_bytes", "bytes", "kl",
)  # fmt: skip
KEY = ["model", "dtype", "document", "tokens", "method", "keep", "question"]
LATER = 256
ONE_FIT = "one-fit"
IN_PIECES = "in-pieces"
ONE_REPETITION = "one-repetition"
TRUNCATED = "truncated"
DENSE = "dense"
PAGE = ROOT / "docs" / "long-documents.md"
PICTURE = ROOT / "docs" / "long-documents.png"
LABELS = {
    "attention-matching": "the default, repeated in parts",
    IN_PIECES: "the default, in pieces",
    ONE_FIT: "the same, all parts fitted together",
    ONE_REPETITION: "the same, the whole document repeated at once",
    "kvpress:KVzipPress": "KVzip (kvpress)",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    TRUNCATED: "text cut",
}
METHODS = ("attention-matching", IN_PIECES, ONE_FIT, ONE_REPETITION, "snapkv", "h2o", TRUNCATED)


@dataclass(frozen=True)
class Document:
    """A passage of a book with facts, and the text that follows it; the same for every method.

    Args:
        tokenizer: of the model.
        text: of the book.
        index: of the document.
        num_tokens: about so many.
    """

    tokenizer: PreTrainedTokenizerBase
    text: str
    index: int
    num_tokens: int

    @cached_property
    def facts(self) -> list[tuple[str, str]]:
        """Names and numbers, in the order of the text."""
        draw = draws("0", "long", self.index)
        return [(name, number(draw, DIGITS)) for name in shuffled(draw, NAMES)[:FACTS]]

    @cached_property
    def parts(self) -> tuple[str, list[int]]:
        """The document, and the token ids after it."""
        lines = [f"\n{LINE.format(name)} {code}.\n" for name, code in self.facts]
        num_plain = self.num_tokens - sum(len(self.tokenizer.encode(line)) for line in lines)
        start = int(draws("0", "place", self.index).random() * len(self.text) * 0.5)
        passage = self.text[start : start + 8 * (self.num_tokens + LATER)]
        ids = self.tokenizer.encode(passage, add_special_tokens=False, verbose=False)
        pieces = []
        for place, line in enumerate(lines):
            first, last = (num_plain * each // FACTS for each in (place, place + 1))
            middle = (first + last) // 2
            pieces += [self.tokenizer.decode(ids[first:middle]), line]
            pieces.append(self.tokenizer.decode(ids[middle:last]))
        return "".join(pieces), ids[num_plain : num_plain + LATER]


@dataclass(frozen=True)
class Dense:
    """What a document costs and predicts without compression.

    Args:
        seconds: of a plain forward.
        hidden: input of the head after the document, for the later tokens.
        later: these tokens.
        num_bytes: of the dense cache.
    """

    seconds: float
    hidden: torch.Tensor
    later: torch.Tensor
    num_bytes: int


def peak_memory(run: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call and the peak of the process's memory over that before it, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = run()
    return result, _status("VmHWM") - before


def _status(name: str) -> int:
    """A size of the process's memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise LookupError(name)


def seconds_of(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call and its processor time."""
    begun = time.process_time()
    return run(), time.process_time() - begun


@torch.no_grad()
def read_dense(model: PreTrainedModel, document: Document) -> tuple[Dense, CompactCache]:
    """The document without compression, and its cache."""
    text, later_ids = document.parts
    sequence = reconstruction(document.tokenizer, text)
    ids = sequence.input_ids[:, : sequence.prefix_len]
    model.set_attn_implementation("sdpa")
    _, seconds = seconds_of(lambda: model(ids, use_cache=True, logits_to_keep=1))
    whole = kvcat.trace(model, ids, supervision="self")
    cache = whole.dense_cache()
    later = torch.tensor([later_ids])
    hidden = replay_hidden(model, cache, later)
    return Dense(seconds, hidden, later, cache.nbytes), cache


def traced(model: PreTrainedModel, document: Document, method: str) -> Trace:
    """The trace for a method: with a repetition if it is fitted to queries."""
    sequence = reconstruction(document.tokenizer, document.parts[0])
    if not method.startswith((*LEARNING, ONE_FIT, ONE_REPETITION)):
        ids = sequence.input_ids[:, : sequence.prefix_len]
        return kvcat.trace(model, ids, supervision="self")
    return sequence_trace(model, sequence, in_parts=method != ONE_REPETITION)


def compressed(trace: Trace, method: str, keep: float) -> CompactCache:
    """The cache of a method."""
    if method == TRUNCATED:
        cache = trace.dense_cache()
        num_slots = max(2, round(keep * trace.prefix_len))
        first = num_slots // 2
        chosen = [*range(first), *range(trace.prefix_len - (num_slots - first), trace.prefix_len)]
        layers = [layer.at(torch.tensor(chosen)) for layer in cache.layers]
        return CompactCache(layers, cache.num_tokens, cache.fingerprint, cache.record)
    if method == ONE_FIT:
        part_tokens = segments.SEGMENT_TOKENS
        segments.SEGMENT_TOKENS = trace.prefix_len
        try:
            return AttentionMatching()(trace, keep_ratio=keep)
        finally:
            segments.SEGMENT_TOKENS = part_tokens
    name, options = parse_method("attention-matching" if method == ONE_REPETITION else method)
    return make_compressor(name, **options)(trace, keep_ratio=keep)


def compressed_in_pieces(model: PreTrainedModel, document: Document, keep: float) -> CompactCache:
    """The cache of the document in pieces, not rounded."""
    sequence = reconstruction(document.tokenizer, document.parts[0])
    num_slots = slots_for(sequence.prefix_len, keep, None)
    return compress_in_pieces(model, sequence, AttentionMatching(), num_slots)


@torch.no_grad()
def quality(
    model: PreTrainedModel, document: Document, dense: Dense, cache: CompactCache
) -> dict[str, Any]:
    """KL on the later text, and the answers to all questions."""
    hidden = replay_hidden(model, cache, dense.later)
    kl = score_positions(output_head(model), hidden, dense.later, dense.hidden).kl
    questions = [
        document.tokenizer.encode(f"\n{LINE.format(name)}", add_special_tokens=False)
        for name, _ in document.facts
    ]
    answers = greedy_answers(model, cache, questions, DIGITS + 2)
    texts = [document.tokenizer.decode(tokens) for tokens in answers]
    pairs = zip(texts, document.facts, strict=True)
    return {
        "kl": float(torch.as_tensor(kl).mean()),
        "right": [right(answer, code) for answer, (_, code) in pairs],
    }


def cells(
    model: PreTrainedModel, document: Document, options: argparse.Namespace, done: set[Any]
) -> Iterator[dict[str, Any]]:
    """The records of a document that are missing."""
    wanted = [
        (method, keep)
        for method in options.methods
        for keep in options.keep
        if (document.index, document.num_tokens, method, keep) not in done
    ]
    if not wanted:
        return
    dense, cache = read_dense(model, document)
    about = {"document": document.index, "tokens": document.num_tokens}
    about |= {"reading": dense.seconds, "dense_bytes": dense.num_bytes}
    if (document.index, document.num_tokens, DENSE, 1.0) not in done:
        yield {**about, "method": DENSE, "keep": 1.0, **quality(model, document, dense, cache)}
    del cache
    for method, keep in wanted:
        spent: dict[str, float] = {}

        def run(method: str = method, keep: float = keep, spent: dict = spent) -> CompactCache:
            if method == IN_PIECES:
                spent["trace"] = 0.0  # part of the whole
                made, spent["method_seconds"] = seconds_of(
                    lambda: compressed_in_pieces(model, document, keep)
                )
                return made
            trace, spent["trace"] = seconds_of(lambda: traced(model, document, method))
            made, spent["method_seconds"] = seconds_of(lambda: compressed(trace, method, keep))
            return made

        made, peak = peak_memory(run)
        yield {
            **about,
            "method": method,
            "keep": keep,
            **spent,
            "peak": peak,
            "bytes": made.nbytes,
            **quality(model, document, dense, made),
        }


def table(records: pd.DataFrame) -> pd.DataFrame:
    """Means by length, method and size."""
    frame = records.copy()
    frame["over reading"] = (frame["trace"] + frame["method_seconds"]) / frame["reading"]
    frame["memory"] = frame["peak"] / frame["dense_bytes"]
    frame["right"] = frame["right"].map(sum)
    frame["asked"] = FACTS
    groups = frame.groupby(["tokens", "method", "keep"])
    means = groups[["over reading", "memory", "kl"]].mean()
    return means.join(groups[["right", "asked"]].sum()).reset_index()


def measure(named_model: NamedModel, options: argparse.Namespace) -> None:
    """Print the table of one model, measured where records are missing."""
    records = named_model.records(options.out)
    done = {(r["document"], r["tokens"], r["method"], r["keep"]) for r in records}
    books = pd.read_parquet(options.data)["text"].tolist()
    about = {"dtype": options.dtype, "cpu": provenance()["cpu"]}
    model: Any = None
    for num_tokens in options.tokens:
        for index in range(options.documents):
            document = Document(named_model.tokenizer, books[index % len(books)], index, num_tokens)
            every = {(index, num_tokens, m, k) for m in options.methods for k in options.keep}
            if every <= done:
                continue
            if model is None:
                model = named_model.load_for(options.out, options.dtype)
            for record in cells(model, document, options, done):
                named = {"model": named_model.label, **about, **record}
                append_jsonl(options.out, named)
                records.append(named)
                print({**named, "right": sum(named["right"])}, flush=True)
    print(table(pd.DataFrame(records)).to_string(index=False))


def rows_of(records: list[dict[str, Any]]) -> pd.DataFrame:
    """A row for each question of each cell."""
    rows = []
    for record in records:
        cell = {name: record.get(name) for name in CELL}
        rows += [
            {**cell, "question": number, "right": int(mark)}
            for number, mark in enumerate(record["right"])
        ]
    return pd.DataFrame(rows)


def put_away(options: argparse.Namespace) -> None:
    """Add the records of a measurement to those that are kept, and how all were made."""
    new = pd.concat([rows_of(read_jsonl(file)) for file in options.collect])
    rows = add_to_table("long", new, KEY)
    commands = []
    measured = rows[rows["method"] != DENSE]
    for (model, dtype), of_model in measured.groupby(["model", "dtype"], sort=False):
        command = f"python benchmarks/long_documents.py --model {model} --data books.parquet"
        command += f" --dtype {dtype}" if dtype != "float32" else ""
        for option, column in (("tokens", "tokens"), ("keep", "keep"), ("methods", "method")):
            command += f" --{option} {' '.join(map(str, of_model[column].unique()))}"
        commands.append(f"{command} --documents {of_model['document'].max() + 1} --out OUT")
    facts = {"command": "` and `".join(commands), "date": options.date}
    write_json(RECORDS / "long.json", provenance() | facts)


def summary() -> pd.DataFrame:
    """Means over the documents of each model, length, method and size, from the records kept.

    Right answers are those of the questions that the whole cache answers, with an interval over
    documents.
    """
    rows = pd.read_csv(RECORDS / "long.csv.gz")
    means = []
    for (model, dtype, tokens), of_length in rows.groupby(["model", "dtype", "tokens"], sort=False):
        dense = of_length[of_length["method"] == DENSE].set_index(["document", "question"])["right"]
        for (method, keep), cell in of_length.groupby(["method", "keep"], sort=False):
            if method == DENSE:
                continue
            whole = cell.drop_duplicates("document")
            known = dense.loc[pd.MultiIndex.from_frame(cell[["document", "question"]])].to_numpy()
            marks = cell["right"].to_numpy()[known == 1]
            documents = cell["document"].to_numpy()[known == 1]
            answered = share(marks.astype(float), list(map(str, documents)))
            means.append(
                {
                    "model": model,
                    "dtype": dtype,
                    "tokens": tokens,
                    "documents": len(whole),
                    "method": method,
                    "keep": keep,
                    "trace": (whole["trace"] / whole["reading"]).mean(),
                    "fit": (whole["method_seconds"] / whole["reading"]).mean(),
                    "memory": (whole["peak"] / whole["dense_bytes"]).mean(),
                    "kl": whole["kl"].mean(),
                    "right": marks.sum(),
                    "asked": len(marks),
                    "low": answered.low,
                    "high": answered.high,
                }
            )
    shown = pd.DataFrame(means)
    order = shown["method"].map({method: number for number, method in enumerate(LABELS)})
    return shown.assign(order=order).sort_values(["tokens", "order"], kind="stable")


def page_table() -> str:
    """The summary as a table for each model."""
    facts = read_json(RECORDS / "long.json")
    cpus = pd.read_csv(RECORDS / "long.csv.gz")["cpu"].unique()
    about = (
        f"Made by `{facts['command']}`, {facts['date']}, torch {facts['torch']}, "
        f"{' or '.join(cpus)}, one thread of a machine that others used. Readings are "
        "processor seconds over those of a plain forward of the document in the same process: "
        "the trace (reading included), then the fit. Memory is the peak of both over the "
        "loaded model, over the whole cache. Right: of the questions that the whole cache "
        "answers; the interval is over documents."
    )
    lines = [wrapped(about), ""]
    for (model, dtype), of_model in summary().groupby(["model", "dtype"], sort=False):
        lines += [
            f"**{model}, {dtype}**",
            "",
            "| tokens | documents | method | slots | trace | fit | memory | KL, nats | right |",
            "|---" * 9 + "|",
        ]
        for row in of_model.itertuples():
            trace = f"{row.trace:.1f}" if row.method != IN_PIECES else "in the fit"
            lines.append(
                f"| {row.tokens:,} | {row.documents} | {LABELS.get(row.method, f'`{row.method}`')} "
                f"| {100 * row.keep:g} % | {trace} | {row.fit:.1f} | {row.memory:.1f} "
                f"| {row.kl:.4f} | {row.right} of {row.asked} "
                f"[{100 * row.low:.0f}, {100 * row.high:.0f}] |"
            )
        lines.append("")
    return "\n".join(lines)


def picture(shown: pd.DataFrame) -> bytes:
    """Right answers, time and memory by the tokens of the document, a row for each model and type.

    Those that were measured at one length alone are left out. The picture holds the hash of all
    numbers, by which it is checked.
    """
    groups = shown.groupby(["model", "dtype"], sort=False)
    models = [group for group in groups if group[1]["tokens"].nunique() > 1]
    figure, axes = plt.subplots(
        len(models), 3, figsize=(10.5, 3.6 * len(models)), layout="constrained", squeeze=False
    )
    methods = list(shown["method"].unique())
    for row, ((model, dtype), of_model) in zip(axes, models, strict=True):
        for index, method in enumerate(methods):
            curve = of_model[of_model["method"] == method]
            value = curve["right"] / curve["asked"]
            style = {
                "label": LABELS.get(method, method),
                "color": f"C{index}",
                "marker": MARKERS[index],
            }
            row[0].errorbar(
                curve["tokens"] * 1.03**index,  # side by side
                100 * value,
                yerr=100 * np.array([value - curve["low"], curve["high"] - value]),
                capsize=2,
                **style,
            )
            row[1].plot(curve["tokens"], curve["trace"] + curve["fit"], **style)
            row[2].plot(curve["tokens"], curve["memory"], **style)
        titles = ("right answers, per cent", "time, readings of the text", "memory, whole caches")
        for axis, title in zip(row, titles, strict=True):
            ticks = sorted(of_model["tokens"].unique())
            axis.set(xscale="log", title=title, xlabel=f"tokens ({model}, {dtype})")
            axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30)
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize="small")
    return as_png(figure, {"": shown})


def main() -> None:
    """Measure and print a table for each model, or keep and show records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_record_options(parser, required=False)
    parser.add_argument("--data", type=Path, help="Parquet file with a column text")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--documents", type=int, default=2, help="documents of each length")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="of the model; a label has one",
    )
    parser.add_argument("--keep", type=float, nargs="+", default=[0.1, 0.2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--collect", nargs="+", type=Path, metavar="OUT", help="records to keep")
    parser.add_argument("--date", default="", help="of the measurement, for the page")
    parser.add_argument("--write", action="store_true", help="the page's table")
    parser.add_argument("--check", action="store_true", help="compare it with the records")
    options = parser.parse_args()
    if options.out is not None:
        if options.data is None:
            raise InputError("no --data: name a Parquet file with a column text")
        for_each_model(options, measure)
    if options.collect:
        put_away(options)
    if options.write or options.check:
        write_or_check(PAGE, {"long": page_table()}, options)
        shown = summary()
        if not shows(PICTURE, {"": shown}):
            print(PICTURE.relative_to(ROOT))
            if not options.write:
                sys.exit(1)
            PICTURE.write_bytes(picture(shown))


if __name__ == "__main__":
    run_script(main)
