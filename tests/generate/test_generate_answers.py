"""Answers after a compact cache: pieces of text, stop texts, sampling."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcat
from kvcat.generate import AnswerStream, Sampling, answer
from tiny import refusal, sentences, write_tiny_model
from tokenizers_zoo import byte_fallback, byte_level

DOCUMENT = "".join(sentences(2, seed=5))
BYTE_FALLBACK = byte_fallback()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A tiny model whose answers differ from question to question."""
    folder = tmp_path_factory.mktemp("models") / "loud"
    return kvcat.load(write_tiny_model(folder, seed=3, initializer_range=0.5))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "chat"])
def cache(loaded, request):
    """The document with a third of its slots."""
    trace = kvcat.document_trace(*loaded, DOCUMENT, chat=request.param)
    return kvcat.AttentionMatching()(trace, keep_ratio=0.3)


def pieces_of(tokenizer, ids, stop=()):
    """The pieces of text that a stream passes on for tokens, one token at a time."""
    pieces = []
    stream = AnswerStream(tokenizer, stop, pieces.append)
    for token in ids:
        stream.take(token)
    stream.close()
    assert "".join(pieces) == stream.text
    return pieces


@pytest.mark.parametrize("text", ["the cat sees it", "\u6771\u4eac \U0001f600 caf\u00e9", " \n"])
def test_joined_pieces_are_the_decoded_text_and_no_piece_ends_within_a_character(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=50, deadline=None)
@given(st.text("a b\u00e9\u1230\ufe0f\u200d\U0001f600", min_size=1, max_size=12))
def test_many_characters_in_bytes_are_the_decoded_text_from_tokenizers_that_decode_them_at_once(
    text,
):
    ids = BYTE_FALLBACK(text, add_special_tokens=False).input_ids
    pieces = pieces_of(BYTE_FALLBACK, ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_of_no_character_are_replaced_and_the_text_after_them_is_not():
    name_bytes = BYTE_FALLBACK.convert_tokens_to_ids(["<0xE1>", "<0x88>"])
    before = BYTE_FALLBACK("\u1230\u120b\u121d\u1230", add_special_tokens=False).input_ids
    after = BYTE_FALLBACK("a b", add_special_tokens=False).input_ids
    text = "".join(pieces_of(BYTE_FALLBACK, [*before, *name_bytes, *after]))
    assert text == "\u1230\u120b\u121d\u1230\ufffd\ufffd a b"


def test_incomplete_bytes_at_the_end_are_shown_as_the_tokenizer_shows_them(tokenizer):
    ids = tokenizer("a\U0001f600", add_special_tokens=False).input_ids[:-1]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("dog",), "the cat sees the "),
        (("e d",), "the cat sees th"),
        (("dog", "cat"), "the "),
        (("dogs", "doge"), "the cat sees the dog"),
        (("t",), ""),
    ],
)
def test_a_stop_text_ends_the_text_before_it_and_is_never_passed_on(tokenizer, stop, expected):
    ids = tokenizer("the cat sees the dog", add_special_tokens=False).input_ids
    assert "".join(pieces_of(tokenizer, ids, stop)) == expected


def test_an_answer_ends_at_a_control_token_that_a_stop_text_names():
    tokenizer = byte_level()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    cat = tokenizer("the cat", add_special_tokens=False).input_ids
    for stop in (("<|im_end|>",), ("dog", "<|im_end|>")):
        assert "".join(pieces_of(tokenizer, [*cat, end, *cat], stop)) == "the cat"
    assert "".join(pieces_of(tokenizer, [*cat, end, *cat], ("<s>",))) == "the catthe cat"
    said = refusal(AnswerStream, tokenizer, ("\n<|im_end|>",), None)
    assert said.startswith("the stop text '\\n<|im_end|>' holds the control token '<|im_end|>'")


def test_an_answer_is_that_of_transformers_and_ends_at_its_length(loaded, cache):
    model, tokenizer = loaded
    ids = kvcat.question_ids(tokenizer, "the cat", cache=cache)
    stock = model.generate(**cache.inputs(model, ids), max_new_tokens=9, do_sample=False)
    result = answer(model, tokenizer, cache.inputs(model, ids), Sampling(max_new_tokens=9))
    assert result.ids == stock[0, ids.shape[1] :].tolist()
    assert result.text == tokenizer.decode(result.ids, skip_special_tokens=True)
    assert result.finish_reason == "length"


def test_the_token_that_ends_an_answer_is_no_text_even_if_the_tokenizer_shows_it(
    loaded, cache, monkeypatch
):
    model, tokenizer = loaded
    ids = kvcat.question_ids(tokenizer, "the cat", cache=cache)
    free = answer(model, tokenizer, cache.inputs(model, ids), Sampling(max_new_tokens=9))
    end = free.ids[5]
    before = free.ids[: free.ids.index(end)]
    assert tokenizer.decode([end], skip_special_tokens=True)
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end])
    for stop in ((), ("no such text",)):
        pieces = []
        sampling = Sampling(max_new_tokens=9, stop=stop)
        inputs = cache.inputs(model, ids)
        result = answer(model, tokenizer, inputs, sampling, on_text=pieces.append)
        assert result.ids == [*before, end]
        assert result.text == "".join(pieces) == tokenizer.decode(before, skip_special_tokens=True)
        assert result.finish_reason == "stop"


def test_sampling_repeats_with_its_seed(loaded, cache):
    model, tokenizer = loaded
    ids = kvcat.question_ids(tokenizer, "the cat", cache=cache)

    def drawn(**options):
        sampling = Sampling(temperature=1.0, max_new_tokens=9, **options)
        return answer(model, tokenizer, cache.inputs(model, ids), sampling).ids

    assert drawn(seed=1) == drawn(seed=1)
    assert drawn(seed=1) != drawn(seed=2)
    greedy = answer(model, tokenizer, cache.inputs(model, ids), Sampling(max_new_tokens=9)).ids
    assert drawn(seed=1, top_p=1e-6) == greedy


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"max_new_tokens": 0},
        {"stop": ("",)},
        {"stop": ("a",) * 17},
        {"seed": -1},
    ],
)
def test_sampling_rejects_values_out_of_range(options):
    assert refusal(Sampling, **options)
