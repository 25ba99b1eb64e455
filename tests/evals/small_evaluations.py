"""Models, a tokenizer and windows for the tests of evaluations."""

import torch
from tokenizers.processors import TemplateProcessing

from kvcat.evals import Window
from tiny import byte_tokenizer, stock_model

PREFIX = 12
SUFFIX = 6
VOCAB = 40


def tiny(seed, **changes):
    """A Llama of two layers with random weights."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return stock_model("llama", **options | changes).eval()


def with_opening():
    """A tokenizer that puts the token 0 before every text."""
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 0)]
    )
    return tokenizer


def noise():
    """Five windows of random tokens from three documents."""
    tokens = torch.randint(
        VOCAB, (5, PREFIX + SUFFIX), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return [Window(f"d{i % 3}", str(i), tuple(row), PREFIX) for i, row in enumerate(tokens)]


class Characters:
    """A tokenizer whose tokens are the characters."""

    chat_template = unk_token_id = None
    all_special_ids = all_special_tokens = ()
    added_tokens_decoder = {}  # noqa: RUF012

    def encode(self, text, *, add_special_tokens, **_):
        assert not add_special_tokens
        return [ord(character) for character in text]
