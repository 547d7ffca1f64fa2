"""Tables of traced steps: kernels by name, and how long launches wait for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.graph.program import WHY_NUMBER, Dependency, Program

Floats = NDArray[np.float64]


class Kernel(NamedTuple):
    """A kernel by its name, the kind of its op or collective, and what it does (``gemm[64x64x64]fp32``)."""

    name: str
    kind: str
    what: str


def kernel_seconds(graphs: Sequence[Program]) -> dict[Kernel, Floats]:
    """Seconds of each run of each kernel in the traced steps of all ranks."""
    found: defaultdict[Kernel, list[float]] = defaultdict(list)
    for graph in graphs:
        inside = (graph.columns["step"] >= 0) & graph.on_device
        pairs, which = np.unique(
            np.stack([graph.columns["name"][inside], graph.columns["work"][inside]]), axis=1, return_inverse=True
        )
        seconds = graph.duration_s[inside][np.argsort(which, kind="stable")]
        bounds = np.cumsum(np.bincount(which, minlength=pairs.shape[1]))[:-1]
        for (name, work), runs in zip(pairs.T.tolist(), np.split(seconds, bounds), strict=True):
            kernel = Kernel(graph.names[name], graph.works[work].kind, str(graph.works[work]))
            found[kernel] += runs.tolist()
    return {kernel: np.array(runs) for kernel, runs in found.items()}


def kernel_table(graphs: Sequence[Program]) -> list[dict[str, Any]]:
    """Kernels of the traced steps of all ranks by name and kind, the one with most seconds first."""
    runs: defaultdict[tuple[str, str], list[Floats]] = defaultdict(list)
    for kernel, seconds in kernel_seconds(graphs).items():
        runs[kernel.name, kernel.kind].append(seconds)
    rows = [(name, kind, np.concatenate(parts)) for (name, kind), parts in runs.items()]
    rows.sort(key=lambda row: -float(row[2].sum()))
    whole = sum(float(seconds.sum()) for _, _, seconds in rows) or 1.0
    return [
        {
            **{"name": name, "kind": kind, "count": len(each), "seconds": float(each.sum())},
            **{"mean_s": float(each.mean()), "min_s": float(each.min()), "max_s": float(each.max())},
            "percent": 100.0 * float(each.sum()) / whole,
        }
        for name, kind, each in rows
    ]


def launch_times(graph: Program) -> tuple[Floats, Floats]:
    """When the host begins to launch each kernel of the steps, and when the kernel starts; on the rank's clock."""
    edges = graph.edge_columns
    launched = (edges["why"] == WHY_NUMBER[Dependency.LAUNCH]) & (graph.columns["step"][edges["target"]] >= 0)
    return graph.start_s[edges["source"][launched]], graph.start_s[edges["target"][launched]]


def launch_table(graphs: Sequence[Program]) -> list[dict[str, Any]]:
    """For each rank with launches: delays from launch to kernel, and the queue of kernels that are launched and have
    not started (its mean is over the time from the first launch to the last start).
    """
    found = []
    for graph in graphs:
        launched, started = launch_times(graph)
        if not len(launched):
            continue
        delays, moments = started - launched, np.concatenate([started, launched])
        changes = np.repeat([-1, 1], len(launched))[np.argsort(moments, kind="stable")]
        span = float(moments.max() - moments.min())
        found.append(
            {
                "rank": graph.rank,
                "launches": len(delays),
                "mean_delay_s": float(delays.mean()),
                "median_delay_s": float(np.median(delays)),
                "max_delay_s": float(delays.max()),
                "mean_queue": float(delays.sum() / span) if span else 0.0,
                "max_queue": int(np.cumsum(changes).max()),
            }
        )
    return found
