"""Eight questions on one document in one batch of the server, against one after another.

    python benchmarks/server_batches.py --model smollm2-135m

Both use the code of ``kvcat serve``. Processor time is compared, because other programs do not
change it. Answers are greedy, of equally many tokens, and must be the same.
"""

import argparse
import time
from pathlib import Path

import kvcat
from kvcat.compress import make_compressor
from kvcat.errors import run_script
from kvcat.generate.batches import BatchQuestion, answer_batch
from kvcat.settings import Sampling

DOCUMENT = Path(__file__).parents[1] / "docs" / "corpus.md"
QUESTIONS = [
    "What is a store?",
    "Who writes the manifest, and when?",
    "Why?",
    "How is the file of a cache named?",
    "Which ways are there to use several machines, and what does each of them need?",
    "Ray",
    "What happens when the disk is full?",
    "Which sources can a corpus have?",
]


def answers(model, tokenizer, cache, texts, num_tokens):
    """The answers to some questions in one batch."""
    results = [None] * len(texts)
    questions = []
    for index, text in enumerate(texts):
        ids = kvcat.question_ids(tokenizer, text, cache=cache)[0].tolist()
        questions.append(
            BatchQuestion(
                ids,
                Sampling(max_new_tokens=num_tokens),
                on_text=lambda _: None,
                on_answer=lambda answer, index=index: results.__setitem__(index, answer.ids),
                is_cancelled=lambda: False,
            )
        )
    answer_batch(model, tokenizer, cache, questions)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="kvcat-base")
    parser.add_argument("--characters", type=int, default=1200, help="of the document")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    model, tokenizer = kvcat.load(options.model)
    model.generation_config.eos_token_id = None  # answers of equally many tokens
    text = DOCUMENT.read_text()[: options.characters]
    trace = kvcat.document_trace(model, tokenizer, text, supervision="self")
    cache = make_compressor("attention-matching")(trace, keep_ratio=0.1)
    print(f"{options.model}: {cache.num_tokens} tokens in {cache.mean_slots:g} slots, 8 questions")
    answers(model, tokenizer, cache, QUESTIONS[:1], 4)
    for _ in range(options.rounds):
        start = time.process_time()
        alone = []
        for question in QUESTIONS:
            alone += answers(model, tokenizer, cache, [question], options.tokens)
        middle = time.process_time()
        together = answers(model, tokenizer, cache, QUESTIONS, options.tokens)
        end = time.process_time()
        num_equal = sum(one == other for one, other in zip(alone, together, strict=True))
        print(
            f"one after another {middle - start:6.2f} s, together {end - middle:6.2f} s of "
            f"processor time: {(middle - start) / (end - middle):.2f} times as fast; "
            f"{num_equal} of 8 answers are the same"
        )


if __name__ == "__main__":
    run_script(main)
