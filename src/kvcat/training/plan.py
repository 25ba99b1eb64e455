"""What a run takes, estimated before anything is loaded, and how fast devices are."""

import importlib.util
import re
import resource
import sys
import timeit
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvcat.data.documents import open_source
from kvcat.data.prepared import is_prepared
from kvcat.errors import InputError
from kvcat.models import parse_device, positions_of, read_config
from kvcat.policies import check_group_starts, parse_policy
from kvcat.training.config import TrainConfig, check_batch
from kvcat.training.distributed import world_size
from kvcat.training.objective import make_masked_pass

# share of the device's matrix product that training reaches: without and with compiled layers, the latter being the
# aim of benchmarks/training.py
_UTILISATION = {False: 0.2, True: 0.4}
_ABSENT_GPU = 989e12  # an H100's bfloat16 peak, where the run's GPUs are not on this machine
# dense peak of one device in operations per second: (bfloat16, float32), from the vendors' data sheets
_PEAKS = {
    "H200": (989e12, 67e12), "H100": (989e12, 67e12), "A100": (312e12, 19.5e12), "L40S": (362e12, 92e12),
    "RTX 4090": (165e12, 83e12),
}  # fmt: skip


def check_request(config: TrainConfig) -> None:
    """Refuse what shows before weights or data are read; of a Hub data set nothing is asked yet."""
    check_batch(config, world_size())
    package = config.monitor
    if package != "none" and importlib.util.find_spec(package) is None:
        raise InputError(f"--monitor {package} needs the package {package}: pip install 'kvcat[{package}]'")
    text = read_config(config.model).get_text_config()
    if config.seq_len > positions_of(text):
        raise InputError(f"seq_len {config.seq_len} exceeds the model's {positions_of(text)} positions")
    if config.policy != "control":
        parse_policy(config.policy)
    check_group_starts(text.num_hidden_layers, config.group_starts, config.num_groups)
    if not config.data.startswith("hub:") and not is_prepared(config.data):
        open_source(config.data)


def plan(config: TrainConfig) -> dict[str, str]:
    """Parameters, tokens, steps, memory and hours of a run, each as a line for people; nothing is written.

    Memory counts weights, gradients and AdamW's moments in float32, sharded over the processes, the activations of one
    forward pass, a chunk of logits, and a frozen teacher, which every process holds whole. Hours assume 20 % of the
    speed of a large matrix product on this device (40 % with ``compile``), or of an H100's data sheet where the device
    is not there. Refuses
    what ``train`` would refuse before it loads the model, but for an output folder that is in use.
    """
    check_request(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(config.model))
    masked_pass = make_masked_pass(model, config)
    parameters, routers, groups = sum(p.numel() for p in model.parameters()), 0, ""
    if masked_pass is not None:
        routers = sum(p.numel() for p in masked_pass.parameters())
        groups = f", groups at {', '.join(map(str, masked_pass.group_starts))}"
    processes = world_size()
    micro = config.micro_batch_size or config.batch_size // processes
    tokens = config.max_steps * config.tokens_per_step
    speed, source = _speed(config)
    utilisation = _UTILISATION[config.compile]
    hours = tokens * flops_per_token(model, config) / (utilisation * speed * processes) / 3600
    width = 2 if config.dtype == "bfloat16" else 4
    state = 16 * parameters / processes + 16 * routers + width * parameters * (config.teacher == "frozen")
    activations = _activations(model, config, micro)
    return {
        "model": f"{config.model}: {parameters:,} parameters, {routers:,} more in routers",
        "policy": config.policy + groups,
        "data": f"{config.data}, sequences of {config.seq_len} tokens",
        "tokens": f"{tokens:,} in {config.max_steps:,} steps of {config.tokens_per_step:,}",
        "processes": f"{processes}, each {micro} sequences a forward pass, "
        f"{config.batch_size // processes // micro} passes a step",
        "memory per device": f"about {(state + activations) / 2**30:.1f} GiB: {state / 2**30:.1f} for weights, "
        f"gradients and moments, {activations / 2**30:.1f} for activations and logits",
        "time": f"about {hours:,.1f} hours at {utilisation:.0%} of {speed / 1e12:,.2f} TFLOP/s a process ({source})",
        "output": config.output,
    }


def flops_per_token(model: PreTrainedModel, config: TrainConfig) -> float:
    """Operations of forward and backward that the objective needs, per token of a sequence.

    6 per parameter that multiplies (all but the embedding where it is not tied to the head), and 6 T d per layer for
    causal attention over T tokens with d = heads x head_dim; the masked pass adds its share of the tokens. Recomputed
    activations, the mask's gradient and the routers are not counted.
    """
    text = model.config.get_text_config()
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    parameters = sum(p.numel() for p in model.parameters())
    if not text.tie_word_embeddings:
        parameters -= model.get_input_embeddings().weight.numel()  # type: ignore[operator,union-attr]
    one_pass = 6.0 * parameters + 6.0 * text.num_hidden_layers * config.seq_len * width
    return (1 + config.masked_share + (config.teacher == "frozen") / 3) * one_pass  # a teacher is a forward alone


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Operations per second that the device can do in this type, or None where that is not known."""
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


def _activations(model: torch.nn.Module, config: TrainConfig, micro: int) -> float:
    """Bytes kept for one backward: what a layer's norms, projections and feed-forward keep, or its input alone."""
    text = model.config.get_text_config()  # type: ignore[union-attr]
    rows, count = micro * config.seq_len * (1 + config.masked_share), text.num_hidden_layers
    width = 2 if config.dtype == "bfloat16" else 4
    layer = (10 * text.hidden_size + 5 * getattr(text, "intermediate_size", 4 * text.hidden_size)) * width
    layers = count * text.hidden_size * width + layer if config.activation_checkpointing else count * layer
    chunk = 5 * 4 * min(2**26, rows * text.vocab_size)
    return rows * layers + chunk + 4 * text.vocab_size * text.hidden_size


def _speed(config: TrainConfig) -> tuple[float, str]:
    """Operations per second of one process' device, and where the figure is from."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        return _ABSENT_GPU, "data sheet of an H100: no GPU here"
    device = parse_device(config.device)
    if peak := peak_flops(device, config.dtype):
        return peak, "data sheet"
    size = 1024
    a = torch.ones(size, size, device=device, dtype=getattr(torch, config.dtype))
    best = min(timeit.repeat(lambda: float((a @ a)[0, 0]), number=1, repeat=5))
    return 2 * size**3 / best, "a matrix product, measured"
