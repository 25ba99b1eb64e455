"""How the trained module is spread over processes."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from kvcat.errors import InputError
from kvcat.models import decoder_layers
from kvcat.training.config import TrainConfig
from kvcat.training.objective import Objective
from kvcat.training.world import World


def prepare_layers(model: PreTrainedModel, config: TrainConfig) -> None:
    """Activation checkpointing and compilation of the decoder layers, where the configuration asks for them.

    The model stays in evaluation mode, without dropout, so that both passes see the same weights; the layers alone are
    told that they train, which is what switches their checkpointing on.

    Raises:
        InputError: the model has no activation checkpointing.
    """
    if config.activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise InputError(f"{type(model).__name__} has no activation checkpointing")
        # transformers 5.17 to 6 know one name, the other, or both
        switch_on = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        switch_on({"use_reentrant": False})
    layers = decoder_layers(model)
    if config.compile:  # three graphs for layers that are alike: a step, another batch size, no gradient
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(layers))
    for layer in layers:
        layer.training = config.activation_checkpointing
        if config.compile:
            layer.forward = torch.compile(layer.forward)  # the hooks that hand out the masks stay outside


def shard(objective: Objective, world: World, dtype: torch.dtype) -> None:
    """Shard the model's parameters over the world with FSDP2, one group per decoder layer and one for the rest.

    Master weights, gradients and optimizer state stay float32 and shard with the parameters; a layer computes in
    ``dtype``. The policies' few parameters stay whole on every process, in float32; ``reduce_policies`` keeps them
    equal. Without a process group nothing happens.

    Args:
        objective: float32, on the world's device.
        world: the processes.
        dtype: of the matrix products, float32 or bfloat16.
    """
    if world.mesh is None:
        return
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(objective.model):
        fully_shard(layer, mesh=world.mesh, mp_policy=policy)
    fully_shard(objective, mesh=world.mesh, mp_policy=policy, ignored_params=set(objective.policy_parameters()))


@torch.no_grad()
def reduce_policies(parameters: Iterable[nn.Parameter], world: World) -> None:
    """Average the gradients of whole parameters over the processes, in one message."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if world.size == 1 or not gradients:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= world.size
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
