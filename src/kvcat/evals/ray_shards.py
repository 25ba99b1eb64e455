"""The shards of an evaluation as tasks on a Ray cluster: Ray places them and repeats lost ones."""

import os
import sys
from collections.abc import Callable

from kvcat.errors import InputError
from kvcat.evals.records import Shard
from kvcat.ray_cluster import connect, device_resources, num_devices, ray, worker_errors


def run_shards(
    run_shard: Callable[[Shard], object], *, address: str, workers: int | None, device: str
) -> None:
    """Run every shard in a worker of a Ray cluster; a shard whose worker dies is run again.

    Records are on disk when they are appended, so a repeated shard computes only what is missing.

    Args:
        run_shard: runs the shard (index, count). It runs in this process's folder, which must exist
            on every node.
        address: of the cluster, or "auto" for the running one.
        workers: number of shards; None: one for every device of the cluster.
        device: torch device: a worker has one processor ("cpu") or one accelerator.

    Raises:
        InputError: no cluster at the address; a mistake that a shard reports.
    """
    connect(address)
    count = workers or num_devices(device)
    remote = ray.remote(**device_resources(device), max_retries=-1)(_run_in_folder)
    shards = {}
    for index in range(count):
        shards[remote.remote(run_shard, (index, count), os.getcwd())] = index
    waiting = list(shards)
    with worker_errors():
        while waiting:
            finished, waiting = ray.wait(waiting)
            ray.get(finished)
            print(f"shard {shards[finished[0]]} of {count} is done", file=sys.stderr, flush=True)


def _run_in_folder(run_shard: Callable[[Shard], object], shard: Shard, folder: str) -> None:
    """Run a shard where relative paths mean what they mean to the command."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise InputError(f"a Ray worker has no folder {folder}: {error.strerror}") from None
    run_shard(shard)
