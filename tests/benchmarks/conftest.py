"""The scripts of benchmarks/, importable."""

import sys
from pathlib import Path

import pytest
import torch

from kvcat.compress import trace
from tiny import loud_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="session")
def traced():
    model = loud_model()
    tokens = torch.randint(0, 67, (1, 120), generator=torch.Generator().manual_seed(3))
    return trace(model, tokens, 96)
