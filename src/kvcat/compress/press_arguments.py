"""Arguments and names that kvpress expects of transformers, and that newer versions dropped."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from kvcat.cache import CACHE_NAME
from kvcat.hub import BASE_NAME, SMOLLM2, local_folder
from kvcat.models import check_length

_OLD_NAME = "past_key_values"  # name of a cache before transformers 5.24, and in kvpress


@contextmanager
def as_kvpress_expects(model: Any, attentions: list[Any], eager: bool) -> Iterator[None]:
    """A block in which the model passes arguments that kvpress expects and transformers dropped.

    In the block, the model's name is the folder of the base model. All changes are undone
    afterwards.
    """
    modules: list[nn.Module] = [model, model.get_submodule("model"), *attentions]
    names_before = [set(vars(module)) | set(module._modules) for module in modules]
    with_position = partial(with_cache_position, config=model.config)
    hooks = [
        attention.register_forward_pre_hook(with_position, with_kwargs=True)
        for attention in attentions
    ]
    hooks += with_old_names(model, attentions)
    implementation = model.config._attn_implementation
    lacks_head_dim = not hasattr(model.config, "head_dim")
    label = model.config.name_or_path
    try:
        if label in (BASE_NAME, SMOLLM2):
            model.config.name_or_path = str(local_folder(label))
        if lacks_head_dim:
            model.config.head_dim = attentions[0].head_dim
        if eager:
            model.set_attn_implementation("eager")
        yield
    finally:
        model.config.name_or_path = label
        if lacks_head_dim:
            del model.config.head_dim
        # a press that fails may leave the attention that it needs
        if model.config._attn_implementation != implementation:
            model.set_attn_implementation(implementation)
        for hook in hooks:
            hook.remove()
        for module, names in zip(modules, names_before, strict=True):
            added = (set(vars(module)) | set(module._modules)) - names
            for name in added:
                delattr(module, name)


def with_old_names(model: Any, attentions: list[Any]) -> list[RemovableHandle]:
    """Hooks that pass caches to kvpress under its name ``past_key_values``.

    They are needed if transformers uses another name. Presses call the model, wrap the forward of
    ``model.model``, or read the arguments of the attention layers in hooks.
    """
    if CACHE_NAME == _OLD_NAME:
        return []
    forward = model.model.forward

    def new_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **_renamed(kwargs, _OLD_NAME, CACHE_NAME))

    def to_new(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, _renamed(kwargs, _OLD_NAME, CACHE_NAME)

    def to_old(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, _renamed(kwargs, CACHE_NAME, _OLD_NAME)

    def add_old(_module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        kwargs[_OLD_NAME] = kwargs[CACHE_NAME]  # for the press's hooks, which run later

    model.model.forward = new_forward
    return [
        model.register_forward_pre_hook(to_new, with_kwargs=True),
        model.model.register_forward_pre_hook(to_old, with_kwargs=True),
        *(attention.register_forward_hook(add_old, with_kwargs=True) for attention in attentions),
    ]


def _renamed(kwargs: dict[str, Any], before: str, after: str) -> dict[str, Any]:
    return {after if name == before else name: value for name, value in kwargs.items()}


def with_cache_position(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], config: PreTrainedConfig
) -> tuple[Any, dict[str, Any]]:
    """A hook before an attention layer that adds the positions of its tokens to the arguments.

    Raises:
        InputError: a press repeats the prefix beyond the model's positions.
    """
    states = kwargs["hidden_states"]
    start = kwargs[CACHE_NAME].get_seq_length(module.layer_idx)
    stop = start + states.shape[1]
    check_length("it repeats the prefix after itself", stop, config)
    positions = torch.arange(start, stop, device=states.device)
    return args, {"cache_position": positions, **kwargs}
