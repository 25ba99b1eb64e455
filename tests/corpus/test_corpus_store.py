"""A store: caches by document, continued runs, changed documents, and what is rejected."""

import hashlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpora import contents, text_of, write_rows
from tokenizers import processors

import kvcat
from kvcat.compress import AttentionMatching, split_supervision, supervised_kl
from kvcat.compress.calibration import calibrate_on, load_budgets
from kvcat.corpus import CorpusSettings, Store, compress_corpus
from kvcat.corpus import compressor as compressor_module
from kvcat.corpus import store as store_module
from kvcat.corpus.manifest import Row, cache_file, manifest_rows, write_manifest
from kvcat.corpus.storage import LocalStorage, open_storage
from kvcat.corpus.store import StoreWriter, check_store, open_writer
from kvcat.files import read_json, write_json
from tiny import CHAT, byte_tokenizer, loud_model, refusal, sentences, write_tiny_model

# store.json of a model that is not there
STORED = {**CorpusSettings().record(), "dtype": "float32", "model": "large", "fingerprint": "2:00"}


def test_a_cache_of_a_store_is_that_of_its_document_compressed_alone(
    loaded, corpus, compress, tmp_path
):
    result = compress(corpus, tmp_path / "store", CorpusSettings(num_slots=5, bits="16"))
    assert (result.num_made, result.num_kept, result.failures) == (6, 0, [])
    store = Store(tmp_path / "store")
    assert store.ids == tuple(sorted(store)) == tuple(store.manifest["id"])
    for number, id in [(1, "doc-1"), (1, "copy-1"), (3, "doc-3")]:
        trace = kvcat.document_trace(*loaded, text_of(number))
        alone = kvcat.AttentionMatching()(trace, num_slots=5)
        for layer, expected in zip(store[id].layers, alone.layers, strict=True):
            for name, tensor in expected.tensors().items():
                torch.testing.assert_close(layer.tensors()[name], tensor, atol=2e-3, rtol=2e-3)
        facts = dict(store[id].metadata)
        assert facts.pop("id") == id
        assert facts.pop("text_checksum") == store.row(id).checksum
        assert facts == dict(alone.metadata)
        row = store.row(id)
        assert (row.tokens, row.slots, row.bytes) == (alone.num_tokens, 5.0, alone.nbytes)
    assert store["doc-1"].metadata["document"] == store["copy-1"].metadata["document"]


def test_a_document_that_fits_only_once_is_made_without_its_copy_and_its_row_says_so(
    loaded, compress, tmp_path
):
    texts = {"once": text_of(0, length=17), "twice": text_of(0)}
    rows = [{"id": id, "text": text} for id, text in texts.items()]
    source = write_rows(tmp_path / "corpus.jsonl", rows)
    compress(source, tmp_path / "store", CorpusSettings(num_slots=5, bits="16"))
    store = Store(tmp_path / "store")
    assert [row.supervision for row in store.rows] == ["self", "reconstruction"]
    assert 128 < store.row("once").tokens <= 256
    for row in store.rows:
        trace = kvcat.document_trace(*loaded, texts[row.id], supervision=row.supervision)
        alone = kvcat.AttentionMatching()(trace, num_slots=5)
        assert store[row.id].metadata["supervision"] == row.supervision
        for layer, expected in zip(store[row.id].layers, alone.layers, strict=True):
            for name, tensor in expected.tensors().items():
                torch.testing.assert_close(layer.tensors()[name], tensor, atol=2e-3, rtol=2e-3)
    # the KL on held-out positions needs the copy
    compress(source, tmp_path / "checked", CorpusSettings(num_slots=5, check=True))
    assert "supervision self" in Store(tmp_path / "checked").row("once").error


@pytest.mark.slow
def test_documents_in_pieces_have_the_caches_that_they_have_alone(
    loaded, compress, tmp_path, monkeypatch
):
    monkeypatch.setattr("kvcat.compress.pieces.PIECE_TOKENS", 16)
    lines = sentences(4, seed=3)
    texts = {"forward": "".join(lines), "backward": "".join(lines[::-1]), "one piece": "the cat"}
    rows = [{"id": id, "text": text} for id, text in texts.items()]
    rows += [{"id": "once", "text": text_of(0, length=17)}, {"id": "long", "text": "the cat" * 150}]
    source = write_rows(tmp_path / "corpus.jsonl", rows)
    settings = {"keep_ratio": 0.5, "in_pieces": True}
    compress(source, tmp_path / "store", CorpusSettings(**settings))
    store = Store(tmp_path / "store")
    assert store.row("forward").tokens == store.row("backward").tokens > 16
    for id, text in texts.items():
        alone = kvcat.compress_document(*loaded, text, kvcat.DocumentSettings(**settings))
        for layer, expected in zip(store[id].layers, alone.layers, strict=True):
            for name, tensor in expected.tensors().items():
                assert torch.equal(layer.tensors()[name], tensor)
    # too long to be repeated: fitted to its own queries, as a whole
    assert store.row("once").supervision == "self"
    assert store["once"].metadata["supervision"] == "self"
    assert "tokens, and the model 256 positions" in store.row("long").error


def test_a_model_that_cannot_compress_in_pieces_is_rejected_before_its_documents(
    loaded, corpus, tmp_path
):
    windowed = loud_model("mistral", vocab_size=len(loaded[1]), sliding_window=20)
    settings = CorpusSettings(in_pieces=True)
    message = refusal(compress_corpus, windowed, loaded[1], corpus, tmp_path / "store", settings)
    assert "in_pieces compresses as sessions do: mistral: layers with sliding windows" in message
    assert not (tmp_path / "store").exists()


def test_a_store_holds_caches_in_pieces_or_none(corpus, compress, tmp_path):
    for in_pieces in (False, True):
        store = tmp_path / str(in_pieces)
        compress(corpus, store, CorpusSettings(num_slots=5, in_pieces=in_pieces))
        other = CorpusSettings(num_slots=5, in_pieces=not in_pieces)
        message = refusal(compress, corpus, store, other)
        assert f"was made with in_pieces {in_pieces}, not {not in_pieces}" in message


def test_a_text_that_comes_back_after_a_kill_gets_its_cache_again(compress, tmp_path, monkeypatch):
    texts = {"a": "the cat sees a dog", "b": "a small red tree"}
    file = tmp_path / "c.jsonl"
    rows = [{"id": id, "text": text} for id, text in texts.items()]
    compress(write_rows(file, rows), tmp_path / "store")
    before = caches_in(tmp_path / "store")
    add = StoreWriter.add

    def killed(self, rows):
        if any(row.error is None for row in rows):  # its cache is there, its record is not
            raise KeyboardInterrupt
        add(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            compress(
                write_rows(file, [{"id": "a", "text": "old stones"}, rows[1]]), tmp_path / "store"
            )
    assert caches_in(tmp_path / "store") != before
    assert "has not finished" in refusal(Store(tmp_path / "store").__getitem__, "a")
    result = compress(write_rows(file, rows), tmp_path / "store")
    assert (result.num_made, result.num_kept) == (1, 1)
    assert caches_in(tmp_path / "store") == before


def caches_in(store):
    return {file.name: file.read_bytes() for file in (store / "caches").rglob("*.safetensors")}


def test_a_store_has_one_tokenizer_and_one_chat_template(loaded, corpus, tmp_path):
    model = loaded[0]
    settings = {False: CorpusSettings(num_slots=5), True: CorpusSettings(num_slots=5, chat=True)}
    tokenizers = [byte_tokenizer() for _ in range(3)]
    tokenizers[1].chat_template = CHAT.replace("user", "USER")
    tokenizers[2].backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=["<eos>", "$A"], special_tokens=[("<eos>", tokenizers[2].eos_token_id)]
    )
    for chat, of_store in settings.items():
        store = tmp_path / str(chat)
        compress_corpus(model, tokenizers[0], corpus, store, of_store)
        other = tokenizers[1] if chat else tokenizers[2]
        message = refusal(compress_corpus, model, other, corpus, store, of_store)
        assert "was made with tokenizer or chat template" in message
        assert compress_corpus(model, tokenizers[0], corpus, store, of_store).num_kept == 6
    # without --chat the template does not matter
    again = compress_corpus(model, tokenizers[1], corpus, tmp_path / "False", settings[False])
    assert again.num_kept == 6


def test_a_store_that_is_older_than_a_setting_has_its_default(corpus, compress, tmp_path):
    settings = CorpusSettings(num_slots=5)
    compress(corpus, tmp_path / "store", settings)
    file = tmp_path / "store" / "store.json"
    recorded = read_json(file)
    assert recorded.pop("in_pieces") is False
    assert len(recorded.pop("tokenizer")) == 16
    write_json(file, recorded)
    assert compress(corpus, tmp_path / "store", settings).num_kept == 6


def test_a_document_with_all_its_slots_has_the_keys_of_transformers(
    loaded, corpus, compress, tmp_path
):
    compress(corpus, tmp_path / "store", CorpusSettings(keep_ratio=1.0, bits="16"))
    model, tokenizer = loaded
    cache = Store(tmp_path / "store")["copy-0"]
    ids = tokenizer(text_of(0), return_tensors="pt", add_special_tokens=False).input_ids
    stock = model(ids, use_cache=True).past_key_values
    for layer, expected in zip(cache.layers, stock.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, atol=1e-5, rtol=1e-5)


def test_a_document_that_cannot_be_made_has_a_row_that_says_why(compress, tmp_path):
    rows = [{"id": "blank", "text": " \n"}, {"id": "good", "text": text_of(0)}, "no json"]
    rows += [{"id": "long", "text": text_of(0, length=60)}, {"id": "none", "text": None}]
    source = write_rows(tmp_path / "corpus.jsonl", rows)
    result = compress(source, tmp_path / "store")
    assert (result.num_documents, result.num_made, len(result.failures)) == (5, 1, 4)
    store = Store(tmp_path / "store")
    assert store.ids == ("good",)
    assert len(store) == 1
    assert "blank" not in store
    errors = store.manifest.set_index("id")["error"]
    assert errors["blank"] == "the document is empty"
    assert "tokens, and the model 256 positions" in errors["long"]
    assert "not JSON" in errors["corpus.jsonl#2"]
    assert errors.isna()["good"]
    assert "'blank' has no cache: the document is empty" in refusal(store.__getitem__, "blank")
    assert "no document 'other'" in refusal(store.__getitem__, "other")


def test_too_many_slots_for_a_short_document_do_not_stop_its_batch(compress, tmp_path):
    rows = [{"id": "short", "text": "the cat"}, {"id": "long", "text": text_of(0)}]
    source = write_rows(tmp_path / "corpus.jsonl", rows)
    result = compress(source, tmp_path / "store", CorpusSettings(num_slots=20))
    assert [row.id for row in result.failures] == ["short"]
    assert "num_slots must be in" in result.failures[0].error


IDS = ["../../outside", "/etc/passwd", "a/b.txt", ".", "", "\u6771\u4eac \U0001f600", "x" * 300]


def test_any_id_is_a_safe_name_in_the_store(compress, tmp_path):
    rows = [{"id": id, "text": f"the cat {number}"} for number, id in enumerate(IDS)]
    source = write_rows(tmp_path / "corpus.jsonl", rows)
    compress(source, tmp_path / "store", CorpusSettings(keep_ratio=1.0))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"corpus.jsonl", "store"}
    store = Store(tmp_path / "store")
    expected = {id or "corpus.jsonl#4" for id in IDS}
    assert set(store.ids) == expected
    for id in expected:
        assert store[id].metadata["id"] == id


class Stop(BaseException):
    """The end of a run at a random place."""


def stop_after(monkeypatch, num_caches):
    """Let a run end when it has saved a number of caches."""
    save = LocalStorage.save_cache
    saved = []

    def save_some(storage, name, cache):
        if len(saved) == num_caches:
            raise Stop
        saved.append(name)
        save(storage, name, cache)

    monkeypatch.setattr(LocalStorage, "save_cache", save_some)


def test_a_run_that_stops_anywhere_continues_to_the_same_store(
    corpus, compress, tmp_path, monkeypatch
):
    compress(corpus, tmp_path / "once")
    draw = random.Random(0)
    for attempt in range(4):
        store = tmp_path / f"stopped-{attempt}"
        for _ in range(2):
            with monkeypatch.context() as patch:
                stop_after(patch, draw.randint(0, 2))
                with pytest.raises(Stop):
                    compress(corpus, store)
        result = compress(corpus, store)
        assert result.num_made + result.num_kept == 6
        assert contents(store) == contents(tmp_path / "once")


def test_a_changed_document_and_a_lost_file_are_made_again_and_no_other(corpus, compress, tmp_path):
    store = tmp_path / "store"
    compress(corpus, store)
    before = contents(store)
    row = {"id": "doc-2", "text": text_of(9)}
    lines = corpus.read_text().splitlines()
    lines[2] = row
    write_rows(corpus, lines)
    (store / cache_file("doc-3")).unlink()
    assert compress(corpus, store).num_made == 2
    after = contents(store)
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == {cache_file("doc-2"), "manifest"}
    assert compress(corpus, store).num_made == 0
    assert contents(store) == after


def test_a_document_that_is_made_again_while_the_clock_is_behind_has_its_new_row(
    corpus, compress, tmp_path, monkeypatch
):
    store = tmp_path / "store"
    compress(corpus, store)
    lines = corpus.read_text().splitlines()
    now = time.time()
    for seed, seconds in ((9, -3600), (10, -7200)):
        write_rows(corpus, [*lines[:2], {"id": "doc-2", "text": text_of(seed)}, *lines[3:]])
        monkeypatch.setattr(time, "time", lambda seconds=seconds: now + seconds)
        assert compress(corpus, store).num_made == 1
        row = Store(store).row("doc-2")
        assert row.checksum == hashlib.sha256(text_of(seed).encode()).hexdigest()[:32]
        assert Store(store)["doc-2"].metadata["text_checksum"] == row.checksum
        assert compress(corpus, store).num_made == 0


@pytest.mark.parametrize("name", [cache_file("doc-0"), "caches/00", "manifest.parquet"])
def test_what_a_link_in_a_store_points_to_is_never_written_read_or_removed(
    corpus, compress, tmp_path, name
):
    store = tmp_path / "store"
    compress(corpus, store)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / ".partial-1").write_text("my file")
    (store / name).unlink(missing_ok=True)
    (store / name).symlink_to(mine if "." not in name else mine / ".partial-1")
    if "." in name:
        assert "is a link" in refusal(lambda: Store(store)["doc-0"])
        lines = corpus.read_text().splitlines()
        write_rows(corpus, [{"id": "doc-0", "text": text_of(9)}, *lines[1:]])
        assert "is a link" in refusal(compress, corpus, store)
    else:
        compress(corpus, store)
    assert (mine / ".partial-1").read_text() == "my file"
    os.rename(store, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / name).unlink()
    store.symlink_to(tmp_path / "elsewhere")  # a link to a store is followed
    compress(corpus, store)
    assert len(Store(store)) == 6


def test_documents_in_the_manifest_of_another_model_are_made_again(
    compress, corpus, tmp_path, tmp_path_factory
):
    compress(corpus, tmp_path / "store")
    other = kvcat.load(write_tiny_model(tmp_path_factory.mktemp("other"), seed=9))
    compress_corpus(*other, corpus, tmp_path / "other")
    expected = contents(tmp_path / "store")
    for name in ["manifest.parquet", cache_file("doc-0")]:
        shutil.copy(tmp_path / "other" / name, tmp_path / "store" / name)
    assert compress(corpus, tmp_path / "store").num_made == 6
    assert contents(tmp_path / "store") == expected


def test_a_changed_document_that_cannot_be_made_loses_its_old_cache(corpus, compress, tmp_path):
    store = tmp_path / "store"
    compress(corpus, store)
    lines = corpus.read_text().splitlines()
    write_rows(corpus, [{"id": "doc-0", "text": ""}, *lines[1:]])
    compress(corpus, store)
    assert "doc-0" not in Store(store)
    assert not (store / cache_file("doc-0")).exists()


def test_budgets_that_change_during_a_run_end_it_before_their_caches_are_stored(
    loaded, corpus, compress, tmp_path, monkeypatch
):
    model, tokenizer = loaded
    ids = tokenizer(text_of(3), return_tensors="pt").input_ids
    file = tmp_path / "budgets.json"
    calibrate_on(model, [ids[:, :20]]).save(file)
    settings = CorpusSettings(method=f"attention-matching,budgets={file}", keep_ratio=0.3)
    assert settings.record()["budgets"] == load_budgets(file).digest[:16]
    save_cache = LocalStorage.save_cache

    def save_and_replace_the_budgets(self, *arguments):
        save_cache(self, *arguments)
        calibrate_on(model, [ids[:, 5:25]]).save(file)

    monkeypatch.setattr(LocalStorage, "save_cache", save_and_replace_the_budgets)
    assert "changed during the run" in refusal(compress, corpus, tmp_path / "store", settings)
    store = Store(tmp_path / "store")
    digests = {store[id].metadata["budgets"].split()[1] for id in store}
    assert digests == {settings.budgets[:12]}
    assert not any(row.error for row in store.rows)  # the others are made by the next run
    message = refusal(compress, corpus, tmp_path / "store", settings)
    assert "changed during the run" in message


def test_a_second_writer_is_rejected_and_shards_may_write_together(tmp_path):
    settings = STORED
    with open_writer(tmp_path, settings):
        message = refusal(open_writer(tmp_path, settings).__enter__)
        assert "another process is writing" in message
    with open_writer(tmp_path, settings, (0, 2)), open_writer(tmp_path, settings, (1, 2)):
        assert "another process" in refusal(open_writer(tmp_path, settings).__enter__)
        assert "another process" in refusal(open_writer(tmp_path, settings, (1, 2)).__enter__)
    with open_writer(tmp_path, settings):
        pass


def test_shards_make_disjoint_parts_of_the_same_store(corpus, compress, tmp_path):
    compress(corpus, tmp_path / "once")
    shards = [compress(corpus, tmp_path / "store", shard=(rank, 3)) for rank in range(3)]
    assert sum(shard.num_made for shard in shards) == 6
    assert len(Store(tmp_path / "store")) == 6
    assert compress(corpus, tmp_path / "store").num_made == 0
    assert contents(tmp_path / "store") == contents(tmp_path / "once")


def test_temporary_files_of_workers_that_died_are_removed(tmp_path):
    for _ in range(2):
        with open_writer(tmp_path, STORED):
            (tmp_path / "caches").mkdir(exist_ok=True)
            (tmp_path / "caches" / ".partial-1-2-x.safetensors").touch()
        assert not list(tmp_path.rglob(".partial-*"))


def test_a_full_disk_ends_with_one_line_and_leaves_whole_files(corpus, compress, tmp_path):
    store = tmp_path / "store"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))  # bytes of a file
    try:
        message = refusal(compress, corpus, store, CorpusSettings(keep_ratio=1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert message.startswith(f"cannot write {store}")
    assert not list(store.rglob(".partial-*"))
    assert not list(store.rglob("*.safetensors"))
    assert compress(corpus, store, CorpusSettings(keep_ratio=1.0)).num_made == 6


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(command).returncode != 0:
        pytest.skip("only root on Linux can mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_that_is_really_full_leaves_a_whole_store_that_continues_with_space(
    small_disk, compress, tmp_path
):
    rows = [{"id": str(number), "text": text_of(number)} for number in range(30)]
    source = write_rows(tmp_path / "corpus.jsonl", rows)
    settings = CorpusSettings(keep_ratio=0.5, bits="16")  # larger files fill the disk sooner
    compress(source, tmp_path / "once", settings)
    store = small_disk / "store"
    message = refusal(compress, source, store, settings)
    assert message.startswith(f"cannot write {store}")
    assert "No space left" in message
    assert "\n" not in message
    readable = Store(store)
    for id in readable.ids:
        assert readable[id].metadata["id"] == id
    num_whole = len(list(store.rglob("*.safetensors")))
    assert 0 < num_whole < 30
    assert not list(store.rglob(".partial-*"))
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    result = compress(source, store, settings)
    assert result.num_made + result.num_kept == 30
    assert contents(store) == contents(tmp_path / "once")


@pytest.mark.slow
def test_of_two_commands_that_write_one_store_the_second_is_rejected(tiny_folder, tmp_path):
    rows = [{"id": str(number), "text": text_of(number)} for number in range(20)]
    source = write_rows(tmp_path / "corpus.jsonl", rows)
    words = ["corpus", tiny_folder, source, "-o", tmp_path / "store"]
    command = [sys.executable, "-m", "kvcat", *map(str, words)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [one.communicate()[1] for one in both]
    codes = [one.returncode for one in both]
    assert sorted(codes) in ([0, 0], [0, 2])  # [0, 0]: one ended before the other one wrote
    for code, error in zip(codes, errors, strict=True):
        assert code == 0 or "another process is writing" in error
    assert len(Store(tmp_path / "store")) == 20


def test_a_damaged_manifest_log_or_cache_is_named(corpus, compress, tmp_path):
    store = tmp_path / "store"
    compress(corpus, store)
    path = store / cache_file("doc-0")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert "corrupt" in refusal(Store(store).__getitem__, "doc-0")
    (store / "journal" / "all.jsonl").write_text('{"id": 3}\n')
    assert "all.jsonl is damaged" in refusal(Store, store)
    (store / "journal" / "all.jsonl").write_text('{"id": "half a li')  # a kill left it
    assert len(Store(store)) == 6
    (store / "manifest.parquet").write_bytes(b"PAR1")
    assert "manifest.parquet is damaged" in refusal(Store, store)


@pytest.mark.parametrize(
    ("change", "times"),
    [
        ({}, 80_000),  # equal rows: their objects in memory
        ({"error": "e" * 20_000}, 4000),  # equal texts: in the file once
    ],
    ids=["equal rows", "equal texts"],
)
def test_a_manifest_of_kilobytes_whose_rows_need_very_much_memory_is_rejected(
    tmp_path, change, times
):
    row = Row.failed("a", "c" * 64, "no", {"method": "m", "model": "m", "fingerprint": "f"})
    write_manifest(LocalStorage(tmp_path), [replace(row, **change)] * times)
    assert (tmp_path / "manifest.parquet").stat().st_size < 1 << 23
    message = refusal(manifest_rows, LocalStorage(tmp_path))
    assert re.search(r"manifest.parquet is damaged: .* rows need more than \d+ MiB", message)


def test_documents_of_equal_length_share_a_batch(compress, tmp_path, monkeypatch):
    texts = ["the cat sees it", "the dog sees it", "a stone and the river", "the dog sees it"]
    rows = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
    batches = []
    trace = compressor_module.read_document

    def count(model, sequence, *options):
        batches.append(len(sequence.input_ids))
        return trace(model, sequence, *options)

    monkeypatch.setattr(compressor_module, "read_document", count)
    compress(write_rows(tmp_path / "corpus.jsonl", rows), tmp_path / "store")
    assert sorted(batches) == [1, 3]


def test_a_cache_in_the_store_outlives_a_device_without_memory_for_its_batch(
    compress, tmp_path, monkeypatch
):
    rows = [{"id": id, "text": "the cat sees it"} for id in ("made", "lost")]
    corpus = write_rows(tmp_path / "corpus.jsonl", rows)
    store = tmp_path / "store"
    compress(corpus, store)
    (store / cache_file("lost")).unlink()

    def no_memory_on_a_processor(*_, **__):
        torch.empty(1 << 58)

    def no_memory_on_a_gpu(*_, **__):
        raise torch.OutOfMemoryError

    for no_memory in (no_memory_on_a_processor, no_memory_on_a_gpu):
        monkeypatch.setattr(compressor_module, "read_document", no_memory)
        result = compress(corpus, store)
        assert (result.num_kept, [row.id for row in result.failures]) == (1, ["lost"])
        assert "not enough memory" in result.failures[0].error
    assert Store(store).ids == ("made",)
    assert Store(store)["made"].num_tokens > 0


def test_a_check_measures_kl_where_the_measured_cache_was_not_fitted(
    loaded, compress, corpus, tmp_path
):
    method = AttentionMatching()
    compress(corpus, tmp_path / "store", CorpusSettings(keep_ratio=0.2, check=True))
    fitted, held_out = split_supervision(kvcat.document_trace(*loaded, text_of(3)), 0.25)
    expected = supervised_kl(held_out, method(fitted, keep_ratio=0.2)).item()
    row = Store(tmp_path / "store").row("doc-3")
    assert row.kl == pytest.approx(expected, abs=1e-9)
    compress(corpus, tmp_path / "unchecked", CorpusSettings(keep_ratio=0.2))
    assert Store(tmp_path / "unchecked").row("doc-3").kl is None
    files = [store / cache_file("doc-3") for store in (tmp_path / "store", tmp_path / "unchecked")]
    assert files[0].read_bytes() == files[1].read_bytes()


def resident_bytes():
    """Memory of this process, as Linux counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_documents(compress, tmp_path):
    rows = [{"id": str(number), "text": f"the cat {number}"} for number in range(250)]
    source = write_rows(tmp_path / "corpus.jsonl", rows)
    first_rows = write_rows(tmp_path / "few.jsonl", rows[:50])
    settings = CorpusSettings(method="keynorm", keep_ratio=0.5)
    compress(first_rows, tmp_path / "store", settings)
    before = resident_bytes()
    compress(source, tmp_path / "store", settings)
    assert resident_bytes() - before < 30e6


@pytest.mark.slow
def test_a_command_that_is_killed_at_random_times_continues_to_the_same_store(
    tiny_folder, tmp_path
):
    rows = [{"id": str(number), "text": text_of(number)} for number in range(30)]
    source = write_rows(tmp_path / "corpus.jsonl", rows)

    def start(store):
        arguments = ["corpus", tiny_folder, source, "-o", store]
        return subprocess.Popen(
            [sys.executable, "-m", "kvcat", *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    assert start(tmp_path / "once").wait() == 0
    num_once = len(list((tmp_path / "once").rglob("*.safetensors")))
    assert num_once == 30
    draw = random.Random(1)
    for attempt in range(2):
        store = tmp_path / f"killed-{attempt}"
        command = start(store)
        while not list(store.rglob("*.safetensors")):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1.0))
        command.kill()
        assert command.wait() == -signal.SIGKILL
        assert start(store).wait() == 0
        assert contents(store) == contents(tmp_path / "once")


def test_a_remote_store_has_the_caches_of_a_local_one(corpus, compress, tmp_path):
    compress(corpus, tmp_path / "local")
    address = f"memory://{tmp_path.name}/store"
    compress(corpus, address)
    local = Store(tmp_path / "local")
    remote = Store(address)
    assert remote.ids == local.ids
    for id in local.ids:
        expected = Path(tmp_path / "local" / cache_file(id)).read_bytes()
        assert open_storage(address).read(cache_file(id)) == expected
    assert compress(corpus, address).num_made == 0


def rows_of(**texts):
    return [{"id": id, "text": text} for id, text in texts.items()]


def test_writers_of_one_remote_store_remove_nothing_of_each_other(compress, tmp_path, monkeypatch):
    """Another run on other documents ends after a cache was replaced, before its row is written."""
    address = f"memory://{tmp_path.name}/store"
    file = write_rows(tmp_path / "c.jsonl", rows_of(a="the cat sees a dog", b="a small red tree"))
    other = write_rows(tmp_path / "d.jsonl", rows_of(x="old stones", y=""))
    compress(file, address)
    add = StoreWriter.add

    def added(self, rows):
        add(self, rows)
        if any(row.id == "a" and row.error is None for row in rows):
            monkeypatch.setattr(StoreWriter, "add", add)
            assert len(compress(other, address).failures) == 1

    monkeypatch.setattr(StoreWriter, "add", added)
    write_rows(file, rows_of(a="by the river", b="a small red tree"))
    assert compress(file, address).num_made == 1
    assert StoreWriter.add is add
    store = Store(address)
    assert store.ids == ("a", "b", "x")
    assert [store[id].record.text_checksum for id in store.ids]


@pytest.mark.parametrize("second", [{}, {"e": "a red house"}])
def test_a_remote_manifest_that_replaces_a_newer_one_loses_no_document(
    compress, tmp_path, monkeypatch, second
):
    address = f"memory://{tmp_path.name}/store"
    first = rows_of(a="the cat sees a dog")
    compress(write_rows(tmp_path / "c.jsonl", first), address)
    others = write_rows(tmp_path / "d.jsonl", rows_of(c="old stones", d="by the river"))
    read = store_module.read_rows

    def read_before_another_run(storage):
        rows = read(storage)
        monkeypatch.setattr(store_module, "read_rows", read)
        compress(others, address)
        return rows

    finish = store_module._finish

    def finish_slowly(writer):
        monkeypatch.setattr(store_module, "_finish", finish)
        monkeypatch.setattr(store_module, "read_rows", read_before_another_run)
        finish(writer)
        if store_module.read_rows is not read:  # nothing was read, and nothing written
            monkeypatch.setattr(store_module, "read_rows", read)
            compress(others, address)

    monkeypatch.setattr(store_module, "_finish", finish_slowly)
    compress(write_rows(tmp_path / "c.jsonl", first + rows_of(**second)), address)
    assert Store(address).ids == tuple(sorted(["a", "c", "d", *second]))


def test_a_document_of_an_open_store_that_lost_its_text_says_so(compress, tmp_path):
    compress(write_rows(tmp_path / "c.jsonl", rows_of(a="the cat", b="a tree")), tmp_path / "store")
    store = Store(tmp_path / "store")
    compress(write_rows(tmp_path / "c.jsonl", rows_of(a="", b="a tree")), tmp_path / "store")
    assert "document 'a' has no cache: " in refusal(store.__getitem__, "a")


def write_store(address, settings):
    with open_writer(address, settings):
        pass


@pytest.mark.parametrize(
    ("is_remote", "enter"), [(False, check_store), (True, check_store), (True, write_store)]
)
def test_a_store_that_another_writer_makes_between_two_requests_is_no_other_folder(
    tmp_path, monkeypatch, is_remote, enter
):
    address = f"memory://{tmp_path.name}/store" if is_remote else tmp_path / "store"
    settings = STORED
    storage_type = type(open_storage(address))
    occupant = storage_type.occupant

    def occupant_after_another_writer(storage):
        monkeypatch.setattr(storage_type, "occupant", occupant)
        write_store(address, settings)
        return occupant(storage)

    monkeypatch.setattr(storage_type, "occupant", occupant_after_another_writer)
    enter(address, settings)
    assert storage_type.occupant is occupant
    assert len(Store(address)) == 0
