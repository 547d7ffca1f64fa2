"""The device of a traced run, and the latency model of it."""

from __future__ import annotations

from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.hardware import hardware as known
from stepsight.dataset.hardware.hardware import FABRICS, HARDWARE, Fabric, find_fabric, find_hardware, usual_fabric
from stepsight.dataset.runs.run_folder import TracedRun
from stepsight.dataset.tables.measurements import chip_name, device_name, is_other_device
from stepsight.simulator.durations.latency_model import LatencyModel, RooflineLatency
from stepsight.training.shipped.catalogue import shipped_predictor


def traced_device(run: TracedRun, on: str = "", on_fabric: str = "") -> tuple[str, Fabric]:
    """Hardware and fabric of a trace: as said, else from the job, or from the device's name in the trace."""
    job, said, on_host = run.job, run.graphs[0].device_name, run.graphs[0].device == "cpu"
    name = preset_name(on) if on else (job.cluster.hardware if job is not None else "")
    if not name:
        name = "local-cpu" if on_host else device_name(said)
    if find_hardware(name) is None and not on:  # of another memory size, which changes no duration
        name = preset_name(chip_name(name))
    facts = find_hardware(name)
    if on and is_other_device("cpu" if on_host else said, name):
        rule = f"--on must be the traced device: the trace is of {said or ('a CPU' if on_host else 'a GPU')!r:.80}"
        raise StepsightError(f"{rule}, got {on!r:.80}; --hardware asks about another one")
    if facts is None and on:
        raise StepsightError(f"--on must be the traced device, a name or a file: {known.unknown_hardware(on)}")
    if facts is None:
        told = f"the trace names {said!r:.80}, which is no known device" if said else "the trace names no device"
        rule = f"{told}: name the device or a similar one with --on (as in --on mi300x)"
        raise StepsightError(f"{rule}; --on takes {', '.join(HARDWARE.names())}, or a file of a device")
    if on_fabric:
        return name, find_fabric(on_fabric)
    try:
        return name, job.fabric if job is not None else find_fabric(usual_fabric(name))
    except JobError:
        rule = f"no usual fabric of {name} is known: name the traced one with --on-fabric"
        raise StepsightError(f"{rule}, one of {', '.join(FABRICS.names())}, or a file") from None


def preset_name(name: str) -> str:
    """A known hardware by name, usual name or prefix (``h100-sxm``): the first one that matches."""
    name = known.canonical_hardware(name)
    if find_hardware(name) is not None:
        return name
    return next((each for each in HARDWARE.names() if each.startswith(f"{name}-")), name)


def latency_of(hardware: str, fabric: Fabric) -> LatencyModel:
    """The latency model of a hardware: the shipped predictor, else a roofline."""
    facts = find_hardware(hardware)
    if facts is None:
        raise StepsightError(f"hardware must be one of {', '.join(HARDWARE.names())} or a file, got {hardware!r:.80}")
    predictor = shipped_predictor(facts.name)
    return RooflineLatency(facts, fabric) if predictor is None else predictor.latency_on(fabric, 1, 1)


def predictor_name(hardware: str) -> str:
    """What ``latency_of`` asks."""
    facts = find_hardware(hardware)
    return getattr(facts and shipped_predictor(facts.name), "source", "roofline")
