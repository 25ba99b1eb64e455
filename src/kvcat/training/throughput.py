"""How fast a run is, and how much memory it takes."""

import re
import resource
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvcat.training.config import TrainConfig

# dense peak of one device in operations a second: (bfloat16, float32), from the vendors' data sheets
_PEAKS = {
    "H200": (989e12, 67e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 92e12),
    "RTX 4090": (165e12, 83e12),
}


def flops_per_token(model: PreTrainedModel, config: TrainConfig) -> float:
    """Operations of forward and backward that the objective asks for, per token of a sequence.

    6 per parameter that multiplies (all but the embedding where it is not tied to the head), and 6 T d per layer for
    causal attention over T tokens with d = heads x head_dim; the masked pass adds its share of the tokens. Work done
    again for activation checkpointing, the mask's gradient and the routers are not counted.

    Args:
        model: the causal LM.
        config: sequence length and policy.
    """
    text = model.config.get_text_config()
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    parameters = sum(p.numel() for p in model.parameters())
    if not text.tie_word_embeddings:
        parameters -= model.get_input_embeddings().weight.numel()  # type: ignore[operator,union-attr]
    one_pass = 6.0 * parameters + 6.0 * text.num_hidden_layers * config.seq_len * width
    return (1 + config.masked_share) * one_pass


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Operations a second that the device can do in this type, or None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peaks[dtype != "bfloat16"] for part, peaks in _PEAKS.items() if part in name), None)


def peak_memory(device: torch.device) -> float:
    """Most memory this process has held so far, in GiB: on the GPU, or resident where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's figure would include the process that started this one
        return int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]) / 2**20  # type: ignore[index]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
