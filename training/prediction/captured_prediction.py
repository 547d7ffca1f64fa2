"""``predict_captured``: from a captured script to an iteration time, an interval, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.capture.captured import Captured, compute_flops, warnings_once
from stepsight.dataset.graph.graph_files import check_graph
from stepsight.dataset.graph.program import FACTS, OP, PHASES, Program
from stepsight.dataset.hardware.hardware import canonical_hardware, find_fabric, unknown_hardware, usual_fabric
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.durations.latency_model import RooflineLatency, preset_latency
from stepsight.simulator.replay.captured_step import CapturedStep, time_captured
from stepsight.training.corrections.intervals import Intervals, job_class, uncalibrated_ends
from stepsight.training.prediction.prediction import ROOFLINE_SOURCE, asked_predictor
from stepsight.training.predictor.predictor import LearnedLatency, Predictor
from stepsight.training.predictor.software_used import SoftwareUsed

_MODEL_OVER_FORWARD = 3.0  # FLOP of forward and backward, without recomputation


@dataclass(frozen=True, eq=False, repr=False)
class CapturedPrediction:
    """The predicted time and memory of one captured training step."""

    captured: Captured  # the script's ranks
    hardware_name: str  # of the devices
    step: CapturedStep  # the timed step
    latency: LearnedLatency | RooflineLatency  # the durations that the prediction is made of
    predictor: Predictor | None  # the predictor that answered; None: hardware facts
    source: str  # where the durations come from, for people

    @property
    def iteration_time_s(self) -> float:
        """Predicted seconds of one step."""
        return self.step.iteration_time_s

    def __repr__(self) -> str:
        low, high = self.interval
        told = f"{self.iteration_time_s:.4g} s, {low:.4g} to {high:.4g} s, {self.captured.script}"
        return f"CapturedPrediction({told} on {self.captured.world_size} x {self.hardware_name})"

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds by cause; they add up to the iteration time."""
        return self.step.breakdown

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Low and high end of the prediction interval (coverage 90 %), in seconds."""
        share = self.unsupported[1]
        if self.predictor is None:
            down = up = Intervals().half_width_log
        else:
            works = [work for graph in self.captured.graphs for work in graph.works]
            mixture = bool({work.kind for work in works} & {"all_to_all", "grouped_linear", "permute"})
            fused = any(isinstance(work, Op) and work.family == "attention" for work in works)
            like, public = job_class(mixture, fused, self.hardware_name, self.hfu), self.predictor.kernel.derives
            devices = self.captured.world_size
            down, up = uncalibrated_ends(self.predictor.intervals, like, share, devices, public=public)
        return self.iteration_time_s * math.exp(-down), self.iteration_time_s * math.exp(up)

    @cached_property
    def unsupported(self) -> tuple[tuple[str, ...], float]:
        """Work outside the measured range, the longest first, and its share of the critical path, 0 to 1."""
        if not isinstance(self.latency, LearnedLatency):
            return (), 0.0
        host = self.latency.host_times if all(graph.device == "cpu" for graph in self.captured.graphs) else None
        seconds: dict[Any, float] = {}  # of works; where the host runs them, of calls that were not measured, in words
        for place, node in zip(*(ends.tolist() for ends in self.step.critical), strict=True):
            graph = self.step.graphs[place]
            at, call = int(graph.columns["work"][node]), graph.names[graph.columns["name"][node]]
            what: Any = graph.works[at] if at >= 0 else None
            if host is not None:
                asked = graph.columns["kind"][node] == OP and isinstance(what, Op) and not host.is_known(call, what)
                what = f"{what}: {call} was not measured" if asked else None
            if what is not None:
                seconds[what] = seconds.get(what, 0.0) + float(graph.duration_s[node])
        works = sorted(seconds, key=lambda work: -seconds[work])
        crowded, reasons = ("", works) if host is not None else self.latency.outside(works)
        named = tuple(reason for reason in reasons if reason)
        if crowded:
            return (crowded, *named), 1.0
        outside = sum(seconds[work] for work, reason in zip(works, reasons, strict=True) if reason)
        return named, min(1.0, outside / max(self.iteration_time_s, 1e-12))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Limitations of the capture and the prediction."""
        found = dict.fromkeys(warnings_once(text for graph in self.captured.graphs for text in graph.warnings))
        peers: set[int] = set()
        for graph in self.captured.graphs:
            pairs = set(zip(graph.columns["group"].tolist(), graph.columns["work"].tolist(), strict=True))
            messages = {group for group, work in pairs if group >= 0 and graph.works[work].kind == "send_recv"}
            peers |= {rank for group in messages for rank in graph.groups[group][1]}
        absent = sorted(peers - {rank.rank for rank in self.captured.ranks})
        if absent:
            found.setdefault(
                f"ranks {', '.join(map(str, absent[:8]))} exchange messages with the captured ones and were not "
                "captured: waiting for them is not in the time; capture with --ranks auto"
            )
        if not self._knows_memory:
            found.setdefault("the memory of tensors is not known: only what the software reserves is counted")
        return tuple(found)

    @property
    def _knows_memory(self) -> bool:
        return any(rank.peak_bytes for rank in self.captured.ranks)

    @cached_property
    def flops(self) -> tuple[float, float]:
        """FLOP that the model needs, and FLOP that are executed: of one rank, mean over the captured ones."""
        done = [compute_flops(rank.graph) for rank in self.captured.ranks]
        needed = []
        for graph, all_of in zip(self.captured.graphs, done, strict=True):
            forward = (graph.columns["kind"] == OP) & (graph.columns["phase"] == PHASES.index("forward"))
            works = [graph.works[work] for work in graph.columns["work"][forward].tolist()]
            flops = sum(work.flops for work in works if isinstance(work, Op) and work.record.bound == "compute")
            needed.append(min(_MODEL_OVER_FORWARD * flops, all_of))
        return float(np.mean(needed)), float(np.mean(done))

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: FLOP that the model needs over those at the peak of the type of most FLOP."""
        return self.flops[0] / self._at_peak

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilisation: like ``mfu``, with all FLOP that are executed."""
        return self.flops[1] / self._at_peak

    @cached_property
    def _at_peak(self) -> float:
        """FLOP that a device does at its peak in the step's time."""
        hardware, flops = self.latency.hardware, dict[str, float]()  # by dtype
        for graph in self.captured.graphs:
            counts = np.bincount(graph.columns["work"][graph.columns["work"] >= 0], minlength=len(graph.works)).tolist()
            for work, count in zip(graph.works, counts, strict=True):
                if isinstance(work, Op):
                    flops[work.dtype] = flops.get(work.dtype, 0.0) + count * work.flops
        dtype = max(flops, key=flops.__getitem__, default="bf16")
        return hardware.peak_flops.get(dtype, max(hardware.peak_flops.values())) * max(self.iteration_time_s, 1e-12)

    @property
    def memory(self) -> dict[str, Any]:
        """Peak bytes of tensors on each captured rank against the device's memory; ``fits`` is None if not known."""
        hardware = self.latency.hardware
        peaks = [rank.peak_bytes * (1.0 + hardware.fragmentation) + hardware.reserved_bytes for rank in
                 self.captured.ranks]  # fmt: skip
        peak, capacity = max(peaks), hardware.memory_bytes
        fits = peak <= capacity if self._knows_memory or peak > capacity else None
        reason = f"needs {peak / 1e9:.1f} GB of {capacity / 1e9:.1f} GB" if fits is False else ""
        stages = [
            {"rank": rank.rank, "tensors": rank.peak_bytes, "total": total, "capacity_bytes": capacity}
            for rank, total in zip(self.captured.ranks, peaks, strict=True)
        ]
        return {"peak_bytes": peak, "capacity_bytes": capacity, "fits": fits, "reason": reason, "stages": stages}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the keys of ``Prediction.to_dict``; unknown values of a script are null."""
        unsupported, share = self.unsupported
        return {
            "job": self.captured.script,
            "framework": f"PyTorch {self.captured.torch}" if self.captured.torch else "",
            "hardware": self.hardware_name,
            "iteration_time_s": self.iteration_time_s,
            "low_s": self.interval[0],
            "high_s": self.interval[1],
            "open": {},
            "breakdown": dict(self.breakdown),
            "memory": self.memory,
            "num_micro_batches": None,
            "tokens_per_s": None,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "warnings": list(self.warnings),
            "unsupported": list(unsupported),
            "unsupported_share": share,
            "source": self.source,
            "software": SoftwareUsed().to_dict(),
            "world_size": self.captured.world_size,
            "ranks": [rank.rank for rank in self.captured.ranks],
        }


def predict_captured(
    captured: Captured, hardware: str, fabric: str = "", predictor: Predictor | str | Path | None = None
) -> CapturedPrediction:
    """Predict one captured training step.

    ``hardware``: name of the devices; empty: those of the predictor.  ``fabric``: name of the links; empty: the usual
    ones of the devices.  ``predictor``: as in ``predict``.  Raises ``PredictorError`` if the predictor is for other
    hardware, or there is neither a predictor nor a preset.
    """
    shape = min(captured.local_size, captured.world_size), captured.world_size
    latency, asked, source = captured_latency(hardware, fabric, predictor, shape)
    step = time_captured(captured.graphs, latency)
    return CapturedPrediction(captured, latency.hardware.name, step, latency, asked, source)


def captured_latency(
    hardware: str, fabric: str = "", predictor: Predictor | str | Path | None = None, shape: tuple[int, int] = (1, 1)
) -> tuple[LearnedLatency | RooflineLatency, Predictor | None, str]:
    """Durations for a captured step, the predictor that gives them, if one does, and their source for people.

    ``shape``: ranks of a node, and of the job; the others are as in ``predict_captured``, which raises the same.
    """
    if not hardware:
        if not isinstance(predictor, Predictor):
            raise PredictorError("the devices of a folder of ranks must be named: say which with --hardware")
        hardware = predictor.hardware.name
    hardware = canonical_hardware(hardware)
    links = find_fabric(fabric or usual_fabric(hardware))
    asked = asked_predictor(hardware, predictor)
    if asked is None:
        latency = preset_latency(hardware, links)
        if latency is None:
            raise PredictorError(f"without a predictor, {unknown_hardware(hardware)}: train a predictor")
        why = "as asked" if isinstance(predictor, str) else f"nothing was measured for {hardware}"
        return latency, None, ROOFLINE_SOURCE.format(why)
    own = asked.hardware.name
    if predictor is not None and hardware not in (own, canonical_hardware(own)):
        raise PredictorError(f"the predictor serves its own hardware: it must be {own!r:.80}, got {hardware!r:.80}")
    return asked.latency_on(links, *shape), asked, asked.source


def predict_program(program: Program, predictor: Predictor | str | Path | None = None) -> CapturedPrediction:
    """Predict one rank's program on the predictor's devices, or on those that it names; the fabric is the usual one.

    Of a trace, its first step that no observer slowed is predicted.  Its memory is not known.  Raises
    ``PredictorError`` if it has no nodes, ``TraceError`` if its columns do not fit together (edges that lead back).
    """
    if not len(program):
        raise PredictorError("a program that is predicted must have nodes, got none")
    check_graph({name: getattr(program, name) for name in FACTS}, "the program")
    predictor = predictor if predictor is None else asked_predictor(program.device_name, predictor) or predictor
    hardware = "" if isinstance(predictor, Predictor) else program.device_name
    if not hardware and not isinstance(predictor, Predictor):
        raise PredictorError("the program names no device: set its device_name with replace, or give a Predictor")
    return predict_captured(Captured.of_program(program), hardware, predictor=predictor)
