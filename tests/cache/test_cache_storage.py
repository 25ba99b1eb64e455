"""Compact caches on disk, and what identifies a model."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcat.cache import CompactCache, CompactLayer, fingerprint
from kvcat.errors import InputError


def tiny(seed=0, **options):
    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, **options
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def example(dtype=torch.float32, owner="f" * 64, log_bias=True):
    draw = torch.Generator().manual_seed(0)
    layers = [
        CompactLayer(
            torch.randn(2, 2, 3, 4, generator=draw).to(dtype),
            torch.randn(2, 2, 3, 4, generator=draw).to(dtype),
            torch.randn(2, 2, 3, generator=draw) if log_bias else None,
        )
        for _ in range(2)
    ]
    return CompactCache(layers, 9, owner, {"method": "by hand", "keep_ratio": "0.333"})


def assert_same(left, right):
    assert (left.num_tokens, left.fingerprint, left.metadata) == (right.num_tokens, right.fingerprint, right.metadata)
    for a, b in zip(left.layers, right.layers, strict=True):
        assert a.tensors().keys() == b.tensors().keys()
        assert all(torch.equal(a.tensors()[n], b.tensors()[n]) for n in a.tensors())
        assert all(a.tensors()[n].dtype == b.tensors()[n].dtype for n in a.tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("log_bias", [False, True])
def test_a_loaded_cache_equals_the_saved_one(tmp_path, dtype, log_bias):
    cache = example(dtype, log_bias=log_bias)
    cache.save(tmp_path / "doc.safetensors")
    assert_same(CompactCache.load(tmp_path / "doc.safetensors"), cache)
    assert [path.name for path in tmp_path.iterdir()] == ["doc.safetensors"]


def test_saving_again_replaces_the_file(tmp_path):
    example().save(tmp_path / "doc")
    other = example(torch.bfloat16)
    other.save(tmp_path / "doc")
    assert_same(CompactCache.load(tmp_path / "doc"), other)


def test_every_flipped_byte_and_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "doc"
    example().save(path)
    content = path.read_bytes()
    for position in range(9, len(content), 151):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(InputError):
            CompactCache.load(path)
    for length in (0, 1, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match="truncated or not a safetensors file"):
            CompactCache.load(path)


def test_changed_metadata_does_not_match_the_checksum(tmp_path):
    path = tmp_path / "doc"
    example().save(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"by hand", b"by foot"))
    with pytest.raises(InputError, match="corrupt"):
        CompactCache.load(path)


def test_a_file_that_is_not_ours_or_not_there_is_refused_by_name(tmp_path):
    safetensors.torch.save_file({"weight": torch.zeros(2)}, tmp_path / "weights")
    with pytest.raises(InputError, match="weights is not a compact cache of kvcat"):
        CompactCache.load(tmp_path / "weights")
    with pytest.raises(InputError, match=r"no cache file .*nowhere"):
        CompactCache.load(tmp_path / "nowhere")


def test_a_folder_that_is_not_there_or_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no such folder"):
        example().save(tmp_path / "missing" / "doc")
    with pytest.raises(InputError, match="it is a folder"):
        example().save(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(10))
    with pytest.raises(InputError, match="no room for"):
        example().save(tmp_path / "doc")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    cache = example()
    cache.save(tmp_path / "doc")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="the disk is full"):
        example(torch.bfloat16).save(tmp_path / "doc")
    monkeypatch.undo()
    assert_same(CompactCache.load(tmp_path / "doc"), cache)
    assert [path.name for path in tmp_path.iterdir()] == ["doc"]


def test_a_cache_loads_only_for_the_model_it_was_made_with(tmp_path):
    example(owner=fingerprint(tiny())).save(tmp_path / "doc")
    assert CompactCache.load(tmp_path / "doc", tiny()).num_slots == 3
    with pytest.raises(InputError, match="doc belongs to another model"):
        CompactCache.load(tmp_path / "doc", tiny(seed=1))


def test_the_fingerprint_follows_weights_and_configuration():
    model = tiny()
    first = fingerprint(model)
    assert fingerprint(model) == first == fingerprint(tiny())
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-3
    changed = fingerprint(model)
    assert changed != first
    model.lm_head.weight.data = model.lm_head.weight.data.clone().neg_()
    assert fingerprint(model) not in (first, changed)
    assert fingerprint(tiny(rms_norm_eps=1e-3)) != first
    assert fingerprint(tiny().bfloat16()) != first


def test_the_fingerprint_survives_saving_and_loading(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    assert fingerprint(LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)) == fingerprint(model)


def test_rows_can_be_selected_and_sizes_told():
    cache = example()
    assert (cache.batch_size, cache.num_slots, cache.num_tokens) == (2, 3, 9)
    assert cache.nbytes == 2 * 4 * (2 * 2 * 2 * 3 * 4 + 2 * 2 * 3)
    one = cache.select([1])
    assert one.batch_size == 1
    assert torch.equal(one.layers[1].keys[0], cache.layers[1].keys[1])
    assert torch.equal(one.layers[1].log_bias[0], cache.layers[1].log_bias[1])


def test_another_dtype_applies_to_keys_and_values_only():
    half = example().to(dtype=torch.bfloat16)
    assert {t.dtype for t in half.layers[0].tensors().values()} == {torch.bfloat16, torch.float32}
    assert half.layers[0].log_bias.dtype == torch.float32


def test_the_header_is_readable_json_text(tmp_path):
    example().save(tmp_path / "doc")
    with safetensors.safe_open(tmp_path / "doc", "pt") as file:
        assert json.loads(file.metadata()["metadata"])["method"] == "by hand"


def test_equal_caches_are_equal_files_whatever_the_order_of_their_metadata(tmp_path):
    told = {f"key {i}": str(i) for i in range(20)}
    for name, order in (("one", list(told)), ("other", sorted(told, reverse=True))):
        cache = replace(example(), metadata={key: told[key] for key in order})
        cache.save(tmp_path / name)
    content = (tmp_path / "one").read_bytes()
    assert content == (tmp_path / "other").read_bytes()
    assert int.from_bytes(content[:8], "little") % 8 == 0


def test_letters_of_any_alphabet_survive_in_metadata(tmp_path):
    cache = replace(example(), metadata={"method": 'é "\u2028" \U0001f600 \\ \x7f'})
    cache.save(tmp_path / "doc")
    assert_same(CompactCache.load(tmp_path / "doc"), cache)
