"""A task's table for people, and as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stepsight.experiments.reports.text_table import Number, table
from stepsight.experiments.studies.context.benchmark import Outcome

MOST_GROUPS = 60  # printed; JSON has all


def outcome_text(outcome: Outcome) -> str:
    """A task's table."""
    cells = [
        [
            row.model, Number(100 * row.error), Number(100 * row.seed_error), Number(row.mape), Number(row.worst),
            Number(100 * row.difference), Number(100 * row.difference_error), Number(row.seconds),
            Number(row.answer_ms),
            *map(_percent, (row.coverage, row.half_width, row.node_coverage, row.node_half_width)),
        ]
        for row in outcome.rows
    ]  # fmt: skip
    against = outcome.best_other or "the best other"
    header = [
        "model",
        "mean |log| error %",
        "± over seeds",
        "MAPE %",
        "largest %",
        "against best other",
        "±",
        "training, CPU s",
    ]
    header += ["answer ms", "coverage %", "half width %", "nodes' coverage %", "half width %"]
    floor = "" if outcome.floor is None else f"; two measurements differ by {100 * outcome.floor:.1f} %"
    verdict = "won" if outcome.won else "not won"
    chosen = ", ".join(f"{name} ({count})" for name, count in outcome.ships.items())
    lines = [
        f"{outcome.task}: {outcome.about}",
        f"{outcome.graphs} graphs, {outcome.groups} groups that judge, {outcome.seeds} seeds{floor}",
        table(header, cells),
        f"against best other: points by which the error exceeds that of {against}, paired, and its standard error over "
        "groups; answer: first one, on one graph, CPU time",
        "coverage: part of the graphs that judge, and of the time in their nodes, that lies in intervals of 90 % from "
        "groups held back",
        f"{verdict}: {outcome.gnn} against {against}: {100 * outcome.difference:+.1f} "
        f"± {100 * outcome.difference_error:.1f} points; won takes two standard errors",
        f"held-back groups choose (folds): {chosen}",
        *outcome.notes,
    ]
    if outcome.by_group:
        groups = [[g.group, g.graphs, Number(100 * g.gnn), Number(100 * g.best_other)] for g in outcome.by_group]
        lines += ["", table(["group", "graphs", f"{outcome.gnn} %", f"{against} %"], groups[:MOST_GROUPS])]
    return "\n".join(lines)


def _percent(value: float | None) -> Number | str:
    return "" if value is None else Number(100 * value)


def outcome_dict(outcome: Outcome) -> dict[str, Any]:
    """For JSON."""
    return asdict(outcome)
