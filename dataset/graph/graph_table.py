"""Graphs of a dataset as tables: of graphs, and of nodes and edges of each type; their columns and signatures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.bounded import parsing, read_numbers, read_parquet
from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.columns import NODE_KINDS, PHASES, Floats, Ints
from stepsight.dataset.graph.graph_files import write_columns
from stepsight.dataset.graph.relations import CONCURRENT
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, DTYPE_BYTES, OP_KINDS, Collective, Op

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData


Key = str | tuple[str, str, str]  # type of node or edge
Rows = dict[str, NDArray[Any]]

ABOUT: dict[str, type] = {
    "source": int, "run": str, "role": str, "model": str, "strategy": str, "scale": str, "hardware": str, "group": str,
    "digest": str, "rank": int, "scope": str, "segment": str, "step": int, "streams": list, "busy": int,
    "micro_batch": int, "stage": int, "wait_s": float, "span_s": float, "calls": list, "events": float,
    "timed_s": float, "observed": bool,
}  # fmt: skip


class GraphTable:
    """Many graphs; each is a selection of rows.

    Shapes: ``g`` graphs; ``k`` rows of a type.

    Attributes:
        about: By name, ``g`` values each: what ``ABOUT`` lists, as far as it is known.
        rows: By type, then by name.  All types have ``graph``, ``(k,)`` and ascending.  Nodes have ``x``
            ``(k, len(NUMBERS))``, of streams ``(k, 1)``: whether it is a device's; and all but streams ``y`` ``(k, 2)``
            (natural logarithms of seconds, NaN where unknown), ``kind`` (index of ``kind_names()``), ``node`` (place in
            the rank's graph or in the segment's order of issue, -1: a peer's), ``signature``
            ``(k, signature_width())``, ``share``, ``launch`` ``(k, 2)`` (host seconds from the launch before, and calls
            recorded in them), ``beside`` (seconds of an op in which a collective of its rank ran), ``call`` (index of
            the graph's ``calls``, -1: none) and ``recorded`` (calls that a profiler recorded within an op of the host).
            Edges have ``ends`` ``(k, 2)``, rows of their types within the graph, and ``edge_attr``
            ``(k, len(EDGE_NUMBERS))``.
    """

    def __init__(self, about: dict[str, list[Any]], rows: dict[Key, Rows]) -> None:
        self.about, self.rows = about, rows

    def __len__(self) -> int:
        return len(self.about["scope"])

    @cached_property
    def bounds(self) -> dict[Key, Ints]:
        """``(g + 1,)`` by type: where the rows of each graph begin."""
        every = np.arange(len(self) + 1)
        return {key: np.searchsorted(rows["graph"], every) for key, rows in self.rows.items()}

    def select(self, places: Sequence[int]) -> GraphTable:
        """Some graphs, in the order of ``places``."""
        chosen, found = np.asarray(places, dtype=np.int64), {}
        for key, rows in self.rows.items():
            first, counts = self.bounds[key][chosen], np.diff(self.bounds[key])[chosen]
            at = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
            found[key] = {name: values[at] for name, values in rows.items()}
            found[key]["graph"] = np.repeat(np.arange(len(chosen)), counts)
        return GraphTable({name: [values[place] for place in places] for name, values in self.about.items()}, found)

    @classmethod
    def joined(cls, tables: Iterable[GraphTable]) -> GraphTable:
        """The graphs of at least one table, one table after the other."""
        every = list(tables)
        first = np.cumsum([0, *(len(table) for table in every)]).tolist()
        found: dict[Key, Rows] = {}
        for key, rows in every[0].rows.items():
            found[key] = {name: np.concatenate([table.rows[key][name] for table in every]) for name in rows}
            owners = zip(every, first, strict=False)
            found[key]["graph"] = np.concatenate([table.rows[key]["graph"] + before for table, before in owners])
        return cls({name: [each for t in every for each in t.about[name]] for name in every[0].about}, found)

    def save(self, folder: Path) -> None:
        """Write ``graphs.parquet``, ``nodes.<type>.parquet`` and ``edges.<source>.<relation>.<target>.parquet``."""
        write_columns({name: self.about[name] for name in ABOUT}, folder / "graphs.parquet")
        for key, rows in self.rows.items():
            columns = {"graph": rows["graph"]}
            for name, labels in _labels(key).items():
                split = zip(labels, rows[name].reshape(-1, len(labels)).T, strict=True)
                columns |= {label: np.ascontiguousarray(values) for label, values in split}
            write_columns(columns, folder / _file(key))

    @classmethod
    def load(cls, folder: Path) -> GraphTable:
        """Read what ``save`` wrote; raises ``TraceError`` if it is not that."""
        with parsing(f"{folder} must hold the tables of a graph dataset", TraceError):
            listed = read_parquet(Path(folder) / "graphs.parquet").to_pydict()
            for name, kind in ABOUT.items():
                for value in listed[name]:
                    known = isinstance(value, (kind, int) if kind is float else kind)
                    if not known or (kind is list and not all(isinstance(each, str) for each in value)):
                        rule = f"each {name} of graphs.parquet must be a {kind.__name__}"
                        raise ValueError(f"{rule}, got {value!r:.40}")
            every: tuple[Key, ...] = (*NODE_KINDS, "stream", *edge_types())
            table = cls({name: listed[name] for name in ABOUT}, {key: _read(Path(folder), key) for key in every})
            for key, rows in table.rows.items():
                graph = rows["graph"]
                if len(graph) and (graph[0] < 0 or graph[-1] >= len(table) or (np.diff(graph) < 0).any()):
                    raise ValueError(f"graph must ascend from 0 to {len(table) - 1} in {_file(key)}")
            for end in edge_types():
                for ends, node in zip(table.rows[end]["ends"].T, (end[0], end[2]), strict=True):
                    counts = np.diff(table.bounds[node])[table.rows[end]["graph"]]
                    if (ends < 0).any() or (ends >= counts).any():
                        raise ValueError(f"edges must lead to nodes of their graph in {_file(end)}")
        return table

    def hetero_data(self, place: int) -> HeteroData:
        """One graph as PyTorch Geometric has it."""
        one = self.select([place])
        return one._tensors({name: values[0] for name, values in one.about.items()})

    def collated(self) -> tuple[HeteroData, dict[Any, Any] | None]:
        """What ``InMemoryDataset.collate`` makes of all graphs; of a single one as it is, and None."""
        import torch

        if len(self) == 1:
            return self.hetero_data(0), None
        told = self.about.items()
        data = self._tensors({name: torch.tensor(of) if isinstance(of[0], int | float) else of for name, of in told})
        bounds = {key: torch.from_numpy(each) for key, each in self.bounds.items()}
        slices: dict[Any, Any] = {key: dict.fromkeys(data[key].keys(), each) for key, each in bounds.items()}
        return data, slices | dict.fromkeys(self.about, torch.arange(len(self) + 1))

    def _tensors(self, about: dict[str, Any]) -> HeteroData:
        import torch
        from torch_geometric.data import HeteroData

        data = HeteroData()
        for key, rows in self.rows.items():
            for name, values in rows.items():
                if name == "ends":
                    data[key].edge_index = torch.from_numpy(np.ascontiguousarray(values.T))
                elif name != "graph":
                    data[key][name] = torch.from_numpy(values)
        for name, value in about.items():
            setattr(data, name, value)
        return data


def _file(key: Key) -> str:
    return f"nodes.{key}.parquet" if isinstance(key, str) else f"edges.{'.'.join(key)}.parquet"


def _labels(key: Key) -> dict[str, tuple[str, ...]]:
    """Columns of the file by the array that holds them."""
    if key == "stream":
        return {"x": ("is_device",)}
    if not isinstance(key, str):
        return {"ends": ("source", "target"), "edge_attr": EDGE_NUMBERS}
    signature = tuple(f"signature{place}" for place in range(signature_width()))
    wide = {"x": NUMBERS, "y": TARGETS, "signature": signature, "launch": ("launch_s", "launch_events")}
    return wide | {name: (name,) for name in ("kind", "node", "share", "beside", "call", "recorded")}


_FLOATS = dict.fromkeys(("x", "y", "edge_attr"), np.float32) | dict.fromkeys(("share", "launch", "beside"), np.float64)


def _read(folder: Path, key: Key) -> Rows:
    table = read_parquet(folder / _file(key))
    found: Rows = {"graph": read_numbers(table, "graph", np.int64)}
    for name, labels in _labels(key).items():
        values = np.zeros((table.num_rows, len(labels)), _FLOATS.get(name, int))
        for place, label in enumerate(labels):
            values[:, place] = read_numbers(table, label, values.dtype)
        if name != "y" and not np.isfinite(values).all():
            raise ValueError(f"{', '.join(labels)} must be known and finite throughout in {_file(key)}")
        found[name] = values if len(labels) > 1 or name == "x" else values[:, 0]
    return found


RENDEZVOUS = "rendezvous"
_MOST_DIMS = 7
WORK_TYPES = ("op", "collective")
DTYPES = tuple(DTYPE_BYTES)  # by the number in a signature

NUMBERS = (
    "log_flops", "log_bytes", *(f"log_dim{number}" for number in range(_MOST_DIMS)), "element_bytes", "log_blocks",
    "log_threads", "registers", "log_shared_bytes", "log_group_size", "ranks_per_node_share", "is_known", "is_peer",
    *(f"is_{phase}" for phase in PHASES),
)  # fmt: skip
TARGETS = ("log_seconds_alone", "log_seconds_in_context")
EDGE_NUMBERS = ("overlap_s", "log_bytes", "distance", "delay_s", "log_bytes_since")

_BETWEEN_WORKS = [(source, target) for source in WORK_TYPES for target in WORK_TYPES]
_PAIRS: dict[str, list[tuple[str, str]]] = {
    "data": _BETWEEN_WORKS,
    "stream_order": _BETWEEN_WORKS,
    "launch": [("host", "op"), ("host", "collective"), ("op", "collective")],
    "synchronisation": [*_BETWEEN_WORKS, ("op", "host"), ("collective", "host")],
    RENDEZVOUS: [("collective", "collective")],
    "host_order": [(source, target) for source in ("host", "op") for target in ("host", "op")],
    CONCURRENT: _BETWEEN_WORKS,
    "runs_on": [(kind, "stream") for kind in NODE_KINDS],
    "runs": [("stream", kind) for kind in NODE_KINDS],
}


def edge_types() -> list[tuple[str, str, str]]:
    """Every edge type of a graph of the dataset, in a fixed order; each graph has all of them, empty or not."""
    return [(source, relation, target) for relation, pairs in _PAIRS.items() for source, target in pairs]


def kind_names() -> tuple[str, ...]:
    """Names of kinds by the number in ``kind`` of a node: ops, collectives, and a call of the host."""
    ops = sorted(OP_KINDS.values(), key=lambda kind: kind.code)
    collectives = sorted(COLLECTIVE_KINDS.values(), key=lambda kind: kind.code)
    return (*(kind.name for kind in ops), *(kind.name for kind in collectives), "host")


def work_numbers(works: Sequence[Op | Collective]) -> Floats:
    """Numbers of each signature, and zeros in the last row for calls of the host."""
    rows = np.zeros((len(works) + 1, 2 + _MOST_DIMS + 1 + 2))
    for number, work in enumerate(works):
        if isinstance(work, Op):
            dims = [np.log1p(dim) for dim in work.dims[:_MOST_DIMS]]
            rows[number, : 2 + len(dims)] = [np.log1p(work.flops), np.log1p(work.num_bytes), *dims]
            rows[number, 2 + _MOST_DIMS] = DTYPE_BYTES[work.dtype]
        else:
            rows[number, 1] = np.log1p(work.num_bytes)
            rows[number, -2:] = np.log1p(work.group_size), work.ranks_per_node / work.group_size
    return rows


def signature_width() -> int:
    """Columns of ``signature``: the type and the dims of the kind of op with the most dims."""
    return 1 + max(_MOST_DIMS, *(len(kind.dim_names) for kind in OP_KINDS.values()))


def signatures(works: Sequence[Op | Collective]) -> Ints:
    """Exact sizes of each signature, ``(len(works) + 1, signature_width())``; -1 for unused columns.

    Of an op: the index of its type in ``DTYPES``, then its dims.  Of a collective: bytes, size of the group, and its
    ranks on each node.  The last row is for calls of the host.
    """
    rows = np.full((len(works) + 1, signature_width()), -1, dtype=np.int64)
    for number, work in enumerate(works):
        if isinstance(work, Op):
            values = [DTYPES.index(work.dtype), *work.dims]
        else:
            values = [work.num_bytes, work.group_size, work.ranks_per_node]
        rows[number, : len(values)] = values
    return rows


def work_of(kind: str, signature: Sequence[int]) -> Op | Collective:
    """The op or collective of a row of ``signatures``."""
    if kind in OP_KINDS:
        count = len(OP_KINDS[kind].dim_names)
        return Op(kind, tuple(signature[1 : 1 + count]), DTYPES[signature[0]])
    return Collective(kind, *signature[:3])
