"""Ask SmolLM2-135M about a document, with a dense cache and with compact ones.

    python examples/ask_a_document.py [DOCUMENT QUESTION...]

Without arguments: the minutes next to this file and five questions that they answer. `make
demo-real` runs it.
"""

import sys
import time
from pathlib import Path

import kvcat

QUESTIONS = [
    "What is the name of the smaller boat?",
    "Where is the next meeting?",
    "How much does the LED beacon cost?",
    "Who asked for a discount for residents?",
    "When does the regatta take place?",
]
KEEP = (0.5, 0.25, 0.1)
MOST_TOKENS = 24  # of an answer


def main() -> None:
    """Print the answers of the dense cache and of three compact ones."""
    arguments = sys.argv[1:]
    path = Path(arguments[0]) if arguments else Path(__file__).with_name("minutes.txt")
    model, tokenizer = kvcat.load("smollm2-135m")
    trace = kvcat.document_trace(model, tokenizer, path.read_text(encoding="utf-8-sig"), chat=True)
    caches = {"dense": trace.dense_cache()}
    begun = time.monotonic()
    for keep, cache in zip(KEEP, kvcat.AttentionMatching().each(trace, KEEP), strict=True):
        caches[f"{100 * keep:.0f} %"] = cache
    print(
        f"{path.name}: {trace.prefix_len} tokens, three caches in {time.monotonic() - begun:.0f} "
        "seconds"
    )
    print("  ".join(f"{name} {cache.nbytes / 2**20:.1f} MiB" for name, cache in caches.items()))
    for question in arguments[1:] or QUESTIONS:
        print(f"\n{question}")
        ids = kvcat.question_ids(tokenizer, question, chat=True)
        for name, cache in caches.items():
            inputs = cache.inputs(model, ids)
            answer = model.generate(**inputs, max_new_tokens=MOST_TOKENS, do_sample=False)
            tokens = answer[0, ids.shape[1] :]
            text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
            dots = " ..." if len(tokens) == MOST_TOKENS else ""  # the limit ended it
            print(f"  {name:>5}: {text}{dots}")


if __name__ == "__main__":
    main()
