"""The compiled attention of a CPU against plain torch (``make test-vllm``)."""

import pytest
import torch

from kvcat.serving.document_attention import DocumentLayer, attend_documents

pytest.importorskip("numba", reason="comes with vLLM (make test-vllm)")
import numpy as np

from kvcat.serving.cpu_kernel import KernelLayer, attend, key_places, kind_of

DIM, GROUP, HEADS, CELLS = 16, 3, 2, 4
PAST = [0, 5, 9]  # tokens of each text before its new ones
NEW = [6, 3, 1]


@pytest.mark.parametrize(("window", "threads"), [(-1, 1), (4, 3)])
@pytest.mark.parametrize("is_regular", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_documents_and_pages_have_the_attention_and_the_share_of_plain_torch(
    dtype, is_regular, window, threads, monkeypatch
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
    pages = (2 * draw(sum(num_pages), HEADS, 2 * CELLS * DIM)).to(dtype)
    pages[0, 0, 0] = 6e-8  # the smallest float16
    places = torch.arange(DIM * CELLS).view(DIM, CELLS) + 7
    if not is_regular:
        permuted = torch.randperm(2 * CELLS * DIM, generator=generator)
        places = permuted[: DIM * CELLS].view(DIM, CELLS)
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
        pages.data_ptr(), pages.stride(0) * size, pages.stride(1) * size,
        kind_of(dtype), GROUP, np.float32(0.3), window, key_places(places.numpy()), batch.numpy(),
        positions.numpy(), table[rows].int().numpy(), np.array([0, 5, 6, 10]),
        np.array([held[number].addresses for number, _, _ in sections]),
        np.array([held[number].starts for number, _, _ in sections]),
    )  # fmt: skip
    by_head = queries[batch].float().transpose(0, 1)
    attended, mass = attend_documents(
        by_head, [(layers[0], 0, 6), (layers[1], 6, 10)], positions, scale=0.3
    )
    wanted = before.clone()
    for token, (row, position) in enumerate(zip(rows, positions.tolist(), strict=True)):
        first = max(0, position - window + 1) if window > 0 else 0
        for head in range(HEADS):
            keys = pages[blocks[row], head][:, places].transpose(1, 2).flatten(0, 1).float()
            scores = by_head[head, token] @ keys[first : position + 1].T * 0.3
            share = torch.sigmoid(mass[head, token] - scores.logsumexp(-1))
            of_pages = before[batch[token], head].float()
            both = torch.lerp(of_pages, attended[head, token], share[:, None])
            wanted[batch[token], head] = both.to(dtype)
    # rounded equally, but for ties
    torch.testing.assert_close(output, wanted, atol=2e-5, rtol=torch.finfo(dtype).eps)
