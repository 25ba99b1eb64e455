"""Solve RULER's synthetic tasks on compressed contexts.

The tasks are RULER's synthetic ones, at any length; the questions follow after compression.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NamedTuple

import tyro

from kvcat.errors import InputError, check_least, unknown_name
from kvcat.evals.evaluation import BatchSize, CompressingEvaluation, ReportFacts
from kvcat.evals.haystacks import Pieces, draws, filler_lines, number, pick, shuffled
from kvcat.evals.questions import Question, QuestionTask, answer_ids
from kvcat.evals.task import Values, vocabulary
from kvcat.option_types import Bos, Count, Counts, Strings, flat
from kvcat.stats.metrics import share_of_examples
from kvcat.text.encoder import opening_ids


@dataclass(frozen=True, kw_only=True)
class Ruler(CompressingEvaluation):
    """Compress texts with hidden facts, then ask about these facts.

    These are the RULER tasks that need no data set. The score is the share of right answers that
    the greedy answer contains. Default keep ratios: 0.05 0.1 0.2 0.4.

    Example: kvcat eval ruler ./model --length 4096 16384 --keep 0.1 0.2 --out ruler
    """

    folder_option = "length"
    facts = ReportFacts(
        title="RULER",
        metrics=("string_match", "nll", "dense_string_match", "nll_dense", "exact_match"),
        stratum_name="task",
        sizes="{length} tokens each",
    )
    new_metrics: ClassVar = {
        "string_match": share_of_examples(
            label="string match",
            description="Share of the right answers that the greedy answer contains, as in RULER.",
            dense_metric="dense_string_match",
            shows_ability=True,
        ),
        "dense_string_match": share_of_examples(
            label="string match, dense",
            description="The same with the whole cache.",
            of_dense_model=True,
        ),
    }

    tasks: Annotated[Strings, tyro.conf.arg(name="task")] = ()
    """niah_single, niah_multikey_1, niah_multikey_2, niah_multivalue,
    niah_multiquery, vt, cwe, fwe; all by default."""
    length: Counts = ()
    """Number of tokens in the text; default: 4096. Each value has a separate results folder."""
    per_task: Count = 20
    """Number of examples for each task."""
    bos: Bos = "auto"
    batch_size: BatchSize = 1

    def make_task(self, tokenizer: Any, value: Any) -> "RulerTask":
        """The examples in the tokens of a tokenizer.

        Every text has exactly as many tokens as ``value`` says: the opening, the end of a neutral
        line, and whole lines. The random draws of an example depend only on the seed, its task, the
        length and its number. For every n, the first n examples are distributed evenly over the
        tasks.

        Raises:
            InputError: a task is unknown, or the text is too short for a task.
        """
        length = value or 4096
        names = tuple(dict.fromkeys(flat(self.tasks) or RULER_TASKS))
        check_least(1, per_task=self.per_task)
        for name in names:
            if name not in RULER_TASKS:
                raise unknown_name("RULER task", name, RULER_TASKS)
        pieces = Pieces(tokenizer)
        opening = tuple(opening_ids(tokenizer, self.bos))
        num_tokens = length - len(opening)
        examples = []
        for instance in range(self.per_task):
            for name in names:
                draw = draws(self.data_seed, name, length, instance)
                try:
                    text = RULER_TASKS[name](draw, pieces, num_tokens)
                except InputError as error:
                    raise InputError(f"{name}: {error}") from None
                body = pieces.filled(text.lines, filler_lines(draw), num_tokens)
                question, answer = answer_ids(
                    tokenizer, text.question, " " + ", ".join(text.answers)
                )
                example = Question(
                    document=f"{name}-{instance}",
                    name="0",
                    stratum=name,
                    context=(*opening, *body),
                    question=question,
                    answer=answer,
                    references=text.answers,
                    max_new_tokens=2 * len(answer) + 16,
                )
                examples.append(example)
        options: dict[str, Any] = {
            "length": length,
            "tasks": names,
            "per_task": self.per_task,
            "seed": self.data_seed,
        }
        if self.bos != "auto":
            options["bos"] = self.bos
        return RulerTask(
            f"ruler-{length}", tuple(examples), options, vocabulary(tokenizer), opening
        )


# sizes as in RULER
NUM_KEYS = 4
NUM_VALUES = 4
NUM_QUERIES = 4
NUM_HOPS = 4
NUM_COMMON = 10
COMMON_TIMES = 30
UNCOMMON_TIMES = 3
ALPHA = 2.0
_CODED_WORDS = 2000
_MOST_CODED = 3
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"


@dataclass(frozen=True)
class RulerTask(QuestionTask):
    """Questions about compressed synthetic texts.

    An answer has two values. ``string_match`` is the share of the reference answers that the greedy
    answer contains, ignoring case (RULER's string_match_all). ``exact_match`` is 1 if it contains
    all of them, else 0.

    Three things differ from RULER: there is no solved example before a text, words are invented,
    and an answer may be twice as long as the right answer plus 16 tokens.

    References: Hsieh et al. 2024, arXiv:2404.06654.
    """

    evaluation: ClassVar[str] = "ruler"

    @staticmethod
    def judge(answer: str, references: Sequence[str]) -> Values:
        """``string_match`` and ``exact_match`` of a decoded answer."""
        is_contained = [reference.lower() in answer.lower() for reference in references]
        return {
            "string_match": sum(is_contained) / len(references),
            "exact_match": float(all(is_contained)),
        }


class SyntheticText(NamedTuple):
    """A text with a question about it."""

    lines: list[str]  # lines or words of the text
    question: str
    answers: tuple[str, ...]  # all strings that the answer must contain


_NIAH_NEEDLE = "One of the special magic numbers for {} is: {}.\n"


def niah(
    draw: random.Random,
    pieces: Pieces,
    num_tokens: int,
    *,
    num_keys: int = 1,
    num_values: int = 1,
    num_others: int = 0,
    among_needles: bool = False,
) -> SyntheticText:
    """A text that hides numbers under keys, with a question about the numbers of some keys.

    Args:
        draw: random stream of the example.
        pieces: encoder for the tokenizer.
        num_tokens: largest number of tokens in the text.
        num_keys: number of keys in the question.
        num_values: number of values for each of these keys.
        num_others: number of keys that the question does not name.
        among_needles: the lines between the needles are other needles, not neutral sentences.
    """
    names = _distinct(lambda: f"{_word(draw)}-{_word(draw)}")
    codes = _distinct(lambda: number(draw, 7))
    keys = []
    needles = []
    numbers = []
    for _ in range(num_keys):
        key = next(names)
        keys.append(key)
        for _ in range(num_values):
            code = next(codes)
            numbers.append(code)
            needles.append(_NIAH_NEEDLE.format(key, code))
    needles += [_NIAH_NEEDLE.format(next(names), next(codes)) for _ in range(num_others)]
    head = (
        "Some special magic numbers are hidden within the following text. Make sure to memorize "
        "them. I will quiz you about the numbers afterwards.\n"
    )
    room = pieces.remaining(num_tokens, [head, *needles])
    between = map(_NIAH_NEEDLE.format, names, codes) if among_needles else filler_lines(draw)
    lines = pieces.fitting(between, room)
    noun = "number" if len(numbers) == 1 else "numbers"
    verb = "is" if len(numbers) == 1 else "are"
    listed = ", ".join(keys)
    question = (
        f"What {verb} the special magic {noun} for {listed} mentioned in the text above? "
        f"The special magic {noun} for {listed} mentioned in the text above {verb}"
    )
    body = _scattered(draw, lines, shuffled(draw, needles))
    return SyntheticText([head, *body], question, tuple(numbers))


def variable_tracking(draw: random.Random, pieces: Pieces, num_tokens: int) -> SyntheticText:
    """A text with a chain X1 = 12345, X2 = X1, ... between neutral sentences.

    The question asks for all variables of the chain.
    """
    names = _distinct(lambda: "".join(pick(draw, _CONSONANTS.upper()) for _ in range(5)))
    chain = [next(names) for _ in range(NUM_HOPS + 1)]
    root = str(10000 + int(draw.random() * 90000))
    assignments = [f"VAR {chain[0]} = {root}.\n"]
    for assigned, assigning in pairwise(chain):
        assignments.append(f"VAR {assigning} = VAR {assigned}.\n")
    shuffled(draw, assignments)  # advances the stream as shuffling several chains would
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
    room = pieces.remaining(num_tokens, [head, *assignments])
    lines = pieces.fitting(filler_lines(draw), room)
    question = (
        f"Question: Find all variables that are assigned the value {root} in the text above. "
        "Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(chain)} variables are assigned the value {root}, they are:"
    )
    body = _scattered(draw, lines, assignments)
    return SyntheticText([head, *body], question, tuple(chain))


def common_words(draw: random.Random, pieces: Pieces, num_tokens: int) -> SyntheticText:
    """A numbered list with ``NUM_COMMON`` common words and as many uncommon words as fit."""
    words = _distinct(lambda: _word(draw))
    common = [next(words) for _ in range(NUM_COMMON)]
    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    entries = []
    for word in common:
        entries += [f" {word}\n"] * COMMON_TIMES
    numerals = [f"{place}." for place in range(1, len(entries) + 1)]
    room = pieces.remaining(num_tokens, [head, *numerals, *entries])
    for word in words:
        added = [f" {word}\n"] * UNCOMMON_TIMES
        first_place = len(entries) + 1
        numerals = [f"{place}." for place in range(first_place, first_place + UNCOMMON_TIMES)]
        room -= pieces.count([*added, *numerals])
        if room < 0:
            break
        entries += added
    lines = [head]
    for place, entry in enumerate(shuffled(draw, entries), start=1):
        lines.append(f"{place}.")
        lines.append(entry)
    question = (
        f"Question: What are the {NUM_COMMON} most common words in the above list? Answer: The top "
        f"{NUM_COMMON} words that appear most often in the list are:"
    )
    return SyntheticText(lines, question, tuple(common))


def frequent_words(draw: random.Random, pieces: Pieces, num_tokens: int) -> SyntheticText:
    """A coded text of Zipf-distributed words; the question asks for the 3 most frequent words.

    There are 2000 ranks. The word of rank k occurs floor(n k^-alpha / sum_j j^-alpha) times, with
    the largest n that fits. The word of rank 1 is noise and is not part of the answer.
    """
    words = _distinct(lambda: _word(draw))
    head = (
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words.\n"
    )
    room = pieces.remaining(num_tokens, [head, "\n"])
    shares = _zipf_shares(room)
    coded = [" ....", *(f" {next(words)}" for _ in shares[1:])]
    costs = [len(pieces(word)) for word in coded]

    def size(num_words: int) -> int:
        """The number of tokens in a text with ``num_words`` words."""
        return sum(int(num_words * share) * cost for share, cost in zip(shares, costs, strict=True))

    num_words = bisect_right(range(room + 1), room, key=size) - 1
    times = [int(num_words * share) for share in shares]
    if times[_MOST_CODED] <= times[_MOST_CODED + 1]:
        raise InputError(
            f"{num_tokens} tokens are too few: words of ranks 4 and 5 both occur "
            f"{times[_MOST_CODED]} times"
        )
    text = []
    for word, num_times in zip(coded, times, strict=True):
        text += [word] * num_times
    question = (
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the "
        "three most frequently appeared words in the above coded text? Answer: According to the "
        "coded text above, the three most frequently appeared words are:"
    )
    answers = tuple(word.strip() for word in coded[1 : _MOST_CODED + 1])
    return SyntheticText([head, *shuffled(draw, text), "\n"], question, answers)


def _zipf_shares(num_tokens: int) -> list[float]:
    """The share of each rank among a text's words, for the ranks that can occur."""
    weights = [rank**-ALPHA for rank in range(1, _CODED_WORDS + 1)]
    total = sum(weights)
    shares = []
    for index, weight in enumerate(weights):
        # a word has at least one token
        can_occur = weight * num_tokens >= total
        if can_occur or index <= _MOST_CODED + 1:
            shares.append(weight / total)
    return shares


RULER_TASKS: dict[str, Callable[[random.Random, Pieces, int], SyntheticText]] = {
    "niah_single": niah,
    "niah_multikey_1": partial(niah, num_others=NUM_KEYS - 1),
    "niah_multikey_2": partial(niah, among_needles=True),
    "niah_multivalue": partial(niah, num_values=NUM_VALUES),
    "niah_multiquery": partial(niah, num_keys=NUM_QUERIES),
    "vt": variable_tracking,
    "cwe": common_words,
    "fwe": frequent_words,
}
"""The tasks, by RULER's names.

RULER has three versions of ``niah_single`` that differ only in their texts.
"""


def _word(draw: random.Random) -> str:
    """A random pronounceable word of six letters.

    Because all words have the same length, none contains another.
    """
    return "".join(pick(draw, letters) for _ in range(3) for letters in (_CONSONANTS, _VOWELS))


def _distinct(make: Callable[[], str]) -> Iterator[str]:
    """An endless iterator over items without repetition."""
    seen: set[str] = set()
    while True:
        item = make()
        if item not in seen:
            seen.add(item)
            yield item


def _scattered(draw: random.Random, lines: Sequence[str], needles: Sequence[str]) -> list[str]:
    """The lines with the needles inserted at random places, in their order."""
    places = sorted(int(draw.random() * (len(lines) + 1)) for _ in needles)
    all_lines = list(lines)
    for place, needle in zip(reversed(places), reversed(needles), strict=True):
        all_lines.insert(place, needle)
    return all_lines
