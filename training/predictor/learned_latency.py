"""Learned durations as the simulator asks for them: each signature and each program is worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.errors import PredictorError
from stepsight.dataset.hardware import Fabric, Hardware
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.program import Program
from stepsight.training.calibration.constants import Constants
from stepsight.training.collectives.collective_models import CollectiveModel
from stepsight.training.kernels.kernel_models import KernelModel

if TYPE_CHECKING:
    from stepsight.gnn.inference import ContextWeights

Seconds = NDArray[np.float64]
MAX_PROGRAMS = 4096
BY_CLOCK = ("gemm", "batched_gemm", "grouped_gemm", "attention", "latent_attention")  # whose time the clock decides
T = TypeVar("T", Op, Collective)


@cache
def slowest_of(devices: int) -> float:
    """Standard deviations by which the slowest of some devices is expected to lie above their mean.

    Blom's approximation to the largest of as many normal deviates (Statistical Estimates, 1958).
    """
    return NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


class LearnedLatency:
    """A ``LatencyModel`` bound to one fabric, number of busy devices per node and of devices that move in step."""

    def __init__(
        self,
        hardware: Hardware,
        kernel: KernelModel,
        collective: CollectiveModel,
        context: ContextWeights | None,
        fabric: Fabric,
        busy: int,
        constants: Constants | None = None,
        devices: int = 1,
    ) -> None:
        self.hardware = hardware
        self.fabric = fabric
        self.busy = busy
        self._kernel = kernel
        self._collective = collective
        self._context = context
        self._constants = constants or Constants()
        self._slowest = 1.0 + hardware.compute_spread * slowest_of(devices)
        self.knows_context = context is not None
        self._ops: dict[Op, float] = {}
        self._collectives: dict[Collective, float] = {}
        self._programs: dict[int, tuple[Program, Seconds, Seconds]] = {}
        self._outside: dict[Op | Collective, str] = {}

    def op_seconds(self, ops: Sequence[Op]) -> Seconds:
        """Seconds of each op alone, shape ``(len(ops),)``."""
        missing = [op for op in dict.fromkeys(ops) if op not in self._ops]
        if missing:
            paces = [self._slowest if op.family in BY_CLOCK else 1.0 for op in missing]
            self._remember(self._ops, missing, self._kernel.seconds(missing, self.busy) * paces)
        return np.array([self._ops[op] for op in ops], dtype=np.float64)

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        """Seconds of each collective alone, shape ``(len(collectives),)``."""
        missing = [c for c in dict.fromkeys(collectives) if c not in self._collectives]
        if missing:
            self._remember(self._collectives, missing, self._collective.seconds(missing, self.fabric))
        return np.array([self._collectives[c] for c in collectives], dtype=np.float64)

    def _remember(self, known: dict[T, float], works: Sequence[T], seconds: Seconds) -> None:
        seconds = seconds * [self._constants.factor(work) for work in works]
        wrong = np.flatnonzero(~(np.isfinite(seconds) & (seconds >= 0)))
        if len(wrong):
            raise PredictorError(f"a predictor must give finite seconds, got {seconds[wrong[0]]} of {works[wrong[0]]}")
        known.update(zip(works, seconds.tolist(), strict=True))

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Seconds]) -> Sequence[Seconds]:
        """Seconds of every node within its program, from the seconds alone; same shapes."""
        if self._context is None:
            return seconds
        return [self._one(program, alone) for program, alone in zip(programs, seconds, strict=True)]

    def _one(self, program: Program, alone: Seconds) -> Seconds:
        known = self._programs.get(id(program))
        if known is not None and (known[1] is alone or np.array_equal(known[1], alone)):
            return known[2]
        assert self._context is not None
        inside: Seconds = alone * np.exp(self._context.log_correction(program, alone, self.hardware, self.busy))
        if len(self._programs) >= MAX_PROGRAMS:
            self._programs.clear()
        self._programs[id(program)] = (program, alone, inside)  # the program is kept, so that its id stays its own
        return inside

    def outside(self, works: Sequence[Op | Collective]) -> tuple[str, list[str]]:
        """What lies outside of what was measured.

        Returns:
            Why all of it does (more devices of a node compute at once than were measured), and why each work does;
            empty where it does not.
        """
        known = self._outside
        for work in works:
            if work in known:
                continue
            if isinstance(work, Op):
                known[work] = self._kernel.unsupported(work)
            else:
                known[work] = self._collective.unsupported(work, self.fabric)
        return self._kernel.crowded(self.busy), [known[work] for work in works]
