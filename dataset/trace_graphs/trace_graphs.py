"""``TraceGraphs``: traced runs as a PyTorch Geometric dataset, and the index of its runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import HeteroData, InMemoryDataset

from stepsight.dataset.base.errors import StepsightError, TraceError
from stepsight.dataset.base.files import digest, digest_files, read_json
from stepsight.dataset.graph.program import Program
from stepsight.dataset.graph.rendezvous import meetings
from stepsight.dataset.job.job import Job
from stepsight.dataset.runs.run_manifest import RunManifest
from stepsight.dataset.trace_graphs.graph_parts import RankParts
from stepsight.dataset.trace_graphs.graph_schema import DTYPES, WORK_TYPES, GraphPart, kind_names
from stepsight.dataset.trace_graphs.hetero_data import collated, read_tables, to_hetero_data, write_tables
from stepsight.dataset.trace_graphs.segment_parts import SegmentParts, read_segments

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
    (recorded in a step), ``timed_s`` (a step without a profiler, 0: not timed), ``calls``, ``model``,
    ``strategy``, ``scale``, ``hardware``, ``group`` (of the trace) and ``digest`` (of what was measured).

    Args:
        root: Folder of the dataset.
        transform, pre_transform, pre_filter: As for every dataset of PyTorch Geometric.
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
        super().__init__(str(root), transform, pre_transform, pre_filter, log=False)
        self.load(self.processed_paths[0], data_cls=HeteroData)
        if scope is not None:
            self._indices = [place for place, each in enumerate(self.values("scope")) if each == scope]

    @property
    def raw_file_names(self) -> list[str]:
        """Files that must exist."""
        return [INDEX]

    @property
    def processed_file_names(self) -> list[str]:
        """Files that ``process`` writes: another version of the traces has another file."""
        return [f"graphs-{self.version}.pt"]

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
        return tuple(self._index["edge_features"])

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of kinds by the number in ``kind``."""
        return tuple(self._index["kinds"])

    def values(self, name: str) -> list[Any]:
        """An attribute of every graph, such as ``run``."""
        stored = self._data[name]
        if self.slices is None:  # a single graph is stored unchanged
            return [stored]
        every = stored.tolist() if isinstance(stored, torch.Tensor) else stored
        return [every[place] for place in self.indices()]

    def column(self, key: Any, name: str, places: Sequence[int]) -> tuple[Any, Any]:
        """A tensor of several graphs as one array, and the index in ``places`` of each of its rows.

        Args:
            key: Type of node or edge.
            name: Of the tensor; of ``edge_index``, each column counts as a row.
            places: Which graphs of this dataset.
        """
        values = self._data[key][name].numpy()
        length = values.shape[-1] if name == "edge_index" else len(values)
        bounds = np.array([0, length]) if self.slices is None else self.slices[key][name].numpy()
        stored = np.array(list(self.indices()), dtype=np.int64)[np.asarray(places, dtype=np.int64)]
        counts = bounds[stored + 1] - bounds[stored]
        owner = np.repeat(np.arange(len(stored)), counts)
        rows = np.arange(len(owner)) + np.repeat(bounds[stored] - (np.cumsum(counts) - counts), counts)
        return (values[:, rows] if name == "edge_index" else values[rows]), owner

    def download(self) -> None:
        """Raise an error: ``stepsight dataset`` makes the raw folder.

        Raises:
            TraceError: Always.
        """
        raise TraceError(f"a dataset must hold raw/{INDEX}, got none in {self.root}: `stepsight dataset` makes one")

    def process(self) -> None:
        """Split the stored graphs into steps and segments."""
        parts = [part for run in self._index["runs"] for part in run_parts(Path(self.raw_dir) / run["folder"], run)]
        if self.pre_filter is None and self.pre_transform is None:
            _check_some(parts, self.root)
            data, slices = collated(parts)
            torch.save((data.to_dict(), slices, HeteroData), self.processed_paths[0])
            return
        graphs = [to_hetero_data(part, about) for about, part in parts]
        if self.pre_filter is not None:
            graphs = [graph for graph in graphs if self.pre_filter(graph)]
        if self.pre_transform is not None:
            graphs = [self.pre_transform(graph) for graph in graphs]
        _check_some(graphs, self.root)
        self.save(graphs, self.processed_paths[0])

    def to_parquet(self, folder: str | Path) -> None:
        """Write the graphs as Parquet tables, for tools without PyTorch; ``from_parquet`` reads them."""
        write_tables([self[place] for place in range(len(self))], Path(folder))

    @staticmethod
    def from_parquet(folder: str | Path) -> list[HeteroData]:
        """Read the graphs that ``to_parquet`` wrote.

        Raises:
            TraceError: If the folder holds no such tables.
        """
        return read_tables(Path(folder))

    def split(
        self, by: str = "run", fractions: Sequence[float] = (0.8, 0.1, 0.1), seed: int = 0
    ) -> tuple[TraceGraphs, ...]:
        """Split into parts such that no two share a run, model, strategy, scale or hardware.

        Whatever ``by`` is, graphs of one trace are never in two parts, even if it was imported twice; nor are graphs
        with the same ops and the same times (``digest``), as two excerpts of one trace hold.

        Args:
            by: What parts must not share: ``run``, ``model``, ``strategy``, ``scale`` or ``hardware``.
            fractions: Of the graphs, about; they add up to 1.
            seed: Of the shuffle.

        Raises:
            StepsightError: If ``by`` is unknown, or there are fewer different values than parts.
        """
        if by not in SPLITS:
            raise StepsightError(f"by must be one of {', '.join(SPLITS)}, got {by!r:.80}")
        if abs(sum(fractions) - 1.0) > 1e-6 or min(fractions) <= 0:
            raise StepsightError(f"fractions must be positive and add up to 1, got {tuple(fractions)}")
        groups, digests = self.values("group"), self.values("digest")
        keys = _joined([str(each) for each in self.values(by)], groups, [digest or None for digest in digests])
        distinct = sorted(set(keys))
        if len(distinct) < len(fractions):
            raise StepsightError(
                f"a split into {len(fractions)} parts by {by} needs as many different ones, got {len(distinct)}"
            )
        random.Random(seed).shuffle(distinct)
        counts = {key: keys.count(key) for key in distinct}
        chosen: list[list[str]] = [[] for _ in fractions]
        for key in sorted(distinct, key=lambda key: -counts[key]):  # the largest first, to the part that lacks most
            missing = [
                (bool(part), -(fraction * len(keys) - sum(counts[each] for each in part)))
                for part, fraction in zip(chosen, fractions, strict=True)
            ]
            chosen[min(range(len(chosen)), key=missing.__getitem__)].append(key)
        return tuple(self[[place for place, key in enumerate(keys) if key in part]] for part in chosen)


def _check_some(graphs: Sequence[Any], root: str) -> None:
    if not graphs:
        raise TraceError(f"a dataset must hold at least one traced step, got none in {root}")


def _joined(keys: list[str], *groups: Sequence[str | None]) -> list[str]:
    """Merge keys such that graphs of one group share one key (None: in no group)."""
    parent = {key: key for key in keys}

    def root(key: str) -> str:
        while parent[key] != key:
            key = parent[key]
        return key

    for labels in groups:
        first: dict[str, str] = {}
        for key, label in zip(keys, labels, strict=True):
            if label is not None:
                one, other = root(key), root(first.setdefault(label, key))
                parent[max(one, other)] = min(one, other)
    return [root(key) for key in keys]


_LEAST_TOLD = 8  # least number of nodes that identifies a graph
INDEX = "runs.json"
SCOPES = ("step", "segment")
FORM = 4  # version of features and relations: changing it makes every dataset a new version


def describe_run(name: str, job: Job | None, graphs: Sequence[Program], timed_s: float = 0.0) -> dict[str, Any]:
    """Metadata of a run, which splits use. Without a job, model and strategy are derived from its ops.

    ``timed_s``: a step without a profiler; 0 if not timed.
    """
    first = graphs[0]
    model, strategy = _of_graphs(graphs) if job is None else _of_job(job)
    group = digest(*(part.tobytes() for graph in graphs for part in (graph.start_s, graph.duration_s)))
    return {
        "run": name,
        "model": model,
        "strategy": strategy,
        "scale": str(first.world_size),
        "hardware": first.device_name or first.device,
        "group": group,
        "timed_s": timed_s,
    }


def _of_graphs(graphs: Sequence[Program]) -> tuple[str, str]:
    kinds = sorted({work.kind for work in graphs[0].works})
    groups = sorted({str(ranks or name) for name, ranks in graphs[0].groups})
    return digest(*kinds, *sorted(graphs[0].names)), digest(str(graphs[0].world_size), *groups)


def _of_job(job: Job) -> tuple[str, str]:
    tables = job.to_dict()
    model = job.model.name or digest(str(sorted(tables["model"].items())))
    return model, digest(str(sorted(tables["parallel"].items())))


def describe_own_run(run: RunManifest) -> dict[str, Any]:
    """Metadata of a run of the harness by its manifest, without its graphs."""
    model, strategy = _of_job(run.job)
    files = [run.folder / name for rank in sorted(run.traces) for name in sorted(run.traces[rank].values())]
    return {
        "run": run.name,
        "model": model,
        "strategy": strategy,
        "scale": str(run.world_size),
        "hardware": run.job.hardware_name,
        "group": digest_files(files),
        "timed_s": run.iteration_time_s if run.whole else 0.0,
    }


def read_index(root: Path) -> dict[str, Any]:
    """Index of a dataset.

    Raises:
        TraceError: If the folder holds none, or one of another form.
    """
    path = Path(root) / "raw" / INDEX
    try:
        index = read_json(path)
        if index["form"] != FORM:
            raise ValueError(f"form must be {FORM}, got {index['form']!r:.40}")
        if (
            tuple(index["kinds"]) != kind_names()
            or tuple(index["dtypes"]) != DTYPES
            or not all(isinstance(run["folder"], str) for run in index["runs"])
        ):
            raise ValueError("its kinds of ops are not those of this version")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{root} must be a dataset that `stepsight dataset` made: {error}") from None
    return dict(index)


def run_parts(folder: Path, run: dict[str, Any]) -> Iterator[tuple[dict[str, Any], GraphPart]]:
    """Metadata and parts of a stored run: every step and segment of every rank."""
    graphs = [Program.load(folder / stem) for stem in run["ranks"]]
    names = ("source", "run", "role", "model", "strategy", "scale", "hardware", "group", "timed_s")
    about = {name: run[name] for name in names}
    if graphs:
        met = meetings(graphs)[0]
        for place, graph in enumerate(graphs):
            for part in RankParts(graphs, place, met).parts():
                yield {**about, "rank": graph.rank, "digest": part_digest(part)}, part
    if run["segments"]:
        segments = read_segments(folder)
        for segment, part in zip(segments, SegmentParts(segments).parts(), strict=True):
            yield {**about, "rank": segment.rank, "digest": part_digest(part)}, part


def part_digest(part: GraphPart) -> str:
    """Digest of the nodes and their durations; empty for few nodes, which may be equal by chance."""
    if sum(len(part.kind[name]) for name in WORK_TYPES) < _LEAST_TOLD:
        return ""
    columns: list[Any] = [each[name] for name in WORK_TYPES for each in (part.kind, part.signature)]
    columns += [part.y[name][:, 1] for name in WORK_TYPES]
    return digest(*(np.ascontiguousarray(column).tobytes() for column in columns))
