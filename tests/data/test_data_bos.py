"""What begins a text: in packed documents, prepared folders, streams, runs and windows of
evaluations."""

import json

import numpy as np
import pytest
import torch

import kvcat
from kvcat.data import Document, Encoder, open_tokens, pack, prepare
from kvcat.evals.evaluations import longbench, needle, ruler, suffix
from tiny import loud_model, refusal, write_texts
from tokenizers_zoo import byte_level, metaspace

SIZES = {"seq_len": 16, "batch_size": 2, "max_steps": 3, "validation_sequences": 2, "seed": 0}


def with_bos():
    return byte_level(before=["<s>"], after=["</s>"])


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("bos") / "texts")


@pytest.mark.parametrize("make", [with_bos, metaspace])
def test_each_packed_document_is_what_the_tokenizer_makes_of_a_text_with_eos_behind_it(make):
    tokenizer = make()
    documents = [
        Document(str(n), text) for n, text in enumerate(("the cat", "a dog </s> sees", ""))
    ]
    expected = []
    for document in documents:
        body = tokenizer.encode(document.text, add_special_tokens=False, split_special_tokens=True)
        expected += [tokenizer.bos_token_id, *body, tokenizer.eos_token_id]
    assert pack(documents, Encoder.of(tokenizer), 1).flatten().tolist() == expected
    bare = [token for token in expected if token != tokenizer.bos_token_id]
    assert pack(documents, Encoder.of(tokenizer, "never"), 1).flatten().tolist() == bare


def test_a_tokenizer_that_begins_a_text_with_nothing_gives_the_same_tokens_unless_bos_is_always():
    plain = byte_level()
    texts = ["the cat", "a dog sees"]
    auto, always, never = (Encoder.of(plain, bos)(texts) for bos in ("auto", "always", "never"))
    for one, two, three in zip(auto, always, never, strict=True):
        assert one.tolist() == three.tolist() == two.tolist()[1:]
        assert two[0] == plain.bos_token_id


def test_a_prepared_folder_records_what_begins_its_documents_and_is_read_so_alone(texts, tmp_path):
    tokenizer = with_bos()
    index = prepare(str(texts), tokenizer, tmp_path / "auto")
    assert index["opening"] == [tokenizer.bos_token_id]
    recorded = json.loads((tmp_path / "auto" / "tokens.json").read_text())
    assert recorded["opening"] == [tokenizer.bos_token_id]
    prepare(str(texts), tokenizer, tmp_path / "never", bos="never")
    message = refusal(open_tokens, str(tmp_path / "never"), tokenizer, **SIZES)
    assert "begin with the token ids []" in message
    assert "its opening is" in refusal(
        prepare, str(texts), tokenizer, tmp_path / "auto", bos="never"
    )
    data = open_tokens(str(tmp_path / "never"), tokenizer, **SIZES, bos="never")
    assert tokenizer.bos_token_id not in data.validation
    assert (
        tokenizer.bos_token_id in open_tokens(str(tmp_path / "auto"), tokenizer, **SIZES).validation
    )


@pytest.mark.parametrize("prefix", ["", "stream:"])
def test_a_run_is_not_continued_with_another_beginning(texts, prefix):
    tokenizer = with_bos()
    source = f"{prefix}{texts}"
    auto, never = (
        open_tokens(source, tokenizer, **SIZES, bos=bos).train for bos in ("auto", "never")
    )
    assert not torch.equal(auto.read(), never.read())
    assert "belongs to other data" in refusal(auto.load_state_dict, never.state_dict())


def test_the_configuration_of_a_run_holds_bos():
    config = kvcat.TrainConfig(model="m", output="o", bos="never")
    assert config.bos == "never"
    assert "bos is 'some'" in refusal(
        kvcat.TrainConfig.from_dict, {"model": "m", "output": "o", "bos": "some"}
    )


def test_windows_begin_with_it_and_keep_their_lengths(texts):
    tokenizer = with_bos()
    bos = tokenizer.bos_token_id
    options = {"prefix": 12, "suffix": 8, "windows": 4}
    auto, never = (
        suffix.Suffix.task(tokenizer, str(texts), split="all", **options, bos=choice)
        for choice in ("auto", "never")
    )
    assert (auto.opening, never.opening) == ((bos,), ())
    assert auto.describe()["opening"] == [bos]
    assert "opening" not in never.describe()
    for window in auto.examples:
        assert window.tokens[0] == bos
        assert bos not in window.tokens[1:]
        assert (window.prefix_len, window.suffix_len) == (12, 8)
        text = (texts / window.document.removesuffix("#0")).read_text()
        whole = tokenizer.encode(text, add_special_tokens=False)
        start = int(window.name)
        assert list(window.tokens[1:]) == whole[start : start + 19]
    assert all(bos not in window.tokens for window in never.examples)
    message = refusal(suffix.Suffix.task, tokenizer, str(texts), split="all", prefix=1, suffix=8)
    assert "a prefix of 1 tokens holds no text" in message


@pytest.mark.parametrize("supervision", ["suffix", "first-half", "reconstruction"])
def test_windows_are_scored_as_plain_transformers_scores_them(texts, supervision):
    tokenizer = with_bos()
    model = loud_model(vocab_size=len(tokenizer), max_position_embeddings=256, dtype=torch.float64)
    task = suffix.Suffix.task(
        tokenizer, str(texts), split="all", prefix=12, suffix=8, windows=2, supervision=supervision
    )
    task.check("m", model, tokenizer)
    prepared = task.prepare(model, tokenizer, task.examples)
    if supervision == "reconstruction":
        ids = prepared.trace.input_ids
        assert (
            ids == tokenizer.bos_token_id
        ).sum().item() == 2  # one per row, before the first copy
    cache = kvcat.AttentionMatching()(prepared.trace, keep_ratio=1.0)
    assert cache.metadata["supervision"] == supervision
    for window, values in zip(task.examples, prepared.score(cache), strict=True):
        whole = torch.tensor([window.tokens])
        alone = torch.tensor([[tokenizer.bos_token_id, *window.tokens[12:]]])
        with torch.no_grad():
            dense = model(whole).logits[0, 11:-1].log_softmax(-1)
            none = model(alone).logits[0, 1:-1].log_softmax(-1)
        targets = whole[0, 12:, None]
        start = task.start
        wanted = -dense[start:].gather(-1, targets[start:]).mean() if start == 0 else None
        if wanted is not None:
            assert values["nll"] == pytest.approx(wanted.item(), abs=1e-5)
        nll_none = -none[start:].gather(-1, targets[start + 1 :]).mean()
        assert values["nll_none"] == pytest.approx(nll_none.item(), abs=1e-5)


def test_haystacks_and_prompts_begin_as_chosen_and_hold_no_eos(tmp_path):
    tokenizer = with_bos()
    bos = tokenizer.bos_token_id
    eos = tokenizer.convert_tokens_to_ids("</s>")
    makers = {
        "needle": lambda choice: needle.Needle.task(tokenizer, length=400, per_depth=1, bos=choice),
        "ruler": lambda choice: ruler.Ruler.task(
            tokenizer, 1200, tasks=["niah_single"], per_task=1, bos=choice
        ),
    }
    for make in makers.values():
        auto = make("auto")
        never = make("never")
        assert "bos" not in auto.describe()
        assert never.describe()["bos"] == "never"
        for first, second in zip(auto.examples, never.examples, strict=True):
            assert first.context[0] == bos
            assert bos not in (*first.context[1:], *second.context)
            assert eos not in (*first.context, *first.question, *first.answer)
            assert len(first.context) == len(second.context)
        assert (auto.opening_ids(tokenizer), never.opening_ids(tokenizer)) == ([bos], [])
    row = {f"choice_{letter}": "it" for letter in "ABCD"} | {"answer": "A", "question": "what?"}
    row |= {"_id": "1", "sub_domain": "Legal", "context": "the cat </s> sees half \ud83d of it"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (example,) = longbench.LongBench.task(None, data=str(tmp_path / "a.jsonl")).examples
    assert example.context == "the cat </s> sees half \ufffd of it"
    for choice, opening in (("auto", [bos]), ("never", [])):
        prompt = longbench.make_prompt(example, tokenizer, 900, choice)
        ids = [*prompt.context, *prompt.question, *prompt.choices[0]]
        assert prompt.context[: len(opening)] == opening
        assert (ids.count(bos), ids.count(eos)) == (len(opening), 0)


def test_choices_are_scored_without_the_eos_that_the_tokenizer_puts_behind_texts():
    pytest.importorskip("lm_eval")
    from kvcat.evals.evaluations.qa import QAExample, log_likelihoods

    example = QAExample("d", "n", "piqa", ("the cat", "the cat"), ("sees a dog", "it"), 0)
    scores = []
    for tokenizer in (byte_level(before=["<s>"]), with_bos()):
        model = loud_model(vocab_size=len(tokenizer), max_position_embeddings=128)
        (log_probs,) = log_likelihoods(model, tokenizer, [example])
        scores.append(log_probs)
        for text, score in zip(example.texts, log_probs, strict=True):
            whole = [
                tokenizer.bos_token_id,
                *tokenizer.encode(f"the cat {text}", add_special_tokens=False),
            ]
            num_scored = len(whole) - 1 - len(tokenizer.encode("the cat", add_special_tokens=False))
            with torch.no_grad():
                logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            wanted = sum(
                float(logits[i - 1, whole[i]]) for i in range(len(whole) - num_scored, len(whole))
            )
            assert score == pytest.approx(wanted, abs=1e-4)
    assert np.allclose(scores[0], scores[1])
