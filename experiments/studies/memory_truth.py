"""Peak memory of a rank of the harness in a fake world, by PyTorch's own tracking of real training steps.

Tensors are fake and messages go nowhere, but every storage is made and freed as in a real run: torch's ``MemTracker``
sees what it would see there.  Plain data parallelism is left out: DDP's reducer reads data that fake tensors lack.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.pipelining import schedules as pipelines
from torch.distributed.pipelining import stage as stages_of_pipelines
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.harness.models import parallel
from stepsight.dataset.job.job import Job


class _Tracker(MemTracker):
    """Only storages: statistics of modules allow one micro-batch."""

    def _pre_fw_hook(self, *arguments: object) -> None: ...

    def _post_fw_hook(self, *arguments: object) -> None: ...

    def _pre_bw_hook(self, *arguments: object) -> None: ...

    def _post_bw_hook(self, *arguments: object) -> None: ...

    def forget_peak(self) -> None:
        self._peak_mem = dict.fromkeys(self._peak_mem, 0)


def tracked_peak(job: Job, rank: int = 0) -> int:
    """Bytes of all tensors of a rank at the peak of its second step.

    Raises:
        JobError: If the fake world cannot run it.
    """
    p = job.parallel
    sharded = p.zero_stage == 3 and p.dp > 1
    if p.dp > 1 and p.pp == 1 and not sharded:
        raise JobError("DDP does not run on fake tensors: dp > 1 needs zero_stage 3 or pp > 1")
    device = torch.device("cpu")
    table = job.to_dict()
    with ExitStack() as stack:
        if job.batch.precision == "bf16" and not sharded:
            raise JobError("mixed precision is FSDP2's here: bf16 needs zero_stage 3 and dp > 1")
        stack.enter_context(_fake_world(p.tp * p.pp * p.dp, rank))
        if p.tp * p.pp * p.dp > 1:
            parallel.device_mesh("cpu", pp=p.pp, dp=p.dp, tp=p.tp)  # with real numbers, before all tensors are fake
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        training = parallel.Training(table, device)
        tracker = _Tracker()
        tracker.track_external(training.model, training.optimizer, training.tokens, training.targets)
        with tracker:
            training.step()
            tracker.forget_peak()
            training.step()
        return int(tracker.get_tracker_snapshot("peak")[device]["Total"])


@contextmanager
def _fake_world(size: int, rank: int) -> Iterator[None]:
    if size == 1:
        yield
        return
    parallel.device_mesh.cache_clear()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with mock.patch.object(pipelines._PipelineSchedule, "_warmup_p2p", _agree_on_static_shapes):
            yield
    finally:
        dist.destroy_process_group()
        parallel.device_mesh.cache_clear()


def _agree_on_static_shapes(_: object, stages: list[object], *__: object) -> None:
    """Stages exchange messages about whether their shapes are static; they are."""
    for stage in stages:
        stage._inference_mode = stages_of_pipelines.InferenceMode.STATIC  # type: ignore[attr-defined]
