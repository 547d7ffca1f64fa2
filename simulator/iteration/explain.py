"""Sensitivity of the iteration time: how often each op and collective is on the critical path, and what halving it
saves.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.iteration.simulate import Simulation, simulate_lowered


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One signature and its effect on the iteration time.

    Attributes:
        work: What is done.
        count: How often it lies on the critical path, ``n_i``: the derivative of the time by its duration.
        seconds: Of one, alone, ``t_i``.
        share: Part of the iteration time, ``n_i * t_i / T``.
        halved_s: What the iteration is shorter by if it takes half as long; less than half of its share where
            something else then decides.
    """

    work: Op | Collective
    count: float
    seconds: float
    share: float
    halved_s: float

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "work": str(self.work),
            "count": self.count,
            "seconds": self.seconds,
            "share": self.share,
            "halved_s": self.halved_s,
        }


def explain(simulation: Simulation, most: int = 10) -> tuple[Sensitivity, ...]:
    """The signatures with the largest shares of the time, in order."""
    if most < 1:
        raise StepsightError(f"explain lists at least 1 row, got {most}")
    total = simulation.iteration_time_s
    seconds = dict(zip(simulation.lowered.all_works, simulation.work_seconds.tolist(), strict=True))
    counts = sorted(simulation.op_counts.items(), key=lambda item: -item[1] * seconds[item[0]])[:most]
    return tuple(
        Sensitivity(work, count, seconds[work], count * seconds[work] / total, total - _with(simulation, work))
        for work, count in counts
    )


def _with(simulation: Simulation, work: Op | Collective) -> float:
    """The iteration time if one signature took half as long."""
    timer = simulation.timer.but({work: float(simulation.timer.work_seconds([work])[0]) / 2})
    pipelines = tuple(passing.pipeline for passing in simulation.passings)
    halved = simulate_lowered(simulation.job, simulation.lowered, timer, simulation.hardware, pipelines)
    return halved.iteration_time_s
