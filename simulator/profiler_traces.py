"""A simulated iteration as traces of PyTorch's profiler: for HTA, TensorBoard, and other readers of such traces.

A trace has the form of Kineto's files: kernels on the streams of a device, the call that launches each, the operator
around the call, and one profiler step.  A timeline has no host, so each launch takes a microsecond and is just before
its kernel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stepsight.dataset.kinds import COLLECTIVE_KINDS
from stepsight.dataset.op import Collective, Op
from stepsight.simulator.iteration import SimulatedIteration
from stepsight.simulator.lowering.rank_layout import layout_of
from stepsight.simulator.timeline import timeline_json

Event = dict[str, Any]
Work = Op | Collective
_DEVICE, _HOST, _THREAD, _FIRST_STREAM = 0, 1000, 1001, 7
_NAMES = {_DEVICE: "predicted device", _HOST: "predicted host"}
_COMPUTE = "compute"
_BASE_US = 1.0e6  # start of the first kernel
_LAUNCH_US = 1.0  # viewers round times to whole microseconds
_KERNELS = {
    "all_reduce": "ncclDevKernel_AllReduce_Sum_RING",
    "all_gather": "ncclDevKernel_AllGather_RING",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_RING",
    "broadcast": "ncclDevKernel_Broadcast_RING",
}


class _Span(NamedTuple):
    """One kernel: its operator, its signature, its stream, and its times in microseconds."""

    operator: str
    signature: str
    stream: int
    group: str
    begin: float
    length: float


def profiler_traces(simulation: SimulatedIteration, scale: float = 1.0) -> Iterator[tuple[int, Event]]:
    """Make the trace of the first rank of each pipeline stage, of the first pipeline.

    Args:
        simulation: Of the job.
        scale: Multiplies all times.

    Yields:
        The number of a rank, and its trace as plain values for JSON.
    """
    low, job = simulation.lowered, simulation.job
    events = json.loads(b"".join(timeline_json(simulation, "op", scale)))["traceEvents"]
    streams = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    works = {str(work): work for work in low.all_works}
    spans: dict[int, list[_Span]] = {stage: [] for stage in range(low.num_stages)}
    for event in events:
        if event["ph"] == "X" and event["pid"] < low.num_stages:
            signature = event.get("args", {}).get("what", "send_recv")
            times = _BASE_US + event["ts"], event["dur"]
            stream = _FIRST_STREAM + event["tid"]
            group = streams[event["pid"], event["tid"]]
            spans[event["pid"]].append(_Span(event["name"], signature, stream, group, *times))
    length = simulation.iteration_time_s * scale * 1e6
    for stage, kernels in spans.items():
        rank = int(layout_of(job).ranks_of_stage(stage)[0])
        yield rank, _trace(sorted(kernels, key=lambda span: span.begin), works, length, rank, job.cluster.num_devices)


def _trace(spans: Sequence[_Span], works: Mapping[str, Work], length: float, rank: int, world_size: int) -> Event:
    lead = 2.0 * _LAUNCH_US  # the first launch is within the step
    events = [
        _event("user_annotation", "ProfilerStep#0", (_HOST, _THREAD), (_BASE_US - lead, length + lead), {}),
        *({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in _NAMES.items()),
    ]
    for number, span in enumerate(spans, start=1):
        events += _kernel(number, span, works.get(span.signature))
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": _DEVICE, "name": "predicted", "totalGlobalMem": 0}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceEvents": events,
    }


def _kernel(number: int, span: _Span, work: Work | None) -> list[Event]:
    """A kernel with its operator and launch, and the arrow from the launch to the kernel."""
    told: Event = {"device": _DEVICE, "context": 1, "stream": span.stream, "correlation": number, "External id": number}
    called: Event = {"External id": number, "part": span.operator}
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
    host, at = (_HOST, _THREAD), (math.floor(span.begin) - _LAUNCH_US, _LAUNCH_US)
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
