"""A table of corrections in context: a factor for each kind and phase, the simplest model that knows context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.base.files import read_json, write_json
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.gnn.inference import CONFIG, MOST_BOUND, ContextWeights

Array = NDArray[np.float64]

SCHEMA = 1
TABLE = "context_table.json"
Cell = tuple[str, str]  # kind of an op or collective, and label of its program; "" stands for all


@dataclass(frozen=True)
class ContextTable:
    """Log of seconds in context over seconds alone, by kind and phase.

    A node's correction is the sum of three entries: that of all nodes, that of its kind, and that of its kind in its
    phase. Entries that no run taught are 0.

    Attributes:
        bound: Largest absolute log-correction.
        logs: By kind and label; ``("", "")``: all nodes, ``(kind, "")``: all phases of a kind.
    """

    bound: float
    logs: Mapping[Cell, float]

    name = "table by kind and phase"

    def log_correction(self, program: Program, alone: Array, hardware: Hardware, busy: int) -> Array:
        """Log of seconds in context over seconds alone for every node, ``(len(program),)``, within ``+-bound``."""
        logs, label = self.logs, program.label
        usual = logs.get(("", ""), 0.0)
        own = {
            kind: usual + logs.get((kind, ""), 0.0) + logs.get((kind, label), 0.0)
            for kind in {node.work.kind for node in program.nodes}
        }
        return np.clip([own[node.work.kind] for node in program.nodes], -self.bound, self.bound)

    def save(self, folder: Path) -> None:
        """Write ``context_table.json`` into a predictor's folder."""
        rows = [[*cell, value] for cell, value in sorted(self.logs.items())]
        write_json(folder / TABLE, {"schema": SCHEMA, "bound": self.bound, "logs": rows})

    @classmethod
    def load(cls, folder: Path) -> ContextTable:
        """Read what ``save`` wrote.

        Raises:
            PredictorError: If the file is broken.
        """
        path = folder / TABLE
        try:
            return _checked(read_json(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PredictorError(f"{path} must be what Predictor.save wrote, got {error}") from None


Context = ContextWeights | ContextTable


def load_context(folder: Path) -> Context | None:
    """The context model of a predictor's folder, None if it has none.

    Raises:
        PredictorError: If its files are broken, or there are two models.
    """
    network, table = (folder / CONFIG).exists(), (folder / TABLE).exists()
    if network and table:
        raise PredictorError(f"a predictor has one context model, got {CONFIG} and {TABLE} in {folder}")
    if table:
        return ContextTable.load(folder)
    return ContextWeights.load(folder) if network else None


def _checked(tree: dict[str, Any]) -> ContextTable:
    if tree["schema"] != SCHEMA:
        raise ValueError(f"schema must be {SCHEMA}, got {tree['schema']!r:.40}")
    bound = tree["bound"]
    if type(bound) not in (int, float) or not 0 < bound <= MOST_BOUND:
        raise ValueError(f"bound must be from 0 to {MOST_BOUND}, got {bound!r:.40}")
    logs = {(str(kind), str(label)): value for kind, label, value in tree["logs"]}
    wrong = [value for value in logs.values() if type(value) not in (int, float) or not abs(value) <= MOST_BOUND]
    if wrong:
        raise ValueError(f"logs must be from -{MOST_BOUND} to {MOST_BOUND}, got {wrong[0]!r:.40}")
    return ContextTable(float(bound), {cell: float(value) for cell, value in logs.items()})
