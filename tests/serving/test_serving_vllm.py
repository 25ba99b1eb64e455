"""vLLM on a CPU answers from compact documents next to its pages as kvcat does; one server for all
tests (``make test-vllm``), another with two workers for the slow one (``make test-vllm-more``)."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from evicted_caches import evicted, ids, make_model, ragged

import kvcat
from kvcat.cache import CacheRecord
from kvcat.corpus import CorpusSettings, Store, compress_corpus
from kvcat.models import save
from kvcat.serving import chat_ids, prompt_ids
from tiny import byte_tokenizer, refusal

pytest.importorskip("vllm", reason="needs vLLM (make test-vllm)")
pytestmark = pytest.mark.filterwarnings("ignore")
KEY = "secret"
NEW = 8
QUESTIONS = ["the cat sees", "a small tree", "then it was old"]
LONG = "the river and the stone house of the old red cat that a small dog finds and likes " * 2
SIZES = {"hidden_size": 128, "max_position_embeddings": 512, "num_hidden_layers": 3}


class World:
    """A model, a folder for documents, and a server."""

    def __init__(self, folder, **sizes):
        self.home = folder
        self.folder = folder / "documents"
        self.folder.mkdir()
        self.tokenizer = byte_tokenizer()
        self.sizes = {**SIZES, "vocab_size": len(self.tokenizer), **sizes}
        save(make_model("qwen2", self.sizes), self.tokenizer, folder / "model")
        self.model = kvcat.load(folder / "model")[0]
        with socket.socket() as free:
            free.bind(("", 0))
            self.port = free.getsockname()[1]
        self.log = folder / "log"

    def add_documents(self):
        """Documents of many kinds, and files that are none."""
        trace = kvcat.trace(self.model, ids(1, 120, seed=1), supervision="self")
        fitted = kvcat.AttentionMatching()(trace, num_slots=13)  # heads of unequal size
        assert not fitted.is_uniform
        self.caches = {
            "fitted": fitted,
            "bits8": kvcat.AttentionMatching(bits=8)(trace, num_slots=13),
            "bits4": kvcat.AttentionMatching(bits=4)(trace, num_slots=13),
            "ragged": ragged(self.cache(1, 70)),
            "layers": self.cache(2, (40, 9, 3)),
            "unbiased": evicted(self.model, ids(1, 90, seed=9), 12),
            "chat": replace(self.cache(4, 33), record=CacheRecord(chat=True)),
            "long": evicted(self.model, ids(1, 300, seed=6), 10),
        }
        for number, length in enumerate((20, 24, 30)):
            document = kvcat.trace(self.model, ids(1, length, seed=number), supervision="self")
            self.caches[f"doc{number}"] = kvcat.AttentionMatching()(document, num_slots=7)
        for name, cache in self.caches.items():
            cache.save(self.folder / f"{name}.safetensors")
        theta = {"rope_theta": 5e3, "rope_type": "default"}
        other = make_model("qwen2", {**self.sizes, "rope_parameters": theta})
        evicted(other, ids(1, 90)).save(self.folder / "foreign.safetensors")
        self.cache(5, 88).save(self.folder / "large.safetensors")
        evicted(self.model, ids(2, 90), 5).save(self.folder / "two.safetensors")
        good = (self.folder / "doc0.safetensors").read_bytes()
        (self.folder / "damaged").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        (self.home / "outside").write_bytes(good)
        (self.folder / "link").symlink_to(self.home / "outside")

    def start(self, *options, cache_mb=0.13, documents=None, pages_gb="1"):
        """Start the server, of the folder or of other documents, and wait until it answers.

        pages_gb: None: vLLM measures how much memory is left.
        """
        transfer = {
            "kv_connector": "kvcat",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {
                "documents": str(documents or self.folder), "cache_mb": cache_mb,
            },
        }  # fmt: skip
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self.home / "model", "--served-model-name", "m"]
        command += ["--kv-transfer-config", json.dumps(transfer), "--port", self.port]
        command += ["--block-size", 32, "--enforce-eager", "--api-key", KEY, "--max-model-len", 256]
        command += ["--dtype", "float32", *options]
        quiet = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if pages_gb is not None:
            quiet["VLLM_CPU_KVCACHE_SPACE"] = pages_gb
        with self.log.open("w") as log:
            self.server = subprocess.Popen(
                [str(x) for x in command],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **quiet, "HF_HUB_OFFLINE": "1"},
            )
        end = time.monotonic() + 1800  # a busy machine is slow
        while self.server.poll() is None and time.monotonic() < end:
            if self.post("/health", None)[0] == 200:
                return
            time.sleep(1)
        raise AssertionError(self.log.read_text()[-3000:])

    def kill(self):
        """Kill the server's processes as kill -9 does, and wait for their end."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait(60)
        assert self.post("/health", None)[0] == 0

    def memory(self, kind="RssAnon"):
        """Bytes of memory of every process, by its number; those of no file, or another kind."""
        held = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                group = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[2])
                status = (folder / "status").read_text()
            except OSError:
                continue  # it has ended
            if group == self.server.pid:
                held[folder.name] = 1024 * int(re.search(rf"{kind}:\s*(\d+)", status)[1])
        return held

    def cache(self, seed, slots):
        return evicted(self.model, ids(1, 90, seed=seed), slots, log_bias=True)

    def post(self, path, body, key=KEY):
        """Status and reply."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"http://localhost:{self.port}{path}", data, headers)
            with urllib.request.urlopen(request, timeout=900) as reply:
                text = reply.read().decode()
                return reply.status, json.loads(text) if text.startswith("{") else text
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def body(self, prompt, name, path, options):
        """The fields of a request."""
        body = {
            "model": "m",
            "max_tokens": NEW,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **options,
        }
        body["messages" if "chat" in path else "prompt"] = prompt
        return body if name is None else body | {"kvcat": name}

    def choices(self, prompt, name=None, path="/v1/completions", **options):
        """The choices of a reply, or status and error."""
        status, reply = self.post(path, self.body(prompt, name, path, options))
        return reply["choices"] if status == 200 and "choices" in reply else (status, reply)

    def ask(self, *args, **options):
        """Token ids of the answer, or status and error."""
        choices = self.choices(*args, **options)
        return choices[0]["token_ids"] if isinstance(choices, list) else choices

    def stream(self, prompt, name=None, path="/v1/completions", *, leave_after=None, **options):
        """Token ids of a streamed answer; of those until the client leaves with so many or more."""
        body = {**self.body(prompt, name, path, options), "stream": True}
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(
            f"http://localhost:{self.port}{path}", json.dumps(body).encode(), headers
        )
        made = []
        with urllib.request.urlopen(request, timeout=900) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    made += json.loads(line[6:])["choices"][0].get("token_ids") or []
                    if leave_after is not None and len(made) >= leave_after:
                        break
        return made

    def ask_all(self, asked):
        """The answers to many requests at once: text, document and perhaps options of each."""

        def ask(one):
            text, name, *options = one
            return self.ask(text, name, **(options[0] if options else {}))

        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(ask, asked))

    def wanted(self, tokens, name=None, num_new=NEW, **options):
        """The greedy answer of transformers with kvcat."""
        cache = self.caches[name] if isinstance(name, str) else name
        tokens = torch.tensor([tokens])
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        inputs = inputs if cache is None else cache.inputs(self.model, tokens)
        options |= {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        made = self.model.generate(**inputs, max_new_tokens=num_new, **options)
        return made[0, tokens.shape[1] :].tolist()

    def tokens(self, text, name=None):
        return prompt_ids(self.tokenizer, text, chat=name == "chat")

    def answer(self, text, name=None, num_new=NEW):
        """What kvcat answers to a text."""
        return self.wanted(self.tokens(text, name), name, num_new)

    def gauges(self):
        """The figures of documents in /metrics."""
        text = self.post("/metrics", None)[1]
        return {
            name: float(value)
            for name, value in re.findall(r"^kvcat:(\w+)\{.*\} (\S+)$", text, re.MULTILINE)
        }


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A server with few pages and small steps: requests are preempted, and prompts come in
    chunks."""
    made = World(tmp_path_factory.mktemp("vllm"))
    made.add_documents()
    made.start(
        "--max-num-batched-tokens", 48, "--max-num-seqs", 24, "--num-gpu-blocks-override", 60,
        "--root-path", "/api",
    )  # fmt: skip
    yield made
    made.kill()


def test_requests_with_different_documents_and_with_none_in_one_batch_are_answered_as_by_kvcat(
    world,
):
    asked = [(text, name) for name in (*world.caches, None) for text in (*QUESTIONS, LONG)] * 2
    answers = world.ask_all(asked)
    for (text, name), answer in zip(asked, answers, strict=True):
        assert answer == world.answer(text, name), (text, name)
    assert len({tuple(answer) for answer in answers}) > len(QUESTIONS)


def test_requests_that_were_preempted_are_computed_again_with_their_documents(world):
    asked = [(LONG, name, {"max_tokens": 90}) for name in ("doc0", "doc1", "fitted", None)] * 6
    answers = world.ask_all(asked)
    for (text, name, _), answer in zip(asked, answers, strict=True):
        assert answer == world.answer(text, name, 90), name
    metrics = world.post("/metrics", None)[1]
    assert float(re.search(r"^vllm:num_preemptions_total\S* (\S+)$", metrics, re.MULTILINE)[1]) > 0


def test_a_request_that_fails_while_all_pages_are_in_use_ends_alone(world):
    prompts = [ids(192, seed=seed).tolist() for seed in range(40, 49)]  # more blocks than there are
    asked = [(prompt, name, {"max_tokens": 30}) for prompt, name in zip(
        prompts, ("doc0", "fitted", None) * 3, strict=True
    )]  # fmt: skip
    # a number as a text is left to vLLM, so that the scheduler finds this answer too long
    too_long = (ids(200, seed=9).tolist(), "long", {"max_tokens": "30"})
    answers = world.ask_all([*asked, *[too_long] * 10])
    assert {answer[0] for answer in answers[len(asked) :]} == {500}
    for (prompt, name, _), answer in zip(asked, answers, strict=False):
        assert answer == world.wanted(prompt, name, 30)


def test_a_conversation_continues_in_the_turn_that_the_document_opens(world):
    chat = "/v1/chat/completions"
    messages = [{"role": "user", "content": "the cat"}]
    assert world.ask(messages, "chat", chat) == world.answer("the cat", "chat")
    messages += [{"role": "assistant", "content": "a dog"}, {"role": "user", "content": "a tree"}]
    wanted = world.wanted(chat_ids(world.tokenizer, messages, chat=True), "chat")
    assert world.ask(messages, "chat", chat) == wanted
    assert world.ask(messages[1:], "chat", chat)[0] == 400
    assert "without --chat" in world.ask(messages, "ragged", chat)[1]
    for field, value in {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "echo": True,
        "add_generation_prompt": False,
        "use_beam_search": True,
        "truncate_prompt_tokens": 9,
    }.items():
        assert field in world.ask(messages, "chat", chat, **{field: value})[1]
        if field in ("use_beam_search", "truncate_prompt_tokens"):
            assert field in world.ask("the cat", "ragged", **{field: value})[1]
    assert isinstance(world.ask(messages, None, chat), list)


def test_the_openai_client_reads_the_same_answer_in_pieces_and_whole(world):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://localhost:{world.port}/v1", api_key=KEY)
    messages = [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]
    fields = {
        "model": "m",
        "messages": messages,
        "max_completion_tokens": NEW,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "extra_body": {
            "kvcat": "chat", "top_k": 1, "ignore_eos": True, "return_token_ids": True,
        },
    }  # fmt: skip
    whole = client.chat.completions.create(**fields)
    wanted = world.answer("the cat", "chat")
    assert [choice.token_ids for choice in whole.choices] == [wanted] * 2
    pieces = {0: [], 1: []}
    scores = {0: [], 1: []}
    usage = None
    for chunk in client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            pieces[choice.index].append(choice.delta.content or "")
            if choice.logprobs is not None:
                scores[choice.index] += [token.logprob for token in choice.logprobs.content]
    for choice in whole.choices:
        assert "".join(pieces[choice.index]) == choice.message.content
        of_tokens = [token.logprob for token in choice.logprobs.content]
        assert scores[choice.index] == pytest.approx(of_tokens, abs=1e-4)
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        len(world.tokens("the cat", "chat")), 2 * NEW,
    )  # fmt: skip
    text = client.completions.create(
        model="m", prompt="the cat", max_tokens=NEW, temperature=0, logprobs=1, echo=True,
        extra_body={"kvcat": "fitted", "ignore_eos": True},
    )  # fmt: skip
    answer = world.tokenizer.decode(world.answer("the cat", "fitted"))
    half = "\ufffd"  # of a character that ends after the answer
    assert text.choices[0].text.rstrip(half) == f"the cat{answer}".rstrip(half)
    assert len(text.choices[0].logprobs.tokens) == len(world.tokens("the cat")) + NEW
    with pytest.raises(openai.BadRequestError, match="no document 'gone'"):
        client.chat.completions.create(**{**fields, "extra_body": {"kvcat": "gone"}})


def test_an_answer_is_as_long_as_asked_for_or_as_the_model_allows(world):
    chat = "/v1/chat/completions"
    messages = [{"role": "user", "content": "the cat"}]
    assert len(world.ask(messages, "chat", chat, max_tokens=5.0)) == 5
    # no more than the 256 of --max-model-len
    whole = world.ask(messages, "chat", chat, max_tokens=None)
    assert len(whole) == 256 - len(world.tokens("the cat", "chat"))
    assert whole[:NEW] == world.answer("the cat", "chat")
    # 512 positions, of which the document has 300
    near_end = ids(205, seed=1).tolist()
    assert world.ask(near_end, "long", max_tokens=None) == world.wanted(near_end, "long", 7)
    body = {"model": "m", "prompt": "the cat", "kvcat": "long", "ignore_eos": True}
    assert world.post("/v1/completions", body)[1]["usage"]["completion_tokens"] == 16
    assert "exceed the 512" in world.ask(near_end, "long")[1]
    assert "maximum context length" in world.ask(near_end * 2, "doc0")[1]


def test_logprobs_of_a_prompt_in_the_prefix_cache_wait_for_their_document(world):
    prompt = ids(70, seed=2).tolist()
    first = world.choices(prompt, "layers", prompt_logprobs=0)
    world.ask_all([("the cat", name) for name in ("fitted", "bits8", "bits4", "ragged", "chat")])
    loads = world.gauges()["document_loads"]
    second = world.choices(prompt, "layers", prompt_logprobs=0)
    assert world.gauges()["document_loads"] == loads + 1
    assert second[0]["token_ids"] == first[0]["token_ids"] == world.wanted(prompt, "layers")
    assert len(second[0]["prompt_logprobs"]) == 70


def test_a_client_that_leaves_gives_back_its_documents(world):
    names = ["fitted", "ragged", "bits8", "bits4"] * 3
    with ThreadPoolExecutor(len(names)) as pool:
        left = pool.map(
            lambda name: world.stream("the cat", name, leave_after=2, max_tokens=240), names
        )
        for name, made in zip(names, left, strict=True):
            assert made == world.answer("the cat", name, len(made))
            assert len(made) < 240
    # together these need more than the whole pool
    asked = [("a dog", name) for name in world.caches]
    for (text, name), answer in zip(asked, world.ask_all(asked), strict=True):
        assert answer == world.answer(text, name), name


def test_samples_streams_log_probabilities_and_structured_answers_are_vllms(world):
    text = "the cat sees"
    tokens = world.tokens(text)
    logits = world.caches["fitted"].inputs(world.model, torch.tensor([tokens]))
    scores = world.model(**logits).logits[0].log_softmax(-1)
    first = world.choices(text, "fitted", logprobs=3)[0]["logprobs"]["token_logprobs"][0]
    assert abs(first - scores[-1].max().item()) < 1e-3
    of_prompt = world.choices(text, "fitted", prompt_logprobs=0)[0]["prompt_logprobs"]
    for place, token in enumerate(tokens[1:], start=1):
        entry = of_prompt[place][str(token)]["logprob"]
        assert abs(entry - scores[place - 1, token].item()) < 1e-3
    several = world.choices(text, "fitted", n=3, temperature=1.0, seed=4)
    assert len({tuple(choice["token_ids"]) for choice in several}) > 1
    likeliest = world.choices(text, "fitted", n=3, temperature=1.0, top_k=1)
    greedy = world.answer(text, "fitted")
    assert [choice["token_ids"] for choice in likeliest] == [greedy] * 3
    # penalties count question and answer
    penalised = world.ask(text, "fitted", repetition_penalty=2.0)
    assert penalised == world.wanted(tokens, "fitted", repetition_penalty=2.0) != greedy
    choices = {"structured_outputs": {"choice": ["dog", "tree"]}, "ignore_eos": False}
    limited = world.choices(text, "fitted", **choices)
    assert limited[0]["text"] in ("dog", "tree")
    assert world.stream(text, "fitted") == greedy


def test_wrong_documents_give_their_request_an_error_and_leave_the_server_up(world):
    good = world.ask("the cat", "ragged")
    for name, message in {
        "gone": "no document 'gone'",
        "foreign": "belongs to another model",
        "damaged": "corrupt",
        "link": "no document",
        "two": "holds 2 examples",
        "large": "and cache_mb is 0.13",
        "../outside": "is no name",
        7: "is no name",
    }.items():
        status, reply = world.ask("the cat", name)
        assert status == 400
        assert message in reply
        body = {"prompt": "a", "kvcat": name}
        assert world.post("/v1/completions", body, "no")[0] == 401
        # a request that goes past the middleware is rejected by the connector
        raw = {"kv_transfer_params": {"kvcat": name}, "cache_salt": "kvcat:"}
        tokens = world.tokens("the cat")
        assert world.ask(tokens, None, "/invocations", **raw)[0] in (400, 500)
    assert world.ask(["the cat", "a dog"], "ragged")[0] == 400
    assert world.ask("", "ragged")[0] == 400
    assert "exceed the 512" in world.ask("the cat", "ragged", max_tokens=500)[1]
    assert world.ask("the cat", "ragged", path="/v1/responses")[0] == 400
    assert "no document is named" in world.ask("the cat", cache_salt="kvcat:0")[1]
    assert world.ask("the cat", "ragged", model=[])[0] == 400
    assert world.ask("the cat", "ragged") == good == world.answer("the cat", "ragged")


def test_a_document_that_is_damaged_after_its_check_gives_its_requests_the_reason(world):
    """The check knows the file by its time, size and number, which damage on a disk leaves."""
    file = world.folder / "late.safetensors"
    world.caches["doc0"].save(file)
    assert "exceed the 512" in world.ask("the cat", "late", max_tokens=500)[1]  # it was checked
    whole, status = file.read_bytes(), file.stat()

    def write(content):
        with file.open("r+b") as opened:
            opened.write(content)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    write(whole[:-1] + bytes([whole[-1] ^ 1]))
    for asked in ("late", ["doc1", "late"]):
        reply = world.ask("the cat", asked)
        assert reply[0] == 400
        assert "document 'late': the file is corrupt" in reply[1]
    body = {"model": "m", "prompt": "the cat", "kvcat": "late", "stream": True}
    assert "document 'late': the file is corrupt" in world.post("/v1/completions", body)[1]
    write(whole)
    assert world.ask("the cat", "late") == world.ask("the cat", "doc0")
    file.unlink()


def test_a_documents_blocks_in_the_prefix_cache_are_of_no_other_request(world):
    tokens = world.tokens(LONG)[:70]  # two blocks
    wanted = {name: world.wanted(tokens, name) for name in ("fitted", "ragged", None)}
    assert len({tuple(answer) for answer in wanted.values()}) == 3
    for _ in range(2):
        for name, answer in wanted.items():
            assert world.ask(tokens, name) == answer
    assert world.ask(tokens, "fitted", cache_salt="mine") == wanted["fitted"]
    raw = {"kv_transfer_params": {"kvcat": "fitted"}, "cache_salt": "kvcat:0"}
    assert world.ask(tokens, None, "/invocations", **raw)[0] in (400, 500)


def test_a_request_with_several_documents_is_answered_as_by_kvcat_compose(world):
    names = ["doc1", "doc0", "doc2"]
    composed = kvcat.compose(world.model, [world.caches[name] for name in names], seam_tokens=0)
    answers = {text: world.ask(text, names) for text in QUESTIONS}
    assert answers == {text: world.wanted(world.tokens(text), composed) for text in QUESTIONS}
    assert world.ask(QUESTIONS[0], names[::-1]) != answers[QUESTIONS[0]]
    twice = kvcat.compose(world.model, [world.caches["doc1"]] * 2, seam_tokens=0)
    assert world.ask("the cat", ["doc1", "doc1"]) == world.wanted(world.tokens("the cat"), twice)
    # behind a proxy that leaves its prefix in the path
    path = "/api/v1/completions"
    assert world.ask("the cat", ["doc1"], path) == world.answer("the cat", "doc1")
    assert "document 2 opens a turn" in world.ask("the cat", ["doc0", "chat"])[1]
    assert "no document 'gone'" in world.ask("the cat", ["doc0", "gone"])[1]
    for names in ([], ["doc0"] * 17):
        assert "1 to 16 documents" in world.ask("the cat", names)[1]
    assert "is no name" in world.ask("the cat", ["doc0", None])[1]
    both = world.ask("the cat", ["ragged", "fitted"] * 8)
    assert "and cache_mb is 0.13" in both[1] or "exceed the 512" in both[1]


def test_a_document_that_changes_while_it_is_served_fails_or_answers_as_the_new_one(world):
    file = world.folder / "doc0.safetensors"
    good = file.read_bytes()
    for text in ("a dog", LONG):
        assert world.ask(text, "doc0") == world.answer(text, "doc0")
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    asked = [("a dog", name) for name in ("doc0", "doc1", "ragged", None)] * 4
    for (_, name), answer in zip(asked, world.ask_all(asked), strict=True):
        if name == "doc0":
            assert answer[0] == 400
            assert "corrupt" in answer[1]
        else:
            assert answer == world.answer("a dog", name), name
    file.unlink()
    assert "no document 'doc0'" in world.ask("a dog", "doc0")[1]
    shutil.copy(world.folder / "doc1.safetensors", file)
    for text in ("a dog", LONG):  # of the long one, blocks are in the prefix cache
        assert world.ask(text, "doc0") == world.answer(text, "doc1")
    file.write_bytes(good)
    for text in ("a dog", LONG):
        assert world.ask(text, "doc0") == world.answer(text, "doc0")


def test_memory_stays_within_its_bound_and_is_what_the_slots_need(world):
    seen = world.gauges()
    assert seen["document_bytes"] <= seen["document_most_bytes"] == 130_000
    assert seen["document_drops"] > 0
    before = seen["document_loads"]
    world.ask("a dog", "fitted")
    world.ask("a dog", "fitted")
    assert world.gauges()["document_loads"] <= before + 1


def test_a_request_reads_its_document_after_one_with_the_same_beginning_has_ended(world):
    asked = [(LONG, "fitted", {"max_tokens": count}) for count in (60, 3, 9, 3)]
    for (text, name, options), answer in zip(asked, world.ask_all(asked), strict=True):
        assert answer == world.answer(text, name, options["max_tokens"])


def test_64_clients_with_everything_mixed_get_the_answers_of_kvcat(world):
    draw = random.Random(0)
    chat = "/v1/chat/completions"
    pairs = [["doc0", "doc2"], ["chat", "unbiased"], ["doc1", "layers"]]
    joined = {
        " ".join(pair): kvcat.compose(
            world.model, [world.caches[name] for name in pair], seam_tokens=0
        )
        for pair in pairs
    }
    names = [*world.caches, *pairs, None]

    def client(number):
        results = []
        for num_new, name, text in plans[number]:
            options = {"max_tokens": num_new}
            kind = number % 6
            prompt, path = text, "/v1/completions"
            if name == "chat" and kind % 2:
                prompt, path = [{"role": "user", "content": text}], chat
            if kind == 0:
                status, error = world.ask(prompt, ("gone", "damaged", "foreign")[number % 3])
                assert status == 400, error
            if kind == 1:
                made = world.stream(prompt, name, path, leave_after=num_new // 2, **options)
                num_new = len(made)
            elif kind < 4:
                made = world.stream(prompt, name, path, **options)
            else:
                made = world.ask(prompt, name, path, **options)
            results.append((text, name, num_new, made))
        return results

    plans = [
        [
            (draw.randrange(6, 24), draw.choice(names), draw.choice([*QUESTIONS, LONG]))
            for _ in range(2)
        ]
        for _ in range(64)
    ]
    with ThreadPoolExecutor(64) as pool:
        results = [result for of_client in pool.map(client, range(64)) for result in of_client]
    for text, name, num_new, made in results:
        key = " ".join(name) if isinstance(name, list) else name
        tokens = prompt_ids(world.tokenizer, text, chat="chat" in (key or "").split())
        assert made == world.wanted(tokens, joined.get(key, key), num_new), (text, name)
    assert world.post("/health", None)[0] == 200


@pytest.mark.slow
def test_memory_of_the_process_grows_by_the_slots_and_vllm_leaves_room_for_them(tmp_path):
    world = World(tmp_path, max_position_embeddings=4096, num_key_value_heads=4)
    num_bytes = 0
    names = [f"doc{number}" for number in range(16)]
    for number, name in enumerate(names):
        cache = ragged(
            evicted(world.model, ids(1, 3000, seed=number), (2900, 1900, 2400), log_bias=True)
        )
        cache.save(world.folder / name)
        slots = sum(int(layer.counts.sum()) for layer in cache.layers)
        num_bytes += slots * (2 * 32 * 4 + 4)
    evicted(world.model, ids(1, 90), 20).save(world.folder / "small")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    world.start("--gpu-memory-utilization", 2.5e9 / total, cache_mb=400, pages_gb=None)
    try:
        world.ask("the cat", "small")
        # the worker's memory has all pages, and has grown with its first request
        assert 2.5e9 - max(world.memory("VmRSS").values()) > 300e6
        before = world.memory()
        loaded = world.gauges()["document_bytes"]
        for name in names:
            assert len(world.ask("the cat", name)) == NEW
        assert world.gauges()["document_bytes"] - loaded == num_bytes
        grown = sum(world.memory().values()) - sum(before.values())
        assert grown == pytest.approx(num_bytes, rel=0.03)
    finally:
        world.kill()


@pytest.mark.slow
def test_a_killed_server_starts_again_with_two_workers_and_answers_the_same(world):
    world.kill()
    world.start("--tensor-parallel-size", 2, cache_mb=4)
    asked = [(text, name) for name in (*world.caches, None) for text in QUESTIONS]
    for (text, name), answer in zip(asked, world.ask_all(asked), strict=True):
        assert answer == world.answer(text, name), (text, name)
    total = 0
    for cache in world.caches.values():
        per_slot = 2 * 32 * 4 + (4 if cache.has_log_bias else 0)
        total += per_slot * sum(int(layer.counts.sum()) for layer in cache.layers)
    seen = world.gauges()
    assert seen["documents"] == len(world.caches)
    # every worker holds its own head of each layer: half of the bytes, if the heads are equal
    assert total / 2 <= seen["document_bytes"] < total


@pytest.mark.slow
def test_a_store_is_served_and_a_request_with_an_adapter_reads_no_document(world):
    texts = {"books/1": "the cat sees a small dog in the old house", "books/2": "a red tree"}
    rows = [json.dumps({"id": id, "text": text}) for id, text in texts.items()]
    (world.home / "texts.jsonl").write_text("\n".join(rows))
    settings = CorpusSettings(keep_ratio=0.5, chat=True)
    compress_corpus(
        world.model, world.tokenizer, world.home / "texts.jsonl", world.home / "store", settings
    )
    adapter = world.home / "adapter"
    adapter.mkdir()
    facts = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(facts))
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    weights = {}
    for number, layer in enumerate(world.model.model.layers):
        num_rows, num_columns = layer.self_attn.q_proj.weight.shape
        weights[name.format(number, "A")] = torch.randn(8, num_columns)
        weights[name.format(number, "B")] = torch.randn(num_rows, 8)
    safetensors.torch.save_file(weights, adapter / "adapter_model.safetensors")
    world.kill()
    world.start(
        "--enable-lora", "--lora-modules", f"adapter={adapter}", documents=world.home / "store"
    )
    store = Store(world.home / "store")
    chat = "/v1/chat/completions"
    for id in texts:
        for question in QUESTIONS:
            wanted = world.wanted(prompt_ids(world.tokenizer, question, chat=True), store[id])
            assert world.ask([{"role": "user", "content": question}], id, chat) == wanted
    assert "no document 'books/3'" in world.ask("the cat", "books/3")[1]
    status, message = world.ask("the cat", "books/1", model="adapter")
    assert status == 400
    assert "with a LoRA adapter cannot name one" in message
    adapted = world.ask("the cat sees", None, model="adapter")
    assert world.ask("the cat sees", None) == world.answer("the cat sees") != adapted
    assert len(adapted) == NEW


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logits_soft_cap", 30.0, "soft-capped scores"),
        ("alibi_slopes", [0.5], "ALiBi"),
        ("sinks", torch.ones(1), "attention sinks"),
        ("kv_sharing_target_layer_name", "layers.0", "keys and values of another layer"),
        ("kv_cache_dtype", "fp8_per_token_head", "pages in fp8_per_token_head"),
    ],
)
def test_a_layer_whose_attention_to_documents_would_be_wrong_is_rejected(name, value, message):
    from kvcat.serving.vllm.connector import check_layer
    from kvcat.serving.vllm.cpu import DocumentsImpl

    layer = object.__new__(DocumentsImpl)
    layer.kv_cache_dtype = "auto"
    check_layer("layers.1", layer)
    setattr(layer, name, value)
    assert f"layer layers.1: documents are not served with {message}" in refusal(
        check_layer, "layers.1", layer
    )


@pytest.mark.parametrize("pages", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_pages_in_fp8_are_rejected_on_a_gpu_and_not_on_a_cpu(pages, monkeypatch):
    from vllm.v1.attention.backends import fa_utils

    from kvcat.serving.vllm import cpu
    from kvcat.serving.vllm.connector import check_layer

    # so that the module is imported where there is no GPU
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", None, raising=False)
    from kvcat.serving.vllm import cuda

    on_cpu, on_gpu = object.__new__(cpu.DocumentsImpl), object.__new__(cuda.DocumentsImpl)
    for layer in (on_cpu, on_gpu):
        layer.kv_cache_dtype = pages
    check_layer("layers.1", on_cpu)
    assert f"documents are not served with pages in {pages}" in refusal(
        check_layer, "layers.1", on_gpu
    )
