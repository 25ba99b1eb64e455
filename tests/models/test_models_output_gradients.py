"""Gradients by the outputs of query heads, against finite differences of transformers' logits."""

from importlib import import_module

import pytest
import torch
from models_zoo import some_ids, supported

from kvcat.errors import InputError
from kvcat.models import decoder_layers, output_gradients
from stays_double import StaysDouble
from tiny import refusal

STEP = 1e-5


def log_likelihood(model, ids, layer=None, head=0, token=0, channel=0, added=0.0):
    """Of one text, by transformers, with a number added to one head's output at a token."""

    def add(_module, args):
        outputs = args[0].clone()
        head_dim = outputs.shape[-1] // 4
        outputs[0, token, head * head_dim + channel] += added
        return (outputs,)

    handle = None
    if layer is not None:
        projection = decoder_layers(model)[layer].self_attn.o_proj
        handle = projection.register_forward_pre_hook(add)
    with torch.no_grad():
        log_probs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    if handle is not None:
        handle.remove()
    return log_probs[0, :-1].gather(1, ids[0, 1:, None]).sum().item()


def difference_norm(model, ids, layer, head, token):
    """The gradient's norm by central differences, channel by channel."""
    squares = 0.0
    for channel in range(8):
        up, down = (
            log_likelihood(model, ids, layer, head, token, channel, sign * STEP) for sign in (1, -1)
        )
        squares += ((up - down) / (2 * STEP)) ** 2
    return squares**0.5


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text", "cohere2"])
def test_norms_are_those_of_finite_differences(kind):
    model = supported(kind)
    ids = some_ids(11)[:1]
    with StaysDouble():
        norms = output_gradients(model, ids)
        assert [tuple(norm.shape) for norm in norms] == [(1, 4, 11)] * 3
        for layer, head, token in [(0, 0, 0), (0, 3, 4), (1, 2, 9), (2, 1, 5)]:
            expected = difference_norm(model, ids, layer, head, token)
            assert norms[layer][0, head, token].item() == pytest.approx(expected, rel=1e-6)
    assert all((norm[:, :, -1] == 0).all() for norm in norms)


def test_examples_of_a_batch_and_layers_computed_again_have_the_same_norms(monkeypatch):
    model = supported("llama")
    ids = some_ids(11)
    whole = output_gradients(model, ids)
    for example in range(2):
        alone = output_gradients(model, ids[example : example + 1], layers=[2, 0])
        assert len(alone) == 2
        for layer, norm in zip([2, 0], alone, strict=True):
            torch.testing.assert_close(norm[0], whole[layer][example])
    module = import_module("kvcat.models.output_gradients")  # its name is the function's
    monkeypatch.setattr(module, "_MOST_TOKENS_KEPT", 5)
    for again, norm in zip(output_gradients(model, ids), whole, strict=True):
        assert torch.equal(again, norm)


def test_the_model_is_left_as_it_was():
    model = supported("llama").train()
    model.lm_head.weight.requires_grad_(False)
    ids = some_ids(11)
    before = model.eval()(input_ids=ids).logits
    model.train()
    with torch.no_grad():
        output_gradients(model, ids)
    assert model.training
    assert not model.lm_head.weight.requires_grad
    assert model.model.norm.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    after = model.eval()(input_ids=ids).logits
    assert torch.equal(before, after)
    assert not model.get_input_embeddings()._forward_hooks
    assert not any("forward" in vars(layer) for layer in decoder_layers(model))


def test_one_token_is_rejected():
    message = refusal(output_gradients, supported("llama"), some_ids(1))
    assert "at least two tokens" in message
    with pytest.raises(InputError, match="attention interface"):
        output_gradients(supported("llama"), some_ids(4), layers=[0, 7])
