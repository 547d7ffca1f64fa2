"""``TraceGraphs``: traced runs as a PyTorch Geometric dataset."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scipy.cluster.hierarchy import DisjointSet
from torch_geometric.data import InMemoryDataset

from stepsight.dataset.base.errors import StepsightError, TraceError
from stepsight.dataset.graph.graph_table import EDGE_NUMBERS, GraphTable
from stepsight.dataset.trace_graphs.graph_dataset import read_index

SPLITS = ("run", "model", "strategy", "scale", "hardware")


class TraceGraphs(InMemoryDataset):  # type: ignore[misc]
    """Graphs of traced steps and segments, one ``HeteroData`` each.

    ``stepsight dataset`` makes the folder.  A step's graph holds every kernel, collective and call of the host; a
    segment's graph (a forward, a backward, an optimizer) holds one node for each op and collective, as predictions see
    them.  A graph has node types ``op``, ``collective``, ``host`` and ``stream``.  The first three have ``x`` (columns:
    ``feature_names``), ``y`` (natural logarithm of seconds alone and in context, NaN where unknown), ``kind`` (index of
    ``kinds``), ``node`` (place in the rank's graph or in the segment's order of issue, -1: a peer's collective),
    ``signature`` (exact sizes), ``share``, ``launch`` (seconds of the host, and calls recorded in them) and ``beside``
    (seconds of an op in which a collective ran).  Ops that a host runs itself have ``call`` (index of the graph's
    ``calls``) and ``recorded`` (calls that a profiler recorded within them).  Each edge
    has ``edge_attr`` (columns: ``edge_feature_names``).  Metadata are attributes of a graph: ``run``, ``role``
    (``heldout``: it must never train), ``source`` (number of the run), ``rank``, ``step``, ``scope`` (``step`` or
    ``segment``), ``segment``, ``streams``, ``busy``, ``micro_batch``, ``stage``, ``wait_s``, ``span_s``, ``events``
    (recorded in a step), ``observed`` (an execution-trace observer slowed it), ``timed_s`` (a step without a profiler,
    0: not timed), ``calls``, ``model``, ``strategy``, ``scale``, ``hardware``, ``group`` (of the trace) and ``digest``
    (of what was measured).

    A dataset is Parquet and JSON: opening it unpickles nothing and runs no code that the folder holds.

    Args:
        root: Folder of the dataset.
        transform, pre_transform, pre_filter: As for every dataset of PyTorch Geometric; the folder is not changed.
        scope: ``step`` or ``segment`` for graphs of one scope; None for both.

    Raises:
        TraceError: If the folder is no dataset.
    """

    def __init__(
        self,
        root: str | Path,
        transform: Callable[..., Any] | None = None,
        pre_transform: Callable[..., Any] | None = None,
        pre_filter: Callable[..., Any] | None = None,
        scope: str | None = None,
    ) -> None:
        if scope not in (None, "step", "segment"):
            raise StepsightError(f"scope must be step, segment or None, got {scope!r:.80}")
        self._index = read_index(Path(root))
        table = GraphTable.load(Path(root))
        if pre_filter is not None:
            table = table.select([place for place in range(len(table)) if pre_filter(table.hetero_data(place))])
        if not len(table):
            raise TraceError(f"a dataset must hold at least one traced step, got none in {root}")
        super().__init__(str(root), transform, pre_transform, pre_filter, log=False)
        self._table = table
        if pre_transform is None:
            self._data, self.slices = table.collated()
        else:
            graphs = [pre_transform(table.hetero_data(place)) for place in range(len(table))]
            self._data, self.slices = self.collate(graphs)
        if scope is not None:
            self._indices = [place for place, each in enumerate(self.values("scope")) if each == scope]

    @property
    def table(self) -> GraphTable:
        """The graphs as arrays, without PyTorch and without transforms."""
        return self._table.select(list(self.indices()))

    @property
    def version(self) -> str:
        """Digest of the traces and of the meaning of features."""
        return str(self._index["version"])

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Columns of ``x`` of ops, collectives and host calls."""
        return tuple(self._index["features"])

    @property
    def edge_feature_names(self) -> tuple[str, ...]:
        """Columns of ``edge_attr``."""
        return EDGE_NUMBERS

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of kinds by the number in ``kind``."""
        return tuple(self._index["kinds"])

    def values(self, name: str) -> list[Any]:
        """An attribute of every graph, such as ``run``."""
        every = self._table.about[name]
        return [every[place] for place in self.indices()]

    def split(
        self, by: str = "run", fractions: Sequence[float] = (0.8, 0.1, 0.1), seed: int = 0
    ) -> tuple[TraceGraphs, ...]:
        """Split into parts such that no two share a run, model, strategy, scale or hardware.

        Whatever ``by`` is, graphs of one trace are never in two parts, even if it was imported twice; nor are graphs
        with the same ops and the same times (``digest``), as two excerpts of one trace hold.  Raises ``StepsightError``
        if there are fewer different values than parts.

        Args:
            by: What parts must not share: ``run``, ``model``, ``strategy``, ``scale`` or ``hardware``.
            fractions: Of the graphs, about; they add up to 1.
            seed: Of the shuffle.
        """
        if by not in SPLITS:
            raise StepsightError(f"by must be one of {', '.join(SPLITS)}, got {by!r:.80}")
        if abs(sum(fractions) - 1.0) > 1e-6 or min(fractions) <= 0:
            raise StepsightError(f"fractions must be positive and add up to 1, got {tuple(fractions)}")
        groups, digests = self.values("group"), self.values("digest")
        keys = _joined([str(each) for each in self.values(by)], groups, [digest or None for digest in digests])
        distinct = sorted(set(keys))
        if len(distinct) < len(fractions):
            rule = f"a split into {len(fractions)} parts by {by} needs as many different ones"
            raise StepsightError(f"{rule}, got {len(distinct)}")
        random.Random(seed).shuffle(distinct)
        counts = {key: keys.count(key) for key in distinct}
        chosen: list[list[str]] = [[] for _ in fractions]
        lack = lambda part: (bool(chosen[part]), sum(counts[key] for key in chosen[part]) - fractions[part] * len(keys))
        for key in sorted(distinct, key=lambda key: -counts[key]):  # the largest first, to the part that lacks most
            chosen[min(range(len(chosen)), key=lack)].append(key)
        return tuple(self[[place for place, key in enumerate(keys) if key in part]] for part in chosen)


def _joined(keys: list[str], *groups: Sequence[str | None]) -> list[str]:
    """Merge keys such that graphs of one group share one key (None: in no group)."""
    joined = DisjointSet(keys)
    for labels in groups:
        first: dict[str, str] = {}
        for key, label in zip(keys, labels, strict=True):
            if label is not None:
                joined.merge(key, first.setdefault(label, key))
    name = {key: min(subset) for subset in joined.subsets() for key in subset}
    return [name[key] for key in keys]
