"""How every method grows with the context and the keep ratio: python benchmarks/context.py [--out context.jsonl].

The model is kvcat-base, whose 1,024 positions are stretched to the context by YaRN without training; the text is
installed Python files of the test split, and every context ends at the same place. So the error is that of trained
weights on real text, as long as the model itself reads it: the trace's row has its loss. Methods are fitted to the 256
tokens behind the context; KL is that of the 256 tokens after those.

Seconds are processor time of one thread, for the compression alone; MiB what the resident set grows by at most
meanwhile (Linux). A cell is left out where the lengths before let expect more than --limit seconds. Every cell is a
line of the output file, and a run that was interrupted goes on behind what is there.
"""

import argparse
import copy
import ctypes
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import kvcat
from kvcat.compress import parse_method, seeded_compressor, split_supervision, supervised_kl, trace
from kvcat.data import open_documents, split_of

METHODS = (
    "first",
    "random",
    "streaming",
    "keynorm",
    "snapkv",
    "tova",
    "h2o",
    "attention-matching,preset=paper",
    "attention-matching",
    "attention-matching,budgets=equal",
    "gradient,num_steps=5",
)
TOKENS, KEEP, SUFFIX = [1024, 2048, 4096, 8192, 16384, 32768], [0.05, 0.1, 0.2, 0.4], 512
TRACE = "trace"
Row = dict[str, float]


def status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def measured(run: Callable[[], Any]) -> tuple[Any, Row]:
    """What ``run`` returns, its processor time and the growth of the resident set at its peak."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before does not hide what is taken now
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status_mib("VmRSS"), time.process_time()
    result = run()
    return result, {"seconds": time.process_time() - start, "mib": status_mib("VmHWM") - before}


def stretched(model: PreTrainedModel, positions: int) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    own = config.max_position_embeddings
    config.max_position_embeddings = max(own, positions)
    if positions > own:
        config.rope_parameters = {
            "rope_type": "yarn", "rope_theta": config.rope_parameters["rope_theta"], "factor": positions / own,
            "original_max_position_embeddings": own,
        }  # fmt: skip
    longer = type(model)(config)
    longer.load_state_dict(model.state_dict())
    return longer.eval()


def text_tokens(tokenizer, count: int) -> torch.Tensor:
    ids: list[int] = []
    for document in open_documents("installed"):
        if split_of(document.id) == "test":
            ids += tokenizer(document.text, verbose=False)["input_ids"]
        if len(ids) >= count:
            return torch.tensor([ids[:count]])
    raise SystemExit(f"the installed test files hold {len(ids)} tokens, not {count}")


class Results:
    """Rows by method, tokens and keep ratio, in a file."""

    def __init__(self, path: Path):
        self.path, self.rows = path, {}
        for line in path.read_text().splitlines() if path.exists() else []:
            row = json.loads(line)
            self.rows[row.pop("method"), row.pop("tokens"), row.pop("keep")] = row

    def add(self, method: str, tokens: int, keep: float, row: Row) -> None:
        self.rows[method, tokens, keep] = row
        with self.path.open("a") as file:
            file.write(json.dumps({"method": method, "tokens": tokens, "keep": keep, **row}) + "\n")
        print(f"{tokens:6d} {keep:4g} {method:<42}" + "  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)

    def wanted(self, method: str, tokens: int, keep: float, lengths: list[int], limit: float) -> bool:
        if (method, tokens, keep) in self.rows:
            return False
        spent = [row["seconds"] for n in lengths if n < tokens and (row := self.rows.get((method, n, keep)))]
        if len(spent) < sum(n < tokens for n in lengths):
            return False
        growth = max(2.0, spent[-1] / spent[-2]) if len(spent) > 1 else 8.0
        return not spent or spent[-1] * growth <= limit

    def exponent(self, column: str, along: str, methods: str, fixed: float, least: float) -> str:
        """Slope of the logarithm of a column along tokens or keep ratios; - where it is too small to tell."""
        at = [
            (tokens if along == "tokens" else keep, row[column])
            for (method, tokens, keep), row in sorted(self.rows.items())
            if method == methods and fixed == (keep if along == "tokens" else tokens) and row[column] >= least
        ]
        if len(at) < 3:
            return "-"
        points = [(math.log(x), math.log(y)) for x, y in at]
        x, y = (sum(part) / len(points) for part in zip(*points, strict=True))
        slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
        return f"{slope:.2f}"


def run(results: Results, options: argparse.Namespace) -> None:
    base, tokenizer = kvcat.load("kvcat-base")
    ids = text_tokens(tokenizer, max(TOKENS + options.tokens) + SUFFIX)
    for tokens in options.tokens:
        cells = [
            (method, keep)
            for method in options.methods
            for keep in options.keep
            if results.wanted(method, tokens, keep, options.tokens, options.limit)
        ]
        if not cells:
            continue
        model = stretched(base, tokens + SUFFIX)
        trace(model, ids[:, :64], 32)
        own = ids[:, -tokens - SUFFIX :]
        traced, row = measured(lambda model=model, own=own, tokens=tokens: trace(model, own, tokens))
        if (TRACE, tokens, 1.0) not in results.rows:
            held = sum(x.nbytes for part in (traced.keys, traced.values, traced.queries) for x in part) / 2**20
            targets = own[:, tokens + 1 :, None]
            nll = -traced.logits[:, :-1].log_softmax(-1).gather(-1, targets).mean().item()
            results.add(TRACE, tokens, 1.0, {**row, "held_mib": held, "nll": nll})
        fitted, judge = split_supervision(traced, 0.5)
        for method, keep in cells:
            compressor = seeded_compressor(*parse_method(method), seed=0)
            cache, row = measured(lambda c=compressor, t=fitted, keep=keep: c(t, keep_ratio=keep))
            results.add(method, tokens, keep, {**row, "kl": supervised_kl(judge, cache).item()})


def table(results: Results, options: argparse.Namespace) -> None:
    short, long = (4096, 32768) if {4096, 32768} <= set(options.tokens) else (min(options.tokens), max(options.tokens))
    keep = 0.1 if 0.1 in options.keep else options.keep[0]

    def cell(method: str, tokens: int, column: str, ratio: float = keep) -> str:
        row = results.rows.get((method, tokens, ratio))
        return "-" if row is None else f"{row[column]:.{4 if column == 'kl' else 2 if column == 'seconds' else 0}f}"

    print(f"\n{platform.machine()}, one thread, torch {torch.__version__}, kvcat-base by YaRN; at {keep:.0%} but where")
    print("another ratio is named; time and memory grow as (tokens)^a and (slots kept)^b\n")
    titles = [
        "method", "time: a", "time: b", "memory: a",
        *(f"{unit} at {n}" for unit in ("s", "MiB") for n in (short, long)),
        *(f"KL at {n}" for n in options.tokens), *(f"KL at {short}, {ratio:.0%}" for ratio in options.keep),
    ]  # fmt: skip
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    for method in options.methods:
        cells = [
            results.exponent("seconds", "tokens", method, keep, 0.005),
            results.exponent("seconds", "keep", method, short, 0.005),
            results.exponent("mib", "tokens", method, keep, 1.0),
            *(cell(method, n, column) for column in ("seconds", "mib") for n in (short, long)),
            *(cell(method, n, "kl") for n in options.tokens),
            *(cell(method, short, "kl", ratio) for ratio in options.keep),
        ]
        print(f"| `{method}` | " + " | ".join(cells) + " |")
    row = results.rows
    print("\nthe trace: " + ", ".join(
        f"{n} tokens {row[TRACE, n, 1.0]['seconds']:.2f} s, {row[TRACE, n, 1.0]['mib']:.0f} MiB "
        f"({row[TRACE, n, 1.0]['held_mib']:.0f} held), {row[TRACE, n, 1.0]['nll']:.2f} nats per token"
        for n in options.tokens if (TRACE, n, 1.0) in row
    ))  # fmt: skip
    print(f"trace time ~ tokens^{results.exponent('seconds', 'tokens', TRACE, 1.0, 0.005)}, "
          f"memory ~ tokens^{results.exponent('mib', 'tokens', TRACE, 1.0, 1.0)}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("context.jsonl"))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--keep", type=float, nargs="+", default=KEEP)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a cell may be expected to take")
    options = parser.parse_args()
    options.tokens.sort()
    torch.set_num_threads(1)
    results = Results(options.out)
    run(results, options)
    table(results, options)


if __name__ == "__main__":
    main()
