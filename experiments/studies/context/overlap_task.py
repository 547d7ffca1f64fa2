"""Task *overlap*: kernels beside collectives and copies, in traces of GPUs; jobs held out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.imported.import_ranks import import_ranks
from stepsight.dataset.imported.rank_graph import OP, RankGraph
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.experiments.studies.context.beside import BESIDE, CLASSES, Beside, class_of
from stepsight.experiments.studies.context.context_task import ContextTask, Design
from stepsight.experiments.studies.context.network_models import concurrency_networks
from stepsight.experiments.studies.context.occupancy import Launch, Processors, held_ratio, processors_of, waves
from stepsight.experiments.studies.context.overlap_formulas import FORMULAS
from stepsight.experiments.studies.context.overlap_table import neighbour_table

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
ALONE, OVERLAPPED = 0.02, 0.1  # shares of a kernel's time: below, it runs alone; above, it is judged
FEWEST_ALONE, STEADY, CLOCK_S = 2, 1.25, 1e-6  # traces have whole microseconds
EPOCHS = 40
MOST_STEPS = 2  # of a rank that teach and judge
_NO_SIZES = (0.0, 0.0)
NEIGHBOURS = ("all_reduce", "all_gather", "reduce_scatter", "other collective", "copy")  # columns of ``mix``
_HARDWARE = (80, 108, 132, 304)  # processors; places from 1 tell the networks of the hardware
_PRESETS = {108: "a100-sxm-80gb", 132: "h100-sxm-80gb", 80: "v100-sxm-32gb"}  # by processors


@dataclass(frozen=True)
class Job:
    """Traces of a job's ranks.

    Attributes:
        name: Of its folder.
        ranks: Their graphs.
        graphs: What the task judges of them.
    """

    name: str
    ranks: list[RankGraph]
    graphs: list[HeteroData]


def overlap_jobs(folder: Path) -> list[Job]:
    """Jobs of a folder that has a folder for each, with the Kineto traces of its ranks."""
    jobs = []
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        ranks = [graph for file in sorted(path.glob("*.json*")) for graph in import_ranks([file]).graphs]
        jobs.append(Job(path.name, ranks, job_graphs(ranks)))
    return jobs


def overlap_task(folder: Path) -> ContextTask:
    """The task, from a folder for each job, with the Kineto traces of its ranks.

    Raises:
        TraceError: If no kernel of them runs beside another and also alone.
    """
    jobs = overlap_jobs(folder)
    if not any(job.graphs for job in jobs):
        raise TraceError(
            f"{folder} must hold traces with kernels that run beside collectives or copies and also alone, got none"
        )
    return task_of([replace(job, graphs=_first_steps(job.graphs)) for job in jobs])


def _first_steps(graphs: Sequence[HeteroData]) -> list[HeteroData]:
    """The first graphs of each rank: later steps repeat them."""
    seen: Counter[int] = Counter()
    kept = []
    for graph in graphs:
        seen[graph.place] += 1
        if seen[graph.place] <= MOST_STEPS:
            kept.append(graph)
    return kept


def task_of(jobs: Sequence[Job]) -> ContextTask:
    """The task of some jobs; in training, every job counts as much as every other."""
    graphs, groups, notes = [], [], []
    for job in jobs:
        judged = sum(int(torch.isfinite(graph["op"].seconds).sum()) for graph in job.graphs)
        total = sum(float(torch.nansum(graph["op"].seconds)) for graph in job.graphs)
        notes.append(f"{job.name}: {len(job.ranks)} ranks, {judged} kernels ({1e3 * total:.1f} ms) are judged")
        for graph in job.graphs:
            share = float(torch.nansum(graph["op"].seconds)) / total
            graph["op"].weight = graph["op"].weight * (share / float(graph["op"].weight.sum()))
        graphs += job.graphs
        groups += [job.name] * len(job.graphs)
    return ContextTask(
        "overlap",
        "time-weighted |log| error of kernels beside collectives and copies, jobs held out",
        graphs,
        groups,
        head="slowdown",
        designs={
            "overlap and order edges": Design("op"),
            "overlap edges": Design("op", None, ("beside",)),
            "overlap edges, three rounds": Design("op", None, ("beside",), layers=3),
        },
        notes=tuple(notes),
        plain_models={**FORMULAS, "table by class and class of neighbour": neighbour_table},
        networks=concurrency_networks(),
        epochs=EPOCHS,
    )


def job_graphs(ranks: Sequence[RankGraph]) -> list[HeteroData]:
    """One graph for each rank and step that has kernels to judge; time alone is a median over the job.

    What runs beside a kernel is found from its time alone, not from the time that is to be predicted.
    """
    times: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for rank in ranks:
        real = Beside.of(rank, rank.duration_s)
        for node in real.ops[real.share[real.ops].sum(axis=1) < ALONE].tolist():
            times[_signature(rank, node)].append(float(rank.duration_s[node]))
    usual = {signature: float(np.median(found)) for signature, found in times.items() if _steady(found)}
    graphs = []
    for place, rank in enumerate(ranks):
        alone = np.full(len(rank), np.nan)
        device = processors_of(rank.device_name, rank.names)
        for node in np.flatnonzero(rank.nodes["kind"] == OP).tolist():
            if _tells_its_size(rank, node, device):
                alone[node] = usual.get(_signature(rank, node), np.nan)
        beside = Beside.of(rank, np.where(np.isfinite(alone), alone, rank.duration_s))
        for step in np.unique(rank.nodes["step"][beside.ops]).tolist():
            graph = _StepGraph(rank, device, beside, np.isfinite(alone)).graph(step, place)
            if graph is not None:
                graphs.append(graph)
    return graphs


def _steady(seconds: Sequence[float]) -> bool:
    """Whether a signature takes the same time whenever it runs alone; else its sizes are not all that matters."""
    low, high = np.percentile(seconds, [10, 90])
    return len(seconds) >= FEWEST_ALONE and bool(high <= STEADY * low + CLOCK_S)


def _tells_its_size(rank: RankGraph, node: int, device: Processors | None) -> bool:
    """Whether equal signatures mean equal work: a grid of one wave is the same for all sizes (persistent kernels)."""
    known = bool(_sizes(rank, np.array([node]))[0, 0] > 0)
    return known or device is None or waves(device, _launch(rank, node)) > 1


def _signature(rank: RankGraph, node: int) -> tuple[object, ...]:
    nodes = rank.nodes
    work = int(nodes["work"][node])
    name = rank.names[nodes["name"][node]] if nodes["name"][node] >= 0 else ""
    return name, rank.works[work] if work >= 0 else None, int(nodes["blocks"][node]), int(nodes["threads"][node])


def _launch(rank: RankGraph, node: int) -> Launch:
    return Launch(*(int(rank.nodes[name][node]) for name in ("blocks", "threads", "registers", "shared_bytes")))


@dataclass(frozen=True)
class _StepGraph:
    """Makes the graph of one step of a rank."""

    rank: RankGraph
    device: Processors | None
    beside: Beside
    is_known: NDArray[np.bool_]

    def graph(self, step: int, place: int) -> HeteroData | None:
        """The graph; None where nothing is judged."""
        rank, beside = self.rank, self.beside
        ops = _near(rank, beside, beside.ops[rank.nodes["step"][beside.ops] == step])
        others = np.setdiff1d(beside.pairs[0][np.isin(beside.pairs[1], ops)], ops)
        seconds, baseline = rank.duration_s[ops], beside.spent_s[ops]
        share = beside.share[ops]  # kernels beside other kernels are another question
        known = self.is_known[ops] & (share[:, :2].sum(axis=1) > OVERLAPPED) & (share[:, 2] < OVERLAPPED)
        if not known.any():
            return None
        graph = HeteroData()
        graph.place = place
        op = graph["op"]
        op.node = torch.from_numpy(ops)
        op.baseline = torch.from_numpy(baseline).float()
        op.roofline = op.baseline
        op.key = torch.from_numpy(np.array([class_of(rank.kind_of(node)) for node in ops.tolist()]))
        op.seconds = torch.from_numpy(np.where(known, seconds, np.nan)).float()
        op.weight = torch.from_numpy(np.where(known, seconds, 0.0) / seconds[known].sum()).float()
        held = self._held(ops)
        op.held = torch.from_numpy(held).float()
        op.mix = torch.from_numpy(self._mix(ops)).float()
        count = self.device.count if self.device is not None else 0
        graph.hardware = torch.tensor([_HARDWARE.index(count) + 1 if count in _HARDWARE else 0])
        fill(graph, "op", np.concatenate([self._rows(ops), np.log1p(held)], axis=1))
        fill(graph, "other", self._rows(others))
        for name, nodes in (("op", ops), ("other", others)):
            keep = np.isin(beside.pairs[0], nodes) & np.isin(beside.pairs[1], ops)
            pairs, both = beside.pairs[:, keep], beside.both_s[keep]
            index = np.stack([np.searchsorted(nodes, pairs[0]), np.searchsorted(ops, pairs[1])])
            edge(graph, (name, "beside", "op"), index, self._about(pairs, both))
        order = np.lexsort((rank.start_s[ops], rank.nodes["stream"][ops]))
        follows = np.flatnonzero(np.diff(rank.nodes["stream"][ops][order]) == 0)
        before, after = order[follows], order[follows + 1]
        gap = np.log(np.maximum(rank.start_s[ops][after] - rank.end_s[ops][before], 1e-8))
        edge(graph, ("op", "order", "op"), np.stack([before, after]), gap[:, None])
        return graph

    def _held(self, ops: Ints) -> Array:
        """Of each op, ``(n, 4)``.

        Share of its time beside collectives; processors that these hold over those that they leave; by which part the
        op needs more waves of blocks beside them; what the hardware's preset says that it loses.
        """
        rank, beside = self.rank, self.beside
        found = np.zeros((len(ops), 4))
        found[:, 0] = beside.share[ops, 0]
        preset = find_hardware(_PRESETS.get(self.device.count, "")) if self.device is not None else None
        lost = preset.comm_compute_share if preset is not None else 0.0
        found[:, 3] = lost / (1.0 - lost)
        row = {node: number for number, node in enumerate(ops.tolist())}
        for other, node, both in zip(*beside.pairs.tolist(), beside.both_s.tolist(), strict=True):
            if node in row and beside.what[other] == 0:
                collective, own = _launch(rank, other), _launch(rank, node)
                part = both / beside.spent_s[node] / max(found[row[node], 0], 1e-9)
                found[row[node], 1] += part * held_ratio(self.device, collective)
                if self.device is not None and own.blocks > 0:
                    more = waves(self.device, own, collective) / waves(self.device, own) - 1.0
                    found[row[node], 2] += part * more
        return found

    def _mix(self, ops: Ints) -> Array:
        """Share of each op's time beside each of ``NEIGHBOURS``, ``(n, 5)``."""
        rank, beside = self.rank, self.beside
        source, target = beside.pairs
        keep = np.isin(target, ops) & (beside.what[source] != BESIDE.index("op"))
        source, target = source[keep], np.searchsorted(ops, target[keep])
        columns = [
            4 if beside.what[node] else NEIGHBOURS.index(kind) if (kind := rank.kind_of(node)) in NEIGHBOURS else 3
            for node in source.tolist()
        ]
        found = np.zeros((len(ops), len(NEIGHBOURS)))
        np.add.at(found, (target, np.array(columns, dtype=np.int64)), beside.both_s[keep] / beside.spent_s[ops][target])
        return np.minimum(found, 1.0)

    def _about(self, pairs: Ints, both: Array) -> Array:
        """Features of edges from what runs beside an op to the op."""
        rank, beside = self.rank, self.beside
        held = [held_ratio(self.device, _launch(rank, node)) for node in pairs[0].tolist()]
        about = [
            both / beside.spent_s[pairs[0]],
            both / beside.spent_s[pairs[1]],
            np.log(np.maximum(beside.spent_s[pairs[0]], 1e-8)),
            np.log1p(_sizes(rank, pairs[0])[:, 0]),
            np.clip(rank.nodes["blocks"][pairs[0]] / 132.0, 0, 4),
            np.log1p(np.minimum(held, 4.0)) if len(held) else np.zeros(0),
        ]
        return np.stack(about, axis=1)

    def _rows(self, nodes: Ints) -> Array:
        """Features of nodes, ``(n, f)``."""
        rank, beside = self.rank, self.beside
        kinds = np.array([class_of(rank.kind_of(node)) for node in nodes.tolist()], dtype=np.int64)
        launch = np.stack([rank.nodes[n][nodes] for n in ("blocks", "threads", "registers", "shared_bytes")], axis=1)
        sizes = _sizes(rank, nodes)
        rounds = [0.0 if self.device is None else waves(self.device, _launch(rank, n)) for n in nodes.tolist()]
        return np.concatenate(
            [
                np.eye(len(CLASSES))[kinds],
                np.eye(len(BESIDE))[beside.what[nodes]],
                beside.share[nodes],
                np.log(np.maximum(beside.spent_s[nodes], 1e-8))[:, None],
                np.log1p(np.maximum(launch, 0)),
                np.log1p(sizes),
                np.log1p(sizes[:, 1:] / np.maximum(sizes[:, :1], 1.0)),
                np.log1p(np.array(rounds, dtype=np.float64).reshape(-1, 1)),
            ],
            axis=1,
        )


def _near(rank: RankGraph, beside: Beside, ops: Ints) -> Ints:
    """Kernels that run beside others, and those just before and after them on their streams."""
    own = beside.share[ops].sum(axis=1) > ALONE
    stream = rank.nodes["stream"][ops]
    for each in np.unique(stream):
        places = np.flatnonzero(stream == each)
        there = own[places]
        own[places[1:]] |= there[:-1]
        own[places[:-1]] |= there[1:]
    return np.asarray(ops[own])


def _sizes(rank: RankGraph, nodes: Ints) -> Array:
    """Bytes and FLOP of nodes, ``(n, 2)``; zeros where sizes are not known."""
    found = []
    for work in rank.nodes["work"][nodes].tolist():
        each: Op | Collective | None = rank.works[work] if work >= 0 else None
        if isinstance(each, Op):
            found.append((float(each.num_bytes), float(each.flops)))
        else:
            found.append(_NO_SIZES if each is None else (float(each.num_bytes), 0.0))
    return np.array(found).reshape(-1, 2)


def fill(graph: HeteroData, name: str, rows: Array) -> None:
    """Give a type of nodes its features."""
    graph[name].x = torch.from_numpy(rows).float()
    graph[name].num_nodes = len(rows)


def edge(graph: HeteroData, kind: tuple[str, str, str], index: Ints, about: Array) -> None:
    """Add edges of a type with their features."""
    graph[kind].edge_index = torch.from_numpy(index.reshape(2, -1).astype(np.int64))
    graph[kind].edge_attr = torch.from_numpy(about).float()
