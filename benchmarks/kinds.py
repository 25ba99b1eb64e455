"""Questions of many kinds about facts in real texts, and the rules that judge their answers.

A kind makes some sentences to put into a text, and one question about them. Names, numbers and
words are drawn; the questions of a half (``HALVES``) never share a person with those of the other.
Answers are judged by ``is_right``: words are compared after normalisation, nothing is estimated.
"""

import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvcat.evals.haystacks import number, pick, shuffled

HALVES = ("development", "held-out")
NAMES = [
    "Anna", "Peter", "Maria", "Thomas", "Laura", "Martin", "Emma", "Daniel", "Sarah", "Robert",
    "Julia", "Michael", "Helen", "Frank", "Alice", "David", "Clara", "Simon", "Grace", "Henry",
    "Rose", "Oscar", "Lucy", "Victor", "Nina", "Paul", "Judith", "Emil", "Arthur", "Diana",
    "Walter", "Louis", "Agnes", "Bruno", "Carla", "Dora", "Edith", "Felix", "Greta", "Hugo",
    "Irene", "Jonas", "Karen", "Leo", "Mabel", "Norman", "Olga", "Philip", "Ruth", "Samuel",
    "Tilda", "Ursula", "Vera", "Wilfred", "Xenia", "Yves",
]  # fmt: skip
WORDS = {
    "town": (
        "Marlow Bergen Tarvin Lindau Corvo Eastry Velden Harwick Sorano Dunmore Kilby Ravello "
        "Ostend Penzance Gislev Alston"
    ),
    "building": (
        "chapel library mill observatory granary hospital lighthouse schoolhouse theatre abbey "
        "brewery customhouse"
    ),
    "thing": (
        "lantern violin telescope ledger compass kettle saddle barometer necklace microscope "
        "anchor typewriter"
    ),
    "place": "stove staircase orchard haystack wardrobe fountain chimney hedge cupboard barn",
    "event": "auction regatta wedding concert funeral election flood exhibition",
    "month": "January February March April May June July August September October November",
    "colour": "yellow blue green red white brown grey purple",
    "job": "baker surgeon tailor miller sailor gardener printer locksmith carpenter weaver",
    "animal": "heron fox badger raven otter goat owl hare",
    "good": (
        "apples candles rope salt honey nails paper cheese onions tobacco ink flour buttons soap"
    ),
    "direction": "north south east west upper lower",
    "verb": "mend count send load draw clean merge parse pack sort",
    "noun": "nets boats letters maps clocks barrels tickets tables seeds lamps",
    "secret": "thistle copper marigold falcon juniper saffron walnut ember",
}
CAUSES = {
    "the well had dried up": "well",
    "the rent was too high": "rent",
    "the school was closed": "school",
    "the doctor advised sea air": "doctor",
    "the factory had burned down": "factory",
    "the bridge was unsafe": "bridge",
    "the bees had died": "bees",
    "the noise of the trains was unbearable": ("noise", "trains"),
}
REFUSALS = (
    "not stated", "does not say", "doesn t say", "not mentioned", "does not mention",
    "not in text", "no information", "not specified", "not provided", "unknown", "not given",
)  # fmt: skip
_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMERALS = {word: value for value, word in enumerate(_UNITS.split())} | {
    word: 10 * value for value, word in enumerate(_TENS.split(), start=2)
}
_BY_TEN = {str(10 * tens) for tens in range(2, 10)}
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")


@dataclass(frozen=True)
class Asked:
    """A question, the beginning of its answer, and what a right answer holds.

    Args:
        kind: of the question.
        question, begun: texts; the answer is continued after ``begun``, which may be empty.
        wanted: for each part of the answer the wordings that are right; all parts are needed.
        unwanted: wordings that make an answer wrong.
        rule: "sentence" (the answer's first sentence holds the parts), "first" (it begins with the
            first part), "anywhere" (the whole answer), "refusal" (says that the text does not say,
            and gives no number).
    """

    kind: str
    question: str
    begun: str
    wanted: tuple[tuple[str, ...], ...]
    unwanted: tuple[str, ...] = ()
    rule: str = "sentence"

    @classmethod
    def of(cls, record: dict) -> "Asked":
        """The question of a JSON record."""
        wanted = tuple(map(tuple, record["wanted"]))
        return cls(**{**record, "wanted": wanted, "unwanted": tuple(record["unwanted"])})

    def is_right(self, answer: str) -> bool:
        """Whether a model's continuation of ``begun`` answers the question."""
        if self.rule == "refusal":
            said = normalised(answer)
            return _holds(said, REFUSALS) and re.search(r"\d{3}", answer) is None
        if self.rule != "anywhere":
            answer = _SENTENCE_END.split(answer.strip(), maxsplit=1)[0]
        said = normalised(answer)
        if self.rule == "first":
            return any(f"{said} ".startswith(f"{normalised(word)} ") for word in self.wanted[0])
        return all(_holds(said, wordings) for wordings in self.wanted) and not _holds(
            said, self.unwanted
        )


def normalised(text: str) -> str:
    """Lower case without accents, punctuation and articles; numbers up to 99 in digits."""
    text = re.sub(r"(?<=\d)[,\u202f](?=\d{3})", "", text.lower())  # NFKD makes blanks of U+202F
    text = unicodedata.normalize("NFKD", text)
    text = "".join(letter for letter in text if not unicodedata.combining(letter))
    words: list[str] = []
    for word in re.sub(r"[^\w]+", " ", text).split():
        if word in ("a", "an", "the"):
            continue
        value = _NUMERALS.get(word)
        if value is None:
            words.append(re.sub(r"^(\d+)(st|nd|rd|th)$", r"\1", word))
        elif 0 < value < 10 and words and words[-1] in _BY_TEN:
            words[-1] = str(int(words[-1]) + value)
        else:
            words.append(str(value))
    return " ".join(words)


def _holds(said: str, wordings: Sequence[str]) -> bool:
    """Whether a normalised text holds one of the wordings, as whole words."""
    return any(f" {normalised(wording)} " in f" {said} " for wording in wordings)


class Draw:
    """Words for one document, none of them twice.

    Args:
        draw: random numbers.
        half: of ``HALVES``, which has its own persons.
    """

    def __init__(self, draw: random.Random, half: str) -> None:
        self.random = draw
        self._left = {kind: shuffled(draw, words.split()) for kind, words in WORDS.items()}
        self._left["name"] = shuffled(draw, NAMES[HALVES.index(half) :: 2])
        self._left["cause"] = shuffled(draw, list(CAUSES))

    def __call__(self, kind: str) -> str:
        """The next word of a kind."""
        return self._left[kind].pop()

    def number(self, low: int, high: int) -> int:
        """A whole number from low to high."""
        return low + int(self.random.random() * (high - low + 1))

    def code(self) -> str:
        """Five digits, the first not 0."""
        return str(self.number(1, 9)) + number(self.random, 4)


Fact = tuple[list[str], Asked]
"""Lines for the text, in their order, and the question."""


def phone(draw: Draw) -> Fact:
    """A number of five digits."""
    name, code = draw("name"), draw.code()
    begun = f"The phone number of {name} is"
    return [f"{begun} {code}."], Asked(
        "phone", f"What is the phone number of {name}?", begun, ((code,),)
    )


def person(draw: Draw) -> Fact:
    """Who did something."""
    name, building = draw("name"), draw("building")
    return [f"It was {name} who kept the keys of the {building}."], Asked(
        "name",
        f"Who kept the keys of the {building}?",
        f"The keys of the {building} were kept by",
        ((name,),),
    )


def place(draw: Draw) -> Fact:
    """Where something is."""
    name, thing, where = draw("name"), draw("thing"), draw("place")
    return [f"In the evening {name} hid the {thing} behind the {where}."], Asked(
        "place", f"Where did {name} hide the {thing}?", f"{name} hid the {thing}", ((where,),)
    )


def quantity(draw: Draw) -> Fact:
    """How many."""
    building, town, count = draw("building"), draw("town"), draw.number(12, 98)
    return [f"The {building} of {town} has {count} windows."], Asked(
        "number",
        f"How many windows does the {building} of {town} have?",
        f"The {building} of {town} has",
        ((str(count),),),
    )


def date(draw: Draw) -> Fact:
    """When."""
    event, town, day, month = draw("event"), draw("town"), draw.number(2, 28), draw("month")
    return [f"The {event} in {town} took place on {day} {month} {draw.number(1802, 1989)}."], Asked(
        "date",
        f"On what day did the {event} in {town} take place?",
        f"The {event} in {town} took place on",
        ((f"{day} {month}", f"{month} {day}", f"{day} of {month}"),),
    )


def reason(draw: Draw) -> Fact:
    """Why."""
    name, town, cause = draw("name"), draw("town"), draw("cause")
    key = CAUSES[cause]
    return [f"{name} moved away from {town} because {cause}."], Asked(
        "reason",
        f"Why did {name} move away from {town}?",
        f"{name} moved away from {town} because",
        ((key,) if isinstance(key, str) else key,),
    )


def joined(draw: Draw) -> Fact:
    """Two facts that must be joined."""
    name, owner, colour = draw("name"), draw("name"), draw("colour")
    lines = [f"{name} lives in the {colour} house.", f"The {colour} house belongs to {owner}."]
    return lines, Asked(
        "two facts",
        f"To whom does the house in which {name} lives belong?",
        f"The house in which {name} lives belongs to",
        ((owner,),),
    )


def changed(draw: Draw) -> Fact:
    """A value that changes in the text; the last one is right."""
    town, before, after = draw("town"), draw.number(2, 5), draw.number(6, 11)
    lines = [
        f"The ferry to {town} leaves at {before} o'clock.",
        f"The timetable has changed: the ferry to {town} now leaves at {after} o'clock.",
    ]
    return lines, Asked(
        "changed value",
        f"At what time does the ferry to {town} leave now?",
        f"The ferry to {town} now leaves at",
        ((str(after),),),
        (str(before),),
    )


def listed(draw: Draw) -> Fact:
    """All of three things."""
    name = draw("name")
    goods = [draw("good") for _ in range(3)]
    return [f"At the market {name} bought {goods[0]}, {goods[1]} and {goods[2]}."], Asked(
        "list",
        f"What did {name} buy at the market?",
        f"At the market {name} bought",
        tuple((good,) for good in goods),
    )


def counted(draw: Draw) -> Fact:
    """How often something is said."""
    animal, times = draw("animal"), draw.number(2, 4)
    lines = [f"A stray {animal} was reported from {draw('town')}." for _ in range(times)]
    return lines, Asked(
        "count",
        f"From how many towns was a stray {animal} reported?",
        f"The number of towns that reported a stray {animal} is",
        ((str(times),),),
    )


def near_miss(draw: Draw) -> Fact:
    """One of three facts in nearly the same words."""
    one, two = draw("direction"), draw("direction")
    codes = [draw.code() for _ in range(3)]
    about = [f"{one} gate", f"{one} tower", f"{two} gate"]
    order = shuffled(draw.random, range(3))
    lines = [f"The code of the {about[index]} is {codes[index]}." for index in order]
    return lines, Asked(
        "near miss",
        f"What is the code of the {about[0]}?",
        f"The code of the {about[0]} is",
        ((codes[0],),),
        tuple(codes[1:]),
    )


def absent(draw: Draw) -> Fact:
    """What the text does not say."""
    name = draw("name")
    return [], Asked(
        "absent",
        f"What is the phone number of {name}? If the text does not say it, answer: not stated.",
        "",
        (),
        rule="refusal",
    )


def story(draw: Draw) -> Fact:
    """A paragraph, asked about in other words."""
    name, other, job, town = draw("name"), draw("name"), draw("job"), draw("town")
    building, thing, animal = draw("building"), draw("thing"), draw("animal")
    hours = draw.number(3, 19)
    text = (
        f"{name}, a {job} from {town}, came to the {building} late one evening. {other} had asked "
        f"for the {thing}, and the road was so bad that the journey took {hours} hours. Nobody "
        f"but the {animal} heard the knock at the door."
    )
    questions = (
        (f"What was {name}'s trade?", f"By trade {name} was a", job),
        (f"Which object did {other} want?", f"{other} wanted the", thing),
        (f"For how long did {name} travel?", f"{name} travelled for", str(hours)),
        (f"Where was {name}'s home?", f"{name}'s home was in", town),
        ("Which animal noticed the visitor?", "The visitor was noticed by the", animal),
    )
    question, begun, answer = pick(draw.random, questions)
    return [text], Asked("story", question, begun, ((answer,),))


def instruction(draw: Draw) -> Fact:
    """What the text asks its reader to answer."""
    town, word = draw("town"), draw("secret")
    return [f'Whoever is asked for the watchword of {town} shall answer "{word}".'], Asked(
        "instruction", f"What is the watchword of {town}?", "", ((word,),), rule="anywhere"
    )


def variable(draw: Draw) -> Fact:
    """RULER's variable tracking, with one step."""
    first, second = (f"{draw('noun').upper()}_{draw.number(10, 99)}" for _ in range(2))
    code = draw.code()
    return [f"VAR {first} = {code}.", f"VAR {second} = VAR {first}."], Asked(
        "variable",
        f"Which value does the variable {second} have?",
        f"The variable {second} has the value",
        ((code,),),
    )


_LANGUAGES = (
    (
        "La cl\u00e9 de la chambre {} est chez {}.",
        "Chez qui est la cl\u00e9 de la chambre {} ?",
        "La cl\u00e9 de la chambre {} est chez",
    ),
    (
        "Der Schl\u00fcssel von Zimmer {} liegt bei {}.",
        "Bei wem liegt der Schl\u00fcssel von Zimmer {}?",
        "Der Schl\u00fcssel von Zimmer {} liegt bei",
    ),
    (
        "La llave de la habitaci\u00f3n {} la tiene {}.",
        "\u00bfQui\u00e9n tiene la llave de la habitaci\u00f3n {}?",
        "La llave de la habitaci\u00f3n {} la tiene",
    ),
    (
        "La chiave della camera {} \u00e8 da {}.",
        "Da chi \u00e8 la chiave della camera {}?",
        "La chiave della camera {} \u00e8 da",
    ),
)


def language(draw: Draw) -> Fact:
    """A sentence in French, German, Spanish or Italian."""
    line, question, begun = pick(draw.random, _LANGUAGES)
    name, room = draw("name"), draw.number(11, 89)
    return [line.format(room, name)], Asked(
        "other language", question.format(room), begun.format(room), ((name,),)
    )


def code(draw: Draw) -> Fact:
    """Which function another one calls."""
    outer, inner = (f"{draw('verb')}_{draw('noun')}" for _ in range(2))
    line = f"\ndef {outer}(items):\n    return {inner}(items, {draw.number(2, 60)})\n"
    return [line], Asked(
        "code",
        f"Which function does the function {outer} call?",
        f"The function {outer} calls the function",
        ((inner,),),
    )


def call(draw: Draw) -> Fact:
    """A function call with arguments from the question."""
    function, name, town = f"{draw('verb')}_{draw('noun')}", draw("name"), draw("town")
    thing = draw("thing")
    line = f"\nThe function {function}(name, town) sends a {thing} to a person in a town.\n"
    wordings = (f"{function} {name} {town}", f"{function} name {name} town {town}")
    return [line], Asked(
        "function call",
        f"Write the call of the function that sends a {thing} to {name} in {town}.",
        "The call is:",
        (wordings,),
        rule="anywhere",
    )


def completion(draw: Draw, sentences: Sequence[str]) -> Asked | None:
    """The next word of a sentence of the text itself: a name or a number in its second half."""
    for sentence in shuffled(draw.random, sentences):
        words = sentence.split()
        for place in range(max(5, len(words) // 2), len(words)):
            word = words[place].strip(".,;:!?\"'()[]")
            is_named = re.fullmatch(r"[A-Z][a-z]{3,}|\d{2,}", word) is not None
            if is_named and len(words) < 40 and word not in " ".join(words[:place]):
                begun = " ".join(words[:place])
                question = "How does this sentence of the text go on?"
                return Asked("completion", question, begun, ((word,),), rule="first")
    return None


KINDS: dict[str, Callable[[Draw], Fact]] = {
    "phone": phone, "name": person, "place": place, "number": quantity, "date": date,
    "reason": reason, "two facts": joined, "changed value": changed, "list": listed,
    "count": counted, "near miss": near_miss, "absent": absent, "story": story,
    "instruction": instruction, "variable": variable, "other language": language, "code": code,
    "function call": call,
}  # fmt: skip
COMPLETION = "completion"
ALL_KINDS = (*KINDS, COMPLETION)


def spread(draw: random.Random, facts: Sequence[Sequence[str]], sentences: list[str]) -> list[str]:
    """The sentences with the lines of all facts between them, at even depths.

    The facts are in random order; the lines of one fact keep theirs.
    """
    owners = shuffled(draw, [index for index, lines in enumerate(facts) for _ in lines])
    lines: dict[int, Iterator[str]] = {index: iter(fact) for index, fact in enumerate(facts)}
    text = []
    done = 0
    for rank, owner in enumerate(owners):
        depth = len(sentences) * (2 * rank + 1) // (2 * len(owners))
        text += [*sentences[done:depth], next(lines[owner])]
        done = depth
    return [*text, *sentences[done:]]
