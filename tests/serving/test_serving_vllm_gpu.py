"""FlashAttention's call for the slots of a document against the reference (a GPU and vLLM)."""

import pytest
import torch

from kvcat.serving.document_attention import DocumentLayer, attend_documents

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("counts", [(5, 5), (1, 300), (70, 3)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_call_for_a_document_is_the_reference(dtype, counts, head_dim):
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    from kvcat.serving.vllm.cuda import FlashLayer, attend_flash

    generator = torch.Generator(device="cuda").manual_seed(0)
    total = sum(counts)

    def draw(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    keys, values = draw(total, head_dim).to(dtype), draw(total, head_dim).to(dtype)
    layer = DocumentLayer(keys, values, 2 * draw(total), counts)
    queries = draw(2, 7, 3, head_dim).to(dtype)
    scale = head_dim**-0.5
    double = DocumentLayer(keys.double(), values.double(), layer.log_bias.double(), counts)
    wanted, wanted_mass = attend_documents(
        queries.double(), [(double, 0, 7)], torch.arange(7, device="cuda"), scale=scale
    )
    made, mass = attend_flash(
        queries, FlashLayer.of(layer, scale), scale=scale, version=get_flash_attn_version()
    )
    torch.testing.assert_close(mass.double(), wanted_mass.double(), atol=2e-2, rtol=0)
    torch.testing.assert_close(made.double(), wanted, atol=2e-2, rtol=0)
