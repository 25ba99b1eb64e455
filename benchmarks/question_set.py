"""Right answers to questions of many kinds about real texts, by method and size.

    python benchmarks/question_set.py --data prose=FOLDER technical=FILE --out OUT.jsonl \\
        --model smollm2-135m --half held-out --lengths 600 --documents 40
    python benchmarks/question_set.py --collect OUT.jsonl    # adds the records to those kept
    python benchmarks/question_set.py --write                # docs/evaluation.md from records
    python benchmarks/question_set.py --check                # exit code 1 if it is different

A document is a passage of a text that anyone has (``windows.py``: a folder of plain texts, a table)
with facts between its sentences, at even depths. It is a user's turn in the chat template. Each
fact has one question, of one of the kinds in ``kinds.py``, and all questions of a document are
answered from one cache, which is made before they are known. Documents of --half development and
held-out share no text (a hash of its name decides) and no person.

A document has a question for every 60 tokens, and each kind at most once; the kinds take turns over
the documents. The question is asked in the user's turn and the answer is begun, because small
models do not begin alike; greedy decoding continues it. ``Asked.is_right`` judges.

A model without a chat template gets the document, the question and "Answer:" as plain text.

Conditions are METHOD@SUPERVISION, as in ``questions.py``; "answer" is a repetition of the document
in which the model answers, "reconstruction" one in the user's turn. Every answer is written to
--out when it is made; the same command continues, and with other conditions adds them.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from kinds import ALL_KINDS, COMPLETION, HALVES, KINDS, Asked, Draw, completion, spread
from leaderboard import (
    RECORDS,
    ROOT,
    SIGNIFICANT,
    add_to_table,
    percent,
    wrapped,
    write_or_check,
)
from named_models import NamedModel, add_record_options, for_each_model
from peers import method_of
from questions import BASELINES, Document, answered
from tqdm import tqdm
from windows import Source, Window, choose, encoder

from kvcat.cache import CompactCache, most_bytes_per_slot
from kvcat.compress import Reconstruction, Trace, trace
from kvcat.compress.documents import INSTRUCTION
from kvcat.errors import run_script
from kvcat.evals.answers import greedy_answers
from kvcat.evals.haystacks import draws
from kvcat.files import append_jsonl, read_json, read_jsonl, write_json
from kvcat.provenance import provenance
from kvcat.stats import holm, share, sign_flip_p_value
from kvcat.text.encoder import TextEncoder
from kvcat.text.template import chat_parts

VERSION = 1
KEY = ["model", "document", "condition", "keep", "question"]
DEFAULT = "attention-matching@reconstruction"
NAMES = {
    DEFAULT: "kvcat, the default",
    "attention-matching,bits=8@reconstruction": "the same, in 8 bits",
    "attention-matching,bits=4@reconstruction": "the same, in 4 bits",
    "attention-matching@answer": "the same, fitted to a repetition as the model's answer",
    "attention-matching@self": "the same, fitted to the document's own queries",
    "attention-matching,preset=paper@reconstruction": "Attention Matching as in the KV-CAT paper",
    "kvpress:KVzipPress@self": "KVzip (kvpress)",
    "kvpress:KVgradPress@self": "KVgrad (kvpress)",
    "kvpress:ExpectedAttentionPress@self": "Expected Attention (kvpress)",
    "h2o@self": "H2O",
    "snapkv@self": "SnapKV",
    "streaming@self": "StreamingLLM",
    "truncated@text": "text cut",
}
BY_BYTES = {
    DEFAULT: "kvcat, 16 bits",
    "attention-matching,bits=8@reconstruction": "kvcat, 8 bits",
    "attention-matching,bits=4@reconstruction": "kvcat, 4 bits",
    "kvpress:KVzipPress@self": "KVzip, 16 bits",
}
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\nAnswer: ' }}{% endif %}"
)
HEAD_DIM = 64  # of SmolLM2-135M and of Qwen2.5-0.5B
TOKENS_A_QUESTION = 60
LONGEST_ANSWER = 16  # tokens
LEAST_GAIN = 0.5  # right answers of the whole cache less those without the document
PAGE = ROOT / "docs" / "evaluation.md"
_HALF_OF_TEXTS = {"development": "validation", "held-out": "test"}
_SENTENCE_END = re.compile(r"(?<=[.!?][\"')])\s+|(?<=[.!?])\s+|\n\s*\n")


@dataclass(frozen=True)
class TextDocument(Document):
    """A passage of a text with facts, and questions of several kinds.

    Args:
        window: the text that the passage is taken from.
        half: of ``HALVES``.
    """

    window: Window
    half: str

    @property
    def name(self) -> str:
        """The document's name in records."""
        return f"{self.half}-{self.length}-{self.seed}-{self.index}-v{VERSION}"

    @cached_property
    def made(self) -> tuple[list[str], list[Asked]]:
        """The sentences of the document, and the questions."""
        draw = draws(self.seed, "many kinds", self.half, self.length, self.index)
        words = Draw(draw, self.half)
        num_questions = min(len(ALL_KINDS), self.length // TOKENS_A_QUESTION)
        first = self.index * num_questions
        kinds = [ALL_KINDS[(first + rank) % len(ALL_KINDS)] for rank in range(num_questions)]
        facts, asked = [], []
        for kind in kinds:
            if kind != COMPLETION:
                fact, question = KINDS[kind](words)
                facts.append(fact)
                asked.append(question)
        encode = TextEncoder(self.tokenizer)
        put_in = " ".join(line for fact in facts for line in fact)
        room = self.length - len(self.head) - len(encode(put_in))
        sentences: list[str] = []
        whole = _SENTENCE_END.split(self.window.text)[1:]  # the first one may begin in its middle
        for sentence in filter(None, map(str.strip, whole)):
            num_tokens = len(encode(f" {sentence}"))
            if num_tokens <= room:
                sentences.append(sentence)
                room -= num_tokens
            elif room < TOKENS_A_QUESTION:
                break
        if COMPLETION in kinds:
            # of the first half, which every tokenizer has room for
            asked.append(completion(words, sentences[: len(sentences) // 2]))
        return spread(draw, facts, sentences), [question for question in asked if question]

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The questions as records."""
        return [asdict(question) for question in self.made[1]]

    @cached_property
    def ids(self) -> list[int]:
        """Token ids: the opening of the chat template and the document."""
        text = re.sub(r" ?\n ?", "\n", " ".join(self.made[0]))
        return [*self.head, *TextEncoder(self.tokenizer).behind(text)]

    def begun(self, question: Asked) -> list[int]:
        """Token ids of the question after the document, and of the beginning of its answer."""
        _, between, tail = chat_parts(self.tokenizer)
        text = between + question.question + tail + question.begun
        return self.tokenizer.encode(text, add_special_tokens=False)

    def traced(self, supervision: str) -> Trace:
        """The trace that a cache is fitted to."""
        if supervision != "answer":
            return super().traced(supervision)
        _, between, tail = chat_parts(self.tokenizer)
        asks = self.tokenizer.encode(between + INSTRUCTION.strip() + tail, add_special_tokens=False)
        ids = torch.tensor([[*self.ids, *asks, *self.ids[len(self.head) :]]])
        sequence = Reconstruction(ids, len(self.ids), len(self.ids) + len(asks))
        return trace(self.model, sequence)

    def answers(self, cache: CompactCache | None) -> list[str]:
        """Greedy answers to all questions, after a cache or alone."""
        head = [] if cache is not None else self.head
        questions = [[*head, *self.begun(question)] for question in self.made[1]]
        answers = greedy_answers(self.model, cache, questions, LONGEST_ANSWER)
        return [str(self.tokenizer.decode(tokens)) for tokens in answers]


def documents_of(named: NamedModel, model: Any, options: argparse.Namespace) -> list[TextDocument]:
    """The documents of all lengths, which take turns."""
    sources = [Source.parse(text) for text in options.data]
    by_length = []
    for length in options.lengths:
        windows = choose(
            sources,
            [encoder(named.tokenizer)],
            length=length,
            num_windows=-(-options.documents // len(sources)),
            per_document=options.per_document,
            half=_HALF_OF_TEXTS[options.half],
        )
        by_length.append(
            [
                TextDocument(
                    model,
                    named.tokenizer,
                    window.kind,
                    length,
                    options.seed,
                    index,
                    window,
                    options.half,
                )
                for index, window in enumerate(windows[: options.documents])
            ]
        )
    turns = range(max(map(len, by_length)))
    return [some[turn] for turn in turns for some in by_length if turn < len(some)]


def ask(named: NamedModel, options: argparse.Namespace) -> None:
    """Ask one model what is not asked yet."""
    known = {(r["document"], r["condition"], r["keep"]) for r in named.records(options.out)}
    model = named.load_for(options.out)
    if not named.tokenizer.chat_template:
        named.tokenizer.chat_template = PLAIN_TEMPLATE
    for document in tqdm(documents_of(named, model, options), named.label):
        for record in answered(document, options.conditions, options.keep, known):
            text = {"text": document.window.document}
            append_jsonl(options.out, {"model": named.label, **text, **record})
    print(table(rows_of(named.records(options.out))))


def rows_of(records: Sequence[dict]) -> pd.DataFrame:
    """A row for each answer."""
    rows = []
    for record in records:
        for index, (answer, asked) in enumerate(
            zip(record["answers"], record["asked"], strict=True)
        ):
            about = {name: record[name] for name in ("model", "document", "text", "length")}
            about |= {"condition": record["condition"], "keep": record["keep"]}
            about |= {"question": index, "kind": asked["kind"], "asked": json.dumps(asked)}
            rows.append({**about, "answer": answer, "seconds": record["seconds"]})
    return judged(pd.DataFrame(rows))


def judged(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column that says which answers are right."""
    pairs = zip(rows["asked"], rows["answer"], strict=True)
    marks = [float(Asked.of(json.loads(asked)).is_right(answer)) for asked, answer in pairs]
    return rows.assign(right=marks)


def marks_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Right answers by document, kind and question (rows), condition and keep ratio.

    Documents are those that have every cell which half of the documents have.
    """
    if rows.empty:
        return rows
    table = rows.pivot(
        index=["document", "kind", "question"], columns=["condition", "keep"], values="right"
    )
    common = table.loc[:, table.notna().mean() >= 0.5]
    return common.dropna()


def above_floor(marks: pd.DataFrame) -> list[str]:
    """The kinds of which the whole cache answers half of the questions more than no document."""
    dense, none = (marks[baseline] for baseline in BASELINES)
    gain = (dense - none).groupby("kind").mean()
    return [kind for kind in ALL_KINDS if gain.get(kind, 0.0) >= LEAST_GAIN]


def of_kind(marks: pd.DataFrame, kinds: Sequence[str]) -> pd.DataFrame:
    """The rows of some kinds."""
    return marks[marks.index.get_level_values("kind").isin(kinds)]


def documents(marks: pd.DataFrame) -> list[str]:
    """The document of each row."""
    return list(marks.index.get_level_values("document"))


def table(rows: pd.DataFrame) -> str:
    """Markdown for every model, half and length: kinds above the floor by condition.

    For a model's shortest documents also by bytes and each kind.
    """
    lines = []
    for model, of_model in rows.groupby("model", sort=False):
        for half in reversed(HALVES):
            of_half = of_model[of_model["document"].str.startswith(half)]
            for rank, (length, of_length) in enumerate(of_half.groupby("length")):
                marks = marks_of(of_length)
                if marks.empty:
                    continue
                head = f"**{model}, {half} documents of {length:,} tokens**"
                lines += [head, "", *_by_condition(marks), ""]
                if rank == 0:
                    for rows_of_table in filter(None, (_by_bytes(marks, length), _by_kind(marks))):
                        lines += [*rows_of_table, ""]
    return "\n".join(lines)


def _sizes(marks: pd.DataFrame) -> tuple[list[str], list[float]]:
    """Conditions, the default first, and keep ratios."""
    cells = [cell for cell in marks.columns if cell not in BASELINES]
    conditions = sorted({name for name, _ in cells}, key=[*NAMES, *dict(cells)].index)
    return conditions, sorted({keep for _, keep in cells})


def _by_condition(marks: pd.DataFrame) -> list[str]:
    """A sentence about the questions, and the table of conditions and sizes.

    A size at which one condition alone was asked, and not the first, is in the table by bytes.
    """
    conditions, keeps = _sizes(marks)
    names = {keep: [name for name in conditions if (name, keep) in marks.columns] for keep in keeps}
    keeps = [keep for keep in keeps if conditions[0] in names[keep] or len(names[keep]) > 1]
    good = of_kind(marks, above_floor(marks))
    if good.empty:
        return [f"No kind is above the floor yet: {len(set(documents(marks)))} documents."]
    dense, none = (good[baseline].to_numpy() for baseline in BASELINES)
    about = (
        f"{len(good)} questions of {good.index.get_level_values('kind').nunique()} kinds about "
        f"{len(set(documents(good)))} documents, without the kinds near the floor: the whole cache "
        f"answers {percent(share(dense, documents(good)))} per cent, no document "
        f"{percent(share(none, documents(good)))}. After the semicolon: of the "
        f"{int(dense.sum())} answers that the whole cache has right."
    )
    p_values = {}
    for keep in keeps:
        cells = [(name, keep) for name in conditions[1:] if (name, keep) in good.columns]
        if (conditions[0], keep) in good.columns and cells:
            first = good[conditions[0], keep].to_numpy()
            tests = [
                sign_flip_p_value(first, good[cell].to_numpy(), documents(good)) for cell in cells
            ]
            p_values |= dict(zip(cells, holm(np.array(tests)), strict=True))
    lines = [
        wrapped(about),
        "",
        f"| slots kept | {' | '.join(f'{100 * keep:g} %' for keep in keeps)} |",
        "|---" * (len(keeps) + 1) + "|",
    ]
    for name in conditions:
        cells = []
        for keep in keeps:
            if (name, keep) not in good.columns:
                cells.append("-")
                continue
            right = good[name, keep].to_numpy()
            kept = 100 * right[dense == 1.0].mean()
            mark = "†" if p_values.get((name, keep), 0.0) > SIGNIFICANT else ""
            cells.append(f"{percent(share(right, documents(good)))}{mark}; {kept:.0f}")
        lines.append(f"| {NAMES.get(name, f'`{name}`')} | {' | '.join(cells)} |")
    return lines


def bytes_of(condition: str, keep: float, num_tokens: int) -> float:
    """Bytes of a cache, relative to those of the whole one in 16 bits.

    Args:
        condition: of the records.
        keep: slots, relative to the tokens.
        num_tokens: of the documents.
    """
    if not condition.startswith("attention-matching"):
        return keep
    bits = re.search(r"bits=(\d)", condition)
    per_slot, per_head = 2 * 2 * HEAD_DIM + 2.0, 0.0  # keys and values, log-bias
    if bits:
        per_slot, per_head = most_bytes_per_slot((HEAD_DIM, HEAD_DIM), int(bits[1]))
    return (per_slot * keep * num_tokens + per_head) / (2 * 2 * HEAD_DIM * num_tokens)


def _by_bytes(marks: pd.DataFrame, num_tokens: int) -> list[str]:
    """The table of what a number of bytes is good for, if some slots have fewer bits."""
    if not any("bits=" in name and name in BY_BYTES for name, _ in marks.columns):
        return []
    good = of_kind(marks, above_floor(marks))
    dense = good[BASELINES[0]].to_numpy()
    cells = []
    for name, keep in good.columns:
        if (name, keep) not in BASELINES and name in BY_BYTES:
            right = good[name, keep].to_numpy()
            kept = f"{100 * right[dense == 1.0].mean():.0f}"
            label = "whole cache" if keep == 1 else f"{100 * keep:g} % of the slots"
            what = f"{BY_BYTES[name]}, {label}"
            cells.append((bytes_of(name, keep, num_tokens), what, right, kept))
    lines = [
        "| bytes, of the whole cache in 16 bits | cache | right answers, %; of those of the whole "
        "cache |",
        "|---|---|---|",
    ]
    for share_of_bytes, what, right, kept in sorted(cells, key=lambda cell: cell[0]):
        answers = f"{percent(share(right, documents(good)))}; {kept}"
        lines.append(f"| {100 * share_of_bytes:.1f} % | {what} | {answers} |")
    return lines


def _by_kind(marks: pd.DataFrame) -> list[str]:
    """The table of kinds: whole cache, no document, and the first condition by size."""
    conditions, keeps = _sizes(marks)
    good = above_floor(marks)
    first = conditions[0]
    shown = [keep for keep in keeps if (first, keep) in marks.columns]
    head = " | ".join(f"{100 * keep:g} %" for keep in shown)
    lines = [
        f"| kind | questions | whole cache | no document | {head} |",
        "|---" * (4 + len(shown)) + "|",
    ]
    for kind in ALL_KINDS:
        some = of_kind(marks, [kind])
        if some.empty:
            continue
        cells = [*BASELINES, *((first, keep) for keep in shown)]
        numbers = [f"{int(some[cell].sum())}" for cell in cells]
        name = kind if kind in good else f"{kind} (floor)"
        lines.append(f"| {name} | {len(some)} | {' | '.join(numbers)} |")
    return lines


def page_table() -> str:
    """The tables of the records that are kept, and how they were made."""
    texts = dict.fromkeys(["asked", "answer", "kind"], str)
    rows = pd.read_csv(RECORDS / "kinds.csv.gz", dtype=texts, keep_default_na=False)
    facts = read_json(RECORDS / "kinds.json")
    about = (
        f"Made by `{facts['command']}`, {facts['date']}, torch {facts['torch']}, {facts['cpu']}. "
        "Per cent of right answers with 95 % intervals over documents; † marks differences to the "
        "first row that may be chance (p > .05, exchanging methods on whole documents, after "
        "Holm's correction over the column). In the tables of kinds are numbers of right answers."
    )
    return "\n".join([wrapped(about), "", table(judged(rows))])


def put_away(options: argparse.Namespace) -> None:
    """Add the records of a measurement to those that are kept, and how all were made."""
    new = pd.concat([rows_of(read_jsonl(file)) for file in options.collect])
    rows = add_to_table("kinds", new.drop(columns="right"), KEY)
    asked = rows[~rows["condition"].isin([name for name, _ in BASELINES])]
    commands = []
    # a document's name: half, length, seed, number, version
    seeds = asked["document"].str.split("-").str[-3].rename("seed")
    for (model, seed), of_seed in asked.groupby(["model", seeds], sort=False):
        lengths = " ".join(map(str, sorted(of_seed["length"].unique())))
        keeps = " ".join(f"{keep:g}" for keep in sorted(of_seed["keep"].unique()))
        conditions = " ".join(of_seed["condition"].unique())
        commands.append(
            f"python benchmarks/question_set.py --model {model} --lengths {lengths} --seed {seed} "
            f"--half held-out --documents ... --keep {keeps} --conditions {conditions} --data "
            "prose=... technical=... textbook=... --out OUT.jsonl"
        )
    facts = {"command": "` and `".join(commands), "date": options.date}
    file = RECORDS / "kinds.json"
    new_facts = provenance()
    earlier = read_json(file)["cpu"].split(" and ") if file.exists() else []
    facts["cpu"] = " and ".join(dict.fromkeys([*earlier, new_facts["cpu"]]))
    write_json(file, new_facts | facts)


def main() -> None:
    """Ask, put away, write or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_record_options(parser, required=False)
    parser.add_argument("--data", nargs="+", default=[], metavar="KIND=PATH", help="the texts")
    parser.add_argument("--half", choices=HALVES, default="development")
    parser.add_argument("--lengths", type=int, nargs="+", default=[600], help="tokens")
    parser.add_argument("--documents", type=int, default=20, help="of each length")
    parser.add_argument("--per-document", type=int, default=4, help="passages of one text")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--conditions", nargs="+", default=[DEFAULT], metavar="METHOD@SUPERVISION")
    parser.add_argument("--seed", default="1", help="of the facts")
    parser.add_argument(
        "--collect", nargs="+", type=Path, metavar="OUT", help="records to add to those kept"
    )
    parser.add_argument("--date", default="", help="of the measurement, for the page")
    parser.add_argument("--write", action="store_true", help="the page's tables")
    parser.add_argument("--check", action="store_true", help="compare them with the records")
    options = parser.parse_args()
    for condition in options.conditions:
        method = condition.partition("@")[0]
        if method != "truncated":
            method_of(method)  # an unknown method is rejected before a model is loaded
    if options.out is not None:
        for_each_model(options, ask)
    if options.collect:
        put_away(options)
    if options.write or options.check:
        write_or_check(PAGE, {"kinds": page_table()}, options)


if __name__ == "__main__":
    run_script(main)
