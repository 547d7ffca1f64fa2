"""Learned durations for the simulator; each signature and each program is computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import Memo, cached
from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Fabric, Hardware
from stepsight.dataset.hardware.hardware_facts import power_type
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.training.collectives.collective_models import CollectiveModel
from stepsight.training.corrections.calibration import Constants
from stepsight.training.kernels.host_calls import HostCalls
from stepsight.training.kernels.kernel_models import KernelModel

if TYPE_CHECKING:
    from stepsight.gnn.context_table import Context
    from stepsight.simulator.iteration.simulate import Simulation

Seconds = NDArray[np.float64]
MAX_PROGRAMS, MAX_WORKS = 4096, 100_000  # entries of a latency model's cache
FASTER, SLOWER, SLOWEST_S = 10.0, 1e6, 100.0  # factors relative to peaks and bandwidths; a latency
THROTTLED_S = (0.8e-3, 1.6e-3)  # a product in a table is as fast as at the highest clock below, slowed in full above
T = TypeVar("T", Op, Collective)


@cached(4096)
def slowest_of(devices: int) -> float:
    """Expected maximum of the slowdowns of some devices, in standard deviations above their mean.

    Blom's approximation to the largest of as many normal deviates (Statistical Estimates, 1958).
    """
    return NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def throttled(seconds: Seconds) -> Seconds:
    """The part of the power limit's slowdown that products in 16 bits show in tables of kernels already, 0 to 1.

    A benchmark repeats a kernel, so that with a long one the clock falls.  In the tables of H100, H200 and B200
    (SGLang 0.5.14) the best tenth of products reaches 797, 790 and 1631 TFLOP/s if they take 0.4 to 0.8 ms, and 721,
    706 and 1490 if they take 1.6 to 3.2 ms.  Products in fp8 (TensorRT-LLM) show no such fall, and A100 has none.
    """
    start, end = THROTTLED_S
    return np.clip(np.log(np.maximum(seconds, start) / start) / math.log(end / start), 0.0, 1.0)


class LearnedLatency:
    """A ``LatencyModel`` for one fabric, number of busy devices per node and of devices in lockstep, and dtype of most
    products; ``software``: whose kernels run the ops; ``dispatch_calls``: as in ``ExecutionSpec``.
    """

    def __init__(
        self,
        hardware: Hardware,
        kernel: KernelModel,
        collective: CollectiveModel,
        context: Context | None,
        *,
        fabric: Fabric,
        busy: int,
        constants: Constants | None = None,
        devices: int = 1,
        dtype: str = "bf16",
        host: HostCalls | None = None,
        software: str = "",
        dispatch_calls: float = 0.0,
    ) -> None:
        self.hardware = hardware
        self.fabric = fabric
        self.dispatch_calls = dispatch_calls
        self.busy = busy
        self._kernel = kernel
        self._collective = collective
        self._software = software
        self._context = context
        self._constants = constants or Constants()
        self._pace = hardware.power_slowdown(dtype) * (1.0 + hardware.compute_spread * slowest_of(devices))
        self._paid = kernel.hardware.power_slowdown("bf16")
        self.knows_context = context is not None
        self.host_times = host
        self._ops: Memo[Op, float] = Memo("predictor: ops", MAX_WORKS)
        self._collectives: Memo[Collective, float] = Memo("predictor: collectives", MAX_WORKS)
        self._programs: Memo[int, tuple[Program, Seconds, Seconds]] = Memo("predictor: programs", MAX_PROGRAMS)
        self._outside: Memo[Op | Collective, str] = Memo("predictor: support", MAX_WORKS)

    def op_seconds(self, ops: Sequence[Op]) -> Seconds:
        """Seconds of each op alone, shape ``(len(ops),)``."""
        return self._known(self._ops, ops, self._ask_kernel)

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        """Seconds of each collective alone, shape ``(len(collectives),)``."""
        return self._known(self._collectives, collectives, lambda some: self._collective.seconds(some, self.fabric))

    def _ask_kernel(self, ops: Sequence[Op]) -> Seconds:
        """Seconds of each op by the kernel model, at the clock that the power limit sustains, on the slowest device."""
        products = np.array([op.record.bound == "compute" for op in ops], dtype=np.bool_)
        wide = np.array([power_type(op.dtype) == "bf16" for op in ops], dtype=np.bool_)
        named = [self._software] * len(ops) if self._software else ()
        seconds = self._kernel.seconds(ops, self.busy, named)
        paid = np.where(wide, self._paid ** throttled(seconds), 1.0)
        return np.asarray(seconds * np.where(products, self._pace / paid, 1.0))

    def _known(self, memo: Memo[T, float], works: Sequence[T], ask: Callable[[Sequence[T]], Seconds]) -> Seconds:
        """Seconds of each work; those missing in the cache are requested once and corrected by the constants."""
        found = {work: memo.get(work) for work in works}
        missing = [work for work, seconds in found.items() if seconds is None]
        if missing:
            asked = ask(missing)
            if not self._constants.plain:
                asked = asked * [math.exp(log) for log in self._constants.log_factor(missing).tolist()]
            self._check(missing, asked)
            pairs = list(zip(missing, asked.tolist(), strict=True))
            memo.update(pairs)
            found.update(pairs)
        return np.array([found[work] for work in works], dtype=np.float64)

    def _check(self, works: Sequence[T], seconds: Seconds) -> None:
        limits = np.array([self._limits(work) for work in works]).reshape(-1, 2)
        wrong = np.flatnonzero(~((limits[:, 0] <= seconds) & (seconds <= limits[:, 1])))
        if len(wrong):
            first = wrong[0]
            raise PredictorError(
                f"a predictor must give times that its hardware allows, from {limits[first, 0]:g} to "
                f"{limits[first, 1]:g} s, got {seconds[first]:g} of {works[first]!s:.120}"
            )

    def _limits(self, work: Op | Collective) -> tuple[float, float]:
        """Limits of the seconds of a work, far beyond the result of any fit."""
        if isinstance(work, Collective):
            slowest = min(self.fabric.inter_node.bandwidth_bytes_per_s, self.fabric.intra_node.bandwidth_bytes_per_s)
            return 0.0, SLOWEST_S + SLOWER * work.num_bytes * work.group_size / slowest
        computed = work.flops / self.hardware.peak_flops.get(work.dtype, max(self.hardware.peak_flops.values()))
        moved = work.num_bytes / min(
            self.hardware.memory_bandwidth_bytes_per_s,
            self.hardware.host_link_bytes_per_s,
            self.hardware.host_memory_bandwidth_bytes_per_s,
        )
        return computed / FASTER, SLOWEST_S + SLOWER * (computed + moved)

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
        self._programs[id(program)] = (program, alone, inside)  # a reference to the program keeps its id unique
        return inside

    def outside(self, works: Sequence[Op | Collective]) -> tuple[str, list[str]]:
        """Work outside the measured range.

        Returns:
            Why all of it does (more devices of a node compute at once than were measured), and why each work does;
            empty where it does not.
        """
        return self._kernel.crowded(self.busy), [self._reason(work) for work in works]

    def _reason(self, work: Op | Collective) -> str:
        """Why a work lies outside the measured range; empty if it lies within."""
        known = self._outside.get(work)
        if known is None:
            if isinstance(work, Op):
                known = self._kernel.unsupported(work)
            else:
                known = self._collective.unsupported(work, self.fabric)
            self._outside[work] = known
        return known


def outside(simulation: Simulation, latency: LearnedLatency) -> tuple[tuple[str, ...], float]:
    """Work of an iteration outside the measured range: reasons, the longest work first, and its share of the critical
    path.
    """
    crowded, reasons = latency.outside(simulation.lowered.all_works)
    beyond = [index for index, reason in enumerate(reasons) if reason]
    if not beyond and not crowded:
        return (), 0.0
    seconds = simulation.count_works() * simulation.work_seconds
    beyond.sort(key=lambda index: -seconds[index])
    named = tuple(reasons[index] for index in beyond)
    if crowded:
        return (crowded, *named), 1.0
    return named, min(1.0, float(seconds[beyond].sum()) / max(simulation.iteration_time_s, 1e-12))
