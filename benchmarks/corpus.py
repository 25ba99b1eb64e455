"""A corpus in a store against the same documents one by one: time and memory.

    python benchmarks/corpus.py --model smollm2-135m --documents 10 --tokens 1000
    python benchmarks/corpus.py --documents 1000 --tokens 1000 --supervision self --store-alone

Both run in one process with one model, the documents one by one first: trace and compression,
without a file. Processor time is compared, because other programs do not change it.
"""

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

import kvcat
from kvcat.corpus import CorpusSettings, compress_corpus
from kvcat.corpus.storage import LocalStorage
from kvcat.data import open_documents
from kvcat.errors import run_script


def texts_of(tokenizer, source, num_documents, num_tokens):
    """Texts of about a number of tokens, from consecutive documents of a source."""
    ids = []
    for document in open_documents(source):
        ids += tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids
        if len(ids) >= num_documents * num_tokens:
            break
    draw = random.Random(0)
    texts = []
    start = 0
    for _ in range(num_documents):
        length = num_tokens - draw.randrange(num_tokens // 10)
        texts.append(tokenizer.decode(ids[start : start + length]))
        start += num_tokens
    return texts


def resident_mb():
    """Memory of this process in millions of bytes, as Linux counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def one_by_one(model, tokenizer, texts, supervision):
    """Processor seconds of trace and compression of every document."""
    method = kvcat.AttentionMatching()
    start = time.process_time()
    for text in texts:
        trace = kvcat.document_trace(model, tokenizer, text, supervision=supervision)
        method(trace, keep_ratio=0.1)
    return time.process_time() - start


def in_a_store(model, tokenizer, texts, supervision):
    """Processor seconds and seconds of a corpus, and memory at each tenth of its documents."""
    memory = []
    save = LocalStorage.save_cache

    def save_and_measure(storage, name, cache):
        save(storage, name, cache)
        memory.append(resident_mb())

    LocalStorage.save_cache = save_and_measure
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus.jsonl")
        rows = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = CorpusSettings(supervision=supervision)
        start = time.process_time()
        result = compress_corpus(
            model, tokenizer, corpus, Path(folder, "store"), settings, show_progress=True
        )
        processor_seconds = time.process_time() - start
    if result.num_made != len(texts):
        raise SystemExit(f"{len(result.failures)} documents failed: {result.failures[0].error}")
    tenths = [memory[max(1, len(memory) * tenth // 10) - 1] for tenth in range(1, 11)]
    return processor_seconds, result.seconds, [memory[0], *tenths]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="kvcat-base")
    parser.add_argument("--data", default="installed")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=450)
    parser.add_argument("--supervision", default="reconstruction")
    parser.add_argument("--store-alone", action="store_true", help="not one by one: memory only")
    options = parser.parse_args()
    model, tokenizer = kvcat.load(options.model)
    texts = texts_of(tokenizer, options.data, options.documents, options.tokens)
    if not options.store_alone:
        warm_up = texts[:1]
        one_by_one(model, tokenizer, warm_up, options.supervision)
        alone = one_by_one(model, tokenizer, texts, options.supervision)
    together, seconds, memory = in_a_store(model, tokenizer, texts, options.supervision)
    print(f"{options.documents} documents of about {options.tokens} tokens on {options.model}")
    print(f"store       {together:8.1f} s of processor time")
    if not options.store_alone:
        print(f"one by one  {alone:8.1f} s, the store {together / alone:.3f} times as much")
    print(
        f"            {seconds:8.1f} s, {3600 * options.documents / seconds:,.0f} documents an hour"
    )
    shown = " ".join(f"{value:.0f}" for value in memory)
    print(f"memory in MB after the first document and each tenth: {shown}")


if __name__ == "__main__":
    run_script(main)
