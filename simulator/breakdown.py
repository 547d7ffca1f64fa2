"""Where the time of an iteration goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from stepsight.simulator.simulate import Simulation

CATEGORIES = ("compute", "tp_communication", "dp_communication", "pp_communication", "bubble", "optimizer")


def break_down(simulation: Simulation) -> dict[str, float]:
    """Seconds by category, mean over stages; see ``Simulation.breakdown``."""
    from stepsight.simulator.simulate import time_schedule

    low, total = simulation.lowered, simulation.iteration_time_s
    graph, seconds = low.graph, simulation.segments.seconds
    booked = np.stack([np.where(graph.kind == kind, seconds, 0.0) for kind in range(2)])
    compute, tensor = np.add.reduceat(booked, graph.bounds[:-1], axis=1)  # of each program
    stages = low.num_stages
    begin, end = simulation.start[:, 0], simulation.finish[:, 0]
    optimizer = compute[low.segment[-stages:]].mean()
    runs = np.bincount(low.segment[:-stages], minlength=len(low.programs)) / stages
    work, blocked = float(runs @ compute), float(runs @ tensor)
    inside = float((end - begin)[:-stages].sum()) / stages - work - blocked
    before_optimizer = float((begin[-stages:] - end[low.previous[-stages:]]).mean())
    after_optimizer = float((simulation.finish[-stages:].max(axis=1) - begin[-stages:]).mean()) - optimizer
    data = inside + before_optimizer + after_optimizer
    messages = 0.0
    if stages > 1:
        free = np.zeros(len(low.messages))
        _, finish, _ = time_schedule(low, simulation.segments.transition, free)
        messages = total - float(finish[-stages:].max())
    bubble = total - work - blocked - data - optimizer - messages
    seconds_of = (work, blocked, data, messages, bubble, float(optimizer))
    return dict(zip(CATEGORIES, map(float, seconds_of), strict=True))
