"""Training text that must be recalled: a passage, an instruction, and the passage again.

    python runs/smollm2/recall.py books.parquet --model smollm2-135m -o out/recall/recall.jsonl
    kvcat prepare out/recall/recall.jsonl --model smollm2-135m -o out/recall/tokens

Each document has one token fewer than a sequence, so that with the EOS token behind it every
sequence of training is one document. The first half is a passage of a text and the instruction of
kvcat's own repetitions; the second half is the passage again and what follows it in the text. With
--plain, for a control, the document is the text from the same place on, without a repetition.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcat.compress.documents import INSTRUCTION
from kvcat.data import open_documents
from kvcat.errors import InputError, run_script
from kvcat.models import load_tokenizer
from kvcat.text.encoder import TextEncoder

CHARACTERS_PER_TOKEN = 16  # more than any passage has


def passages(
    text: str, encoder: TextEncoder, seq_len: int, count: int, *, plain: bool
) -> Iterator[str]:
    """At most so many documents from evenly spaced places of a text, each from a line's start."""
    middle = encoder.behind(INSTRUCTION)
    num_repeated = seq_len // 2 - len(middle)
    num_after = seq_len // 2 - 1 - num_repeated  # one token is EOS
    decode = encoder.tokenizer.decode
    for number in range(count):
        start = text.find("\n", len(text) * number // count) + 1
        excerpt = text[start : start + CHARACTERS_PER_TOKEN * seq_len].lstrip()
        ids = encoder(excerpt)
        if plain:
            document = decode(ids[: seq_len - 1])
            if encoder(document) == ids[: seq_len - 1] and len(ids) >= seq_len - 1:
                yield document
            continue
        passage = ids[:num_repeated]
        after = ids[num_repeated : num_repeated + num_after]
        document = decode(passage) + INSTRUCTION + decode(passage + after)
        # both copies are the same tokens, and none joins one of the instruction
        if len(after) == num_after and encoder(document) == passage + middle + passage + after:
            yield document


def main() -> None:
    """Write the documents."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="the texts, as kvcat train names them")
    parser.add_argument("--model", required=True, help="whose tokenizer counts")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--per-text", type=int, default=16, help="places in each text")
    parser.add_argument("--plain", action="store_true", help="text without a repetition")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON lines")
    options = parser.parse_args()
    encoder = TextEncoder(load_tokenizer(options.model))
    rows: list[dict[str, Any]] = []
    for document in open_documents(options.data):
        made = passages(
            document.text, encoder, options.seq_len, options.per_text, plain=options.plain
        )
        for number, text in enumerate(made):
            rows.append({"id": f"{document.id}/{number}", "text": text})
    if not rows:
        raise InputError(f"{options.data} has no text of {options.seq_len} tokens")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} documents: {options.output}")


if __name__ == "__main__":
    run_script(main)
