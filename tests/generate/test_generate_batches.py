"""Several questions on one document in a batch: each gets the answer that it gets alone."""

import queue

import pytest
import torch

import kvcat
from kvcat.corpus import CorpusSettings, Store, compress_corpus
from kvcat.generate.batches import BATCH_ROWS, BatchQuestion, answer_batch, batch_size
from kvcat.serving.engine import Engine, Question, RequestError, Ticket
from kvcat.settings import Sampling
from tiny import loud_model, sentences, write_tiny_model

DOCUMENT = "".join(sentences(2, seed=5))
QUESTIONS = ["the cat", "a stone finds the river", "x", "the dog and the cat see"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A tiny model whose answers differ from question to question."""
    folder = tmp_path_factory.mktemp("models") / "loud"
    return kvcat.load(write_tiny_model(folder, seed=3, initializer_range=0.5))


@pytest.fixture(scope="module")
def cache(loaded):
    """The document in heads with different numbers of slots and a log-bias."""
    trace = kvcat.document_trace(*loaded, DOCUMENT)
    cache = kvcat.AttentionMatching()(trace, keep_ratio=0.3)
    assert not cache.is_uniform
    return cache


class Asked:
    """A question with what its answer was."""

    def __init__(self, loaded, cache, text, *, is_cancelled=lambda: False, **sampling):
        self.ids = kvcat.question_ids(loaded[1], text, cache=cache)
        self.pieces = []
        self.answers = []
        self.question = BatchQuestion(
            self.ids[0].tolist(),
            Sampling(**sampling),
            on_text=self.pieces.append,
            on_answer=self.answers.append,
            is_cancelled=is_cancelled,
        )

    @property
    def answer(self):
        (answer,) = self.answers
        assert "".join(self.pieces) == answer.text
        return answer


def ask(loaded, cache, asked):
    answer_batch(*loaded, cache, [one.question for one in asked])
    return [one.answer for one in asked]


def test_rows_of_unequal_length_get_the_greedy_answers_of_transformers(loaded, cache):
    model, tokenizer = loaded
    asked = [
        Asked(loaded, cache, text, max_new_tokens=3 + 2 * number)
        for number, text in enumerate(QUESTIONS)
    ]
    answers = ask(loaded, cache, asked)
    for one, answer in zip(asked, answers, strict=True):
        most = one.question.sampling.max_new_tokens
        stock = model.generate(**cache.inputs(model, one.ids), max_new_tokens=most, do_sample=False)
        assert answer.ids == stock[0, one.ids.shape[1] :].tolist()
        assert answer.text == tokenizer.decode(answer.ids, skip_special_tokens=True)
        assert answer.finish_reason == "length"


def test_a_row_draws_with_its_own_seed_whatever_the_others_do(loaded, cache):
    sampled = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 9}

    def rows():
        greedy = Asked(loaded, cache, QUESTIONS[0], max_new_tokens=9)
        drawn = [Asked(loaded, cache, QUESTIONS[1], seed=seed, **sampled) for seed in (1, 2)]
        tiny_top_p = {**sampled, "top_p": 1e-6}
        return [greedy, *drawn, Asked(loaded, cache, QUESTIONS[0], **tiny_top_p)]

    together = [answer.ids for answer in ask(loaded, cache, rows())]
    alone = [ask(loaded, cache, [row])[0].ids for row in rows()]
    assert together == alone
    assert together[1] != together[2]
    assert together[3] == together[0]


def test_draws_have_the_probabilities_of_the_model(loaded, cache):
    model, _ = loaded
    one = Asked(loaded, cache, "the cat")
    logits = model(**cache.inputs(model, one.ids)).logits[0, -1].double()
    expected = torch.softmax(logits / 0.7, dim=-1)
    counts = torch.zeros_like(expected)
    for start in range(0, 400, 50):
        settings = {"temperature": 0.7, "max_new_tokens": 1}
        seeds = range(start, start + 50)
        rows = [Asked(loaded, cache, "the cat", seed=seed, **settings) for seed in seeds]
        for answer in ask(loaded, cache, rows):
            counts[answer.ids[0]] += 1
    distance = (counts / 400 - expected).abs().sum() / 2
    num_likely = int((expected > 1e-3).sum())
    assert distance < 1.5 * (num_likely / 400) ** 0.5  # of 400 true draws, about half of that


def test_a_stop_text_and_a_client_that_leaves_end_one_row_alone(loaded, cache):
    plain = [Asked(loaded, cache, text, max_new_tokens=12) for text in QUESTIONS[:2]]
    first, second = ask(loaded, cache, plain)
    stop = first.text[3:5]
    stopped = Asked(loaded, cache, QUESTIONS[0], max_new_tokens=12, stop=(stop,))
    gone = Asked(loaded, cache, QUESTIONS[2], max_new_tokens=12, is_cancelled=lambda: True)
    other = Asked(loaded, cache, QUESTIONS[1], max_new_tokens=12)
    answers = ask(loaded, cache, [stopped, gone, other])
    assert answers[0].text == first.text[: first.text.index(stop)]
    assert answers[0].finish_reason == "stop"
    assert (answers[1].finish_reason, len(answers[1].ids)) == ("cancelled", 1)
    assert answers[2].ids == second.ids


def test_a_batch_ends_before_a_row_would_pass_the_last_position(loaded, cache):
    num_left = 256 - cache.num_tokens
    short = Asked(loaded, cache, "x", max_new_tokens=4).question
    long = Asked(loaded, cache, "x", max_new_tokens=num_left - 1).question
    wide = Asked(loaded, cache, "the cat " * 6, max_new_tokens=4).question
    assert batch_size(loaded[0], cache, [short] * 20) == BATCH_ROWS
    assert batch_size(loaded[0], cache, [short, wide, long, short]) == 2
    assert batch_size(loaded[0], cache, [long, short]) == 2
    assert batch_size(loaded[0], cache, [long, wide]) == 1


def test_padding_in_a_batch_does_not_leave_a_compacted_sliding_window(loaded):
    window = 64
    sizes = {"vocab_size": len(loaded[1]), "max_position_embeddings": 256}
    model = loud_model("mistral", sliding_window=window, **sizes)
    document = torch.randint(3, 67, (1, 40), generator=torch.Generator().manual_seed(2))
    cache = kvcat.trace(model, document, supervision="self").dense_cache()
    both = [
        Asked((model, loaded[1]), cache, text, max_new_tokens=most)
        for text, most in (("the cat", 20), ("the dog finds the river and the stone then", 3))
    ]
    for one in both:
        num_tokens = 40 + one.ids.shape[1] + one.question.sampling.max_new_tokens
        assert num_tokens <= window
        assert batch_size(model, cache, [one.question] * 3) == 3
    assert batch_size(model, cache, [one.question for one in both]) == 1


@pytest.fixture(scope="module")
def store(loaded, tmp_path_factory):
    """A store of three documents without a chat template."""
    folder = tmp_path_factory.mktemp("store")
    for number in range(3):
        (folder / "texts").mkdir(exist_ok=True)
        (folder / "texts" / f"{number}.txt").write_text("".join(sentences(2, seed=number)))
    compress_corpus(*loaded, folder / "texts", folder / "store", CorpusSettings(keep_ratio=0.5))
    return Store(folder / "store")


def answers_of(loaded, store, questions):
    """Answers of an engine to questions that all wait before the model is free."""
    engine = Engine(*loaded, store, cache_bytes=10**7, most_waiting=99)
    events = [queue.Queue() for _ in questions]
    with engine._changed:  # the model's thread cannot begin yet
        for question, its_events in zip(questions, events, strict=True):
            engine._waiting.append(Ticket(question, its_events.put))
    with engine._changed:
        engine._changed.notify()
    results = []
    for its_events in events:
        event = its_events.get(timeout=60)
        while isinstance(event, str):
            event = its_events.get(timeout=60)
        results.append(event)
    num_batches = engine.num_batches
    engine.close()
    return results, num_batches


def test_questions_on_the_same_documents_share_a_batch_and_get_their_answers(loaded, store):
    sampling = Sampling(max_new_tokens=5)
    documents = [("0.txt",), ("1.txt",), ("0.txt", "2.txt"), ("1.txt",), ("0.txt",)] * 3
    questions = [
        Question(ids, f"the cat {number}", False, sampling) for number, ids in enumerate(documents)
    ]
    bad = Question(("0.txt",), "the cat " * 300, False, sampling)
    begun = loaded[1].encode("".join(sentences(2, seed=0)), add_special_tokens=False)
    again = Question(("0.txt",), [*begun, 5], False, sampling)  # with the document
    results, num_batches = answers_of(loaded, store, [*questions, bad, again])
    assert num_batches == 3
    for question, result in zip(questions, results[:-2], strict=True):
        cache = kvcat.compose(loaded[0], [store[id] for id in question.documents])
        ids = kvcat.question_ids(loaded[1], question.content, cache=cache)
        inputs = cache.inputs(loaded[0], ids)
        stock = loaded[0].generate(**inputs, max_new_tokens=5, do_sample=False)
        assert result[0].ids == stock[0, ids.shape[1] :].tolist()
        assert result[1].document_tokens == cache.num_tokens
    for result, message in zip(results[-2:], ("has more than", "begin with the doc"), strict=True):
        assert isinstance(result, RequestError)
        assert message in result.message


FAMILIES = {
    "qwen3": {"head_dim": 8},
    "gemma3_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 12,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
    },
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
}


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_other_families_answer_from_whole_caches_as_plain_transformers(kind, tokenizer, tmp_path):
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    model = loud_model(kind, **sizes, **FAMILIES[kind])
    (tmp_path / "texts").mkdir()
    texts = {f"{number}.txt": "".join(sentences(2, seed=number)) for number in range(2)}
    for name, text in texts.items():
        (tmp_path / "texts" / name).write_text(text)
    settings = CorpusSettings(keep_ratio=1.0, bits="16")
    compress_corpus(model, tokenizer, tmp_path / "texts", tmp_path / "store", settings)
    store = Store(tmp_path / "store")
    sampling = Sampling(max_new_tokens=5)
    questions = [Question((id,), text, False, sampling) for id in texts for text in QUESTIONS[:2]]
    both = Question(tuple(texts), "the cat", False, sampling)
    results, num_batches = answers_of((model, tokenizer), store, [*questions, both])
    for question, result in zip(questions, results[:-1], strict=True):
        (id,) = question.documents
        document = tokenizer(texts[id], add_special_tokens=False).input_ids
        asked = kvcat.question_ids(tokenizer, question.content, cache=store[id])[0].tolist()
        ids = torch.tensor([document + asked])
        stock = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert result[0].ids == stock[0, ids.shape[1] :].tolist()
    if kind == "qwen3":
        assert num_batches == 3
        assert results[-1][0].ids
    else:  # layers with a window or a recurrent state keep the state of one document
        assert num_batches == 4
        assert results[-1].status == 400
        assert "cannot be joined" in results[-1].message
