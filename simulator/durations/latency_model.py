"""The latency model that the simulator asks for durations; and the roofline from hardware facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Fabric, Hardware, find_hardware
from stepsight.dataset.hardware.physics import alpha_beta_seconds, roofline_seconds
from stepsight.dataset.kinds.op import Collective, Op

Seconds = NDArray[np.float64]


class LatencyModel(Protocol):
    """Durations for the hardware of one job. Every call is batched.

    Attributes:
        hardware: What the durations are for.
        knows_context: Whether ``in_context`` changes anything.
    """

    hardware: Hardware
    knows_context: bool

    def op_seconds(self, ops: Sequence[Op]) -> Seconds:
        """Seconds of each op on its own, shape ``(len(ops),)``, all > 0."""
        ...

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        """Seconds of each collective on its own, shape ``(len(collectives),)``, all > 0."""
        ...

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Seconds]) -> Sequence[Seconds]:
        """Seconds of every node of each program within it, from the seconds alone; same shapes."""
        ...


class HostTimes(Protocol):
    """Durations of framework calls that run on a host, one after the other.

    Attributes:
        gaps_s: Between calls, by phase.
        step_s: Of every step besides.
    """

    gaps_s: tuple[float, ...]
    step_s: float

    def seconds(self, calls: Sequence[str], ops: Sequence[Op], phases: Sequence[int]) -> Seconds:
        """Seconds of each call within a step, shape ``(len(calls),)``."""
        ...


def host_times(latency: LatencyModel) -> HostTimes | None:
    """Seconds of calls on a host, by a latency model; None if the model has none."""
    return getattr(latency, "host_times", None)


def dispatch_calls(latency: LatencyModel) -> float:
    """``ExecutionSpec.dispatch_calls`` of the job that a latency model was made for; 0 if the model has none."""
    return float(getattr(latency, "dispatch_calls", 0.0))


def preset_latency(hardware_name: str, fabric: Fabric, dispatch_calls: float = 0.0) -> RooflineLatency | None:
    """The roofline of a known hardware or of a hardware file, the same object each time; None if the name is
    unknown.

    Args:
        hardware_name: As in ``ClusterSpec``.
        fabric: The links.
        dispatch_calls: As in ``ExecutionSpec``.
    """
    hardware = find_hardware(hardware_name)
    return None if hardware is None else _roofline(hardware, fabric, dispatch_calls)


@cached(64)
def _roofline(hardware: Hardware, fabric: Fabric, dispatch_calls: float) -> RooflineLatency:
    return RooflineLatency(hardware, fabric, dispatch_calls)


class RooflineLatency:
    """Roofline and latency-bandwidth model from hardware facts: the fallback without measurements.

    ``dispatch_calls``: as in ``ExecutionSpec``.
    """

    knows_context = False

    def __init__(self, hardware: Hardware, fabric: Fabric, dispatch_calls: float = 0.0) -> None:
        self.hardware = hardware
        self.fabric = fabric
        self.dispatch_calls = dispatch_calls

    def op_seconds(self, ops: Sequence[Op]) -> Seconds:
        return np.array([roofline_seconds(op, self.hardware) for op in ops], dtype=np.float64)

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        return np.array([alpha_beta_seconds(c, self.fabric) for c in collectives], dtype=np.float64)

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Seconds]) -> Sequence[Seconds]:
        return seconds
