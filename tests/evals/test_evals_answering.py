from functools import cache as once

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kvcat
from kvcat.compress.documents import opening_ids, reconstruction, reconstruction_of_tokens
from kvcat.errors import InputError
from kvcat.evals.answering import (
    BASELINES,
    PreparedQuestions,
    Question,
    answer_ids,
    answer_nll,
    check_questions,
    greedy_answers,
    vocabulary,
)  # fmt: skip
from tiny import byte_tokenizer

CONTEXT, NEW = 24, 5


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model():
    """Weights this large make answers that differ from question to question and context to context."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.5, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@once
def questions():
    draw = torch.Generator().manual_seed(2)
    made = []
    for index, (asked, answered) in enumerate([(3, 4), (7, 2), (1, 6)]):
        rows = [tuple(torch.randint(1, 300, (n,), generator=draw).tolist()) for n in (CONTEXT, asked, answered)]
        made.append(Question(f"d{index}", "0", "", *rows, ("e",), NEW))
    return made


def judge(answer, references):
    return {"length": float(len(answer)), "match": float(references[0] in answer)}


def prepared(model, tokenizer, batch=None, supervision="reconstruction"):
    return PreparedQuestions(model, tokenizer, batch or questions(), supervision, judge)


def naive_answer(model, tokens, count):
    tokens = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]


def naive_nll(model, before, answer):
    with torch.no_grad():
        log_probs = model(torch.tensor([[*before, *answer]])).logits[0].log_softmax(-1)
    return -sum(float(log_probs[len(before) + i - 1, t]) for i, t in enumerate(answer)) / len(answer)


def test_answers_on_the_whole_cache_are_those_of_full_forwards(model, tokenizer):
    dense = prepared(model, tokenizer).trace.dense_cache()
    found = greedy_answers(model, dense, [q.question for q in questions()], NEW)
    assert found == [naive_answer(model, q.context + q.question, NEW) for q in questions()]


def test_answers_without_a_context_are_those_of_full_forwards(model):
    found = greedy_answers(model, None, [q.question for q in questions()], NEW)
    assert found == [naive_answer(model, q.question, NEW) for q in questions()]
    assert found != [naive_answer(model, q.context + q.question, NEW) for q in questions()]


def test_nll_with_and_without_the_context_is_that_of_full_forwards(model, tokenizer):
    asked, answers = [q.question for q in questions()], [q.answer for q in questions()]
    dense = answer_nll(model, prepared(model, tokenizer).trace.dense_cache(), asked, answers)
    none = answer_nll(model, None, asked, answers)
    for row, q in enumerate(questions()):
        assert float(dense[row]) == pytest.approx(naive_nll(model, q.context + q.question, q.answer), abs=1e-5)
        assert float(none[row]) == pytest.approx(naive_nll(model, q.question, q.answer), abs=1e-5)


@pytest.mark.parametrize("method", [kvcat.AttentionMatching(), kvcat.Eviction("snapkv")])
@pytest.mark.parametrize("supervision", ["reconstruction", "self"])
def test_an_example_gives_the_same_alone_as_in_a_batch(model, tokenizer, method, supervision):
    together = prepared(model, tokenizer, supervision=supervision)
    values = together.score(method(together.trace, keep_ratio=0.25))
    for row, question in enumerate(questions()):
        alone = prepared(model, tokenizer, [question], supervision)
        assert alone.score(method(alone.trace, keep_ratio=0.25))[0] == pytest.approx(values[row], abs=2e-4)
        for baseline in BASELINES:
            assert alone.baseline(baseline)[0] == pytest.approx(together.baseline(baseline)[row], abs=2e-4)


def test_answers_on_a_compact_cache_are_the_same_alone_as_in_a_batch(model, tokenizer):
    compact = kvcat.AttentionMatching()(prepared(model, tokenizer).trace, keep_ratio=0.25)
    asked = [q.question for q in questions()]
    alone = [greedy_answers(model, compact.select([row]), [q], NEW)[0] for row, q in enumerate(asked)]
    assert greedy_answers(model, compact, asked, NEW) == alone


@pytest.mark.parametrize("supervision", ["reconstruction", "self"])
def test_keeping_every_slot_gives_the_dense_values(model, tokenizer, supervision):
    batch = prepared(model, tokenizer, supervision=supervision)
    values = batch.score(kvcat.AttentionMatching()(batch.trace, keep_ratio=1.0))
    assert values == batch.baseline(BASELINES[0])
    for row in values:
        assert row["delta_nll"] == 0.0
        assert (row["length"], row["match"]) == (row["dense_length"], row["dense_match"])


def test_step_0_of_a_gradient_cache_of_all_slots_gives_the_dense_values(model, tokenizer):
    batch = prepared(model, tokenizer)
    snapshots = kvcat.GradientCompression(num_steps=1).snapshots(batch.trace, keep_ratio=1.0)
    assert [batch.score(cache) for _, cache in snapshots] == [batch.baseline(BASELINES[0])] * 2


def test_figures_of_one_example_belong_together(model, tokenizer):
    batch = prepared(model, tokenizer)
    dense, none = (batch.baseline(baseline) for baseline in BASELINES)
    for row, compact in enumerate(batch.score(kvcat.Eviction("first")(batch.trace, keep_ratio=0.25))):
        assert compact["nll"] > 0
        assert compact["nll"] != compact["nll_dense"]
        assert compact["delta_nll"] == compact["nll"] - compact["nll_dense"]
        assert compact["nll_dense"] == dense[row]["nll"] == none[row]["nll_dense"]
        assert compact["nll_none"] == none[row]["nll"]
        assert compact["context_gain"] == none[row]["delta_nll"] == compact["nll_none"] - compact["nll_dense"]


def test_every_question_has_its_own_longest_answer(model, tokenizer):
    short, long = (Question("d", "0", "", (5,) * CONTEXT, (7, 8), (9,), ("e",), count) for count in (1, NEW))
    own = [prepared(model, tokenizer, [q]).baseline(BASELINES[0])[0]["length"] for q in (short, long)]
    together = prepared(model, tokenizer, [short, long]).baseline(BASELINES[0])
    assert [row["length"] for row in together] == own
    assert own[0] < own[1]


def test_settings_of_generation_are_not_used_and_left_as_they_were(model):
    asked = [q.question for q in questions()]
    plain = greedy_answers(model, None, asked, NEW)
    own = model.generation_config
    drawn = GenerationConfig(do_sample=True, temperature=3.0, top_p=0.9, repetition_penalty=9.0, num_beams=2)
    try:
        model.generation_config = drawn
        assert greedy_answers(model, None, asked, NEW) == plain
        assert model.generation_config is drawn
    finally:
        model.generation_config = own


def test_an_end_of_text_ends_the_answer_of_its_row_alone(model):
    asked = [q.question for q in questions()]
    plain = greedy_answers(model, None, asked, NEW)
    end = plain[0][2]
    own = model.generation_config
    try:
        model.generation_config = GenerationConfig(eos_token_id=[end, 299])
        found = greedy_answers(model, None, asked, NEW)
    finally:
        model.generation_config = own
    assert found == [row[: row.index(end)] if end in row else row for row in plain]
    assert len(found[0]) < NEW


def test_the_answer_s_tokens_go_on_from_the_question_s(tokenizer):
    question, answer = answer_ids(tokenizer, "the cat sees", " the dog")
    assert [*question, *answer] == tokenizer.encode("the cat sees the dog")
    assert tokenizer.decode(answer) == " the dog"


def test_where_a_token_would_span_both_the_answer_keeps_its_own(tokenizer):
    question, answer = answer_ids(tokenizer, "the ca", "t")
    assert [*question, *answer] != tokenizer.encode("the cat")
    assert [tokenizer.decode(ids) for ids in (question, answer)] == ["the ca", "t"]


def test_a_tokenizer_that_cannot_spell_the_answer_is_refused():
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"?": 0, "key=": 1}, unk_token="?")), name_or_path="words"
    )
    with pytest.raises(InputError, match="tokenizer 'words' cannot spell the answer '4711'"):
        answer_ids(words, "key=", "4711")


def with_opening():
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", end)])
    return tokenizer


@pytest.mark.parametrize("make", [byte_tokenizer, with_opening])
def test_a_sequence_of_token_ids_is_that_of_their_text(make):
    tokenizer, text = make(), "the cat sees a river.\n"
    naive = reconstruction(tokenizer, text)
    found = reconstruction_of_tokens(tokenizer, torch.tensor([tokenizer.encode(text)] * 2))
    assert found.input_ids.tolist() == naive.input_ids.tolist() * 2
    assert (found.prefix_len, found.supervision_start) == (naive.prefix_len, naive.supervision_start)


def test_a_sequence_of_token_ids_holds_every_row_twice():
    tokens = torch.randint(1, 300, (3, 9), generator=torch.Generator().manual_seed(0))
    found = reconstruction_of_tokens(byte_tokenizer(), tokens)
    assert torch.equal(found.input_ids[:, : found.prefix_len], tokens)
    assert torch.equal(found.input_ids[:, found.supervision_start :], tokens)


def test_the_start_of_a_text_is_found():
    assert opening_ids(byte_tokenizer()) == []
    assert opening_ids(with_opening()) == [with_opening().eos_token_id]


@pytest.mark.parametrize(
    ("rows", "said"),
    [([[]], "no token to compress"), ([[0]], "no token to compress"), ([[0, 5], [5, 6]], r"begin with \[0\]")],
)
def test_rows_that_are_no_texts_are_refused(rows, said):
    with pytest.raises(InputError, match=said):
        reconstruction_of_tokens(with_opening(), torch.tensor(rows, dtype=torch.int64))


def test_without_a_context_the_question_starts_the_text(model):
    tokenizer, q = with_opening(), questions()[0]
    (row,) = prepared(model, tokenizer, [q]).baseline(BASELINES[1])
    assert row["nll"] == pytest.approx(naive_nll(model, [0, *q.question], q.answer), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer": None}, "model 'base' has none"),
        ({"words": "else"}, "model 'base' has another one"),
        ({"vocab_size": 20}, "outside the vocabulary of model 'base', 20 tokens"),
        ({"positions": 30}, "24 tokens with question and answer are 36, more than the 30 positions of model 'base'"),
        ({"positions": 40}, "make a reconstruction sequence of 129, more than the 40 positions of model 'base'"),
        ({"positions": 40, "supervision": "self"}, None),
    ],
)
def test_a_model_that_cannot_run_the_questions_is_refused_by_name(tokenizer, changes, said):
    config = LlamaConfig(
        vocab_size=changes.get("vocab_size", 300), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=changes.get("positions", 128),
    )  # fmt: skip
    words = changes.get("words", vocabulary(tokenizer))
    supervision = changes.get("supervision", "reconstruction")
    arguments = LlamaForCausalLM(config), changes.get("tokenizer", tokenizer), questions(), supervision, words
    if said is None:
        check_questions("base", *arguments)
        return
    with pytest.raises(InputError, match=said):
        check_questions("base", *arguments)
