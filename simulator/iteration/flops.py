"""Work of an iteration in FLOP: needed by the model, and executed by the devices.

Only matrix products and attention count, a multiply-add as two.  Causal attention counts the half that is computed.
"""

from __future__ import annotations

import numpy as np

from stepsight.dataset.kinds.op import Op
from stepsight.simulator.clock.codes import RUN
from stepsight.simulator.programs.lower import Lowered
from stepsight.simulator.programs.passages import Passage
from stepsight.simulator.programs.segment import Segment
from stepsight.simulator.schedules import FORWARD

BACKWARD_OVER_FORWARD = 2.0  # gradients of the input and of the weights


def passage_flops(passage: Passage, first: int, last: int) -> float:
    """FLOP of some nodes of a passage."""
    works = [node.work for node in passage.program.nodes[first:last]]
    return sum(work.flops for work in works if isinstance(work, Op) and work.record.bound == "compute")


def segment_flops(segment: Segment) -> float:
    """FLOP of one run of a segment on one rank."""
    rows = segment.events[segment.events[:, 0] == RUN, 1:5].tolist()
    return float(sum(times * passage_flops(segment.passages[what], a, b) for what, a, b, times in rows))


def iteration_flops(lowered: Lowered) -> tuple[float, float]:
    """FLOP of an iteration, needed by the model and executed (with recomputation): of one rank of each stage, summed
    over stages.
    """
    flops = np.array([segment_flops(segment) for segment in lowered.segments])
    done = float(flops[lowered.segment].sum())
    forward = float(flops[lowered.segment[lowered.track.kind == FORWARD]].sum())
    # If the gradient of an input is not needed (the patches of an image), the model needs less.
    return min((1.0 + BACKWARD_OVER_FORWARD) * forward, done), done
