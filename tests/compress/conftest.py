"""A tiny model and traces of it."""

import pytest
import torch

from kvcat.compress import trace
from tiny import loud_model


@pytest.fixture(scope="session")
def model():
    return loud_model()


@pytest.fixture(scope="session")
def double():
    return loud_model(dtype=torch.float64)


@pytest.fixture(scope="session")
def windows():
    return torch.randint(0, 67, (3, 64), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def traced(model, windows):
    return trace(model, windows, 48)
