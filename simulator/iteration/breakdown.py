"""The breakdown of an iteration's time."""

from __future__ import annotations

import numpy as np

from stepsight.simulator.clock.codes import NUM_CLOCKS
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.clock.track_run import track_clocks
from stepsight.simulator.iteration.simulated_iteration import Passing, SimulatedIteration
from stepsight.simulator.programs.passages import STREAMS

CATEGORIES = (
    "compute",
    "tp_communication",
    "cp_communication",
    "ep_communication",
    "dp_communication",
    "pp_communication",
    "host",
    "bubble",
    "optimizer",
)


def break_down(simulation: SimulatedIteration) -> dict[str, float]:
    """Seconds by category, mean over stages of the slowest pipeline; see ``Simulation.breakdown``."""
    low, total, passing = simulation.lowered, simulation.iteration_time_s, simulation.slowest
    run, stages = passing.run, low.num_stages
    runs = np.bincount(passing.rows, minlength=len(passing.segments)) / stages
    used = np.flatnonzero(runs).tolist()
    times = [simulation.timer.segment(low.segments[passing.segments[row]], passing.condition(row)) for row in used]
    streams = dict(zip(STREAMS, runs[used] @ np.stack([time.by_stream for time in times]), strict=True))
    host = _host(passing) if simulation.carried else float(runs[used] @ np.array([time.host for time in times]))
    seconds = {"compute": streams["compute"], "host": host + streams["offload"]}
    seconds |= {f"{axis}_communication": streams[axis] for axis in ("tp", "cp", "ep")}
    inside = float((run.finish[:, 0] - run.start[:, 0]).sum()) / stages - sum(seconds.values())
    # The optimizer's ops; the remaining time between a stage's last backward and its end is traffic, or waiting for
    # others.
    ends = [
        simulation.timer.segment(low.segments[at], simulation.optimizer_condition(stage))
        for stage, at in enumerate(low.optimizer.tolist())
    ]
    seconds["optimizer"] = float(np.stack([end.by_stream for end in ends])[:, 0].mean())
    until = simulation.clocks[:, :NUM_CLOCKS].max(axis=1) - simulation.clocks[:, 0]
    after = simulation.finish[:, :NUM_CLOCKS].max(axis=1) - simulation.begin
    launched = float((after - _unlaunched(simulation)).mean()) if simulation.hardware.has_host else 0.0
    data = inside + float((until + after).mean()) - seconds["optimizer"] - launched
    seconds["host"] += launched
    seconds["dp_communication"] = max(data, 0.0)
    seconds["pp_communication"] = _messages(simulation) if low.track.num_messages else 0.0
    seconds["bubble"] = total - sum(seconds.values())
    if seconds["bubble"] < 0:  # messages that overlap
        seconds["pp_communication"] = max(0.0, seconds["pp_communication"] + seconds["bubble"])
        seconds["bubble"] = 0.0
        seconds["bubble"] = max(0.0, total - sum(seconds.values()))
    return {category: float(seconds[category]) for category in CATEGORIES}


def _host(passing: Passing) -> float:
    """Seconds for which a single stage waits for the host."""
    free = np.ascontiguousarray(passing.transition[:, :NUM_CLOCKS, :NUM_CLOCKS])
    clocks = track_clocks(passing.lowered.track, passing.rows, free, passing.message_seconds, *passing.host)
    return float(passing.clocks[0, 0] - clocks[0, 0])


def _unlaunched(simulation: SimulatedIteration) -> Floats:
    """Seconds of every stage's optimizer without host time, shape ``(num_stages,)``."""
    optimizers = simulation.optimizer_paths(carried=True)[:, :NUM_CLOCKS, :NUM_CLOCKS]
    paths = simulation.entry[:, None, :NUM_CLOCKS] + optimizers
    return np.asarray(paths.max(axis=(1, 2)) - simulation.begin)


def _messages(simulation: SimulatedIteration) -> float:
    passing = simulation.slowest
    free = np.zeros(len(passing.message_seconds))
    clocks = track_clocks(passing.lowered.track, passing.rows, passing.transition, free, *passing.host)
    return max(0.0, float(passing.clocks.max() - clocks.max()))
