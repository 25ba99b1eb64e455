"""The documents that questions are asked about, in a chat template with control tokens."""

import pandas as pd
import questions
from questions import Document

from tiny import loud_model
from tokenizers_zoo import byte_level

TEMPLATE = (
    "<s>{% for m in messages %}<|im_end|>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>assistant\n{% endif %}"
)
LENGTH = 300


def document():
    """One for a tokenizer that puts BOS before every text, as Llama 3's does."""
    tokenizer = byte_level(before=["<s>"])
    tokenizer.chat_template = TEMPLATE
    model = loud_model(vocab_size=310, max_position_embeddings=1024)
    return Document(model, tokenizer, "needle", LENGTH, "test", 0)


def test_a_document_begins_with_the_control_tokens_of_the_chat_template():
    asked = document()
    tokenizer = asked.tokenizer
    opening = tokenizer.convert_tokens_to_ids(["<s>", "<|im_end|>"])
    assert asked.ids[:2] == opening
    assert len(asked.ids) == LENGTH
    # the ids of the turn are those of the template's text
    text = tokenizer.decode(asked.ids).removeprefix("<s><|im_end|>user\n")
    turn = [{"role": "user", "content": text}]
    written = tokenizer.apply_chat_template(turn, tokenize=False)
    ids = tokenizer.encode(written, add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer.decode(asked.ids) + "</s>"
    assert not set(ids[2:-1]) & set(tokenizer.all_special_ids)
    assert not set(asked.ids[2:]) & set(tokenizer.all_special_ids)


def test_without_a_document_the_question_has_the_same_opening_once(monkeypatch):
    asked = document()
    prompts = []

    def remember(_model, _cache, some_prompts, _most):
        prompts.extend(some_prompts)
        return [[1]] * len(some_prompts)

    monkeypatch.setattr(questions, "greedy_answers", remember)
    asked.answers(None)
    num_opening = len(asked.tokenizer.encode("<s><|im_end|>user\n", add_special_tokens=False))
    assert prompts[0][:num_opening] == asked.ids[:num_opening]
    assert prompts[0].count(asked.tokenizer.bos_token_id) == 1
    truncated = asked.truncated(0.5)
    assert LENGTH / 2 - truncated.num_tokens in (0, 1)  # both ends have equally many


def test_shares_of_two_methods_have_the_p_of_the_same_questions():
    rows = pd.DataFrame({"document": list("aabbcdefgh"), "right": [1] * 10})
    assert questions.share(rows) == "100 [68, 100]"
    others = rows.iloc[::-1].assign(right=0)  # in another order; eight documents differ
    assert questions.share(rows, others) == f"100 [68, 100] p {2 / 2**8:.2g}"
    assert questions.share(rows, rows.copy()).endswith(" p 1")
