"""A tiny model and traces of it."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcat.compress import trace


def tiny_model(dtype=torch.float32, **options):
    sizes = {
        "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, **options}))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def make_model():
    return tiny_model


@pytest.fixture(scope="session")
def model():
    return tiny_model()


@pytest.fixture(scope="session")
def double():
    return tiny_model(torch.float64)


@pytest.fixture(scope="session")
def windows():
    return torch.randint(0, 67, (3, 64), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def traced(model, windows):
    return trace(model, windows, 48)
