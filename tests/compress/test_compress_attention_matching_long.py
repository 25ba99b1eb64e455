"""Long contexts: memory and positions, measured in a fresh process."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from large_tensors import LargeTensors
from tiny import loud_model
from kvcat.compress import AttentionMatching, Eviction, compare, replay, trace

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

torch.set_num_threads(1)
torch.manual_seed(0)
model = loud_model(
    std=0.15,
    vocab_size=4001,
    hidden_size=64,
    intermediate_size=1024,
    max_position_embeddings=40000,
)
ids = torch.randint(0, 4001, (1, 6144 + 2048))
trace(model, ids[:, :64], 32)
start = peak()
long_trace = trace(model, ids, 6144, chunk_tokens=1024)
traced = peak()
states = [*long_trace.keys, *long_trace.values, *long_trace.queries]
held = sum(tensor.nbytes for tensor in states) / 2**20
AttentionMatching()(long_trace, num_slots=128)
fitted = peak()
most = Eviction("streaming")(long_trace, num_slots=6143)
with LargeTensors() as seen:
    compare(long_trace, most, chunk_tokens=1024)
with torch.no_grad():
    dense = long_trace.logits[:, :256]
    shifted = (replay(model, most, ids[:, 6144:6400]) - dense).square().mean().sqrt().item()
print(traced - start, held, fitted - traced, seen.largest, shifted, dense.std().item())
"""


@pytest.mark.slow
def test_a_long_prefix_costs_chunks_of_memory_and_keeps_its_positions():
    # freed memory goes back at once, so that the peak is what was in use, not what malloc kept
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment
    )
    traced, held, fitted, elements, shifted, spread = (float(word) for word in run.stdout.split())
    # one forward would hold at least 3 * 1024 * 4 bytes of activations per token: 96 MiB
    assert traced < 45 + 2 * held
    # the scores of all four heads at once would take 4 * 6144 * 3072 * 4 bytes: 288 MiB
    assert fitted < 120
    # all logits would be 2048 * 4001 elements, a mask of a chunk 1024 * 8192; activations are 1024
    # * 1024
    assert elements <= 2**22
    # all slots but one, at their own positions, give nearly the dense logits
    assert shifted < 0.05 * spread
