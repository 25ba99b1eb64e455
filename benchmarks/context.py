"""Time and memory of compression by the length of a document.

    python benchmarks/context.py --text FILE

Each document is compressed alone (``supervision="self"``). Prefill is one forward that fills the
cache. The trace is the forward that all methods share; it replaces the prefill. A method's seconds
are those of a call on the trace, from a cold start. Seconds are processor time of one thread. MiB
are the largest growth of the resident set meanwhile (Linux).

Every cell is a line of the output file. An interrupted run continues after the lines that are
there; use another file for another model, text or keep ratio.
"""

import argparse
import ctypes
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import kvcat
from kvcat.compress import parse_method, seeded_compressor
from kvcat.errors import run_script
from kvcat.files import append_jsonl, read_jsonl

METHODS = ("attention-matching", "attention-matching,budgets=equal", "h2o", "snapkv")


def status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def measured(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What ``run`` returns, its processor time and the growth of the resident set at its peak."""
    ctypes.CDLL(None).malloc_trim(
        0
    )  # memory that was freed before must not hide memory that is allocated now
    Path("/proc/self/clear_refs").write_text("5")
    before = status_mib("VmRSS")
    start = time.process_time()
    result = run()
    return result, {"seconds": time.process_time() - start, "mib": status_mib("VmHWM") - before}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--text", type=Path, required=True, help="long enough for the longest document"
    )
    parser.add_argument("--out", type=Path, default=Path("context.jsonl"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_jsonl(options.out) if options.out.exists() else []
    done = {(row["tokens"], row["what"]) for row in rows}
    model, tokenizer = kvcat.load(options.model)
    ids = tokenizer(
        options.text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False
    ).input_ids
    if ids.shape[1] < max(options.tokens):
        raise SystemExit(f"{options.text} holds {ids.shape[1]} tokens, not {max(options.tokens)}")
    kvcat.trace(model, ids[:, :64], 32)  # set-up of the libraries

    def add(tokens: int, what: str, run: Callable[[], Any]) -> Any:
        result, costs = measured(run)
        row = {"tokens": tokens, "what": what, **costs}
        if (tokens, what) not in done:
            rows.append(row)
            append_jsonl(options.out, row)
        return result

    for tokens in options.tokens:
        missing = [method for method in options.methods if (tokens, method) not in done]
        if not missing:
            continue
        prefix_ids = ids[:, :tokens]
        with torch.no_grad():
            add(
                tokens,
                "prefill",
                lambda prefix_ids=prefix_ids: model(prefix_ids, use_cache=True, logits_to_keep=1),
            )
        traced = add(
            tokens,
            "trace",
            lambda prefix_ids=prefix_ids: kvcat.trace(model, prefix_ids, supervision="self"),
        )
        for method in missing:
            compressor = seeded_compressor(*parse_method(method), seed=0)
            add(tokens, method, lambda c=compressor, t=traced: c(t, keep_ratio=options.keep))
    print(
        f"{platform.machine()}, one thread, torch {torch.__version__}, {options.model}, keep "
        f"{options.keep:g}\n"
    )
    frame = pd.DataFrame(rows)
    for column, form in (("seconds", "{:.1f}"), ("mib", "{:.0f}")):
        table = frame.pivot(index="what", columns="tokens", values=column)
        print(
            f"{column}\n"
            f"{table.loc[list(dict.fromkeys(frame.what))].to_string(float_format=form.format)}\n"
        )


if __name__ == "__main__":
    run_script(main)
