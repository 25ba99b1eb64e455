"""Streams: every document once, the same batches for any number of processes, exact
continuation."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from kvcat.data import Encoder, open_documents, open_tokens, pack, split_of
from kvcat.data import streams as streams_module
from kvcat.data.documents import open_source
from kvcat.data.streams import Position, TableStreams, TextStreams, TokenLoader, merge_states
from kvcat.errors import InputError
from text_files import documents_in, of_split, texts, write_corpus, write_lines, write_table
from tiny import byte_tokenizer

KINDS = ("groups", "one group", "lines", "packed lines")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpora")
    return {kind: (f"stream:{root / kind}", write_corpus(root / kind, kind)) for kind in KINDS}


def plan_of(source, tokenizer, *, seq_len=16, num_streams=4, seed=0):
    return TextStreams(open_source(source), Encoder.of(tokenizer), seq_len, num_streams, seed)


def streams_of(source, tokenizer, **options):
    return TokenLoader(plan_of(source, tokenizer, **options))


def steps(source, count):
    return torch.stack([source.read() for _ in range(count)])


def epoch_tokens(source, tokenizer, num_streams):
    """Each stream's tokens of the first epoch: read one at a time, so that each has its own
    position."""
    plan = plan_of(source, tokenizer, seq_len=1, num_streams=num_streams)
    for stream in range(num_streams):
        tokens = []
        for token, position in plan.sequences(stream, Position()):
            if position.epoch > 0:
                break
            tokens.append(int(token[0]))
        yield tokens


@pytest.mark.parametrize(
    ("kind", "num_streams"),
    [("groups", 1), ("groups", 70), ("one group", 7), ("lines", 7), ("packed lines", 7)],
)
def test_every_training_document_is_read_once_an_epoch(corpora, tokenizer, kind, num_streams):
    source, documents = corpora[kind]
    streams = epoch_tokens(source, tokenizer, num_streams)
    texts_read = [text for tokens in streams for text in documents_in(tokens, tokenizer)]
    assert sorted(texts_read) == sorted(of_split(documents, "train").values())


def test_the_tokens_of_one_file_are_those_that_packing_gives_epoch_after_epoch(tmp_path, tokenizer):
    write_table(tmp_path / "a.parquet", texts(30))
    documents = [d for d in open_documents(str(tmp_path)) if split_of(d.id) == "train"]
    whole = pack(documents, Encoder.of(tokenizer), 1).flatten().tolist()
    read = steps(
        streams_of(f"stream:{tmp_path}", tokenizer, num_streams=1, seq_len=7), 2 * len(whole) // 7
    )
    assert read.flatten().tolist() == (whole + whole)[: read.numel()]


@given(
    st.sampled_from([*KINDS, "table"]),
    st.integers(0, 25),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
)
@settings(max_examples=12, deadline=None)
def test_batches_and_their_continuation_are_the_same_for_any_world_size(
    corpora, tokenizer, kind, stop, before, after
):
    plan = table_streams(30) if kind == "table" else plan_of(corpora[kind][0], tokenizer)
    expected = steps(TokenLoader(plan), stop + 4)
    states = []
    for streams in (list(range(rank, 4, before)) for rank in range(before)):
        loader = TokenLoader(plan, streams=streams)
        assert all(torch.equal(loader.read(), expected[step, streams]) for step in range(stop))
        states.append(loader.state_dict())
    state = json.loads(json.dumps(merge_states(states)))
    for streams in (list(range(rank, 4, after)) for rank in range(after)):
        fresh = TokenLoader(plan, streams=streams)
        fresh.load_state_dict(state)
        assert torch.equal(steps(fresh, 4), expected[stop:, streams])


def test_resuming_reads_no_row_group_before_the_place(tmp_path, tokenizer, monkeypatch):
    def iter_batches(self, size, groups, *arguments, **options):
        read.extend(groups)
        return original(self, size, groups, *arguments, **options)

    write_corpus(tmp_path / "c", "groups", num_files=1)
    source, again = (
        streams_of(f"stream:{tmp_path / 'c'}", tokenizer, num_streams=1) for _ in range(2)
    )
    steps(source, 60)  # into the next epoch
    state = source.state_dict()
    following = steps(source, 120)
    read = []
    original = parquet.ParquetFile.iter_batches
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", iter_batches)
    again.load_state_dict(state)
    assert torch.equal(steps(again, 120), following)
    assert read[0] == state["streams"]["0"][2] // 4 > 3


def test_a_state_of_other_data_is_rejected(corpora, tokenizer, tmp_path):
    source = corpora["groups"][0]
    write_lines(tmp_path / "a.jsonl", texts(9))
    local = f"stream:{tmp_path}"
    state, local_state = (streams_of(name, tokenizer).state_dict() for name in (source, local))
    # as many bytes, and a copy of the first ones is the same data
    edited = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.jsonl").write_bytes(edited)
    streams_of(local, tokenizer).load_state_dict(local_state)
    (tmp_path / "a.jsonl").write_bytes(edited[:-5] + bytes(reversed(edited[-5:])))
    for loader_of, saved, message in (
        (streams_of(source, tokenizer, seed=1), state, "seed is 0, not 1"),
        (streams_of(source, tokenizer, num_streams=5), state, "num_streams"),
        (streams_of(corpora["lines"][0], tokenizer), state, "source"),
        (streams_of(source, byte_tokenizer(280)), state, "tokenizer"),
        (streams_of(local, tokenizer), local_state, "revision"),
        (
            TokenLoader(table_streams(9, num_streams=5)),
            TokenLoader(table_streams(9)).state_dict(),
            "num_streams",
        ),
        (
            TokenLoader(table_streams(9)),
            TokenLoader(TableStreams(np.zeros((9, 2)), 4, 3)).state_dict(),
            "tokens",
        ),
    ):
        with pytest.raises(InputError, match=message):
            loader_of.load_state_dict(saved)


def test_a_hub_data_set_is_resumed_at_the_commit_it_was_begun_with(
    tmp_path, tokenizer, monkeypatch
):
    for commit, seed in (("old", 0), ("new", 50)):
        (tmp_path / commit).mkdir()
        write_table(tmp_path / commit / "a.parquet", texts(30, seed=seed))

    def opened(newest, revision=None):
        def source(name, *, revision):
            there = revision or newest
            return replace(open_source(str(tmp_path / there)), name=name, commit=there)

        monkeypatch.setattr(streams_module, "open_source", source)
        sizes = {
            "seq_len": 16,
            "batch_size": 4,
            "max_steps": 9,
            "validation_sequences": 2,
            "seed": 0,
        }
        return open_tokens("hub:o/n", tokenizer, **sizes, revision=revision)

    old = opened("old")
    newer = opened("new")
    old.train.read()
    state = old.train.state_dict()
    following = old.train.read()
    again = opened("new", state["revision"])
    again.train.load_state_dict(state)
    assert torch.equal(again.train.read(), following)
    assert torch.equal(again.validation, old.validation)
    assert not torch.equal(newer.validation, old.validation)
    with pytest.raises(InputError, match="its revision is 'old', not 'new'"):
        newer.train.load_state_dict(state)


def test_a_failed_read_moves_no_stream(tmp_path, tokenizer):
    for name in "01":
        write_lines(tmp_path / f"{name}.jsonl", texts(12))
    source = streams_of(f"stream:{tmp_path}", tokenizer, num_streams=2)
    reference = streams_of(f"stream:{tmp_path}", tokenizer, num_streams=2)
    source.read()
    content = (tmp_path / "1.jsonl").read_bytes()
    (tmp_path / "1.jsonl").write_bytes(
        content[: len(content) // 2] + b"?" * (len(content) - len(content) // 2)
    )
    source.load_state_dict(source.state_dict())  # forgets what was read ahead
    before = None
    # The loop ends with the last state before the failure.
    with pytest.raises(InputError, match="not JSON"):  # noqa: PT012
        for _ in range(50):
            before = source.state_dict()
            source.read()
    assert source.state_dict() == before
    (tmp_path / "1.jsonl").write_bytes(content)
    reference.load_state_dict(before)
    assert torch.equal(source.read(), reference.read())


def table_streams(count, seed=3, num_streams=4):
    return TableStreams(np.arange(2 * count, dtype=np.uint16).reshape(count, 2), num_streams, seed)


def test_the_order_of_a_table_and_its_state_never_change():
    # runs continue with them: the first sequences of the first and the second epoch, seed 7
    source = TokenLoader(table_streams(10, 7, 5))
    orders = [(source.read()[:, 0] // 2).tolist() for _ in range(3)]
    assert orders[::2] == [
        np.random.default_rng([7, epoch]).permutation(10)[:5].tolist() for epoch in (0, 1)
    ]
    assert orders[0] == [8, 0, 7, 1, 3]
    identity = {
        "kind": "table",
        "num_sequences": 10,
        "num_streams": 5,
        "seed": 7,
        "tokens": 3937112331,
    }
    assert source.state_dict() == {**identity, "streams": {str(stream): [3] for stream in range(5)}}


@pytest.mark.parametrize("form", ["stream:", ""])
def test_opened_data_trains_on_training_documents_and_validates_on_others(corpora, tokenizer, form):
    streamed, documents = corpora["groups"]
    options = {"seq_len": 8, "batch_size": 3, "max_steps": 40, "validation_sequences": 5, "seed": 1}
    data = open_tokens(form + streamed.removeprefix("stream:"), tokenizer, **options)
    numbers = [text.split(":")[0] for text in of_split(documents, "validation").values()]
    assert tokenizer.decode(data.validation.flatten().tolist()).split(":")[0] in numbers
    assert data.train.read().shape == (3, 8)
    assert len(data.validation) <= 5


@pytest.mark.parametrize("form", ["stream:", ""])
def test_a_state_belongs_to_its_validation_documents(tmp_path, tokenizer, form):
    documents = texts(200)
    write_lines(tmp_path / "a.jsonl", documents)
    options = {"seq_len": 8, "batch_size": 3, "max_steps": 9, "validation_sequences": 5, "seed": 1}
    source = f"{form}{tmp_path / 'a.jsonl'}"
    state = open_tokens(source, tokenizer, **options).state_dict()
    open_tokens(source, tokenizer, **options).load_state_dict(state)
    for name in of_split(documents, "validation"):
        documents[name] = documents[name][::-1]  # as many bytes, so that the file has its old size
    write_lines(tmp_path / "a.jsonl", documents)
    changed = open_tokens(source, tokenizer, **options)
    with pytest.raises(InputError, match=r"belongs to other data: its (revision|validation) is"):
        changed.load_state_dict(state)
