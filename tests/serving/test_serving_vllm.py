"""vLLM on a CPU answers from compact caches as kvcat does; one server for all tests (``make
test-vllm``)."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from evicted_caches import evicted, ids, make_model, ragged

import kvcat
from kvcat.cache import CacheRecord
from kvcat.models import save
from kvcat.serving import chat_ids, export_prefix, prompt_ids, read_prefix, request_fields, widen
from tiny import byte_tokenizer

pytest.importorskip("vllm", reason="needs vLLM (make test-vllm)")
pytestmark = pytest.mark.filterwarnings("ignore")
KEY = "secret"
NEW = 8
WIDE = 32
QUESTIONS = ["the cat sees", "a small tree", "then it was old"]


class World:
    """A model, its caches in a folder, and a server on its widened checkpoint."""

    def __init__(self, folder):
        self.folder = folder / "caches"
        self.tokenizer = byte_tokenizer()
        self.folder.mkdir()
        sizes = {
            "hidden_size": 64,
            "vocab_size": len(self.tokenizer),
            "max_position_embeddings": 512,
        }
        self.model = make_model("qwen2", sizes)
        save(widen(self.model, WIDE), self.tokenizer, folder / "wide")
        self.caches = {
            "heads": ragged(self.cache(1, 70)),
            "layers": self.cache(2, (40, 9)),
            "short": self.cache(3, 7),
            "deep": evicted(self.model, ids(1, 120), (100, 9), log_bias=True),
            "chat": replace(self.cache(4, 33), record=CacheRecord(chat=True)),
            "block": self.cache(5, 64),
        }
        for number, length in enumerate((20, 24, 30)):
            document = kvcat.trace(self.model, ids(1, length, seed=number), supervision="self")
            self.caches[f"doc{number}"] = kvcat.AttentionMatching()(document, num_slots=7)
        for name, cache in self.caches.items():
            self.put(name, cache)
        other = make_model(
            "qwen2", {**sizes, "rope_parameters": {"rope_theta": 5e3, "rope_type": "default"}}
        )
        export_prefix(evicted(other, ids(1, 90)), other, self.folder / "foreign", head_dim=WIDE)
        export_prefix(self.caches["short"], self.model, self.folder / "narrow", head_dim=20)
        good = (self.folder / "short").read_bytes()
        (self.folder / "damaged").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        (folder / "outside").write_bytes(good)
        (self.folder / "link").symlink_to(folder / "outside")
        with socket.socket() as free:
            free.bind(("", 0))
            self.port = free.getsockname()[1]
        self.log = folder / "log"
        self.start()

    def start(self, *options):
        """Start the server, and wait until it answers."""
        transfer = {
            "kv_connector": "CompactCacheConnector",
            "kv_connector_module_path": "kvcat.serving.vllm",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {"caches": str(self.folder), "cache_mb": 1},
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self.folder.parent / "wide", "--served-model-name", "m"]
        command += ["--kv-transfer-config", json.dumps(transfer), "--port", self.port]
        command += ["--middleware", "kvcat.serving.vllm.compact_caches", "--dtype", "float32"]
        command += ["--block-size", 32, "--enforce-eager", "--api-key", KEY, "--max-model-len", 256]
        quiet = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        with self.log.open("w") as log:
            self.server = subprocess.Popen(
                [str(x) for x in (*command, *options)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **quiet, "HF_HUB_OFFLINE": "1"},
            )
        end = time.monotonic() + 1800  # a busy machine is slow
        while (
            self.server.poll() is None
            and time.monotonic() < end
            and self.post("/health", None)[0] != 200
        ):
            time.sleep(1)
        assert self.post("/health", None)[0] == 200, self.log.read_text()[-3000:]

    def kill(self):
        """Kill the server's processes as kill -9 does, and wait for their end."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait(60)
        assert self.post("/health", None)[0] == 0

    def cache(self, seed, slots):
        return evicted(self.model, ids(1, 90, seed=seed), slots, log_bias=True)

    def put(self, name, cache):
        export_prefix(cache, self.model, self.folder / name, head_dim=WIDE)

    def post(self, path, body, key=KEY):
        """Status and reply."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"http://localhost:{self.port}{path}", data, headers)
            with urllib.request.urlopen(request, timeout=900) as reply:
                return reply.status, json.loads(reply.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def ask(self, prompt, name=None, path="/v1/completions", **options):
        """Token ids of the answer, or status and error."""
        body = {
            "model": "m",
            "max_tokens": NEW,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **options,
        }
        body["messages" if "chat" in path else "prompt"] = prompt
        if name is not None:
            body["kv_transfer_params"] = {"kvcat": name}
        status, reply = self.post(path, body)
        return reply["choices"][0]["token_ids"] if status == 200 else (status, reply)

    def wanted(self, tokens, name=None, num_new=NEW):
        """The greedy answer of transformers with kvcat."""
        tokens = torch.tensor([tokens])
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        inputs = inputs if name is None else self.caches[name].inputs(self.model, tokens)
        made = self.model.generate(
            **inputs, max_new_tokens=num_new, do_sample=False, pad_token_id=0
        )
        return made[0, tokens.shape[1] :].tolist()

    def tokens(self, text, name=None):
        return prompt_ids(self.tokenizer, text, chat=name == "chat")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    made = World(tmp_path_factory.mktemp("vllm"))
    yield made
    made.kill()


def test_requests_with_different_documents_and_with_none_in_one_batch_are_answered_as_by_kvcat(
    world,
):
    asked = [(text, name) for name in (*world.caches, None) for text in QUESTIONS] * 2
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: world.ask(*one), asked))
    for (text, name), answer in zip(asked, answers, strict=True):
        assert answer == world.wanted(world.tokens(text, name), name), (text, name)
    assert len({tuple(answer) for answer in answers}) > len(QUESTIONS)


def test_a_conversation_continues_in_the_turn_that_the_document_opens(world):
    messages = [{"role": "user", "content": "the cat"}]
    answer = world.ask(messages, "chat", "/v1/chat/completions")
    assert answer == world.wanted(world.tokens("the cat", "chat"), "chat")
    messages += [{"role": "assistant", "content": "a dog"}, {"role": "user", "content": "a tree"}]
    wanted = world.wanted(chat_ids(world.tokenizer, messages, chat=True), "chat")
    assert world.ask(messages, "chat", "/v1/chat/completions") == wanted
    assert world.ask(messages[1:], "chat", "/v1/chat/completions")[0] == 400
    assert "without --chat" in world.ask(messages, "short", "/v1/chat/completions")[1]
    assert (
        world.post("/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 2})[0]
        == 200
    )


def test_wrong_caches_give_their_request_an_error_and_leave_the_server_up(world):
    good = world.ask("the cat", "heads")
    for name, message in {
        "gone": "no cache 'gone'",
        "foreign": "belongs to another model",
        "damaged": "corrupt",
        "link": "no cache",
        "narrow": "pack it with --head-dim 32",
        "../outside": "is no name",
    }.items():
        status, reply = world.ask("the cat", name)
        assert status == 400
        assert message in reply
        assert (
            world.post(
                "/v1/completions", {"prompt": "a", "kv_transfer_params": {"kvcat": name}}, "no"
            )[0]
            == 401
        )
        # the middleware does not handle this route: the connector itself rejects it
        assert world.ask(world.tokens("the cat"), name, "/invocations")[0] == 500
    assert world.ask(["the cat", "a dog"], "heads")[0] == 400
    assert world.ask("", "heads")[0] == 400
    assert world.ask("the cat", "heads", prompt_logprobs=1)[0] == 500
    assert world.ask("the cat " * 100, "heads")[0] == 400
    assert world.ask("the cat", "heads") == good == world.wanted(world.tokens("the cat"), "heads")


def test_nothing_reaches_a_document_or_its_prefix_cache_but_a_request_that_names_it(world):
    question = world.tokens("a dog")
    prefix = read_prefix(world.folder / "block")
    fields = request_fields(prefix, "block", question)
    prompt = fields["prompt"]
    salt = fields["cache_salt"]
    wanted = world.wanted(question, "block")
    plain = world.wanted(prompt)
    assert wanted != plain
    assert world.ask(prompt, "block", "/invocations", cache_salt=salt) == wanted
    assert world.ask(prompt, None, "/invocations") == plain
    for wrong in (
        {"prompt": prompt, "cache_salt": salt},
        {"prompt": prompt, "name": "block"},
        {"prompt": prompt, "name": "short", "cache_salt": salt},
        {"prompt": prompt[: prefix.num_slots], "name": "block", "cache_salt": salt},
        {"prompt": [5, *prompt[1:]], "name": "block", "cache_salt": salt},
        {"prompt": [5], "name": "block", "cache_salt": salt},
    ):
        assert world.ask(path="/invocations", **wrong)[0] == 500, wrong
    assert world.ask(prompt, "block", "/invocations", cache_salt=salt) == wanted
    assert world.ask("a dog", "block", cache_salt="mine") == wanted
    assert world.ask(prompt, None, "/invocations") == plain


def test_a_request_with_several_caches_is_answered_as_by_kvcat_compose(world):
    names = ["doc1", "doc0", "doc2"]
    composed = kvcat.compose(world.model, [world.caches[name] for name in names], seam_tokens=0)
    world.caches["composed"] = composed
    answers = {text: world.ask(text, names) for text in QUESTIONS}
    assert answers == {text: world.wanted(world.tokens(text), "composed") for text in QUESTIONS}
    del world.caches["composed"]
    assert world.ask(QUESTIONS[0], names[::-1]) != answers[QUESTIONS[0]]
    assert "document 2 opens a turn" in world.ask("the cat", ["doc0", "chat"])[1]
    assert "no cache 'gone'" in world.ask("the cat", ["doc0", "gone"])[1]


def test_a_cache_that_is_damaged_while_it_is_served_fails_its_requests_alone(world):
    good = (world.folder / "doc0").read_bytes()
    wanted = {name: world.wanted(world.tokens("a dog"), name) for name in ("doc0", "doc1", "heads")}
    assert world.ask("a dog", "doc0") == wanted["doc0"]
    (world.folder / "doc0").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    asked = ["doc0", "doc1", "heads", None] * 4
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda name: world.ask("a dog", name), asked))
    for name, answer in zip(asked, answers, strict=True):
        if name == "doc0":
            assert answer[0] == 400
            assert "corrupt" in answer[1]
        else:
            assert answer == wanted.get(name, world.wanted(world.tokens("a dog"))), name
    (world.folder / "doc0").write_bytes(good)
    assert world.ask("a dog", "doc0") == wanted["doc0"]


def test_a_file_that_changes_between_scheduler_and_worker_fails_the_blocks_that_it_was_for(world):
    from kvcat.serving import vllm as room

    connector = room.CompactCacheConnector.__new__(room.CompactCacheConnector)
    connector._failed_requests = set()
    connector._invalid_blocks = set()
    connector._written_requests = set()
    connector._states = room.RecentlyUsed(0, len)
    prefix = replace(read_prefix(world.folder / "short"), digest="another")
    places = [room.cells_of([3, 4], 0, 7, 32)]
    load = room._Load("changed", prefix, places, [3, 4], is_awaited=False)
    connector._connector_metadata = room._Step([load], {"r"})
    connector.start_load_kv(SimpleNamespace(no_compile_layers={}))
    assert connector.get_block_ids_with_load_errors() == {3, 4}
    assert connector.get_block_ids_with_load_errors() == set()
    results = connector.get_transfer_results(set())
    assert results.failed_recving == results.finished_recving == {"r"}


def test_a_killed_server_answers_again_after_its_restart_with_short_layers_in_a_window(world):
    """The second layer of "layers" and "deep" has 9 slots: with the text after them they fit into
    the window of 32, outside of which "deep" has two blocks that vLLM does not hold."""
    world.kill()
    kinds = ["full_attention", "sliding_attention"]
    world.start("--hf-overrides", json.dumps({"layer_types": kinds, "sliding_window": 32}))
    for _ in range(2):  # the second time from vLLM's prefix cache
        for text in QUESTIONS:
            for name in ("layers", "short", "deep", "doc1"):
                assert world.ask(text, name) == world.wanted(world.tokens(text), name), (text, name)
    assert world.ask("the cat", "heads")[0] == 500
    assert world.ask("the cat", ["doc0", "doc1"])[0] == 500
    assert "window of 32 tokens, 70 of them" in world.log.read_text()
    plain = world.tokens("the cat sees")
    assert world.ask(plain) == world.wanted(plain)
    assert world.ask([*plain] * 8)[0] == 500
    num_text = len(world.tokens("the cat"))
    most = 32 - 9 - num_text
    filled = world.ask("the cat", "layers", max_tokens=most)
    assert filled == world.wanted(world.tokens("the cat"), "layers", most)
    assert world.ask("the cat", "layers", max_tokens=most + 1)[0] == 500
