"""What a run will take, told before anything is loaded."""

import time

import torch
from transformers import AutoModelForCausalLM

from kvcat.models import read_config
from kvcat.training.config import TrainConfig
from kvcat.training.objective import make_masked_pass
from kvcat.training.setup import check_request
from kvcat.training.throughput import flops_per_token, peak_flops
from kvcat.training.world import world_size

_UTILISATION = 0.4  # share of the device's matrix product that training reaches; the aim of benchmarks/training.py
_ABSENT_GPU = 989e12  # an H100's bfloat16 peak, where the run's GPUs are not on this machine


def plan(config: TrainConfig) -> dict[str, str]:
    """Parameters, tokens, steps, memory and hours of a run, each as a line for people; nothing is written.

    Memory counts weights, gradients and AdamW's moments in float32, sharded over the processes, the activations of one
    forward pass, and a chunk of logits; hours take 40 % of what a large matrix product reaches on this device, or of an
    H100's data sheet where the device is not there.

    Args:
        config: the whole configuration.

    Raises:
        InputError: what ``train`` would refuse before it loads the model.
    """
    check_request(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(config.model))
    masked_pass = make_masked_pass(model, config)
    parameters = sum(p.numel() for p in model.parameters())
    routers = 0 if masked_pass is None else sum(p.numel() for p in masked_pass.parameters())
    processes = world_size()
    micro = config.micro_batch_size or config.batch_size // processes
    tokens = config.max_steps * config.tokens_per_step
    speed, source = _speed(config)
    hours = tokens * flops_per_token(model, config) / (_UTILISATION * speed * processes) / 3600
    state = 16 * parameters / processes + 16 * routers
    activations = _activations(model, config, micro)
    return {
        "model": f"{config.model}: {parameters:,} parameters, {routers:,} more in routers",
        "policy": config.policy if masked_pass is None else f"{config.policy}, groups at {_starts(masked_pass)}",
        "data": f"{config.data}, sequences of {config.seq_len} tokens",
        "tokens": f"{tokens:,} in {config.max_steps:,} steps of {config.tokens_per_step:,}",
        "processes": f"{processes}, each {micro} sequences a forward pass, "
        f"{config.batch_size // processes // micro} passes a step",
        "memory per device": f"about {(state + activations) / 2**30:.1f} GiB: {state / 2**30:.1f} for weights, "
        f"gradients and moments, {activations / 2**30:.1f} for activations and logits",
        "time": f"about {hours:,.1f} hours at {_UTILISATION:.0%} of {speed / 1e12:,.2f} TFLOP/s a process ({source})",
        "output": config.output,
    }


def _starts(masked_pass: object) -> str:
    return ", ".join(str(start) for start in masked_pass.group_starts)  # type: ignore[attr-defined]


def _activations(model: torch.nn.Module, config: TrainConfig, micro: int) -> float:
    """Bytes kept for one backward: what a layer's norms, projections and feed-forward keep, or its input alone."""
    text = model.config.get_text_config()  # type: ignore[union-attr]
    rows = micro * config.seq_len * (1 + config.masked_share)
    width = 2 if config.dtype == "bfloat16" else 4
    layer = (10 * text.hidden_size + 5 * getattr(text, "intermediate_size", 4 * text.hidden_size)) * width
    inputs = text.hidden_size * width
    layers = (
        text.num_hidden_layers * inputs + layer if config.activation_checkpointing else text.num_hidden_layers * layer
    )
    chunk = 5 * 4 * min(2**26, rows * text.vocab_size)
    return rows * layers + chunk + 4 * text.vocab_size * text.hidden_size


def _speed(config: TrainConfig) -> tuple[float, str]:
    """Operations a second of one process' device, and where the figure is from."""
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return _ABSENT_GPU, "data sheet of an H100: no GPU here"
    if peak := peak_flops(device, config.dtype):
        return peak, "data sheet"
    size = 1024
    a = torch.ones(size, size, device=device, dtype=getattr(torch, config.dtype))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best, "a matrix product, measured"
