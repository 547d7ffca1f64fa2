"""Task *pairs*: ops of two ranks of a host, beside each other's ops and gloo's reductions; families held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.dataset.base.errors import TraceError
from stepsight.experiments.studies.context.beside import CLASSES, class_of
from stepsight.experiments.studies.context.context_task import ContextTask, Design
from stepsight.experiments.studies.context.network_models import concurrency_networks
from stepsight.experiments.studies.context.overlap_formulas import PAIR_FORMULAS
from stepsight.experiments.studies.context.overlap_table import neighbour_table
from stepsight.experiments.studies.context.overlap_task import OVERLAPPED, edge, fill
from stepsight.experiments.studies.context.pair_runs import (
    PairRun,
    Spans,
    is_narrow,
    read_pair_runs,
    sizes_of,
    usual_spans,
)

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
LEAST_ALONE_S = 5e-5  # a shorter op is mostly the time of the profiler
CACHE_BYTES = 2.0**25  # of a host's last cache, roughly
EPOCHS = 30


def pairs_task(folder: Path) -> ContextTask:
    """The task, from what ``pair_collecting`` collected.

    Raises:
        TraceError: If no op runs beside another and also alone.
    """
    return task_of_pairs(read_pair_runs(folder), folder)


def task_of_pairs(runs: Sequence[PairRun], folder: Path) -> ContextTask:
    """The task of some runs; in training, every job counts as much as every other."""
    graphs, jobs = [], []
    for job in sorted({run.job for run in runs}):
        own = [run for run in runs if run.job == job]
        graph = step_graph(own[0], usual_spans(own))
        if graph is not None:
            graphs.append(graph)
            jobs.append(job)
    if not graphs:
        raise TraceError(f"{folder} must hold ops that run beside others and also alone, got none: run with --collect")
    spent = {
        job: sum(float(g["op"].weight.sum()) for g, own in zip(graphs, jobs, strict=True) if own == job) for job in jobs
    }
    for graph, job in zip(graphs, jobs, strict=True):
        graph["op"].weight = graph["op"].weight / spent[job]
    judged = {job: 0 for job in jobs}
    for graph, job in zip(graphs, jobs, strict=True):
        judged[job] += int(torch.isfinite(graph["op"].seconds).sum())
    spread = {run.job: run.spread for run in runs}
    return ContextTask(
        "pairs",
        "time-weighted |log| error of ops of two ranks of a host in a usual step, jobs held out",
        graphs,
        jobs,
        head="slowdown",
        floor=float(np.mean(list(spread.values()))),
        designs={
            "overlap edges": Design("op", None, ("beside",)),
        },
        notes=tuple(
            f"{job}: {count} ops are judged; alone they differ by {spread[job]:.2f}" for job, count in judged.items()
        ),
        plain_models={**PAIR_FORMULAS, "table by class and class of neighbour": neighbour_table},
        networks=concurrency_networks(),
        epochs=EPOCHS,
    )


def step_graph(run: PairRun, spans: Spans, *, judged: bool = True) -> HeteroData | None:
    """The graph of one step of both ranks; None where nothing is judged.

    Args:
        run: The run.
        spans: Of the step.
        judged: Whether only ops that overlap are kept, with their measured seconds; else all that ran alone are.
    """
    table = _Table(run, spans)
    share = table.share.sum(axis=1)
    long = spans.is_op & (spans.spent_s >= LEAST_ALONE_S) & table.known
    known = long & (np.minimum(share, 1.0) > OVERLAPPED) if judged else spans.is_op & table.known
    if not known.any():
        return None
    heard = np.unique(spans.pairs[0][np.isin(spans.pairs[1], np.flatnonzero(known))])
    ops = np.flatnonzero(known | (np.isin(np.arange(len(known)), heard) & spans.is_op))
    others = heard[~spans.is_op[heard]]
    graph = HeteroData()
    op = graph["op"]
    op.rank, op.node = torch.from_numpy(spans.rank[ops]), torch.from_numpy(spans.node[ops])
    alone, seconds = spans.spent_s[ops], spans.measured_s[ops]
    op.baseline = torch.from_numpy(alone).float()
    op.roofline = op.baseline
    op.key = torch.from_numpy(table.classes[ops])
    op.seconds = torch.from_numpy(np.where(known[ops], seconds, np.nan)).float()
    op.weight = torch.from_numpy(np.where(known[ops], alone, 0.0)).float()
    op.mix = torch.from_numpy(table.mix[ops]).float()
    op.held = torch.from_numpy(table.held(ops)).float()
    fill(graph, "op", table.rows[ops])
    fill(graph, "other", table.rows[others])
    for name, nodes in (("op", ops), ("other", others)):
        keep = np.isin(spans.pairs[0], nodes) & np.isin(spans.pairs[1], ops)
        pairs, both = spans.pairs[:, keep], spans.both_s[keep]
        index = np.stack([np.searchsorted(nodes, pairs[0]), np.searchsorted(ops, pairs[1])])
        edge(graph, (name, "beside", "op"), index, table.about(pairs, both))
    return graph


class _Table:
    """Features of the spans of a step.

    Shapes: ``n`` spans.

    Attributes:
        known: ``(n,)``: whether the time alone was measured.
        classes: ``(n,)``: index of ``CLASSES``.
        share: ``(n, 2)``: of its time in which the other rank's ops, and collectives, run too.
        mix: ``(n, len(CLASSES) + 1)``: the same by class of op; collectives last.
        rows: ``(n, f)``: features of nodes.
    """

    def __init__(self, run: PairRun, spans: Spans) -> None:
        count = len(spans.rank)
        self._spans = spans
        self.known = np.zeros(count, dtype=np.bool_)
        self.classes, narrow = np.zeros(count, dtype=np.int64), np.zeros(count)
        sizes = np.zeros((count, 2))
        for place, rank in enumerate(run.ranks):
            own = np.flatnonzero(spans.rank == place)
            node = spans.node[own]
            self.known[own] = np.isfinite(run.alone_s[place][node])
            self.classes[own] = [class_of(rank.kind_of(each)) for each in node.tolist()]
            narrow[own], sizes[own] = is_narrow(rank, node), sizes_of(rank, node)
        source, target = spans.pairs
        self._part = spans.both_s / spans.spent_s[target]
        column = np.where(spans.is_op, self.classes, len(CLASSES))
        self.mix = np.zeros((count, len(CLASSES) + 1))
        np.add.at(self.mix, (target, column[source]), self._part)
        self.share = np.minimum(np.stack([self.mix[:, :-1].sum(axis=1), self.mix[:, -1]], axis=1), [1.0, 2.0])
        self._bytes_s = sizes[:, 0] / spans.spent_s
        self._sizes = sizes
        intensity = sizes[:, 1] / np.maximum(sizes[:, 0], 1.0)
        self.rows = np.concatenate(
            [
                np.eye(len(CLASSES))[self.classes] * spans.is_op[:, None],
                spans.is_op[:, None],
                narrow[:, None],
                self.share,
                np.log(spans.spent_s)[:, None],
                np.log1p(sizes),
                np.log1p(self._bytes_s / 1e9)[:, None],
                np.log1p(intensity)[:, None],
                np.minimum(sizes[:, :1] / CACHE_BYTES, 4.0),
            ],
            axis=1,
        )

    def held(self, ops: Ints) -> Array:
        """Of each op, ``(n, 4)``.

        Share of its time in which anything else runs; beside ops; beside collectives; and beside ops, times the bytes
        per second that both demand, in parts of 10 GB/s.
        """
        spans = self._spans
        source, target = spans.pairs
        rate = self._bytes_s / 1e10
        both = np.zeros(len(self.known))
        np.add.at(both, target, self._part * spans.is_op[source] * np.sqrt(rate[source] * rate[target]))
        share = self.share[ops]
        return np.stack([np.minimum(share.sum(axis=1), 1.0), share[:, 0], share[:, 1], both[ops]], axis=1)

    def about(self, pairs: Ints, both: Array) -> Array:
        """Features of edges from what runs beside an op to the op."""
        spent = self._spans.spent_s
        told = [
            both / spent[pairs[0]],
            both / spent[pairs[1]],
            np.log(spent[pairs[0]]),
            np.log1p(self._sizes[pairs[0], 0]),
            np.log1p(self._bytes_s[pairs[0]] / 1e9),
            np.log1p(np.sqrt(self._bytes_s[pairs[0]] * self._bytes_s[pairs[1]]) / 1e9),
        ]
        return np.stack(told, axis=1)
