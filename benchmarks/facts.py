"""Facts stated in a conversation and asked many turns later: python benchmarks/facts.py --out FILE.

In every turn the user writes neutral sentences and one fact, such as "The phone number of Anna is
48213.", and the assistant says "Noted.". After 5, 10, 20 and 30 turns (--turns) all facts stated
so far are asked, each alone: the question is a turn, and the answer is begun, "The phone number of
Anna is". A greedy answer is right if it contains the whole number. The questions and their answers
do not become part of the conversation.

    dense         the whole conversation
    session       kvcat.Session with --budget slots, compacted again and again
    all queries   the same with the queries of all tokens kept
    no queries    the same without kept queries
    streaming     the same with StreamingLLM, the first 4 positions and the last ones
    attention-matching, h2o, snapkv
                  the whole conversation, read again at each question, in as many slots as the
                  session holds then
    repeated      the default with a repetition of the whole conversation, in as many slots
    truncated     the template's opening and the last tokens, as many as these slots

    python benchmarks/facts.py --collect OUT    # adds the records to those kept
    python benchmarks/facts.py --write          # docs/conversations.md from records
    python benchmarks/facts.py --check          # exit code 1 if it is different

Intervals are Wilson's with a design effect for the questions of one conversation. Every answer is
written to --out when it is made; the same command continues an interrupted run.
"""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from leaderboard import RECORDS, ROOT, add_to_table, wrapped, write_or_check
from named_models import NamedModel, add_record_options, for_each_model
from questions import DIGITS, LINE, NAMES, right, share
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvcat
from kvcat.cache import CompactCache
from kvcat.compress import Reconstruction, make_compressor
from kvcat.compress.documents import INSTRUCTION, sequence_trace
from kvcat.errors import InputError, run_script
from kvcat.evals.answers import greedy_answers
from kvcat.evals.haystacks import draws, filler_lines, number, shuffled
from kvcat.files import append_jsonl, read_json, read_jsonl, write_json
from kvcat.provenance import provenance
from kvcat.text.template import chat_parts

ANSWER = "Noted."
ABOUT = ("model", "document", "condition", "turns", "tokens", "slots", "compactions")
KEY = ["model", "document", "condition", "turns", "stated"]
PAGE = ROOT / "docs" / "conversations.md"
REPEATED = "repeated"
QUESTION = "What is the phone number of {}?"
SESSION = "session"
SESSIONS: dict[str, dict[str, Any]] = {
    SESSION: {},
    "all queries": {"num_kept": 1 << 20},
    "no queries": {"num_kept": 0},
    "streaming": {"method": "streaming"},
}
ONE_SHOT = ("attention-matching", "h2o", "snapkv")
LABELS = {
    "dense": "whole conversation",
    REPEATED: "one compression, with a repetition",
    "streaming": "StreamingLLM",
    "h2o": "H2O, read again",
    "snapkv": "SnapKV, read again",
}
OTHERS = ("dense", REPEATED, *ONE_SHOT, "truncated")


@dataclass(frozen=True)
class Talk:
    """A conversation; it is the same for every condition.

    Args:
        tokenizer: with a chat template.
        seed, index: of the conversation.
        num_turns: of the user, each with one fact.
        sentences: neutral sentences of a turn.
    """

    tokenizer: PreTrainedTokenizerBase
    seed: str
    index: int
    num_turns: int
    sentences: int

    @cached_property
    def facts(self) -> list[tuple[str, str]]:
        """Name and number stated in each turn."""
        draw = draws(self.seed, "facts", self.index)
        return [(name, number(draw, DIGITS)) for name in shuffled(draw, NAMES)[: self.num_turns]]

    @cached_property
    def texts(self) -> list[str]:
        """What the user writes in each turn."""
        texts = []
        for turn, (name, code) in enumerate(self.facts):
            draw = draws(self.seed, "text", self.index, turn)
            filler = filler_lines(draw)
            lines = [next(filler) for _ in range(self.sentences)]
            lines.insert(int(draw.random() * (len(lines) + 1)), f"{LINE.format(name)} {code}.\n")
            texts.append("".join(lines).strip())
        return texts

    def questions(self, ids: Sequence[int], num_turns: int) -> list[list[int]]:
        """Token ids of the questions for all facts of the first turns, as continuations of ids."""
        messages = []
        for text in self.texts[:num_turns]:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": ANSWER})
        questions = []
        for name, _ in self.facts[:num_turns]:
            asked = [*messages, {"role": "user", "content": QUESTION.format(name)}]
            text: Any = self.tokenizer.apply_chat_template(
                asked, tokenize=False, add_generation_prompt=True
            )
            tokens = self.tokenizer.encode(text + LINE.format(name), add_special_tokens=False)
            if tokens[: len(ids)] != list(ids):
                raise InputError("the chat template changes earlier turns")
            questions.append(tokens[len(ids) :])
        return questions


def sessions_of(
    talk: Talk, model: PreTrainedModel, stops: Sequence[int], settings: dict[str, Any]
) -> Any:
    """The session after each number of turns in ``stops``."""
    session = kvcat.Session(model, talk.tokenizer, **settings)
    for turn, text in enumerate(talk.texts[: max(stops)], start=1):
        session.turn(text)
        session.turn(ANSWER, role="assistant")
        if turn in stops:
            yield turn, session


def others(
    talk: Talk, model: PreTrainedModel, session: Any, wanted: Sequence[str]
) -> Iterator[tuple[str, CompactCache]]:
    """Caches of the conversation so far by other conditions, in as many slots.

    Args:
        talk, model: of the conversation.
        session: which has read it.
        wanted: among ``OTHERS``.
    """
    ids = session.ids
    slots = round(session.held_slots)
    trace = kvcat.trace(model, ids.unsqueeze(0), supervision="self")
    if "dense" in wanted:
        yield "dense", trace.dense_cache()
    for name in ONE_SHOT:
        if name in wanted:
            yield name, make_compressor(name)(trace, num_slots=min(slots, len(ids)))
    if REPEATED in wanted:
        instruction = talk.tokenizer.encode(INSTRUCTION, add_special_tokens=False)
        both = torch.tensor([[*ids.tolist(), *instruction, *ids.tolist()]])
        sequence = Reconstruction(both, len(ids), len(ids) + len(instruction))
        repeated = sequence_trace(model, sequence)
        yield REPEATED, kvcat.AttentionMatching()(repeated, num_slots=min(slots, len(ids)))
    if "truncated" not in wanted:
        return
    opening, _, _ = chat_parts(talk.tokenizer)
    head = len(talk.tokenizer.encode(opening, add_special_tokens=False))
    last = ids[max(head, head + len(ids) - slots) :]
    cut = torch.cat([ids[:head], last]).unsqueeze(0)
    yield "truncated", kvcat.trace(model, cut, supervision="self").dense_cache()


def records_of(
    talk: Talk, model: PreTrainedModel, options: argparse.Namespace, known: set
) -> Iterator[dict[str, Any]]:
    """A record per condition and number of turns that is not known yet: the answers."""
    name = f"{talk.seed}-{talk.index}"
    for condition, settings in SESSIONS.items():
        measured = [condition, *OTHERS] if condition == SESSION else [condition]
        measured = [each for each in measured if each in options.conditions]
        missing = {
            turn: [each for each in measured if (name, each, turn) not in known]
            for turn in options.turns
        }
        wanted_turns = [turn for turn, conditions in missing.items() if conditions]
        if not wanted_turns:
            continue
        common = {"budget": options.budget, "tail": options.tail, **settings}
        for turn, session in sessions_of(talk, model, wanted_turns, common):
            questions = talk.questions(session.ids.tolist(), turn)
            caches = {condition: session.cache} if condition in missing[turn] else {}
            if set(missing[turn]) & set(OTHERS):
                caches |= dict(others(talk, model, session, missing[turn]))
            for each, cache in caches.items():
                answers = greedy_answers(model, cache, questions, DIGITS + 2)
                yield {
                    "document": name,
                    "condition": each,
                    "turns": turn,
                    "tokens": session.num_tokens,
                    "slots": cache.mean_slots,
                    "compactions": session.num_compactions,
                    "asked": talk.facts[:turn],
                    "answers": [talk.tokenizer.decode(tokens) for tokens in answers],
                }


def rows_of(records: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A row for each answer."""
    return pd.DataFrame(
        {
            **{name: record[name] for name in ABOUT},
            "stated": turn,
            "asked": code,
            "answer": answer,
        }
        for record in records
        for turn, (answer, (_, code)) in enumerate(
            zip(record["answers"], record["asked"], strict=True), start=1
        )
    )


def tables(rows: pd.DataFrame) -> list[str]:
    """Markdown: percent of right answers by condition and number of turns, and by age of the fact
    after the most turns."""
    marks = map(right, rows["answer"], rows["asked"])
    frame = rows.assign(right=[float(mark) for mark in marks])
    turns = sorted(frame.turns.unique())
    order = ["dense", *SESSIONS, *OTHERS[1:]]
    means = frame.groupby("turns")[["tokens", "compactions"]].mean()
    lines = [
        "| turns | " + " | ".join(map(str, turns)) + " |",
        "|---" * (len(turns) + 1) + "|",
        "| tokens | " + " | ".join(f"{means.tokens[turn]:.0f}" for turn in turns) + " |",
        "| compactions | " + " | ".join(f"{means.compactions[turn]:.0f}" for turn in turns) + " |",
    ]
    for name in order:
        group = frame[frame.condition == name]
        if group.empty:
            continue
        session = frame[frame.condition == SESSION] if name not in ("dense", SESSION) else None
        cells = []
        for turn in turns:
            asked = group[group.turns == turn]
            reference = None if session is None else session[session.turns == turn]
            cells.append("" if asked.empty else share(asked, reference))
        lines.append(f"| {LABELS.get(name, name)} | " + " | ".join(cells) + " |")
    most = frame[frame.turns == turns[-1]].copy()
    most["age"] = pd.cut(
        most.turns - most.stated, [-1, 4, 9, 19, 29]
    ).cat.remove_unused_categories()
    ages = list(most.age.cat.categories)
    lines += ["", f"After {turns[-1]} turns, facts stated so many turns before:", ""]
    lines.append(
        "| | " + " | ".join(f"{age.left + 1:.0f} to {age.right:.0f}" for age in ages) + " |"
    )
    lines.append("|---" * (len(ages) + 1) + "|")
    for name in order:
        group = most[most.condition == name]
        if group.empty:
            continue
        cells = [share(group[group.age == age]) for age in ages]
        lines.append(f"| {LABELS.get(name, name)} | " + " | ".join(cells) + " |")
    return lines


def put_away(options: argparse.Namespace) -> None:
    """Add the records of a measurement to those that are kept, and how they were made."""
    rows = pd.concat([rows_of(read_jsonl(file)) for file in options.collect])
    rows = add_to_table("facts", rows, KEY)
    command = f"python benchmarks/facts.py --budget {options.budget} --conversations "
    command += f"{rows['document'].nunique()} --turns {' '.join(map(str, rows['turns'].unique()))}"
    command += f" --conditions {' '.join(map(shlex.quote, rows['condition'].unique()))}"
    facts = {"command": f"{command} --out FILE", "date": options.date}
    write_json(RECORDS / "facts.json", provenance() | facts)


def page_table() -> str:
    """The tables of the records that are kept, and how they were made."""
    texts = dict.fromkeys(["asked", "answer"], str)
    rows = pd.read_csv(RECORDS / "facts.csv.gz", dtype=texts, keep_default_na=False)
    facts = read_json(RECORDS / "facts.json")
    about = (
        f"Made by `{facts['command']}`, {facts['date']}, torch {facts['torch']}, {facts['cpu']}. "
        "Per cent of right answers with 95 % intervals over conversations; p is of the difference "
        "to the session."
    )
    lines = [wrapped(about)]
    for model, of_model in rows.groupby("model", sort=False):
        lines += ["", f"**{model}**", "", *tables(of_model)]
    return "\n".join(lines)


def run(named: NamedModel, options: argparse.Namespace) -> None:
    """Ask one model what is not asked yet, and print its tables."""
    records = named.records(options.out)
    known = {(record["document"], record["condition"], record["turns"]) for record in records}
    model = named.load_for(options.out)
    for index in tqdm(range(options.conversations), named.label):
        talk = Talk(named.tokenizer, options.seed, index, max(options.turns), options.sentences)
        for made in records_of(talk, model, options, known):
            record = {"model": named.label, **made}
            append_jsonl(options.out, record)
            records.append(record)
    print("\n".join(tables(rows_of(records))))


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_record_options(parser, required=False)
    parser.add_argument("--turns", type=int, nargs="+", default=[5, 10, 20, 30])
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--sentences", type=int, default=3, help="neutral ones in a turn")
    parser.add_argument("--budget", type=int, default=400, help="slots per layer and head")
    every = [*SESSIONS, *OTHERS]
    parser.add_argument("--conditions", nargs="+", choices=every, default=every, metavar="NAME")
    parser.add_argument("--tail", type=int, default=64)
    parser.add_argument("--seed", default="test", help="of the conversations")
    parser.add_argument("--collect", nargs="+", type=Path, metavar="OUT", help="records to add")
    parser.add_argument("--date", default="", help="of the measurement, for the page")
    parser.add_argument("--write", action="store_true", help="the page's tables")
    parser.add_argument("--check", action="store_true", help="compare them with the records")
    options = parser.parse_args()
    if options.out is not None:
        for_each_model(options, run)
    if options.collect:
        put_away(options)
    if options.write or options.check:
        write_or_check(PAGE, {"facts": page_table()}, options)


if __name__ == "__main__":
    run_script(main)
