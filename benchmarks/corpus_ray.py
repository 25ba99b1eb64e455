"""A corpus on one and two workers of Ray against the plain command: documents an hour.

    pip install 'kvcat[ray]'
    python benchmarks/corpus_ray.py --documents 60

It starts a cluster of two processors on this machine, with workers of ordinary priority. Documents
an hour of the plain command are counted after its start; those of Ray include the start of its
actors, which load the model. They mean something on a machine without other work alone.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import kvcat
from corpus import texts_of


def start_cluster():
    """A cluster of two processors, as a process that runs until it is ended."""
    environment = {**os.environ, "RAY_worker_niceness": "0"}
    ray = Path(sys.executable).with_name("ray")
    options = ["--head", "--num-cpus=2", "--port=6391", "--disable-usage-stats", "--block"]
    command = [ray, "start", *options, "--include-dashboard=false"]
    quiet = subprocess.DEVNULL
    cluster = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
    time.sleep(20)
    return cluster


def run(model, corpus, store, num_workers):
    """Documents an hour, and seconds of the whole command."""
    words = ["compress", model, "--corpus", str(corpus), "-o", str(store)]
    if num_workers:
        words += ["--ray", "auto", "--workers", str(num_workers)]
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "kvcat", *words], capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - begun
    if ended.returncode != 0:
        raise SystemExit(ended.stderr)
    a_minute = float(re.search(r"([\d.e+]+) documents a minute", ended.stdout)[1])
    return 60 * a_minute, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="kvcat-base")
    parser.add_argument("--data", default="installed")
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=450)
    options = parser.parse_args()
    _, tokenizer = kvcat.load(options.model)
    texts = texts_of(tokenizer, options.data, options.documents, options.tokens)
    print(f"{options.documents} documents of about {options.tokens} tokens on {options.model}")
    print("engine            documents an hour  whole command, s")
    cluster = start_cluster()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            corpus = folder / "corpus.jsonl"
            rows = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
            corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
            for num_workers in (0, 1, 2):
                rate, seconds = run(options.model, corpus, folder / str(num_workers), num_workers)
                label = f"Ray, {num_workers} workers" if num_workers else "plain command"
                print(f"{label:15s} {rate:19,.0f} {seconds:17.0f}", flush=True)
    finally:
        cluster.terminate()
        cluster.wait()


if __name__ == "__main__":
    main()
