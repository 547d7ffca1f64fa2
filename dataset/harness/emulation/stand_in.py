"""One process that replaces one rank of a job: no other rank runs, and its collectives only take time.

``world`` makes this process rank ``r`` of the job's world, of a backend that is ours.  DDP, FSDP2, tensor parallel and
pipelines then run as they are.  Of a collective only what concerns this rank is done: an all-gather repeats its own
shard, a reduce-scatter keeps its own part, an all-reduce changes nothing, and what is received is small random
numbers.  All values are finite and none means anything.

A collective is over a delay after its issue (``delays``), within a group one after the other as on a link; messages to
one peer and from it are links of their own.  Who issues does not wait.  On CUDA a delay is a kernel that spins on a
stream of its own (``spinning``), which waits for the stream that issues; the stream that waits for the collective waits
for it, and the host never does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..models.parallel import end_groups
from ..plan import world_size
from ..plan_error import HarnessError
from ..ranks import STAND_IN
from .clocks import Delays, RealClock
from .groups import Group, RealRanksGroup, World
from .links import Spinner

SETUP = ("gather", "broadcast")  # what training does before its first step only
_worlds: list[World] = []  # the one in which we are: torch makes groups and tells them no more than their ranks


@contextmanager
def world(run: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Act as the emulated rank of a run of a checked plan.

    This process must be alone in its process group, which ends, and begins again behind the block.
    """
    job, stand_in = run["job"], run["stand_in"]
    backend, store, hook = dist.get_backend(), c10d._get_default_store(), sys.excepthook
    spinner = Spinner() if device.type == "cuda" else None
    delays = Delays(stand_in["collectives"])
    enter(World(delays, job["cluster"]["devices_per_node"], device, RealClock(), spinner, SETUP))
    dist.destroy_process_group()
    try:
        empty = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(STAND_IN, store=empty, rank=stand_in["rank"], world_size=world_size(job))
        try:
            yield
        finally:
            end_groups(None)  # of a run that failed, too
            dist.destroy_process_group()
    finally:
        _worlds.pop()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        sys.excepthook = hook  # each start of a group would prefix its rank once more


def enter(world: World) -> None:
    """Make process groups of the backend ``STAND_IN`` belong to a world, from now on."""
    if not hasattr(dist.Backend, STAND_IN.upper()):
        dist.Backend.register_backend(STAND_IN, _make_group, extended_api=True, devices=["cpu", "cuda"])
    _worlds.append(world)


def _make_group(options: Any, _: Any) -> Group:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    real = set(_worlds[-1].real).intersection(ranks)
    if len(real) > 1 and _worlds[-1].spinner is not None:
        raise HarnessError(
            "several real ranks must compute on CPUs: hide the GPU (CUDA_VISIBLE_DEVICES=''), or run one"
        )
    kind = RealRanksGroup if len(real) > 1 else Group
    return kind(options.group_rank, ranks, options.group_id, _worlds[-1])
