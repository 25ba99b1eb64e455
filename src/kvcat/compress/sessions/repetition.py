"""What a session compacts is repeated after it, and the queries of the repetition are fitted to.

A text's own queries show what its next words depend on. A model that copies a text looks up every
word and digit of it, which is what answers about it need.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from kvcat.cache import check_token_ids
from kvcat.compress.documents import INSTRUCTION
from kvcat.compress.queries import moved_sets, supervising_sets, with_text
from kvcat.compress.query_set import QuerySet
from kvcat.compress.trace import Trace
from kvcat.errors import InputError
from kvcat.text.encoder import TextEncoder


def instruction_ids(model: PreTrainedModel, encoder: TextEncoder) -> list[int]:
    """Token ids of the instruction to repeat a text; [] if the tokenizer cannot encode it."""
    try:
        ids = encoder.behind(INSTRUCTION)
        check_token_ids(model, torch.tensor([ids]))
    except InputError:
        return []
    return ids


def fitted_also_to(trace: Trace, repeated: Sequence[QuerySet]) -> Trace:
    """The trace whose sources are a repetition, the queries kept before, and the prefix's own.

    Without a repetition the text after the prefix takes its place. To all of them a document before
    the prefix is attention elsewhere.

    Args:
        trace: whose queries can be moved if there is a repetition.
        repeated: queries of its tokens after the compact cache (``repeated_tokens``); (): none.
    """
    if not repeated and trace.document is None:
        return trace
    if not repeated:
        repeated = [with_text(each, trace) for each in supervising_sets(trace, has_moved=True)]
    sources = [*repeated, *moved_sets(trace)]
    if trace.document is not None:
        layers = (trace.layer_numbers, trace.scales)
        sources = [each.with_document(trace.document, *layers) for each in sources]
    return replace(trace, sources=sources)
