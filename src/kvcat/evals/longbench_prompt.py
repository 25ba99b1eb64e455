"""The prompt of a LongBench v2 question as token ids: what is compressed, what reconstructs it, what is scored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from transformers import PreTrainedTokenizerBase

from kvcat.compress.documents import INSTRUCTION, opening_ids
from kvcat.errors import InputError
from kvcat.evals.longbench_rows import LETTERS, LongBenchExample

# Words as in the KV-CAT paper's appendix, line breaks as in LongBench v2's prompts/0shot.txt. That template also has
# <text> tags and a line "Choices:", which the paper's prompt does not name.
LEAD = "Please read the following text and answer the question below.\n\n"
QUESTION = (
    "\n\nWhat is the correct answer to this question: {question}\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}\n\n"
    "The correct answer is ("
)
CONTINUATIONS = tuple(f"{letter})" for letter in LETTERS)


@dataclass(frozen=True)
class LongBenchPrompt:
    """Token ids of a question and of its context, joined as ids and never as text, so that copies are the same tokens.

    Args:
        opening: what the tokenizer puts at the start of a text, such as a beginning-of-text token; often nothing.
        lead: the first sentence, part of what is compressed.
        context: the long text.
        instruction: between the two copies of the reconstruction sequence.
        question: question, answers and the beginning of the reply, down to "(".
        choices: "A)" to "D)".
    """

    opening: list[int]
    lead: list[int]
    context: list[int]
    instruction: list[int]
    question: list[int]
    choices: list[list[int]]

    @property
    def prefix(self) -> list[int]:
        """What is compressed."""
        return [*self.opening, *self.lead, *self.context]

    @property
    def alone(self) -> list[int]:
        """The question without what is compressed."""
        return [*self.opening, *self.question]

    def room(self, max_tokens: int) -> int:
        """Most context tokens with which reconstruction sequence and answered question both fit.

        Args:
            max_tokens: longest sequence.

        Raises:
            InputError: fewer than two.
        """
        copies = (max_tokens - len(self.opening) - len(self.instruction)) // 2
        answered = max_tokens - len(self.opening) - len(self.question) - max(map(len, self.choices))
        room = min(copies, answered) - len(self.lead)
        if room < 2:
            raise InputError(
                f"prompt and question leave {room} of max_tokens={max_tokens} for the context; at least 2 are needed"
            )
        return room

    def fitted(self, max_tokens: int) -> "LongBenchPrompt":
        """The prompt with its context cut in the middle, where that is needed for reconstruction and question to fit.

        Args:
            max_tokens: longest sequence.

        Raises:
            InputError: no room for any of it.
        """
        return replace(self, context=cut_middle(self.context, self.room(max_tokens)))

    def shortened(self, num_tokens: int) -> list[int]:
        """As much of the prefix as plain text: its context cut in the middle, or less than the lead.

        Args:
            num_tokens: most tokens, at least 1.
        """
        room = num_tokens - len(self.opening) - len(self.lead)
        return self.prefix[:num_tokens] if room < 0 else [*self.opening, *self.lead, *cut_middle(self.context, room)]


def cut_middle(tokens: list[int], room: int) -> list[int]:
    """The first and the last room // 2 tokens; unchanged where there are no more than ``room``.

    Args:
        tokens: of a text.
        room: at least 0; of an odd one a token stays unused, since head and tail are of equal length.
    """
    if len(tokens) <= room:
        return tokens
    half = room // 2
    return [*tokens[:half], *tokens[len(tokens) - half :]]


def tokenised(
    example: LongBenchExample, tokenizer: PreTrainedTokenizerBase, *, context: bool = True
) -> LongBenchPrompt:
    """The whole prompt of an example.

    Args:
        example: the row.
        tokenizer: of the model that is evaluated.
        context: False leaves the context out, which takes long to tokenise.
    """

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, verbose=False)

    answers = dict(zip(LETTERS, example.choices, strict=True))
    return LongBenchPrompt(
        opening=opening_ids(tokenizer),
        lead=ids(LEAD),
        context=ids(example.context) if context else [],
        instruction=ids(INSTRUCTION),
        question=ids(QUESTION.format(question=example.question, **answers)),
        choices=[ids(text) for text in CONTINUATIONS],
    )


def check_prompts(
    label: str,
    examples: Sequence[LongBenchExample],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    vocab_size: int,
) -> None:
    """Refuses questions that leave no room for a context, and token ids that the model does not know.

    Args:
        label: of the model, for the message.
        examples: all of them; contexts are not looked at.
        tokenizer: of the model.
        max_tokens: longest sequence.
        vocab_size: of the model.

    Raises:
        InputError: the first such question, or token.
    """
    for example in examples:
        prompt = tokenised(example, tokenizer, context=False)
        tokens = chain(prompt.prefix, prompt.instruction, prompt.question, *prompt.choices)
        check_vocabulary(label, list(tokens), vocab_size)
        try:
            prompt.room(max_tokens)
        except InputError as error:
            raise InputError(f"row {example.name!r}: {error}") from None


def check_vocabulary(label: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Refuses token ids that the model does not know.

    Raises:
        InputError: the largest of them.
    """
    if max(tokens) >= vocab_size:
        raise InputError(f"token {max(tokens)} is outside the vocabulary of model {label!r}, {vocab_size} tokens")
