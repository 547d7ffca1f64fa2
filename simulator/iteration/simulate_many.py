"""Iterations of many jobs at once, and how the time of an iteration depends on single durations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.clock.engine import NUM_CLOCKS, Floats
from stepsight.simulator.clock.track import through, track_clocks
from stepsight.simulator.durations.latency_model import LatencyModel
from stepsight.simulator.durations.segment_timing import Timer, timer_of
from stepsight.simulator.iteration.simulate import Simulation, begin_optimizers, enter_optimizers, simulate_lowered
from stepsight.simulator.programs.lower import Lowered, lower
from stepsight.simulator.programs.op_level import Work


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One signature and its effect on the iteration time."""

    work: Op | Collective  # what is done
    count: float  # how often it lies on the critical path
    seconds: float  # of one there, with what its neighbours change: the mean
    share: float  # part of the iteration time
    # what the iteration is shorter by if it takes half as long; less than half of its share where something else then
    # decides
    halved_s: float

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {**asdict(self), "work": str(self.work)}


def explain(simulation: Simulation, most: int = 10) -> tuple[Sensitivity, ...]:
    """The signatures with the largest shares of the time, in order."""
    if most < 1:
        raise StepsightError(f"explain lists at least 1 row, got {most}")
    total = simulation.iteration_time_s
    works, alone = simulation.lowered.all_works, simulation.work_seconds
    taken, uses = simulation.work_counts * alone, simulation.work_uses()
    pipelines, found = tuple(pipeline_run.pipeline for pipeline_run in simulation.pipeline_runs), []
    for at in [at for at in np.argsort(-taken, kind="stable")[:most].tolist() if taken[at] > 0]:
        timer = simulation.timer.but({works[at]: float(alone[at]) / 2})
        halved = simulate_lowered(simulation.job, simulation.lowered, timer, simulation.hardware, pipelines)
        count, seconds = float(uses[at]), float(taken[at])
        found.append(Sensitivity(works[at], count, seconds / count, seconds / total, total - halved.iteration_time_s))
    return tuple(found)


TOGETHER = 16  # jobs that are laid out at once: they fit in a near cache
STEP = 2.0**-16  # the part by which durations are longer where a derivative by them is computed


def can_simulate_many(job: Job, latency: LatencyModel) -> bool:
    """Whether ``simulate_many`` can simulate a job: all ranks are equal, and ops do not depend on context."""
    cluster = job.cluster
    return not (cluster.stragglers or cluster.slow_links or cluster.mixed or latency.knows_context)


def simulate_many(
    jobs: Sequence[Job], latency: LatencyModel, part: Callable[[Sequence[Work]], Sequence[bool]] | None = None
) -> Floats:
    """Simulate one iteration of each job: the same times as ``simulate``, computed together and without explanations.

    For each ``can_simulate_many`` must hold.

    Args:
        jobs: Which jobs.
        latency: Durations.
        part: Says which of some works belong to a part.

    Returns:
        Seconds of an iteration, and of the critical path that the part's works take, that is the derivative of the time
        by their durations, times these; shape ``(2, len(jobs))``.
    """
    lowered = [lower(job, latency.hardware) for job in jobs]
    # Every op and collective is requested in one list: latency models answer it faster than several short ones.
    works = {id(low.segments): low for low in lowered}.values()
    segments = dict.fromkeys([segment for low in works for segment in low.segments])
    passages = dict.fromkeys([passage for segment in segments for passage in segment.passages])
    asked = dict.fromkeys([work for passage in passages for work in passage.works])
    asked.update(dict.fromkeys({id(work): work for segment in segments for work in segment.sent}.values()))
    asked.update(dict.fromkeys([message for low in works for message in low.messages]))
    timer, every = timer_of(latency), list(asked)
    seconds = timer.work_seconds(every)
    times = np.zeros((2, len(jobs)))
    times[0] = _times(lowered, timer, latency.hardware)
    if own := np.flatnonzero(part(every)).tolist() if part else ():
        longer = timer.but({every[at]: float(seconds[at]) * (1.0 + STEP) for at in own})
        times[1] = (_times(lowered, longer, latency.hardware) - times[0]) / STEP
    return times


def _times(lowered: list[Lowered], timer: Timer, hardware: Hardware) -> Floats:
    """Seconds of one iteration of each job, shape ``(len(lowered),)``."""
    times = np.empty(len(lowered))
    for carried in (False, True):
        own = [at for at, low in enumerate(lowered) if (low.num_stages == 1) == carried]
        works = {id(lowered[at].segments): lowered[at] for at in own}  # shared where only the schedule differs
        segments = list(dict.fromkeys([segment for low in works.values() for segment in low.segments]))
        row = {segment: at for at, segment in enumerate(segments)}
        rows_of = {key: [row[segment] for segment in low.segments] for key, low in works.items()}
        paths = timer.many_paths(segments, carried=carried) if own else np.empty(0)
        messages = list(dict.fromkeys([message for low in works.values() for message in low.messages]))
        seconds = dict(zip(messages, timer.work_seconds(messages).tolist(), strict=True))
        host = (0.0, 0.0) if carried else (hardware.host_action_s, hardware.host_message_s)
        families: dict[tuple[int, ...], list[int]] = {}  # jobs that differ only in durations
        for at in own:
            low = lowered[at]
            families.setdefault((id(low.track), id(low.table), id(low.message), id(low.meets)), []).append(at)
        for family in families.values():
            for some in (family[at : at + TOGETHER] for at in range(0, len(family), TOGETHER)):
                low = lowered[some[0]]
                transition = paths[np.array([rows_of[id(lowered[at].segments)] for at in some])]
                kinds = np.array([[seconds[message] for message in lowered[at].messages] for at in some])
                clocks = track_clocks(low.track, low.segment, transition, kinds.take(low.message, axis=1), host)
                clocks = np.moveaxis(clocks, 0, 1)
                entry = enter_optimizers(low, clocks, begin_optimizers(low, clocks))
                finish = through(transition[:, low.optimizer], np.moveaxis(entry, 1, 0))
                times[some] = finish[:, :, :NUM_CLOCKS].max(axis=(1, 2))
    return times
