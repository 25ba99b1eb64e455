"""The processes of a run: one, or those that torchrun started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kvcat.errors import InputError
from kvcat.types import Float, Tensor


@dataclass(frozen=True)
class World:
    """This process among those of the run.

    Args:
        rank: number of the process, from 0; the first one writes.
        size: number of processes.
        device: the device of this process.
        mesh: one dimension over all processes; None where there is one process and no process group.
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
        if self.size == 1:
            return happened
        flag = torch.tensor(float(happened), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def wait(self) -> None:
        """Return when all processes are here."""
        if self.size > 1:
            dist.barrier()


def world_size() -> int:
    """Processes that the environment speaks of; 1 where torchrun did not start this one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def join_world(device: str, *, group: bool = False) -> Iterator[World]:
    """The world of this process; a process group that is made here ends with the block.

    torchrun tells rank, size and address by environment variables. Without them there is one process. NCCL serves CUDA
    devices, each process its own; gloo serves everything else.

    Args:
        device: "cpu", "cuda" or another torch device; "cuda" becomes the device of the local rank.
        group: make a process group for a single process as well, as sharded modules need one.

    Raises:
        InputError: fewer devices than processes on this machine, or processes that do not find each other.
    """
    size, rank = world_size(), int(os.environ.get("RANK", "0"))
    where = _own_device(device, int(os.environ.get("LOCAL_RANK", "0")), size)
    if size == 1 and not group:
        yield World(0, 1, where)
        return
    made = not dist.is_initialized()
    if made:
        backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
        store = dist.HashStore() if "MASTER_ADDR" not in os.environ else None
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        except (RuntimeError, ValueError) as error:
            told = " ".join(str(error).split())[:200]
            raise InputError(f"the {size} processes do not find each other: {told}") from error
    try:
        yield World(rank, size, where, init_device_mesh(where.type, (size,)))
    finally:
        if made:
            dist.destroy_process_group()


def _own_device(device: str, local_rank: int, size: int) -> torch.device:
    where = torch.device(device)
    if where.type != "cuda" or where.index is not None or size == 1:
        return where
    if local_rank >= torch.cuda.device_count():
        raise InputError(f"process {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
