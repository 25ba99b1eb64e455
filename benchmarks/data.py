"""Tokens per second of streamed and of prepared text, and how long training waits for a stream.

The text is generated and the tokenizer is that of kvcat-base. A step is 16 sequences of 1024
tokens. The consumer reads a step, then waits for as long as a model of the given speed would
compute. The stall is what reading adds to that. All ratios are to streaming in the same run.
"""

import argparse
import os
import platform
import random
import tempfile
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvcat.data import TokenLoader, open_tokens, prepare
from kvcat.errors import run_script

SEQ_LEN = 1024
STREAMS = 16


def write_text(folder: Path, megabytes: float) -> None:
    """Parquet files of documents with a long-tailed length, made of words drawn by frequency."""
    draw = random.Random(0)
    words = [
        f"{chr(97 + i % 26)}{'aeiou'[i % 5]}{chr(97 + i // 26 % 26)}{i % 7}" for i in range(3000)
    ]
    weights = [1 / (i + 1) for i in range(3000)]
    folder.mkdir()
    for number in range(4):
        size = 0
        documents = []
        while size < megabytes / 4 * 1e6:
            documents.append(
                " ".join(draw.choices(words, weights, k=int(draw.lognormvariate(5.5, 1)) + 5))
            )
            size += len(documents[-1])
        table = pyarrow.table(
            {"text": documents, "id": [f"{number}-{i}" for i in range(len(documents))]}
        )
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=250)


def reader(data: str, tokenizer: PreTrainedTokenizerBase) -> TokenLoader:
    return open_tokens(
        data,
        tokenizer,
        seq_len=SEQ_LEN,
        batch_size=STREAMS,
        max_steps=1,
        validation_sequences=1,
        seed=0,
    ).train


def speed(source: TokenLoader, seconds: float) -> float:
    """Tokens per second when they are read as fast as possible, without the first step."""
    source.read()
    count = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        count += source.read().numel()
    return count / (time.perf_counter() - start)


def stall(source: TokenLoader, tokens_per_s: float, steps: int) -> tuple[float, float]:
    """Mean and largest seconds per step that a consumer of that speed waits for reading."""
    waits = []
    for _ in range(steps):
        start = time.perf_counter()
        source.read()
        waits.append(time.perf_counter() - start)
        time.sleep(SEQ_LEN * STREAMS / tokens_per_s)
    return float(np.mean(waits[1:])), max(waits[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each throughput")
    parser.add_argument(
        "--consumer", type=float, default=0.5, help="speed of the consumer over streaming"
    )
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    tokenizer = AutoTokenizer.from_pretrained(str(files("kvcat") / "assets" / "kvcat-base"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "texts"
        tokens = Path(name) / "tokens"
        write_text(folder, 8)
        base = speed(reader(f"stream:{folder}", tokenizer), options.seconds)
        print(f"streaming    {base:14,.0f} tokens/s")
        start = time.perf_counter()
        index = prepare(str(folder), tokenizer, tokens)
        rate = index["splits"]["train"]["tokens"] / (time.perf_counter() - start)
        print(f"prepare      {rate:14,.0f} tokens/s {rate / base:8.2f}")
        rate = speed(reader(str(tokens), tokenizer), 1)
        print(f"memory map   {rate:14,.0f} tokens/s {rate / base:8.2f}")
        consumer = options.consumer * base
        mean, largest = stall(reader(f"stream:{folder}", tokenizer), consumer, 12)
        print(
            f"a consumer of {consumer:,.0f} tokens/s, {1e3 * SEQ_LEN * STREAMS / consumer:.1f} ms "
            "per step, waits "
            f"{1e3 * mean:.1f} ms for each, {1e3 * largest:.1f} at most"
        )


if __name__ == "__main__":
    run_script(main)
