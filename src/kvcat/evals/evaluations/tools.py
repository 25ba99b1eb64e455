"""Call functions whose schemas are in a compressed context.

The answer is a call as JSON, which is compared with the schemas and with the right call.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcat.errors import check_in, check_least
from kvcat.evals.evaluation import CompressingEvaluation, ReportFacts
from kvcat.evals.haystacks import Pieces, draws, pick, shuffled
from kvcat.evals.questions import Question, QuestionTask, answer_ids
from kvcat.evals.task import Values, vocabulary
from kvcat.option_types import Bos, Count
from kvcat.stats.metrics import share_of_examples
from kvcat.text.encoder import opening_ids


@dataclass(frozen=True, kw_only=True)
class Tools(CompressingEvaluation):
    """Compress the schemas of functions and a request, then ask for the call as JSON.

    The schemas and requests are generated: nothing is downloaded. Default keep ratios: 0.1 0.25
    0.5.

    Example: kvcat eval tools ./model --method attention-matching snapkv --keep 0.25 --out tools
    """

    default_keeps = (0.1, 0.25, 0.5)
    facts = ReportFacts(
        title="Tool calls",
        metrics=(
            "schema_valid",
            "nll",
            "dense_schema_valid",
            "nll_dense",
            "right_function",
            "dense_right_function",
            "exact_match",
            "dense_exact_match",
        ),
        stratum_name="function",
        sizes="{num_functions} functions each",
    )
    new_metrics: ClassVar = {
        "schema_valid": share_of_examples(
            label="schema-valid",
            description="Share of greedy answers that begin with a JSON object that fits the "
            "schema of one of the functions.",
            dense_metric="dense_schema_valid",
            shows_ability=True,
        ),
        "dense_schema_valid": share_of_examples(
            label="schema-valid, dense",
            description="The same with the whole cache.",
            of_dense_model=True,
        ),
        "right_function": share_of_examples(
            label="right function",
            description="Share of greedy answers that fit the schema of the right function.",
            dense_metric="dense_right_function",
        ),
        "dense_right_function": share_of_examples(
            label="right function, dense",
            description="The same with the whole cache.",
            of_dense_model=True,
        ),
    }

    num_functions: Count = 6
    """Number of functions in a context, 2 to 8."""
    cases: Count = 100
    """Number of contexts."""
    bos: Bos = "auto"

    def make_task(self, tokenizer: Any, value: Any) -> "ToolCallTask":  # noqa: ARG002
        """The examples in the tokens of a tokenizer.

        A context is an instruction, the JSON schemas of ``num_functions`` functions in random
        order, and a request that one of them fulfils. The draws of a case depend only on the seed
        and its number. The functions that are asked for take turns.
        """
        check_least(1, cases=self.cases)
        check_in(f"[2, {len(FUNCTIONS)}]", num_functions=self.num_functions)
        opening = tuple(opening_ids(tokenizer, self.bos))
        pieces = Pieces(tokenizer)
        examples = []
        for number in range(self.cases):
            asked = FUNCTIONS[number % len(FUNCTIONS)]
            draw = draws(self.data_seed, "tools", number)
            others = [function for function in FUNCTIONS if function is not asked]
            chosen = shuffled(draw, [asked, *shuffled(draw, others)[: self.num_functions - 1]])
            schemas = [function.schema for function in chosen]
            arguments = {
                name: _argument(draw, name, kind) for name, kind in asked.arguments.items()
            }
            # true and false as in the call, not as Python writes them
            spelled = {
                name: json.dumps(value) if isinstance(value, bool) else str(value)
                for name, value in arguments.items()
            }
            lines = [INSTRUCTION, *(json.dumps(schema) + "\n" for schema in schemas)]
            lines.append(f"Request: {asked.request.format(**spelled)}\n")
            right_call = json.dumps({"name": asked.name, "arguments": arguments})
            question, answer = answer_ids(tokenizer, QUERY, right_call)
            example = Question(
                document=str(number),
                name="0",
                stratum=asked.name,
                context=(*opening, *(token for line in lines for token in pieces(line))),
                question=question,
                answer=answer,
                references=(right_call, json.dumps(schemas)),
                max_new_tokens=len(answer) + 16,
            )
            examples.append(example)
        options: dict[str, Any] = {
            "num_functions": self.num_functions,
            "cases": self.cases,
            "seed": self.data_seed,
        }
        if self.bos != "auto":
            options["bos"] = self.bos
        return ToolCallTask("functions", tuple(examples), options, vocabulary(tokenizer), opening)


INSTRUCTION = (
    "You can call these functions. Answer a request with one JSON object, "
    '{"name": FUNCTION, "arguments": {...}}, that fits the schema of the function.\n'
)
QUERY = "Call: "

_CITIES = ("Oslo", "Lima", "Cairo", "Hanoi", "Quito", "Turin", "Perth", "Lagos")
_PEOPLE = ("Anna", "Bruno", "Chloe", "David", "Elena", "Farid", "Greta", "Hugo")
_ITEMS = ("chair", "lamp", "kettle", "ladder", "bicycle", "blanket", "camera", "drill")
_UNITS = ("celsius", "fahrenheit")
_WORDS: Mapping[str, Sequence[str]] = {
    "city": _CITIES, "origin": _CITIES, "destination": _CITIES, "person": _PEOPLE,
    "recipient": _PEOPLE, "item": _ITEMS,
}  # fmt: skip


@dataclass(frozen=True)
class Function:
    """A function that a model can call.

    Args:
        purpose: one line.
        arguments: type of each argument, "string", "integer" or "boolean", by name; or the words
            that it may be.
        request: what a person asks for, with the arguments in braces.
    """

    name: str
    purpose: str
    arguments: Mapping[str, str | tuple[str, ...]]
    request: str

    @property
    def schema(self) -> dict[str, Any]:
        """The function as JSON schema; all arguments are required."""
        properties = {}
        for name, kind in self.arguments.items():
            if isinstance(kind, str):
                properties[name] = {"type": kind}
            else:
                properties[name] = {"type": "string", "enum": list(kind)}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"name": self.name, "description": self.purpose, "parameters": parameters}


FUNCTIONS = (
    Function(
        "get_weather", "Weather of a city on one of the next days.",
        {"city": "string", "days_ahead": "integer", "unit": _UNITS},
        "What will the weather be in {city} in {days_ahead} days, in {unit}?",
    ),
    Function(
        "book_train", "Books seats in a train.",
        {"origin": "string", "destination": "string", "seats": "integer"},
        "Book {seats} seats on a train from {origin} to {destination}.",
    ),
    Function(
        "send_message", "Sends a message to a person.",
        {"recipient": "string", "text": "string", "urgent": "boolean"},
        'Send {recipient} the message "{text}", urgent: {urgent}.',
    ),
    Function(
        "order_item", "Orders an item from the warehouse.",
        {"item": "string", "quantity": "integer", "express": "boolean"},
        "Order {quantity} of the item {item}, express delivery: {express}.",
    ),
    Function(
        "set_timer", "Sets a timer for a person.",
        {"person": "string", "minutes": "integer"},
        "Set a timer of {minutes} minutes for {person}.",
    ),
    Function(
        "convert_amount", "Converts an amount of money.",
        {"amount": "integer", "source": ("EUR", "USD", "JPY"), "target": ("CHF", "GBP", "SEK")},
        "How much are {amount} {source} in {target}?",
    ),
    Function(
        "find_restaurant", "Finds a restaurant in a city.",
        {"city": "string", "guests": "integer", "kitchen": ("thai", "greek", "indian")},
        "Find a {kitchen} restaurant in {city} for {guests} guests.",
    ),
    Function(
        "return_item", "Registers an item that a customer returns.",
        {"item": "string", "person": "string", "damaged": "boolean"},
        "{person} returns the item {item}, damaged: {damaged}.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class ToolCallTask(QuestionTask):
    """A task to call functions.

    An answer has three values, each 0 or 1: ``schema_valid`` (the answer begins with a JSON object
    that fits the schema of one of the functions), ``right_function`` (and it is the right one) and
    ``exact_match`` (and all arguments are right).
    """

    evaluation: ClassVar[str] = "tools"

    @staticmethod
    def judge(answer: str, references: Sequence[str]) -> Values:
        """The three values of an answer; text after the object does not count."""
        right_call = json.loads(references[0])
        schemas = {schema["name"]: schema for schema in json.loads(references[1])}
        call = first_object(answer)
        is_valid = fits_a_schema(call, schemas)
        is_right_function = is_valid and call["name"] == right_call["name"]
        return {
            "schema_valid": float(is_valid),
            "right_function": float(is_right_function),
            "exact_match": float(is_right_function and call == right_call),
        }


def first_object(text: str) -> Any:
    """The JSON value with which a text begins, after spaces; None if it begins with none."""
    try:
        return json.JSONDecoder().raw_decode(text.lstrip())[0]
    except (ValueError, RecursionError):
        return None


def fits_a_schema(call: Any, schemas: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a value is a call of one of the functions, with exactly its arguments."""
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return False
    name = call["name"]
    arguments = call["arguments"]
    if not isinstance(name, str) or name not in schemas or not isinstance(arguments, dict):
        return False
    properties = schemas[name]["parameters"]["properties"]
    if set(arguments) != set(properties):
        return False
    return all(_fits(arguments[key], kind) for key, kind in properties.items())


def _fits(argument: Any, kind: Mapping[str, Any]) -> bool:
    """Whether an argument has the type of its schema; true and false are not integers."""
    types = {"string": str, "integer": int, "boolean": bool}
    if type(argument) is not types[kind["type"]]:
        return False
    return argument in kind.get("enum", [argument])


def _argument(draw: random.Random, name: str, kind: str | tuple[str, ...]) -> str | int | bool:
    """A random value of an argument."""
    if not isinstance(kind, str):
        return pick(draw, kind)
    if kind == "integer":
        return 2 + int(draw.random() * 97)
    if kind == "boolean":
        return draw.random() < 0.5
    if name == "text":
        return f"{pick(draw, _PEOPLE)} is in {pick(draw, _CITIES)}"
    return pick(draw, _WORDS[name])
