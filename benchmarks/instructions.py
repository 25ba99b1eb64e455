"""Instructions obeyed from compact caches, protected or not: instructions.py --out FILE.

A document opens with an instruction ("Begin every answer with the word Certainly.") and neutral
sentences follow. It is a user's turn in the chat template, compressed once; questions that have
nothing to do with the instruction are asked from the cache, and a program checks whether the greedy
answer obeys. There are 50 instructions of ten kinds. Only those count that the dense model obeys on
the same question.

    default            the method's cache
    default, protected the same with the instruction's tokens protected, in as many slots
    h2o, h2o, protected

Intervals are Wilson's over instructions. Every answer is written to --out when it is made; the same
command continues an interrupted run.
"""

import argparse
import json
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from named_models import NamedModel, add_record_options, for_each_model
from questions import share
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcat.compress import make_compressor, protected_ranges
from kvcat.compress.documents import document_trace, question_ids
from kvcat.errors import run_script
from kvcat.evals.answers import greedy_answers
from kvcat.evals.haystacks import draws, filler_lines
from kvcat.files import append_jsonl, read_jsonl

ANSWER_TOKENS = 40
METHODS = ("attention-matching", "h2o")
QUESTIONS = (
    "What is the capital of France?",
    "How does one make tea?",
    "What is a river?",
    "Why is sleep important?",
    "Name some animals that live in the sea.",
)
WORDS = ("Certainly", "Greetings", "Tulip", "Bravo", "Harbour")
NAMES = ("Paris", "water", "river", "sleep", "whale")


@dataclass(frozen=True)
class Instruction:
    """An instruction with the question that is asked and the check of the answer.

    Args:
        kind: of the instruction.
        number: among those of its kind.
        text: at the beginning of the document.
        question: asked after the document.
        obeys: whether an answer obeys.
    """

    kind: str
    number: int
    text: str
    question: str
    obeys: Callable[[str], bool]

    @property
    def name(self) -> str:
        """Its name in records."""
        return f"{self.kind}-{self.number}"


def _sentences(answer: str) -> list[str]:
    return [each for each in re.split(r"[.!?]+(?:\s|$)", answer) if each.strip()]


def _is_json(answer: str) -> bool:
    matched = re.search(r"\{.*\}", answer, re.DOTALL)
    if matched is None:
        return False
    try:
        return "answer" in json.loads(matched.group())
    except json.JSONDecodeError:
        return False


def _letters(answer: str) -> str:
    return "".join(filter(str.isalpha, answer))


def instructions() -> list[Instruction]:
    """The 50 instructions."""
    made = []
    for number, question in enumerate(QUESTIONS):
        word = WORDS[number]
        avoided = NAMES[number]
        most = 4 + 2 * number
        rules: list[tuple[str, str, Callable[[str], bool]]] = [
            (
                "begin",
                f"Begin every answer with the word {word}.",
                lambda answer, word=word: answer.strip(" \"'*").lower().startswith(word.lower()),
            ),
            (
                "end",
                f"End every answer with the word {word}.",
                lambda answer, word=word: answer.strip(" \n\"'*.!").lower().endswith(word.lower()),
            ),
            (
                "contain",
                f"Every answer must contain the word {word}.",
                lambda answer, word=word: word.lower() in answer.lower(),
            ),
            (
                "capitals",
                "Write every answer in capital letters only.",
                lambda answer: bool(_letters(answer)) and _letters(answer).isupper(),
            ),
            (
                "small letters",
                "Write every answer in small letters only, without any capital letter.",
                lambda answer: bool(_letters(answer)) and _letters(answer).islower(),
            ),
            (
                "avoid",
                f"Never use the word {avoided} in an answer.",
                lambda answer, word=avoided: word.lower() not in answer.lower(),
            ),
            (
                "one sentence",
                "Answer every question in exactly one short sentence.",
                lambda answer: len(_sentences(answer)) == 1,
            ),
            (
                "list",
                "Write every answer as a list, each line beginning with a hyphen.",
                lambda answer: all(
                    line.strip().startswith("-") for line in answer.splitlines() if line.strip()
                ),
            ),
            (
                "few words",
                f"Answer every question in at most {most} words.",
                lambda answer, most=most: 0 < len(answer.split()) <= most,
            ),
            (
                "json",
                'Write every answer as a JSON object with the key "answer".',
                _is_json,
            ),
        ]
        made += [Instruction(kind, number, text, question, obeys) for kind, text, obeys in rules]
    return made


def document(instruction: Instruction, num_sentences: int) -> str:
    """The instruction and neutral sentences, one in each line."""
    filler = filler_lines(draws("instructions", instruction.name))
    return instruction.text + "\n\n" + "".join(next(filler) for _ in range(num_sentences))


def answers_to(
    instruction: Instruction,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: argparse.Namespace,
    known: dict[tuple[str, str, float], str],
) -> Iterator[dict[str, Any]]:
    """A record per condition and keep ratio that is not known yet.

    The whole cache comes first. If the model does not obey with it, there is nothing else to ask.

    Args:
        instruction: the one to obey.
        model, tokenizer: who obeys.
        options: of the command.
        known: answers by instruction, condition and keep ratio.
    """
    text = document(instruction, options.sentences)
    trace = document_trace(model, tokenizer, text, supervision="self", chat=True)
    ranges = protected_ranges(tokenizer, text, passages=[instruction.text], chat=True)
    question = question_ids(tokenizer, instruction.question, chat=True)[0].tolist()
    conditions = [("dense", None, 1.0)]
    for method in METHODS:
        conditions += [(method, None, keep) for keep in options.keep]
        conditions += [(f"{method}, protected", ranges, keep) for keep in options.keep]
    for condition, protect, keep in conditions:
        answer = known.get((instruction.name, condition, keep))
        if answer is None:
            cache = trace.dense_cache()
            if condition != "dense":
                method = make_compressor(condition.removesuffix(", protected"))
                cache = method(trace, keep_ratio=keep, protect=protect or ())
            (tokens,) = greedy_answers(model, cache, [question], ANSWER_TOKENS)
            answer = str(tokenizer.decode(tokens, skip_special_tokens=True))
            yield {
                "document": instruction.name,
                "condition": condition,
                "keep": keep,
                "tokens": trace.prefix_len,
                "answer": answer,
            }
        if condition == "dense" and not instruction.obeys(answer):
            return


def report(records: Sequence[dict[str, Any]], keeps: Sequence[float]) -> None:
    """Markdown: percent of instructions obeyed, of those that the dense model obeys; p of the
    difference to the first row."""
    checks = {each.name: each.obeys for each in instructions()}
    rows = [
        {**record, "right": float(checks[record["document"]](record["answer"]))}
        for record in records
    ]
    frame = pd.DataFrame(rows)
    dense = frame[frame.condition == "dense"]
    obeyed = set(dense[dense.right == 1.0].document)
    print(f"\ndense: {len(obeyed)} of {len(dense)} obeyed; of these, with a compact cache\n")
    print("| | " + " | ".join(f"{100 * keep:g} %" for keep in keeps) + " |")
    print("|---" * (len(keeps) + 1) + "|")
    compact = frame[frame.document.isin(obeyed) & (frame.condition != "dense")]
    first = compact[compact.condition == compact.condition.iloc[0]] if len(compact) else compact
    for condition, group in compact.groupby("condition", sort=False):
        cells = []
        for keep in keeps:
            is_first = condition == first.condition.iloc[0]
            reference = None if is_first else first[first.keep == keep]
            cells.append(share(group[group.keep == keep], reference))
        print(f"| {condition} | " + " | ".join(cells) + " |")


def run(named: NamedModel, options: argparse.Namespace) -> None:
    """Ask one model what is not asked yet, and print its table."""
    everything = read_jsonl(options.out) if options.out.exists() else []
    records = [record for record in everything if record["model"] == named.label]
    known = {
        (record["document"], record["condition"], record["keep"]): record["answer"]
        for record in records
    }
    model = named.load_for(options.out)
    for instruction in tqdm(instructions(), named.label):
        for made in answers_to(instruction, model, named.tokenizer, options, known):
            record = {"model": named.label, **made}
            append_jsonl(options.out, record)
            records.append(record)
    print(f"\n{named.label}: {platform.machine()}, torch {torch.__version__}")
    report(records, options.keep)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_record_options(parser)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--sentences", type=int, default=40, help="neutral ones of a document")
    for_each_model(parser.parse_args(), run)


if __name__ == "__main__":
    run_script(main)
