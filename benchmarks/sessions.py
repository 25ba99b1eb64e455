"""KL after a text was compacted in many rounds, against one compaction to as many slots.

    python benchmarks/sessions.py --model smollm2-135m --data prose=FILE code=installed --out OUT

A window is a prefix, a tail of --tail tokens, and 256 tokens after both. The prefix is compacted to
a share of its slots (--keep), part by part as it is read; the tail stays exact. Figures are
KL(dense || session) at the 256 tokens, nats per token, with the same tail in every row:

    one shot      the whole prefix, compacted once
    session       kvcat.Session in --rounds rounds, with --kept queries kept
    no queries    the same without queries of what is compact already
    appended      every part compressed by itself, its slots behind those from before
    streaming     StreamingLLM: the first 4 positions and the last ones

OUT is a folder as in quality.py: it continues after a kill.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from quality import written
from tqdm import tqdm
from windows import add_options, encoder, stored

import kvcat
from kvcat import Session
from kvcat.cache import CompactLayer, HeadSlots, Layer
from kvcat.compress import AttentionMatching, Prefix
from kvcat.compress.query_set import QuerySet
from kvcat.compress.trace import Past
from kvcat.errors import InputError, run_script
from kvcat.files import append_jsonl, read_jsonl
from kvcat.stats.intervals import ClusterBootstrap

CONTINUATION = 256
WITHOUT_LIMIT = 2**31
ROUNDS = (4, 8, 16, 32)


class Appending(AttentionMatching):
    """Compresses the tokens after a compact cache by themselves, and keeps its slots."""

    def fit(self, prefix: Prefix, sizes: Sequence[int]) -> Iterator[Sequence[Layer]]:
        """The slots from before, and of the new tokens as many as are missing."""
        num_new = prefix.num_new
        counts = torch.cat([layer.present_counts().flatten() for layer in prefix.layers])
        num_old = counts.double().mean().item() - num_new
        none = torch.zeros(0)
        no_queries = QuerySet([], positions=none.long(), weights=none, log_elsewhere=[])
        trace = replace(prefix.trace, past=Past(prefix.trace.past_len, queries=no_queries))
        new_layers = [layer.at(torch.arange(layer.max_slots)[-num_new:]) for layer in prefix.layers]
        new = Prefix(trace, [replace(layer, log_bias=None) for layer in new_layers])
        for size in sizes:
            made = next(super().fit(new, [max(1, round(size - num_old))]))
            pairs = zip(prefix.layers, made, strict=True)
            yield [joined(before, num_new, layer.padded()) for before, layer in pairs]


def joined(before: CompactLayer, num_new: int, made: CompactLayer) -> Layer:
    """A layer of the slots before the new tokens, and of those made from the new tokens."""
    old = before.at(torch.arange(before.max_slots)[:-num_new]).without_absent()
    pairs = zip(old.heads(), made.without_absent().heads(), strict=True)
    return CompactLayer.of_heads(
        [[HeadSlots.joined(both) for both in zip(*rows, strict=True)] for rows in pairs]
    )


def in_rounds(
    session: Session, ids: torch.Tensor, rounds: int, slots: int, *, is_appending: bool = False
) -> Session:
    """The session after reading prefix and tail, compacted after every part of the prefix.

    Args:
        session: without tokens.
        ids: of prefix and tail.
        rounds: parts of the prefix.
        slots: after every round, or with ``is_appending`` after the last.
    """
    prefix_len = len(ids) - session.tail
    num_read = 0
    for number in range(1, rounds + 1):
        stop = prefix_len * number // rounds + session.tail
        session.append(ids[num_read:stop])
        num_read = stop
        wanted = slots * number // rounds if is_appending else slots
        if session.held_slots - session.tail > wanted:
            session.compact(wanted)
    return session


def kl_of(dense: torch.Tensor, compact: torch.Tensor) -> float:
    """KL(dense || compact) of logits (tokens, vocab), mean over the tokens, nats."""
    log_dense = dense.double().log_softmax(-1)
    log_compact = compact.double().log_softmax(-1)
    return (log_dense.exp() * (log_dense - log_compact)).sum(-1).mean().item()


def rows(options: argparse.Namespace) -> dict[str, tuple[int, dict[str, Any]]]:
    """Number of rounds and options of the session, by the name of a row that is wanted."""
    most = max(options.rounds)
    made: dict[str, tuple[int, dict[str, Any]]] = {"one shot": (1, {})}
    for rounds in options.rounds:
        made[f"session, {rounds} rounds"] = (rounds, {"num_kept": options.kept})
    made[f"no queries, {most} rounds"] = (most, {"num_kept": 0})
    made[f"appended, {most} rounds"] = (most, {"num_kept": 0, "method": Appending()})
    made["streaming"] = (most, {"method": "streaming"})
    if options.rows is None:
        return made
    unknown = sorted(set(options.rows) - set(made))
    if unknown:
        raise InputError(f"no row {unknown[0]!r}; the rows are {', '.join(made)}")
    return {name: made[name] for name in made if name in options.rows}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of all windows and rows, those from before a kill included."""
    model, tokenizer = kvcat.load(options.model)
    encode = encoder(tokenizer)
    length = options.prefix + options.tail
    windows = stored(options.out, options, options.tail + CONTINUATION, [encode])
    path = options.out / f"{options.model.replace('/', '-')}.jsonl"
    known = {(record["window"], record["row"]) for record in read_jsonl(path)}
    slots = round(options.keep * options.prefix)
    wanted = [(each, row) for each in enumerate(windows) for row in rows(options).items()]
    for (number, window), (name, (rounds, settings)) in tqdm(wanted, disable=None):
        if (number, name) in known:
            continue
        ids = torch.tensor(window.tokens(encode, length + CONTINUATION))
        with torch.no_grad():
            dense = model(ids.unsqueeze(0)).logits[0, length:]
        begun = time.process_time()
        session = Session(
            model,
            tokenizer,
            budget=WITHOUT_LIMIT,
            tail=options.tail,
            room=1,
            piece=WITHOUT_LIMIT,
            **settings,
        )
        is_appending = isinstance(settings.get("method"), Appending)
        in_rounds(session, ids[:length], rounds, slots, is_appending=is_appending)
        seconds = time.process_time() - begun
        kl = kl_of(dense, session.score(ids[length:]))
        record = {
            "window": number,
            "document": window.document,
            "row": name,
            "kl": kl,
            "slots": session.held_slots,
            "processor_seconds": seconds,
        }
        append_jsonl(path, record)
    return read_jsonl(path)


def report(records: list[dict[str, Any]]) -> None:
    """Print a row per way: mean KL, and its ratio to that of one shot, with 95 % intervals.

    The last figures are the smallest and the largest ratio of a single window.
    """
    frame = pd.DataFrame(records)
    one_shot = frame[frame.row == "one shot"].set_index("window").kl
    print("| | slots | KL | over one shot | single windows | processor seconds |")
    print("|---|---|---|---|---|---|")
    for name, group in frame.groupby("row", sort=False):
        bootstrap = ClusterBootstrap(list(group.document))
        kl = group.kl.to_numpy()
        reference = one_shot[group.window].to_numpy()
        ratio = bootstrap.estimate(bootstrap.of_means(np.divide, kl, reference))
        single = kl / reference
        figures = f"{written(bootstrap.mean(kl))} | {written(ratio)}"
        figures += f" | {single.min():.2f} to {single.max():.2f}"
        slots = f"{group.slots.mean():.1f}"
        print(f"| {name} | {slots} | {figures} | {group.processor_seconds.mean():.1f} |")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=float, default=0.1, help="share of the prefix's slots")
    parser.add_argument("--tail", type=int, default=64)
    parser.add_argument("--kept", type=int, default=1024, help="tokens whose queries are kept")
    parser.add_argument("--rounds", type=int, nargs="+", default=ROUNDS)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these, by name")
    add_options(parser)
    report(measure(parser.parse_args()))


if __name__ == "__main__":
    run_script(main)
