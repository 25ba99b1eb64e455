"""What a Ray cluster adds to the cost of a corpus.

    pip install -e '.[ray]'
    python benchmarks/corpus_ray.py

It starts a cluster of two processors on this machine, with workers of ordinary priority, and runs
the plain command and one and two workers, one thread each, on two corpora: a few documents, and
all. Seconds are those of the clock; processor seconds are those of the command and of all processes
of the cluster. The difference between the two corpora, divided by that of documents, is what a
document costs; the rest is the start (imports, one model for every worker). The engine's cost is
the processor seconds that a document costs more than with the plain command. Nothing else should
run on the machine.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import kvcat
from corpus import texts_of
from kvcat.errors import run_script

PORT = 6391
TOKENS = {"RAY_AUTH_MODE": "token"}  # how Ray protects a cluster that is named by its address
TICKS = os.sysconf("SC_CLK_TCK")


class Cluster:
    """A cluster of two processors, as processes that run until they are ended."""

    def __init__(self):
        environment = {**os.environ, **TOKENS, "RAY_worker_niceness": "0"}
        ray = Path(sys.executable).with_name("ray")
        options = ["--head", "--num-cpus=2", f"--port={PORT}", "--disable-usage-stats", "--block"]
        command = [ray, "start", *options, "--include-dashboard=false"]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
        self._seconds = {}
        threading.Thread(target=self._watch, daemon=True).start()
        self._wait()

    def seconds(self):
        """Processor seconds of all processes until now, also of those that have ended."""
        self._read()
        return sum(self._seconds.values())

    def close(self):
        self.process.terminate()
        self.process.wait()

    def _wait(self):
        """Wait until the cluster has started."""
        for _ in range(150):
            if self.process.poll() is not None:
                raise SystemExit("the cluster does not start: is another one running?")
            with socket.socket() as connection:
                if connection.connect_ex(("127.0.0.1", PORT)) == 0:
                    time.sleep(20)  # the first process listens before the others have started
                    return
            time.sleep(2)
        raise SystemExit("the cluster does not answer")

    def _watch(self):
        while self.process.poll() is None:
            self._read()
            time.sleep(0.2)

    def _read(self):
        """Remember the processor seconds of every process below the cluster's first one."""
        parents = {}
        seconds = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            pid = int(folder.name)
            parents[pid] = int(fields[1])
            seconds[pid] = (int(fields[11]) + int(fields[12])) / TICKS
        for pid in parents:
            ancestor = pid
            while ancestor not in (0, self.process.pid):
                ancestor = parents.get(ancestor, 0)
            if ancestor:
                self._seconds[pid] = seconds[pid]


class Seconds(NamedTuple):
    """What a run took."""

    clock: float
    processor: float


def run(model, corpus, store, num_workers, cluster):
    """Seconds of a command, with those of the cluster's processors while it ran."""
    words = ["corpus", model, str(corpus), "-o", str(store)]
    if num_workers:
        words += ["--ray", "auto", "--workers", str(num_workers)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    before_cluster = cluster.seconds()
    address = {"RAY_ADDRESS": f"127.0.0.1:{PORT}", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **TOKENS, **address}
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "kvcat", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if ended.returncode != 0:
        raise SystemExit(ended.stderr)
    clock = time.monotonic() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    of_command = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    of_cluster = cluster.seconds() - before_cluster if num_workers else 0.0
    return Seconds(clock, of_command + of_cluster)


def write_corpus(path, texts):
    rows = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(texts)]
    path.write_text("\n".join(rows) + "\n")
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="kvcat-base")
    parser.add_argument("--data", default="installed")
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--few", type=int, default=64, help="documents of the small corpus")
    parser.add_argument("--tokens", type=int, default=450)
    options = parser.parse_args()
    _, tokenizer = kvcat.load(options.model)
    texts = texts_of(tokenizer, options.data, options.documents, options.tokens)
    print(f"{options.documents} documents of about {options.tokens} tokens on {options.model}")
    print("                 documents   processor seconds       cost of")
    print("engine             an hour   a document   the start  the engine")
    cluster = Cluster()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            short_corpus = write_corpus(folder / "short.jsonl", texts[: options.few])
            whole_corpus = write_corpus(folder / "whole.jsonl", texts)
            plain = 0.0
            for num_workers in (0, 1, 2):
                stores = folder / f"few-{num_workers}", folder / f"all-{num_workers}"
                short_run = run(options.model, short_corpus, stores[0], num_workers, cluster)
                whole_run = run(options.model, whole_corpus, stores[1], num_workers, cluster)
                num_more = len(texts) - options.few
                clock = (whole_run.clock - short_run.clock) / num_more
                each = (whole_run.processor - short_run.processor) / num_more
                start = short_run.processor - options.few * each
                plain = plain or each
                label = f"Ray, {num_workers} workers" if num_workers else "plain command"
                print(
                    f"{label:15s} {3600 / clock:10.0f} {each:12.3f} {start:11.1f} "
                    f"{100 * (each / plain - 1):9.1f} %",
                    flush=True,
                )
    finally:
        cluster.close()


if __name__ == "__main__":
    run_script(main)
