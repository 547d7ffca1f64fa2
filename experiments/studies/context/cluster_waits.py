"""Seconds that collectives took within the passes of a box, from what its ranks noted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.files import read_json
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.runs.run_manifest import RunManifest
from stepsight.experiments.studies.small_to_large.box_results import Passes, measured_passes, predicted_passes
from stepsight.simulator.durations.segment_timing import Timer
from stepsight.simulator.iteration.distinct_pipelines import distinct_pipelines
from stepsight.simulator.iteration.simulate import Simulation, simulate_lowered
from stepsight.training.context.through_simulator import Iteration

Array = NDArray[np.float64]
LEAST = 0.01  # share of a pass; collectives that take less are not told from the noise of the rest
ON_PATH_S = 1e-9
LOW = 0.2  # least factor between measured and predicted seconds


def waited_seconds(manifest: RunManifest, iteration: Iteration, spent: Array) -> Array:
    """Seconds of nodes that ranks noted, ``(nodes,)``; NaN where they are unknown.

    Ranks of a box sleep for exactly as long as their ops take.  So what a pass takes longer than predicted is time of
    its collectives, in proportion to their predicted seconds.  Passes in which gradients are summed are left out.

    Args:
        manifest: Of a run with ``records.json``.
        iteration: Its job.
        spent: Seconds of each node on the critical path, ``(nodes,)``.
    """
    found = np.full(len(spent), np.nan)
    path = manifest.folder / "records.json"
    if not path.exists():
        return found
    pipelines = distinct_pipelines(manifest.job, iteration.latency)
    simulation = simulate_lowered(
        manifest.job, iteration.lowered, Timer(iteration.latency), iteration.latency.hardware, pipelines
    )
    real, said = measured_passes(read_json(path)["steps"]), predicted_passes(simulation)
    if not np.array_equal(real.rank, said.rank) or not np.array_equal(real.micro_batch, said.micro_batch):
        return found
    works = [node.work for program in iteration.lowered.programs for node in program.nodes]
    meets = np.array([isinstance(work, Collective) for work in works])
    segment = _segments(simulation, said)
    bounds = iteration.bounds
    for each in np.unique(segment[segment >= 0]).tolist():
        own = segment == each
        measured, predicted = (float((passes.end - passes.start)[own].mean()) for passes in (real, said))
        part = slice(bounds[each], bounds[each + 1])
        within = float(iteration.alone[part][meets[part] & (spent[part] > ON_PATH_S)].sum())
        if within > LEAST * predicted:
            factor = max(1 + (measured - predicted) / within, LOW)
            found[part] = np.where(meets[part], spent[part] * factor, np.nan)
    found[spent <= ON_PATH_S] = np.nan
    return found


def _segments(simulation: Simulation, passes: Passes) -> NDArray[np.int64]:
    """The segment that each pass runs, -1 where gradients are summed beside it, ``(passes,)``."""
    track, parallel = simulation.lowered.track, simulation.job.parallel
    keys = zip(track.part.tolist(), track.kind.tolist(), track.micro_batch.tolist(), strict=True)
    of_action = dict(zip(keys, simulation.lowered.segment.tolist(), strict=True))
    asked = zip(passes.part.tolist(), passes.kind.tolist(), passes.micro_batch.tolist(), strict=True)
    found = np.array([of_action[key] for key in asked], dtype=np.int64)
    if parallel.dp > 1 and (parallel.pp == 1 or parallel.zero_stage):
        found[passes.micro_batch == passes.micro_batch.max()] = -1
    return found
