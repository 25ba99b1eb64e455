"""Sessions after a compact document, which stays as it is while what follows is compacted."""

from dataclasses import replace

import pytest
import torch
from structured_heads import eager_attention

import kvcat
from kvcat import Session
from kvcat.cache import CompactCache
from kvcat.compress import AttentionMatching, Eviction, replay, trace
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import fitted_queries
from kvcat.compress.sessions.repetition import fitted_also_to
from kvcat.generate import Sampling
from tiny import byte_tokenizer, loud_model, refusal, sentences

LENGTH = 24
DOCUMENT, TOKENS = torch.randint(
    3, 60, (100 + LENGTH,), generator=torch.Generator().manual_seed(4)
).split([LENGTH, 100])
TEXT = "".join(sentences(2, seed=5))
CHATML = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# an answer is written in another way once a question follows
REWRITING = CHATML.replace(
    "{{ m['content'] }}", "{{ '+' if m['role'] == 'assistant' }}{{ m['content'] }}"
)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 5.0, 8.0, 11.0],
    "original_max_position_embeddings": 512,
}
UNCOMPACTED = {
    "short windows": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 20,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "pad_token_id": 0,
        },
    ),
    "long windows": ("mistral", {"sliding_window": 512}),
    "convolutions": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "longrope": (
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 512,
            "pad_token_id": 0,
        },
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def make_model(tokenizer, kind="llama", **options):
    sizes = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 1024,
        "eos_token_id": tokenizer.eos_token_id,
        "std": 0.25,
    }
    return loud_model(kind, torch.float64, **{**sizes, **options})


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model(tokenizer)


def of_document(model, method="attention-matching"):
    """A cache of the document with a third of its slots, or more."""
    traced = trace(model, DOCUMENT.unsqueeze(0), supervision="self")
    if method == "all slots":
        return traced.dense_cache()
    if method == "protected":
        return AttentionMatching()(traced, num_slots=9, protect=[(2, 5)])
    if method == "4 bits":
        return Eviction("keynorm", bits=4)(traced, num_slots=8)
    if method == "composed":
        both = [AttentionMatching()(traced, num_slots=7), Eviction("first")(traced, num_slots=5)]
        return kvcat.compose(model, both)
    return AttentionMatching()(traced, num_slots=8)


DOCUMENTS = ["attention-matching", "all slots", "protected", "4 bits", "composed"]


def make(model, tokenizer, cache, **options):
    settings = {"budget": 40, "tail": 8, "room": 10, **options}
    return Session(model, tokenizer, document=cache, **settings)


def check_document(session, cache):
    """The slots of the document are the first ones of every head, with the same bits."""
    layers = zip(session.cache.layers, cache.unpacked().layers, strict=True)
    for now, before in layers:
        for row, row_before in zip(now.heads(), before.heads(), strict=True):
            for head, expected in zip(row, row_before, strict=True):
                count = len(expected)
                assert torch.equal(head.keys[:count], expected.keys)
                assert torch.equal(head.values[:count], expected.values)
                assert torch.equal(head.bias_or_zeros()[:count], expected.bias_or_zeros())


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("method", DOCUMENTS)
def test_logits_after_a_document_are_those_of_its_cache_and_later_ones_leave_its_slots(
    model, tokenizer, method
):
    cache = of_document(model, method)
    session = make(model, tokenizer, cache, num_kept=16)
    check_document(session, cache)
    for start in range(0, 35, 7):
        ids = TOKENS[start : start + 7]
        expected = replay(model, cache, TOKENS[: start + 7].unsqueeze(0))[0]
        torch.testing.assert_close(session.score(ids), expected[start:], rtol=0, atol=1e-10)
        session.append(ids)
        torch.testing.assert_close(session.next_logits, expected[-1], rtol=0, atol=1e-10)
    assert (session.num_tokens, session.held_slots, session.num_compactions) == (35, 35, 0)
    check_document(session, cache)
    for turn in TOKENS[35:].split(13):
        session.append(turn)
        assert session.held_slots <= 40
    assert session.num_compactions >= 3
    check_document(session, cache)
    whole = session.cache
    assert whole.num_tokens == cache.num_tokens + 100
    assert whole.mean_slots == pytest.approx(cache.mean_slots + session.held_slots)
    expected = replay(model, whole, TOKENS[:9].unsqueeze(0))[0]
    torch.testing.assert_close(session.score(TOKENS[:9]), expected, rtol=0, atol=1e-10)


def test_positions_after_compactions_are_those_of_a_masked_dense_forward(model, tokenizer):
    # eviction by first positions keeps tokens 0..21 after the document
    session = make(model, tokenizer, of_document(model, "all slots"), method="first")
    ids = torch.cat([DOCUMENT, TOKENS])
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    held = torch.ones(len(ids), dtype=torch.bool)
    held[LENGTH:] = False
    for start in range(LENGTH, len(ids), 10):
        stop = start + 10
        visible[start:stop, :start] = held[:start]
        held[start:stop] = True
        session.append(ids[start:stop])
        if held[LENGTH:].sum() > 40:
            held[LENGTH + 22 : stop - 8] = False
        assert int(held[LENGTH:].sum()) == session.held_slots
    assert session.num_compactions > 2
    mask = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.float64)
    mask = mask.masked_fill(~visible, -torch.inf)
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            masked = model(input_ids=ids.unsqueeze(0), attention_mask=mask).logits[0, -1]
    finally:
        model.set_attn_implementation(before)
    torch.testing.assert_close(session.next_logits, masked, rtol=0, atol=1e-10)


def test_what_queries_give_to_a_document_is_attention_elsewhere(model, tokenizer):
    session = make(model, tokenizer, of_document(model, "all slots"), budget=100)
    session.append(TOKENS[:50])
    traced = session._state.trace(model, session._fingerprint, 8)
    (tail, _) = fitted_queries(Prefix.of(fitted_also_to(traced, ())), None, by_share=True)
    attention = eager_attention(model, torch.cat([DOCUMENT, TOKENS[:50]]).unsqueeze(0))
    for layer, elsewhere in enumerate(tail.log_elsewhere):
        keys = traced.layers[layer].slots.keys.repeat_interleave(2, 1)
        scores = traced.layers[layer].scale * tail.states[layer] @ keys.mT
        share = (scores.logsumexp(-1) - elsewhere).sigmoid()
        expected = attention[layer][:, :, LENGTH + 42 :, LENGTH : LENGTH + 42].sum(-1)
        # transformers rotates in float32
        torch.testing.assert_close(share, expected, rtol=0, atol=1e-5)


def test_log_bias_and_unequal_heads_of_a_document_count_in_the_attention_elsewhere(
    model, tokenizer
):
    cache = of_document(model)
    assert cache.has_log_bias
    assert not cache.is_uniform
    session = make(model, tokenizer, cache, budget=100)
    session.append(TOKENS[:50])
    traced = session._state.trace(model, session._fingerprint, 8)
    (tail, _) = fitted_queries(Prefix.of(fitted_also_to(traced, ())), None, by_share=True)
    for layer, elsewhere in enumerate(tail.log_elsewhere):
        of_trace = traced.layers[layer]
        for head in range(4):
            slots = cache.layers[layer].head(0, head // 2)
            states = of_trace.scale * tail.states[layer][0, head]
            on_document = (states @ slots.keys.mT + slots.log_bias).logsumexp(-1)
            on_tail = states @ of_trace.suffix_keys[0, head // 2].mT
            on_tail = on_tail.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)
            expected = torch.logaddexp(on_document, on_tail.logsumexp(-1))
            torch.testing.assert_close(elsewhere[0, head], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", ["gradient,num_steps=3", "refined,num_steps=1", "streaming"])
def test_every_method_that_compresses_again_leaves_the_document(model, tokenizer, method):
    cache = of_document(model)
    session = make(model, tokenizer, cache, method=method)
    for turn in TOKENS.split(20):
        session.append(turn)
    assert session.num_compactions > 2
    check_document(session, cache)


def test_protected_turns_stay_exact_after_a_document(model, tokenizer):
    cache = of_document(model, "all slots")
    session = make(model, tokenizer, cache)
    session.append(TOKENS[:10])
    session.append(TOKENS[10:13], protect=True)
    exact = [keys[0, :, 10:13] for keys in session._state.keys]
    for turn in TOKENS[13:].split(15):
        session.append(turn)
    assert session.num_compactions > 2
    assert session.protect == ((10, 13),)
    whole = session.cache
    assert whole.record.protected_later == ((LENGTH + 10, LENGTH + 13),)
    for layer, keys in zip(whole.layers, exact, strict=True):
        for head in range(2):
            slots = layer.head(0, head)
            assert torch.equal(slots.keys[LENGTH : LENGTH + 3], keys[head])
            assert not slots.bias_or_zeros()[LENGTH : LENGTH + 3].any()


@torch.no_grad()
def stock_answer(model, cache, ids, count):
    """What transformers generates after a cache and the whole history, as token ids."""
    inputs = cache.inputs(model, torch.tensor([ids]))
    out = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(ids) :].tolist()


def encoded(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


QUESTIONS = ["the cat", "a small dog", "it was then"]


def check_lines(model, tokenizer, cache):
    """After a document without a template, every question is a line of the history."""
    session = Session(model, tokenizer, document=cache)
    history = []
    for question in QUESTIONS:
        start = "\n" if history else ""
        history += encoded(tokenizer, start + question)
        expected = stock_answer(model, cache, history, 6)
        pieces = []
        answer = session.ask(question, Sampling(max_new_tokens=6), on_text=pieces.append)
        assert answer.ids == expected
        assert "".join(pieces) == answer.text
        history += [token for token in expected if token != tokenizer.eos_token_id]
        assert session.ids.tolist() == history
    assert session.num_compactions == 0
    whole = session.cache
    expected = replay(model, cache, torch.tensor([[*history, *TOKENS[:5].tolist()]]))[0, -5:]
    logits = replay(model, whole, TOKENS[:5].unsqueeze(0))[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(session.score(TOKENS[:5]), expected, rtol=0, atol=1e-8)
    return session


def check_turns(model, tokenizer, cache, *, is_rewritten=False):
    """In a template, every answer is that to the template's text of all turns.

    Answers are read as the tokens that were generated, unless the template writes them in another
    way later.
    """
    session = Session(model, tokenizer, document=cache)
    turns = []
    history = []
    for question in QUESTIONS:
        content = question if turns else f"{TEXT}\n\n{question}"
        turns.append({"role": "user", "content": content})
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        if is_rewritten or not history:
            history = encoded(tokenizer, text)[cache.num_tokens :]
        else:
            is_ended = history[-1] == tokenizer.eos_token_id
            end = "" if is_ended else "<eos>"
            history += encoded(tokenizer, f"{end}[user]{question}<eos>[assistant]")
        expected = stock_answer(model, cache, history, 6)
        answer = session.ask(question, Sampling(max_new_tokens=6))
        assert answer.ids == expected
        history += expected
        assert session.ids.tolist() == history
        turns.append({"role": "assistant", "content": answer.text})
        if len(turns) == 2:
            prompt = kvcat.question_ids(tokenizer, question, cache=cache)[0].tolist()
            assert history[: len(prompt)] == prompt
    return session


def test_answers_after_a_plain_document_are_those_to_the_whole_history(model, tokenizer):
    traced = kvcat.document_trace(model, tokenizer, TEXT)
    check_lines(model, tokenizer, AttentionMatching()(traced, keep_ratio=0.3))


@pytest.mark.parametrize("template", [CHATML, REWRITING])
def test_answers_in_a_template_are_those_to_the_whole_history(model, template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    traced = kvcat.document_trace(model, tokenizer, TEXT, chat=True)
    cache = AttentionMatching()(traced, keep_ratio=0.3)
    check_turns(model, tokenizer, cache, is_rewritten=template == REWRITING)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("kind", UNCOMPACTED)
@pytest.mark.parametrize("chat", [False, True])
def test_answers_of_models_without_compaction_are_those_to_the_whole_history(tokenizer, kind, chat):
    name, options = UNCOMPACTED[kind]
    model = make_model(tokenizer, name, **options)
    traced = kvcat.document_trace(model, tokenizer, TEXT, chat=chat, room=200)
    cache = AttentionMatching()(traced, keep_ratio=0.5)
    check = check_turns if chat else check_lines
    session = check(model, tokenizer, cache)
    assert session.budget == 4096
    assert session.nbytes > cache.nbytes
    assert "no session is saved" in refusal(session.save, "talk.session")


@pytest.mark.parametrize("kind", UNCOMPACTED)
def test_a_budget_that_cannot_be_kept_is_one_line_and_the_session_stays(tokenizer, kind):
    name, options = UNCOMPACTED[kind]
    model = make_model(tokenizer, name, **options)
    cache = trace(model, DOCUMENT.unsqueeze(0), supervision="self", room=200).dense_cache()
    session = make(model, tokenizer, cache)
    session.append(TOKENS[:30])
    before = session.next_logits
    wanted = "tokens after the document need more than the budget of 40 slots"
    assert refusal(session.append, TOKENS[30:50]).startswith(f"50 {wanted}")
    assert refusal(session.compact).startswith(f"{model.config.model_type}: ")
    assert session.num_tokens == 30
    session.append(TOKENS[30:35])
    expected = replay(model, cache, TOKENS[:35].unsqueeze(0))[0]
    torch.testing.assert_close(before, expected[29], rtol=0, atol=1e-8)
    torch.testing.assert_close(session.next_logits, expected[34], rtol=0, atol=1e-8)


def test_a_template_that_changes_compressed_turns_is_rejected_and_the_session_stays(model):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = REWRITING
    traced = kvcat.document_trace(model, tokenizer, TEXT, chat=True)
    session = Session(model, tokenizer, document=traced.dense_cache(), budget=400, tail=2)
    session.ask("the cat", Sampling(max_new_tokens=9))
    session.compact(20)
    num_tokens = session.num_tokens
    message = refusal(session.ask, "a dog", Sampling(max_new_tokens=9))
    assert "does not write the last answer as it was generated" in message
    assert session.num_tokens == num_tokens


def test_tokens_that_are_no_turns_are_never_dropped_for_a_template(model):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = REWRITING
    traced = kvcat.document_trace(model, tokenizer, TEXT, chat=True)
    session = Session(model, tokenizer, document=traced.dense_cache())
    session.chat("the cat", max_new_tokens=9)
    session.append("more")
    assert "as it was generated" in refusal(session.turn, "a dog")


@pytest.mark.parametrize("chat", [False, True])
def test_a_stop_text_is_no_part_of_the_history(model, tokenizer, chat):
    traced = kvcat.document_trace(model, tokenizer, TEXT, chat=chat)
    cache = traced.dense_cache()
    whole = Session(model, tokenizer, document=cache).ask("the cat", Sampling(max_new_tokens=12))
    stop = whole.text[4:6]
    session = Session(model, tokenizer, document=cache)
    answer = session.ask("the cat", Sampling(max_new_tokens=12, stop=(stop,)))
    assert answer.finish_reason == "stop"
    assert answer.text == whole.text[: whole.text.index(stop)]
    question = kvcat.question_ids(tokenizer, "the cat", cache=cache)[0].tolist()
    assert session.ids.tolist() == question + encoded(tokenizer, answer.text)
    end = "<eos>[user]" if chat else "\n"
    session.turn("a dog")
    held = tokenizer.decode(session.ids)
    assert f"{answer.text}{end}a dog" in held


@pytest.mark.slow
def test_a_long_answer_is_compacted_on_the_way_and_its_draws_repeat_with_the_seed(model, tokenizer):
    cache = of_document(model)
    sampling = Sampling(temperature=3.0, max_new_tokens=60, seed=7)
    answers = []
    for budget in (40, 40):
        session = make(model, tokenizer, cache, budget=budget)
        pieces = []
        answers.append(session.ask("the cat sees", sampling, on_text=pieces.append))
        assert "".join(pieces) == answers[-1].text
        assert session.num_compactions > 1
        check_document(session, cache)
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_stop_text_that_began_before_a_compaction_stays_in_the_history(model, tokenizer):
    cache = of_document(model)
    question = "the cat sees the old house and a"
    sampling = Sampling(temperature=3.0, max_new_tokens=60, seed=7)
    session = make(model, tokenizer, cache)
    whole = session.ask(question, sampling)
    for start in range(3, 40, 5):
        stop = whole.text[start : start + 4]
        if len(stop.encode()) > 4:  # bytes of no character
            continue
        each = make(model, tokenizer, cache)
        answer = each.ask(question, replace(sampling, stop=(stop,)))
        assert answer.text == whole.text[: whole.text.index(stop)]
        held = tokenizer.decode(each.ids).removeprefix(question)
        assert held.startswith(answer.text)
        assert (answer.text + stop).startswith(held) or held.startswith(answer.text + stop)


def test_a_question_without_positions_leaves_the_session_as_it_was(model, tokenizer):
    session = Session(model, tokenizer, document=of_document(model))
    first = session.ask("the cat", Sampling(max_new_tokens=4))
    ids = session.ids
    assert "positions" in refusal(session.ask, "the cat " * 600, Sampling(max_new_tokens=4))
    left = 1024 - LENGTH - session.num_tokens
    message = refusal(session.append, TOKENS.repeat(10)[: left + 1])
    assert message.endswith("exceed the model's 1024 positions")
    session.append(TOKENS.repeat(10)[: left - 3])
    session.append(TOKENS[:1])
    before = session.ids
    assert "no position is left" in refusal(session.ask, "z", Sampling(max_new_tokens=4))
    assert torch.equal(session.ids, before)
    assert first.text in tokenizer.decode(ids)


@pytest.mark.slow
def test_an_answer_that_fails_leaves_the_session_as_it_was(model, tokenizer):
    def interrupt(_):
        raise KeyboardInterrupt

    for kind in ("llama", *UNCOMPACTED):
        name, options = UNCOMPACTED.get(kind, (kind, {}))
        each = make_model(tokenizer, name, **options)
        cache = trace(each, DOCUMENT.unsqueeze(0), supervision="self", room=200).dense_cache()
        session = Session(each, tokenizer, document=cache)
        session.ask("the cat", Sampling(max_new_tokens=4))
        before = session.ids
        with pytest.raises(KeyboardInterrupt):
            session.ask("the dog", Sampling(max_new_tokens=9), on_text=interrupt)
        assert torch.equal(session.ids, before)
        other = Session(each, tokenizer, document=cache)
        other.ask("the cat", Sampling(max_new_tokens=4))
        answers = [x.ask("a tree", Sampling(max_new_tokens=6)).ids for x in (session, other)]
        assert answers[0] == answers[1]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("method", DOCUMENTS)
def test_a_saved_session_with_a_document_continues_with_the_same_bits(
    model, tokenizer, tmp_path, method
):
    cache = of_document(model, method)
    for num_tokens in (0, 20, 90):
        session = make(model, tokenizer, cache, num_kept=16)
        if num_tokens:
            session.append(TOKENS[:num_tokens])
        session.save(tmp_path / "talk")
        session.close()
        with Session.load(tmp_path / "talk", model, tokenizer) as loaded:
            for each in (session, loaded):
                each.append(TOKENS[num_tokens:])
                each.append(TOKENS[:30])
            assert torch.equal(session.next_logits, loaded.next_logits)
            check_document(loaded, cache)


def test_a_saved_conversation_about_a_document_continues(model, tokenizer, tmp_path):
    for chat in (False, True):
        traced = kvcat.document_trace(model, tokenizer, TEXT, chat=chat)
        session = Session(model, tokenizer, document=traced.dense_cache())
        session.chat("the cat", max_new_tokens=5)
        session.save(tmp_path / "talk")
        session.close()
        with Session.load(tmp_path / "talk", model, tokenizer) as loaded:
            for each in (session, loaded):
                each.chat("a dog", max_new_tokens=5)
            assert torch.equal(session.ids, loaded.ids)


def test_the_cache_of_a_session_after_a_document_is_a_file_like_any_other(
    model, tokenizer, tmp_path
):
    traced = kvcat.document_trace(model, tokenizer, TEXT, chat=True)
    session = Session(model, tokenizer, document=AttentionMatching()(traced, keep_ratio=0.3))
    session.chat("the cat", max_new_tokens=5)
    cache = session.cache
    cache.save(tmp_path / "c")
    loaded = CompactCache.load(tmp_path / "c", model)
    logits = replay(model, loaded, TOKENS[:9].unsqueeze(0))[0]
    torch.testing.assert_close(session.score(TOKENS[:9]), logits, rtol=0, atol=1e-10)
    # the user's turn that the document opened has ended
    assert loaded.record.chat is None


def test_documents_that_a_session_cannot_follow_are_rejected(model, tokenizer):
    other = make_model(tokenizer, std=0.2)
    cache = of_document(model)
    assert "the document belongs to another model" in refusal(
        Session, other, tokenizer, document=cache
    )
    both = trace(model, torch.stack([DOCUMENT, DOCUMENT.flip(0)]), supervision="self")
    message = refusal(Session, model, tokenizer, document=both.dense_cache())
    assert "the document's cache holds 2 examples: select one" in message
    assert "must be a CompactCache" in refusal(Session, model, tokenizer, document="doc")
    in_chat = kvcat.document_trace(model, tokenizer, TEXT, chat=True).dense_cache()
    changed = byte_tokenizer()
    assert "another chat template" in refusal(Session, model, changed, document=in_chat)
    plain = byte_tokenizer(chat=False)
    assert "does not have" in refusal(Session, model, plain, document=in_chat)
    session = Session(model, tokenizer, document=in_chat)
    assert "the first turn after a document is the user's" in refusal(
        session.turn, "a rule", role="system"
    )
    sliding = make_model(tokenizer, "mistral", sliding_window=512)
    cache = trace(sliding, DOCUMENT.unsqueeze(0), supervision="self").dense_cache()
    message = refusal(Session, sliding, tokenizer, document=cache, budget_bytes=10**6)
    assert "sliding windows are not compressed" in message


@pytest.mark.real
def test_facts_of_the_document_and_of_old_turns_are_answered_after_compactions():
    try:
        model, tokenizer = kvcat.load("smollm2-135m")
    except kvcat.errors.InputError:
        pytest.skip("needs SmolLM2-135M: make smollm2")
    text = (
        "The meeting was on Tuesday. The code of the safe is 4711. "
        "Anna pays the rent of the flat in Berlin."
    )
    settings = kvcat.DocumentSettings(keep_ratio=0.5, chat=True)
    cache = kvcat.compress_document(model, tokenizer, text, settings)
    session = Session(model, tokenizer, document=cache, budget=128, tail=32, room=20)
    session.turn("The name of my dog is Bruno.")
    session.chat("What is the name of my dog?", max_new_tokens=24)
    for topic in ("rivers", "the moon", "bread", "trees", "music"):
        session.chat(f"Write one sentence about {topic}.", max_new_tokens=24)
    assert session.num_compactions >= 3
    check_document(session, cache)
    assert "4711" in session.chat("What is the code of the safe?", max_new_tokens=24)
    assert "Bruno" in session.chat("What is the name of my dog?", max_new_tokens=24)
