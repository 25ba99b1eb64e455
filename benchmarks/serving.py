"""Speed and memory of compact and of dense caches in llama.cpp and vLLM on a CPU.

    python benchmarks/serving.py llama.cpp --data textbooks.parquet --documents 1 --tokens 4090
    python benchmarks/serving.py vllm --data textbooks.parquet --documents 8 --tokens 1000
    python benchmarks/serving.py vllm --data textbooks.parquet --tokens 4000 --device cuda

`llama.cpp`: the dense cache and a compact one of one document. The figures are the cells and bytes
that llama.cpp allocates for them, the seconds from a cache's file to the first token of an answer
(of the dense one also from the text), and the tokens per second of the answer.

`vllm`: 1, 4, 16 and 64 requests at once over all documents, to servers of the stock checkpoint.
"compact": the documents next to the pages, by the default method (unequal heads). "cells": prompts
with as many more tokens as the documents have slots on average, which are in the prefix cache: the
same number of slots as ordinary cells. "dense": the documents in the prompts and in the prefix
cache. Every number of requests is sent twice, and the second time counts. Answers of "compact" are
compared with those of transformers, token by token. `--device cuda` runs the same on a GPU, with
bfloat16 (answers are then compared, and may differ by rounding).

Documents are cut from the last text of the data. Caches stay in the work folder and are used again.
The records are appended to `records.jsonl` there, or to `--records`.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import torch

import kvcat
from kvcat.compress.documents import document_trace, question_ids
from kvcat.errors import run_script
from kvcat.files import append_jsonl
from kvcat.hub import local_folder
from kvcat.serving import LlamaCpp, export_prefix, read_prefix, widen, write_gguf
from kvcat.text.template import chat_parts

QUESTIONS = [
    "What is this text about?",
    "Name one example from the text.",
    "Which numbers does the text mention?",
    "Summarise the text in one sentence.",
    "What comes first in the text?",
    "What comes last in the text?",
    "Which terms does the text define?",
    "Write a title for the text.",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=["llama.cpp", "vllm"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--work", type=Path, default=Path("out/serving"))
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--head-dim", type=int, default=None)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--supervision", default="reconstruction", help="or self, which is faster")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of vLLM")
    parser.add_argument("--records", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    model, tokenizer = kvcat.load(options.model)
    whole = pd.read_parquet(options.data)["text"].iloc[-1]
    starts = [20_000 + 90_000 * i for i in range(options.documents)]
    texts = {
        f"{options.tokens}-{i}": tokenizer.decode(
            tokenizer.encode(whole[start : start + 10 * options.tokens])[: options.tokens]
        )
        for i, start in enumerate(starts)
    }
    figures = (llama_cpp if options.engine == "llama.cpp" else vllm)(
        options, model, tokenizer, texts
    )
    processor = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    record = {
        "engine": options.engine,
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{len(processor)} x {processor[0] if processor else platform.machine()}",
        "load": os.getloadavg()[0],
        "versions": {
            name: version(name)
            for name in ("kvcat", "torch", "transformers", "xllamacpp")
            if find_spec(name)
        },
        **figures,
    }
    append_jsonl(options.records or options.work / "records.jsonl", record)
    print(json.dumps(record, indent=2))


def compressed(
    options, model, tokenizer, file, text, *, dense=False, supervision="self", budgets="equal"
):
    """A document's compact or dense cache, made once."""
    if not file.exists():
        trace = document_trace(model, tokenizer, text, supervision=supervision, chat=True)
        method = kvcat.Eviction("first") if dense else kvcat.AttentionMatching(budgets=budgets)
        method(trace, keep_ratio=1.0 if dense else options.keep).save(file)
    return kvcat.CompactCache.load(file, model)


def llama_cpp(options, model, tokenizer, texts):
    ((document, text),) = texts.items()
    head_dim = options.head_dim or 72
    gguf = options.work / f"wide{head_dim}.gguf"
    if not gguf.exists():
        write_gguf(widen(model, head_dim), gguf)
    question = question_ids(tokenizer, QUESTIONS[0], chat=True)
    figures = {}
    for name in ("dense", "compact"):
        file = options.work / f"{document}-{name}-{options.keep}.safetensors"
        cache = compressed(options, model, tokenizer, file, text, dense=name == "dense")
        packed = options.work / f"{document}-{name}.prefix"
        export_prefix(cache, model, packed, head_dim=head_dim)
        prefix = read_prefix(packed)
        room = prefix.num_slots + 64 + options.new_tokens
        with closing(LlamaCpp(gguf, num_ctx=room, num_threads=options.threads)) as engine:
            if name == "dense":
                ids = tokenizer.encode(text)[: prefix.num_slots]
                start = time.perf_counter()
                engine.logits(ids)
                figures["seconds to read the text"] = time.perf_counter() - start
            start = time.perf_counter()
            engine.load(read_prefix(packed))
            restored = time.perf_counter()
            logits = engine.logits(question[0].tolist())
            first = time.perf_counter()
            answer = list(engine.generate([int(logits.argmax())], options.new_tokens))
            end = time.perf_counter()
            wanted = kvcat.replay(model, cache, question)[0, -1]
            figures[name] = {
                "tokens": cache.num_tokens,
                "slots": prefix.num_slots,
                "cells": engine.num_ctx,
                "MB in llama.cpp": engine.num_ctx
                * engine.layout.width
                * 2
                * 2
                * prefix.shape[0]
                / 1e6,
                "MB of the file": packed.stat().st_size / 1e6,
                "seconds to restore": restored - start,
                "seconds to the first token": first - start,
                "tokens a second": len(answer) / (end - first),
                "largest difference of a logit": (logits - wanted).abs().max().item(),
            }
    return figures


class Server:
    """A vLLM server during a block; ``usage`` is the largest share of its pages in use."""

    def __init__(self, options, model, max_len, documents=None):
        self.port = 8734
        self.usage = 0.0
        is_cpu = options.device == "cpu"
        command = [options.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--port", self.port, "--served-model-name", "m", "--max-model-len", max_len]
        command += ["--dtype", "float32" if is_cpu else "bfloat16"]
        if is_cpu:
            command += ["--enforce-eager", "--block-size", 32]
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
                "VLLM_CPU_KVCACHE_SPACE": "3",
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
        start = time.perf_counter()
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(self.ask, bodies))
        seconds = time.perf_counter() - start
        firsts = torch.tensor([first for _, first, _ in answers])
        capacity = re.search(r"KV cache size: ([\d,]+) tokens", Path(self.log.name).read_text())
        tokens = int(capacity[1].replace(",", "")) if capacity else 0
        return [made for made, *_ in answers], {
            "seconds": seconds,
            "requests a second": len(bodies) / seconds,
            "tokens a second": sum(len(made) for made, *_ in answers) / seconds,
            "seconds to the first token, median": firsts.median().item(),
            "seconds to the first token, largest": firsts.max().item(),
            "most cells in use": round(self.usage * tokens),
        }


def vllm(options, model, tokenizer, texts):
    folder = options.work / f"documents-{options.tokens}-{options.keep}"
    folder.mkdir(exist_ok=True)
    caches = {
        name: compressed(
            options, model, tokenizer, folder / f"{name}.safetensors", text,
            supervision=options.supervision, budgets="adaptive",
        )
        for name, text in texts.items()
    }  # fmt: skip
    mean_slots = round(sum(cache.mean_slots for cache in caches.values()) / len(caches))
    head, between, tail = chat_parts(tokenizer)
    asked = [
        (list(caches)[i % len(caches)], QUESTIONS[i // len(caches) % 8])
        for i in range(max(options.requests))
    ]
    bodies = {"compact": [], "cells": [], "dense": []}
    for name, question in asked:
        dense = tokenizer.encode(head + texts[name] + between, add_special_tokens=False)
        ids = tokenizer.encode(between + question + tail, add_special_tokens=False)
        bodies["compact"].append({"prompt": question, "kvcat": name})
        bodies["cells"].append({"prompt": dense[:mean_slots] + ids})
        bodies["dense"].append({"prompt": dense + ids})
    for body in (body for of_mode in bodies.values() for body in of_mode):
        body["max_tokens"] = options.new_tokens
    figures = {
        "vllm": engine_version(options),
        "device": options.device,
        "documents": len(caches),
        "tokens": options.tokens,
        "slots": mean_slots,
        "slots of the fullest head": max(cache.max_slots for cache in caches.values()),
    }
    longest = options.tokens + 512
    checkpoint = local_folder(options.model)
    with Server(options, checkpoint, longest, folder) as server:
        figures["compact"] = runs(options, server, bodies["compact"])
        answers, _ = server.load(bodies["compact"][: max(options.requests)])
        loaded = re.search(r"^kvcat:document_bytes\S* (\S+)$", server.read("/metrics"), re.M)
        figures["bytes of the documents in vLLM"] = float(loaded[1])
    figures["bytes of the slots"] = sum(cache.nbytes for cache in caches.values())
    with Server(options, checkpoint, longest) as server:
        figures["cells"] = runs(options, server, bodies["cells"])
        figures["dense"] = runs(options, server, bodies["dense"])
    right = 0
    known = {}
    for (name, question), answer in zip(asked, answers, strict=True):
        if (name, question) not in known:
            inputs = caches[name].inputs(model, question_ids(tokenizer, question, chat=True))
            made = model.generate(
                **inputs,
                max_new_tokens=options.new_tokens,
                min_new_tokens=options.new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            known[name, question] = made[0, inputs["input_ids"].shape[1] :].tolist()
        right += known[name, question] == answer
    figures["answers equal to those of transformers"] = f"{right} of {len(asked)}"
    return figures


def runs(options, server, bodies):
    """Figures of each number of requests at once, when everything that can be held is held."""
    figures = {}
    for count in options.requests:
        server.load(bodies[:count])
        _, figures[str(count)] = server.load(bodies[:count])
    return figures


def engine_version(options):
    """The version of vLLM in the environment of its Python."""
    code = "import importlib.metadata as m\nprint([d.metadata['Name'] + ' ' + d.version for d in "
    code += "m.distributions() if d.metadata['Name'] in ('vllm', 'vllm-cpu')][0])"
    command = [options.python, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    run_script(main)
