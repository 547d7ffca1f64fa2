"""Check that a job can have produced a trace: missing, extra and different ops and collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import HARDWARE, find_hardware
from stepsight.dataset.imported.rank_graph import COLLECTIVE, OP, RankGraph
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, OP_KINDS
from stepsight.simulator.programs.lower import lower

# Families of ops that a trace and its job must both have or both lack.
_TELLING = ("gemm", "attention", "conv", "batch_norm", "embedding_bag", "pool")
_HOST, _DEVICE = "local-cpu", "a100-sxm-80gb"  # stand for hardware that a job names and that is unknown
_LEAST_SHARE = 0.05  # share of the device's time from which a family distinguishes jobs


def check_job(job: Job, graphs: Sequence[RankGraph]) -> None:
    """Check that a job can have produced a trace.

    Raises:
        TraceError: If not, with the differences.
    """
    wrong = []
    world, devices = graphs[0].world_size, job.cluster.num_devices
    if world != devices:
        wrong.append(f"the job has {devices} devices, the trace {world} rank(s)")
    hosted, kind = graphs[0].device == "cpu", job.cluster.hardware
    hardware = find_hardware(job.hardware_name) or HARDWARE[_HOST if hosted else _DEVICE]
    if hosted != (hardware.kind == "cpu"):
        wrong.append(
            f"the job runs on {kind}, the trace on {'a host' if hosted else graphs[0].device_name or 'a device'}"
        )
    traced, programs = _traced_shares(graphs), [segment.program for segment in lower(job, hardware).segments]
    lowered = {OP_KINDS[n.work.kind].family for program in programs for n in program.nodes if n.work.kind in OP_KINDS}
    for family in _TELLING:
        if traced[family] >= _LEAST_SHARE and family not in lowered and not _stands_for(family, lowered):
            wrong.append(f"{100 * traced[family]:.0f} % of the trace's time is {family}, and the job has none")
    if "gemm" in lowered and not any(traced[family] for family in ("gemm", "fused", "opaque", "attention")):
        wrong.append("the job has matrix products, and the trace none")
    wrong += _collective_differences(job, graphs, programs)
    if wrong:
        raise TraceError(f"a job must be the one that was traced, got {'; '.join(wrong)}")


def _traced_shares(graphs: Sequence[RankGraph]) -> defaultdict[str, float]:
    """Share of the ops' time by family."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for graph in graphs:
        families = [OP_KINDS[work.kind].family if work.kind in OP_KINDS else "" for work in graph.works]
        ops = graph.nodes["kind"] == OP
        for work, spent in zip(graph.nodes["work"][ops].tolist(), graph.duration_s[ops].tolist(), strict=True):
            seconds[families[work]] += spent
    whole = sum(seconds.values()) or 1.0
    return defaultdict(float, {family: spent / whole for family, spent in seconds.items()})


def _stands_for(family: str, lowered: set[str]) -> bool:
    """Count products of attention as products if only the job fuses them, and the other way round."""
    return family in ("gemm", "attention") and bool(lowered & {"gemm", "attention"})


def _collective_differences(job: Job, graphs: Sequence[RankGraph], programs: Sequence[Program]) -> list[str]:
    """Kinds of collectives that only one of the two has."""
    traced = {
        graph.works[work].kind
        for graph in graphs
        for work in graph.nodes["work"][graph.nodes["kind"] == COLLECTIVE].tolist()
    }
    lowered = {n.work.kind for program in programs for n in program.nodes if n.work.kind in COLLECTIVE_KINDS}
    if job.cluster.num_devices > 1 and lowered and not traced:
        return [f"the job has collectives ({', '.join(sorted(lowered))}), and the trace none"]
    if traced and job.cluster.num_devices == 1:
        return [f"the trace has collectives ({', '.join(sorted(traced))}), and the job runs on one device"]
    return []
