"""A simulated accelerator: the device "accel", whose tensors are in the processor's memory.

It computes what the processor does and rejects what a real one rejects: tensors of two devices in
one operation. So such mistakes are noticed without a GPU. Importing this module changes torch for
the whole process.
"""

import contextlib

import torch
from torch.utils import _device, _pytree
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "accel"
aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)
INDEXING = (
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
)  # indices may be on the processor
FACTORIES = (
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "full",
    "linspace",
    "ones",
    "zeros",
)


class Held(torch.Tensor):
    """A tensor of the device; ``held`` has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        layout = {
            "strides": held.stride(),
            "storage_offset": held.storage_offset(),
            "dtype": held.dtype,
        }
        return torch.Tensor._make_wrapper_subclass(cls, held.size(), device=f"{NAME}:0", **layout)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, *args, **(kwargs or {}))

    def tolist(self):
        return self.held.tolist()

    # torch makes tensors of Python data in a way that reaches no backend written in Python

    def new_tensor(self, data, *, dtype=None):
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.device)

    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        return super().__getitem__(
            tuple(torch.tensor(k) if isinstance(k, list) else k for k in keys)
        )


def run(func, *args, **kwargs):
    """The operation on the processor; its results are on the device that a real one would put
    them on."""
    tensors = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    held = [x for x in tensors if isinstance(x, Held)]
    check_devices(func, args, held, [x for x in tensors if not isinstance(x, Held) and x.dim()])
    if func is aten._fused_sdp_choice.default:
        return 0  # no fused kernel
    here = isinstance(args[0], Held) if func is aten.copy_.default else bool(held)
    kwargs.pop("pin_memory", None)
    if kwargs.get("device") is not None:
        here = torch.device(kwargs["device"]).type == NAME
        kwargs["device"] = "cpu"
    same = {id(x.held): x for x in held}
    args, kwargs = _pytree.tree_map_only(Held, lambda x: x.held, (args, kwargs))
    out = func(*args, **kwargs)
    if not here:
        return out
    # an operation in place returns its argument
    return _pytree.tree_map_only(
        torch.Tensor, lambda x: same[id(x)] if id(x) in same else Held(x), out
    )


def check_devices(func, args, held, foreign):
    """Reject tensors of both devices; a tensor without axes on the processor counts as a number."""
    if not held or not foreign or func in COPIES:
        return
    name = func._schema.name.removeprefix("aten::")
    foreign_values = len(args) > 2 and any(args[2] is x for x in foreign)
    if name not in INDEXING or not isinstance(args[0], Held) or foreign_values:
        raise RuntimeError(
            f"{name} of tensors on {NAME}, {[*map(len, held)]}, and on cpu, {[*map(len, foreign)]}"
        )


class Stream(contextlib.nullcontext):
    """A stream or event; nothing ever waits for it."""

    def wait_stream(self, *_):
        pass

    synchronize = wait_stream


class Module(_DummyBackendModule):
    """``torch.accel``."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

    def current_stream(self, *_):
        return Stream()

    stream = Stream = current_stream


def made_here_first(make):
    def made(*args, device=None, **kwargs):
        tensor = make(*args, **kwargs)
        return tensor if device is None else tensor.to(device)

    return made


def kernel(name):
    packet, _, overload = name.partition(".")
    return lambda *args, **kwargs: run(
        getattr(getattr(aten, packet), overload or "default"), *args, **kwargs
    )


_setup_privateuseone_for_python_backend(NAME, Module())
LIBRARIES = [torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")]
LIBRARIES[0].fallback(run, "PrivateUse1")
for factory in FACTORIES:
    LIBRARIES[1].impl(factory, kernel(factory), "PrivateUse1")
_device._device_constructors()  # remembers the factories as they are
torch.tensor = made_here_first(torch.tensor)
torch.as_tensor = made_here_first(torch.as_tensor)
torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied
