"""A simulated iteration as traces of PyTorch's profiler: for HTA, TensorBoard, and other readers of such traces.

A trace has the form of Kineto's files: kernels on the streams of a device, the call that launches each, the operator
around the call, and one profiler step.  A timeline has no host, so each launch takes a microsecond and is just before
its kernel.  Annotations tell forward from backward, and an operator of backward has the sequence number of its forward,
as autograd writes it: an import then finds phases and data dependencies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stepsight.dataset.kinds import COLLECTIVE_KINDS
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.iteration.simulated_iteration import SimulatedIteration
from stepsight.simulator.iteration.timeline import timeline_json
from stepsight.simulator.programs.rank_layout import layout_of

Event = dict[str, Any]
Work = Op | Collective
_DEVICE, _HOST, _THREAD, _FIRST_STREAM = 0, 1000, 1001, 7
_NAMES = {_DEVICE: "predicted device", _HOST: "predicted host"}
_COMPUTE = "compute"
_BASE_US = 1.0e6  # start of the first kernel
_PHASES, _DIGITS = ("forward", "backward", "optimizer"), frozenset("0123456789")
_LAUNCH_US = 1.0  # viewers round times to whole microseconds
_KERNELS = {
    "all_reduce": "ncclDevKernel_AllReduce_Sum_RING",
    "all_gather": "ncclDevKernel_AllGather_RING",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_RING",
    "broadcast": "ncclDevKernel_Broadcast_RING",
}


class _Span(NamedTuple):
    """One kernel: its pass (``F3``), its phase, its operator, its signature, its stream, and its times in
    microseconds.
    """

    action: str
    phase: str
    operator: str
    signature: str
    stream: int
    group: str
    begin: float
    length: float


def num_kernels(simulation: SimulatedIteration) -> list[int]:
    """Kernels in the trace of each stage of the first pipeline, messages not counted."""
    low, passing = simulation.lowered, simulation.passings[0]
    nodes = np.array([len(segment.graph.work) for segment in low.segments])
    counts = nodes[low.optimizer[: low.num_stages]]
    np.add.at(counts, low.track.stage, nodes[passing.segments[passing.rows]])
    return [int(count) for count in counts]


def profiler_traces(
    simulation: SimulatedIteration, scale: float = 1.0, stages: Collection[int] | None = None
) -> Iterator[tuple[int, Event]]:
    """Make the trace of the first rank of pipeline stages of the first pipeline.

    Args:
        simulation: Of the job.
        scale: Multiplies all times.
        stages: Numbers of the stages; None: all.

    Yields:
        The number of a rank, and its trace as plain values for JSON.
    """
    low, job = simulation.lowered, simulation.job
    wanted = range(low.num_stages) if stages is None else sorted(stages)
    events = json.loads(b"".join(timeline_json(simulation, "op", scale, wanted)))["traceEvents"]
    streams = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    works = {str(work): work for work in low.all_works}
    spans: dict[int, list[_Span]] = {stage: [] for stage in wanted}
    for event in events:
        if event["ph"] == "X":
            action, _, operator = event["name"].partition(" ")
            signature = event.get("args", {}).get("what", "send_recv")
            times = _BASE_US + event["ts"], event["dur"]
            stream = _FIRST_STREAM + event["tid"]
            group = streams[event["pid"], event["tid"]]
            spans[event["pid"]].append(_Span(action, event["cat"], operator, signature, stream, group, *times))
    length = simulation.iteration_time_s * scale * 1e6
    for stage, kernels in spans.items():
        rank = int(layout_of(job).ranks_of_stage(stage)[0])
        kernels.sort(key=lambda span: span.begin)
        yield rank, _trace(kernels, works, length, (rank, job.cluster.num_devices, stage))


def _trace(spans: Sequence[_Span], works: Mapping[str, Work], length: float, place: tuple[int, int, int]) -> Event:
    """The trace of a rank: ``place`` is its number, the number of all ranks, and its stage."""
    rank, world_size, stage = place
    lead = 2.0 * _LAUNCH_US  # the first launch is within the step
    events = [
        _event("user_annotation", "ProfilerStep#0", (_HOST, _THREAD), (_BASE_US - lead, length + lead), {}),
        *({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in _NAMES.items()),
    ]
    events += _phases(spans, stage, _BASE_US + length)
    sequence: dict[str, int] = {}
    for number, span in enumerate(spans, start=1):
        events += _kernel(number, span, works.get(span.signature), _sequence(span, sequence))
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": _DEVICE, "name": "predicted", "totalGlobalMem": 0}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceEvents": events,
    }


def _phases(spans: Sequence[_Span], stage: int, end: float) -> list[Event]:
    """Annotations of passes: each lasts from its first launch on the computation's stream to that of the next."""
    firsts: list[_Span] = []
    for span in spans:
        if span.group == _COMPUTE and (not firsts or span.action != firsts[-1].action):
            firsts.append(span)
    begins = [_launch(span) for span in firsts]
    found = []
    for span, begin, until in zip(firsts, begins, [*begins[1:], end], strict=True):
        label = span.phase if span.phase in _PHASES else "backward"
        name = f"stepsight::segment label={label} micro_batch={_micro_batch(span.action)} stage={stage}"
        found.append(_event("user_annotation", name, (_HOST, _THREAD), (begin, max(until - begin, 0.0)), {}))
    return found


def _micro_batch(action: str) -> int:
    """The micro-batch of ``F3`` or ``B3.1``; 0 of the optimizer."""
    number = action[1:].partition(".")[0]
    return int(number) if number.isdigit() else 0


def _sequence(span: _Span, known: dict[str, int]) -> int:
    """Autograd's number of an operator: that of the forward of the same micro-batch, chunk and layer; -1: none."""
    if span.group != _COMPUTE or span.action[1:2] not in _DIGITS:
        return -1
    layer = f"{span.action[1:]} {span.operator.split(' ')[0]}"
    return known.setdefault(layer, len(known)) if span.phase == "forward" else known.get(layer, -1)


def _launch(span: _Span) -> float:
    """When the host launches a kernel, in microseconds."""
    return math.floor(span.begin) - _LAUNCH_US


def _kernel(number: int, span: _Span, work: Work | None, sequence: int) -> list[Event]:
    """A kernel with its operator and launch, and the arrow from the launch to the kernel."""
    told: Event = {"device": _DEVICE, "context": 1, "stream": span.stream, "correlation": number, "External id": number}
    called: Event = {"External id": number, "part": f"{span.action} {span.operator}"}
    called |= {"Sequence number": sequence} if sequence >= 0 else {}
    if isinstance(work, Op):  # as the harness annotates ops, so that an import finds their sizes
        name = str(work)
        operator = f"stepsight::op kind={work.kind} dims={'x'.join(map(str, work.dims))} dtype={work.dtype}"
    elif work is not None and span.group == _COMPUTE:
        name = operator = f"time lost to {work.kind}"  # an overlapping collective slows the computation
    else:
        kind = work.kind if work is not None else "send_recv"
        name, operator = f"{_KERNELS.get(kind, 'ncclDevKernel_SendRecv')}({span.signature})", f"nccl:{kind}"
        size = work.num_bytes if work is not None else 0
        called |= {"Input Dims": [[size]], "Input type": ["unsigned char"]}
    if isinstance(work, Collective) and operator.startswith("nccl:"):
        call = next(iter(COLLECTIVE_KINDS[work.kind].nccl_names), work.kind)
        sizes = dict.fromkeys(("In msg nelems", "Out msg nelems"), work.num_bytes)
        group = {"Group size": work.group_size, "Process Group Name": span.group}
        told |= {"Collective name": call, **sizes, "dtype": "Byte", **group}
    host, at = (_HOST, _THREAD), (_launch(span), _LAUNCH_US)
    flow = {"cat": "ac2g", "name": "ac2g", "id": number}
    return [
        _event("cpu_op", operator, host, at, called),
        _event("cuda_runtime", "cudaLaunchKernel", host, at, {"correlation": number, "External id": number}),
        _event("kernel", name, (_DEVICE, span.stream), (span.begin, span.length), told),
        {"ph": "s", "pid": _HOST, "tid": _THREAD, "ts": at[0], **flow},
        {"ph": "f", "pid": _DEVICE, "tid": span.stream, "ts": span.begin, **flow, "bp": "e"},
    ]


def _event(category: str, name: str, place: tuple[int, int], times: tuple[float, float], told: Event) -> Event:
    (pid, tid), (ts, dur) = place, times
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": told}
