"""Add a pipeline schedule: 1F1B with more warm-up forwards, which hides messages between stages.

"Eager 1F1B" is from Zhuang et al. 2022 (arXiv:2211.05322).  Run this file with ``python examples/own_schedule.py``.
``stepsight.testing.ScheduleContract`` checks a schedule; ``tests/examples`` applies it to this one.
"""

from dataclasses import replace

import numpy as np

from stepsight import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec, predict
from stepsight.registries import SCHEDULES, Schedule, ScheduleKind, loop_placement

FORWARD, BACKWARD = 0, 1


def eager_1f1b(num_stages: int, num_micro_batches: int, virtual_stages: int) -> Schedule:
    """Run twice as many warm-up forwards as 1F1B does."""
    actions = []
    for stage in range(num_stages):
        ahead = min(2 * (num_stages - stage) - 1, num_micro_batches)  # forwards before the first backward
        order = [(FORWARD, micro, 0) for micro in range(ahead)]
        for micro in range(num_micro_batches):
            order.append((BACKWARD, micro, 0))
            if ahead + micro < num_micro_batches:
                order.append((FORWARD, ahead + micro, 0))
        actions.append(np.array(order, dtype=np.int32))
    return Schedule(tuple(actions), num_micro_batches, loop_placement(num_stages))


def main() -> None:
    SCHEDULES.register("eager-1f1b", ScheduleKind(eager_1f1b))
    slow = {"bandwidth_gbytes_per_s": 0.5, "latency_us": 20.0}
    usual = Job(
        model=ModelSpec(family="gpt", layers=32, hidden=4096, heads=32, vocab=51200, seq_len=2048),
        parallel=ParallelSpec(tp=1, pp=8, schedule="1f1b"),
        batch=BatchSpec(micro_batch=1, global_batch=32, precision="bf16"),
        cluster=ClusterSpec(
            hardware="a100-sxm-80gb", nodes=8, devices_per_node=1, fabric={"intra_node": slow, "inter_node": slow}
        ),
    )
    for schedule in ("eager-1f1b", "1f1b"):
        found = predict(replace(usual, parallel=replace(usual.parallel, schedule=schedule)))
        print(f"{schedule}: {found.memory.peak_bytes / 1e9:.1f} GB, {found.iteration_time_s * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
