"""Speed, memory and right answers of compact and of dense caches where they are served, on a CPU.

    python benchmarks/serving.py vllm --data textbooks.parquet --tokens 1000 --keep 0.1
    python benchmarks/serving.py one --data textbooks.parquet --tokens 1000 --keep 0.2
    python benchmarks/serving.py vllm --data textbooks.parquet --device cuda

    python benchmarks/serving.py --collect RECORDS     # adds the records to those kept
    python benchmarks/serving.py --write               # the tables of docs/serving.md and README
    python benchmarks/serving.py --check               # exit code 1 if they are different

A document is a passage of a book of --data with eight facts at even depths, such as "The phone
number of Anna is 48213." (``long_documents.py``), as a user's turn in the chat template. It is
compressed by the default method. The question "What is the phone number of Anna?" follows, and the
answer is begun: "The phone number of Anna is". It is right if the number comes next. Every answer
has --new-tokens tokens.

`vllm`: 1, 4, 16 and 64 requests at once over all documents, to servers of the stock checkpoint.
"compact": the documents next to the pages. "cells": prompts with as many more tokens as the
documents have slots on average (rounded to whole blocks), which are in the prefix cache: the same
number of slots as ordinary cells, which mean nothing. "dense": the documents in the prompts and in
the prefix cache. Two servers take turns: every number of requests is sent once, so that everything
is in memory, and then --rounds times, of which the best counts. The very first request shows what a
document costs that is not in memory yet. Answers of "compact" are compared with those of
transformers, token by token. `--device cuda` runs the same on a GPU, with bfloat16 (answers may
differ by rounding).

`one`: one document and one question after the other in plain transformers, in `kvcat serve` and in
llama.cpp, dense and compact. llama.cpp needs equally many slots in every head: "compact" has filled
up heads there.

Caches stay in the work folder and are used again.
"""

import argparse
import copy
import json
import os
import re
import subprocess
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch
from leaderboard import RECORDS, ROOT, add_to_table, wrapped, write_or_check
from long_documents import Document
from named_models import NamedModel
from questions import DIGITS, LINE, right
from transformers import DynamicCache

import kvcat
from kvcat.compress.documents import document_trace
from kvcat.errors import InputError, run_script
from kvcat.evals.answers import greedy_answers
from kvcat.files import append_jsonl, read_json, read_jsonl, write_json
from kvcat.generate.batches import BatchQuestion, answer_batch
from kvcat.hub import local_folder
from kvcat.provenance import provenance
from kvcat.serving import LlamaCpp, export_prefix, read_prefix, widen, write_gguf
from kvcat.settings import Sampling
from kvcat.text.template import chat_parts

PAGE = ROOT / "docs" / "serving.md"
FACTS = ("date", "kvcat", "python", "torch", "transformers", "platform", "threads")
ENGINE_VERSIONS = ("vllm", "xllamacpp")
ABOUT = (
    "model", "documents", "tokens", "keep", "slots", "fullest", "slot_bytes", "cell_bytes",
    "layer_heads", "dense_tokens", "compact_file", "document_bytes", "equal", "device", "load",
    "cpu",
)  # fmt: skip
KEY = ["kind", "model", "documents", "tokens", "keep", "device", "engine", "mode", "requests"]
BLOCK = 32  # cells of a page
QUESTION = "What is the phone number of {}?"
MODES = {
    "compact": "compact",
    "cells": "as many ordinary cells",
    "dense": "dense, in the prefix cache",
}
ENGINES = {"transformers": "transformers", "kvcat serve": "`kvcat serve`", "llama.cpp": "llama.cpp"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", nargs="?", choices=["vllm", "one"])
    parser.add_argument("--model", default="smollm2-135m", metavar="[LABEL=]PATH")
    parser.add_argument("--data", type=Path, help="Parquet file with a column text")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--work", type=Path, default=Path("out/serving"))
    parser.add_argument("--records", type=Path, default=None)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3, help="of vLLM")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of vLLM")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--collect", nargs="+", type=Path, metavar="RECORDS", help="to keep")
    parser.add_argument("--write", action="store_true", help="the pages' tables")
    parser.add_argument("--check", action="store_true", help="compare them with the records")
    options = parser.parse_args()
    if options.engine:
        if options.data is None:
            raise InputError("no --data: name a Parquet file with a column text")
        measure(options)
    if options.collect:
        put_away(options.collect)
    if options.write or options.check:
        write_or_check(PAGE, {"vllm": vllm_table(), "one": one_table()}, options)


def measure(options: argparse.Namespace) -> None:
    """Add the record of a measurement to a file."""
    torch.set_num_threads(options.threads)
    named = NamedModel.parse(options.model)
    model, tokenizer = kvcat.load(named.path)
    books = pd.read_parquet(options.data)["text"].tolist()
    num_documents = options.documents if options.engine == "vllm" else 1
    documents = [
        Document(tokenizer, books[index % len(books)], index, options.tokens)
        for index in range(num_documents)
    ]
    folder = folder_of(options, named)
    folder.mkdir(parents=True, exist_ok=True)
    caches = {
        f"{options.tokens}-{document.index}": cache_of(options, model, document, folder)
        for document in documents
    }
    engine = vllm if options.engine == "vllm" else one
    record = {
        **provenance(),
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
        "engine": options.engine,
        "model": named.label,
        "documents": len(caches),
        "tokens": options.tokens,
        "keep": options.keep,
        "slots": round(sum(cache.mean_slots for cache in caches.values()) / len(caches)),
        "fullest": max(cache.max_slots for cache in caches.values()),
        "slot_bytes": sum(cache.nbytes for cache in caches.values()),
        **sizes_of(model),
        **engine(options, named, model, dict(zip(caches, documents, strict=True)), caches),
    }
    append_jsonl(options.records or options.work / "records.jsonl", record)
    print(json.dumps(record, indent=2))


def folder_of(options, named):
    """Where the compact caches of a setting are."""
    return options.work / f"{named.label}-{options.tokens}-{options.keep:g}"


def sizes_of(model):
    """KV heads in all layers, and bytes of a token's keys and values in all of them, float32."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer_heads = config.num_hidden_layers * config.num_key_value_heads
    return {"layer_heads": layer_heads, "cell_bytes": 4 * 2 * head_dim * layer_heads}


def cache_of(options, model, document, folder):
    """A document's compact cache, made once."""
    file = folder / f"{options.tokens}-{document.index}.safetensors"
    if not file.exists():
        trace = document_trace(
            model, document.tokenizer, document.parts[0], supervision="reconstruction", chat=True
        )
        kvcat.AttentionMatching()(trace, keep_ratio=options.keep).save(file)
    return kvcat.CompactCache.load(file, model)


def dense_ids(document):
    """Token ids of a document as a user's turn in the chat template."""
    head, _, _ = chat_parts(document.tokenizer)
    encode = document.tokenizer.encode
    return encode(head, add_special_tokens=False) + encode(
        document.parts[0], add_special_tokens=False
    )


def question_of(document, number):
    """Token ids of a question, and the number that is the answer."""
    name, code = document.facts[number % len(document.facts)]
    _, between, tail = chat_parts(document.tokenizer)
    text = between + QUESTION.format(name) + tail + LINE.format(name)
    return document.tokenizer.encode(text, add_special_tokens=False), code


def is_right(document, answer, code):
    """Whether the number comes first in an answer."""
    return right(document.tokenizer.decode(answer[: DIGITS + 2]), code)


def put_away(files):
    """Add the records of measurements to those kept, a row for each run."""
    records = [record for file in files for record in read_jsonl(file)]
    file = RECORDS / "serving.json"
    facts = read_json(file) if file.exists() else {"commands": [], "vllm": "", "xllamacpp": ""}
    paths = re.compile(r" --(?:work|records|python) \S+|=\.\.\./\S+|\.\.\./")
    new = [paths.sub("", record["command"]) for record in records]
    facts["commands"] = list(dict.fromkeys([*facts["commands"], *new]))
    rows = []
    for record in records:
        facts |= {name: record[name] for name in (*FACTS, *ENGINE_VERSIONS) if name in record}
        about = {name: record.get(name) for name in ABOUT}
        rows += [about | {"engine": "", "kind": record["engine"]} | run for run in record["runs"]]
    table = pd.DataFrame(rows)
    table["device"] = table["device"].fillna("")  # as an empty cell of the table is read
    add_to_table("serving", table, KEY)
    write_json(file, facts)


def figures_of(values, form):
    """The figures of several numbers of requests, in their order."""
    return " / ".join(format(value, form) for value in values)


def commands(facts, engine):
    """The commands of an engine's measurements."""
    of_engine = [command for command in facts["commands"] if f"serving.py {engine} " in command]
    return " and ".join(f"`python benchmarks/{command}`" for command in of_engine)


def cpus(rows):
    """The processors of some rows."""
    return " or ".join(rows["cpu"].unique())


def megabytes(num_bytes):
    return f"{num_bytes / 1e6:.1f}"


def vllm_table():
    """Speed, memory and answers by document and by how it is held."""
    every = pd.read_csv(RECORDS / "serving.csv.gz")
    rows = every[every["kind"] == "vllm"]
    facts = read_json(RECORDS / "serving.json")
    counts = figures_of(sorted(rows["requests"].unique()), "d")
    about = (
        f"Measured by {commands(facts, 'vllm')}, {facts['date']}, {facts['vllm']}, torch "
        f"{facts['torch']}, {cpus(rows)}, float32, one thread of a machine that others used "
        f"(load {rows['load'].max():.0f}). Two servers take turns, and the best round counts. MB "
        "of documents: what is allocated for compact ones, otherwise pages in use less those of "
        "questions and answers, where they are most. Right: numbers that the "
        "documents state, one question for each. Ordinary cells mean nothing and answer nothing."
    )
    lines = [
        wrapped(about),
        "",
        f"| documents | | MB of documents | right | tokens a second at {counts} requests | "
        f"seconds to the first token at {counts} |",
        "|---" * 6 + "|",
    ]
    has_several_models = rows["model"].nunique() > 1
    for (model, num_documents, tokens, keep), setting in rows.groupby(
        ["model", "documents", "tokens", "keep"], sort=False
    ):
        about_documents = f"{num_documents} of {tokens:,} tokens"
        if has_several_models:
            about_documents += f", {model}"
        for mode, name in MODES.items():
            cell = setting[setting["mode"] == mode].sort_values("requests")
            last = cell.iloc[-1]
            if mode == "compact":
                size = last["document_bytes"]
                texts = cell["cells"].to_numpy()
                name = f"{name}, {100 * keep:g} %"
            else:
                size = (cell["cells"].to_numpy() - texts).max() * last["cell_bytes"]
            right = "" if mode == "cells" else f"{last['right']:.0f} of {last['asked']}"
            figures = [
                about_documents if mode == "compact" else "",
                name,
                megabytes(size),
                right,
                figures_of(cell["tokens_a_second"], ".1f"),
                figures_of(cell["first"], ".2f"),
            ]
            lines.append(f"| {' | '.join(figures)} |".replace("|  |", "| |"))
    sentences = []
    for (model, num_documents, tokens, keep), setting in rows.groupby(
        ["model", "documents", "tokens", "keep"], sort=False
    ):
        last = setting.iloc[0]
        speed = setting.pivot(index="requests", columns="mode", values="tokens_a_second")
        sentences.append(
            f"{model}, {num_documents} documents of {tokens:,} tokens at {100 * keep:g} %: "
            f"{last['slots']} slots a head on average, {last['fullest']} in the fullest; "
            f"{megabytes(last['document_bytes'])} MB allocated for slots of "
            f"{megabytes(last['slot_bytes'])} MB; {last['equal']:.0f} of {last['asked']} answers "
            "equal those of transformers token by token; tokens a second over those of as many "
            f"ordinary cells {figures_of(speed['compact'] / speed['cells'], '.2f')}, over those of "
            f"the dense document {figures_of(speed['compact'] / speed['dense'], '.2f')}."
        )
    return "\n".join([*lines, "", *(wrapped(sentence) + "\n" for sentence in sentences)])


def one_table():
    """One document in every engine, dense and compact."""
    every = pd.read_csv(RECORDS / "serving.csv.gz")
    rows = every[every["kind"] == "one"]
    if rows.empty:
        return "Not measured yet.\n"
    setting = rows.iloc[0]
    of_vllm = every[
        (every["kind"] == "vllm")
        & (every["model"] == setting["model"])
        & (every["tokens"] == setting["tokens"])
        & (every["keep"] == setting["keep"])
        & (every["requests"] == 1)
        & (every["mode"] != "cells")
    ].assign(engine="vLLM")
    facts = read_json(RECORDS / "serving.json")
    keep = f"{100 * setting['keep']:g} %"
    about = (
        f"{setting['model']}, a document of {setting['tokens']:,} tokens, compact at {keep} of the "
        f"slots, one question after the other. Measured by {commands(facts, 'one')} "
        f"(vLLM: the table below, its documents together), {facts['date']}, xllamacpp "
        f"{facts['xllamacpp']}, {cpus(rows)}, one thread, load {setting['load']:.0f}; float32, "
        "in llama.cpp float16. The first time: reading the text, or loading the cache's file; "
        "llama.cpp restores its cache for every question. Afterwards: medians with the document in "
        "memory."
    )
    lines = [
        wrapped(about),
        "",
        "| | | right | seconds to the first token, the first time | afterwards | tokens a second |",
        "|---" * 6 + "|",
    ]
    names = {**ENGINES, "vLLM": "vLLM"}
    for engine, name in names.items():
        of_engine = pd.concat(
            [rows[rows["engine"] == engine], of_vllm[of_vllm["engine"] == engine]]
        )
        for mode in ("dense", "compact"):
            for _, cell in of_engine[of_engine["mode"] == mode].iterrows():
                figures = [
                    name,
                    mode,
                    f"{cell['right']:.0f} of {cell['asked']}",
                    f"{cell['first_time']:.2f}",
                    f"{cell['first']:.2f}",
                    f"{cell['tokens_a_second']:.1f}",
                ]
                lines.append(f"| {' | '.join(figures)} |")
    return "\n".join([*lines, "", wrapped(sizes(setting)), ""])


def sizes(setting):
    """The bytes of one document in a sentence."""
    tokens = setting["dense_tokens"]
    numbers = setting["cell_bytes"] / 4  # of a token, in all layers and heads
    slot_numbers = numbers / setting["layer_heads"]
    slots = setting["slot_bytes"] / (4 * slot_numbers + 4)
    of_compact = [slots * (slot_numbers * size + 4) for size in (4, 2)]
    return (
        f"Bytes of the document: a dense cache {megabytes(tokens * numbers * 4)} MB in 32 bits, "
        f"{megabytes(tokens * numbers * 2)} in 16, {megabytes(tokens * numbers * 34 / 32)} as "
        f"`q8_0` (computed); the compact one {megabytes(of_compact[0])} MB in 32 bits (its file: "
        f"{megabytes(setting['compact_file'])}) and {megabytes(of_compact[1])} in 16."
    )


class Server:
    """A vLLM server during a block; ``usage`` is the largest share of its pages in use."""

    def __init__(self, options, model, max_len, documents=None):
        self.port = 8735 if documents else 8734
        self.usage = 0.0
        is_cpu = options.device == "cpu"
        command = [options.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--port", self.port, "--served-model-name", "m", "--max-model-len", max_len]
        command += ["--dtype", "float32" if is_cpu else "bfloat16"]
        if is_cpu:
            command += ["--enforce-eager", "--block-size", BLOCK]
        if documents:
            transfer = {
                "kv_connector": "kvcat",
                "kv_role": "kv_consumer",
                "kv_connector_extra_config": {"documents": str(documents)},
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        settings = {"HF_HUB_OFFLINE": "1"}
        if is_cpu:
            settings |= {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "OMP_NUM_THREADS": str(options.threads),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        self.log = (options.work / f"server-{'compact' if documents else 'stock'}.log").open("w")
        self.process = subprocess.Popen(
            [str(x) for x in command],
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, **settings},
        )

    def __enter__(self):
        while not self.read("/health") and self.process.poll() is None:
            time.sleep(1)
        self.watching = threading.Thread(target=self.watch, daemon=True)
        self.watching.start()
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def read(self, path):
        try:
            with urllib.request.urlopen(f"http://localhost:{self.port}{path}", timeout=60) as reply:
                return reply.read().decode() or "ok"
        except OSError:
            return ""

    def watch(self):
        while self.process.poll() is None:
            text = self.read("/metrics")
            for share in re.findall(r"^vllm:kv_cache_usage_perc\S* (\S+)$", text, re.M):
                self.usage = max(self.usage, float(share))
            time.sleep(0.2)

    def ask(self, body):
        """Token ids of an answer, seconds to the first of them, and to the last."""
        body = {
            "model": "m",
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **body,
        }
        request = urllib.request.Request(
            f"http://localhost:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        start = time.perf_counter()
        made = []
        first = None
        with urllib.request.urlopen(request, timeout=600) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    made += choices[0]["token_ids"] if choices else []
                    first = first or time.perf_counter() - start
        return made, first, time.perf_counter() - start

    def load(self, bodies):
        """Answers of all requests, sent at once, and figures of speed and memory."""
        self.usage = 0.0
        start = time.perf_counter()
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(self.ask, bodies))
        seconds = time.perf_counter() - start
        firsts = torch.tensor([first for _, first, _ in answers])
        capacity = re.search(r"KV cache size: ([\d,]+) tokens", Path(self.log.name).read_text())
        tokens = int(capacity[1].replace(",", "")) if capacity else 0
        return [made for made, *_ in answers], {
            "tokens_a_second": sum(len(made) for made, *_ in answers) / seconds,
            "first": firsts.median().item(),
            "last_first": firsts.max().item(),
            "cells": round(self.usage * tokens),
        }


def vllm(options, named, model, documents, caches):
    """Figures of vLLM's servers."""
    slots = round(sum(cache.mean_slots for cache in caches.values()) / len(caches))
    # whole blocks are kept in the prefix cache, so that all modes compute the question alone
    num_cells = round(slots / BLOCK) * BLOCK
    names = list(documents)
    asked = []
    bodies = {mode: [] for mode in MODES}
    for i in range(max(options.requests)):
        name = names[i % len(names)]
        ids, code = question_of(documents[name], i // len(names))
        dense = dense_ids(documents[name])
        asked.append((name, ids, code))
        bodies["compact"].append({"prompt": ids, "kvcat": name})
        bodies["cells"].append({"prompt": dense[:num_cells] + ids})
        bodies["dense"].append({"prompt": dense + ids})
    for body in (body for of_mode in bodies.values() for body in of_mode):
        body["max_tokens"] = options.new_tokens
    checkpoint = local_folder(named.path)
    folder = folder_of(options, named)
    longest = options.tokens + 512
    figures = {"vllm": engine_version(options), "device": options.device, "runs": []}
    with (
        Server(options, checkpoint, longest, folder) as with_documents,
        Server(options, checkpoint, longest) as stock,
    ):
        servers = {"compact": with_documents, "cells": stock, "dense": stock}
        for count in options.requests:
            runs, answers = alternating(options, servers, bodies, count)
            figures["runs"] += runs
        figures["load"] = os.getloadavg()[0]
        loaded = re.search(
            r"^kvcat:document_bytes\S* (\S+)$", with_documents.read("/metrics"), re.M
        )
        figures["document_bytes"] = int(float(loaded[1]))
    # each question once
    different = range(min(len(asked), 8 * len(names)))
    for run in figures["runs"]:
        run["asked"] = len(different)
        if run["mode"] != "cells":
            run["right"] = sum(
                is_right(documents[name], answers[run["mode"]][i], code)
                for i, (name, _, code) in enumerate(asked)
                if i in different
            )
    model.generation_config.eos_token_id = None  # answers of equally many tokens
    equal = 0
    for name in names:
        of_document = [i for i in different if asked[i][0] == name]
        questions = [asked[i][1] for i in of_document]
        made = greedy_answers(model, caches[name], questions, options.new_tokens)
        equal += sum(
            answer == answers["compact"][i] for i, answer in zip(of_document, made, strict=True)
        )
    figures["equal"] = equal
    return figures


def alternating(options, servers, bodies, count):
    """Figures of so many requests at once, the best of several rounds, and the answers.

    Modes take turns, because other programs use the machine. In the first round everything is read
    that is not in memory yet; it counts where one request is alone.
    """
    runs = {}
    answers = {}
    for number in range(options.rounds + 1):
        for mode, server in servers.items():
            answers[mode], run = server.load(bodies[mode][:count])
            if number == 0:
                first_time = run["first"] if count == min(options.requests) else None
                runs[mode] = {"mode": mode, "requests": count, "first_time": first_time}
                continue
            runs[mode]["cells"] = run["cells"]
            for name, better in (("tokens_a_second", max), ("first", min), ("last_first", min)):
                runs[mode][name] = better(runs[mode].get(name, run[name]), run[name])
    return list(runs.values()), answers


def engine_version(options):
    """The version of vLLM in the environment of its Python."""
    code = "import importlib.metadata as m\nprint([d.metadata['Name'] + ' ' + d.version for d in "
    code += "m.distributions() if d.metadata['Name'] in ('vllm', 'vllm-cpu')][0])"
    command = [options.python, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Clock:
    """A streamer of transformers that notes the time of every token."""

    def __init__(self):
        self.times = []

    def put(self, _):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def generated(model, inputs, num_tokens):
    """A greedy answer in transformers, the seconds to its first token and those of the others."""
    clock = Clock()
    begun = time.perf_counter()
    made = model.generate(
        **inputs,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=clock,
    )
    _, first, *_, last = clock.times  # the first call has the prompt
    return made[0, inputs["input_ids"].shape[1] :].tolist(), first - begun, last - first


def one(options, named, model, documents, _):
    """Figures of one document in engines without batches."""
    ((name, document),) = documents.items()
    questions = [question_of(document, number) for number in range(len(document.facts))]
    dense_file = options.work / f"{named.label}-{name}-dense.safetensors"
    if not dense_file.exists():
        trace = kvcat.trace(model, torch.tensor([dense_ids(document)]), supervision="self")
        trace.dense_cache().save(dense_file)
    files = {
        "compact": folder_of(options, named) / f"{name}.safetensors",
        "dense": dense_file,
    }
    model.set_attn_implementation("sdpa")
    runs = []
    for engine in (transformers_dense, transformers_compact, kvcat_serve, llama_cpp):
        for mode, file in files.items():
            if engine.__name__.startswith("transformers") and not engine.__name__.endswith(mode):
                continue
            runs.append(engine(options, model, document, questions, file) | {"mode": mode})
            print(runs[-1], flush=True)
    return {
        "xllamacpp": version("xllamacpp"),
        "dense_tokens": len(dense_ids(document)),
        "compact_file": files["compact"].stat().st_size,
        "runs": runs,
    }


def summary(engine, document, questions, answers, first_time, firsts, later, num_tokens):
    """The figures of one engine: medians over questions."""
    return {
        "engine": engine,
        "requests": 1,
        "first_time": first_time,
        "first": torch.tensor(firsts).median().item(),
        "tokens_a_second": (num_tokens - 1) / torch.tensor(later).median().item(),
        "right": sum(
            is_right(document, answer, code)
            for answer, (_, code) in zip(answers, questions, strict=True)
        ),
        "asked": len(questions),
    }


@torch.no_grad()
def transformers_dense(options, model, document, questions, _):
    """The document read by the model, and its cache copied for every question."""
    ids = dense_ids(document)
    begun = time.perf_counter()
    past = DynamicCache(config=model.config)
    model(torch.tensor([ids]), past_key_values=past, logits_to_keep=1)
    read = time.perf_counter() - begun
    answers, firsts, later = [], [], []
    for question, _ in questions:
        inputs = {
            "input_ids": torch.tensor([ids + question]),
            "past_key_values": copy.deepcopy(past),
        }
        answer, first, others = generated(model, inputs, options.new_tokens)
        answers.append(answer)
        firsts.append(first)
        later.append(others)
    return summary(
        "transformers", document, questions, answers, read + firsts[0], firsts, later,
        options.new_tokens,
    )  # fmt: skip


def transformers_compact(options, model, document, questions, file):
    """The cache from its file, with kvcat's hooks."""
    begun = time.perf_counter()
    cache = kvcat.CompactCache.load(file, model)
    load = time.perf_counter() - begun
    answers, firsts, later = [], [], []
    for question, _ in questions:
        begun = time.perf_counter()
        inputs = cache.inputs(model, torch.tensor([question]))
        ready = time.perf_counter() - begun
        answer, first, others = generated(model, inputs, options.new_tokens)
        answers.append(answer)
        firsts.append(ready + first)
        later.append(others)
    return summary(
        "transformers", document, questions, answers, load + firsts[0], firsts, later,
        options.new_tokens,
    )  # fmt: skip


def kvcat_serve(options, model, document, questions, file):
    """The code of ``kvcat serve``, without its connections."""
    ends = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None  # answers of equally many tokens
    begun = time.perf_counter()
    cache = kvcat.CompactCache.load(file, model)
    load = time.perf_counter() - begun
    answers, firsts, later = [], [], []
    for question, _ in questions:
        times = []
        asked = BatchQuestion(
            question,
            Sampling(max_new_tokens=options.new_tokens),
            on_text=lambda _, times=times: times.append(time.perf_counter()),
            on_answer=lambda answer: answers.append(answer.ids),
            is_cancelled=lambda: False,
        )
        begun = time.perf_counter()
        answer_batch(model, document.tokenizer, cache, [asked])
        firsts.append(times[0] - begun)
        later.append(time.perf_counter() - times[0])
    model.generation_config.eos_token_id = ends
    return summary(
        "kvcat serve", document, questions, answers, load + firsts[0], firsts, later,
        options.new_tokens,
    )  # fmt: skip


def llama_cpp(options, model, document, questions, file):
    """A packed cache, restored for every question."""
    head_dim = 72
    gguf = options.work / f"wide{head_dim}.gguf"
    if not gguf.exists():
        write_gguf(widen(model, head_dim), gguf)
    packed = file.with_suffix(".prefix")
    export_prefix(kvcat.CompactCache.load(file, model), model, packed, head_dim=head_dim)
    prefix = read_prefix(packed)
    room = prefix.num_slots + 64 + options.new_tokens
    answers, firsts, later = [], [], []
    with closing(LlamaCpp(gguf, num_ctx=room, num_threads=options.threads)) as engine:
        for question, _ in questions:
            begun = time.perf_counter()
            engine.load(read_prefix(packed))
            token = int(engine.logits(question).argmax())
            first = time.perf_counter()
            answers.append([token, *engine.generate([token], options.new_tokens - 1)])
            later.append(time.perf_counter() - first)
            firsts.append(first - begun)
        allocated = engine.num_ctx * engine.layout.width * 2 * 2 * prefix.shape[0]
    return summary(
        "llama.cpp", document, questions, answers, firsts[0], firsts, later, options.new_tokens
    ) | {"allocated": allocated}


if __name__ == "__main__":
    run_script(main)
