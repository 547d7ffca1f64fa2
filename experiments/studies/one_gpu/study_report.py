"""Figures of the study as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepsight.experiments.reports.text_table import Number, table
from stepsight.training.predictor.prediction_views import seconds_text


def study_text(figures: Mapping[str, Any]) -> str:
    """Text of all tables, one variant after the other."""
    parts = [f"note: {note}" for note in figures["notes"]]
    for name, of in figures["variants"].items():
        parts.append(f"== {name}: {of['hardware']}, {of['num_training_ops']} ops taught ==")
        parts += [f"note: {note}" for note in of["notes"]]
        for section in (_ops, _steps, _memory, _stand_ins, _table, _curve):
            if text := section(of):
                parts.append(text)
    if figures["clocks"]:
        parts.append(_clocks(figures["clocks"]))
    parts.append(f"took {figures['seconds']:.0f} s here")
    return "\n\n".join(parts)


def _ops(of: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            sums["rows"],
            *(Number(sums[key]) for key in ("mape", "median", "max")),
            sums["long_rows"],
            _percent(sums.get("long_mape")),
        ]
        for name, sums in of["ops"].items()
    ]
    header = ["held-out ops", "rows", "MAPE %", "median %", "max %", "from 50 us", "MAPE %"]
    return table(header, rows) if rows else ""


def _steps(of: Mapping[str, Any]) -> str:
    rows = [
        [
            row["run"] + (" *" if row["launch_bound"] else ""),
            seconds_text(row["measured_s"]),
            Number(row["spread_percent"]),
            seconds_text(row["predicted_s"]),
            f"{seconds_text(row['low_s'])} to {seconds_text(row['high_s'])}",
            Number(row["error_percent"]),
            Number(100 * (row["predicted_without_gnn_s"] / row["measured_s"] - 1)),
        ]
        for row in of["steps"]
    ]
    if not rows:
        return ""
    sums = of["step_figures"]
    header = ["held-out steps (* launch-bound)", "measured", "spread %", "predicted", "interval", "error %", "no GNN %"]
    lines = [table(header, rows)]
    for name in ("all", "launch-bound", "others"):
        if name in sums:
            one = sums[name]
            lines.append(f"steps, {name} ({one['rows']}): MAPE {one['mape']:.1f} %, max {one['max']:.1f} %")
    lines.append(
        f"by regressors alone MAPE {sums['mape_without_gnn']:.1f} %; Spearman {sums['spearman']:.3f}, "
        f"{sums['coverage']:.0f} % of the runs lie in their intervals"
    )
    lines.append(
        f"ops in context: error {sums['op_error_regressor']:.1f} % by regressors alone, "
        + (
            f"{sums['op_error_with_gnn']:.1f} % with the {sums['gnn']}"
            if sums["gnn"]
            else "which no context model beat"
        )
    )
    return "\n".join(lines)


def _memory(of: Mapping[str, Any]) -> str:
    keys = ("predicted_bytes", "with_libraries_bytes")
    rows = [
        [
            row["run"],
            row["role"],
            *(Number(row[key] / 1e9, 3) for key in ("measured_bytes", *keys)),
            *(Number(_memory_error(row, key)) for key in keys),
        ]
        for row in of["memory"]
    ]
    if not rows:
        return "peak memory: not measured (a CPU counts none)"
    header = ["peak memory", "role", "measured GB", "predicted GB", "with libraries", "error %", "with libraries %"]
    lines = [table(header, rows)]
    for key, words in zip(keys, ("", " with what libraries hold in the smallest training run"), strict=True):
        off = [abs(_memory_error(row, key)) for row in of["memory"] if row["role"] == "heldout"]
        if off:
            mean = sum(off) / len(off)
            lines.append(f"peak memory of held-out runs{words}: mean error {mean:.1f} %, max {max(off):.1f} %")
    return "\n".join(lines)


def _memory_error(row: Mapping[str, Any], key: str) -> float:
    return float(100 * (row[key] / row["measured_bytes"] - 1))


def _stand_ins(of: Mapping[str, Any]) -> str:
    rows = [
        [row["run"], seconds_text(row["measured_s"]), seconds_text(row["predicted_s"]), Number(row["error_percent"])]
        for row in of["stand_ins"]
    ]
    return table(["stand-ins: one rank of", "measured", "predicted", "error %"], rows) if rows else ""


def _table(of: Mapping[str, Any]) -> str:
    rows = [
        [row["ops"], row["size"], row["rows"], row["same"], *(Number(row[key], 2) for key in ("p10", "median", "p90"))]
        for row in of["table"]
    ]
    header = ["ours over the public table", "its time", "rows", "measured by us", "p10", "median", "p90"]
    return table(header, rows) if rows else "public table: none of this device at hand"


def _curve(of: Mapping[str, Any]) -> str:
    keys = ("op_mape", "long_op_mape", "step_mape")
    rows = [[row["ops"], Number(row["minutes"], 2), *(_percent(row.get(key)) for key in keys)] for row in of["curve"]]
    header = ["ops that teach", "minutes", "held-out ops, MAPE %", "from 50 us", "held-out steps, no GNN, MAPE %"]
    return table(header, rows)


def _clocks(clocks: Mapping[str, Mapping[str, Any]]) -> str:
    """Values recorded while ops were measured: median, and in brackets the minimum."""
    kinds = sorted({kind for said in clocks.values() for kind, value in said.items() if _is_noted(value)})
    rows = []
    for name, said in clocks.items():
        noted = [said.get(kind, {}) for kind in kinds]
        cells = [f"{value['median']:g} ({value['least']:g})" if _is_noted(value) else "-" for value in noted]
        reasons = ", ".join(f"{reason} {100 * part:.0f} %" for reason, part in said.get("reasons", {}).items())
        rows.append([name, *cells, reasons])
    return table(["clocks of the device during", *kinds, "held down by"], rows)


def _is_noted(value: Any) -> bool:
    return isinstance(value, dict) and {"median", "least"} <= set(value)


def _percent(value: float | None) -> object:
    return "-" if value is None else Number(value)
