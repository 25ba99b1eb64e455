"""RULER's synthetic tasks that need no data, at any length, with the question read after compression."""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from kvcat.choices import Bos
from kvcat.errors import InputError, check_least
from kvcat.evals.answers import Question, QuestionTask, answer_ids
from kvcat.evals.needle import Pieces, draws, filler_lines, number, pick, shuffled
from kvcat.evals.task import Values, vocabulary
from kvcat.tokenization import opening_ids

# RULER's own sizes.
NUM_KEYS = NUM_VALUES = NUM_QUERIES = NUM_HOPS = 4
ALPHA, _CODED_WORDS, _MOST_CODED = 2.0, 2000, 3
NUM_COMMON, COMMON_TIMES, UNCOMMON_TIMES = 10, 30, 3
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True)
class RulerTask(QuestionTask):
    """Questions on long synthetic texts that are compressed before; ``make_task`` makes it.

    Judged are ``string_match``, the share of the reference answers that the greedy answer contains,
    whatever their case (RULER's string_match_all), and ``exact_match``, whether it contains them all.
    Unlike RULER's own prompts, texts come without a solved example before them, words are invented, and
    an answer may have 16 tokens more than twice those of the right one.

    References: Hsieh et al. 2024, arXiv:2404.06654.
    """

    evaluation: ClassVar[str] = "ruler"

    @staticmethod
    def judge(answer: str, references: Sequence[str]) -> Values:
        """``string_match`` and ``exact_match`` of a decoded answer."""
        found = sum(reference.lower() in answer.lower() for reference in references) / len(references)
        return {"string_match": found, "exact_match": float(found == 1.0)}


def make_task(
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int = 4096,
    tasks: Sequence[str] | None = None,
    per_task: int = 20,
    seed: int = 0,
    bos: Bos = "auto",
) -> RulerTask:
    """RULER's tasks, names of ``RULER_TASKS`` (None: all), in the tokens of a tokenizer.

    Every text is exactly ``length`` tokens: what begins a text, as ``bos`` says (``opening_ids``), the end of a neutral
    line, and whole lines. An example's draws are a function of the seed, its task, the length and its number alone.
    Examples go task after task, so that the first n are spread over the tasks for every n.

    Raises:
        InputError: a value out of its range, an unknown task, a text too short for what it is to hide.
    """
    tasks = tuple(dict.fromkeys(tasks or RULER_TASKS))
    check_least(1, per_task=per_task)
    if unknown := [task for task in tasks if task not in RULER_TASKS]:
        raise InputError(f"no RULER task {unknown[0]!r}; there are {', '.join(RULER_TASKS)}")
    pieces, opening = Pieces(tokenizer), tuple(opening_ids(tokenizer, bos))
    examples, left = [], length - len(opening)
    for instance in range(per_task):
        for task in tasks:
            draw = draws(seed, task, length, instance)
            try:
                lines, query, answers = RULER_TASKS[task](draw, pieces, left)
            except InputError as error:
                raise InputError(f"{task}: {error}") from None
            context = (*opening, *pieces.filled(lines, filler_lines(draw), left))
            question, answer = answer_ids(tokenizer, query, " " + ", ".join(answers))
            name, most = f"{task}-{instance}", 2 * len(answer) + 16
            examples.append(Question(name, "0", task, context, question, answer, answers, most))
    options = {"length": length, "tasks": tasks, "per_task": per_task, "seed": seed}
    options |= {} if bos == "auto" else {"bos": bos}
    return RulerTask(f"ruler-{length}", tuple(examples), options, vocabulary(tokenizer), opening)


Hidden = tuple[list[str], str, tuple[str, ...]]
"""A text as whole lines or words, the question after it, and all that belongs into the answer."""


def niah(
    draw: random.Random,
    pieces: Pieces,
    room: int,
    *,
    keys: int = 1,  # that the question names
    values: int = 1,  # of each of them
    others: int = 0,  # keys that it does not name
    among_needles: bool = False,  # between nothing but more needles, else neutral sentences
) -> Hidden:
    """Numbers under keys; the question asks for those of some keys."""
    names, codes = _distinct(lambda: f"{_word(draw)}-{_word(draw)}"), _distinct(lambda: number(draw, 7))
    wanted = [(next(names), [next(codes) for _ in range(values)]) for _ in range(keys)]
    pairs = [(key, code) for key, own in wanted for code in own]
    pairs += [(next(names), next(codes)) for _ in range(others)]
    told = "One of the special magic numbers for {} is: {}.\n"
    needles = [told.format(*pair) for pair in pairs]
    head = (
        "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
        "I will quiz you about the numbers afterwards.\n"
    )
    more: Iterator[str] = (told.format(*pair) for pair in zip(names, codes, strict=False))
    lines = pieces.fitting(more if among_needles else filler_lines(draw), pieces.left(room, [head, *needles]))
    numbers = [code for _, own in wanted for code in own]
    named = ", ".join(key for key, _ in wanted)
    what, verb = ("number", "is") if len(numbers) == 1 else ("numbers", "are")
    question = (
        f"What {verb} the special magic {what} for {named} mentioned in the text above? "
        f"The special magic {what} for {named} mentioned in the text above {verb}"
    )
    return [head, *_scattered(draw, lines, shuffled(draw, needles))], question, tuple(numbers)


def variable_tracking(draw: random.Random, pieces: Pieces, room: int) -> Hidden:
    """A chain X1 = 12345, X2 = X1, ... between neutral sentences; the question asks for all its variables."""
    names = _distinct(lambda: "".join(pick(draw, _CONSONANTS.upper()) for _ in range(5)))
    chain = [next(names) for _ in range(NUM_HOPS + 1)]
    root = str(10000 + int(draw.random() * 90000))
    assignments = [f"VAR {chain[0]} = {root}.\n", *(f"VAR {new} = VAR {old}.\n" for old, new in pairwise(chain))]
    shuffled(draw, assignments)  # advances the stream as the order of several chains would
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
    lines = pieces.fitting(filler_lines(draw), pieces.left(room, [head, *assignments]))
    question = (
        f"Question: Find all variables that are assigned the value {root} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, {len(chain)} variables are assigned the value "
        f"{root}, they are:"
    )
    return [head, *_scattered(draw, lines, assignments)], question, tuple(chain)


def common_words(draw: random.Random, pieces: Pieces, room: int) -> Hidden:
    """A numbered list in which ``NUM_COMMON`` words are common; as many uncommon ones as fit."""
    words = _distinct(lambda: _word(draw))
    common = [next(words) for _ in range(NUM_COMMON)]
    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    entries = [f" {word}\n" for word in common for _ in range(COMMON_TIMES)]
    left = pieces.left(room, [head, *(f"{index}." for index in range(1, len(entries) + 1)), *entries])
    for word in words:
        more = [f" {word}\n"] * UNCOMMON_TIMES
        numbers = range(len(entries) + 1, len(entries) + len(more) + 1)
        left -= sum(len(pieces(part)) for part in (*more, *(f"{index}." for index in numbers)))
        if left < 0:
            break
        entries += more
    listed = [part for index, entry in enumerate(shuffled(draw, entries), 1) for part in (f"{index}.", entry)]
    question = (
        f"Question: What are the {NUM_COMMON} most common words in the above list? Answer: The top "
        f"{NUM_COMMON} words that appear most often in the list are:"
    )
    return [head, *listed], question, tuple(common)


def frequent_words(draw: random.Random, pieces: Pieces, room: int) -> Hidden:
    """A coded text of Zipf-distributed words, the most frequent of which is noise; the question asks for the next 3.

    The word of rank k of 2000 occurs floor(n k^-alpha / sum_j j^-alpha) times, n as large as fits.
    """
    words = _distinct(lambda: _word(draw))
    head = (
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words.\n"
    )
    left = pieces.left(room, [head, "\n"])
    weights = [rank**-ALPHA for rank in range(1, _CODED_WORDS + 1)]
    whole = sum(weights)
    # a word takes a token at least, so that ranks beyond these never occur
    shares = [w / whole for rank, w in enumerate(weights) if w * left >= whole or rank <= _MOST_CODED + 1]
    coded = [" ....", *(f" {next(words)}" for _ in shares[1:])]
    costs = [len(pieces(word)) for word in coded]

    def size(num_words: int) -> int:
        return sum(int(num_words * share) * cost for share, cost in zip(shares, costs, strict=True))

    num_words = bisect_right(range(left + 1), left, key=size) - 1
    times = [int(num_words * share) for share in shares]
    if times[_MOST_CODED] <= times[_MOST_CODED + 1]:
        raise InputError(f"{room} tokens are too few: words of ranks 4 and 5 both occur {times[_MOST_CODED]} times")
    text = shuffled(draw, [word for word, number_of in zip(coded, times, strict=True) for _ in range(number_of)])
    question = (
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        "appeared words are:"
    )
    return [head, *text, "\n"], question, tuple(word.strip() for word in coded[1 : _MOST_CODED + 1])


RULER_TASKS: dict[str, Callable[[random.Random, Pieces, int], Hidden]] = {
    "niah_single": niah,
    "niah_multikey_1": lambda draw, pieces, room: niah(draw, pieces, room, others=NUM_KEYS - 1),
    "niah_multikey_2": lambda draw, pieces, room: niah(draw, pieces, room, among_needles=True),
    "niah_multivalue": lambda draw, pieces, room: niah(draw, pieces, room, values=NUM_VALUES),
    "niah_multiquery": lambda draw, pieces, room: niah(draw, pieces, room, keys=NUM_QUERIES),
    "vt": variable_tracking,
    "cwe": common_words,
    "fwe": frequent_words,
}
"""RULER's names, but for ``niah_single``: its three kinds differ in their text, which here is always the same."""


def _word(draw: random.Random) -> str:
    """A word that can be spoken; all have six letters, so that none contains another."""
    return "".join(pick(draw, letters) for _ in range(3) for letters in (_CONSONANTS, _VOWELS))


def _distinct(make: Callable[[], str]) -> Iterator[str]:
    known: set[str] = set()
    while True:
        made = make()
        if made not in known:
            known.add(made)
            yield made


def _scattered(draw: random.Random, lines: Sequence[str], needles: Sequence[str]) -> list[str]:
    """The needles in their order at random places between the lines."""
    places = sorted(int(draw.random() * (len(lines) + 1)) for _ in needles)
    result = list(lines)
    for place, needle in zip(reversed(places), reversed(needles), strict=True):
        result.insert(place, needle)
    return result
