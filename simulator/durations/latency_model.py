"""Latency models, which the simulator asks for durations: hardware facts, and those that ``--latency`` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError, PredictorError, StepsightError
from stepsight.dataset.base.registry import Registry, check_takes
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware import hardware as presets
from stepsight.dataset.hardware.hardware_facts import ONE_LAUNCH, LaunchCalls
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op

Seconds = NDArray[np.float64]


class LatencyModel(Protocol):
    """Durations for the hardware of one job. Every call is batched.

    Attributes:
        hardware: What the durations are for.
        knows_context: Whether ``in_context`` changes anything.
    """

    hardware: presets.Hardware
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


def preset_latency(
    hardware_name: str, fabric: presets.Fabric, calls: LaunchCalls = ONE_LAUNCH
) -> RooflineLatency | None:
    """The roofline of a known hardware or of a hardware file, the same object each time; None if the name is unknown.
    ``calls``: of the host's software.
    """
    hardware = presets.find_hardware(hardware_name)
    return None if hardware is None else _roofline(hardware, fabric, calls)


class RooflineLatency:
    """Roofline and latency-bandwidth model from hardware facts: the fallback without measurements.

    ``calls``: of the host's software.
    """

    knows_context = False

    def __init__(self, hardware: presets.Hardware, fabric: presets.Fabric, calls: LaunchCalls = ONE_LAUNCH) -> None:
        self.hardware = hardware
        self.fabric = fabric
        self.calls = calls

    def op_seconds(self, ops: Sequence[Op]) -> Seconds:
        return np.array([presets.roofline_seconds(op, self.hardware) for op in ops], dtype=np.float64)

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        return np.array([presets.alpha_beta_seconds(c, self.fabric) for c in collectives], dtype=np.float64)

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Seconds]) -> Sequence[Seconds]:
        return seconds


_roofline = cached(64)(RooflineLatency)
LatencyMaker = Callable[[presets.Hardware, presets.Fabric], Any]
LATENCY = "latency:"  # how a name begins that stands in place of a predictor's


def _maker(name: str, thing: Any) -> LatencyMaker:
    return check_takes(f"latency {name}", thing, ("hardware", "fabric"), PredictorError)  # type: ignore[no-any-return]


LATENCIES: Registry[LatencyMaker] = Registry(
    "latency", group="stepsight.latencies", check=_maker, error=PredictorError, more="module:function"
)


class GivenLatency:
    """Durations from a user's object, completed by hardware facts.

    The object has ``op_seconds(ops)``, and if it can ``collective_seconds(collectives)`` and ``in_context``, as
    ``LatencyModel`` says.  Where it answers NaN, or has no such method, hardware facts answer.

    Args:
        given: The object.
        hardware, fabric: What it was made for.
        name: For messages.
    """

    def __init__(self, given: Any, hardware: presets.Hardware, fabric: presets.Fabric, name: str = "") -> None:
        if not callable(getattr(given, "op_seconds", None)):
            raise PredictorError(f"latency {name} must make an object with op_seconds(ops), got {given!r:.80}")
        self.hardware = hardware
        self.knows_context = bool(getattr(given, "knows_context", False))
        self.name = name
        self._given = given
        self._facts = RooflineLatency(hardware, fabric)

    @property
    def source(self) -> str:
        """Where the durations come from, for people."""
        return f"latency {self.name}, with facts of {self.hardware.name} for what it does not know"

    def op_seconds(self, ops: Sequence[Op]) -> Seconds:
        return self._complete("op_seconds", ops, self._facts.op_seconds)

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        return self._complete("collective_seconds", collectives, self._facts.collective_seconds)

    def in_context(self, programs: Sequence[Program], seconds: Sequence[Seconds]) -> Sequence[Seconds]:
        if not self.knows_context:
            return seconds
        return self._given.in_context(programs, seconds)  # type: ignore[no-any-return]

    def _complete(self, method: str, works: Sequence[Any], facts: Callable[[Sequence[Any]], Seconds]) -> Seconds:
        ask = getattr(self._given, method, None)
        if ask is None or not works:
            return facts(works)
        try:
            seconds = np.array(ask(list(works)), dtype=np.float64)
        except StepsightError:
            raise
        except Exception as error:
            raise PredictorError(f"{method} of latency {self.name} failed: {type(error).__name__}: {error}") from error
        known = ~np.isnan(seconds)
        if seconds.shape != (len(works),) or not (np.isfinite(seconds[known]) & (seconds[known] > 0)).all():
            rule = f"must give {len(works)} positive numbers, or NaN where it does not know"
            raise PredictorError(f"{method} of latency {self.name} {rule}, got {seconds!r:.80}")
        missing = np.flatnonzero(~known).tolist()
        if missing:
            seconds[missing] = facts([works[index] for index in missing])
        return seconds


def named_latency(name: str, hardware: presets.Hardware, fabric: presets.Fabric) -> GivenLatency:
    """Find a latency model by name, for a hardware and its links.

    Args:
        name: One that is registered or brought by an installed package, or ``module:function``; the function takes a
            ``Hardware`` and a ``Fabric``.
        hardware, fabric: Of the job.

    Raises:
        PredictorError: If there is none, or what it makes gives no durations.
    """
    if ":" in name and name not in LATENCIES:
        if EntryPoint.pattern.match(name) is None:
            raise PredictorError(f"--latency {name!r:.80} must be module:function, with names of Python")
        try:
            maker = _maker(name, EntryPoint(name, name, LATENCIES.group).load())
        except (ImportError, AttributeError, ValueError, SyntaxError) as error:
            sought = "in the current folder or in an installed package"
            why = f"no module {error.name!r} {sought}" if isinstance(error, ModuleNotFoundError) else error
            rule = "must be module:function that can be imported"
            raise PredictorError(f"--latency {name!r:.80} {rule}: {why}") from None
    else:
        maker = LATENCIES[name]
    return _made(maker, hardware, fabric, name)


@cached(maxsize=64)
def _made(maker: LatencyMaker, hardware: presets.Hardware, fabric: presets.Fabric, name: str) -> GivenLatency:
    """One object for each device and fabric, so that what is timed once is remembered."""
    try:
        given = maker(hardware, fabric)
    except StepsightError:
        raise
    except Exception as error:  # the user's code
        raise PredictorError(f"latency {name} could not be made: {type(error).__name__}: {error}") from error
    return GivenLatency(given, hardware, fabric, name)


def latency_name(predictor: object) -> str:
    """The name in ``latency:NAME``, in place of a predictor; empty: it is something else."""
    return predictor.removeprefix(LATENCY) if isinstance(predictor, str) and predictor.startswith(LATENCY) else ""


def latency_of_job(job: Job, name: str) -> GivenLatency:
    """Find a latency model by name for a job; hardware facts supply the durations that it does not know.

    Raises:
        JobError: If the hardware is unknown.
        PredictorError: If there is no such latency, or it fails.
    """
    hardware = presets.find_hardware(job.cluster.hardware)
    if hardware is None:
        raise JobError(f"with --latency, cluster.{presets.unknown_hardware(job.cluster.hardware)}")
    return named_latency(name, hardware, job.fabric)
