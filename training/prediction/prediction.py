"""``predict``: from a job to an iteration time, an interval, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.hardware.hardware import Hardware, find_hardware, unknown_hardware
from stepsight.dataset.job.job import Job, JobLike
from stepsight.simulator.durations import latency_model
from stepsight.simulator.iteration.simulate import Simulation, exchange_facts, simulate
from stepsight.simulator.iteration.simulate_many import Sensitivity, explain
from stepsight.simulator.iteration.timeline import timeline, timeline_json
from stepsight.simulator.memory import Memory, estimate_memory
from stepsight.simulator.programs.lower import iteration_flops, looked_up_bytes, lower
from stepsight.training.corrections.calibration import Calibration, JobCorrection
from stepsight.training.corrections.intervals import EXTRAPOLATED_SHARE, interval_text, seconds_text
from stepsight.training.corrections.residual import JobFeatures, NearRuns
from stepsight.training.prediction.work_doubts import WorkDoubts, interval_ends, work_doubts
from stepsight.training.predictor.predictor import LearnedLatency, Predictor
from stepsight.training.predictor.software_used import SoftwareChange, SoftwareUsed, software_used, with_change
from stepsight.training.shipped.catalogue import shipped_predictor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


ROOFLINE = "roofline"  # instead of a predictor: hardware facts, even if the package has a predictor
PHYSICS = "physics"  # the shipped predictor without what published runs say of jobs near them
ROOFLINE_SOURCE = "roofline from hardware facts alone: {}"
MAX_NAME = 28  # characters shown of a model's or a hardware's name
LEAST_SHOWN = 1e-3  # causes with a smaller share of the iteration are not drawn
POSSIBLE_MFU = 1.5  # differences in clocks and precision explain no more


@dataclass(frozen=True, repr=False)
class Prediction:
    """The predicted time and memory of one training iteration of a job.

    ``to_dict`` gives plain values, ``to_frame`` a table of one row, ``plot`` shows where the time goes, ``explain``
    names the ops and collectives that decide the time, and ``timeline`` gives a trace for Perfetto.
    """

    job: Job  # that was asked about
    iteration_time_s: float  # predicted seconds of one iteration
    source: str  # where the durations come from, for people
    simulated: Simulation | None = None  # the iteration, if it is at hand
    predictor: Predictor | None = None  # that answered; None: hardware facts
    software: str = ""  # the framework that is said to run the job
    # computes ``unsupported_share``, where jobs were predicted together
    share: Callable[[], float] | None = field(default=None, compare=False)
    # durations from elsewhere, which answered
    given: latency_model.GivenLatency | None = field(default=None, compare=False)
    change: SoftwareChange | None = None  # drift since the software that the job states, if another one was asked about

    def __repr__(self) -> str:
        job, memory = self.job, self.memory
        facts = [
            seconds_text(self.iteration_time_s),
            interval_text(self.low_s, self.high_s) + (" extrapolated" if self.extrapolated else ""),
            f"{memory.peak_bytes / 1e9:.1f} GB" + ("" if memory.fits else " does not fit"),
            f"{_cut(job.model_name)} on {job.cluster.num_devices} x {_cut(job.hardware_name)}",
        ]
        return f"Prediction({', '.join(facts)})"

    def _repr_html_(self) -> str:
        whole, memory = self.iteration_time_s, self.memory
        rows = "".join(
            f"<tr><td style='text-align:left'>{name.replace('_', ' ')}</td><td>{seconds_text(seconds)}</td>"
            "<td style='text-align:left'>"
            f"<div style='background:#3b6fb5;height:.8em;width:{200 * seconds / whole:.0f}px'></div></td></tr>"
            for name, seconds in self.breakdown.items()
            if seconds > LEAST_SHOWN * whole
        )
        fits = "" if memory.fits else " (does not fit)"
        return (
            f"<b>{escape(_cut(self.job.name, 120))}</b><br>"
            f"{seconds_text(whole)} per iteration, 90 % interval {interval_text(self.low_s, self.high_s)}; "
            f"{memory.peak_bytes / 1e9:.1f} of {memory.capacity_bytes / 1e9:.1f} GB{fits}; "
            f"{self.tokens_per_s:,.0f} {self.job.unit}/s, MFU {100 * self.mfu:.1f} %<br>"
            f"<small>{escape(self.source)}; {self.unsupported_share:.0%} of the time outside the measured range</small>"
            f"<table>{rows}</table>"
        )

    @property
    def latency(self) -> LearnedLatency | latency_model.RooflineLatency | latency_model.GivenLatency:
        """The durations that the prediction is computed from."""
        if self.given is not None:
            return self.given
        return latency_of_facts(self.job) if self.predictor is None else self.predictor.latency(self.job)

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated iteration, before calibration of whole iterations; simulated on first use."""
        return self.simulated if self.simulated is not None else simulate(self.job, self.latency)

    @property
    def low_s(self) -> float:
        """Low end of the prediction interval (coverage 90 %), in seconds."""
        return self.interval()[0]

    @property
    def high_s(self) -> float:
        """High end of the prediction interval (coverage 90 %), in seconds."""
        return self.interval()[1]

    def interval(self, without: str = "", *, judged: bool = False) -> tuple[float, float]:
        """Low and high end of the prediction interval, in seconds.

        Its width comes from the runs held back in training; without a predictor it is a factor of three.  A predictor
        from public tables counts its errors on published runs of other sources than ``without``.  A calibrated one
        gives jobs like the calibrated runs a narrower interval, at least the 90th percentile of the errors on runs that
        fit and judged it (``judged``: the job is one of the latter, whose errors do not count).  If virtual stages are
        open and the framework usually interleaves (182 of 198 published runs), the interval holds the times of both.
        """
        if not isinstance(without, str):
            raise StepsightError(f"without must be the name of a source, got {without!r:.80}: the coverage is 90 %")
        told = self.predictor, self.job, self._correction, self.unsupported_share, self._utilisation[2], self.latency
        down, up = interval_ends(*told, without=without, judged=judged)
        down, up = (math.hypot(end, self.change.doubt_log if self.change else 0.0) for end in (down, up))
        low, high = self.iteration_time_s * math.exp(-down), self.iteration_time_s * math.exp(up)
        if self.uninterleaved is None:
            return low, high
        other = self.uninterleaved.iteration_time_s
        return min(low, other), max(high, other)

    @property
    def unsupported(self) -> tuple[str, ...]:
        """Ops, message sizes and groups outside the measured range, each with its reason, the longest first."""
        return self._outside[0]

    @property
    def unsupported_share(self) -> float:
        """Share of the critical path, 0 to 1, outside the measured range; 0 without a predictor."""
        return self._outside[1] if self.share is None else self.share()

    @property
    def extrapolated(self) -> bool:
        """Whether more than ``EXTRAPOLATED_SHARE`` of the critical path is outside the measured range."""
        return self.unsupported_share > EXTRAPOLATED_SHARE

    @cached_property
    def _outside(self) -> tuple[tuple[str, ...], float]:
        """Work outside the measured range: reasons, the longest work first, and its share of the critical path."""
        if self.predictor is None:
            return (), 0.0
        simulation = self.simulation
        crowded, reasons = self.predictor.latency(self.job).outside(simulation.lowered.all_works)
        beyond = [index for index, reason in enumerate(reasons) if reason]
        if not beyond and not crowded:
            return (), 0.0
        seconds = simulation.work_counts * simulation.work_seconds
        beyond.sort(key=lambda index: -seconds[index])
        named = tuple(reasons[index] for index in beyond)
        if crowded:
            return (crowded, *named), 1.0
        return named, min(1.0, float(seconds[beyond].sum()) / max(simulation.iteration_time_s, 1e-12))

    @cached_property
    def software_used(self) -> SoftwareUsed:
        """The framework's profile, whose kernels answer, and stated versions that change nothing."""
        return software_used(self.job, self.predictor, self.simulation.lowered.all_works if self.predictor else ())

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds by cause, mean over pipeline stages; they add up to ``iteration_time_s``."""
        return {cause: seconds * self._scale for cause, seconds in self.simulation.breakdown.items()}

    @cached_property
    def memory(self) -> Memory:
        """Peak bytes per stage, capacity, and whether it fits."""
        return estimate_memory(self.job, self.latency.hardware)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole cluster."""
        return self.job.tokens / self.iteration_time_s

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation, 0 to 1: FLOP that the model needs over those at the devices' peak."""
        return self._utilisation[0]

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilisation, 0 to 1: like ``mfu``, with recomputed FLOP."""
        return self._utilisation[1]

    @cached_property
    def _utilisation(self) -> tuple[float, float, float]:
        return utilisation(self.job, self.latency.hardware, self.iteration_time_s)

    @property
    def peak_flops(self) -> float:
        """FLOP/s of one device, mean over all, in the job's precision: the reference of utilisation."""
        return peak_flops(self.job, self.latency.hardware)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Legal settings that are probably mistakes, open choices, unknown software, impossible rates."""
        found = list(self.job.warnings)
        execution = self.job.execution
        stated = execution.kernels or execution.nccl or execution.date or execution.container
        found += self.software_used.doubts if stated else ()
        other = self.uninterleaved
        if other is not None:
            found.append(
                f"parallel.virtual_stages is not stated: {self.job.parallel.virtual_stages} is taken, as recipes of "
                f"{self.job.framework} usually have; 1 would take {seconds_text(other.iteration_time_s)}, and the "
                "interval covers both; state it for a narrower one"
            )
        if self.mfu > POSSIBLE_MFU:
            found.append(
                f"devices reach at most {100 * POSSIBLE_MFU:.0f} % of their peak, got {100 * self.mfu:.0f} %: the "
                "peak FLOP/s or the times of this predictor are wrong"
            )
        residual = None if self.predictor is None else self.predictor.calibration.residual
        if residual is not None and self.software not in residual.software:
            software = self.software
            named = f"framework {software!r:.80}" if software else "a framework that is not named"
            found.append(
                f"{named} ran none of the runs that this predictor was calibrated on: their correction counts for less "
                f"(theirs: {', '.join(map(repr, residual.software))})"
            )
        return tuple(found)

    @cached_property
    def _correction(self) -> JobCorrection:
        calibration = Calibration() if self.predictor is None else self.predictor.calibration
        return calibration.of_jobs([self.job], [self.software])[0]

    @cached_property
    def published(self) -> NearRuns | None:
        """What published runs near the job add to the answer of physics; None: none are near, or are asked."""
        published = None if self.predictor is None else self.predictor.calibration.published
        if published is None or self.job.profile is None:
            return None
        return published.near(JobFeatures.of(self.job, self.job.profile.name))

    @cached_property
    def uninterleaved(self) -> Prediction | None:
        """The prediction with one virtual stage, if the job leaves virtual stages open; else None."""
        other = self.job.uninterleaved
        if other is None or self.given is not None:
            return None
        return with_change(predict(other, self.predictor or ROOFLINE, software=self.software), self.change)

    @property
    def _scale(self) -> float:
        """Calibration of the whole iteration."""
        return self.iteration_time_s / self.simulation.iteration_time_s

    @cached_property
    def doubts(self) -> WorkDoubts:
        """Intervals of single ops and collectives, and what they add up to."""
        return work_doubts(self.simulation, self.predictor)

    def explain(self, most: int = 10) -> tuple[Sensitivity, ...]:
        """List up to ``most`` ops and collectives that determine the time, and what halving each would save."""
        return tuple(
            replace(row, seconds=row.seconds * self._scale, halved_s=row.halved_s * self._scale)
            for row in explain(self.simulation, most)
        )

    def timeline(self, level: str = "segment") -> dict[str, Any]:
        """Chrome trace events, for ui.perfetto.dev; ``level``: ``segment`` (a pass of a stage) or ``op``."""
        return timeline(self.simulation, level, self._scale)

    def timeline_json(self, level: str = "segment") -> Iterator[bytes]:
        """The timeline as pieces of JSON, to be written to a file."""
        return timeline_json(self.simulation, level, self._scale)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the same as ``stepsight predict --json`` prints; times in seconds, memory in bytes."""
        both = () if self.uninterleaved is None else (self, self.uninterleaved)
        chunks, times = [p.job.parallel.virtual_stages for p in both], [p.iteration_time_s for p in both]
        return {
            "job": self.job.name,
            "framework": self.job.framework,
            "hardware": self.job.hardware_name,
            "iteration_time_s": self.iteration_time_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "open": {"virtual_stages": chunks, "iteration_time_s": times} if both else {},
            "breakdown": dict(self.breakdown),
            **exchange_facts(self.breakdown),
            "memory": self.memory.to_dict(),
            "num_micro_batches": self.job.num_micro_batches,
            **({"unit": self.job.unit} if self.job.model.tables else {}),
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "hfu": self.hfu,
            **({} if self.published is None else {"published": self.published.to_dict()}),
            "warnings": list(self.warnings),
            "unsupported": list(self.unsupported),
            "unsupported_share": self.unsupported_share,
            "source": self.source,
            "software": {**self.software_used.to_dict(), **({"change": asdict(self.change)} if self.change else {})},
        }

    def to_frame(self) -> DataFrame:
        """A pandas table of one row: job, time, interval, breakdown (``compute_s``, ...), memory."""
        from pandas import DataFrame

        job, memory = self.job, self.memory
        row: dict[str, Any] = {
            "job": job.name,
            "hardware": job.hardware_name,
            "devices": job.cluster.num_devices,
            "iteration_time_s": self.iteration_time_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            **{f"{cause}_s": seconds for cause, seconds in self.breakdown.items()},
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "memory_bytes": memory.peak_bytes,
            "capacity_bytes": memory.capacity_bytes,
            "fits": memory.fits,
            "unsupported_share": self.unsupported_share,
            "source": self.source,
        }
        return DataFrame([row])

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw where the time goes, a bar for each cause; needs no screen.

        ``axes``: matplotlib's, None: a new figure.  ``prediction.plot().figure.savefig("breakdown.png")`` writes it.
        """
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.subplots(figsize=(7.0, 3.5), layout="constrained")[1]
        whole = self.iteration_time_s
        causes = {name: s for name, s in self.breakdown.items() if s > LEAST_SHOWN * whole}
        bars = axes.barh([name.replace("_", " ") for name in causes], list(causes.values()), color="tab:blue")
        axes.bar_label(bars, [f" {seconds_text(s)}, {100 * s / whole:.1f} %" for s in causes.values()])
        axes.margins(x=0.3)
        axes.invert_yaxis()
        axes.set_xlabel("time in an iteration (s), mean over pipeline stages")
        title = f"{self.job.name}: {seconds_text(whole)} ({interval_text(self.low_s, self.high_s)})"
        axes.set_title(title, fontsize="medium")
        return axes


def peak_flops(job: Job, hardware: Hardware) -> float:
    """FLOP/s of one device of a job on ``hardware``, mean over all where nodes are mixed, in the job's precision."""
    cluster, dtype = job.cluster, job.batch.dtype
    own = hardware.flops_per_s(dtype)
    more = 0.0
    for other in cluster.mixed:
        facts = find_hardware(other.hardware)
        assert facts is not None, other.hardware  # of a job that was lowered
        more += len(other.nodes) * (facts.flops_per_s(dtype) - own)
    return own + more / cluster.nodes


def utilisation(job: Job, hardware: Hardware, seconds: float) -> tuple[float, float, float]:
    """Utilisation of the peak by a job's iteration of some seconds, 0 to 1: with the FLOP that the model needs, with
    those that are executed, and with these and the memory's time for the bytes of lookups in tables.
    """
    lowered = lower(job, hardware)
    needed, done = iteration_flops(lowered)  # of a rank of each stage
    at_peak = seconds * peak_flops(job, hardware) * job.parallel.pp
    at_bandwidth = seconds * hardware.memory_bandwidth_bytes_per_s * job.parallel.pp
    looked_up = looked_up_bytes(lowered) / at_bandwidth if job.model.tables else 0.0
    return needed / at_peak, done / at_peak, done / at_peak + looked_up


def predict(
    job: JobLike, predictor: Predictor | str | Path | None = None, *, software: str = "", latency: str = ""
) -> Prediction:
    """Predict a job, as the public ``ask_many.predict`` does."""
    if not isinstance(job, Job):
        job = Job.of(job)
    if isinstance(predictor, str):
        latency = latency or latency_model.latency_name(predictor)
    if latency:
        given = latency_model.latency_of_job(job, latency)
        simulation = simulate(job, given)
        return Prediction(job, simulation.iteration_time_s, given.source, simulation, given=given)
    asked = asked_predictor(job.cluster.hardware, predictor)
    if asked is None:
        simulation = simulate(job, latency_of_facts(job))
        return Prediction(job, simulation.iteration_time_s, source_of_facts(job), simulation)
    software = software or job.framework
    simulation = simulate(job, asked.latency(job))
    seconds = simulation.iteration_time_s * asked.calibration.factor(job, software)
    return Prediction(job, seconds, asked.source, simulation, asked, software)


def asked_predictor(hardware: str, predictor: Predictor | str | Path | None) -> Predictor | None:
    """The predictor for ``cluster.hardware``, as ``predict`` takes it; None: use the hardware's facts."""
    if predictor is None:
        return shipped_predictor(hardware)
    if isinstance(predictor, str | Path):
        from stepsight.training.tracking.tracking import load_predictor

        if not is_word(predictor):
            return load_predictor(predictor)
        shipped = None if str(predictor) == ROOFLINE else shipped_predictor(hardware)
        return None if shipped is None else shipped.with_published(None)
    if not isinstance(predictor, Predictor):
        raise JobError(f"predict takes a Predictor, the name of one or None, got {type(predictor).__name__}")
    return predictor


def is_word(predictor: str | Path) -> bool:
    """Whether ``ROOFLINE`` or ``PHYSICS`` is asked for, and not a folder of that name."""
    return str(predictor) in (ROOFLINE, PHYSICS) and not Path(predictor).exists()


def source_of_facts(job: Job) -> str:
    """Why a job is answered from hardware facts, for people."""
    shipped = shipped_predictor(job.cluster.hardware)
    return ROOFLINE_SOURCE.format("as asked" if shipped else f"nothing was measured for {job.hardware_name}")


def latency_of_facts(job: Job) -> latency_model.RooflineLatency:
    """Durations from the hardware facts of a job.  Raises ``JobError`` if the hardware is unknown."""
    latency = latency_model.preset_latency(job.cluster.hardware, job.fabric, job.execution.launches)
    if latency is None:
        raise JobError(
            f"without a predictor, cluster.{unknown_hardware(job.cluster.hardware)}: train a predictor, or "
            "state its facts in a .toml file"
        )
    return latency


def _cut(text: str, most: int = MAX_NAME) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
