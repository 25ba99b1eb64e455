"""The processes of a run, one or those of torchrun, and the sharding of the module over them."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from kvcat.errors import InputError, one_line
from kvcat.models import decoder_layers, parse_device
from kvcat.training.config import TrainConfig
from kvcat.training.objective import Objective
from kvcat.types import Float, Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process, number ``rank`` from 0, among those of the run, with its device.

    ``mesh`` has one dimension over all processes; None where there is one process and no process
    group.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes logs, exports and messages."""
        return self.rank == 0

    def mean(self, values: Float[Tensor, " values"]) -> Float[Tensor, " values"]:
        """The mean over the processes, the same on each."""
        if self.size == 1:
            return values
        total = values.to(self.device)
        dist.all_reduce(total)
        return (total / self.size).to(values.device)

    def any(self, happened: bool) -> bool:
        """Whether something happened in any process."""
        return bool(self.mean(torch.tensor([float(happened)])) > 0)

    def first(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which runs in the first process alone, in every process.

        Args:
            work: called in the first process.

        Raises:
            InputError: that of ``work``.
        """
        # its result and its error, in a form that can be sent
        message: list[Any] = [None, None]
        if self.is_first:
            try:
                message[0] = work()
            except InputError as error:
                message[1] = str(error)
        if self.size > 1:
            device = torch.device("cpu")
            dist.broadcast_object_list(message, src=0, device=device)
        result, error = message
        if error is not None:
            raise InputError(error)
        return result


@runtime_checkable
class _InWorld(Protocol):
    """An object that knows the processes of its run."""

    world: World


Owner = TypeVar("Owner", bound=_InWorld)
P = ParamSpec("P")


def first_process(
    method: Callable[Concatenate[Owner, P], T],
) -> Callable[Concatenate[Owner, P], T]:
    """A method that runs in the first process alone and returns its result in every process.

    Its object has an attribute ``world``. All processes call the method; an ``InputError`` of the
    first one is raised in all of them.
    """

    @functools.wraps(method)
    def in_first(self: Owner, *arguments: P.args, **options: P.kwargs) -> T:
        return self.world.first(lambda: method(self, *arguments, **options))

    return in_first


def world_size() -> int:
    """The number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def join_world(device: str, *, group: bool = False) -> Iterator[World]:
    """The world of this process; a process group that is made here ends with the block.

    torchrun sets rank, size and address as environment variables. Without them there is one
    process.

    Args:
        device: "cuda" becomes the device of the local rank.
        group: whether a single process also makes a group, which a sharded module needs.

    Raises:
        InputError: no such device, fewer devices than processes here, or processes that do not find
            each other.
    """
    size = world_size()
    rank = int(os.environ.get("RANK", "0"))
    where = _local_device(device, size)
    if size == 1 and not group:
        yield World(0, 1, where)
        return
    makes_group = not dist.is_initialized()
    if makes_group:
        backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
        store = dist.HashStore() if size == 1 else None
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        except (RuntimeError, ValueError) as error:
            problem = f"the {size} processes do not find each other"
            raise InputError(f"{problem}: {one_line(error)}") from error
    try:
        yield World(rank, size, where, init_device_mesh(where.type, (size,)))
    finally:
        if makes_group:
            dist.destroy_process_group()


def _local_device(device: str, size: int) -> torch.device:
    """The device of this process, the current one if it is a GPU with a number."""
    where = parse_device(device)
    if where.type == "cuda" and where.index is None and size > 1:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            problem = f"process {local_rank} of this machine has no GPU"
            raise InputError(f"{problem}: there are {num_gpus}")
        where = torch.device("cuda", local_rank)
    if where.type == "cuda" and where.index is not None:
        torch.cuda.set_device(where)  # where FSDP2 puts the parameters
    return where


def distribute(objective: Objective, world: World) -> None:
    """Make an objective ready for its first step: its layers as configured, its parameters sharded.

    Raises:
        InputError: activation checkpointing of a model that has none.
    """
    prepare_layers(objective.model, objective.config)
    shard(objective, world, getattr(torch, objective.config.dtype))


def prepare_layers(model: PreTrainedModel, config: TrainConfig) -> None:
    """Switch on activation checkpointing and compilation of the decoder layers, as configured.

    The model stays in evaluation mode, without dropout. Only the layers are in training mode,
    because transformers then recomputes their activations.

    Raises:
        InputError: a model without activation checkpointing.
    """
    if config.activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise InputError(f"{type(model).__name__} has no activation checkpointing")
        # transformers 5.19 to 6 know one name, the other, or both
        switch_on = getattr(model, "activation_checkpointing_enable", None)
        switch_on = switch_on or model.gradient_checkpointing_enable
        switch_on({"use_reentrant": False})
    layers = decoder_layers(model)
    if config.compile:
        # three graphs for layers that are alike: a step, another batch size, no gradient
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(layers))
    for layer in layers:
        layer.training = config.activation_checkpointing
        dropouts = [name for name in vars(layer) if "dropout" in name]
        for name in dropouts:
            setattr(layer, name, 0.0)  # which OPT's layer applies itself, in training mode
        if config.compile:
            # the hooks that pass the gates stay outside
            layer.forward = torch.compile(layer.forward)


def shard(objective: Objective, world: World, dtype: torch.dtype) -> None:
    """Shard the model's parameters over the world with FSDP2.

    Each decoder layer is a group, and all other parameters are one.

    Master weights, gradients and optimizer state stay float32 and shard with the parameters; a
    layer computes in ``dtype``. The policies' parameters are small and stay whole on every process,
    in float32; ``reduce_policies`` keeps them equal. Without a process group nothing happens.
    """
    if world.mesh is None:
        return
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": world.mesh, "mp_policy": precision}
    for layer in decoder_layers(objective.model):
        fully_shard(layer, **options)
    fully_shard(objective, **options, ignored_params=set(objective.policy_parameters()))


@torch.no_grad()
def reduce_policies(parameters: list[nn.Parameter], world: World) -> None:
    """Average the gradients of whole parameters over the processes, in one message."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if world.size > 1 and gradients:
        mean = world.mean(nn.utils.parameters_to_vector(gradients))
        nn.utils.vector_to_parameters(mean, gradients)
