"""Documents next to an engine's pages: attention and its merge against plain softmax in float64,
keys before position 0 against transformers' own forward, what workers hold, which names lead to
documents.
"""

import json

import pytest
import torch
from evicted_caches import evicted, ids, make_model, ragged

import kvcat
from kvcat.cache import fingerprint
from kvcat.corpus import CorpusSettings, compress_corpus
from kvcat.corpus.manifest import cache_file
from kvcat.models import capture
from kvcat.serving.document_attention import DocumentLayer, attend_documents
from kvcat.serving.documents import Document, open_documents
from kvcat.serving.placing import Share, num_bytes, place, rotation_model
from kvcat.serving.residents import Orders, Residents
from kvcat.serving.vllm.worker import Worker
from tiny import byte_tokenizer, refusal

GEMMA = {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 4}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {"num_hidden_layers": 4},
    "phi3": {},
    "gemma3_text": {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
LLAMA3 = {
    "rope_parameters": {
        "rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }
}  # fmt: skip
HERE = {"share": Share(), "dtype": torch.float32, "device": torch.device("cpu")}


def draws(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def plain(queries, keys, values, bias, seen, scale):
    """Softmax over everything at once, in float64: one KV head."""
    scores = queries.double() @ keys.double().mT * scale + bias.double()
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values.double()


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("counts", [(5, 5), (1, 12), (7, 3)])
def test_document_and_pages_merged_are_the_softmax_over_both(window, counts):
    draw = draws()
    group, tokens, past, dim, scale = 3, 4, 6, 8, 0.4
    queries = draw(2, tokens, group, dim)
    total = sum(counts)
    layer = DocumentLayer(3 * draw(total, dim), draw(total, dim), 2 * draw(total), counts)
    distance = torch.cat([torch.arange(count, 0, -1) for count in counts])
    if window is not None:
        layer = DocumentLayer(layer.keys, layer.values, layer.log_bias, counts, window - distance)
    positions = torch.arange(past, past + tokens)
    text_keys, text_values = 3 * draw(2, past + tokens, dim), draw(2, past + tokens, dim)
    cells = torch.arange(past + tokens)
    causal = cells <= positions[:, None]
    if window is not None:
        causal &= cells > positions[:, None] - window
    scores = torch.einsum("htgd,hnd->htgn", queries, text_keys) * scale
    scores = scores.masked_fill(~causal[:, None], -torch.inf)
    pages = torch.einsum("htgn,hnd->htgd", scores.softmax(-1), text_values)
    document, mass = attend_documents(queries, [(layer, 0, tokens)], positions, scale=scale)
    share = torch.sigmoid(mass - scores.logsumexp(-1))
    merged = torch.lerp(pages, document, share[..., None])
    start = 0
    for head, count in enumerate(counts):
        slots = slice(start, start + count)
        start += count
        in_window = torch.ones(tokens, count, dtype=torch.bool)
        if window is not None:
            in_window = positions[:, None] + distance[slots] < window
        wanted = plain(
            queries[head].flatten(0, 1),
            torch.cat([layer.keys[slots], text_keys[head]]),
            torch.cat([layer.values[slots], text_values[head]]),
            torch.cat([layer.log_bias[slots], torch.zeros(past + tokens)]),
            torch.cat([in_window, causal], dim=1).repeat_interleave(group, dim=0),
            scale,
        )
        torch.testing.assert_close(merged[head].flatten(0, 1).double(), wanted, atol=1e-5, rtol=0)


def test_a_token_that_sees_no_slot_of_a_document_has_no_attention_to_it():
    draw = draws()
    layer = DocumentLayer(draw(4, 8), draw(4, 8), None, (2, 2), torch.tensor([3, 4, 3, 4]))
    queries = draw(2, 1, 3, 8)
    document, mass = attend_documents(queries, [(layer, 0, 1)], torch.tensor([4]), scale=1.0)
    assert (mass == -torch.inf).all()
    assert (document == 0).all()


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("kind", "options"), [*FAMILIES.items(), ("llama", LLAMA3)], ids=lambda one: str(one)[:12]
)
def test_placed_keys_are_those_of_the_document_at_positions_before_zero(kind, options):
    model = make_model(kind, options)
    tokens = ids(1, 40)
    document = kvcat.trace(model, tokens, supervision="self")
    cache = kvcat.Eviction("first")(document, keep_ratio=1.0)
    placed = place([cache], rotation_model(model.config), **HERE)
    positions = torch.arange(-40, 0).unsqueeze(0)
    past = model(input_ids=tokens, position_ids=positions, use_cache=True).past_key_values
    for layer, held in zip(past.layers, placed, strict=True):
        num_held = held.counts[0]
        keys = held.keys.unflatten(0, (-1, num_held))
        torch.testing.assert_close(keys, layer.keys[0, :, -num_held:], atol=2e-4, rtol=1e-3)
        values = held.values.unflatten(0, (-1, num_held))
        torch.testing.assert_close(values, layer.values[0, :, -num_held:], atol=2e-4, rtol=1e-3)
    if kind == "gemma3_text":
        kept = placed[0].counts[0]
        # the last token of the document is one token before the text: a window of 24 leaves it at
        # position 23
        assert placed[0].seen_until[kept - 1] == 23
        assert placed[1].seen_until is None


def test_documents_one_behind_the_other_are_placed_as_compose_joins_them():
    model = make_model("llama")
    documents = [
        kvcat.AttentionMatching()(
            kvcat.trace(model, ids(1, length, seed=length), supervision="self"), num_slots=7
        )
        for length in (20, 31, 26)
    ]
    small = rotation_model(model.config)
    together = place(documents, small, **HERE)
    composed = place([kvcat.compose(model, documents, seam_tokens=0)], small, **HERE)
    for one, other in zip(together, composed, strict=True):
        assert one.counts == other.counts
        torch.testing.assert_close(one.keys, other.keys, atol=1e-5, rtol=0)
        assert torch.equal(one.values, other.values)
        assert torch.equal(one.log_bias, other.log_bias)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_workers_share_the_heads_and_hold_no_more_than_their_slots(bits):
    model = make_model("llama", {"num_key_value_heads": 4})
    trace = kvcat.trace(model, ids(1, 60), supervision="self")
    cache = kvcat.AttentionMatching(bits=bits)(trace, num_slots=9, protect=[(2, 5)])
    small = rotation_model(model.config)
    whole = place([cache], small, **HERE)
    of_workers_placed = [
        place([cache], small, **{**HERE, "share": Share(rank, 2)}) for rank in range(2)
    ]
    for layer, held in enumerate(whole):
        assert held.counts == (
            *of_workers_placed[0][layer].counts,
            *of_workers_placed[1][layer].counts,
        )
        keys = torch.cat([of_worker[layer].keys for of_worker in of_workers_placed])
        assert torch.equal(held.keys, keys)
        for head, values in enumerate(held.values.split(held.counts)):
            assert torch.equal(values[:3], trace.values[layer][0, head, 2:5])
    counts = [layer.counts[0].tolist() for layer in cache.layers]
    options = {"biased": cache.has_log_bias, "size": 2}
    of_workers = [sum(layer.nbytes for layer in held) for held in of_workers_placed]
    assert num_bytes(counts, 8, torch.float32, **options) == max(of_workers)
    assert Share(3, 8).heads(4) == range(1, 2)


def document(name, num_tokens=10):
    return Document((name,), name, num_tokens, ((1,),), False, 99)


def test_the_documents_that_were_not_used_for_longest_make_room_and_none_in_use_does():
    held = Residents(100)

    def load(request, name, size):
        assert not held.ask(request, document(name), size)
        orders = held.take_orders()
        assert [each.digest for each in orders.load] == [name]
        held.on_loaded(name, size)
        assert held.ask(request, document(name), size)
        return orders.drop

    assert load("r1", "a", 40) == ()
    assert load("r2", "b", 40) == ()
    assert held.num_bytes == 80
    held.release("r1")
    held.release("r2")
    assert held.ask("r3", document("a"), 40)  # used last, and in use
    assert load("r4", "c", 50) == ("b",)
    # a large document waits, and no later one takes its room
    assert not held.ask("r5", document("d"), 90)
    assert not held.ask("r6", document("e"), 5)
    assert held.take_orders().load == ()
    held.release("r3")
    assert not held.ask("r5", document("d"), 90)
    held.release("r4")
    assert load("r5", "d", 90) == ("a", "c")
    assert load("r6", "e", 5) == ()
    assert held.num_bytes == 95 <= held.most_bytes
    assert "needs 0.0 MB" in refusal(held.ask, "r7", document("f"), 101)
    held.release("r5")
    held.release("r6")
    assert not held.ask("r8", document("g"), 10)
    assert held.take_orders().drop == ("d",)
    held.on_failed("g", "it is damaged")
    assert "it is damaged" in refusal(held.ask, "r8", document("g"), 10)
    assert held.num_bytes == 5


def test_a_document_is_not_dropped_while_it_is_being_loaded():
    held = Residents(10)
    assert not held.ask("r1", document("a"), 8)
    held.take_orders()
    held.release("r1")
    assert not held.ask("r2", document("b"), 9)
    assert held.take_orders() == Orders()
    held.on_loaded("a", 8)
    assert not held.ask("r2", document("b"), 9)
    orders = held.take_orders()
    assert orders.drop == ("a",)
    held.release("r2")
    assert not held.ask("r3", document("c"), 10)
    held.on_failed("b", "it is damaged")
    assert not held.ask("r3", document("c"), 10)
    assert [each.digest for each in held.take_orders().load] == ["c"]


def test_a_request_that_leaves_while_it_waits_for_room_lets_the_next_one_in():
    held = Residents(10)
    held.ask("r1", document("a"), 8)
    held.on_loaded("a", 8)
    assert not held.ask("r2", document("b"), 9)
    assert not held.ask("r3", document("c"), 2)
    held.release("r2")
    held.take_orders()
    assert not held.ask("r3", document("c"), 2)
    assert [each.digest for each in held.take_orders().load] == ["c"]


def test_rows_of_one_document_are_together_and_know_their_places():
    worker = Worker(digests=[{3: "b", 5: "a", 7: "b"}])
    starts = [0, 1, 4, 5, 7]
    rows = worker.rows(0, [7, 9, 5, 3], starts, [11, 3, 1, 8], torch.device("cpu"))
    assert [(each.digest, each.start, each.stop) for each in rows.documents] == [
        ("a", 0, 1), ("b", 1, 4),
    ]  # fmt: skip
    assert rows.tokens.tolist() == [4, 0, 5, 6]
    assert rows.positions.tolist() == [0, 10, 6, 7]
    assert worker.rows(0, [1], [0, 1], [1], torch.device("cpu")) is None


def test_names_lead_to_files_of_the_folder_and_a_changed_file_is_read_again(tmp_path):
    model = make_model("llama")
    folder = tmp_path / "documents"
    folder.mkdir()
    cache = ragged(evicted(model, ids(1, 40), log_bias=True))
    cache.save(folder / "a.safetensors")
    documents = open_documents(str(folder), model.config, lambda _: fingerprint(model))
    document = documents.find("a")
    assert document.digest == documents.find("a.safetensors").digest
    assert document.num_tokens == 40
    assert document.counts == ((7, 6),) * 2
    assert documents.load(document)[0].num_tokens == 40
    evicted(model, ids(1, 50), log_bias=True).save(folder / "a.safetensors")
    assert documents.find("a").digest != document.digest
    assert "has changed" in refusal(documents.load, document)
    (tmp_path / "b").write_bytes((folder / "a.safetensors").read_bytes())
    (folder / "b").symlink_to(tmp_path / "b")
    for name, message in {
        "b": "no document 'b'",
        "c": "no document 'c'",
        "../b": "is no name",
        3: "is no name",
    }.items():
        assert message in refusal(documents.find, name)
    assert "1 to 16" in refusal(documents.find, [])
    stranger = open_documents(str(folder), model.config, lambda _: "2:0")
    assert "another model" in refusal(stranger.find, "a")
    assert "no folder of documents" in refusal(
        open_documents, str(tmp_path / "x"), model.config, lambda _: ""
    )


def test_ids_lead_to_documents_of_a_store_and_a_changed_text_to_its_new_cache(tmp_path):
    tokenizer = byte_tokenizer()
    model = make_model("llama", {"vocab_size": len(tokenizer)})
    settings = CorpusSettings(keep_ratio=0.5)

    def fill(texts):
        rows = [json.dumps({"id": id, "text": text}) for id, text in texts.items()]
        (tmp_path / "texts.jsonl").write_text("\n".join(rows))
        compress_corpus(model, tokenizer, tmp_path / "texts.jsonl", tmp_path / "store", settings)

    texts = {"books/1": "the cat sees a dog", "books/2": "a small red tree", "empty": ""}
    fill(texts)
    documents = open_documents(str(tmp_path / "store"), model.config, lambda _: fingerprint(model))
    by_id = {id: documents.find(id) for id in ("books/1", "books/2")}
    for id, each in by_id.items():
        (cache,) = documents.load(each)
        assert each.num_tokens == cache.num_tokens == len(tokenizer(texts[id])["input_ids"])
        assert each.counts == tuple(tuple(layer.counts[0].tolist()) for layer in cache.layers)
    both = documents.find(["books/1", "books/2"])
    assert len(documents.load(both)) == 2
    assert both.num_tokens == sum(each.num_tokens for each in by_id.values())
    fill({**texts, "books/1": "then it was old, and the river ran", "books/3": "a house"})
    assert documents.find("books/1").digest != by_id["books/1"].digest
    assert documents.find("books/1").num_tokens > by_id["books/1"].num_tokens
    assert documents.find("books/2").digest == by_id["books/2"].digest
    assert "has changed" in refusal(documents.load, by_id["books/1"])
    file = tmp_path / "store" / cache_file("books/2")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "books/2" in (message := refusal(documents.find, "books/2"))
    assert str(tmp_path) not in message
    file.unlink()
    assert "books/2" in refusal(documents.find, "books/2")
    for name, message in {
        "empty": "has no cache",
        "books/4": "no document 'books/4'",
        7: "is no id of a document",
    }.items():
        assert message in refusal(documents.find, name)
    assert "another model" in refusal(
        open_documents, str(tmp_path / "store"), model.config, lambda _: "2:0"
    )


def test_a_document_that_changes_in_a_store_at_an_address_is_found_when_its_manifest_is_read_again(
    tmp_path, monkeypatch
):
    tokenizer = byte_tokenizer()
    model = make_model("llama", {"vocab_size": len(tokenizer)})
    texts = tmp_path / "texts.jsonl"
    address = "memory://served"

    def fill(text):
        texts.write_text(json.dumps({"id": "a", "text": text}))
        compress_corpus(model, tokenizer, texts, address, CorpusSettings(keep_ratio=0.5))

    fill("the cat sees a dog")
    documents = open_documents(address, model.config, lambda _: fingerprint(model))
    before = documents.find("a")
    assert len(documents.load(before)) == 1
    fill("a small red tree")
    monkeypatch.setattr(documents.store, "_read_at", -1e9)
    after = documents.find("a")
    assert after.digest != before.digest
    assert len(documents.load(after)) == 1


def test_a_document_with_an_answer_beyond_the_models_positions_is_rejected(tmp_path):
    model = make_model("mistral", {"sliding_window": 48})
    evicted(model, ids(1, 40)).save(tmp_path / "a")
    document = open_documents(str(tmp_path), model.config, lambda _: fingerprint(model)).find("a")
    document.check_length(8)  # its layers keep slots while everything is within the window
    assert "exceed the 48" in refusal(document.check_length, 9)
    assert len(capture(model, ids(1, 4)).keys) == 2


def test_a_prompt_that_begins_with_the_document_is_rejected(tmp_path):
    model = make_model("llama", {})
    text = ids(1, 40)
    cache = kvcat.Eviction("streaming")(kvcat.trace(model, text, supervision="self"), num_slots=9)
    cache.save(tmp_path / "a")
    documents = open_documents(str(tmp_path), model.config, lambda _: fingerprint(model))
    document = documents.find("a")
    documents.find(["a", "a"]).check_is_no_document(text[0].tolist())  # the text of both is unknown
    question = text[0].tolist()
    assert "begins with the document" in refusal(document.check_is_no_document, [*question, 3])
    for other in (question[:-1], [*question[1:], 3], [3]):
        document.check_is_no_document(other)
