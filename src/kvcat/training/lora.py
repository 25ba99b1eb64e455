"""Low-rank adapters instead of all parameters, merged into the weights at export."""

import importlib.util

import torch
from transformers import PreTrainedModel

from kvcat.errors import InputError
from kvcat.models import decoder_layers
from kvcat.training.config import TrainConfig


def check_lora(config: TrainConfig) -> None:
    """Refuse adapters where their package is missing.

    Raises:
        InputError: with the command that installs it.
    """
    if config.lora_rank and importlib.util.find_spec("peft") is None:
        raise InputError("--lora-rank needs the package peft: pip install 'kvcat[lora]'")


def add_lora(model: PreTrainedModel, config: TrainConfig) -> None:
    """Give every linear map of the decoder layers an adapter of ``lora_rank``, scale 1, and freeze all else.

    The adapters start without effect; their first matrices are drawn from the run's seed, and the global random state
    stays as it was.

    Args:
        model: the causal LM; its class stays, its linear modules are wrapped.
        config: rank and seed; rank 0 does nothing.

    References: Hu et al. 2021 (LoRA), arXiv:2106.09685.
    """
    if not config.lora_rank:
        return
    from peft import LoraConfig, inject_adapter_in_model

    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    names = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and id(module) in inside
    ]
    settings = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_rank, lora_dropout=0.0, target_modules=names)
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    model.eval()


def merge_lora(model: PreTrainedModel, config: TrainConfig) -> None:
    """Add the adapters to the weights and take the wrappers off: the model is what it was, with other weights."""
    if not config.lora_rank:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    wrapped = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, module in wrapped:
        module.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
