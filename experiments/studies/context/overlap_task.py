"""Task *overlap*: kernels beside collectives, copies and other kernels, in traces of GPUs; jobs held out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.dataset.errors import TraceError
from stepsight.dataset.imported.import_ranks import import_ranks
from stepsight.dataset.imported.rank_graph import COLLECTIVE, OP, RankGraph
from stepsight.dataset.op import Collective, Op
from stepsight.experiments.studies.context.context_task import ContextTask, Design

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
CLASSES = ("product", "attention", "reduction", "copy", "optimizer", "other")
BESIDE = ("collective", "copy", "op")  # what may run beside a kernel
ALONE, OVERLAPPED = 0.02, 0.1  # shares of a kernel's time: below, it runs alone; above, it is judged
FEWEST_ALONE, STEADY, CLOCK_S = 2, 1.25, 1e-6  # traces have whole microseconds
_WORDS = {
    "product": ("linear", "matmul", "conv", "gemm", "bmm", "expert"),
    "attention": ("attention",),
    "reduction": ("norm", "softmax", "reduce", "loss", "sum", "pool"),
    "copy": ("copy", "transfer", "fill", "cast", "concat"),
    "optimizer": ("foreach", "adam", "optimizer", "sgd"),
}
_NO_SIZES = (0.0, 0.0)


def overlap_task(folder: Path) -> ContextTask:
    """The task, from a folder for each job, with the Kineto traces of its ranks.

    Raises:
        TraceError: If no kernel of them runs beside another and also alone.
    """
    graphs, groups, notes = [], [], []
    for job in sorted(path for path in folder.iterdir() if path.is_dir()):
        ranks = [graph for path in sorted(job.glob("*.json*")) for graph in import_ranks([path]).graphs]
        found = job_graphs(ranks)
        judged = sum(int(torch.isfinite(graph["op"].seconds).sum()) for graph in found)
        notes.append(f"{job.name}: {len(ranks)} ranks, {judged} kernels beside others whose time alone is known")
        graphs += found
        groups += [job.name] * len(found)
    if not graphs:
        raise TraceError(f"{folder} must hold traces with kernels that run beside others and also alone, got none")
    return ContextTask(
        "overlap",
        "time-weighted |log| error of kernels that run beside others, jobs held out",
        graphs,
        groups,
        head="slowdown",
        designs={
            "overlap and order edges": Design("op"),
            "overlap edges": Design("op", None, ("beside",)),
            "overlap edges, three rounds": Design("op", None, ("beside",), layers=3),
        },
        notes=tuple(notes),
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
    for rank in ranks:
        alone = np.full(len(rank), np.nan)
        for node in np.flatnonzero(rank.nodes["kind"] == OP).tolist():
            alone[node] = usual.get(_signature(rank, node), np.nan)
        beside = Beside.of(rank, np.where(np.isfinite(alone), alone, rank.duration_s))
        for step in np.unique(rank.nodes["step"][beside.ops]).tolist():
            graph = _step_graph(rank, beside, step, np.isfinite(alone))
            if graph is not None:
                graphs.append(graph)
    return graphs


def _steady(seconds: Sequence[float]) -> bool:
    """Whether a signature takes the same time whenever it runs alone; else its sizes are not all that matters."""
    low, high = np.percentile(seconds, [10, 90])
    return len(seconds) >= FEWEST_ALONE and bool(high <= STEADY * low + CLOCK_S)


@dataclass(frozen=True)
class Beside:
    """What runs at the same time on a device.

    Attributes:
        ops: Nodes that are kernels.
        pairs: ``(2, e)``: a node, and a kernel that it runs beside.
        both_s: ``(e,)`` seconds in which both run.
        spent_s: ``(n,)`` seconds of each node that this holds for.
        share: ``(n, 3)``: part of each node's time in which some of ``BESIDE`` runs too.
        what: ``(n,)``: index of ``BESIDE``.
    """

    ops: Ints
    pairs: Ints
    both_s: Array
    spent_s: Array
    share: Array
    what: Ints

    @classmethod
    def of(cls, rank: RankGraph, spent_s: Array) -> Beside:
        """Nodes that run at once if each takes ``spent_s`` from when it started."""
        device = np.flatnonzero(rank.on_device & (rank.duration_s > 0))
        start, stream = rank.start_s, rank.nodes["stream"]
        end = start + spent_s
        pairs, seconds = [], []
        active: list[int] = []
        for node in device[np.argsort(start[device], kind="stable")].tolist():
            active = [other for other in active if end[other] > start[node]]
            for other in active:
                if stream[other] != stream[node]:
                    both = min(end[other], end[node]) - start[node]
                    pairs += [(other, node), (node, other)]
                    seconds += [both, both]
            active.append(node)
        table, found = np.array(pairs, dtype=np.int64).reshape(-1, 2).T, np.array(seconds)
        what = np.array([_what(rank, node) for node in range(len(rank))])
        share = np.zeros((len(rank), len(BESIDE)))
        np.add.at(share, (table[1], what[table[0]]), found / spent_s[table[1]])
        keep = rank.nodes["kind"][table[1]] == OP
        ops = device[rank.nodes["kind"][device] == OP]
        return cls(ops, table[:, keep], found[keep], spent_s, np.minimum(share, 1.0), what)


def _what(rank: RankGraph, node: int) -> int:
    if rank.nodes["kind"][node] == COLLECTIVE:
        return 0
    return 1 if _class(rank.kind_of(node)) == CLASSES.index("copy") else 2


def _class(kind: str) -> int:
    for name, words in _WORDS.items():
        if any(word in kind for word in words):
            return CLASSES.index(name)
    return CLASSES.index("other")


def _signature(rank: RankGraph, node: int) -> tuple[object, ...]:
    nodes = rank.nodes
    work = int(nodes["work"][node])
    name = rank.names[nodes["name"][node]] if nodes["name"][node] >= 0 else ""
    return name, rank.works[work] if work >= 0 else None, int(nodes["blocks"][node]), int(nodes["threads"][node])


def _step_graph(rank: RankGraph, beside: Beside, step: int, is_known: NDArray[np.bool_]) -> HeteroData | None:
    ops = _near(rank, beside, beside.ops[rank.nodes["step"][beside.ops] == step])
    others = np.setdiff1d(beside.pairs[0][np.isin(beside.pairs[1], ops)], ops)
    seconds, baseline = rank.duration_s[ops], beside.spent_s[ops]
    known = is_known[ops] & (beside.share[ops].sum(axis=1) > OVERLAPPED)
    if not known.any():
        return None
    graph = HeteroData()
    kinds = np.array([_class(rank.kind_of(node)) for node in ops.tolist()])
    _fill(graph, "op", _rows(rank, beside, ops))
    graph["op"].baseline = torch.from_numpy(baseline).float()
    graph["op"].roofline = graph["op"].baseline
    graph["op"].key = torch.from_numpy(kinds)
    graph["op"].seconds = torch.from_numpy(np.where(known, seconds, np.nan)).float()
    graph["op"].weight = torch.from_numpy(np.where(known, seconds, 0.0) / seconds[known].sum()).float()
    _fill(graph, "other", _rows(rank, beside, others))
    for name, nodes in (("op", ops), ("other", others)):
        keep = np.isin(beside.pairs[0], nodes) & np.isin(beside.pairs[1], ops)
        pairs, both = beside.pairs[:, keep], beside.both_s[keep]
        about = [
            both / beside.spent_s[pairs[0]],
            both / beside.spent_s[pairs[1]],
            np.log(np.maximum(beside.spent_s[pairs[0]], 1e-8)),
            np.log1p(_sizes(rank, pairs[0])[:, 0]),
            np.clip(rank.nodes["blocks"][pairs[0]] / 132.0, 0, 4),
        ]
        index = np.stack([np.searchsorted(nodes, pairs[0]), np.searchsorted(ops, pairs[1])])
        _edge(graph, (name, "beside", "op"), index, np.stack(about, axis=1))
    order = np.lexsort((rank.start_s[ops], rank.nodes["stream"][ops]))
    follows = np.flatnonzero(np.diff(rank.nodes["stream"][ops][order]) == 0)
    before, after = order[follows], order[follows + 1]
    gap = np.log(np.maximum(rank.start_s[ops][after] - rank.end_s[ops][before], 1e-8))
    _edge(graph, ("op", "order", "op"), np.stack([before, after]), gap[:, None])
    return graph


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


def _rows(rank: RankGraph, beside: Beside, nodes: Ints) -> Array:
    """Features of nodes, ``(n, f)``."""
    kinds = np.array([_class(rank.kind_of(node)) for node in nodes.tolist()], dtype=np.int64)
    launch = np.stack([rank.nodes[name][nodes] for name in ("blocks", "threads", "registers", "shared_bytes")], axis=1)
    sizes = _sizes(rank, nodes)
    return np.concatenate(
        [
            np.eye(len(CLASSES))[kinds],
            np.eye(len(BESIDE))[beside.what[nodes]],
            beside.share[nodes],
            np.log(np.maximum(beside.spent_s[nodes], 1e-8))[:, None],
            np.log1p(np.maximum(launch, 0)),
            np.log1p(sizes),
            np.log1p(sizes[:, 1:] / np.maximum(sizes[:, :1], 1.0)),
        ],
        axis=1,
    )


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


def _fill(graph: HeteroData, name: str, rows: Array) -> None:
    graph[name].x = torch.from_numpy(rows).float()
    graph[name].num_nodes = len(rows)


def _edge(graph: HeteroData, kind: tuple[str, str, str], index: Ints, about: Array) -> None:
    graph[kind].edge_index = torch.from_numpy(index.reshape(2, -1).astype(np.int64))
    graph[kind].edge_attr = torch.from_numpy(about).float()
