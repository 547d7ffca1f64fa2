"""The host's time of traced steps by five overheads of an operator, and by one time of a launch.

T1 lies between operators, T2 before an operator's first launch, T3 behind its last one, T4 is a launch, and T5 lies
between launches (Lin et al., HiPC 2022).  The other: from the last launching operator to the end of this one.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.bounded import read_unpacked
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.studies.study import Study

Found = dict[tuple[str, str], list[float]]  # seconds by overhead and operator; of T1 and T4 no operator is told
_PARTS, _OURS = ("T1", "T2", "T3", "T4", "T5"), "launch"
_STALL_S = 1e-3  # a longer overhead is a wait


def overheads_of(events: Iterable[dict[str, Any]]) -> Found:
    """Overheads of the outermost operators of a Kineto trace."""
    found, threads = defaultdict[tuple[str, str], list[float]](list), defaultdict[Any, list[Any]](list)
    for event in events:
        launch = "LaunchKernel" in event.get("name", "") and event.get("cat") in (
            "cuda_runtime",
            "cuda_driver",
            "Runtime",
        )
        if launch or event.get("cat") in ("cpu_op", "Operator"):
            begin = 1e-6 * float(event["ts"])
            threads[event.get("tid")].append((begin, begin + 1e-6 * event.get("dur", 0.0), launch, event["name"]))
    for calls in threads.values():
        operators, before, since = list[tuple[Any, list[Any]]](), None, 0.0
        for call in sorted(calls, key=lambda one: (one[0], -one[1])):
            if operators and call[0] < operators[-1][0][1]:
                operators[-1][1].extend([call] if call[2] else [])
            elif not call[2]:
                operators.append((call, []))
        for (begin, end, _, name), own in operators:
            parts = [("T1", "", begin - before)] if before is not None else []
            parts += [("T2", name, (own[0][0] if own else end) - begin), *[("T4", "", one[1] - one[0]) for one in own]]
            parts += [("T5", name, late[0] - early[1]) for early, late in pairwise(own)]
            parts += [("T3", name, end - own[-1][1])] if own else []
            parts, before = [part for part in parts if 0.0 <= part[2] <= _STALL_S], end
            since += sum(seconds for *_, seconds in parts)
            if own:
                parts, since = [*parts, *[(_OURS, name, since / len(own))] * len(own)], 0.0
            for part, of, seconds in parts:
                found[part, of].append(seconds)
    return found


def run_overheads(options: argparse.Namespace) -> tuple[Any, str]:
    """Errors of each workload's host time, each overhead the mean of the other workloads: of the operator, if known."""
    found = {path.name.split(".")[0]: overheads_of(json.loads(read_unpacked(path))["traceEvents"])
             for path in options.traces}  # fmt: skip
    rows = list[dict[str, Any]]()
    for workload, own in found.items():
        known, told, row = defaultdict[Any, list[float]](list), defaultdict[str, float](float), {"workload": workload}
        for (part, name), seconds in (item for key in found if key != workload for item in found[key].items()):
            known[part, name] += seconds
            known[part] += seconds
        for (part, name), seconds in own.items():
            told[part] += len(seconds) * float(np.mean(known[part, name] or known[part] or [0.0]))
        mine = {part: [s for (kind, _), each in own.items() if kind == part for s in each] for part in _PARTS}
        row |= {part: float(np.mean(seconds or [0.0])) for part, seconds in mine.items()}
        row["host_s"] = host = sum(map(sum, mine.values()))
        rows.append({**row, "five": sum(told[part] for part in _PARTS) / host - 1.0, "one": told[_OURS] / host - 1.0})
    times = {f"{part} us": lambda row, part=part: 1e6 * row[part] for part in _PARTS}
    return rows, table_of(
        rows, {"": "workload", "host ms": "host_s", **times, "error, T1-T5": "five", "error, launch": "one"}, 3
    )


OVERHEADS = Study(
    "host-overheads",
    "the host's time of traced steps from overheads of other workloads: T1 to T5 of each operator, and one of a launch",
    run_overheads,
    {"traces": {"type": Path, "nargs": "+", "help": "Kineto traces of different workloads on GPUs"}},
)
