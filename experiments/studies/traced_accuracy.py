"""Compare predicted with traced times of ops: other steps of the same trace, and other traces of the same device.

    stepsight experiment traced TRACE… [--json]

Each trace of a GPU teaches by the first half of its steps, and is judged by the second half (where there are two); it
is judged besides by what all other traces of the same device teach.  The table shows the predictor that comes with
stepsight (a roofline, where none does), the same calibrated on traces, and one trained on the traces alone.
Ops that hold no sizes (traces without shapes) are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import Hardware, find_hardware
from stepsight.dataset.hardware.physics import roofline_seconds
from stepsight.dataset.imported.import_ranks import import_ranks
from stepsight.dataset.imported.rank_graph import OP, RankGraph
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tables.device_names import device_name
from stepsight.experiments.reports.text_table import Number, table
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.kernels.traced_corrections import fit_traced, log_factors
from stepsight.training.predictor.prediction import asked_predictor

Array = NDArray[np.float64]
Traces = dict[str, list[RankGraph]]
FEWEST = 8  # fewest distinct ops for training, and for judging


@dataclass(frozen=True, slots=True)
class Figure:
    """Errors on held-out traced ops, in percent.

    Attributes:
        device: Which.
        judged_on: The trace.
        taught_by: ``its other steps`` or ``other traces``.
        ops: Distinct signatures judged; ``new`` of them taught nothing under the same signature either.
        new: See ``ops``.
        shipped, calibrated, trained: Median absolute error, by what predicts.
        total_shipped, total_calibrated, total_trained: Error of the time of all these ops together, with its sign.
    """

    device: str
    judged_on: str
    taught_by: str
    ops: int
    new: int
    shipped: float
    calibrated: float
    trained: float
    total_shipped: float
    total_calibrated: float
    total_trained: float


def study(paths: Sequence[Path]) -> list[Figure]:
    """Judge every trace by its own other steps and by other traces of its device."""
    by_device: dict[str, Traces] = {}
    for path in paths:
        graphs = list(import_ranks([path]).graphs)
        name = device_name(graphs[0].device_name)
        if graphs[0].device == "cuda" and find_hardware(name) is not None:
            by_device.setdefault(name, {})[path.name.split(".")[0]] = graphs
    figures = []
    for name, traces in by_device.items():
        hardware = find_hardware(name)
        assert hardware is not None
        for trace, graphs in traces.items():
            steps = min(len(graph.steps_s) for graph in graphs)
            if steps >= 2:
                first, second = (range(steps // 2), range(steps // 2, steps))
                taught, judged = _times(graphs, first, hardware), _times(graphs, second, hardware)
                figures += _figure(hardware, trace, "its other steps", taught, judged)
            others = [graph for other, some in traces.items() if other != trace for graph in some]
            figures += _figure(
                hardware, trace, "other traces", _times(others, None, hardware), _times(graphs, None, hardware)
            )
    return figures


def _times(graphs: Sequence[RankGraph], steps: range | None, hardware: Hardware) -> dict[Op, list[float]]:
    """Seconds of each op of known sizes, of some steps (None: of all), by call: the kernels of a call are one op."""
    found: dict[Op, list[float]] = {}
    for graph in graphs:
        nodes = graph.nodes
        works = [work if isinstance(work, Op) and _sized(work, hardware) else None for work in graph.works]
        sized = np.array([*(work is not None for work in works), False])
        chosen = np.flatnonzero((nodes["kind"] == OP) & sized[nodes["work"]] & (nodes["call"] >= 0))
        if steps is not None:
            chosen = chosen[(nodes["step"][chosen] >= steps.start) & (nodes["step"][chosen] < steps.stop)]
        keys = nodes["work"][chosen] * (int(nodes["call"].max(initial=0)) + 1) + nodes["call"][chosen]
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        seconds = np.bincount(inverse, graph.duration_s[chosen], minlength=len(first))
        for node, spent in zip(chosen[first].tolist(), seconds.tolist(), strict=True):
            work = works[nodes["work"][node]]
            if work is not None and spent > 0:
                found.setdefault(work, []).append(spent)
    return found


def _sized(op: Op, hardware: Hardware) -> bool:
    return op.kind != "opaque" and min(op.dims, default=0) > 0 and op.dtype in hardware.peak_flops


def _figure(
    hardware: Hardware, trace: str, by: str, taught: dict[Op, list[float]], judged: dict[Op, list[float]]
) -> list[Figure]:
    if min(len(taught), len(judged)) < FEWEST:
        return []
    known, asked = list(taught), list(judged)
    seconds = np.array([np.median(taught[op]) for op in known])
    truth, counts = (np.array([f(judged[op]) for op in asked]) for f in (np.median, len))
    shipped = _shipped(hardware, asked)
    kinds, _ = fit_traced(known, _shipped(hardware, known), seconds, hardware)
    calibrated = shipped * np.exp(log_factors(kinds, asked, hardware))
    trained = fit_kernels(known, 1, seconds, hardware, judged=False).seconds(asked, 1)
    answers = [shipped, calibrated, trained]
    middles = [100 * float(np.median(np.abs(answer / truth - 1))) for answer in answers]
    totals = [100 * float((answer * counts).sum() / (truth * counts).sum() - 1) for answer in answers]
    new = sum(op not in taught for op in asked)
    return [Figure(hardware.name, trace, by, len(asked), new, *middles, *totals)]


def _shipped(hardware: Hardware, ops: Sequence[Op]) -> Array:
    predictor = asked_predictor(hardware.name, None)
    if predictor is None:
        return np.array([roofline_seconds(op, hardware) for op in ops])
    return predictor.kernel.seconds(ops, 1)


def study_text(figures: Sequence[Figure]) -> str:
    """A row for each figure."""
    header = ["device", "judged on", "taught by", "ops", "new", "median: shipped %", "calibrated %", "trained %",
              "total: shipped %", "calibrated %", "trained %"]  # fmt: skip
    cells = []
    for each in figures:
        numbers = [Number(value) for value in list(asdict(each).values())[5:]]
        cells.append([each.device, each.judged_on[:36], each.taught_by, each.ops, each.new, *numbers])
    return table(header, cells)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="stepsight experiment traced", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("traces", nargs="+", type=Path, help="Kineto traces, one for each rank that counts as a run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        figures = study(options.traces)
    except StepsightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps([asdict(each) for each in figures]) if options.json else study_text(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
