"""Predictions beside measurements: held-out ops, peak memory, emulated ranks, and a public table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.files import read_json
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.event_file import read_event_file
from stepsight.dataset.runs.run_folder import read_collection
from stepsight.dataset.tables import Measurements
from stepsight.experiments.evaluation import error_metrics
from stepsight.simulator.memory import estimate_memory
from stepsight.training.fitting.own_table import LONG_S
from stepsight.training.measured.measured import HELDOUT
from stepsight.training.measured.stand_in_runs import stand_in_seconds
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]
MOST_ROWS = 4000  # of a public table, drawn by seed
SIZES_US = (0.0, 10.0, 20.0, 50.0, 200.0, 1000.0, float("inf"))  # classes of a table's times


def measured_ops(folders: Iterable[Path], *, heldout: bool) -> dict[Op, float]:
    """Seconds of ops alone: from the event files that judge, or from all others."""
    found: dict[Op, float] = {}
    for folder in folders:
        for path in read_collection(folder).events:
            if (path.stem == HELDOUT) == heldout:
                file = read_event_file(path)
                found |= {work: s for work, s in zip(file.works, file.seconds, strict=True) if isinstance(work, Op)}
    return found


def held_op_rows(predictor: Predictor, measured: dict[Op, float]) -> list[dict[str, Any]]:
    """One row for each op, with its predicted time alone."""
    ops = list(measured)
    predicted = predictor.kernel.seconds(ops, 1)
    return [
        {
            "op": str(op),
            "family": op.family,
            "dtype": op.dtype,
            "measured_s": measured[op],
            "predicted_s": float(seconds),
        }
        for op, seconds in zip(ops, predicted, strict=True)
    ]


def op_figures(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Errors in percent of all ops, of each family and of its dtypes, if it has several; see ``op_errors``."""
    groups: dict[str, list[dict[str, Any]]] = {"all": list(rows)} if rows else {}
    for row in sorted(rows, key=lambda row: (row["family"], row["dtype"])):
        groups.setdefault(row["family"], []).append(row)
    for row in sorted(rows, key=lambda row: (row["family"], row["dtype"])):
        if len({other["dtype"] for other in groups[row["family"]]}) > 1:
            groups.setdefault(f"{row['family']}/{row['dtype']}", []).append(row)
    return {name: op_errors(groups[name]) for name in ["all", *sorted(set(groups) - {"all"})] if name in groups}


def op_errors(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Number of rows, mean, median and largest error; number and mean of rows of at least ``LONG_S``."""
    whole, long = (
        error_metrics.errors([row["predicted_s"] for row in of], [row["measured_s"] for row in of])
        for of in (rows, [row for row in rows if row["measured_s"] >= LONG_S])
    )
    found = {"mape": whole.mape, "median": whole.median, "max": whole.max, "long_mape": long.mape}
    known = {name: value for name, value in found.items() if value is not None}
    return {"rows": whole.used, "long_rows": long.used, **known}


def memory_rows(collection: Path, hardware: Hardware) -> list[dict[str, Any]]:
    """Peak bytes of tensors of each measured run: the device's own count, and the estimate.

    Libraries allocate workspaces too, the same for each run: ``with_libraries_bytes`` adds what the smallest training
    run holds beyond its estimate.
    """
    endless = replace(hardware, memory_bytes=1e15)
    runs = [m for m in read_collection(collection).runs if m.peak_memory_bytes and m.stand_in is None]
    rows: list[dict[str, Any]] = [
        {
            "run": run.name,
            "role": run.role,
            "measured_bytes": float(max(run.peak_memory_bytes)),
            "predicted_bytes": estimate_memory(run.job, endless).stages[0].tensors,
        }
        for run in runs
    ]
    smallest = min(
        (row for row in rows if row["role"] == "train"), key=lambda row: row["predicted_bytes"], default=None
    )
    beside = max(0.0, smallest["measured_bytes"] - smallest["predicted_bytes"]) if smallest else 0.0
    return [{**row, "with_libraries_bytes": row["predicted_bytes"] + beside} for row in rows]


def stand_in_rows(collection: Path, predictor: Predictor) -> list[dict[str, Any]]:
    """Compare measured and predicted times of one rank of a large job with emulated communication."""
    rows = []
    for manifest in read_collection(collection).runs:
        if manifest.stand_in is not None:
            predicted = stand_in_seconds(manifest.job, manifest.stand_in, predictor.latency(manifest.job, alone=True))
            predicted *= predictor.calibration.factor(manifest.job)
            measured = manifest.iteration_time_s
            rows.append(
                {
                    "run": manifest.name,
                    "measured_s": measured,
                    "predicted_s": predicted,
                    "error_percent": 100 * (predicted / measured - 1),
                }
            )
    return rows


def agreement(
    predictor: Predictor, measured: dict[Op, float], table: Measurements, device: str, seed: int = 0
) -> list[dict[str, Any]]:
    """Our seconds over those of a public table for the same ops, by family, dtype and size.

    Ours are measured where an op was, else predicted; ops outside of what was measured are left out.  Rows of one op
    in the table count once, by their median.
    """
    found: dict[Op, list[float]] = {}
    for work, seconds, where in zip(table.works, table.seconds.tolist(), table.device, strict=True):
        if isinstance(work, Op) and where == device:
            found.setdefault(work, []).append(seconds)
    ops = [op for op in found if not predictor.kernel.unsupported(op)]
    if len(ops) > MOST_ROWS:
        chosen = np.random.default_rng(seed).permutation(len(ops))[:MOST_ROWS]
        ops = [op for at, op in enumerate(ops) if at in set(chosen.tolist())]
    if not ops:
        return []
    theirs = np.array([float(np.median(found[op])) for op in ops])
    ours = predictor.kernel.seconds(ops, 1)
    ours = np.array([measured.get(op, float(seconds)) for op, seconds in zip(ops, ours, strict=True)])
    kinds = np.array([f"{op.kind}/{op.dtype}" for op in ops])
    rows = []
    for kind in sorted(set(kinds.tolist())):
        for least, most in [(0.0, float("inf")), *pairwise(SIZES_US)]:
            at = (kinds == kind) & (theirs * 1e6 >= least) & (theirs * 1e6 < most)
            if at.any():
                same = sum(op in measured for op, held in zip(ops, at, strict=True) if held)
                rows.append(_ratios(kind, _words(least, most), ours[at] / theirs[at], same))
    return rows


def _words(least: float, most: float) -> str:
    if least == 0.0:
        return "all" if most == float("inf") else f"below {most:g} us"
    return f"{least:g} us and more" if most == float("inf") else f"{least:g} to {most:g} us"


def _ratios(kind: str, size: str, ratios: Array, same: int) -> dict[str, Any]:
    low, middle, high = np.percentile(ratios, (10, 50, 90)).tolist()
    return {"ops": kind, "size": size, "rows": len(ratios), "same": same, "p10": low, "median": middle, "p90": high}


def noted_clocks(folders: Iterable[Path]) -> dict[str, Any]:
    """Recorded clocks of the device while ops were measured, by event file; empty if none were recorded."""
    noted = {}
    for folder in folders:
        for path in read_collection(folder).events:
            if said := read_json(path).get("clocks"):
                noted[f"{folder.name}/{path.stem}"] = said
    return noted
