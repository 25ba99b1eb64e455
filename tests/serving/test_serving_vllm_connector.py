"""The connector on arrays: cells of several groups of layers, both layouts of pages, windows, a
store, bounded memory. vLLM itself need not be installed."""

import copy
import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from evicted_caches import evicted, ids, make_model
from vllm_modules import import_serving

from kvcat.cache import CompactCache
from kvcat.corpus import CorpusSettings, compress_corpus
from kvcat.errors import InputError
from kvcat.serving import export_prefix, read_prefix, widen
from kvcat.serving.pages import cells_of, check_pages
from kvcat.serving.recent import RecentlyUsed
from kvcat.serving.requests import request_fields
from tiny import loud_model, sentences

pytest.importorskip("starlette")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM's place is taken by small classes"
)
WIDE = 12
BLOCK = 4
NUM_BLOCKS = 20
SLOTS = 9
LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


@pytest.fixture(scope="module")
def model():
    return make_model("qwen2")


@pytest.fixture(scope="module")
def wide(model):
    return widen(model, WIDE)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Packed caches: "doc" of 9 slots in every layer, "short" of 9 and 4."""
    made = tmp_path_factory.mktemp("caches")
    export_prefix(evicted(model, ids(1, 40), SLOTS), model, made / "doc", head_dim=WIDE)
    export_prefix(evicted(model, ids(1, 40), (SLOTS, 4)), model, made / "short", head_dim=WIDE)
    return made


@pytest.fixture
def serving(monkeypatch):
    yield import_serving(monkeypatch)
    sys.modules.pop("kvcat.serving.vllm", None)


class Joined:
    """A layer of vLLM 0.32 and 0.33: a page is (heads, cells, keys and values)."""

    def __init__(self, kv_heads, head_dim):
        self.kv_cache = torch.zeros(NUM_BLOCKS, kv_heads, BLOCK, 2 * head_dim)
        self.impl = self
        self.head_dim = head_dim

    def do_kv_cache_update(self, layer, keys, values, pages, cells):
        by_cell = pages.transpose(1, 2)
        at = (cells // BLOCK, cells % BLOCK)
        by_cell[..., : self.head_dim][at] = keys
        by_cell[..., self.head_dim :][at] = values

    def read(self, cells):
        by_cell = self.kv_cache.transpose(1, 2).flatten(0, 1)[cells]
        return by_cell.transpose(0, 1).split(self.head_dim, dim=-1)


class CellsFirst(Joined):
    """The same shape over memory in which the heads of a cell are next to each other."""

    def __init__(self, kv_heads, head_dim):
        super().__init__(kv_heads, head_dim)
        memory = torch.zeros(NUM_BLOCKS, BLOCK, kv_heads, 2 * head_dim)
        self.kv_cache = memory.transpose(1, 2)


class Apart(Joined):
    """A layer of earlier versions: pages of keys, and pages of values."""

    def __init__(self, kv_heads, head_dim):
        super().__init__(kv_heads, head_dim)
        self.kv_cache = torch.zeros(2, NUM_BLOCKS, BLOCK, kv_heads, head_dim)

    def do_kv_cache_update(self, layer, keys, values, pages, cells):
        for states, of_kind in zip((keys, values), pages, strict=True):
            of_kind.flatten(0, 1)[cells] = states

    def read(self, cells):
        return [of_kind.flatten(0, 1)[cells].transpose(0, 1) for of_kind in self.kv_cache]


def connector_for(serving, wide, caches, groups=(LAYERS,), **overrides):
    """A connector, as a scheduler's and a worker's in one."""
    entries = {"caches": str(caches), **overrides.pop("extra", {})}
    config = copy.deepcopy(wide.config)
    for name, value in overrides.items():
        setattr(config, name, value)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, dtype=torch.float32),
        kv_transfer_config=SimpleNamespace(get_from_extra_config=entries.get),
        parallel_config=SimpleNamespace(world_size=1),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
    )
    spec = SimpleNamespace(block_size=BLOCK)
    kv_cache_config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names in groups]
    )
    return serving.CompactCacheConnector(vllm_config, None, kv_cache_config)


def request_for(connector, name, *, question=(5, 6), max_tokens=3):
    fields = {"prompt": list(question), "cache_salt": "", "kv_transfer_params": {}}
    if name is not None:
        fields = request_fields(connector.caches.find(name), name, list(question))
    return SimpleNamespace(
        request_id=str(name),
        kv_transfer_params=fields["kv_transfer_params"],
        cache_salt=fields["cache_salt"],
        prompt_token_ids=fields["prompt"],
        num_tokens=len(fields["prompt"]),
        max_tokens=max_tokens,
        skip_reading_prefix_cache=False,
        lora_request=None,
    )


def load(connector, request, blocks, layers, num_computed=0):
    """Schedule a request on blocks, and write its slots; what the scheduler hears."""
    num_new, is_awaited = connector.get_num_new_matched_tokens(request, num_computed)
    allocated = SimpleNamespace(get_block_ids=lambda: blocks)
    connector.update_state_after_alloc(request, allocated, num_new)
    connector.metadata = connector.build_connector_meta(None)
    connector.start_load_kv(SimpleNamespace(no_compile_layers=layers))
    return num_new, is_awaited, connector.get_transfer_results(set())


@pytest.mark.parametrize("kind", [Joined, CellsFirst, Apart])
def test_slots_are_written_to_the_cells_of_their_blocks_in_every_layout(
    serving, wide, folder, kind
):
    connector = connector_for(serving, wide, folder)
    layers = {name: kind(2, WIDE) for name in LAYERS}
    connector.register_kv_caches({name: layer.kv_cache for name, layer in layers.items()})
    prefix = read_prefix(folder / "doc")
    # the first block is in the prefix cache already
    num_new, is_awaited, results = load(
        connector, request_for(connector, "doc"), ([7, 3, 11],), layers, num_computed=BLOCK
    )
    assert (num_new, is_awaited) == (SLOTS - BLOCK, False)
    assert results.finished_recving == results.failed_recving == set()
    cells = torch.tensor([12, 13, 14, 15, 44])
    for layer, expected in zip(layers.values(), prefix.load(), strict=True):
        written = layer.read(cells)
        for states, of_kind in zip(written, expected, strict=True):
            assert torch.equal(states, of_kind[:, BLOCK:])
        others = torch.ones(NUM_BLOCKS * BLOCK, dtype=torch.bool)
        others[cells] = False
        assert not any(states.any() for states in layer.read(others))


def test_layers_in_two_groups_have_cells_of_their_own_and_a_window_keeps_the_last_slots(
    serving, wide, folder
):
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 10}
    connector = connector_for(serving, wide, folder, ([LAYERS[0]], [LAYERS[1]]), **windows)
    layers = {name: Joined(2, WIDE) for name in LAYERS}
    prefix = read_prefix(folder / "short")
    assert prefix.layer_slots == (SLOTS, 4)
    # vLLM has no block for the first cells of the short layers
    blocks = ([7, 3, 11], [0, 5, 6])
    num_new, is_awaited, results = load(connector, request_for(connector, "short"), blocks, layers)
    assert (num_new, is_awaited) == (SLOTS, True)
    assert (results.finished_recving, results.failed_recving) == ({"short"}, set())
    (long_keys, long_values), (short_keys, short_values) = prefix.load()
    keys, values = layers[LAYERS[0]].read(torch.tensor([28, 29, 30, 31, 12, 13, 14, 15, 44]))
    assert torch.equal(keys, long_keys)
    assert torch.equal(values, long_values)
    keys, values = layers[LAYERS[1]].read(torch.tensor([20, 21, 22, 23, 24]))
    assert torch.equal(keys, short_keys[:, 4:])
    assert torch.equal(values, short_values[:, 4:])
    assert not short_values[:, :5].any()  # the layer's four slots come last


def test_what_a_window_would_lose_is_rejected_before_it_is_computed(serving, wide, folder):
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 10}
    connector = connector_for(serving, wide, folder, ([LAYERS[0]], [LAYERS[1]]), **windows)

    def problem(name, **options):
        with pytest.raises(InputError) as caught:
            connector._named_prefix(request_for(connector, name, **options))
        return str(caught.value)

    # four slots, a question of two and an answer of four tokens fill the window of ten
    assert connector._named_prefix(request_for(connector, "short", max_tokens=4)) is not None
    assert "question and answer of 7 tokens" in problem("short", max_tokens=5)
    assert "9 of them slots" in problem("doc", max_tokens=1)
    assert "one cache a request" in problem(["short", "doc"])
    assert connector._named_prefix(request_for(connector, None, max_tokens=8)) is None
    assert "of 11 tokens do not fit" in problem(None, max_tokens=9)


def test_a_damaged_cache_fails_its_request_in_a_model_of_two_groups(
    serving, wide, folder, tmp_path
):
    good = (folder / "doc").read_bytes()
    (tmp_path / "doc").write_bytes(good)
    connector = connector_for(serving, wide, tmp_path, ([LAYERS[0]], [LAYERS[1]]))
    layers = {name: Joined(2, WIDE) for name in LAYERS}
    request = request_for(connector, "doc")
    num_new, _ = connector.get_num_new_matched_tokens(request, 0)
    blocks = SimpleNamespace(get_block_ids=lambda: ([7, 3, 11], [4, 5, 6]))
    connector.update_state_after_alloc(request, blocks, num_new)
    (tmp_path / "doc").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    connector.metadata = connector.build_connector_meta(None)
    connector.start_load_kv(SimpleNamespace(no_compile_layers=layers))
    results = connector.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == {"doc"}
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.request_finished_all_groups(request, ([7], [4])) == (False, None)


def test_pages_of_an_unknown_layout_are_rejected_by_name(serving, wide, folder):
    sizes = {"num_kv_heads": 2, "head_dim": WIDE, "block_size": 16}
    for known in (
        (20, 2, 16, 2 * WIDE),
        (40, 2, 8, 2 * WIDE),  # an implementation that divides blocks
        (2, 20, 16, 2, WIDE),
        (20, 2, 16, 2, WIDE),
    ):
        check_pages("a", known, **sizes)
    for unknown in (
        (20, 16, 2, 2 * WIDE),  # cells before heads
        (20, 2, 16, 2 * WIDE + 4),  # scales behind the channels
        (20, 2, 12, 2 * WIDE),
        (3, 20, 16, 2, WIDE),
        (20, 16, 288),
    ):
        with pytest.raises(InputError, match=r"pages of shape .*layer a"):
            check_pages("a", unknown, **sizes)
    connector = connector_for(serving, wide, folder)
    with pytest.raises(InputError, match="a layout that is not known"):
        connector.register_kv_caches({LAYERS[0]: torch.zeros(20, BLOCK, 2, 2 * WIDE)})


def test_slots_without_a_block_have_no_cell():
    places = cells_of([0, 0, 5, 9], start=3, stop=15, block_size=4)
    assert places.slots.tolist() == [8, 9, 10, 11, 12, 13, 14]
    assert places.cells.tolist() == [20, 21, 22, 23, 36, 37, 38]


def test_what_was_not_used_for_longest_is_dropped():
    recent = RecentlyUsed(10, len)
    made = []

    def get(key, size):
        return recent.get(key, lambda: made.append(key) or "x" * size)

    for key, size in [("a", 4), ("b", 4), ("a", 4), ("c", 4), ("a", 4), ("b", 4), ("d", 11)]:
        assert len(get(key, size)) == size
    assert made == ["a", "b", "c", "b", "d"]  # c replaced b, b replaced c, d was not kept
    assert (recent.num_bytes, len(recent)) == (8, 2)


@pytest.fixture(scope="module")
def store(tmp_path_factory, tokenizer):
    """A model, and a store of two documents."""
    folder = tmp_path_factory.mktemp("store")
    texts = ["".join(sentences(3, seed=seed)) for seed in range(2)]
    rows = [json.dumps({"id": f"a/{n}", "text": text}) for n, text in enumerate(texts)]
    (folder / "corpus.jsonl").write_text("\n".join(rows))
    model = loud_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=256)
    settings = CorpusSettings(keep_ratio=0.3)
    compress_corpus(model, tokenizer, str(folder / "corpus.jsonl"), str(folder / "s"), settings)
    return model, folder / "s"


def test_a_document_of_a_store_is_packed_as_kvcat_pack_does(serving, store, tmp_path):
    model, address = store
    wide = widen(model, WIDE)
    connector = connector_for(serving, wide, address)
    prefix = connector.caches.find("a/1")
    (file,) = [
        path
        for path in address.glob("caches/**/*.safetensors")
        if CompactCache.load(path).metadata["id"] == "a/1"
    ]
    export_prefix(CompactCache.load(file), model, tmp_path / "packed", head_dim=WIDE)
    packed = read_prefix(tmp_path / "packed")
    for name in ("num_slots", "num_tokens", "shape", "first_slots", "layer_slots", "chat"):
        assert getattr(prefix, name) == getattr(packed, name), name
    for ours, theirs in zip(prefix.load(), packed.load(), strict=True):
        for states, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(states, expected, rtol=0, atol=2e-5)
    layers = {name: Joined(2, WIDE) for name in LAYERS}
    blocks = (list(range(1, 1 + -(-prefix.num_slots // BLOCK))),)
    load(connector, request_for(connector, "a/1"), blocks, layers)
    keys, _ = layers[LAYERS[0]].read(torch.arange(BLOCK, BLOCK + prefix.num_slots))
    assert torch.equal(keys, prefix.load()[0][0])
    assert connector._states.num_bytes == sum(
        tensor.nbytes for layer in prefix.load() for tensor in layer
    )


def test_a_store_of_another_model_and_unknown_or_damaged_documents_are_rejected(
    serving, store, wide, tmp_path
):
    model, address = store
    with pytest.raises(InputError, match="belongs to another model"):
        connector_for(serving, wide, address)
    connector = connector_for(serving, widen(model, WIDE), address)
    with pytest.raises(InputError, match="no document 'a/7'"):
        connector.caches.find("a/7")
    for wrong in (7, None, {}):
        with pytest.raises(InputError, match="no id of a document"):
            connector.caches.find(wrong)
    for megabytes in ("1", -1, True):
        with pytest.raises(InputError, match="cache_mb must be a number"):
            connector_for(serving, widen(model, WIDE), address, extra={"cache_mb": megabytes})
    files = {path: path.read_bytes() for path in address.glob("caches/**/*.safetensors")}
    try:
        for path, content in files.items():
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InputError, match=r"document 'a/0': .*corrupt") as caught:
            connector.caches.find("a/0")
        assert str(address) not in str(caught.value)
    finally:
        for path, content in files.items():
            path.write_bytes(content)
    assert connector.caches.find("a/0").num_slots > 0


@pytest.mark.parametrize("step", ["load", "find"])
def test_a_document_that_changes_is_never_read_from_its_other_text(
    serving, tokenizer, tmp_path, step
):
    model = loud_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=256)
    corpus = tmp_path / "corpus.jsonl"

    def compress(seed):
        rows = [{"id": id, "text": "".join(sentences(3, seed=seed))} for id in "ab"]
        corpus.write_text("\n".join(map(json.dumps, rows)))
        settings = CorpusSettings(num_slots=8)
        compress_corpus(model, tokenizer, corpus, tmp_path / "s", settings)

    compress(0)
    caches = connector_for(serving, widen(model, WIDE), tmp_path / "s").caches
    requested = caches.find("a")
    compress(1)
    with pytest.raises(InputError, match="has changed since it was requested"):
        requested.load() if step == "load" else caches.find("b")
    for name in "ab":
        again = caches.find(name)
        assert again.digest != requested.digest
        assert len(again.load()) == 2


def test_documents_of_a_store_with_a_chat_template_cannot_be_joined(serving, tokenizer, tmp_path):
    (tmp_path / "corpus.jsonl").write_text(
        "\n".join(json.dumps({"id": str(n), "text": f"the cat {n}"}) for n in range(2))
    )
    model = loud_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=256)
    settings = CorpusSettings(keep_ratio=1.0, chat=True)
    compress_corpus(model, tokenizer, tmp_path / "corpus.jsonl", tmp_path / "s", settings)
    connector = connector_for(serving, widen(model, WIDE), tmp_path / "s")
    assert connector.caches.find(["1"]).chat
    with pytest.raises(InputError, match="cannot be joined: the store was made with --chat"):
        connector.caches.find(["0", "1"])
