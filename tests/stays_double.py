"""A float64 that stays float64 in transformers (a helper of the tests)."""

import torch
from torch.overrides import TorchFunctionMode


class StaysDouble(TorchFunctionMode):
    """Norms, rotary embeddings and softmax of transformers compute in float32; here float64 stays
    float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.to, torch.Tensor.float) and args[0].dtype == torch.float64:
            target = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.dtype)]
            if func is torch.Tensor.float or target == [torch.float32]:
                return args[0]
        if (
            kwargs.get("dtype") is torch.float32
            and args
            and getattr(args[0], "dtype", None) == torch.float64
        ):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
