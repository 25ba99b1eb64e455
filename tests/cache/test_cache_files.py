"""What a cache file holds, and that damaged or foreign files are rejected."""

import hashlib
import sys

import pytest
import safetensors.torch
import torch

from kvcat.cache import CacheRecord, CompactCache, CompactLayer, LayerState, fingerprint
from kvcat.cache.files import CACHE, read_tensors
from kvcat.errors import InputError
from tiny import layer_of, loud_model, refusal

OWNER = "2:" + "ab" * 32
ZEROS = "0" * 64


def example(form="equal", dtype=torch.float32, owner=OWNER):
    draw = torch.Generator().manual_seed(0)
    layers = []
    for _ in range(2):
        if form == "ragged":
            rows = ((1, 3), (2, 2))
            states = [
                [[torch.randn(n, *s, generator=draw) for n in row] for row in rows]
                for s in ((4,), (4,), ())
            ]
            layers.append(layer_of(*states))
        else:
            draws = [torch.randn(2, 2, 3, *dims, generator=draw) for dims in ((4,), (6,), ())]
            if form == "without log-bias":
                layers.append(
                    CompactLayer(
                        *draws[:2], positions=torch.tensor([0, 3, 8]).int().expand(2, 2, 3)
                    )
                )
            else:
                draws[2][0, 0, 1] = -torch.inf  # a hidden slot
                layers.append(CompactLayer(*draws))
    return CompactCache(layers, 9, owner, CacheRecord("by hand", {"seed": "0"})).to(dtype=dtype)


def test_a_number_that_another_dtype_cannot_hold_is_rejected():
    cache = example()
    cache.layers[0].values[0, 0, 0, 1] = 7e4
    assert "values of the cache up to 7e+04 do not fit in torch.float16" in refusal(
        cache.to, dtype=torch.float16
    )
    assert cache.to(dtype=torch.bfloat16).layers[0].values.isfinite().all()
    state = LayerState({"conv.0": torch.full((1, 2, 3), 1e39, dtype=torch.float64)})
    assert "conv.0 of the cache up to 1e+39 do not fit" in refusal(state.to, dtype=torch.float32)


def parts_of(path):
    """Header entries without checksum, and tensors."""
    with safetensors.safe_open(path, "pt") as file:
        entries = {key: text for key, text in file.metadata().items() if key != "sha256"}
    return entries, safetensors.torch.load_file(path)


def signed(entries, tensors):
    """A file with the right checksum of any content: SHA-256 of all bytes, with zeros in place of
    the checksum."""
    content = safetensors.torch.save(tensors, {**entries, "sha256": ZEROS})
    assert content.count(ZEROS.encode()) == 1
    return content.replace(ZEROS.encode(), hashlib.sha256(content).hexdigest().encode())


@pytest.fixture
def saved(tmp_path):
    example().save(tmp_path / "doc")
    return tmp_path / "doc"


def refused(path, content, reason=None):
    """Load the content; it is rejected in one line."""
    path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as error:
        CompactCache.load(path)
    line = str(error.value)
    assert path.name in line
    assert "\n" not in line
    assert len(line) < 400


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("equal", torch.float32), ("ragged", torch.bfloat16), ("without log-bias", torch.float64)],
)
def test_a_loaded_cache_equals_the_saved_one(tmp_path, form, dtype):
    cache = example(form, dtype)
    path = tmp_path / "doc"
    path.write_text("the old file")
    cache.save(path)
    loaded = CompactCache.load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["doc"]
    assert (loaded.num_tokens, loaded.fingerprint, loaded.record) == (9, OWNER, cache.record)
    for ours, theirs in zip(cache.layers, loaded.layers, strict=True):
        assert type(ours) is type(theirs)
        torch.testing.assert_close(theirs.tensors(), ours.tensors(), rtol=0, atol=0)


def test_a_cache_whose_tensors_share_memory_is_saved(tmp_path):
    states = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    first = CompactLayer(states, states)
    second = CompactLayer(states[:, :, :3], states[:, :, 2:])
    CompactCache([first, second], 9, OWNER).save(tmp_path / "doc")
    loaded = CompactCache.load(tmp_path / "doc")
    for saved, layer in zip((first, second), loaded.layers, strict=True):
        torch.testing.assert_close(layer.tensors(), saved.tensors(), rtol=0, atol=0)


@pytest.mark.parametrize("form", ["equal", "ragged"])
def test_every_single_byte_and_every_length_is_guarded(tmp_path, form):
    path = tmp_path / "doc"
    example(form).save(path)
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(InputError):
            read_tensors(path, CACHE)
        if position % 97 == 0:
            refused(path, damaged)
    for length in (0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 8, len(content) - 1):
        refused(path, content[:length], "truncated or not a safetensors file")
    for suffix in (b"\0", b" ", content):
        refused(path, content + suffix, "truncated or not a safetensors file")


def zeros(*shape, dtype=torch.float32, last=0.0):
    tensor = torch.zeros(shape, dtype=dtype)
    tensor.view(-1)[-1:] = last
    return tensor


KEYS = (2, 2, 3, 4)
VALUES = (2, 2, 3, 6)
BIAS = (2, 2, 3)
NAN = torch.nan
INF = torch.inf
DAMAGED_TENSORS = [
    ({"layers.1.keys": None}, "layer 1: no keys or no values"),
    ({"layers.2.keys": zeros(*KEYS)}, "tensor 'layers.2.keys', which no cache of 2 layers has"),
    ({"layers.0.keys": zeros(*KEYS, dtype=torch.int64)}, "keys are int64"),
    ({"layers.0.keys": zeros(*KEYS, dtype=torch.float16)}, "in float16 and of"),
    ({"layers.0.keys": zeros(2, 3, 4)}, r"keys have shape \(2, 3, 4\)"),
    ({"layers.0.keys": zeros(2, 2, 0, 4)}, r"keys are float32 of shape \(2, 2, 0, 4\)"),
    ({"layers.1.log_bias": zeros(2, 2, 2)}, "layer 1: log_bias of shape"),
    ({"layers.0.positions": zeros(*BIAS)}, "positions are float32"),
    ({"layers.0.positions": zeros(*BIAS, dtype=torch.int32, last=9)}, r"positions lie in 0\.\.9"),
    ({"layers.0.keys": zeros(*KEYS, last=NAN)}, "keys hold numbers that are not finite"),
    ({"layers.0.log_bias": zeros(*BIAS, last=INF)}, "log_bias hold numbers that are not finite"),
    (
        {
            "layers.1.keys": zeros(1, 2, 3, 4),
            "layers.1.values": zeros(1, 2, 3, 6),
            "layers.1.log_bias": None,
        },
        "1 examples in float32 and of 2 examples",
    ),
    (
        {
            "layers.1.keys": zeros(2, 2, 10, 4),
            "layers.1.values": zeros(2, 2, 10, 6),
            "layers.1.log_bias": None,
        },
        "10 slots for a prefix of 9 tokens",
    ),
    ({"layers.0.counts": zeros(2, 2, dtype=torch.int64)}, "keys have shape"),
]


DEEP = "[" * 100_000
DAMAGED_ENTRIES = [
    (
        {"format": "kvcat-compact-cache-2"},
        "has format 2, and .* reads 6: make the cache again with `kvcat compress`$",
    ),
    ({"format": "pt"}, "is not a compact cache of kvcat"),
    ({"format": "kvcat-prefix-2"}, "is an exported prefix of kvcat, not a compact cache"),
    ({"num_tokens": None}, "num_tokens"),
    ({"num_tokens": "9999999999"}, "num_tokens is '9999999999'"),
    ({"num_layers": "1"}, "which no cache of 1 layers has"),
    ({"num_layers": "1000000000"}, "num_layers is '1000000000'"),
    ({"fingerprint": "abc"}, "fingerprint is 'abc'"),
    *(
        ({"record": text}, "its record is not that of a compact cache")
        for text in ('{"seed": "0"}', '{"first_ids": "1 2"}', '{"room": true}', "[]", DEEP)
    ),
    ({"pickle": "gASVAAAA"}, "has one that no cache has: pickle"),
]


DAMAGED_COUNTS = [
    (torch.tensor([[0, 4], [2, 2]]), "heads of 0 to 4 slots"),
    (torch.tensor([[1, 2], [2, 2]]), "do not fit keys of 8"),
    (torch.tensor([[2**62, 2**62], [2**62, 2**62 + 8]]), "slots"),
    (torch.tensor([1, 3, 2, 2]), r"counts \(4,\)"),
]


@pytest.mark.parametrize(
    ("form", "changes", "reason"),
    [
        *(("equal", *row) for row in DAMAGED_TENSORS + DAMAGED_ENTRIES),
        *(("ragged", {"layers.1.counts": counts}, reason) for counts, reason in DAMAGED_COUNTS),
    ],
)
def test_what_is_no_cache_is_rejected_though_the_checksum_is_right(tmp_path, form, changes, reason):
    path = tmp_path / "doc"
    example(form).save(path)
    entries, tensors = parts_of(path)
    changed = tensors if all("layers." in name for name in changes) else entries
    changed.update(changes)
    for name in [name for name, value in changed.items() if value is None]:
        del changed[name]
    refused(path, signed(entries, tensors), reason)


def test_foreign_files_are_rejected(tmp_path):
    def header_only(text, size=0):
        return len(text).to_bytes(8, "little") + text + bytes(size)

    for content in (
        b"PK\x03\x04" + bytes(60),  # a zip archive, as torch.save writes it
        b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01a\x94.",  # a pickle
        (2**40).to_bytes(8, "little") + b"{}",
        header_only(b"{not json"),
        header_only(DEEP.encode()),
        header_only(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-90000, 4]}}', 4),
        header_only(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
        header_only(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', 4),
        header_only(b'{"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}', 4),
        header_only(b'{"__metadata__": null}'),
    ):
        refused(
            tmp_path / "doc",
            content,
            "is truncated or not a safetensors file|is not a compact cache",
        )


def test_a_place_that_cannot_be_written_is_named_and_the_old_file_stays(
    tmp_path, monkeypatch, saved
):
    broken = example()
    broken.layers[1].values.view(-1)[0] = torch.nan
    content = saved.read_bytes()

    def failing(error):
        return lambda *_, **__: (_ for _ in ()).throw(error)

    for cache, path, message in (
        (broken, tmp_path / "new", "the compact cache, layer 1: values"),
        (example(), tmp_path, "cannot write .*: Is a directory"),
    ):
        with pytest.raises(InputError, match=message):
            cache.save(path)
    with pytest.raises(InputError, match="no cache file"):
        CompactCache.load(tmp_path / "nowhere")
    monkeypatch.setattr("os.fsync", failing(OSError(28, "No space left on device")))
    with pytest.raises(InputError, match=r"cannot write .*doc: No space left"):
        example(dtype=torch.bfloat16).save(saved)
    assert saved.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["doc"]
    monkeypatch.setattr("pathlib.Path.open", failing(PermissionError(13, "Permission denied")))
    with pytest.raises(InputError, match=r"cannot read .*doc: Permission denied"):
        CompactCache.load(saved)


def test_a_cache_loads_only_for_its_model_whose_fingerprint_follows_every_weight(
    tmp_path, monkeypatch
):
    made = loud_model()
    first = fingerprint(made)
    example(owner=first).save(tmp_path / "doc")
    assert CompactCache.load(tmp_path / "doc", loud_model()).num_slots == 3
    with pytest.raises(InputError, match="doc belongs to another model"):
        CompactCache.load(tmp_path / "doc", loud_model(rms_norm_eps=1e-3))
    with monkeypatch.context() as patch:
        patch.setattr(
            sys.modules["kvcat.cache.fingerprint"], "hash_tensor", None
        )  # a second look hashes nothing
        assert fingerprint(made) == first
    for parameter in made.parameters():
        with torch.no_grad():
            parameter.view(-1)[0] += 1
        assert fingerprint(made) != first
        with torch.no_grad():
            parameter.view(-1)[0] -= 1
    assert fingerprint(made.bfloat16()) != first
    parallel = [
        fingerprint(loud_model("gpt_neox", use_parallel_residual=used)) for used in (True, False)
    ]
    assert parallel[0] != parallel[1]


def test_slots_are_counted_on_average_and_in_the_fullest_head_of_caches_and_layers():
    def heads(*counts):
        return [[torch.zeros(count, 4) for count in counts]]

    layers = [
        layer_of(heads(1, 4), heads(1, 4)),
        layer_of(heads(2, 3), heads(2, 3)),
        layer_of(heads(3), heads(3)),  # another number of heads
    ]
    cache = CompactCache(layers, 9, "x")
    assert (cache.num_slots, cache.mean_slots, cache.max_slots) == (3, 13 / 5, 4)
    assert [layer.num_slots for layer in layers] == [3, 3, 3]
    assert [layer.max_slots for layer in layers] == [4, 3, 3]
    assert layers[0].padded().keys.shape[2] == layers[0].max_slots
    assert not cache.is_uniform
    equal = CompactCache(layers[2:], 9, "x")
    assert (equal.num_slots, equal.mean_slots, equal.max_slots) == (3, 3.0, 3)
    assert equal.is_uniform
