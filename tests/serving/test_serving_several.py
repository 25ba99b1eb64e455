"""A request that names several packed caches: their slots as one prefix of the widened model."""

import json
from dataclasses import replace

import pytest
import torch
from evicted_caches import ids, make_model, rope
from transformers import DynamicCache

import kvcat
from kvcat.cache import cache_argument
from kvcat.compress import AttentionMatching
from kvcat.corpus import CorpusSettings, Store, compress_corpus
from kvcat.errors import InputError
from kvcat.serving import CacheFolder, export_prefix, request_fields, widen
from kvcat.serving.several import WideRotation
from kvcat.serving.stored import CacheStore
from kvcat.serving.widen import widened_fingerprint
from tiny import byte_tokenizer, sentences

WIDE = 12
KINDS = {
    "llama": ("llama", {}),
    "qwen2, yarn": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
}


def packed(kind, options, folder, **settings):
    """A model, its widened copy, three caches, and the folder of their packed files."""
    model = make_model(kind, options)
    wide = widen(model, WIDE)
    caches = []
    for number, length in enumerate((20, 24, 17)):
        document = kvcat.trace(model, ids(1, length, seed=number), supervision="self")
        caches.append(AttentionMatching(**settings)(document, num_slots=7))
        export_prefix(caches[-1], model, folder / f"doc{number}", head_dim=WIDE)
    shape = (2, 2, WIDE)
    rotation = WideRotation.of(wide.config)
    return (
        model,
        wide,
        caches,
        CacheFolder(folder, widened_fingerprint(wide.config), shape, rotation),
    )


def logits_of_wide(wide, joined, question):
    """Logits of a question behind joined caches, by stock transformers."""
    past = DynamicCache()
    for index, (keys, values) in enumerate(joined.load()):
        past.update(keys[None], values[None], index)
    assert past.get_seq_length() == joined.num_slots
    positions = torch.arange(question.shape[1])[None] + joined.num_slots
    wide.set_attn_implementation("eager")
    with torch.no_grad():
        return wide(question, position_ids=positions, **cache_argument(past)).logits


@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
def test_the_widened_model_behind_joined_caches_answers_as_the_composed_cache(
    kind, options, tmp_path
):
    model, wide, caches, folder = packed(kind, options, tmp_path)
    question = ids(1, 6, seed=9)
    joined = folder.find(["doc0", "doc1", "doc2"])
    assert joined.num_slots == sum(cache.max_slots for cache in caches)
    actual = logits_of_wide(wide, joined, question)
    composed = kvcat.compose(model, caches, seam_tokens=0)
    expected = kvcat.replay(model, composed, question)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("settings", [{"num_slots": 9, "bits": "8"}, {"keep_ratio": 1.0}])
@pytest.mark.parametrize("source", ["store", "folder"])
def test_joined_caches_without_positions_of_their_slots_have_one_attention_sink(
    settings, source, tmp_path
):
    tokenizer = byte_tokenizer()
    model = make_model(options={"vocab_size": len(tokenizer)})
    wide = widen(model, WIDE)
    rows = [{"id": f"doc{n}", "text": "".join(sentences(2, seed=n))} for n in range(2)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    address = tmp_path / "store"
    corpus = CorpusSettings(**settings)
    compress_corpus(model, tokenizer, tmp_path / "corpus.jsonl", address, corpus)
    store = Store(address)
    caches = [store[f"doc{n}"] for n in range(2)]
    how = (widened_fingerprint(wide.config), (2, 2, WIDE), WideRotation.of(wide.config))
    if source == "store":
        named = CacheStore(str(address), *how)
    else:
        for n, cache in enumerate(caches):
            export_prefix(cache, model, tmp_path / f"doc{n}", head_dim=WIDE)
        named = CacheFolder(tmp_path, *how)
    question = ids(1, 6, seed=9)
    actual = logits_of_wide(wide, named.find(["doc0", "doc1"]), question)
    expected = kvcat.replay(model, kvcat.compose(model, caches, seam_tokens=0), question)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)


def test_the_order_of_the_names_counts_and_one_name_in_a_list_is_that_cache(tmp_path):
    _, _, _, folder = packed("llama", {}, tmp_path)
    one = folder.find("doc0")
    assert folder.find(["doc0"]) is one
    both, swapped = folder.find(["doc0", "doc1"]), folder.find(["doc1", "doc0"])
    assert len({one.digest, both.digest, swapped.digest}) == 3
    fields = request_fields(both, ["doc0", "doc1"], [5, 6])
    assert fields["prompt"] == [0] * both.num_slots + [5, 6]
    assert fields["kv_transfer_params"] == {"kvcat": ["doc0", "doc1"]}


def test_caches_that_cannot_be_joined_are_rejected(tmp_path):
    _, _, _, folder = packed("llama", {}, tmp_path)
    with pytest.raises(InputError, match="no cache 'gone'"):
        folder.find(["doc0", "gone"])
    chat = replace(folder.find("doc1"), chat=True)
    folder._verified = lambda path, name, version: chat
    with pytest.raises(InputError, match="document 2 opens a turn"):
        folder.find(["doc0", "doc1"])
    folder.rotation = None
    with pytest.raises(InputError, match="widened model"):
        folder.find(["doc0", "doc1"])
