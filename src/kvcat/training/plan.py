"""Estimates the memory and the operations of a run before anything is loaded."""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvcat.data.documents import open_source
from kvcat.data.token_files import is_token_folder
from kvcat.errors import InputError
from kvcat.extras import install_command
from kvcat.memory import DEVICE_ELEMENTS, LOGIT_ELEMENTS
from kvcat.models import check_length, parse_device, read_config
from kvcat.policies import check_group_starts, parse_policy
from kvcat.training.config import TrainConfig, check_batch
from kvcat.training.distributed import world_size
from kvcat.training.objective import make_masked_pass

_USABLE = 0.9  # share of a device's memory that an estimate may reach


class _Memory(NamedTuple):
    """Bytes that each process holds."""

    state: float
    activations: float

    @property
    def gib(self) -> float:
        """Both together, in GiB."""
        return (self.state + self.activations) / 2**30


def check_request(config: TrainConfig) -> None:
    """Check the configuration before weights or data are loaded. Hub data sets are not contacted.

    Raises:
        InputError: a setting that does not fit the model, the data or the processes.
    """
    check_batch(config, world_size())
    package = config.monitor
    if package != "none" and importlib.util.find_spec(package) is None:
        remedy = install_command(package)
        raise InputError(f"--monitor {package} needs the package {package}: {remedy}")
    text = read_config(config.model).get_text_config()
    check_length("seq_len", config.seq_len, text)
    if config.policy != "control":
        parse_policy(config.policy)
    check_group_starts(text.num_hidden_layers, config.group_starts, config.num_groups)
    if not config.data.startswith("hub:") and not is_token_folder(config.data):
        open_source(config.data)


def plan(config: TrainConfig) -> dict[str, str]:
    """Parameters, tokens, steps, memory and operations of a run, each as a line.

    Memory counts weights, gradients and AdamW's moments in float32, sharded over the processes; the
    activations of one forward pass; a chunk of logits; and a frozen teacher, which every process
    holds whole. Hours depend on the device; ``runs/README.md`` has those of an H100. Nothing is
    written.

    Raises:
        InputError: what ``train`` would reject before it loads the model, except an output folder
            that is in use.
    """
    check_request(config)
    model = _model_without_weights(config)
    masked_pass = make_masked_pass(model, config)
    num_parameters = _num_parameters(model)
    num_router_parameters = _num_parameters(masked_pass)
    policy = config.policy
    if masked_pass is not None:
        starts = ", ".join(str(start) for start in masked_pass.group_starts)
        policy = f"{policy}, groups at {starts}"
    num_processes = world_size()
    per_process = config.batch_size // num_processes
    micro_batch = _micro_batch(config)
    memory = _memory(model, config, num_router_parameters)
    num_tokens = config.max_steps * config.tokens_per_step
    per_token = flops_per_token(model, config)
    return {
        "model": f"{config.model}: {num_parameters:,} parameters, "
        f"{num_router_parameters:,} more in routers",
        "policy": policy,
        "data": f"{config.data}, sequences of {config.seq_len} tokens",
        "tokens": f"{num_tokens:,} in {config.max_steps:,} steps of {config.tokens_per_step:,}",
        "processes": f"{num_processes}, each {micro_batch} sequences a forward pass, "
        f"{per_process // micro_batch} passes a step",
        "memory per device": f"about {memory.gib:.1f} GiB: {memory.state / 2**30:.1f} for "
        f"weights, gradients and moments, {memory.activations / 2**30:.1f} for activations and "
        "logits",
        "operations": f"{num_tokens * per_token:.3g} in floating point, {per_token:.3g} a token: "
        f"6 (N + T L d) in each of {_num_passes(config):g} passes",
        "output": config.output,
    }


def flops_per_token(model: PreTrainedModel, config: TrainConfig) -> float:
    """Operations of forward and backward that the objective needs, per token of a sequence.

    6 per parameter that multiplies (all but the embedding if it is not tied to the head), and 6 T d
    per layer for causal attention over T tokens with d = heads x head_dim. The masked pass adds its
    share of the tokens. Recomputed activations, the mask's gradient and the routers are not
    counted.
    """
    text = model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = text.num_attention_heads * head_dim
    num_parameters = _num_parameters(model)
    if not text.tie_word_embeddings:
        embedding = model.get_input_embeddings().weight  # type: ignore[union-attr]
        num_parameters -= embedding.numel()  # type: ignore[operator]
    attention = 6.0 * text.num_hidden_layers * config.seq_len * width
    one_pass = 6.0 * num_parameters + attention
    return _num_passes(config) * one_pass


def _num_passes(config: TrainConfig) -> float:
    """Forward and backward passes over a token that the objective needs."""
    teacher = 1 / 3 if config.teacher == "frozen" else 0.0  # a forward pass alone
    return 1 + config.masked_share + teacher


def memory_concern(config: TrainConfig) -> str | None:
    """A line for a run that may need more memory than its device has, with what would help.

    None for a run that needs nine tenths of it at most, or if the device does not say how much it
    has.
    """
    available_gib = _memory_of_device(parse_device(config.device))
    model = _model_without_weights(config)
    num_router_parameters = _num_parameters(make_masked_pass(model, config))
    needed = _memory(model, config, num_router_parameters)
    if available_gib is None or needed.gib <= _USABLE * available_gib:
        return None
    line = (
        f"this run may need about {needed.gib:.0f} GiB, and {config.device} has {available_gib:.0f}"
    )
    for options, smaller in _smaller(config):
        memory = _memory(model, smaller, num_router_parameters)
        if memory.gib <= _USABLE * available_gib:
            return f"{line}; {options} needs about {memory.gib:.0f}"
    return f"{line}; more processes (torchrun) share weights, gradients and moments"


def _smaller(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Options that need less memory for the same run, and the configuration with them."""
    micro_batch = _micro_batch(config)
    while micro_batch > 1:
        micro_batch = max(n for n in range(1, micro_batch) if micro_batch % n == 0)
        smaller = replace(config, micro_batch_size=micro_batch)
        yield f"--micro-batch-size {micro_batch}", smaller
    recomputing = replace(config, activation_checkpointing=True)
    yield "--activation-checkpointing", recomputing
    least = replace(recomputing, micro_batch_size=1)
    yield "--activation-checkpointing --micro-batch-size 1", least


def _memory_of_device(device: torch.device) -> float | None:
    """Memory of a GPU, or of this machine shared by its processes, in GiB; None: not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    if device.type == "cpu" and "SC_PHYS_PAGES" in os.sysconf_names:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        return machine / world_size()
    return None


def _model_without_weights(config: TrainConfig) -> PreTrainedModel:
    """The model's modules, whose parameters have no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(read_config(config.model))


def _num_parameters(module: nn.Module | None) -> int:
    """Parameters of a module; 0 for none."""
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def _micro_batch(config: TrainConfig) -> int:
    """Sequences of a forward pass."""
    return config.micro_batch_size or config.batch_size // world_size()


def _memory(model: PreTrainedModel, config: TrainConfig, num_router_parameters: int) -> _Memory:
    """The memory of a process: 16 bytes are a weight, its gradient and its two moments in
    float32.
    """
    num_parameters = _num_parameters(model)
    state = 16 * num_parameters / world_size() + 16 * num_router_parameters
    if config.teacher == "frozen":
        state += _compute_bytes(config) * num_parameters
    return _Memory(state, _activations(model, config, _micro_batch(config)))


def _activations(model: PreTrainedModel, config: TrainConfig, micro_batch: int) -> float:
    """Bytes kept for one backward pass: activations of the layers, and logits.

    A layer keeps the inputs of its norms, projections and feed-forward, or only its input.
    """
    text = model.config.get_text_config()
    rows = micro_batch * config.seq_len * (1 + config.masked_share)
    num_bytes = _compute_bytes(config)
    intermediate_size = getattr(text, "intermediate_size", 4 * text.hidden_size)
    layer = (10 * text.hidden_size + 5 * intermediate_size) * num_bytes
    layers = text.num_hidden_layers * layer
    if config.activation_checkpointing:
        inputs = text.num_hidden_layers * text.hidden_size * num_bytes
        layers = inputs + layer
    logits = 5.0 * 4 * min(DEVICE_ELEMENTS, rows * text.vocab_size)
    if config.device != "cpu":  # larger chunks of both passes, of which only a part is in float32
        chunk = min(LOGIT_ELEMENTS, micro_batch * config.seq_len * text.vocab_size)
        logits += (1 + config.masked_share) * num_bytes * chunk
    head_gradient = 4 * text.vocab_size * text.hidden_size
    return rows * layers + logits + head_gradient


def _compute_bytes(config: TrainConfig) -> int:
    """Bytes of a number in the type of the matrix products."""
    return 2 if config.dtype == "bfloat16" else 4
