"""KL of two documents composed, against both compressed together and against both dense.

    python benchmarks/compose.py --model smollm2-135m --data books.parquet --out OUT

A window is two documents of 512 tokens from different texts of the table --data, one behind the
other, and 128 tokens that continue the first or the second. The reference is the dense model that
reads all of it. Each document is compressed alone, as `kvcat compress --supervision self` does.
Rows: the dense caches composed, the compact ones composed with and without a joint refit (which
needs a forward pass over both documents), both documents compressed together, and the document that
the text does not continue left out. OUT/rows.jsonl holds every figure; a finished window is not
computed again.
"""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.nn.functional import pad
from windows import long_texts

import kvcat
from kvcat.compress import Trace
from kvcat.errors import run_script
from kvcat.evals import ClusterBootstrap
from kvcat.files import append_jsonl, read_jsonl
from kvcat.losses import score_positions
from kvcat.models import output_head

DOCUMENT = 512
SUFFIX = 128
KEEPS = (0.2, 0.1)
SEAMS = (0, 8, 16)
FIRST_TOKEN = 4000  # of a document in its text, behind title pages and contents


def document(tokenizer: Any, text: str) -> torch.Tensor:
    """A document and the tokens that continue it, (1, DOCUMENT + SUFFIX)."""
    ids = tokenizer(text[:80_000], add_special_tokens=False, verbose=False).input_ids
    return torch.tensor([ids[FIRST_TOKEN : FIRST_TOKEN + DOCUMENT + SUFFIX]])


def pairs(tokenizer: Any, path: Path, num_windows: int, seed: int) -> Iterator[list[torch.Tensor]]:
    """Documents of two different texts each."""
    texts = long_texts(path, 60_000, 2)
    draw = random.Random(seed)
    for _ in range(num_windows):
        yield [document(tokenizer, text) for text in draw.sample(texts, 2)]


def alone(joint: Trace, continued: Trace) -> float:
    """KL of the model that read the continued document alone; positions are relative."""
    targets = pad(joint.suffix_ids[:, 1:], (0, 1))
    head = output_head(joint.model)
    return score_positions(head, continued.hidden[:, 1:], targets, joint.hidden[:, 1:]).kl.mean()


def measure(model: Any, texts: list[torch.Tensor]) -> Iterator[dict[str, Any]]:
    """The rows of a window."""
    documents = [text[:, :DOCUMENT] for text in texts]
    both = torch.cat(documents, dim=1)
    later = [text[:, DOCUMENT:] for text in texts]
    length = 2 * DOCUMENT
    judges = [kvcat.trace(model, torch.cat([both, suffix], dim=1), length) for suffix in later]
    traces = [kvcat.trace(model, ids, supervision="self") for ids in documents]
    together = kvcat.trace(model, both, supervision="self")

    def row(name: str, keep: float, cache: Any, seconds: float = 0.0) -> dict[str, Any]:
        kls = [kvcat.compare(judge, cache).kl.item() for judge in judges]
        return {
            "row": name, "keep": keep, "first": kls[0], "second": kls[1], "seconds": seconds,
            "slots": cache.mean_slots,
        }  # fmt: skip

    dense = [trace.dense_cache() for trace in traces]
    for seam in SEAMS:
        yield row(f"seam {seam}", 1.0, kvcat.compose(model, dense, seam_tokens=seam))
    from_one = [
        alone(judge, kvcat.trace(model, text, DOCUMENT))
        for judge, text in zip(judges, texts, strict=True)
    ]
    left_out = {"first": from_one[0].item(), "second": from_one[1].item()}
    yield {"row": "other document left out", "keep": 1.0, "seconds": 0.0, "slots": 512, **left_out}
    method = kvcat.AttentionMatching()
    for keep in KEEPS:
        start = time.perf_counter()
        joint = method(together, keep_ratio=keep)
        yield row("together", keep, joint, time.perf_counter() - start)
        caches = [method(trace, keep_ratio=keep) for trace in traces]
        for seam in SEAMS:
            for refit in (None, together):
                start = time.perf_counter()
                composed = kvcat.compose(model, caches, seam_tokens=seam, refit=refit)
                seconds = time.perf_counter() - start
                name = f"seam {seam}" + (", refit" if refit is not None else "")
                yield row(name, keep, composed, seconds)


def interval(rows: pd.DataFrame) -> pd.Series:
    """The ends of the 95 % interval of the mean KL over windows."""
    mean = ClusterBootstrap(rows["window"].astype(str).tolist()).mean(rows["kl"].to_numpy())
    return pd.Series({"low": mean.low, "high": mean.high})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "rows.jsonl"
    done = {record["window"] for record in read_jsonl(file)} if file.exists() else set()
    model, tokenizer = kvcat.load(options.model)
    windows = pairs(tokenizer, options.data, options.windows, options.seed)
    for number, texts in enumerate(windows):
        if number not in done:
            append_jsonl(file, *({"window": number, **row} for row in measure(model, texts)))
            print(f"window {number + 1} of {options.windows}", flush=True)
    rows = pd.DataFrame(read_jsonl(file))
    rows["kl"] = (rows["first"] + rows["second"]) / 2
    table = rows.groupby(["keep", "row"], sort=False)
    means = table[["first", "second", "kl", "slots", "seconds"]].mean()
    intervals = table.apply(interval, include_groups=False)
    print(means.join(intervals).round(4).to_string())


if __name__ == "__main__":
    run_script(main)
