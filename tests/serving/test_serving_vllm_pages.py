"""Documents next to pages of every kind that vLLM writes on this processor, in numbers of 8, 16 and
32 bits: vLLM's own kernels and ours against one softmax in float64 (``make test-vllm``)."""

from types import SimpleNamespace

import pytest
import torch

from kvcat.serving.document_attention import DocumentLayer
from kvcat.serving.vllm.worker import WORKER

pytest.importorskip("vllm", reason="needs vLLM (make test-vllm)")
pytestmark = pytest.mark.filterwarnings("ignore")
FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
NAME = "model.layers.0.self_attn.attn"
GROUP, HEADS, CELLS = 3, 2, 32
PAST = [0, 45, 70]  # tokens of each text before its new ones
NEW = [37, 4, 1]
DOCUMENTS = ["a", None, "b"]
TOLERANCES = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def vllm():
    """What the tests use of vLLM, whose import gives warnings, and of what needs vLLM."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends import cpu_attn

    from kvcat.serving import cpu_kernel
    from kvcat.serving.vllm import cpu

    return SimpleNamespace(ops=_custom_ops, attention=cpu_attn, kernel=cpu_kernel, ours=cpu)


def instruction_set(vllm, dtype, head_dim, pages):
    try:
        return vllm.attention._get_attn_isa(dtype, CELLS, head_dim, pages)
    except NotImplementedError as error:
        pytest.skip(str(error))


def rounded(numbers, pages, scale):
    """What pages hold of numbers: those of the type that are next to zero, times the scale."""
    if pages == "auto":
        return numbers.double()
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, FP8[pages])).float()
    sizes = codes[codes.isfinite() & (codes >= 0)].unique()
    # vLLM multiplies by the reciprocal in float32
    wanted = numbers.float() * (1 / torch.tensor(scale))
    nearest = sizes[torch.searchsorted(sizes, wanted.abs(), right=True) - 1]
    return (nearest * wanted.sign()).double() * scale


@pytest.mark.parametrize("pages", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vllm_writes_the_codes_of_torchs_types_and_truncates(pages, dtype, vllm):
    numbers = torch.arange(256, dtype=torch.uint8).view(getattr(torch, FP8[pages])).float()
    between = torch.tensor([1.06, 1.12, 1.124, 1.126, -1.19, 447, 463, 6e4, -6e4, 1e-3, -3e-5])
    numbers = torch.cat([numbers, between, torch.linspace(-9, 9, 53)]).to(dtype)
    keys = numbers.view(-1, 1, 32)
    cache = torch.zeros(1, 1, CELLS, 2 * 32, dtype=torch.uint8)
    key_cache, value_cache = cache.view(1, 1, 2 * CELLS, 32).chunk(2, dim=2)
    isa = instruction_set(vllm, dtype, 32, pages)
    vllm.ops.cpu_attn_reshape_and_cache(
        keys, keys, key_cache, value_cache, torch.arange(len(keys)), isa, kv_cache_dtype=pages
    )
    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    impl = make_impl(vllm, 32, pages)
    places = torch.from_numpy(vllm.ours._key_places(impl, layer, dtype, cache))
    places = torch.where(places < 0, -1 - places, places)
    made = cache.view(-1)[places.T[: len(keys)]].view(getattr(torch, FP8[pages])).float().flatten()
    is_finite = numbers.isfinite()
    assert torch.equal(made[is_finite].double(), rounded(numbers[is_finite], pages, 1.0))
    assert made.isfinite().all()


def make_impl(vllm, head_dim, pages, window=None, scale=1.0):
    """Attention of a layer as vLLM makes it."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32), kv_transfer_config=None
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (vllm.attention, vllm.ours):
            patch.setattr(module, "get_current_vllm_config", lambda: config)
        impl = vllm.ours.DocumentsImpl(GROUP * HEADS, head_dim, scale, HEADS, None, window, pages)
    impl.kernel = vllm.kernel
    return impl


@pytest.mark.parametrize(
    ("head_dim", "scales", "window"),
    [(64, (1.0, 0.1), None), (32, (0.013, 0.02), 24), (128, (21.0, 0.1), None), (80, (1, 1), 24)],
)
@pytest.mark.parametrize("pages", ["auto", *FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_over_pages_of_every_kind_and_documents_is_one_softmax(
    dtype, pages, head_dim, scales, window, vllm, monkeypatch
):
    isa = instruction_set(vllm, dtype, head_dim, pages)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    # with e4m3, vLLM's kernel for AMX takes terms of a sum below 2^-6 for 0: here they are few
    size = 30 * scales[0]
    impl = make_impl(vllm, head_dim, pages, window, scale=head_dim**-0.5 / size)
    layer = SimpleNamespace(
        layer_name=NAME, isa=isa, _k_scale_float=scales[0], _v_scale_float=scales[1]
    )
    documents = {}
    for name, counts in {"a": (30, 3), "b": (1, 70)}.items():
        total = sum(counts)
        until = torch.arange(total) % 80 if window is not None else None
        keys, values = (size * draw(total, head_dim)).to(dtype), draw(total, head_dim).to(dtype)
        documents[name] = DocumentLayer(keys, values, draw(total), counts, until)
    held = {name: [impl.prepare(document)] for name, document in documents.items()}
    lengths = [past + new for past, new in zip(PAST, NEW, strict=True)]
    keys = [(size * draw(length, HEADS, head_dim)).to(dtype) for length in lengths]
    values = [draw(length, HEADS, head_dim).to(dtype) for length in lengths]
    counts = [-(-length // CELLS) for length in lengths]
    blocks = torch.randperm(sum(counts) + 2, generator=generator)[: sum(counts)].split(counts)
    page_dtype = dtype if pages == "auto" else torch.uint8
    cache = torch.zeros(sum(counts) + 2, HEADS, CELLS, 2 * head_dim, dtype=page_dtype)
    for of_text, key, value in zip(blocks, keys, values, strict=True):
        cells = torch.arange(len(key))
        slots = of_text[cells // CELLS] * CELLS + cells % CELLS
        impl.do_kv_cache_update(layer, key, value, cache, slots)
    num_tokens = sum(NEW)
    starts = torch.tensor([0, *NEW]).cumsum(0).int()
    queries = draw(num_tokens, GROUP * HEADS, head_dim).to(dtype)
    metadata = vllm.attention.CPUAttentionMetadata(
        num_actual_tokens=num_tokens,
        max_query_len=max(NEW),
        query_start_loc=starts,
        max_seq_len=max(lengths),
        seq_lens=torch.tensor(lengths).int(),
        block_table=torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True).int(),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.long),
        scheduler_metadata=vllm.ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(NEW),
            num_heads=GROUP * HEADS,
            num_kv_heads=HEADS,
            head_dim=head_dim,
            seq_lens=torch.tensor(lengths).int(),
            dtype=dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=impl.sliding_window,
            isa=isa,
            enable_kv_split=True,
            kv_cache_dtype=pages,
        ),
    )
    monkeypatch.setattr(WORKER, "layers", held)
    monkeypatch.setattr(WORKER, "group_of_layer", {NAME: 0})
    first = {int(blocks[row][0]): name for row, name in enumerate(DOCUMENTS) if name is not None}
    monkeypatch.setattr(WORKER, "digests", [first])
    output = torch.zeros_like(queries)
    impl.forward(layer, queries, keys[0], values[0], cache, metadata, output)

    for row, (past, new, name) in enumerate(zip(PAST, NEW, DOCUMENTS, strict=True)):
        held_keys = rounded(keys[row], pages, scales[0])
        held_values = rounded(values[row], pages, scales[1])
        positions = torch.arange(past, past + new)[:, None]
        cells = torch.arange(past + new)
        is_seen = cells <= positions
        if window is not None:
            is_seen &= cells > positions - window
        first_slot = 0
        for head in range(HEADS):
            of_head = slice(head * GROUP, (head + 1) * GROUP)
            asked = queries[starts[row] : starts[row + 1], of_head].double()
            all_keys, all_values = held_keys[:, head], held_values[:, head]
            bias = torch.zeros(new, past + new, dtype=torch.double).masked_fill(
                ~is_seen, -torch.inf
            )
            if name is not None:
                document = documents[name]
                slots = slice(first_slot, first_slot + document.counts[head])
                first_slot = slots.stop
                all_keys = torch.cat([document.keys[slots].double(), all_keys])
                all_values = torch.cat([document.values[slots].double(), all_values])
                of_slots = document.log_bias[slots].double().expand(new, -1)
                if document.seen_until is not None:
                    is_out = positions >= document.seen_until[slots]
                    of_slots = of_slots.masked_fill(is_out, -torch.inf)
                bias = torch.cat([of_slots, bias], dim=1)
            scores = torch.einsum("tgd,nd->tgn", asked, all_keys) * impl.scale
            weights = (scores + bias[:, None]).softmax(-1)
            wanted = torch.einsum("tgn,nd->tgd", weights, all_values)
            made = output[starts[row] : starts[row + 1], of_head].double()
            error = (made - wanted).abs().max().item()
            assert error < TOLERANCES[dtype], (isa, row, head)
