"""Streams: every document once, the same batches for any number of processes, exact continuation."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from kvcat.data import Encoder, TableSource, TokenStreams, TokenTable, merge_states, open_shards, open_tokens
from kvcat.data import shards as shards_module
from kvcat.data.reading import Position, StreamPlan, StreamReader
from kvcat.errors import InputError
from text_files import documents_in, of_split, texts, write_corpus, write_lines, write_table
from tiny import byte_tokenizer

KINDS = ("groups", "one group", "lines", "packed lines")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpora")
    return {kind: (f"stream:{root / kind}", write_corpus(root / kind, kind)) for kind in KINDS}


def streams_of(source, tokenizer, **options):
    return TokenStreams(open_shards(source), tokenizer, **{"seq_len": 16, "num_streams": 4, "seed": 0, **options})


def steps(source, streams, count):
    return torch.stack([source.read(streams) for _ in range(count)])


def epoch_tokens(source, tokenizer, num_streams, split, seed=0):
    """Each stream's tokens of the first epoch: read one at a time, so that each has its own position."""
    plan = StreamPlan(open_shards(source), Encoder.of(tokenizer), 1, num_streams, seed, split)
    for stream in range(num_streams):
        tokens = []
        for token, position in StreamReader(plan, stream, Position()):
            if position.epoch > 0:
                break
            tokens.append(int(token[0]))
        yield tokens


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("num_streams", [1, 2, 7, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_of_the_split_is_read_once_an_epoch(corpora, tokenizer, kind, num_streams, split):
    source, documents = corpora[kind]
    found = []
    for tokens in epoch_tokens(source, tokenizer, num_streams, split):
        found += documents_in(tokens, tokenizer)
    assert sorted(found) == sorted(of_split(documents, split).values())


def test_tokens_continue_across_documents_and_epochs_without_loss(tmp_path, tokenizer):
    documents = texts(30)
    write_table(tmp_path / "a.parquet", documents)
    (whole,) = epoch_tokens(f"stream:{tmp_path}", tokenizer, 1, "train")
    with streams_of(f"stream:{tmp_path}", tokenizer, num_streams=1, seq_len=7) as source:
        read = steps(source, [0], 2 * len(whole) // 7)
    assert read.flatten().tolist() == (whole + whole)[: read.numel()]


def test_streams_and_packing_agree_on_the_tokens_of_one_file(tmp_path, tokenizer):
    from kvcat.data import file_documents, pack, split_of

    write_corpus(tmp_path / "c", "groups", num_files=1)
    table = pack((d for d in file_documents(tmp_path / "c") if split_of(d.id) == "train"), tokenizer, 16)
    with streams_of(f"stream:{tmp_path / 'c'}", tokenizer, num_streams=1) as source:
        assert np.array_equal(steps(source, [0], len(table))[:, 0], table.sequences)


def test_another_seed_or_epoch_gives_the_files_in_another_order(corpora, tokenizer):
    shards, encoder = open_shards(corpora["groups"][0]), Encoder.of(tokenizer)
    plans = [StreamPlan(shards, encoder, 8, 6, seed, "train") for seed in range(3)]
    orders = [str([plan.items(stream, epoch) for stream in range(6)]) for plan in plans for epoch in range(3)]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["groups", "lines"])
def test_the_batches_are_the_same_for_any_world_size_and_micro_batch(corpora, tokenizer, kind, world_size):
    source = corpora[kind][0]
    expected = steps(streams_of(source, tokenizer), range(4), 12)
    for rank in range(world_size):
        own = list(range(rank, 4, world_size))
        part = streams_of(source, tokenizer, streams=own)
        rows = torch.stack([torch.cat([part.read([stream]) for stream in own]) for _ in range(12)])
        assert torch.equal(rows, expected[:, own])


@pytest.mark.parametrize("workers", [1, 2])
def test_the_batches_are_the_same_with_workers_and_continue_without(corpora, tokenizer, workers):
    source = corpora["groups"][0]
    expected = steps(streams_of(source, tokenizer), range(4), 9)
    with streams_of(source, tokenizer, workers=workers, read_ahead=3) as ahead:
        assert torch.equal(steps(ahead, range(4), 5), expected[:5])
        state = ahead.state_dict()
    alone = streams_of(source, tokenizer)
    alone.load_state_dict(state)
    assert torch.equal(steps(alone, range(4), 4), expected[5:])


@given(st.sampled_from(KINDS), st.integers(0, 25), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]))
@settings(max_examples=15, deadline=None)
def test_a_saved_state_continues_identically_at_another_world_size(corpora, tokenizer, kind, saved_at, before, after):
    source = corpora[kind][0]
    ranks = [list(range(rank, 4, before)) for rank in range(before)]
    parts = [streams_of(source, tokenizer, streams=own) for own in ranks]
    for part, own in zip(parts, ranks, strict=True):
        for _ in range(saved_at):
            part.read(own)
    state = json.loads(json.dumps(merge_states(part.state_dict() for part in parts)))
    for rank in range(after):
        own = list(range(rank, 4, after))
        fresh = streams_of(source, tokenizer, streams=own)
        fresh.load_state_dict(state)
        whole = streams_of(source, tokenizer)
        assert torch.equal(steps(fresh, own, 6), steps(whole, range(4), saved_at + 6)[saved_at:, own])


def test_a_state_is_five_numbers_a_stream_however_long_the_document(tmp_path, tokenizer):
    write_table(tmp_path / "a.parquet", {"e": "the cat sees a dog. " * 2000, "doc-1": "short"})
    source = streams_of(f"stream:{tmp_path}", tokenizer, num_streams=1)
    source.read([0])
    assert [len(position) for position in source.state_dict()["streams"].values()] == [5]
    again = streams_of(f"stream:{tmp_path}", tokenizer, num_streams=1)
    again.load_state_dict(source.state_dict())
    assert torch.equal(again.read([0]), source.read([0]))


def test_resuming_in_parquet_reads_no_row_group_before_the_place(tmp_path, tokenizer, monkeypatch):
    write_corpus(tmp_path / "c", "groups", num_files=1)
    source = streams_of(f"stream:{tmp_path / 'c'}", tokenizer, num_streams=1)
    steps(source, [0], 60)
    state = source.state_dict()
    group = state["streams"]["0"][2] // 4
    assert group > 3
    read, original = [], parquet.ParquetFile.iter_batches

    def iter_batches(self, size, groups, *rest, **options):
        read.extend(groups)
        return original(self, size, groups, *rest, **options)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", iter_batches)
    again = streams_of(f"stream:{tmp_path / 'c'}", tokenizer, num_streams=1)
    again.load_state_dict(state)
    assert torch.equal(again.read([0]), source.read([0]))
    assert min(read) == group


def test_resuming_in_json_lines_does_not_read_what_is_before_the_place(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    write_lines(file, texts(40))
    source = streams_of(f"stream:{file}", tokenizer, num_streams=1)
    steps(source, [0], 20)
    expected = source.state_dict()
    following = source.read([0])
    file.write_bytes(b"\xff" * 100 + file.read_bytes()[100:])
    again = streams_of(f"stream:{file}", tokenizer, num_streams=1)
    again.load_state_dict(expected)
    assert torch.equal(again.read([0]), following)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"seed": 1}, "seed is 0, not 1"), ({"num_streams": 5}, "num_streams"), ({"split": "validation"}, "split")],
)
def test_a_state_of_other_data_is_refused(corpora, tokenizer, options, told):
    state = streams_of(corpora["groups"][0], tokenizer).state_dict()
    with pytest.raises(InputError, match=told):
        streams_of(corpora["groups"][0], tokenizer, **options).load_state_dict(state)
    with pytest.raises(InputError, match="source"):
        streams_of(corpora["lines"][0], tokenizer).load_state_dict(state)
    with pytest.raises(InputError, match="tokenizer"):
        streams_of(corpora["groups"][0], byte_tokenizer(280)).load_state_dict(state)


def test_a_changed_local_file_is_refused_at_resume(tmp_path, tokenizer):
    write_lines(tmp_path / "a.jsonl", texts(9))
    state = streams_of(f"stream:{tmp_path}", tokenizer).state_dict()
    write_lines(tmp_path / "a.jsonl", texts(8))
    with pytest.raises(InputError, match="revision"):
        streams_of(f"stream:{tmp_path}", tokenizer).load_state_dict(state)


def test_a_hub_data_set_is_resumed_at_the_commit_it_was_begun_with(tmp_path, tokenizer, monkeypatch):
    from types import SimpleNamespace

    import datasets

    commits = {}
    for name, seed in (("old", 0), ("new", 50)):
        folder = tmp_path / f"o@{name}"
        folder.mkdir()
        write_table(folder / "a.parquet", texts(30, seed=seed))
        commits[name] = SimpleNamespace(config=SimpleNamespace(data_files={"train": [f"file://{folder}/a.parquet"]}))
    newest = ["old"]
    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda path, config, *, revision: commits[revision or newest[0]]
    )
    monkeypatch.setattr(shards_module, "hub_obstacle", lambda: None)
    source = streams_of("hub:o/n", tokenizer)
    source.read(range(4))
    state, following = source.state_dict(), source.read(range(4))
    newest[0] = "new"
    again = streams_of("hub:o/n", tokenizer)
    assert not torch.equal(steps(again, range(4), 2)[1], following)
    again.load_state_dict(state)
    assert torch.equal(again.read(range(4)), following)


def test_too_few_documents_for_the_streams_are_refused_by_name(tmp_path, tokenizer):
    write_table(tmp_path / "a.parquet", of_split(texts(200), "test"))
    with pytest.raises(InputError, match="has too few train documents for 2 streams"):
        streams_of(f"stream:{tmp_path}", tokenizer, num_streams=2).read([0])


def test_a_failed_read_moves_no_stream(tmp_path, tokenizer):
    good = texts(12)
    write_lines(tmp_path / "0.jsonl", good)
    write_lines(tmp_path / "1.jsonl", good)
    source = streams_of(f"stream:{tmp_path}", tokenizer, num_streams=2)
    source.read([0, 1])
    content = (tmp_path / "1.jsonl").read_bytes()
    (tmp_path / "1.jsonl").write_bytes(content[: len(content) // 2] + b"?" * (len(content) - len(content) // 2))
    source.close()
    states = []

    def read_on():
        for _ in range(50):
            states.append(source.state_dict())
            source.read([0, 1])

    with pytest.raises(InputError, match="not JSON"):
        read_on()
    before = source.state_dict()
    assert before == states[-1]
    (tmp_path / "1.jsonl").write_bytes(content)
    reference = streams_of(f"stream:{tmp_path}", tokenizer, num_streams=2)
    reference.load_state_dict(before)
    assert torch.equal(source.read([0, 1]), reference.read([0, 1]))


def test_streams_that_are_not_there_are_refused(corpora, tokenizer):
    source = streams_of(corpora["groups"][0], tokenizer, streams=[0, 2])
    for wrong in ([1], [0, 0], [4]):
        with pytest.raises(ValueError, match="not among"):
            source.read(wrong)
    with pytest.raises(ValueError, match="out of range"):
        streams_of(corpora["groups"][0], tokenizer, streams=[4])
    state = source.state_dict()
    with pytest.raises(ValueError, match="no stream 1"):
        streams_of(corpora["groups"][0], tokenizer).load_state_dict(state)
    with pytest.raises(ValueError, match="read by two"):
        merge_states([state, state])


@given(st.integers(3, 30), st.integers(0, 9), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
@settings(max_examples=20, deadline=None)
def test_a_table_gives_each_process_its_part_of_the_batch_and_continues(count, saved_at, before, after):
    table = TokenTable(np.arange(count * 2, dtype=np.uint16).reshape(count, 2), 1)
    ranks = [TableSource(table, 4, 3, streams=range(rank, 4, before)) for rank in range(before)]
    for rank, source in enumerate(ranks):
        for step in range(saved_at):
            own = range(rank, 4, before)
            assert torch.equal(source.read(own), table.batch(step, 4, 3)[list(own)])
    state = json.loads(json.dumps(merge_states(source.state_dict() for source in ranks)))
    for rank in range(after):
        own = list(range(rank, 4, after))
        source = TableSource(table, 4, 3, streams=own)
        source.load_state_dict(state)
        assert torch.equal(source.read(own), table.batch(saved_at, 4, 3)[own])
    with pytest.raises(InputError, match="num_streams"):
        TableSource(table, 5, 3).load_state_dict(state)


def test_the_order_of_a_table_never_changes():
    # results depend on it: the first sequences of the first and the second epoch, seed 7
    table = TokenTable(np.arange(10, dtype=np.uint16).reshape(10, 1), 1)
    expected = [np.random.default_rng([7, epoch]).permutation(10)[:5].tolist() for epoch in (0, 1)]
    assert [table.batch(step, 5, 7)[:, 0].tolist() for step in (0, 2)] == expected
    assert expected[0] == [8, 0, 7, 1, 3]


@pytest.mark.parametrize("form", ["stream", "whole"])
def test_opened_data_trains_on_training_documents_and_validates_on_others(corpora, tokenizer, form):
    streamed, documents = corpora["groups"]
    data = open_tokens(
        streamed if form == "stream" else streamed.removeprefix("stream:"),
        tokenizer, seq_len=8, batch_size=3, max_steps=40, validation_sequences=5, seed=1,
    )  # fmt: skip
    validation = tokenizer.decode(data.validation.sequences.flatten().tolist())
    numbers = [text.split(":")[0] for text in of_split(documents, "validation").values()]
    first = validation.split("<eos>")[0].split(":")[0]
    assert first in numbers
    assert data.train.read([2, 0]).shape == (2, 8)
    assert len(data.validation) <= 5


def test_text_without_validation_documents_is_refused_with_its_name(tmp_path, tokenizer):
    write_table(tmp_path / "a.parquet", of_split(texts(30), "train"))
    with pytest.raises(InputError, match=r"validation documents of stream:.*has 0 tokens"):
        open_tokens(
            f"stream:{tmp_path}", tokenizer, seq_len=8, batch_size=2, max_steps=1, validation_sequences=2, seed=0
        )


def test_the_encoder_gives_the_tokenizers_own_ids(tokenizer):
    encoder, draw = Encoder.of(tokenizer), random.Random(0)
    for text in ("", "the cat", "<eos> inside", "".join(chr(draw.randint(32, 0x2FFF)) for _ in range(500))):
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encoder(text).tolist() == [*expected, tokenizer.eos_token_id]
    assert (
        encoder.fingerprint == Encoder.of(byte_tokenizer()).fingerprint != Encoder.of(byte_tokenizer(280)).fingerprint
    )
