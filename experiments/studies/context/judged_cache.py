"""Errors of models that were judged before: a benchmark that was stopped goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.dataset.base.files import digest, digest_files, read_json, write_json
from stepsight.experiments.studies.context.context_coverage import Residuals
from stepsight.experiments.studies.context.context_task import ContextTask
from stepsight.training.context import fit_typed

Array = NDArray[np.float64]
DECIMALS = 5  # of residuals that are kept


@dataclass(frozen=True)
class Judged:
    """Errors of a model on the graphs that judge.

    Attributes:
        logs: Mean |log| error of each graph, ``(graphs,)``.
        relative: Mean relative error, same shape.
        off: By node and by graph.
        seconds: CPU time of training.
        answer_s: CPU time of the first answer, on one graph.
    """

    logs: Array
    relative: Array
    off: Residuals
    seconds: float
    answer_s: float = 0.0


class JudgedCache:
    """Keeps what was judged in a folder, by the task's data, the code of the models, the model, and the split.

    Args:
        folder: None: nothing is kept.
        task: What is judged.
    """

    def __init__(self, folder: Path | None, task: ContextTask) -> None:
        self._folder = folder
        self._task = digest("with answers", task.name, *_contents(task), _code()) if folder is not None else ""

    def get(self, key: Sequence[Any], judge: Callable[[], Judged]) -> Judged:
        """What was judged before, or else what ``judge`` says now.

        Args:
            key: Model, seed, and places that teach and that judge.
            judge: Trains and judges.
        """
        if self._folder is None:
            return judge()
        path = self._folder / f"{digest(self._task, *map(str, key))}.json"
        if path.exists():
            known = read_json(path)
            ends = np.cumsum(known["counts"])[:-1]
            off = Residuals(np.split(np.array(known["nodes"], dtype=float), ends), np.array(known["totals"]))
            times = float(known["seconds"]), float(known["answer_s"])
            return Judged(np.array(known["logs"]), np.array(known["relative"]), off, *times)
        judged = judge()
        nodes = np.concatenate([*judged.off.nodes, np.zeros(0)]).round(DECIMALS).tolist()
        kept = {"logs": judged.logs.tolist(), "relative": judged.relative.tolist(), "seconds": judged.seconds}
        kept["answer_s"] = judged.answer_s
        counts = [len(each) for each in judged.off.nodes]
        kept |= {"nodes": nodes, "counts": counts, "totals": judged.off.totals.tolist()}
        write_json(path, kept, indent=None)
        return judged


def _contents(task: ContextTask) -> list[bytes | str]:
    found: list[bytes | str] = [*task.groups]
    for graph in task.graphs:
        found += [part for store in graph.stores for part in _arrays(store, graph)]
    return found


def _arrays(store: Any, graph: HeteroData) -> list[bytes | str]:
    named = sorted((str(name), value) for name, value in store.items() if hasattr(value, "numpy"))
    return [str(getattr(store, "_key", "")), *(p for name, value in named for p in (name, value.numpy().tobytes()))]


def _code() -> str:
    """Digest of the source of all models."""
    own = [*sorted(Path(__file__).parent.glob("*_models.py")), Path(__file__).with_name("neighbour_features.py")]
    own.append(Path(__file__).with_name("regions_task.py"))
    fitting = Path(fit_typed.__file__)
    networks = [fitting.parents[2] / "gnn" / name for name in ("typed_network.py", "concurrency_network.py")]
    return digest_files([*own, fitting, *networks])
