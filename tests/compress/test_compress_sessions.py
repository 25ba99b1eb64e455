"""Sessions: exact until the first compaction, compacted without harm to what must stay, saved."""

import copy
import json
import shutil
import subprocess
import sys
from datetime import datetime

import pytest
import torch
from structured_heads import eager_attention

from kvcat import Session
from kvcat.cache import CompactCache
from kvcat.cache.files import SESSION, read_tensors, write_tensors
from kvcat.compress import Eviction, replay, trace
from kvcat.compress.documents import INSTRUCTION
from kvcat.compress.sessions.files import session_lock
from kvcat.text.encoder import TextEncoder
from tiny import byte_tokenizer, loud_model, refusal

TOKENS = torch.randint(3, 60, (100,), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return loud_model(
        dtype=torch.float64,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        std=0.25,
    )


@pytest.fixture
def make(model, tokenizer):
    def session(**options):
        return Session(model, tokenizer, **{"budget": 40, "tail": 8, "room": 10, **options})

    return session


@torch.no_grad()
def dense_logits(model, ids):
    return model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]


def same_state(first, second):
    for name in ("keys", "values", "queries"):
        pairs = zip(getattr(first._state, name), getattr(second._state, name), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(first.ids, second.ids)
    for one, other in zip(first.cache.layers, second.cache.layers, strict=True):
        assert one.tensors().keys() == other.tensors().keys()
        assert all(torch.equal(tensor, other.tensors()[k]) for k, tensor in one.tensors().items())
    kept, other_kept = first._state.past_queries, second._state.past_queries
    assert (kept is None) == (other_kept is None)
    if kept is not None:
        same_queries(kept, other_kept)


def same_queries(kept, other):
    assert torch.equal(kept.positions, other.positions)
    assert kept.place == other.place
    for name in ("log_mass", "log_elsewhere"):
        masses = zip(getattr(kept, name), getattr(other, name), strict=True)
        assert all(torch.equal(*both) for both in masses)
    for name in ("states", "outputs"):
        for rows, other_rows in zip(getattr(kept, name), getattr(other, name), strict=True):
            assert torch.equal(rows.integers, other_rows.integers)
            assert torch.equal(rows.scales, other_rows.scales)


def test_a_session_within_its_budget_has_the_dense_models_logits(model, make):
    session = make(budget=100)
    dense = dense_logits(model, TOKENS)
    for start, stop in ((0, 20), (20, 21), (21, 60)):
        session.append(TOKENS[start:stop])
        torch.testing.assert_close(session.next_logits, dense[stop - 1], rtol=0, atol=1e-10)
    torch.testing.assert_close(session.score(TOKENS[60:]), dense[60:], rtol=0, atol=1e-10)
    assert (session.num_tokens, session.held_slots, session.num_compactions) == (60, 60, 0)


def test_tokens_in_pieces_are_as_at_once_before_a_compaction(make):
    at_once = make(budget=100)
    at_once.append(TOKENS[:50])
    in_pieces = make(budget=100, piece=7)
    for turn in TOKENS[:50].split(13):
        in_pieces.append(turn)
    torch.testing.assert_close(at_once.next_logits, in_pieces.next_logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(at_once._state.queries, in_pieces._state.queries)


def test_a_session_stays_within_its_budget_and_its_tail_stays_exact(model, make):
    session = make(num_kept=16)
    dense = trace(model, TOKENS.unsqueeze(0), supervision="self")
    for turn in TOKENS.split(7):
        session.append(turn)
        assert session.held_slots <= 40
        assert session._state.num_exact >= min(8, session.num_tokens)
        assert session.num_compactions or torch.allclose(
            session._state.keys[1], dense.keys[1][:, :, : session.num_tokens]
        )
    assert session.num_compactions >= 5
    assert len(session._state.past_queries.positions) == 16
    # the first layer's keys do not depend on what came before
    first_exact = session._state.past_len
    assert torch.allclose(session._state.keys[0], dense.keys[0][:, :, first_exact:])
    assert session.cache.num_tokens == 100
    assert session.cache.mean_slots == session.held_slots


def test_a_session_keeps_the_queries_of_a_repetition_of_what_it_compacts(model, make, tokenizer):
    session = make()
    session.append(TOKENS[:50])
    kept = session._state.past_queries
    assert kept.positions.tolist() == list(range(42))
    instruction = torch.tensor(TextEncoder(tokenizer).behind(INSTRUCTION))
    ids = torch.cat([TOKENS[:42], instruction, TOKENS[:42]]).unsqueeze(0)
    attention = eager_attention(model, ids)
    dense = trace(model, TOKENS[:42].unsqueeze(0), supervision="self")
    for layer, keys in enumerate(dense.keys):
        scores = kept.states[layer].numbers() @ keys.repeat_interleave(2, 1).mT
        scores = scores * dense.scales[layer]
        total = torch.logaddexp(scores.logsumexp(-1), kept.log_elsewhere[layer])
        shares = (scores - total.unsqueeze(-1)).exp()
        # queries are kept in 8 bits
        torch.testing.assert_close(shares, attention[layer][:, :, -42:, :42], rtol=0, atol=0.02)


@pytest.mark.parametrize(("method", "num_tokens"), [("streaming", 50), ("attention-matching", 200)])
def test_without_a_use_or_without_positions_nothing_is_repeated(make, method, num_tokens):
    session = make(method=method, num_kept=256)
    tokens = TOKENS.repeat(2)[:num_tokens]
    session.append(tokens)
    # a token's own queries are kept as those of its part, not as those of a repetition
    kept = session._state.past_queries
    assert (kept.starts <= kept.positions).all()
    assert len(kept) == num_tokens - 8


def test_a_budget_in_bytes_holds_as_many_slots_as_fit_and_is_never_exceeded(model, tokenizer, make):
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    num_heads = config.num_hidden_layers * config.num_key_value_heads
    per_slot = num_heads * (2 * head_dim + 1) * 8  # key, value and log-bias in float64
    num_bytes = 41 * per_slot - 1
    session = Session(model, tokenizer, budget_bytes=num_bytes, tail=8, room=10)
    in_slots = make(budget=40)
    assert session.budget == 40
    for turn in TOKENS.split(9):
        session.append(turn)
        in_slots.append(turn)
        assert session.cache.nbytes <= num_bytes
    assert session.num_compactions > 2
    same_state(session, in_slots)


def test_nbytes_counts_slots_exact_tokens_and_kept_queries(make):
    session = make(num_kept=16)
    assert session.nbytes == 0
    session.append(TOKENS[:20])
    state = session._state
    by_token = sum(x[0, :, 0].nbytes for x in [*state.keys, *state.values, *state.queries])
    assert session.nbytes == 20 * (by_token + state.hidden[0, 0].nbytes)
    session.append(TOKENS[20:80])
    without = make(num_kept=0)
    without.append(TOKENS[:20])
    without.append(TOKENS[20:80])
    num_queries = sum(queries.shape[1] for queries in state.queries)
    head_dim = state.queries[0].shape[3]
    # a query and an output in 8 bits, a scale and a mass of each in float64
    kept_bytes = 16 * num_queries * (2 * head_dim + 4 * 8)
    assert session.nbytes - without.nbytes == kept_bytes


def test_score_does_not_change_the_session(make):
    session = make()
    other = make()
    for turn in TOKENS[:80].split(10):
        session.append(turn)
        other.append(turn)
        first = session.score(TOKENS[80:])
        assert torch.equal(first, session.score(TOKENS[80:]))
    assert session.num_compactions > 1
    same_state(session, other)
    session.append(TOKENS[80:84])
    assert torch.allclose(session.next_logits, first[3], atol=1e-10)


def test_positions_after_compactions_are_those_of_a_masked_dense_forward(model, make):
    # eviction by first positions keeps tokens 0..21, and each token saw what was held when it came
    session = make(method="first")
    num_tokens = len(TOKENS)
    visible = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    held = torch.zeros(num_tokens, dtype=torch.bool)
    for start in range(0, num_tokens, 10):
        stop = start + 10
        visible[start:stop] = held
        visible[start:stop, start:stop] = torch.ones(10, 10, dtype=torch.bool).tril()
        held[start:stop] = True
        session.append(TOKENS[start:stop])
        if held.sum() > 40:
            held[22 : stop - 8] = False
        assert int(held.sum()) == session.held_slots
    assert session.num_compactions > 2
    mask = torch.zeros(1, 1, num_tokens, num_tokens, dtype=torch.float64)
    mask = mask.masked_fill(~visible, -torch.inf)
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            masked = model(input_ids=TOKENS.unsqueeze(0), attention_mask=mask).logits[0, -1]
    finally:
        model.set_attn_implementation(before)
    torch.testing.assert_close(session.next_logits, masked, rtol=0, atol=1e-10)


@torch.no_grad()
def greedy(model, ids, steps):
    """The stock model's most likely next tokens, each by a forward over the whole text."""
    for _ in range(steps):
        ids = torch.cat([ids, dense_logits(model, ids)[-1:].argmax(-1)])
    return ids[-steps:]


def test_generation_within_the_budget_is_the_stock_models_and_is_appended(model, make, tokenizer):
    session = make(budget=100)
    session.append(TOKENS[:20])
    expected = greedy(model, TOKENS[:25], 12)
    ends = (expected == tokenizer.eos_token_id).nonzero().flatten().tolist()
    expected = expected[: ends[0] + 1] if ends else expected
    ids = session.generate_ids(TOKENS[20:25], max_new_tokens=12)
    assert ids.tolist() == expected.tolist()
    whole = torch.cat([TOKENS[:25], expected])
    assert torch.equal(session.ids, whole)
    torch.testing.assert_close(
        session.next_logits, dense_logits(model, whole)[-1], rtol=0, atol=1e-10
    )
    text = make(budget=100)
    text.append(TOKENS[:20])
    assert text.generate(TOKENS[20:25], max_new_tokens=12) == tokenizer.decode(
        expected, skip_special_tokens=True
    )


class Heard:
    """A streamer that remembers what it is given."""

    def __init__(self):
        self.values = []
        self.num_ends = 0

    def put(self, value):
        self.values.append(value.flatten().tolist())

    def end(self):
        self.num_ends += 1


def test_a_long_answer_is_compacted_on_the_way_and_streamed_once(make):
    session = make()
    heard = Heard()
    torch.manual_seed(0)
    answer = session.generate_ids(
        TOKENS[:30], max_new_tokens=60, streamer=heard, do_sample=True, temperature=5.0
    )
    assert session.num_compactions > 2
    assert session.held_slots <= 40
    assert session.num_tokens == 30 + len(answer)
    assert heard.values[0] == [TOKENS[29]]
    assert [token for value in heard.values[1:] for token in value] == answer.tolist()
    assert heard.num_ends == 1


def test_the_cache_of_a_session_names_its_own_keep_ratio(make):
    session = make()
    for tokens in (TOKENS[:20], TOKENS):
        session.append(tokens)
        cache = session.cache
        assert float(cache.metadata["keep_ratio"]) == pytest.approx(
            cache.mean_slots / cache.num_tokens, abs=1e-6
        )


def test_the_cache_of_a_session_names_its_protected_slots(model, make):
    session = make(protect=[(2, 5)])
    session.append(TOKENS[:70])
    session.append(TOKENS[70:75], protect=True)
    assert session.num_compactions
    cache = session.cache
    assert cache.metadata["protected"] == "2:5"
    assert cache.metadata["protected_later"] == "70:75"
    exact = trace(model, TOKENS[:6].unsqueeze(0), 5).keys[0][0, 0, 2:]
    torch.testing.assert_close(cache.layers[0].head(0, 0).keys[:3], exact, rtol=0, atol=1e-10)
    assert "protected slots after others" in refusal(cache.quantize, 8)
    tokens = TOKENS[:90].unsqueeze(0)
    assert "a session's last tokens" in refusal(trace, model, tokens, 80, past=cache)


def test_settings_that_a_session_cannot_follow_are_rejected_before_the_prompt(make):
    session = make()
    session.append(TOKENS[:20])
    for name in ("num_beams", "num_return_sequences", "repetition_penalty", "min_new_tokens"):
        said = refusal(session.generate_ids, TOKENS[:5], **{name: 2})
        assert f"a session has no {name}" in said
        assert "temperature" in said
    for unknown in ("temp", "max_tokens"):
        said = refusal(session.chat, "the cat", **{unknown: 1})
        assert f"no generation setting {unknown!r}" in said
    assert session.num_tokens == 20


def test_an_end_of_text_token_of_id_0_ends_an_answer(make):
    answers = []
    for ends in ([0], 0):
        session = make(budget=200)
        session.append(TOKENS[:30])
        torch.manual_seed(5)
        options = {"do_sample": True, "temperature": 90.0, "eos_token_id": ends}
        answers.append(session.generate_ids(max_new_tokens=150, **options).tolist())
    assert answers[0] == answers[1]
    assert answers[0].index(0) == len(answers[0]) - 1 < 149


class Broken(Heard):
    """A streamer that fails at the third token."""

    def put(self, value):
        super().put(value)
        if len(self.values) == 4:
            raise KeyboardInterrupt


def test_a_session_whose_answer_fails_is_as_it_was_before_the_prompt(model, make):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    chatting = Session(model, tokenizer, budget=40, tail=8)
    chatting.turn("the old cat sees the old cat and the dog", role="system")
    asked = make()
    asked.append(TOKENS[:20])
    for session, ask in ((chatting, chatting.chat), (asked, asked.generate)):
        before = session.ids
        with pytest.raises(KeyboardInterrupt):
            ask("the cat keeps a small red stone", streamer=Broken())
        assert torch.equal(session.ids, before)
    fresh = Session(model, tokenizer, budget=40, tail=8)
    fresh.turn("the old cat sees the old cat and the dog", role="system")
    for session in (chatting, fresh):
        session.turn("a river")
    assert torch.equal(chatting.ids, fresh.ids)


def test_a_saved_session_continues_with_the_same_bits(model, tokenizer, make, tmp_path):
    path = tmp_path / "talk.session"
    for num_tokens in (0, 20, 90):
        session = make(protect=[(0, 3)], num_kept=16)
        if num_tokens:
            session.append(TOKENS[:num_tokens])
        session.save(path)
        session.close()
        with Session.load(path, model, tokenizer) as loaded:
            if num_tokens:
                same_state(session, loaded)
            for each in (session, loaded):
                each.append(TOKENS[num_tokens:])
                each.append(TOKENS[:30])
            same_state(session, loaded)
            assert session.num_compactions == loaded.num_compactions > 0
            assert torch.equal(session.next_logits, loaded.next_logits)
            assert loaded.protect == ((0, 3),)


def test_a_session_that_is_written_while_it_is_loaded_is_loaded_as_written_last(
    model, tokenizer, make, tmp_path, monkeypatch
):
    path = tmp_path / "talk.session"
    later = tmp_path / "later.session"
    session = make()
    session.append(TOKENS[:20])
    session.save(path)
    session = make(budget=60)
    session.append(TOKENS[:20])
    session.append(TOKENS[20:23], protect=True)
    session.append(TOKENS[23:90])
    session.save(later)
    session.close()

    def written_meanwhile(locked):
        shutil.copy(later, locked)
        return session_lock(locked)

    monkeypatch.setattr("kvcat.compress.sessions.session.session_lock", written_meanwhile)
    with Session.load(path, model, tokenizer) as loaded:
        assert (loaded.budget, loaded.protect) == (60, ((20, 23),))
        for each in (session, loaded):
            each.append(TOKENS[:60])
        same_state(session, loaded)


def test_a_file_that_is_damaged_or_of_another_model_or_in_use_is_rejected(
    model, tokenizer, make, tmp_path
):
    path = tmp_path / "talk.session"
    session = make()
    session.append(TOKENS[:60])
    session.save(path)
    assert "in use" in refusal(Session.load, path, model, tokenizer)
    assert "in use" in refusal(make().save, path)
    session.save(path)
    session.close()
    other = loud_model(dtype=torch.float64, vocab_size=len(tokenizer), max_position_embeddings=256)
    assert "belongs to another model" in refusal(Session.load, path, other, tokenizer)
    content = path.read_bytes()
    for damaged in (content[:-9], content[:-1] + bytes([content[-1] ^ 1]), b"", content[:40]):
        path.write_bytes(damaged)
        message = refusal(Session.load, path, model, tokenizer)
        assert "truncated" in message or "corrupt" in message
    session.cache.save(path)
    assert "is a compact cache of kvcat, not a session" in refusal(
        Session.load, path, model, tokenizer
    )
    assert "no cache file" in refusal(Session.load, tmp_path / "none", model, tokenizer)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("settings budget", float("nan")),
        ("settings budget", None),
        ("settings protect", [[0]]),
        ("settings tail", True),
        ("conversation turns", [["user"]]),
        ("conversation", 3),
        ("scales", [1.0]),
        ("scales", []),
        ("place", 10**30),
        ("num_compactions", "two"),
        ("compact", {}),
        ("compact num_tokens", "7"),
        ("ids", torch.zeros(3)),
        ("ids", torch.full((60,), 10**6)),
        ("keys.0", torch.zeros(1, 2, 8, 9, dtype=torch.float64)),
        ("values.1", torch.full((1, 2, 8, 8), torch.nan, dtype=torch.float64)),
        ("queries.1", None),
        ("hidden", torch.tensor(1.0)),
        ("past.positions", torch.arange(5).flip(0)),
        ("past.outputs.scales.0", torch.zeros(0)),
    ],
)
def test_what_is_no_session_is_rejected_though_the_checksum_is_right(
    model, tokenizer, make, tmp_path, place, value
):
    path = tmp_path / "talk.session"
    with make(num_kept=5) as session:
        session.append(TOKENS[:60])
        session.save(path)
    entries, tensors, _ = read_tensors(path, SESSION)
    content = json.loads(entries["content"])
    if place in tensors:
        tensors[place] = value
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    else:
        *folders, last = place.split()
        table = content[folders[0]] if folders else content
        assert last in table
        table[last] = value
    write_tensors(path, tensors, {**entries, "content": json.dumps(content)}, SESSION)
    message = refusal(Session.load, path, model, tokenizer)
    assert message.startswith(str(path))
    assert "\n" not in message


def test_a_file_in_use_by_another_process_is_rejected_and_free_when_that_one_ends(
    model, tokenizer, make, tmp_path
):
    path = tmp_path / "talk.session"
    with make() as session:
        session.append(TOKENS[:60])
        session.save(path)
    code = (
        "import sys, time; from filelock import FileLock; "
        f"lock = FileLock({str(path.with_name('.talk.session.lock'))!r}); lock.acquire(); "
        "print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline().strip() == b"held"
        before = path.read_bytes()
        assert "in use" in refusal(Session.load, path, model, tokenizer)
        assert "in use" in refusal(session.save, path)
        assert path.read_bytes() == before
        holder.kill()
    Session.load(path, model, tokenizer).close()


def test_what_a_killed_process_had_written_is_removed_with_the_next_lock(
    model, tokenizer, make, tmp_path
):
    path = tmp_path / "talk.session"
    with make() as session:
        session.append(TOKENS[:60])
        session.save(path)
    of_another = tmp_path / ".partial-1-2-a-talk.session"
    partial = tmp_path / ".partial-1-2-talk.session"
    for file in (partial, of_another):
        file.write_bytes(b"a part")
    with Session.load(path, model, tokenizer):
        assert not partial.exists()
    assert of_another.exists()


def test_a_session_with_a_compressor_object_names_its_method_again(
    model, tokenizer, make, tmp_path
):
    path = tmp_path / "talk.session"
    method = Eviction("streaming", num_sinks=2)
    with make(method=method) as session:
        session.append(TOKENS[:60])
        session.save(path)
    assert "does not name its method: give method=" in refusal(Session.load, path, model, tokenizer)
    with Session.load(path, model, tokenizer, method=method) as loaded:
        same_state(session, loaded)


@pytest.mark.parametrize("method", ["attention-matching", "streaming", "refined,num_steps=1"])
def test_protected_tokens_stay_exact_through_every_compaction(model, make, method):
    session = make(method=method, protect=[(0, 4)])
    session.append(TOKENS[:20])
    session.append(TOKENS[20:23], protect=True)
    dense = trace(model, TOKENS[:23].unsqueeze(0), supervision="self")
    for turn in TOKENS[23:].split(9):
        session.append(turn)
    assert session.protect == ((0, 4), (20, 23))
    assert session.num_compactions > 2
    positions = torch.tensor([0, 1, 2, 3, 20, 21, 22])
    for layer, keys, values in zip(
        session._state.compact.layers, dense.keys, dense.values, strict=True
    ):
        for head in range(2):
            kept = layer.head(0, head)
            kept_keys, kept_values, bias = kept.keys, kept.values, kept.log_bias
            torch.testing.assert_close(kept_keys[:7], keys[0, head, positions])
            torch.testing.assert_close(kept_values[:7], values[0, head, positions])
            assert bias is None or not bias[:7].any()


def test_more_protected_tokens_than_the_budget_holds_are_rejected_and_nothing_changes(make):
    session = make()
    session.append(TOKENS[:30])
    before = session.next_logits
    message = refusal(session.append, TOKENS[30:60], protect=True)
    assert message.startswith("budget=40 slots hold no slot besides the tail of 8, room for 10 and")
    assert (session.num_tokens, session.protect) == (30, ())
    assert torch.equal(session.next_logits, before)
    message = refusal(session.append, [3] * 300)
    assert "exceed the model's 256 positions" in message
    assert session.num_tokens == 30


def test_protected_tokens_stay_exact_though_the_method_rounds_again_and_again(
    make, model, tokenizer, tmp_path
):
    session = make(method="attention-matching,bits=8", protect=[(0, 2)])
    session.append(TOKENS[:4])
    session.append(TOKENS[4:7], protect=True)
    exact = [
        (keys[:, :, [0, 1, 4, 5, 6]], values[:, :, [0, 1, 4, 5, 6]])
        for keys, values in zip(session._state.keys, session._state.values, strict=True)
    ]
    for turn in TOKENS[7:].split(20):
        session.append(turn)
    assert session.num_compactions > 2
    session.save(tmp_path / "talk")
    session.close()
    with Session.load(tmp_path / "talk", model, tokenizer) as loaded:
        compact = loaded._state.compact
    assert compact.bits == 8
    for layer, (keys, values) in zip(compact.layers, exact, strict=True):
        for head in range(keys.shape[1]):
            slots = layer.head(0, head)
            assert torch.equal(slots.keys[:5], keys[0, head])
            assert torch.equal(slots.values[:5], values[0, head])


def test_a_copy_of_a_session_is_a_branch_that_leaves_the_lock_to_the_session(
    make, model, tokenizer, tmp_path
):
    session = make()
    session.append(TOKENS[:50])
    session.save(tmp_path / "talk")
    branch = copy.copy(session)
    branch.append(TOKENS[50:90])
    alone = make()
    for turn in (TOKENS[:50], TOKENS[50:90]):
        alone.append(turn)
    same_state(branch, alone)
    assert session.num_tokens == 50
    assert "is in use" in refusal(branch.save, tmp_path / "talk")
    branch.save(tmp_path / "branch")
    branch.close()
    assert "is in use" in refusal(Session.load, tmp_path / "talk", model, tokenizer)
    session.close()
    Session.load(tmp_path / "talk", model, tokenizer).close()


def test_arguments_that_cannot_be_right_are_rejected(make):
    assert "budget=18 slots" in refusal(make, budget=18)
    assert "one of budget (slots) and budget_bytes" in refusal(make, budget_bytes=10_000)
    assert "one of budget (slots) and budget_bytes" in refusal(make, budget=None)
    assert "budget=0 slots" in refusal(make, budget=None, budget_bytes=100)
    assert "budget_bytes is 0" in refusal(make, budget=None, budget_bytes=0)
    assert "tail is 0; it must be at least 1" in refusal(make, tail=0)
    assert "num_kept is -1" in refusal(make, num_kept=-1)
    for method in ("snapkv", "h2o", "tova", "h2o,bits=8", "gradient,init=snapkv"):
        assert "needs all queries of the prefix" in refusal(make, method=method)
    assert "no compressor 'zip'" in refusal(make, method="zip")
    session = make()
    assert "holds no token" in refusal(lambda: session.next_logits)
    assert "holds no token" in refusal(lambda: session.cache)
    assert "holds no token" in refusal(session.generate)
    assert "no token to append" in refusal(session.append, [])
    assert "one row" in refusal(session.append, torch.zeros(2, 3, dtype=torch.long))
    assert "nothing to compress" in refusal(session.compact)
    sliding = loud_model("mistral", sliding_window=16)
    message = refusal(Session, sliding, byte_tokenizer(), budget=100)
    assert "sliding windows are not compressed in sessions" in message
    layer_types = ["conv", "full_attention"]
    recurrent = loud_model("lfm2", layer_types=layer_types, block_auto_adjust_ff_dim=False)
    message = refusal(Session, recurrent, byte_tokenizer(), budget=100)
    assert "recurrent state are not compressed in sessions" in message


def test_a_model_that_changes_during_a_session_is_rejected_until_it_is_as_before(tokenizer):
    changing = loud_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    session = Session(changing, tokenizer, budget=40, tail=8)
    session.append(TOKENS[:20])
    expected = session.next_logits
    weight = changing.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        weight.mul_(2)
    for call, *arguments in (
        (session.append, TOKENS[20:22]),
        (session.score, TOKENS[20:22]),
        (session.generate,),
        (session.compact,),
        (getattr, session, "next_logits"),
    ):
        assert "the model has changed" in refusal(call, *arguments)
    with torch.no_grad():
        weight.div_(2)
    assert session.num_tokens == 20
    assert torch.equal(session.next_logits, expected)


def test_the_cache_of_a_session_answers_like_the_session(model, make, tmp_path):
    session = make(num_kept=8)
    session.append(TOKENS[:70])
    assert session.num_compactions
    cache = session.cache
    logits = replay(model, cache, TOKENS[70:].unsqueeze(0))[0]
    torch.testing.assert_close(session.score(TOKENS[70:]), logits, rtol=0, atol=1e-10)
    cache.save(tmp_path / "c")
    loaded = CompactCache.load(tmp_path / "c", model)
    assert torch.equal(replay(model, loaded, TOKENS[70:].unsqueeze(0))[0], logits)


def test_sessions_of_one_process_do_not_touch_each_other(make):
    first, second, alone = make(), make(method="streaming"), make()
    for turn in TOKENS.split(10):
        first.append(turn)
        alone.append(turn)
        second.append(turn.flip(0))
    same_state(first, alone)
    assert second.num_tokens == 100


def test_a_text_that_repeats_the_text_before_is_appended_like_any_other(make):
    session = make(budget=100)
    for turn in (TOKENS[:8], TOKENS[:8], TOKENS[:20]):
        session.append(turn)
    assert session.num_tokens == 36


CHATML = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("temperature", [0.1, 9.0])
def test_turns_are_appended_once_and_are_those_of_the_whole_conversation(model, temperature):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    session = Session(model, tokenizer, budget=250, tail=8)
    session.turn("then it was", role="system", protect=True)
    torch.manual_seed(1)
    options = {"max_new_tokens": 5, "do_sample": True, "temperature": temperature}
    answers = [session.chat(text, **options) for text in ("the cat", "a <eos> dog")]
    turns = [
        {"role": "system", "content": "then it was"},
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "a <eos> dog"},
    ]
    written = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    held = tokenizer.decode(session.ids)
    assert held.startswith(written)
    assert held.removeprefix(written).removesuffix("<eos>") == answers[1]
    # the second question spells a control token, which stays text
    prompt = tokenizer.decode(session.ids[session.ids != tokenizer.eos_token_id])
    assert "[user]a <eos> dog[assistant]" in prompt
    system = tokenizer("[system]then it was<eos>").input_ids
    assert session.protect == ((0, len(system)),)
    assert session.ids[: len(system)].tolist() == system


@pytest.mark.parametrize("ends", [0, [0], [5, 0]])
def test_a_control_token_that_a_setting_names_as_the_end_is_appended_once(tokenizer, ends):
    # every logit is 0, so that every token is the first one, <eos>
    model = loud_model(vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=5)
    model.lm_head.weight.data.zero_()
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    session = Session(model, tokenizer, budget=250, tail=8)
    assert session.chat("the cat", max_new_tokens=9, eos_token_id=ends) == ""
    session.turn("a dog")
    assert tokenizer.decode(session.ids) == "[user]the cat<eos>[assistant]<eos>[user]a dog<eos>"


@pytest.mark.parametrize("ends", ["full stop", None])
def test_an_ordinary_token_that_ends_an_answer_is_part_of_its_text(model, ends):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    probe = Session(model, tokenizer, budget=250, tail=8)
    first = probe.chat("the cat", max_new_tokens=1)
    last = int(probe.ids[-1])
    assert last != tokenizer.eos_token_id
    session = Session(model, tokenizer, budget=250, tail=8)
    options = {"max_new_tokens": 1, "eos_token_id": None if ends is None else last}
    assert session.chat("the cat", **options) == first == tokenizer.decode([last])
    session.turn("a dog")
    held = tokenizer.decode(session.ids)
    assert held == f"[user]the cat<eos>[assistant]{first}<eos>[user]a dog<eos>"


AS_PARTS = CHATML.replace(
    "{{ m['content'] }}",
    "{% for part in m['content'] %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}",
)


@pytest.mark.parametrize("template", [CHATML, AS_PARTS])
def test_a_turn_is_its_text_in_every_role_and_its_control_tokens_are_text(model, template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    session = Session(model, tokenizer, budget=250, tail=8)
    written = ""
    for role in ("system", "user", "assistant", "user"):
        session.turn("a<eos>[user]b", role=role)
        written += f"[{role}]a<eos>[user]b<eos>"
    assert tokenizer.decode(session.ids) == written
    assert session.ids.tolist().count(tokenizer.eos_token_id) == 4
    assert "role spells a control token" in refusal(session.turn, "a", role="user<eos>")


def test_a_conversation_in_a_template_that_writes_the_date_continues_the_next_day(
    model, monkeypatch, tmp_path
):
    class Clock:
        day = 1

        @classmethod
        def now(cls):
            return datetime(2026, 1, cls.day)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "day {{ strftime_now('%d') }}" + CHATML
    session = Session(model, tokenizer, budget=250, tail=8)
    answer = session.chat("the cat", max_new_tokens=4)
    session.save(tmp_path / "talk")
    session.close()
    Clock.day = 2
    with Session.load(tmp_path / "talk", model, tokenizer) as session:
        session.turn("a dog")
    held = tokenizer.decode(session.ids)
    assert held == f"day 01[user]the cat<eos>[assistant]{answer}<eos>[user]a dog<eos>"


def test_turns_that_a_template_changes_are_read_again_if_they_are_exact(model):
    changing = byte_tokenizer()
    changing.chat_template = (
        "{% for m in messages %}{{ loop.length }}:{{ m['content'] }}{% endfor %}"
    )
    session = Session(model, changing, budget=60, tail=8)
    session.turn("the cat")
    session.turn("a dog")
    assert changing.decode(session.ids) == "2:the cat2:a dog"
    expected = dense_logits(model, session.ids)[-1]
    torch.testing.assert_close(session.next_logits, expected, rtol=0, atol=1e-10)
    said = "changes what it wrote for earlier turns"
    assert said in refusal(session.turn, "a stone", protect=True)
    branch = copy.copy(session)
    branch.append("more")
    assert said in refusal(branch.turn, "a stone")
    session.compact(4)
    assert said in refusal(session.turn, "a stone")
    assert changing.decode(session.ids) == "2:the cat2:a dog"
    changing.chat_template = CHATML
    assert "in another chat template" in refusal(session.turn, "a dog")
    changing.chat_template = CHATML.replace("m['content']", "m['content'] | replace('dog', '')")
    session = Session(model, changing, budget=60, tail=8)
    assert "changes the text 'a dog'" in refusal(session.turn, "a dog")
    plain = Session(model, byte_tokenizer(chat=False), budget=60, tail=8)
    assert "no chat template" in refusal(plain.turn, "the cat")


def test_a_save_that_is_interrupted_leaves_the_session_saved_before(
    model, tokenizer, make, tmp_path, monkeypatch
):
    path = tmp_path / "talk.session"
    session = make()
    session.append(TOKENS[:50])
    session.save(path)
    before = path.read_bytes()
    session.append(TOKENS[50:])

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvcat.files._sync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.save(path)
    assert path.read_bytes() == before
    session.close()
    with Session.load(path, model, tokenizer) as loaded:
        assert loaded.num_tokens == 50
