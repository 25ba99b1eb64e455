"""Conversations on one cache, and generation settings of a model that would change them."""

import copy
import gc
import threading
from weakref import WeakKeyDictionary

import pytest
import torch

import kvcat
from kvcat.cache import CACHE_NAME, forward
from tiny import TRANSFORMERS, loud_model, refusal

LENGTH = 20
DOCUMENT, FIRST, SECOND = (
    torch.randint(3, 67, (1, count), generator=torch.Generator().manual_seed(count))
    for count in (LENGTH, 5, 4)
)


@pytest.fixture(scope="module")
def stock():
    model = loud_model(dtype=torch.float64, pad_token_id=0)
    model.set_attn_implementation("eager")
    return model


@pytest.fixture
def model():
    return loud_model(dtype=torch.float64, pad_token_id=0)


@pytest.fixture
def cache(model):
    return kvcat.trace(model, DOCUMENT, supervision="self").dense_cache()


@torch.no_grad()
def greedy(stock, text, steps=4):
    """The stock model's most likely next tokens, each by a forward over the whole text."""
    start = text.shape[1]
    for _ in range(steps):
        text = torch.cat([text, stock(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return text[:, start:]


def ask(model, **inputs):
    return model.generate(max_new_tokens=4, do_sample=False, **inputs)


def first_turn(model, cache, **options):
    """Questions and answers after the document, and the transformers cache that holds them."""
    inputs = cache.inputs(model, FIRST, **options)
    return ask(model, **inputs), inputs[CACHE_NAME]


def test_the_three_right_ways_to_ask_again_give_the_stock_models_answer(model, stock, cache):
    turn, past = first_turn(model, cache)
    conversation = torch.cat([turn, SECOND], 1)
    expected = greedy(stock, torch.cat([DOCUMENT, conversation], 1)).tolist()
    fresh = ask(model, **cache.inputs(model, conversation))
    assert fresh[:, -4:].tolist() == expected
    held = past.get_seq_length()  # all but the last token of the answer
    new = conversation[:, held - LENGTH :]
    mask = torch.ones(1, held + new.shape[1], dtype=torch.long)
    assert (
        ask(model, input_ids=new, attention_mask=mask, **{CACHE_NAME: past})[:, -4:].tolist()
        == expected
    )
    _, past = first_turn(model, cache)
    everything = torch.cat(
        [DOCUMENT, conversation], 1
    )  # transformers cuts off what the cache holds
    assert ask(model, input_ids=everything, **{CACHE_NAME: past})[:, -4:].tolist() == expected


@pytest.mark.parametrize("static_tokens", [None, 40])
@pytest.mark.parametrize(
    "repeated", ["conversation", "no mask", "question", "the same inputs", "one token"]
)
def test_a_second_turn_that_repeats_what_the_cache_holds_is_rejected(
    repeated, static_tokens, model, cache
):
    turn, past = first_turn(model, cache, static_tokens=static_tokens)
    ids = {"question": FIRST, "the same inputs": FIRST, "one token": SECOND[:, :1]}.get(
        repeated, torch.cat([turn, SECOND], 1)
    )
    inputs = {"input_ids": ids, CACHE_NAME: past}
    if repeated != "no mask":
        inputs["attention_mask"] = torch.ones(1, LENGTH + ids.shape[1], dtype=torch.long)
    said = refusal(ask, model, **inputs)
    assert "the cache holds" in said
    assert "more do not fit" in said


def test_a_forward_that_repeats_the_beams_of_a_cache_is_rejected(model, cache):
    inputs = cache.inputs(model, FIRST)
    past = inputs[CACHE_NAME]
    model.generate(max_new_tokens=6, num_beams=4, do_sample=False, **inputs)
    num_held = past.get_seq_length() - LENGTH
    beams = past.tokens[:, :num_held]
    # the tokens are those whose keys the cache holds
    again = cache.inputs(model, beams)
    with torch.no_grad():
        model(**again)
        for layer, wanted in zip(past.layers, again[CACHE_NAME].layers, strict=True):
            torch.testing.assert_close(layer.keys[:, :, -num_held:], wanted.keys[:, :, -num_held:])
        longer = torch.cat([beams, SECOND.expand(4, -1)], 1)
        message = refusal(model, longer, **{CACHE_NAME: past})
    assert f"new tokens begin with the {num_held}" in message


def test_the_tokens_of_a_cache_follow_its_rows(model, cache):
    past = cache.inputs(model, FIRST)[CACHE_NAME]
    ids = torch.stack([FIRST[0], FIRST[0] + 1])
    with torch.no_grad():
        model(ids, **{CACHE_NAME: past})
    past.batch_repeat_interleave(2)
    past.batch_select_indices(torch.tensor([3, 0]))
    assert torch.equal(past.tokens, ids[[1, 0]])


def test_left_padded_turns_follow_each_other_in_a_growing_and_in_a_static_cache(model, cache):
    ids = torch.cat([torch.tensor([[0, 0, 7, 8]]), torch.tensor([[9, 10, 11, 12]])])
    mask = (ids > 0).long()
    for static_tokens in (None, 20):
        inputs = cache.inputs(model, ids, mask, static_tokens=static_tokens)
        out = ask(model, **inputs)
        alone = ask(model, **cache.inputs(model, ids[:1, 2:]))
        assert out[0, 4:].tolist() == alone[0, 2:].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"use_cache": False},
        {"num_beams": 1, "use_cache": False},
        {"max_length": 12},
        {"return_dict_in_generate": True},
        {"prompt_lookup_num_tokens": 2},
        {"guidance_scale": 1.0},
    ],
    ids=str,
)
def test_settings_in_a_models_folder_do_not_change_what_a_cache_represents(
    settings, model, stock, cache
):
    expected = greedy(stock, torch.cat([DOCUMENT, FIRST], 1)).tolist()
    model.generation_config.update(**settings)
    if "use_cache" in settings:
        model.config.use_cache = False
    made = ask(model, **cache.inputs(model, FIRST))
    made = made if isinstance(made, torch.Tensor) else made.sequences
    assert made[:, FIRST.shape[1] :].tolist() == expected


def test_a_question_in_chunks_is_answered_or_rejected_where_its_mask_is_wrong(model, stock, cache):
    inputs = cache.inputs(model, FIRST)
    if TRANSFORMERS < (5, 21):
        assert "more do not fit" in refusal(ask, model, **inputs, prefill_chunk_size=2)
    else:
        made = ask(model, **inputs, prefill_chunk_size=2)
        expected = greedy(stock, torch.cat([DOCUMENT, FIRST], 1))
        assert made[:, FIRST.shape[1] :].tolist() == expected.tolist()


@pytest.mark.slow
def test_the_hooks_that_check_forwards_go_with_the_last_cache(model, cache):
    pasts = [cache.inputs(model, FIRST), cache.inputs(model, FIRST)]
    assert len(model.base_model._forward_pre_hooks) == 1
    pasts.pop()
    gc.collect()
    assert len(model.base_model._forward_pre_hooks) == 1
    pasts.clear()
    gc.collect()
    assert not model.base_model._forward_pre_hooks
    assert not model.base_model._forward_hooks


def test_a_question_may_begin_with_another_document_or_end_with_its_own(model):
    documents = torch.cat([DOCUMENT, DOCUMENT.flip(1)])
    both = kvcat.trace(model, documents, supervision="self").dense_cache()
    both.inputs(model, documents.flip(0))
    for rows in (1, 2, 4):
        question = torch.cat([FIRST, DOCUMENT[:, :5]], 1).expand(rows, -1)
        both.select([0]).inputs(model, question)


@pytest.mark.parametrize("budgets", ["equal", "adaptive"])
@pytest.mark.parametrize("static_tokens", [None, 8])
def test_a_change_of_the_attention_after_the_inputs_is_rejected(model, budgets, static_tokens):
    document = kvcat.trace(model, DOCUMENT, supervision="self")
    cache = kvcat.AttentionMatching(budgets=budgets)(document, num_slots=7)
    inputs = cache.inputs(model, FIRST, static_tokens=static_tokens)
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            assert f"attention is {name!r} now" in refusal(model, **inputs)
            assert f"attention is {name!r} now" in refusal(
                model.generate, **inputs, max_new_tokens=1
            )
    with torch.no_grad():
        again = model(**cache.inputs(model, FIRST)).logits  # which switches back
        assert torch.equal(model(**inputs).logits, again)


def test_stock_attention_serves_slots_without_log_bias_in_equal_heads(model):
    document = kvcat.trace(model, DOCUMENT, supervision="self")
    cache = kvcat.Eviction("streaming")(document, num_slots=7)
    inputs = cache.inputs(model, FIRST)
    with torch.no_grad():
        before = model(**cache.inputs(model, FIRST)).logits
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(model(**inputs).logits, before, rtol=0, atol=1e-10)


def test_activation_checkpointing_that_would_drop_the_cache_is_rejected(model, cache):
    with torch.no_grad():
        expected = model(**cache.inputs(model, FIRST)).logits
        for layer in model.model.layers:  # as gradient_checkpointing_enable does
            layer.gradient_checkpointing = True
        assert torch.equal(model(**cache.inputs(model, FIRST)).logits, expected)
        model.train()
        assert "would drop the compact cache" in refusal(model, **cache.inputs(model, FIRST))
        assert torch.equal(kvcat.replay(model, cache, FIRST), expected)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_cache_is_checked_like_the_cache_when_that_one_is_gone(
    model, stock, cache, copied
):
    padding = torch.zeros(1, 3, dtype=torch.long)
    mask = torch.cat([padding, torch.ones_like(FIRST)], 1)
    inputs = cache.inputs(model, torch.cat([padding, FIRST], 1), mask)
    inputs[CACHE_NAME] = copied(inputs[CACHE_NAME])
    gc.collect()
    with torch.no_grad():
        logits = model(**inputs).logits[:, 3:]
        expected = stock(torch.cat([DOCUMENT, FIRST], 1), use_cache=False).logits[:, LENGTH:]
    # transformers rotates in float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert "more do not fit" in refusal(model, **inputs)
    del inputs
    gc.collect()
    assert not model.base_model._forward_pre_hooks


def test_a_cache_is_checked_though_another_thread_drops_the_last_one_meanwhile(
    model, cache, monkeypatch
):
    others = [cache.inputs(model, FIRST)]
    dropping = threading.Thread(target=others.clear)

    class Interrupted(WeakKeyDictionary):
        def __contains__(self, module):
            dropping.start()
            dropping.join(timeout=0.2)
            return super().__contains__(module)

    monkeypatch.setattr(forward, "_GUARDED", Interrupted(forward._GUARDED))
    inputs = cache.inputs(model, FIRST)
    dropping.join()
    with torch.no_grad():
        model(**inputs)
    assert "more do not fit" in refusal(model, **inputs)
    del inputs
    gc.collect()
    assert not model.base_model._forward_pre_hooks
