"""What a cache file holds, and every way in which a damaged or foreign one is refused."""

import hashlib
import io
import json
import re
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from kvcat.cache import CompactCache, CompactLayer, storage
from kvcat.cache.fingerprint import hash_tensor
from kvcat.cachefile import parse_header
from kvcat.errors import InputError

OWNER = "ab" * 32
ZEROS = "0" * 64


def example(ragged=False):
    draw = torch.Generator().manual_seed(0)
    layers = []
    for _ in range(2):
        if ragged:
            parts = [[[torch.randn(n, 4, generator=draw) for n in row] for row in ((1, 3), (2, 2))] for _ in "kv"]
            bias = [[torch.randn(n, generator=draw) for n in row] for row in ((1, 3), (2, 2))]
            layers.append(CompactLayer.ragged(*parts, bias))
        else:
            draws = [torch.randn(2, 2, 3, *rest, generator=draw) for rest in ((4,), (6,), ())]
            layers.append(CompactLayer(*draws))
    return CompactCache(layers, 9, OWNER, {"method": "by hand", "seed": "0"})


def parts_of(path):
    """Header entries without format and checksum, and tensors."""
    with safetensors.safe_open(path, "pt") as file:
        entries = {key: text for key, text in file.metadata().items() if key != "sha256"}
    return entries, safetensors.torch.load_file(path)


def signed(entries, tensors):
    """A file whose checksum is right, whatever it holds: SHA-256 of all bytes with zeros in its own place."""
    content = safetensors.torch.save(tensors, {**entries, "sha256": ZEROS})
    assert content.count(ZEROS.encode()) == 1
    return content.replace(ZEROS.encode(), hashlib.sha256(content).hexdigest().encode())


@pytest.fixture
def saved(tmp_path):
    example().save(tmp_path / "doc")
    return tmp_path / "doc"


def refused(path, content, told=None):
    """Load the content and return the one line with which it is refused."""
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        CompactCache.load(path)
    line = str(error.value)
    assert path.name in line
    assert "\n" not in line
    assert told is None or re.search(told, line), line
    return line


def test_the_checksum_is_that_of_all_bytes_with_zeros_in_its_own_place(saved):
    assert signed(*parts_of(saved)).count(b"sha256") == 1
    content, told = saved.read_bytes(), json.loads(saved.read_bytes()[8:].split(b"}}")[0] + b"}}")
    digest = told["__metadata__"]["sha256"]
    assert hashlib.sha256(content.replace(digest.encode(), ZEROS.encode())).hexdigest() == digest


@pytest.mark.parametrize("ragged", [False, True])
def test_every_single_byte_is_guarded(tmp_path, ragged):
    path = tmp_path / "doc"
    example(ragged).save(path)
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(InputError):
            parse_header(io.BytesIO(damaged), path)
        if position % 97 == 0:
            refused(path, damaged)


@pytest.mark.parametrize("ragged", [False, True])
def test_every_truncation_and_any_byte_more_is_noticed(tmp_path, ragged):
    path = tmp_path / "doc"
    example(ragged).save(path)
    content = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 8, len(content) - 1):
        refused(path, content[:length], "truncated or not a safetensors file")
    for more in (b"\0", b" ", content):
        refused(path, content + more, "truncated or not a safetensors file")


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def with_one(shape, value):
    tensor = zeros(*shape)
    tensor.view(-1)[-1] = value
    return tensor


KEYS, VALUES, BIAS = (2, 2, 3, 4), (2, 2, 3, 6), (2, 2, 3)
NAN, INF = torch.nan, torch.inf
DAMAGED_TENSORS = {
    "no keys": ({"layers.1.keys": None}, "layer 1: no keys"),
    "no values": ({"layers.0.values": None}, "layer 0: no values"),
    "a layer missing": ({"layers.1.keys": None, "layers.1.values": None, "layers.1.log_bias": None}, "no keys and no"),
    "a layer too many": ({"layers.2.keys": zeros(*KEYS)}, "tensor 'layers.2.keys', which no cache of 2 layers has"),
    "a foreign tensor": ({"weight": zeros(3)}, "tensor 'weight'"),
    "a foreign part": ({"layers.0.queries": zeros(*KEYS)}, "tensor 'layers.0.queries'"),
    "a layer without number": ({"layers.x.keys": zeros(*KEYS)}, "tensor 'layers.x.keys'"),
    "a layer with zeros before": ({"layers.00.keys": zeros(*KEYS)}, "tensor 'layers.00.keys'"),
    "a negative layer": ({"layers.-1.keys": zeros(*KEYS)}, "tensor 'layers.-1.keys'"),
    "keys of whole numbers": ({"layers.0.keys": zeros(*KEYS, dtype=torch.int64)}, "keys are int64"),
    "keys of booleans": ({"layers.0.keys": zeros(*KEYS, dtype=torch.bool)}, "keys are bool"),
    "keys of another dtype": ({"layers.0.keys": zeros(*KEYS, dtype=torch.float16)}, "in float16 and of"),
    "values of bytes": ({"layers.1.values": zeros(*VALUES, dtype=torch.uint8)}, "values are uint8"),
    "a log-bias of whole numbers": ({"layers.0.log_bias": zeros(*BIAS, dtype=torch.int32)}, "log_bias are int32"),
    "keys without batch": ({"layers.0.keys": zeros(2, 3, 4)}, r"keys have shape \(2, 3, 4\)"),
    "keys of one axis": ({"layers.0.keys": zeros(4)}, "keys have shape"),
    "keys without axes": ({"layers.0.keys": zeros()}, "keys have shape"),
    "keys of five axes": ({"layers.0.keys": zeros(1, *KEYS)}, "keys have shape"),
    "empty keys": ({"layers.0.keys": zeros(2, 2, 0, 4)}, "keys are empty"),
    "values of fewer slots": ({"layers.0.values": zeros(2, 2, 2, 6)}, "values of shape"),
    "values of fewer heads": ({"layers.0.values": zeros(2, 1, 3, 6)}, "values of shape"),
    "values of fewer axes": ({"layers.0.values": zeros(2, 2, 3)}, "values of shape"),
    "a log-bias of fewer slots": ({"layers.1.log_bias": zeros(2, 2, 2)}, "layer 1: log_bias of shape"),
    "a log-bias with channels": ({"layers.1.log_bias": zeros(*KEYS)}, "log_bias of shape"),
    "positions of fewer slots": ({"layers.0.positions": zeros(2, 2, 2, dtype=torch.int32)}, "positions of shape"),
    "positions that are no numbers": ({"layers.0.positions": zeros(*BIAS)}, "positions are float32"),
    "a position behind the prefix": ({"layers.0.positions": with_one(BIAS, 9).int()}, r"positions lie in 0\.\.9"),
    "a negative position": ({"layers.0.positions": with_one(BIAS, -1).int()}, r"positions lie in -1\.\.0"),
    "NaN keys": ({"layers.0.keys": with_one(KEYS, NAN)}, "keys hold numbers that are not finite"),
    "infinite keys": ({"layers.1.keys": with_one(KEYS, -INF)}, "keys hold"),
    "NaN values": ({"layers.1.values": with_one(VALUES, NAN)}, "values hold"),
    "infinite values": ({"layers.1.values": with_one(VALUES, INF)}, "values hold"),
    "a NaN log-bias": ({"layers.0.log_bias": with_one(BIAS, NAN)}, "log_bias holds"),
    "an infinite log-bias": ({"layers.0.log_bias": with_one(BIAS, INF)}, "log_bias holds"),
    "one layer of another batch": (
        {"layers.1.keys": zeros(1, 2, 3, 4), "layers.1.values": zeros(1, 2, 3, 6), "layers.1.log_bias": None},
        "1 examples in float32 and of 2 examples",
    ),
    "more slots than tokens": (
        {"layers.1.keys": zeros(2, 2, 10, 4), "layers.1.values": zeros(2, 2, 10, 6), "layers.1.log_bias": None},
        "10 slots for a prefix of 9 tokens",
    ),
    "no tensors": ({f"layers.{i}.{part}": None for i in (0, 1) for part in ("keys", "values", "log_bias")}, "no keys"),
    "counts beside equal slots": ({"layers.0.counts": zeros(2, 2, dtype=torch.int64)}, "keys have shape"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "told"), DAMAGED_TENSORS.values(), ids=DAMAGED_TENSORS)
def test_tensors_that_are_no_cache_are_refused_though_the_checksum_is_right(saved, changes, told):
    entries, tensors = parts_of(saved)
    changed = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    refused(saved, signed(entries, changed), told)


DAMAGED_COUNTS = {
    "a head without slots": (torch.tensor([[0, 4], [2, 2]]), "heads of 0 to 4 slots"),
    "a negative head": (torch.tensor([[-1, 5], [2, 2]]), "heads of -1 to 5"),
    "slots missing": (torch.tensor([[1, 2], [2, 2]]), "do not fit keys of 8"),
    "slots too many": (torch.tensor([[1, 4], [2, 2]]), "do not fit keys of 8"),
    "no batch": (torch.tensor([1, 3, 2, 2]), "counts have shape"),
    "counts with fractions": (torch.tensor([[1.0, 3.0], [2.0, 2.0]]), "counts are float32"),
}


@pytest.mark.parametrize(("counts", "told"), DAMAGED_COUNTS.values(), ids=DAMAGED_COUNTS)
def test_counts_that_do_not_fit_are_refused(tmp_path, counts, told):
    path = tmp_path / "doc"
    example(ragged=True).save(path)
    entries, tensors = parts_of(path)
    refused(path, signed(entries, {**tensors, "layers.1.counts": counts}), told)


DAMAGED_ENTRIES = {
    "a newer format": ({"format": "kvcat-compact-cache-3"}, r"newer kvcat, format 3; this version reads 1\.\.2$"),
    "a format of the far future": ({"format": "kvcat-compact-cache-20260"}, "newer kvcat, format 20260"),
    "format 0": ({"format": "kvcat-compact-cache-0"}, "format 0, which no kvcat wrote"),
    "an older format than its own": ({"format": "kvcat-compact-cache-1"}, "corrupt"),
    "a foreign format": ({"format": "pt"}, "is not a compact cache of kvcat"),
    "no format": ({"format": None}, "is not a compact cache of kvcat"),
    "another kind of ours": ({"format": "kvcat-prefix-1"}, "is an exported prefix of kvcat, not a compact cache"),
    "no prefix length": ({"num_tokens": None}, "num_tokens"),
    "fewer tokens than slots": ({"num_tokens": "2"}, "3 slots for a prefix of 2 tokens"),
    "a negative length": ({"num_tokens": "-9"}, "num_tokens is '-9'"),
    "a length with fraction": ({"num_tokens": "9.0"}, r"num_tokens is '9\.0'"),
    "no number of layers": ({"num_layers": None}, "num_layers"),
    "no layers": ({"num_layers": "0"}, "num_layers is '0'"),
    "fewer layers": ({"num_layers": "1"}, "which no cache of 1 layers has"),
    "more layers": ({"num_layers": "3"}, "layer 2: no keys"),
    "layers in words": ({"num_layers": "two"}, "num_layers is 'two'"),
    "no fingerprint": ({"fingerprint": None}, "fingerprint"),
    "a short fingerprint": ({"fingerprint": "abc"}, "'abc' is no fingerprint"),
    "no metadata": ({"metadata": None}, "metadata"),
    "metadata that are no JSON": ({"metadata": "{"}, "metadata is no table of texts"),
    "metadata that are a list": ({"metadata": "[]"}, "metadata is no table of texts"),
    "metadata with numbers": ({"metadata": '{"seed": 0}'}, "metadata is no table of texts"),
    "an entry of nobody": ({"pickle": "gASVAAAA"}, "has one that no cache has: pickle"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "told"), DAMAGED_ENTRIES.values(), ids=DAMAGED_ENTRIES)
def test_headers_that_are_no_cache_are_refused_though_the_checksum_is_right(saved, changes, told):
    entries, tensors = parts_of(saved)
    changed = {key: text for key, text in {**entries, **changes}.items() if text is not None}
    refused(saved, signed(changed, tensors), told)


def header_only(text, size=0):
    return len(text).to_bytes(8, "little") + text + bytes(size)


FOREIGN = {
    "an empty file": b"",
    "text": b"Once upon a time there was a cache.",
    "a zip archive, as torch.save writes it": b"PK\x03\x04" + bytes(60),
    "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01a\x94.",
    "a header longer than the file": (2**40).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": header_only(b"{not json"),
    "a header that is a list": header_only(b"[1, 2]"),
    "a header that is no UTF-8": header_only(b'{"\xff": 1}'),
    "metadata that is a list": header_only(b'{"__metadata__": []}'),
    "a tensor that is a number": header_only(b'{"a": 1}'),
    "a tensor without offsets": header_only(b'{"a": {"dtype": "F32", "shape": [1]}}', 4),
    "a header of brackets": header_only(b"[" * 100_000),
    "a tensor before the beginning": header_only(
        b'{"__metadata__": {"format": "kvcat-compact-cache-1"}, '
        b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [-90000, 4]}}',
        4,
    ),
    "offsets behind the end": header_only(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_foreign_files_are_refused(tmp_path, content):
    refused(tmp_path / "doc", content, "is truncated or not a safetensors file|is not a compact cache")


def test_a_signed_header_whose_offsets_overlap_is_refused(saved):
    content = saved.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["sha256"] = ZEROS
    header["layers.0.keys"]["data_offsets"] = header["layers.1.keys"]["data_offsets"]
    forged = header_only(json.dumps(header, separators=(",", ":")).encode()) + content[8 + length :]
    digest = hashlib.sha256(forged).hexdigest()
    refused(saved, forged.replace(ZEROS.encode(), digest.encode()), "truncated or not a safetensors file")


@pytest.mark.parametrize("part", ["keys", "values", "log_bias"])
def test_a_cache_with_nan_is_refused_before_it_is_written(tmp_path, part):
    cache = example()
    cache.layers[1].tensors()[part].view(-1)[0] = torch.nan
    with pytest.raises(InputError, match=f"the compact cache, layer 1: {part}"):
        cache.save(tmp_path / "doc")
    assert list(tmp_path.iterdir()) == []


def test_hidden_slots_and_positions_may_be_saved(tmp_path):
    cache = example()
    cache.layers[0].log_bias[0, 0, 1] = -torch.inf
    tensors = {f"layers.{i}.{n}": t for i, layer in enumerate(cache.layers) for n, t in layer.tensors().items()}
    tensors["layers.1.positions"] = torch.tensor([0, 3, 8], dtype=torch.int32).expand(2, 2, 3)
    header = {"num_layers": "2", "num_tokens": "9", "fingerprint": OWNER, "metadata": "{}"}
    storage.write(tmp_path / "doc", tensors, header)
    found, entries = storage.read(tmp_path / "doc")
    assert entries == header
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_format_1_still_load_and_are_still_guarded(tmp_path, dtype):
    cache = example().to(dtype=dtype)
    tensors = {f"layers.{i}.{n}": t for i, layer in enumerate(cache.layers) for n, t in layer.tensors().items()}
    header = {"format": "kvcat-compact-cache-1", "num_layers": "2", "num_tokens": "9", "fingerprint": OWNER}
    header["metadata"] = json.dumps(cache.metadata, sort_keys=True)
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        hash_tensor(digest, name, tensors[name])
    content = safetensors.torch.save(tensors, {**header, "sha256": digest.hexdigest()})
    (tmp_path / "doc").write_bytes(content)
    loaded = CompactCache.load(tmp_path / "doc")
    assert (loaded.num_tokens, loaded.metadata) == (9, cache.metadata)
    assert torch.equal(loaded.layers[1].values, cache.layers[1].values)
    for position in range(len(content) - 1, 500, -89):
        damaged = bytearray(content)
        damaged[position] ^= 4
        refused(tmp_path / "doc", damaged)


def test_a_header_is_read_without_torch(saved):
    code = "import sys; from pathlib import Path; from kvcat.cachefile import read_header\n"
    code += "print(read_header(Path(sys.argv[1])).entries['num_tokens'], sorted({'torch', 'numpy'} & set(sys.modules)))"
    child = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=True)
    assert child.stdout == "9 []\n"


def test_a_file_without_leave_to_read_or_a_folder_is_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no cache file"):
        CompactCache.load(tmp_path)
    example().save(tmp_path / "doc")

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", denied)
    with pytest.raises(InputError, match=r"cannot read .*doc: Permission denied"):
        CompactCache.load(tmp_path / "doc")
