"""The compiled attention of a CPU against plain torch (``make test-vllm``)."""

import pytest
import torch

from kvcat.serving.document_attention import DocumentLayer, attend_documents

pytest.importorskip("numba", reason="comes with vLLM (make test-vllm)")
import numpy as np

from kvcat.serving.cpu_kernel import (
    KernelLayer,
    _read_pages,
    attend,
    key_places,
    key_table,
    kind_of,
)

DIM, GROUP, HEADS, CELLS = 16, 3, 2, 4
PAST = [0, 5, 9]  # tokens of each text before its new ones
NEW = [6, 3, 1]


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_is_read_as_the_number_of_torchs_type(codes):
    bias, digits = (7, 3) if codes == torch.float8_e4m3fn else (15, 2)
    each = torch.arange(256, dtype=torch.uint8)
    made = np.empty((1, 256), np.float32)
    for scale in (1.0, 0.25, 0.7):
        _read_pages(each.data_ptr(), kind_of(torch.bfloat16), key_table(codes, scale), 256, made)
        wanted = each.view(codes).float() * scale
        assert torch.equal(torch.from_numpy(made[0]).nan_to_num(7e9), wanted.nan_to_num(7e9))
    _read_pages(each.data_ptr(), kind_of(torch.float32), key_table(codes, 1.0), 256, made)
    for code in range(256):
        exponent, fraction = divmod(code % 128, 1 << digits)
        size = fraction * 2.0 ** (1 - bias - digits)
        if exponent > 0:
            size = (1 + fraction / (1 << digits)) * 2.0 ** (exponent - bias)
        if codes == torch.float8_e4m3fn and code % 128 == 127:
            assert np.isnan(made[0, code])
        elif codes == torch.float8_e5m2 and exponent == 31:
            assert np.isnan(made[0, code]) if fraction else np.isinf(made[0, code])
        else:
            assert made[0, code] == (-size if code >= 128 else size)


@pytest.mark.parametrize(("window", "threads"), [(-1, 1), (4, 3)])
@pytest.mark.parametrize("is_regular", [True, False])
@pytest.mark.parametrize(
    ("codes", "key_scale"), [(None, 1.0), (torch.float8_e4m3fn, 0.7), (torch.float8_e5m2, 3.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_documents_and_pages_have_the_attention_and_the_share_of_plain_torch(
    dtype, codes, key_scale, is_regular, window, threads, monkeypatch
):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    layers = []
    for counts in ((150, 3), (1, 70)):
        total = sum(counts)
        keys, values = (2 * draw(total, DIM)).to(dtype), draw(total, DIM).to(dtype)
        until = torch.arange(total) % 9 if window > 0 else None
        bias = 2 * draw(total) if len(layers) == 0 else None
        layers.append(DocumentLayer(keys, values, bias, counts, until))
    held = [KernelLayer.of(layer) for layer in layers]
    assert [each.nbytes for each in held] == [layer.nbytes for layer in layers]
    # the first document's text is read in two sections
    sections = [(0, 0, 5), (0, 5, 6), (1, 6, 10)]
    rows = [row for row, count in enumerate(NEW) for _ in range(count)]
    positions = torch.cat(
        [torch.arange(past, past + new) for past, new in zip(PAST, NEW, strict=True)]
    )
    num_pages = [-(-(past + new) // CELLS) for past, new in zip(PAST, NEW, strict=True)]
    blocks = torch.randperm(sum(num_pages), generator=generator).split(num_pages)
    blocks[2][0] = blocks[1][0]  # texts with the same beginning share a page
    table = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True)
    pages = 2 * draw(sum(num_pages), HEADS, 2 * CELLS * DIM)
    pages[0, 0, 0] = 6e-8  # the smallest float16
    pages = (pages / key_scale).to(codes or dtype)
    places = torch.arange(DIM * CELLS).view(DIM, CELLS) + 7
    if not is_regular:
        places = torch.randperm(DIM * CELLS, generator=generator).view(DIM, CELLS)
    batch = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)]
    # of a batch with other tokens, whose queries are a part of a larger tensor
    queries = draw(len(rows) + 2, HEADS + 1, GROUP, DIM).to(dtype)[:, 1:]
    output = draw(len(rows) + 2, HEADS, GROUP, DIM).to(dtype)
    before = output.clone()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    size = dtype.itemsize
    attend(
        queries.data_ptr(), queries.stride(0) * size,
        output.data_ptr(), output.stride(0) * size,
        pages.data_ptr(), pages.stride(0) * pages.itemsize, pages.stride(1) * pages.itemsize,
        kind_of(dtype), key_table(codes, key_scale), GROUP, np.float32(0.3), window,
        key_places(places.numpy()), batch.numpy(), positions.numpy(), table[rows].int().numpy(),
        np.array([0, 5, 6, 10]),
        np.array([held[number].addresses for number, _, _ in sections]),
        np.array([held[number].starts for number, _, _ in sections]),
    )  # fmt: skip
    by_head = queries[batch].float().transpose(0, 1)
    attended, mass = attend_documents(
        by_head, [(layers[0], 0, 6), (layers[1], 6, 10)], positions, scale=0.3
    )
    wanted = before.clone()
    page_keys = pages.float() * key_scale
    for token, (row, position) in enumerate(zip(rows, positions.tolist(), strict=True)):
        first = max(0, position - window + 1) if window > 0 else 0
        for head in range(HEADS):
            keys = page_keys[blocks[row], head][:, places].transpose(1, 2).flatten(0, 1)
            scores = by_head[head, token] @ keys[first : position + 1].T * 0.3
            share = torch.sigmoid(mass[head, token] - scores.logsumexp(-1))
            of_pages = before[batch[token], head].float()
            both = torch.lerp(of_pages, attended[head, token], share[:, None])
            wanted[batch[token], head] = both.to(dtype)
    # rounded equally, but for ties
    torch.testing.assert_close(output, wanted, atol=2e-5, rtol=torch.finfo(dtype).eps)
