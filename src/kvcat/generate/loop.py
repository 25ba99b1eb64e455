"""The loop of generation: every row of a batch takes its tokens one by one, and ends by itself."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from kvcat.generate.settings import plain_generation
from kvcat.models import frozen
from kvcat.types import Float, Int, Tensor


class Row:
    """New tokens of one row: the most likely ones, up to the first that ends a text.

    Args:
        ends: ids of the tokens that end the row.
        max_new_tokens: most tokens of the row, in all calls of ``generate`` together.
    """

    def __init__(self, ends: Collection[int], max_new_tokens: int) -> None:
        self.ids: list[int] = []
        self.is_done = False
        self.max_new_tokens = max_new_tokens
        self._ends = frozenset(ends)

    def chosen(self, logits: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
        """Logits from which the next token is taken; a row that draws by itself changes them."""
        return logits

    def take(self, token: int) -> None:
        """Take the next token."""
        self.ids.append(token)
        self.is_done = token in self._ends or len(self.ids) >= self.max_new_tokens


def generate(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    num_tokens: int | None = None,
    **settings: Any,
) -> None:
    """Let every row take its tokens until all rows are done.

    Of the model's generation settings only the end-of-text tokens count.

    Args:
        inputs: keyword arguments of ``model.generate``, as from ``CompactCache.inputs``.
        rows: one for each row of the inputs.
        num_tokens: most tokens that they take now; they go on in a later call. None: no limit.
        settings: fields of ``GenerationConfig``; without them tokens are the most likely ones.
    """
    most = max(row.max_new_tokens - len(row.ids) for row in rows)
    if num_tokens is not None:
        most = min(most, num_tokens)
    run: Any = model.generate
    # for each token, generate calls the processor, then the streamer, then the stopping criteria: a
    # row takes its token before it is asked whether it is done
    with frozen(model), plain_generation(model, max_new_tokens=most, **settings) as config:
        run(
            **inputs,
            generation_config=config,
            streamer=_Tokens(rows),
            logits_processor=LogitsProcessorList([_Draws(rows)]),
            stopping_criteria=StoppingCriteriaList([_Endings(rows)]),
        )


class _Tokens(BaseStreamer):
    """Passes each row its tokens."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        """Take one token per row; the first call brings the prompts, which are left out."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        for row, token in zip(self._rows, value.flatten().tolist(), strict=True):
            if not row.is_done:  # a row that is done gets padding until all are
                row.take(token)

    def end(self) -> None:
        """Do nothing: a row ends by itself."""


class _Draws(LogitsProcessor):
    """Lets every row draw its token by itself."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __call__(
        self,
        input_ids: Int[Tensor, "batch tokens"],  # noqa: ARG002
        scores: Float[Tensor, "batch vocab"],
    ) -> Float[Tensor, "batch vocab"]:
        """The logits of ``Row.chosen`` of every row."""
        chosen = [row.chosen(logits) for row, logits in zip(self._rows, scores, strict=True)]
        return torch.stack(chosen)


class _Endings(StoppingCriteria):
    """Ends every row that is done."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __call__(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        scores: Any,  # noqa: ARG002
        **_: Any,
    ) -> Any:
        """Per row, whether it ends."""
        return torch.tensor([row.is_done for row in self._rows], device=input_ids.device)
