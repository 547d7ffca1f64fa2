"""Seconds of an iteration by cause: of transformers by streams, of recommendation models by lookups and exchanges.

And its FLOP: only matrix products and attention count, a multiply-add as two.  Causal attention counts the half that is
computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from stepsight.dataset.job.sharding import RankTables
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.dlrm import INDICES, SUMS, lookup_ops
from stepsight.simulator.clock.engine import NUM_CLOCKS, RUN, Floats
from stepsight.simulator.clock.track import through, track_clocks
from stepsight.simulator.programs.block_pass import STREAMS
from stepsight.simulator.programs.lower import Lowered
from stepsight.simulator.programs.segment import Segment
from stepsight.simulator.programs.sizes import rank_shape
from stepsight.simulator.schedules import FORWARD

if TYPE_CHECKING:
    from stepsight.simulator.iteration.simulate import PipelineRun, Simulation

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


def break_down(simulation: Simulation) -> dict[str, float]:
    """Seconds by category, mean over stages of the slowest pipeline; see ``Simulation.breakdown``."""
    low, total, pipeline_run = simulation.lowered, simulation.iteration_time_s, simulation.slowest
    run, stages = pipeline_run.run, low.num_stages
    runs = np.bincount(pipeline_run.rows, minlength=len(pipeline_run.segments)) / stages
    used = np.flatnonzero(runs).tolist()
    time = simulation.timer.segment
    times = [time(low.segments[pipeline_run.segments[row]], pipeline_run.condition(row)) for row in used]
    streams = dict(zip(STREAMS, runs[used] @ np.stack([each.by_stream for each in times]), strict=True))
    if simulation.carried:
        free = np.ascontiguousarray(pipeline_run.transition[:, :NUM_CLOCKS, :NUM_CLOCKS])
        host = float(pipeline_run.clocks[0, 0] - _ends(pipeline_run, free, pipeline_run.message_seconds)[0, 0])
    else:
        host = float(runs[used] @ np.array([each.host for each in times]))
    seconds = {"compute": streams["compute"], "host": host + streams["offload"]}
    seconds |= {f"{axis}_communication": streams[axis] for axis in ("tp", "cp", "ep")}
    inside = float((run.log.finish[:, 0] - run.log.start[:, 0]).sum()) / stages - sum(seconds.values())
    # The optimizer's ops; the remaining time between a stage's last backward and its end is traffic, or waiting for
    # others.
    optimizers = enumerate(low.optimizer.tolist())
    ends = [time(low.segments[at], simulation.optimizer_condition(stage)) for stage, at in optimizers]
    seconds["optimizer"] = float(np.stack([end.by_stream for end in ends])[:, 0].mean())
    until = simulation.clocks[:, :NUM_CLOCKS].max(axis=1) - simulation.clocks[:, 0]
    after = simulation.finish[:, :NUM_CLOCKS].max(axis=1) - simulation.begin
    launched = 0.0
    if simulation.hardware.has_host:
        paths = simulation.optimizer_paths(carried=True)[:, :NUM_CLOCKS, :NUM_CLOCKS]
        ended = through(paths, simulation.entry[:, :NUM_CLOCKS]).max(axis=1)
        launched = float((after - (ended - simulation.begin)).mean())
    data = inside + float((until + after).mean()) - seconds["optimizer"] - launched
    seconds["host"] += launched
    seconds["dp_communication"] = max(data, 0.0)
    seconds["pp_communication"] = 0.0
    if low.track.num_messages:
        alone = _ends(pipeline_run, pipeline_run.transition, np.zeros(len(pipeline_run.message_seconds)))
        seconds["pp_communication"] = max(0.0, float(pipeline_run.clocks.max() - alone.max()))
    seconds["bubble"] = total - sum(seconds.values())
    if seconds["bubble"] < 0:  # messages that overlap
        seconds["pp_communication"] = max(0.0, seconds["pp_communication"] + seconds.pop("bubble"))
        seconds["bubble"] = max(0.0, total - sum(seconds.values()))
    found = {category: float(seconds[category]) for category in CATEGORIES}
    tables = rank_shape(simulation.job).tables if simulation.job.model.tables else None
    return found if tables is None else _of_tables(simulation, found, tables)


# Lines of the breakdown of a recommendation model, in place of those of its streams.
_LINES = {INDICES: "index_exchange", SUMS: "all_to_all"}


def _of_tables(simulation: Simulation, seconds: dict[str, float], tables: RankTables) -> dict[str, float]:
    """The breakdown of a recommendation model: lookups of the mean rank, what the slowest one takes beyond, the dense
    part, and the two exchanges as far as the computation waits for them.
    """
    lookups = float(simulation.timer.work_seconds(lookup_ops(tables)).sum()) * simulation.lowered.num_micro_batches
    found = {"lookups": lookups * tables.mean_share, "imbalance": lookups * (1.0 - tables.mean_share)}
    found["dense"] = max(seconds.pop("compute") - lookups, 0.0)
    found |= {line: seconds.pop(f"{stream}_communication") for stream, line in _LINES.items()}
    return found | {key: value for key, value in seconds.items() if key not in ("tp_communication", "pp_communication")}


def _ends(pipeline_run: PipelineRun, transition: Floats, messages: Floats) -> Floats:
    """Clocks of a pipeline's stages at the end with other paths through segments, or other messages."""
    return track_clocks(pipeline_run.lowered.track, pipeline_run.rows, transition, messages, pipeline_run.host)


def exchange_facts(breakdown: Mapping[str, float]) -> dict[str, float]:
    """Of a recommendation model's breakdown: seconds that a rank waits for communication, and the slowest rank's
    lookups over those of the mean; empty for other models.
    """
    if "lookups" not in breakdown:
        return {}
    waits = sum(breakdown[name] for name in ("index_exchange", "all_to_all", "dp_communication"))
    lookups = breakdown["lookups"]
    return {"exposed_communication": waits, "imbalance": (lookups + breakdown["imbalance"]) / max(lookups, 1e-12)}


BACKWARD_OVER_FORWARD = 2.0  # gradients of the input and of the weights


def segment_flops(segment: Segment) -> float:
    """FLOP of one run of a segment on one rank."""
    total = 0.0
    for what, first, last, times in segment.events[segment.events[:, 0] == RUN, 1:5].tolist():
        works = [node.work for node in segment.passages[what].program.nodes[first:last]]
        total += times * sum(work.flops for work in works if isinstance(work, Op) and work.record.bound == "compute")
    return total


def iteration_flops(lowered: Lowered) -> tuple[float, float]:
    """FLOP of an iteration, needed by the model and executed (with recomputation): of one rank of each stage, summed
    over stages.
    """
    flops = np.array([segment_flops(segment) for segment in lowered.segments])
    done = float(flops[lowered.segment].sum())
    forward = float(flops[lowered.segment[lowered.track.kind == FORWARD]].sum())
    # If the gradient of an input is not needed (the patches of an image), the model needs less.
    return min((1.0 + BACKWARD_OVER_FORWARD) * forward, done), done
