"""The largest tensors that an operation makes (a helper of the tests)."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargeTensors(TorchDispatchMode):
    """Records every new tensor: the largest, and how many of at least ``size`` elements live at one
    time."""

    def __init__(self, size=0, known=()):
        super().__init__()
        self.size = size
        self.largest = 0
        self.at_once = 0
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.numel())
                if x.numel() >= self.size:
                    storage = StorageWeakRef(x.untyped_storage())
                    self.live[storage.cdata] = storage
        self.live = {data: storage for data, storage in self.live.items() if not storage.expired()}
        self.at_once = max(self.at_once, len(self.live))
        return out
