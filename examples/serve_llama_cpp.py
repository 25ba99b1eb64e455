r"""Answer questions about documents in llama.cpp from packed caches; the model is loaded once.

    kvcat compress smollm2-135m --text examples/minutes.txt --chat --keep 0.25 \
        --method attention-matching,budgets=equal -o equal.safetensors
    kvcat widen smollm2-135m --head-dim 72 -o wide.gguf
    kvcat pack smollm2-135m --cache equal.safetensors --head-dim 72 -o minutes
    echo "minutes: Where is the next meeting held?" |
        python examples/serve_llama_cpp.py smollm2-135m wide.gguf minutes

Each line of standard input names a document and asks a question.
"""

import argparse
import sys
import time
from pathlib import Path

from transformers import AutoTokenizer

from kvcat.errors import InputError
from kvcat.hub import local_folder
from kvcat.serving import LlamaCpp, prompt_ids, read_prefix


def main() -> None:
    """Answer until standard input ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", help="the model that was widened, for its tokenizer")
    parser.add_argument("gguf", help="the widened model")
    parser.add_argument("caches", nargs="+", help="files of kvcat pack")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-threads", type=int, default=1)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(local_folder(options.tokenizer))
    engine = LlamaCpp(options.gguf, num_threads=options.num_threads)
    documents = {Path(path).name: read_prefix(path) for path in options.caches}
    for line in sys.stdin:
        name, _, question = line.strip().partition(": ")
        try:
            if name not in documents:
                raise InputError(f"no document {name!r}; documents: {', '.join(documents)}")
            document = documents[name]
            start = time.perf_counter()
            ids = prompt_ids(
                tokenizer, question, chat=document.chat, chat_template=document.chat_template
            )
            engine.load(document)
            answer = list(
                engine.generate(ids, options.max_new_tokens, end=[tokenizer.eos_token_id])
            )
        except InputError as error:
            print(f"error: {error}", flush=True)
            continue
        print(f"{tokenizer.decode(answer)}  [{time.perf_counter() - start:.2f} s]", flush=True)


if __name__ == "__main__":
    main()
