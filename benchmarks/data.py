"""Tokens a second of streaming with 0, 1 and more workers, and how long training waits: python benchmarks/data.py.

The text is generated, the tokenizer is kvcat-base's; a step is 16 sequences of 1024 tokens. The consumer takes a step,
then computes nothing for as long as a model of the given speed would; the stall is what reading adds to that. All
ratios are to reading without workers in the same run. A machine with fewer free cores than workers shows less.
"""

import argparse
import os
import platform
import random
import resource
import tempfile
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvcat.data import TableSource, TokenStreams, open_prepared, open_shards, prepare

SEQ_LEN, STREAMS = 1024, 16


def write_text(folder: Path, megabytes: float) -> None:
    """Parquet files of documents with a long-tailed length, made of words drawn by frequency."""
    draw, words = (
        random.Random(0),
        [f"{chr(97 + i % 26)}{'aeiou'[i % 5]}{chr(97 + i // 26 % 26)}{i % 7}" for i in range(3000)],
    )
    weights = [1 / (i + 1) for i in range(3000)]
    folder.mkdir()
    for number in range(4):
        size, documents = 0, []
        while size < megabytes / 4 * 1e6:
            documents.append(" ".join(draw.choices(words, weights, k=int(draw.lognormvariate(5.5, 1)) + 5)))
            size += len(documents[-1])
        table = pyarrow.table({"text": documents, "id": [f"{number}-{i}" for i in range(len(documents))]})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=250)


def streams(folder: Path, tokenizer: PreTrainedTokenizerBase, workers: int) -> TokenStreams:
    return TokenStreams(
        open_shards(f"stream:{folder}"), tokenizer, seq_len=SEQ_LEN, num_streams=STREAMS, seed=0, workers=workers
    )


@dataclass(frozen=True)
class Speed:
    """Tokens a second, and a processor second of all processes, the start and read-ahead of workers included."""

    wall: float
    processor: float


def throughput(source: TokenStreams | TableSource, seconds: float) -> Speed:
    """The speed at which tokens come when they are read as fast as possible."""
    source.read(range(STREAMS))
    count, start, busy = 0, time.perf_counter(), processor_seconds()
    while time.perf_counter() - start < seconds:
        count += source.read(range(STREAMS)).numel()
    wall = time.perf_counter() - start
    source.close()
    return Speed(count / wall, count / (processor_seconds() - busy))


def processor_seconds() -> float:
    """Processor time of this process and of the children that have ended."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def show(name: str, found: Speed, base: Speed) -> None:
    ratios = f"{found.wall / base.wall:8.2f}   {found.processor / base.processor:8.2f} a processor second"
    print(f"{name:<14}{found.wall:12,.0f} tokens/s {ratios}")


def stall(source: TokenStreams | TableSource, tokens_per_s: float, steps: int) -> tuple[float, float]:
    """Mean and largest seconds a step that reading takes beside a consumer of that speed."""
    waits, busy = [], SEQ_LEN * STREAMS / tokens_per_s
    for _ in range(steps):
        start = time.perf_counter()
        source.read(range(STREAMS))
        waits.append(time.perf_counter() - start)
        time.sleep(busy)
    return float(np.mean(waits[1:])), max(waits[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each throughput")
    parser.add_argument("--consumer", type=float, default=0.5, help="speed of the consumer over reading in process")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    tokenizer = AutoTokenizer.from_pretrained(str(files("kvcat") / "assets" / "kvcat-base"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "texts"
        write_text(folder, 8)
        base = throughput(streams(folder, tokenizer, 0), options.seconds)
        show("in process", base, base)
        for workers in options.workers:
            show(f"{workers} workers", throughput(streams(folder, tokenizer, workers), options.seconds), base)
        prepare(str(folder), tokenizer, Path(name) / "tokens")
        tables = open_prepared(Path(name) / "tokens", tokenizer, SEQ_LEN)
        show("memory map", throughput(TableSource(tables["train"], STREAMS, 0), 1), base)
        speed = options.consumer * base.wall
        print(f"consumer of {speed:,.0f} tokens/s, {SEQ_LEN * STREAMS / speed:.2f} s a step:")
        for workers in [0, *options.workers]:
            with streams(folder, tokenizer, workers) as source:
                mean, largest = stall(source, speed, 12)
                share = mean * speed / (SEQ_LEN * STREAMS)
                told = f"stall {1e3 * mean:7.1f} ms a step ({share:6.1%}), largest {1e3 * largest:.1f}"
                print(f"  {workers} workers  {told}")


if __name__ == "__main__":
    main()
