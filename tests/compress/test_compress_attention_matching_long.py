"""Long contexts: memory and positions, measured in a fresh process."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from kvcat.compress import AttentionMatching, compare, replay, trace

tokens, suffix = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=40000, bos_token_id=None, eos_token_id=None,
)).eval()
for parameter in model.parameters():
    if parameter.dim() > 1:
        parameter.data.normal_(std=0.3)
ids = torch.randint(0, 67, (1, tokens + suffix))
found = trace(model, ids, tokens)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cache = AttentionMatching()(found, num_slots=128)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
most = AttentionMatching(num_queries=8, own_weight=0.0, log_bias=False)(found, num_slots=tokens - 1)
with torch.no_grad():
    dense = model(ids).logits[:, tokens:]
    shifted = (replay(model, most, ids[:, tokens:]) - dense).abs().max().item()
print(grown, cache.num_slots, cache.num_tokens, shifted, dense.std().item())
"""


@pytest.mark.parametrize(
    ("tokens", "suffix"),
    [
        (4096, 2048),
        pytest.param(16384, 1024, marks=pytest.mark.slow),
        pytest.param(32768, 512, marks=pytest.mark.slow),
    ],
)
def test_a_long_prefix_costs_a_few_blocks_of_memory_and_keeps_its_positions(tokens, suffix):
    """The scores of all 4 heads at once would take 4 * tokens * 2 suffix * 4 bytes, 256 MiB or more; a block 32."""
    # what is freed goes back at once, so that the peak is what was held and not what malloc kept for later
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", SCRIPT, str(tokens), str(suffix)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    grown, slots, num_tokens, shifted, spread = (float(word) for word in run.stdout.split())
    assert (slots, num_tokens) == (128, tokens)
    assert grown < 120
    # all slots but one, at their own positions, give nearly the dense logits
    assert shifted < 0.1 * spread


TRACING = """
import resource, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from kvcat.compress import trace

torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=67, hidden_size=64, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=40000, bos_token_id=None, eos_token_id=None,
)).eval()
ids = torch.randint(0, 67, (1, int(sys.argv[1]) + 64))
trace(model, ids[:, :64], 32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = trace(model, ids, int(sys.argv[1]), chunk_tokens=int(sys.argv[2]))
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
held = sum(tensor.nbytes for part in (found.keys, found.values, found.queries) for tensor in part) / 2**20
print(grown, held)
"""


@pytest.mark.parametrize(
    "tokens",
    [8192, pytest.param(16384, marks=pytest.mark.slow), pytest.param(32768, marks=pytest.mark.slow)],
)
def test_tracing_a_long_prefix_costs_its_keys_and_values_and_one_chunk(tokens):
    """One forward would hold at least 3 * 1024 * 4 bytes of activations per token: 96 MiB at 8192, 384 at 32768."""
    # what is freed goes back at once, so that the peak is what was held and not what malloc kept for later
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", TRACING, str(tokens), "1024"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    grown, held = (float(word) for word in run.stdout.split())
    assert grown < 45 + 2 * held


COMPARING = """
import sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from kvcat.compress import Eviction, compare, trace

class Largest(TorchDispatchMode):
    elements = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, (tuple, list)) else [result]
        self.elements = max([self.elements, *(x.numel() for x in parts if isinstance(x, torch.Tensor))])
        return result

torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=4001, hidden_size=32, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=40000, bos_token_id=None, eos_token_id=None,
)).eval()
prefix, suffix, chunk = 512, int(sys.argv[1]), int(sys.argv[2])
found = trace(model, torch.randint(0, 4001, (1, prefix + suffix)), prefix, chunk_tokens=chunk)
cache = Eviction("streaming")(found, keep_ratio=0.2)
model.set_attn_implementation("sdpa")
with Largest() as seen:
    compare(found, cache, chunk_tokens=chunk)
print(seen.elements)
"""


@pytest.mark.parametrize(("suffix", "chunk"), [(4000, 2048), pytest.param(30000, 2048, marks=pytest.mark.slow)])
def test_comparing_on_a_long_suffix_holds_no_logits_and_no_mask_of_all_of_it(suffix, chunk):
    """All logits would be suffix * 4001 elements, a mask of one chunk up to chunk * suffix; activations chunk * 512."""
    command = [sys.executable, "-c", COMPARING, str(suffix), str(chunk)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) <= 2**22
    assert int(run.stdout) < suffix * 4001 / 3
