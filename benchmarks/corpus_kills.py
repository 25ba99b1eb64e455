"""A corpus whose command is killed at random times, against one that runs in one piece.

    python benchmarks/corpus_kills.py --kills 20 --documents 40

Every attempt starts a new store, kills the command with SIGKILL at a random time between its start
and the time that the whole run needed, and lets the same command finish. Every file of the store
must then have the same bytes, and the manifest the same rows, except for times.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pyarrow import parquet

import kvcat
from corpus import texts_of
from kvcat.errors import run_script


def start(model, corpus, store):
    """The command, running."""
    words = ["corpus", model, str(corpus), "-o", str(store)]
    return subprocess.Popen(
        [sys.executable, "-m", "kvcat", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(command):
    """Wait for the end of a command, which must succeed."""
    _, errors = command.communicate()
    if command.returncode != 0:
        raise SystemExit(errors.decode())


def contents(store):
    """The bytes of every file, and the rows of the manifest without times."""
    files = {}
    for path in store.rglob("*"):
        name = path.relative_to(store).as_posix()
        if path.is_file() and name != "manifest.parquet":
            files[name] = path.read_bytes()
    table = parquet.read_table(store / "manifest.parquet")
    files["manifest.parquet"] = table.drop_columns(["seconds", "finished", "revision"]).to_pylist()
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="kvcat-base")
    parser.add_argument("--data", default="installed")
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=450)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    _, tokenizer = kvcat.load(options.model)
    texts = texts_of(tokenizer, options.data, options.documents, options.tokens)
    draw = random.Random(options.seed)
    num_equal = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        rows = [{"id": f"doc/{number}", "text": text} for number, text in enumerate(texts)]
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
        begun = time.monotonic()
        finish(start(options.model, corpus, folder / "once"))
        seconds = time.monotonic() - begun
        expected = contents(folder / "once")
        print(f"one piece: {len(expected)} files in {seconds:.1f} s", flush=True)
        for attempt in range(options.kills):
            store = folder / f"killed-{attempt}"
            command = start(options.model, corpus, store)
            kill_time = draw.uniform(0, seconds)
            time.sleep(kill_time)
            command.kill()
            command.communicate()
            num_made = len(list(store.rglob("*.safetensors")))
            finish(start(options.model, corpus, store))
            is_equal = contents(store) == expected
            num_equal += is_equal
            print(
                f"kill {attempt} after {kill_time:5.1f} s with {num_made:3d} caches: "
                f"{'the same' if is_equal else 'ANOTHER'} store",
                flush=True,
            )
    print(f"{num_equal} of {options.kills} stores are the same byte for byte, except for times")
    sys.exit(num_equal != options.kills)


if __name__ == "__main__":
    run_script(main)
