"""kvcat serve: OpenAI's client and plain HTTP against a server with a tiny model."""

import http.client
import json
import queue
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_requests import KEY, NAME, get, listening, post

import kvcat
from kvcat.corpus import CorpusSettings, Store, compress_corpus
from kvcat.corpus.manifest import cache_file
from kvcat.settings import Sampling
from tiny import sentences, write_tiny_model

pytest.importorskip("fastapi", reason="kvcat[serve] is not installed")
pytest.importorskip("uvicorn", reason="kvcat[serve] is not installed")

from kvcat.serving.engine import Engine, Question, RecentDocuments, Ticket
from kvcat.serving.server import ServerLimits, make_app

DOCUMENTS = {f"doc/{number}": "".join(sentences(2, seed=number)) for number in range(8)}
LIMITS = ServerLimits(most_bytes=4000, most_tokens=32)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of a server, its engine, the model, and a store of whole documents in a chat
    template."""
    folder = tmp_path_factory.mktemp("server")
    loaded = kvcat.load(write_tiny_model(folder / "model", seed=3, initializer_range=0.5))
    rows = [json.dumps({"id": id, "text": text}) for id, text in DOCUMENTS.items()]
    rows.append(json.dumps({"id": "damaged", "text": "the cat"}))
    (folder / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    settings = CorpusSettings(keep_ratio=1.0, bits="16", chat=True)
    compress_corpus(*loaded, folder / "corpus.jsonl", folder / "store", settings)
    damaged = folder / "store" / cache_file("damaged")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    store = Store(folder / "store")
    engine = Engine(*loaded, store, cache_bytes=60_000, most_waiting=80)
    app = make_app(engine, NAME, limits=LIMITS, api_key=KEY)
    with listening(app) as port:
        yield port, engine, loaded, store
    assert not engine.is_alive


def stock_answer(loaded, document, question, num_tokens):
    """What the model answers in plain transformers with the whole document in its prompt."""
    model, tokenizer = loaded
    messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    out = model.generate(ids, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("num_requests", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_concurrent_requests_get_the_answers_of_plain_transformers(served, num_requests):
    openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed")
    port, _, loaded, _ = served
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
    expected = {
        (id, question): stock_answer(loaded, text, question, 6)
        for id, text in DOCUMENTS.items()
        for question in ("the cat", "a stone finds the")
    }
    assert len(set(expected.values())) > 8
    rounds = range(num_requests // len(expected))
    jobs = [(id, question, index % 2) for index in rounds for id, question in expected]

    def ask(job):
        id, question, is_streamed = job
        answer = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=6,
            stream=bool(is_streamed),
            extra_body={"kvcat": id},
        )
        if not is_streamed:
            return answer.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    with ThreadPoolExecutor(num_requests) as pool:
        answers = list(pool.map(ask, jobs))
    assert len(jobs) == num_requests
    for (id, question, _), answer in zip(jobs, answers, strict=True):
        assert answer == expected[id, question]
    assert [model.id for model in client.models.list()] == [NAME]
    client.close()


def test_usage_counts_the_document_and_streams_report_it_if_wanted(served):
    port, _, (_, tokenizer), store = served
    status, answer = post(port)
    assert status == 200
    usage = answer["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": store.row("doc/0").tokens}
    question = tokenizer("\n\nthe cat</user><assistant>", add_special_tokens=False).input_ids
    assert usage["prompt_tokens"] == store.row("doc/0").tokens + len(question)
    assert usage["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    request = {"model": NAME, "kvcat": ["doc/0"], "stream": True, "temperature": 0}
    request |= {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4}
    request["stream_options"] = {"include_usage": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(request), headers)
    lines = connection.getresponse().read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert json.loads(lines[-3].removeprefix("data: "))["usage"] == usage
    connection.close()


def test_a_stop_text_a_seed_and_top_p_have_an_effect(served):
    port, _, _, _ = served
    text = post(port, max_tokens=12)[1]["choices"][0]["message"]["content"]
    stop = text[3:5]
    answer = post(port, max_tokens=12, stop=[stop])[1]["choices"][0]
    assert answer["message"]["content"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"

    def drawn(**fields):
        return post(port, max_tokens=12, **fields)[1]["choices"][0]["message"]["content"]

    assert drawn(temperature=1, seed=1) == drawn(temperature=1, seed=1)
    assert len({drawn(temperature=1, seed=seed) for seed in range(4)}) > 1
    assert drawn(temperature=1, top_p=1e-6, seed=1) == text


def test_completions_put_one_text_after_the_document(served):
    port, _, loaded, _ = served
    prompt = {"prompt": "the cat", "messages": None}
    status, answer = post(port, path="/v1/completions", max_tokens=6, **prompt)
    assert status == 200
    expected = stock_answer(loaded, DOCUMENTS["doc/0"], "the cat", 6)
    assert answer["choices"][0]["text"] == expected
    status, answer = post(port, path="/v1/completions", messages=None, prompt=["a"])
    assert (status, answer["error"]["message"]) == (400, "prompt must be one text")


def test_health_needs_no_key_and_metrics_count(served):
    port, engine, _, _ = served
    assert get(port, "/health", key="")[0] == 200
    assert get(port, "/metrics", key="")[0] == 401
    before = engine.num_answers
    post(port)
    status, text = get(port, "/metrics")
    assert status == 200
    assert f"kvcat_answers_total {before + 1}\n" in text
    assert f"kvcat_documents {len(DOCUMENTS) + 1}\n" in text


def test_memory_holds_the_documents_that_were_used_last_within_its_bytes(served):
    _, _, loaded, store = served
    caches = {id: store[id] for id in DOCUMENTS}
    ids = sorted(DOCUMENTS, key=lambda id: caches[id].nbytes)
    most = sum(caches[id].nbytes for id in ids[-3:])
    documents = RecentDocuments(store, most, loaded[0])

    def is_read(id):
        num_loads = documents.num_loads
        documents.find([id])
        assert documents.recent.num_bytes <= most
        return documents.num_loads > num_loads

    first, second, third, fourth = ids[-4:]
    assert [is_read(id) for id in (second, third, fourth)] == [True, True, True]
    assert documents.recent.num_bytes == most
    assert not is_read(second)
    assert is_read(first)  # replaces the third, which was not used for longest
    assert [is_read(id) for id in (second, fourth, first)] == [False, False, False]
    assert is_read(third)
    assert documents.recent.num_hits == 4
    small = RecentDocuments(store, 10, loaded[0])
    small.find([first])
    assert small.recent.num_bytes == 0


def test_an_answer_for_which_nobody_waits_ends_early(served):
    _, _, loaded, store = served
    engine = Engine(*loaded, store, cache_bytes=10**6, most_waiting=4)
    events = queue.Queue()
    question = Question(("doc/1",), "the cat", False, Sampling(max_new_tokens=4))
    for _ in range(8):  # more than may wait
        left = Ticket(question, events.put)
        engine.submit(left)
        left.cancel()

    def leave(event):
        ticket.cancel()
        events.put(event)

    sampling = Sampling(max_new_tokens=100)
    ticket = Ticket(Question(("doc/0",), "the cat", False, sampling), leave)
    engine.submit(ticket)
    events_of_answer = [events.get(timeout=30)]
    while isinstance(events_of_answer[-1], str):
        events_of_answer.append(events.get(timeout=30))
    result, _ = events_of_answer[-1]
    assert result.finish_reason == "cancelled"
    assert len(result.ids) < 100
    engine.close()


def test_an_answer_of_no_named_length_ends_where_the_windows_of_the_cache_do(tmp_path):
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    windows["layer_types"] = ["sliding_attention"] * 2
    loaded = kvcat.load(write_tiny_model(tmp_path / "model", seed=3, **windows))
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "doc/0", "text": "the cat"}) + "\n")
    settings = CorpusSettings(keep_ratio=0.5, method="h2o", supervision="self", chat=True)
    compress_corpus(*loaded, tmp_path / "corpus.jsonl", tmp_path / "store", settings)
    engine = Engine(*loaded, Store(tmp_path / "store"), cache_bytes=10**6, most_waiting=4)
    limits = ServerLimits(most_bytes=4000, most_tokens=60)
    with listening(make_app(engine, NAME, limits=limits, api_key=KEY)) as port:
        status, answer = post(port, max_tokens=None)
        assert status == 200
        assert answer["usage"]["total_tokens"] == 64
        assert answer["choices"][0]["finish_reason"] == "length"
        status, answer = post(port, max_tokens=60)
        assert status == 400
        assert "exceed the 64 for which" in answer["error"]["message"]
