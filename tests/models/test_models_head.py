"""The described head against the model's own logits."""

import pytest
import torch
from models_zoo import SUPPORTED, some_ids, tiny
from torch import nn
from transformers import LlamaForCausalLM

from kvcat.errors import InputError
from kvcat.models import hidden_states, output_head

HEADS = {
    "qwen2": {},
    "llama": {"tie_word_embeddings": True},
    "gemma": {"head_dim": 8},
    "cohere": {"logit_scale": 0.0625},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 3.0},
    "phi": {},
    "hyperclovax": {"logits_scaling": 3.0},  # multiplies by what Granite divides by
}
EXPECTED = {
    "hyperclovax": (3.0, None),
    "gemma2": (1.0, 3.0),
    "cohere": (0.0625, None),
    "granite": (1 / 3, None),
}


@pytest.mark.parametrize("kind", sorted({*SUPPORTED, *HEADS}))
def test_the_head_is_what_the_configuration_means_and_gives_the_model_s_logits(kind):
    model = tiny(kind, **{**SUPPORTED, **HEADS}[kind])
    ids = some_ids()
    head = output_head(model)
    assert kind not in HEADS or (head.scale, head.softcap) == EXPECTED.get(kind, (1.0, None))
    assert head.weight is model.get_output_embeddings().weight
    assert (head.bias is not None) == (kind == "phi")
    logits = head.logits(hidden_states(model, input_ids=ids, use_cache=False))
    torch.testing.assert_close(
        logits, model(input_ids=ids, use_cache=False).logits, rtol=1e-12, atol=1e-12
    )


class HiddenCap(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 30 * torch.tanh(out.logits / 30)
        return out


class Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0.0


def test_a_scale_that_the_model_ignores_is_ignored_and_unknown_or_absent_heads_are_rejected():
    model = tiny("llama")
    model.config.logit_scale = 0.5
    model.config.final_logit_softcapping = 30.0
    head = output_head(model)
    assert (head.scale, head.softcap) == (1.0, None)
    capped = HiddenCap(tiny("llama").config)
    assert capped(input_ids=some_ids()).logits.abs().max() < 3  # a cap of 30 hardly shows
    adapted = tiny("llama")
    adapted.lm_head = Adapted(32, 61, bias=False)
    special = {"cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 2, "dtype": torch.float32}
    for model, message in (
        (capped, "HiddenCap is not supported: its head does more"),
        (adapted, "LlamaForCausalLM is not supported: .* Adapted"),
        (
            tiny("modernbert-decoder", **special),
            "does not read the output of ModernBertDecoderModel",
        ),
        (tiny("llama").model, "LlamaModel is not supported: it has no language-model head"),
    ):
        with pytest.raises(InputError, match=message):
            output_head(model)
