"""Share of right answers from compact caches: python benchmarks/questions.py --out FILE.

With several models (--model PATH LABEL=PATH) each is asked about the same names and numbers, in
documents of the same number of tokens.

A document consists of neutral sentences and of lines such as "The phone number of Anna is 48213.":
one such line (needle), four (multi-needle) or twelve (key-value). It is a user's turn in the chat
template. The question "What does the text say?" follows, and the answer is begun: "The phone number
of Anna is". All questions are answered from one cache. A greedy answer is right if it contains the
whole number.

Conditions are METHOD@SUPERVISION. A cache is fitted to the prefix's own queries ("self"), to a
repetition of the document ("reconstruction"), to eight questions of the same kind with invented
answers that are not in the document ("examples"), or to the very questions with their answers
("asked"). Eviction reads the prefix alone. For comparison there are the dense cache, no document,
and ("truncated@text") the beginning and the end of the text, as many tokens as the cache has slots.

Intervals are Wilson's with a design effect for the answers about one document. Every answer is
written to --out when it is made; the same command continues an interrupted run. The
tables cover all that --out holds: every question, each kind and each length.
"""

import argparse
import platform
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from named_models import NamedModel, add_record_options, for_each_model
from peers import method_of
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.cache import CompactCache
from kvcat.compress import Trace, slots_for, trace
from kvcat.compress.documents import reconstruction_of_tokens
from kvcat.errors import run_script
from kvcat.evals.answers import greedy_answers
from kvcat.evals.evaluations.longbench import cut_middle
from kvcat.evals.haystacks import Pieces, draws, filler_lines, number, shuffled
from kvcat.files import append_jsonl, read_jsonl
from kvcat.stats import shares, sign_flip_p_value
from kvcat.text.template import chat_parts

# number of lines with facts, all of which are asked
KINDS = {"needle": 1, "multi-needle": 4, "key-value": 12}
NAMES = [
    "Anna", "Peter", "Maria", "Thomas", "Laura", "Martin", "Emma", "Daniel", "Sarah", "Robert",
    "Julia", "Michael", "Helen", "Frank", "Alice", "David", "Clara", "Simon", "Grace", "Henry",
    "Rose", "Oscar", "Lucy", "Victor", "Nina", "Paul", "George", "Emily", "Arthur", "Diana",
    "Walter", "Louis",
]  # fmt: skip
BASELINES = (("dense", 1.0), ("no document", 0.0))
LINE = "The phone number of {} is"
QUESTION = "What does the text say?"
DIGITS = 5
EXAMPLES = 8
# of the documents; 1 spelled the control tokens of the chat template as text
VERSION = 2
CONDITIONS = (
    "attention-matching@self",
    "attention-matching@reconstruction",
    "attention-matching@examples",
    "attention-matching,preset=known@examples",
    "attention-matching,preset=known@asked",
    "attention-matching,budgets=equal@self",
    "attention-matching,preset=paper@self",
    "h2o@self",
    "snapkv@self",
    "truncated@text",
)


@dataclass(frozen=True)
class Document:
    """A document with its facts on a model; it is the same for every condition."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kind: str
    length: int
    seed: str
    index: int

    @property
    def name(self) -> str:
        """The document's name in records; those of documents of another version do not mix."""
        return f"{self.kind}-{self.length}-{self.seed}-{self.index}-v{VERSION}"

    @cached_property
    def facts(self) -> list[tuple[str, str]]:
        """Names and numbers in the document that are asked."""
        draw = draws(self.seed, "facts", self.kind, self.length, self.index)
        return [(name, number(draw, DIGITS)) for name in shuffled(draw, NAMES)[: KINDS[self.kind]]]

    @property
    def asked(self) -> list[Any]:
        """What records hold of the questions."""
        return self.facts

    @cached_property
    def head(self) -> list[int]:
        """Token ids of the chat template's opening; its control tokens are not text."""
        opening, _, _ = chat_parts(self.tokenizer)
        return self.tokenizer.encode(opening, add_special_tokens=False)

    @cached_property
    def ids(self) -> list[int]:
        """Token ids: the opening of the chat template, neutral lines with the facts between
        them."""
        draw = draws(self.seed, "text", self.kind, self.length, self.index)
        pieces = Pieces(self.tokenizer)
        head = self.head
        fact_lines = [f"{LINE.format(name)} {code}.\n" for name, code in shuffled(draw, self.facts)]
        num_tokens = self.length - len(head)
        lines = pieces.fitting(
            filler_lines(draw), num_tokens - sum(len(pieces(line)) for line in fact_lines)
        )
        for line in fact_lines:
            lines.insert(int(draw.random() * (len(lines) + 1)), line)
        return [*head, *pieces.filled(lines, filler_lines(draw), num_tokens)]

    def encode(self, text: str, facts: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Token ids of the question, a text that begins the answer, and of facts that the
        answer states."""
        _, between, tail = chat_parts(self.tokenizer)
        said = text + "\n".join(f"{LINE.format(name)} {code}." for name, code in facts)
        return self.tokenizer.encode(between + QUESTION + tail + said, add_special_tokens=False)

    def traced(self, supervision: str) -> Trace:
        """The trace that a cache is fitted to."""
        ids = torch.tensor([self.ids])
        if supervision == "self":
            return trace(self.model, ids, supervision="self")
        if supervision == "reconstruction":
            # as `kvcat compress --chat`: the second copy is without the template's opening
            return trace(self.model, reconstruction_of_tokens(self.tokenizer, ids, self.head))
        facts = self.facts
        if supervision == "examples":
            draw = draws(self.seed, "examples", self.kind, self.length, self.index)
            code_by_name = dict(self.facts)
            absent = [name for name in shuffled(draw, NAMES) if name not in code_by_name]
            facts = [(name, number(draw, DIGITS)) for name in absent[:EXAMPLES]]
        return trace(self.model, torch.tensor([[*self.ids, *self.encode("", facts)]]), self.length)

    def answers(self, cache: CompactCache | None) -> list[str]:
        """Greedy answers to all questions, after a cache or alone."""
        head = [] if cache is not None else self.head
        questions = [[*head, *self.encode(LINE.format(name))] for name, _ in self.facts]
        answers = greedy_answers(self.model, cache, questions, DIGITS + 2)
        return [self.tokenizer.decode(tokens) for tokens in answers]

    def truncated(self, keep: float) -> CompactCache:
        """The dense cache of as many tokens as a budget has slots: the template's opening and both
        ends of the text."""
        head = len(self.head)
        room = max(2, slots_for(len(self.ids), keep, None) - head)
        ids = torch.tensor([[*self.ids[:head], *cut_middle(self.ids[head:], room)]])
        return trace(self.model, ids, supervision="self").dense_cache()


def documents_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    counts: Sequence[int],
    seed: str,
) -> list[Document]:
    """So many documents of each kind and length; kinds and lengths take turns."""
    return [
        Document(model, tokenizer, kind, length, seed, index)
        for index in range(max(counts))
        for length in lengths
        for kind, count in zip(KINDS, counts, strict=True)
        if index < count
    ]


def right(answer: str, code: str) -> bool:
    """Whether an answer contains the whole number."""
    return re.search(rf"(?<!\d){code}(?!\d)", answer) is not None


def answered(
    document: Document, conditions: Sequence[str], keeps: Sequence[float], known: set
) -> Iterator[dict]:
    """A record per condition and keep ratio that is not known yet: the answers, and processor
    seconds to compress."""
    about = {
        "document": document.name,
        "kind": document.kind,
        "length": document.length,
        "asked": document.asked,
    }
    traces: dict[str, Trace] = {}
    for condition in conditions:
        missing = [keep for keep in keeps if (document.name, condition, keep) not in known]
        method, _, way = condition.partition("@")
        if not missing:
            continue
        if way not in traces and method != "truncated":
            traces[way] = document.traced(way)
        if method == "truncated":
            caches = iter([document.truncated(keep) for keep in missing])
        else:
            caches = method_of(method).each(traces[way], missing)
        for keep in missing:
            begun = time.process_time()
            cache = next(caches)
            seconds = round(time.process_time() - begun, 2)
            yield about | {
                "condition": condition,
                "keep": keep,
                "answers": document.answers(cache),
                "seconds": seconds,
            }
    for condition, keep in BASELINES:
        if (document.name, condition, keep) not in known:
            dense = condition == "dense"
            cache = (traces.get("self") or document.traced("self")).dense_cache() if dense else None
            yield about | {
                "condition": condition,
                "keep": keep,
                "answers": document.answers(cache),
                "seconds": 0.0,
            }


def share(rows: pd.DataFrame, reference: pd.DataFrame | None = None) -> str:
    """The share of right answers, percent, with its interval (``kvcat.stats.shares.share``).

    With a reference, the answers of another method to the same questions, the p-value of the
    difference follows (``sign_flip_p_value``).
    """
    interval = shares.share(rows.right.to_numpy(float), list(rows.document))
    text = f"{100 * interval.value:.0f} [{100 * interval.low:.0f}, {100 * interval.high:.0f}]"
    if reference is None or reference.empty:
        return text
    pairs = pd.concat([_marks(rows), _marks(reference)], axis=1, join="inner", keys=["a", "b"])
    documents = list(pairs.index.get_level_values("document"))
    p_value = sign_flip_p_value(pairs["a"].to_numpy(), pairs["b"].to_numpy(), documents)
    return f"{text} p {p_value:.2g}"


def _marks(rows: pd.DataFrame) -> pd.Series:
    """Right answers by document and question, whose order is the same in every record."""
    numbered = rows.assign(question=rows.groupby("document").cumcount())
    return numbered.set_index(["document", "question"])["right"].astype(float)


def report(records: Sequence[dict], conditions: Sequence[str], keeps: Sequence[float]) -> None:
    """Markdown: percent of right answers by condition and keep ratio, of all questions, each kind
    and each length; p of the difference to the first condition.

    Only documents count on which every condition has answered.
    """
    rows = [
        {
            **record,
            "right": float(right(answer, code)),
            "seconds": record["seconds"] / len(record["asked"]),
        }
        for record in records
        for answer, (_, code) in zip(record["answers"], record["asked"], strict=True)
    ]
    frame = pd.DataFrame(rows)
    counts = frame[["document", "condition", "keep"]].drop_duplicates().groupby("document").size()
    frame = frame[frame.document.map(counts) == len(conditions) * len(keeps) + len(BASELINES)]
    groups = [("all questions", frame), *frame.groupby("kind", sort=False)]
    groups += [(f"{length} tokens", answers) for length, answers in frame.groupby("length")]
    for name, group in groups:
        dense, none = (group[group.condition == name] for name, _ in BASELINES)
        print(f"\n{name}: {len(dense)} questions on {dense.document.nunique()} documents; ", end="")
        print(f"dense {share(dense)}, no document {share(none)}\n")
        print(" | ".join(["|", *(f"{100 * keep:g} %" for keep in keeps), "seconds |"]))
        print("|---" * (len(keeps) + 2) + "|")
        first = group[group.condition == conditions[0]]
        for condition in conditions:
            answers = group[group.condition == condition]
            cells = []
            for keep in keeps:
                reference = None if condition == conditions[0] else first[first.keep == keep]
                cells.append(share(answers[answers.keep == keep], reference))
            print(
                " | ".join(
                    [
                        f"| `{condition}`",
                        *cells,
                        f"{answers.seconds.sum() / answers.document.nunique():.1f} |",
                    ]
                )
            )


def show(records: Sequence[dict]) -> None:
    """Print the right answers and those of each condition."""
    for record in records:
        asked = ", ".join(f"{name} {code}" for name, code in record["asked"])
        print(
            f"{record['document']:<20}{record['condition']:<44}{record['keep']:<6g}{asked}: "
            f"{record['answers']}"
        )


def ask(named: NamedModel, options: argparse.Namespace) -> None:
    """Ask one model what is not asked yet, and print its tables."""
    everything = read_jsonl(options.out) if options.out.exists() else []
    records = [r for r in everything if r["model"] == named.label]
    known = {(r["document"], r["condition"], r["keep"]) for r in records}
    model = named.load_for(options.out)
    tokenizer = named.tokenizer
    documents = documents_of(model, tokenizer, options.lengths, options.documents, options.seed)
    for document in tqdm(documents, named.label):
        for answers in answered(document, options.conditions, options.keep, known):
            record = {"model": named.label, **answers}
            append_jsonl(options.out, record)
            records.append(record)
    shown = {
        *((condition, keep) for condition in options.conditions for keep in options.keep),
        *BASELINES,
    }
    wanted = [r for r in records if (r["condition"], r["keep"]) in shown]
    if options.show:
        show(wanted)
    print(f"\n{named.label}: {platform.machine()}, torch {torch.__version__}")
    report(wanted, options.conditions, options.keep)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_record_options(parser)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 1024], help="of documents, tokens"
    )
    parser.add_argument(
        "--documents", type=int, nargs=3, default=[4, 4, 4], metavar="N", help="of each kind"
    )
    parser.add_argument("--keep", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.5])
    parser.add_argument("--conditions", nargs="+", default=CONDITIONS, metavar="METHOD@SUPERVISION")
    parser.add_argument("--seed", default="test", help="of the documents")
    parser.add_argument("--show", action="store_true", help="print the answers")
    options = parser.parse_args()
    for condition in options.conditions:
        method = condition.partition("@")[0]
        if method != "truncated":
            method_of(method)  # an unknown method is rejected before a model is loaded
    for_each_model(options, ask)


if __name__ == "__main__":
    run_script(main)
