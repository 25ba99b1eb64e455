"""Distillation in chunks equals distillation at once."""

import pytest
import torch
from torch import nn

from kvcat.losses import OutputHead, chunked_kl, distillation_kl


@pytest.mark.parametrize("chunk", [1, 4, 100, None])
def test_chunks_equal_the_whole_in_value_and_every_gradient(chunk):
    torch.manual_seed(0)
    teacher, student = (nn.Linear(width, 11, bias=bias).double() for width, bias in ((6, True), (5, False)))
    heads = OutputHead(teacher), OutputHead(student, scale=0.5, softcap=3.0)
    taught = torch.randn(2, 7, 6, dtype=torch.float64)
    learned = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    inputs = [learned, student.weight]
    ours = chunked_kl(heads[0], taught, heads[1], learned, chunk)
    naive = distillation_kl(heads[0].logits(taught), heads[1].logits(learned))
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=0)
    for a, b in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(naive, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
