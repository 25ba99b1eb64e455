"""The texts, questions and answers of RULER's tasks."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import NamedTuple

from kvcat.errors import InputError
from kvcat.evals.haystack import FILLER, Pieces, filler_lines, number, pick, shuffled

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_CODED_WORDS = 2000
_MOST_CODED = 3


@dataclass(frozen=True)
class RulerSizes:
    """How much is hidden in a text; the defaults are RULER's.

    Args:
        num_keys: keys of ``niah_multikey_1``, one of which is asked for, at least 2.
        num_values: values of the one key of ``niah_multivalue``, at least 2.
        num_queries: keys of ``niah_multiquery``, all of which are asked for, at least 2.
        num_chains: chains of variables of ``vt``, one of which is asked for, at least 1.
        num_hops: assignments of a chain of ``vt`` after its first, at least 1.
        num_common: words that ``cwe`` asks for, at least 1.
        common_times: how often each of these is in the list, more than ``uncommon_times``.
        uncommon_times: how often each other word is, at least 1.
        alpha: exponent of the Zipf distribution of the words of ``fwe``, larger than 1.

    Raises:
        InputError: a size out of its range.
    """

    num_keys: int = 4
    num_values: int = 4
    num_queries: int = 4
    num_chains: int = 1
    num_hops: int = 4
    num_common: int = 10
    common_times: int = 30
    uncommon_times: int = 3
    alpha: float = 2.0

    def __post_init__(self) -> None:
        least = {
            "num_keys": 2, "num_values": 2, "num_queries": 2, "num_chains": 1, "num_hops": 1, "num_common": 1,
            "uncommon_times": 1, "common_times": self.uncommon_times + 1,
        }  # fmt: skip
        for name, value in least.items():
            if getattr(self, name) < value:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {value}")
        if not self.alpha > 1:
            raise InputError(f"alpha is {self.alpha}; it must be larger than 1")


class Hidden(NamedTuple):
    """A text as whole lines or words, the question after it, and all that belongs into the answer."""

    lines: list[str]
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Room:
    """How many tokens a text may have.

    Args:
        pieces: encodes its parts.
        num_tokens: most tokens of all parts together.
        task: named where they are too few.
    """

    pieces: Pieces
    num_tokens: int
    task: str

    def after(self, lines: Sequence[str]) -> int:
        """Tokens left after these parts.

        Raises:
            InputError: they do not fit.
        """
        taken = sum(len(self.pieces(line)) for line in lines)
        if taken > self.num_tokens:
            raise InputError(f"{self.num_tokens} tokens are too few for {self.task}, which takes at least {taken}")
        return self.num_tokens - taken


def niah(
    draw: random.Random, room: Room, *, asked: int = 1, values: int = 1, others: int = 0, among_needles: bool = False
) -> Hidden:
    """Numbers under keys, between neutral sentences or between other such needles.

    Args:
        draw: of all that is random.
        room: for the text.
        asked: keys that are asked for.
        values: numbers of each of them.
        others: keys that are not asked for, with one number each.
        among_needles: all other lines are needles with further keys.
    """
    keys, codes = _distinct(lambda: f"{_word(draw)}-{_word(draw)}"), _distinct(lambda: number(draw, 7))
    wanted = [(next(keys), [next(codes) for _ in range(values)]) for _ in range(asked)]
    pairs = [(key, code) for key, own in wanted for code in own]
    pairs += [(next(keys), next(codes)) for _ in range(others)]
    needles = [_needle(key, code) for key, code in pairs]
    head = (
        "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
        "I will quiz you about the numbers afterwards.\n"
    )
    rest: Iterator[str] = (
        (_needle(next(keys), next(codes)) for _ in count()) if among_needles else filler_lines(draw, FILLER)
    )
    lines = room.pieces.fitting(rest, room.after([head, *needles]))
    numbers = [code for _, own in wanted for code in own]
    names = ", ".join(key for key, _ in wanted)
    what, verb = ("number", "is") if len(numbers) == 1 else ("numbers", "are")
    question = (
        f"What {verb} the special magic {what} for {names} mentioned in the text above? "
        f"The special magic {what} for {names} mentioned in the text above {verb}"
    )
    return Hidden([head, *_scattered(draw, lines, shuffled(draw, needles))], question, tuple(numbers))


def variable_tracking(draw: random.Random, room: Room, sizes: RulerSizes) -> Hidden:
    """Chains X1 = 12345, X2 = X1, ... between neutral sentences; asked for are all variables of one chain's value.

    Args:
        draw: of all that is random.
        room: for the text.
        sizes: number of chains and hops.
    """
    names = _distinct(lambda: "".join(pick(draw, _CONSONANTS.upper()) for _ in range(5)))
    values = _distinct(lambda: str(10000 + int(draw.random() * 90000)))
    chains = [[next(names) for _ in range(sizes.num_hops + 1)] for _ in range(sizes.num_chains)]
    roots = [next(values) for _ in chains]
    told = [
        [
            f"VAR {chain[0]} = {root}.\n",
            *(f"VAR {new} = VAR {old}.\n" for old, new in pairwise(chain)),
        ]
        for chain, root in zip(chains, roots, strict=True)
    ]
    order = shuffled(draw, [index for index, lines in enumerate(told) for _ in lines])
    upcoming = [iter(lines) for lines in told]
    assignments = [next(upcoming[index]) for index in order]
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
    lines = room.pieces.fitting(filler_lines(draw, FILLER), room.after([head, *assignments]))
    question = (
        f"Question: Find all variables that are assigned the value {roots[0]} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, {len(chains[0])} variables are assigned the value "
        f"{roots[0]}, they are:"
    )
    return Hidden([head, *_scattered(draw, lines, assignments)], question, tuple(chains[0]))


def common_words(draw: random.Random, room: Room, sizes: RulerSizes) -> Hidden:
    """A numbered list in which few words are common; as many uncommon ones as fit.

    Args:
        draw: of all that is random.
        room: for the text.
        sizes: how many common words, and how often each word occurs.
    """
    words = _distinct(lambda: _word(draw))
    common = [next(words) for _ in range(sizes.num_common)]
    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    entries = [f" {word}\n" for word in common for _ in range(sizes.common_times)]
    left = room.after([head, *(f"{index}." for index in range(1, len(entries) + 1)), *entries])
    for word in words:
        more = [f" {word}\n"] * sizes.uncommon_times
        numbers = range(len(entries) + 1, len(entries) + len(more) + 1)
        left -= sum(len(room.pieces(part)) for part in (*more, *(f"{index}." for index in numbers)))
        if left < 0:
            break
        entries += more
    listed = [part for index, entry in enumerate(shuffled(draw, entries), 1) for part in (f"{index}.", entry)]
    question = (
        f"Question: What are the {sizes.num_common} most common words in the above list? Answer: The top "
        f"{sizes.num_common} words that appear most often in the list are:"
    )
    return Hidden([head, *listed], question, tuple(common))


def frequent_words(draw: random.Random, room: Room, sizes: RulerSizes) -> Hidden:
    """A coded text of Zipf-distributed words, the most frequent of which is noise; asked for are the next three.

    The word of rank k of 2000 occurs floor(n k^-alpha / sum_j j^-alpha) times, n as large as fits.

    Args:
        draw: of all that is random.
        room: for the text.
        sizes: the exponent alpha.
    """
    words = _distinct(lambda: _word(draw))
    head = (
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words.\n"
    )
    left = room.after([head, "\n"])
    weights = [rank**-sizes.alpha for rank in range(1, _CODED_WORDS + 1)]
    whole = sum(weights)
    # a word takes a token at least, so that ranks beyond these never occur
    shares = [w / whole for rank, w in enumerate(weights) if w * left >= whole or rank <= _MOST_CODED + 1]
    coded = [" ....", *(f" {next(words)}" for _ in shares[1:])]
    costs = [len(room.pieces(word)) for word in coded]
    low, high = 0, left + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(int(middle * share) * cost for share, cost in zip(shares, costs, strict=True)) <= left
        low, high = (middle, high) if fits else (low, middle)
    times = [int(low * share) for share in shares]
    if times[_MOST_CODED] <= times[_MOST_CODED + 1]:
        raise InputError(
            f"{room.num_tokens} tokens are too few for {room.task}: its words of ranks 4 and 5 both occur "
            f"{times[_MOST_CODED]} times"
        )
    text = shuffled(draw, [word for word, number_of in zip(coded, times, strict=True) for _ in range(number_of)])
    question = (
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        "appeared words are:"
    )
    return Hidden([head, *text, "\n"], question, tuple(word.strip() for word in coded[1 : _MOST_CODED + 1]))


RULER_TASKS: dict[str, Callable[[random.Random, Room, RulerSizes], Hidden]] = {
    "niah_single": lambda draw, room, _: niah(draw, room),
    "niah_multikey_1": lambda draw, room, sizes: niah(draw, room, others=sizes.num_keys - 1),
    "niah_multikey_2": lambda draw, room, _: niah(draw, room, among_needles=True),
    "niah_multivalue": lambda draw, room, sizes: niah(draw, room, values=sizes.num_values),
    "niah_multiquery": lambda draw, room, sizes: niah(draw, room, asked=sizes.num_queries),
    "vt": variable_tracking,
    "cwe": common_words,
    "fwe": frequent_words,
}
"""RULER's names, but for ``niah_single``: its three kinds differ in their text, which here is always the same."""


def _needle(key: str, code: str) -> str:
    return f"One of the special magic numbers for {key} is: {code}.\n"


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
