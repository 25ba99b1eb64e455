"""A corpus on one and two workers of Ray against the plain command: documents an hour, cost.

    pip install 'kvcat[ray]'
    python benchmarks/corpus_ray.py --documents 60

It starts a cluster of two processors on this machine, with workers of ordinary priority. Every
engine compresses a third of the corpus and the whole corpus, each into a new store. The difference
of the processor times, per document, is the cost of a document; what is left of the shorter run is
the start: imports, and loading the model in every process. Processor time includes the command and
all processes of the cluster, so that other programs do not change it.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import kvcat
from corpus import texts_of

PORT = 6391
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Processors:
    """Processor seconds of a cluster's processes, also of those that end: a thread samples them.

    Args:
        root: the process that started the others.
    """

    def __init__(self, root):
        self._root = root
        self._seconds = {}
        threading.Thread(target=self._sample, daemon=True).start()

    @property
    def seconds(self):
        """Processor seconds so far."""
        return sum(list(self._seconds.values()))

    def _sample(self):
        while True:
            self._seconds.update(tree_seconds(self._root))
            time.sleep(0.3)


def tree_seconds(root):
    """Processor seconds of a process, and of all that it started and that live, by number."""
    children = defaultdict(list)
    seconds = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children[int(fields[1])].append(int(folder.name))
            user, system = fields[11:13]
            seconds[int(folder.name)] = (int(user) + int(system)) / CLOCK_TICKS
    waiting = [root]
    tree = {}
    while waiting:
        process = waiting.pop()
        tree[process] = seconds.get(process, 0.0)
        waiting += children[process]
    return tree


def command_seconds():
    """Processor seconds of all commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def start_cluster():
    """A cluster of two processors, as a process that runs until it is ended."""
    environment = {**os.environ, "RAY_worker_niceness": "0"}
    words = f"start --head --num-cpus 2 --port {PORT} --disable-usage-stats --block".split()
    ray = Path(sys.executable).with_name("ray")
    words.append("--include-dashboard=false")
    cluster = subprocess.Popen(
        [ray, *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(20)
    return cluster


def run(model, corpus, store, num_workers, processors):
    """Seconds of the documents after the start, and processor seconds of the whole command."""
    words = ["compress", model, "--corpus", str(corpus), "-o", str(store)]
    if num_workers:
        words += ["--ray", "auto", "--workers", str(num_workers)]
    before = processors.seconds + command_seconds()
    ended = subprocess.run(
        [sys.executable, "-m", "kvcat", *words], capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        raise SystemExit(ended.stderr)
    processor_seconds = processors.seconds + command_seconds() - before
    rate = float(re.search(r"([\d.e+]+) documents a minute", ended.stdout)[1])
    num_documents = int(re.search(r": (\d+) caches made", ended.stdout)[1])
    return 60 * num_documents / rate, processor_seconds


def write_corpus(path, texts):
    """A corpus of texts."""
    rows = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="kvcat-base")
    parser.add_argument("--data", default="installed")
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=450)
    options = parser.parse_args()
    _, tokenizer = kvcat.load(options.model)
    texts = texts_of(tokenizer, options.data, options.documents, options.tokens)
    num_short = options.documents // 3
    cluster = start_cluster()
    processors = Processors(cluster.pid)
    plain_cost = None
    print(f"{options.documents} documents of about {options.tokens} tokens on {options.model}")
    print("engine          documents an hour  processor s a document  processor s to start")
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            some = write_corpus(folder / "some.jsonl", texts[:num_short])
            every = write_corpus(folder / "every.jsonl", texts)
            for num_workers in (0, 1, 2):
                store = folder / str(num_workers)
                _, _, short = run(options.model, some, f"{store}-some", num_workers, processors)
                seconds, _, long = run(
                    options.model, every, f"{store}-all", num_workers, processors
                )
                cost = (long - short) / (options.documents - num_short)
                plain_cost = plain_cost or cost
                label = f"Ray, {num_workers} workers" if num_workers else "plain command"
                print(
                    f"{label:15s} {3600 * options.documents / seconds:17,.0f}"
                    f"  {cost:14.3f} ({cost / plain_cost - 1:+5.1%})"
                    f"  {short - cost * num_short:20.1f}",
                    flush=True,
                )
    finally:
        cluster.terminate()
        cluster.wait()


if __name__ == "__main__":
    main()
