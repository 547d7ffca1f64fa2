"""A task of the benchmark: graphs with measured seconds, groups that a split keeps together, and a baseline."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.dataset.base.errors import TraceError

Array = NDArray[np.float64]
LEAST_GROUPS = 3


@dataclass(frozen=True)
class ContextTask:
    """What is to be predicted from what.

    Attributes:
        name: Of the task.
        about: What is judged, in a sentence.
        graphs: Each with nodes of type ``readout`` that have ``x``, ``baseline`` (seconds), ``roofline`` (seconds) and
            ``key`` (kind and phase as one number); ``seconds`` (NaN: unknown) and ``weight`` where nodes were measured,
            ``total`` where the whole graph was.  All graphs have the same types of nodes and edges.
        groups: Family, run or site of each graph; a split never parts graphs of one group.
        readout: Type of the nodes whose seconds make up the answer.
        simple: Type of the nodes that models without knowledge of the graph see.
        whole: Whether whole graphs are judged (``total``), else nodes.
        head: ``factor`` or ``slowdown``, see ``NetworkForm``.
        floor: Mean |log| between two measurements, where that is known.
        designs: Networks that are tried: what they read out and which relations they hear.
        edgeless: Types of nodes that sums without edges read out.
        notes: What was left out.
        teachers: Groups that teach, where no other does; they never judge.
        always: Groups that teach in every fold, beside others; they never judge.
        bound: By which a node's factor may be off that of all nodes, log units.
        epochs: Passes of networks over the graphs that teach.
        rest: Whether a graph takes seconds that belong to no node; None: where whole graphs are judged.
        plain_models: Further models without messages, simple ones first: fits as ``edgeless_models.Fit``.
        networks: Further models that pass messages.
    """

    name: str
    about: str
    graphs: Sequence[HeteroData]
    groups: Sequence[str]
    readout: str = "op"
    simple: str = "op"
    whole: bool = False
    head: str = "factor"
    floor: float | None = None
    designs: dict[str, Design] = field(default_factory=dict)
    edgeless: tuple[str, ...] = ("op",)
    notes: tuple[str, ...] = ()
    teachers: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    bound: float = 2.0
    epochs: int = 80
    rest: bool | None = None
    plain_models: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    networks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def folds(self, count: int, seed: int) -> list[tuple[list[int], list[int]]]:
        """Places of graphs that teach and that judge; every group judges once.

        Where there are teachers, there is one fold: they teach, and all others judge.

        Raises:
            TraceError: If there are too few groups.
        """
        names = sorted(set(self.groups) - set(self.always))
        if self.teachers:
            teaches = [group in self.teachers for group in self.groups]
            return [([p for p, t in enumerate(teaches) if t], [p for p, t in enumerate(teaches) if not t])]
        if len(names) < LEAST_GROUPS:
            raise TraceError(f"task {self.name} needs graphs of {LEAST_GROUPS} groups, got {len(names)}: collect more")
        random.Random(seed).shuffle(names)
        folds = []
        for part in range(min(count, len(names))):
            out = set(names[part :: min(count, len(names))])
            judged = [place for place, group in enumerate(self.groups) if group in out]
            folds.append(([p for p in range(len(self.groups)) if self.groups[p] not in out], judged))
        return folds

    def halves(self, graphs: Sequence[HeteroData], seed: int) -> tuple[list[HeteroData], list[HeteroData]]:
        """Graphs that teach, and graphs of the other half of the groups, which are held back.

        Args:
            graphs: With their ``number`` in the task.
            seed: Of the halves.
        """
        groups = [self.groups[int(graph.number)] for graph in graphs]
        names = sorted(set(groups) - set(self.always))
        half = set(np.random.default_rng(seed).permutation(names)[::2].tolist())
        back = [group in half for group in groups]
        return [g for g, b in zip(graphs, back, strict=True) if not b], [
            g for g, b in zip(graphs, back, strict=True) if b
        ]

    def weights(self) -> Array:
        """How much each graph counts, ``(graphs,)``: whole graphs alike, nodes by their time, every group alike."""
        if self.whole:
            return np.array([float(group not in (*self.teachers, *self.always)) for group in self.groups])
        spent = np.array([float(torch.nansum(graph[self.readout].seconds)) for graph in self.graphs])
        totals: dict[str, float] = {}
        for group, seconds in zip(self.groups, spent.tolist(), strict=True):
            totals[group] = totals.get(group, 0.0) + seconds
        return np.array([s / totals[g] if totals[g] > 0 else 0.0 for g, s in zip(self.groups, spent, strict=True)])


@dataclass(frozen=True)
class Design:
    """A network with edges.

    Attributes:
        readout: Type of the nodes whose seconds it answers.
        node_types: Types of nodes that it sees; None: all.
        relations: Types of edges that it hears; None: all between these nodes.
        layers: Rounds of messages.
        concurrency: One of ``concurrency_network.WAYS``; empty: a ``TypedNetwork``.
    """

    readout: str = "op"
    node_types: tuple[str, ...] | None = None
    relations: tuple[str, ...] | None = None
    layers: int = 2
    concurrency: str = ""
