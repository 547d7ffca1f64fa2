"""Predictions beside measurements: held-out ops, peak memory and emulated ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.event_file import read_event_file
from stepsight.dataset.runs.run_folder import read_collection
from stepsight.experiments.evaluation import error_metrics
from stepsight.simulator.memory import estimate_memory
from stepsight.training.fitting.own_table import LONG_S
from stepsight.training.measured.measured import HELDOUT
from stepsight.training.measured.stand_in_runs import stand_in_seconds
from stepsight.training.predictor.predictor import Predictor


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
    predicted = predictor.kernel.seconds(list(measured), 1).tolist()
    return [
        {"op": str(op), "family": op.family, "dtype": op.dtype, "measured_s": seconds, "predicted_s": told}
        for (op, seconds), told in zip(measured.items(), predicted, strict=True)
    ]


def op_figures(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Errors in percent of all ops, of each family and of its dtypes, if it has several; see ``op_errors``."""
    groups = {"all": list(rows)} if rows else {}
    dtypes: dict[str, set[str]] = {}
    for row in rows:
        dtypes.setdefault(row["family"], set()).add(row["dtype"])
    for family, found in sorted(dtypes.items()):
        own = groups[family] = [row for row in rows if row["family"] == family]
        for dtype in sorted(found) if len(found) > 1 else ():
            groups[f"{family}/{dtype}"] = [row for row in own if row["dtype"] == dtype]
    return {name: op_errors(of) for name, of in groups.items()}


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
    endless, rows = replace(hardware, memory_bytes=1e15), []
    for run in read_collection(collection).runs:
        if run.peak_memory_bytes and run.stand_in is None:
            row: dict[str, Any] = {"run": run.name, "role": run.role}
            row["measured_bytes"] = float(max(run.peak_memory_bytes))
            row["predicted_bytes"] = estimate_memory(run.job, endless).stages[0].tensors
            rows.append(row)
    training = [row for row in rows if row["role"] == "train"]
    smallest = min(training, key=lambda row: row["predicted_bytes"], default=None)
    libraries = max(0.0, smallest["measured_bytes"] - smallest["predicted_bytes"]) if smallest else 0.0
    return [{**row, "with_libraries_bytes": row["predicted_bytes"] + libraries} for row in rows]


def stand_in_rows(collection: Path, predictor: Predictor) -> list[dict[str, Any]]:
    """Compare measured and predicted times of one rank of a large job with emulated communication."""
    rows = []
    for run in read_collection(collection).runs:
        if run.stand_in is not None:
            predicted = stand_in_seconds(run.job, run.stand_in, predictor.latency(run.job, alone=True))
            predicted *= predictor.calibration.factor(run.job)
            row = {"run": run.name, "measured_s": run.iteration_time_s, "predicted_s": predicted}
            rows.append({**row, "error_percent": 100 * (predicted / run.iteration_time_s - 1)})
    return rows
