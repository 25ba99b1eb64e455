"""A request that names several packed caches: their slots as one prefix of the widened model."""

from dataclasses import replace

import pytest
import torch
from evicted_caches import ids, make_model, rope
from transformers import DynamicCache

import kvcat
from kvcat.cache import cache_argument
from kvcat.compress import AttentionMatching
from kvcat.errors import InputError
from kvcat.serving import CacheFolder, export_prefix, request_fields, widen
from kvcat.serving.several import WideRotation
from kvcat.serving.widen import widened_fingerprint

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


@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
def test_the_widened_model_behind_joined_caches_answers_as_the_composed_cache(
    kind, options, tmp_path
):
    model, wide, caches, folder = packed(kind, options, tmp_path)
    question = ids(1, 6, seed=9)
    joined = folder.find(["doc0", "doc1", "doc2"])
    past = DynamicCache()
    for index, (keys, values) in enumerate(joined.load()):
        past.update(keys[None], values[None], index)
    assert past.get_seq_length() == joined.num_slots == sum(cache.max_slots for cache in caches)
    positions = torch.arange(6)[None] + joined.num_slots
    wide.set_attn_implementation("eager")
    with torch.no_grad():
        actual = wide(question, position_ids=positions, **cache_argument(past)).logits
    composed = kvcat.compose(model, caches, seam_tokens=0)
    expected = kvcat.replay(model, composed, question)
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
