"""Real pipelines whose stages sleep: times of all actions under ``torch.distributed.pipelining`` over gloo.

``python -m stepsight.dataset.harness.box.dilated_pipeline plan.json`` runs all cases of a plan with ``ranks`` processes
and writes ``<out>/<case>.json`` for each.  Sleeping costs no processor, so 16 ranks are lawful on two cores.

A plan: ``ranks``, ``repeats``, ``out`` (a folder), ``cases``.  A case: ``name``, ``schedule`` (a key of ``SINGLE`` or
``MULTI``, or any with a ``csv`` of actions), ``virtual_stages``, ``micro_batches``, ``forward_s``, ``input_s``,
``weight_s`` (what a part sleeps for its output and for each gradient), ``pace`` (a factor of them for each rank).
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from ..atomic_files import write_json
from ..measuring.measure import LEAD_S
from ..ranks import gather
from .sleeping import MULTI, SINGLE, V_SHAPED, WARM_UP_PACE

WIDTH = 4  # of a micro-batch's row: messages cost their latency

Row = tuple[str, int, int, float, float]  # kind, part, micro-batch, start, end


class _Input(torch.autograd.Function):
    """Sleeps in forward, and for the gradient of the stage's input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, input_s: float) -> Tensor:
        ctx.seconds = input_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0].contiguous(), None, None  # gloo sends nothing else


class _Weight(torch.autograd.Function):
    """Sleeps for the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, weight_s: float) -> Tensor:
        ctx.seconds = weight_s
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """A model part with one weight: ``x + weight``, so that input and weight gradients are separate."""

    def __init__(self, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.seconds = (forward_s, input_s, weight_s)
        self.hurry = 1.0  # of the warm-up

    def forward(self, x: Tensor) -> Tensor:
        forward_s, input_s, weight_s = (seconds * self.hurry for seconds in self.seconds)
        out: Tensor = _Input.apply(x, forward_s, input_s) + _Weight.apply(self.weight, weight_s)
        return out


class RecordedStage(PipelineStage):
    """Records when its actions begin and end."""

    rows: list[Row]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.rows.append(("F", self.stage_index, fwd_chunk_id, start, time.monotonic()))
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        start = time.monotonic()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.rows.append(("B" if full_backward else "I", self.stage_index, bwd_chunk_id, start, time.monotonic()))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        start = time.monotonic()
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.rows.append(("W", self.stage_index, bwd_chunk_id, start, time.monotonic()))


def _schedule(case: dict[str, Any], rank: int, ranks: int) -> tuple[Any, list[RecordedStage]]:
    """A case's schedule on this rank, and its stages."""
    chunks, name = case["virtual_stages"], case["schedule"]
    parts = [rank + chunk * ranks for chunk in range(chunks)]
    if name in V_SHAPED:
        parts = [rank, 2 * ranks - 1 - rank]
    sample = torch.zeros(1, WIDTH)
    stages = []
    for part in parts:
        pace = case["pace"][rank]
        module = Sleeper(case["forward_s"] * pace, case["input_s"] * pace, case["weight_s"] * pace)
        stage = RecordedStage(
            module, part, ranks * chunks, torch.device("cpu"),
            input_args=sample.clone().requires_grad_(part > 0), output_args=sample.clone().requires_grad_(),
        )  # fmt: skip
        stages.append(stage)
    settings: dict[str, Any] = {"n_microbatches": case["micro_batches"], "loss_fn": lambda out, target: out.sum()}
    if chunks == 1 and name in SINGLE:
        return getattr(torch_schedules, SINGLE[name])(stages[0], **settings), stages
    if name in MULTI:
        return getattr(torch_schedules, MULTI[name])(stages, **settings), stages
    schedule = torch_schedules._PipelineScheduleRuntime(stages, **settings)
    schedule._load_csv(case["csv"])
    return schedule, stages


def _run_case(case: dict[str, Any], rank: int, ranks: int, repeats: int) -> list[dict[str, Any]]:
    """Every repeat's actions of all ranks (on every rank), after an uncounted one."""
    schedule, stages = _schedule(case, rank, ranks)
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    batch = torch.zeros(case["micro_batches"], WIDTH)
    steps = []
    for repeat in range(repeats + 1):
        rows: list[Row] = []
        for stage in stages:
            stage.rows = rows
            cast(Sleeper, stage.submod).hurry = WARM_UP_PACE if repeat == 0 else 1.0
        gc.collect()
        gc.disable()
        begin = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
        dist.broadcast(begin, 0)
        time.sleep(max(0.0, begin.item() - time.monotonic()))
        schedule.step(*([batch] if first else []), target=batch if last else None, return_outputs=False)
        end = time.monotonic()
        gc.enable()
        gathered = gather((rows, end))
        if repeat:
            steps.append({"begin": begin.item(), "ranks": [r for r, _ in gathered], "ends": [e for _, e in gathered]})
    return steps


def _work(rank: int, plan: dict[str, Any], store: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # tables of hundreds of lines
    with suppress(OSError):  # without the right to it, timing is noisier
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=plan["ranks"], timeout=timedelta(seconds=120)
    )
    for number, case in enumerate(plan["cases"]):
        steps = _run_case(case, rank, plan["ranks"], plan["repeats"])
        if rank == 0:
            write_json(
                Path(plan["out"]) / f"{case['name']}.json", {"case": case, "ranks": plan["ranks"], "steps": steps}
            )
            print(f"{case['name']} ({number + 1} of {len(plan['cases'])})", flush=True)
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    plan = json.loads(Path(path).read_text("utf-8"))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the ranks too
    fork = multiprocessing.get_context("fork")  # ranks share what is imported
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            fork.Process(target=_work, args=(rank, plan, f"{folder}/store"), daemon=True)
            for rank in range(plan["ranks"])
        ]
        for worker in workers:
            worker.start()
        left = {worker.sentinel: worker for worker in workers}
        while left:
            for sentinel in wait(list(left)):
                worker = left.pop(cast(int, sentinel))
                worker.join()
                if worker.exitcode:
                    print(f"error: rank {workers.index(worker)} ended with {worker.exitcode}", file=sys.stderr)
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
