"""A model that is only read."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode with no parameter asking for gradients; both are restored at the end."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    training = [m for m in model.modules() if m.training]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        model.eval()
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True
