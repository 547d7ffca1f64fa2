"""Measured and predicted ranks in one file for Perfetto, one below the other."""

from __future__ import annotations

from typing import Any

from stepsight.experiments.studies.small_to_large.box_results import Compared, Passes, measured_passes, predicted_passes
from stepsight.simulator.schedules import KIND_NAMES

_KINDS = {"F": "forward", "B": "backward", "I": "backward (input)", "W": "backward (weight)"}


def side_by_side(compared: Compared) -> dict[str, Any]:
    """Chrome trace events: a process for each rank, with a measured and a predicted thread, aligned at the begin."""
    simulation = compared.prediction.simulation
    events: list[dict[str, Any]] = []
    for thread, (name, passes) in enumerate(
        (("measured", measured_passes(compared.measured.steps)), ("predicted", predicted_passes(simulation)))
    ):
        events += _events(passes, thread, name)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(passes: Passes, thread: int, name: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for rank, (begin, end) in enumerate(passes.optimizer.tolist()):
        events.append(_meta("process_name", rank, 0, f"rank {rank}"))
        events.append(_meta("thread_name", rank, thread, name))
        events.append(_event("gradients and optimizer", rank, thread, begin, end))
    columns = (passes.rank, passes.kind, passes.part, passes.micro_batch, passes.start, passes.end)
    for rank, kind, part, micro_batch, begin, end in zip(*(column.tolist() for column in columns), strict=True):
        label = f"{_KINDS[KIND_NAMES[kind]]} {micro_batch}, part {part}"
        events.append(_event(label, rank, thread, begin, end))
    return events


def _event(name: str, rank: int, thread: int, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": rank, "tid": thread, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}


def _meta(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}
