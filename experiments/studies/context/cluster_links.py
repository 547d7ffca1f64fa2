"""Links of a cluster as nodes of an iteration's graph: what shares them, how fast they are, and who waits for whom."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.dataset.hardware.hardware import Fabric
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective
from stepsight.simulator.programs.rank_layout import layout_of
from stepsight.training.context.through_simulator import Iteration

Array = NDArray[np.float64]
LEAST_S = 1e-6


def add_links(graph: HeteroData, job: Job, iteration: Iteration, share: Array) -> None:
    """Add a node for the links of each stage's ranks, which the stage's collectives and messages use.

    A link tells the seconds that its collectives and messages would keep it busy in a pass, alone and together, over
    the seconds of the pass; how much slower it and the ranks are than others; and how many ranks share it.

    Args:
        graph: Has nodes ``op``: the nodes of all programs, and last one for messages.
        job: What runs.
        iteration: The same as a function of its nodes.
        share: Of the iteration, by node.
    """
    lowered, track, fabric = iteration.lowered, iteration.lowered.track, job.fabric
    assert isinstance(fabric, Fabric)
    rate = fabric.inter_node.bandwidth_bytes_per_s
    slow_links, slow_ranks = _slowness(job)
    works = [node.work for program in lowered.programs for node in program.nodes]
    moved = np.array([float(w.num_bytes) if isinstance(w, Collective) and w.num_nodes > 1 else 0.0 for w in works])
    owner = np.repeat(np.arange(len(lowered.programs)), np.diff(iteration.bounds))
    sent = np.array([float(message.num_bytes) for message in lowered.messages])
    rows, ends, about = [], [], []
    for stage in range(lowered.num_stages):
        actions = track.stage == stage
        used = np.append(np.unique(lowered.segment[actions]), lowered.optimizer[stage])
        passes = max(int(actions.sum()), 1)
        near = (track.stage[track.source] == stage) | (track.stage[track.target] == stage)
        messages_s = float(sent[lowered.message[near]].sum()) / passes / rate * slow_links[stage] if len(sent) else 0.0
        own = np.isin(owner, used)
        times = np.bincount(lowered.segment[actions], minlength=len(lowered.programs))[owner]
        collectives_s = float((moved * times).sum()) / passes / rate * slow_links[stage]
        pass_s = max(float((iteration.alone * times).sum()) / passes, LEAST_S)
        busy = np.array([collectives_s, messages_s, min(collectives_s, messages_s)]) / pass_s
        rows.append([
            *busy, np.log(slow_links[stage]), np.log(slow_ranks[stage]), np.log(job.cluster.devices_per_node),
            np.log(rate / 1e7), float(stage == 0), float(stage == lowered.num_stages - 1),
        ])  # fmt: skip
        for node in [*np.flatnonzero(own & (moved > 0)).tolist(), len(works)]:
            bytes_of = moved[node] if node < len(works) else float(sent.max(initial=0.0))
            ends.append((node, stage))
            about.append([share[node], np.log1p(bytes_of), busy[0], busy[1]])
    graph["link"].x = torch.tensor(rows).float()
    kind = ("op", "uses", "link")
    graph[kind].edge_index = torch.tensor(ends).T.contiguous()
    graph[kind].edge_attr = torch.tensor(np.array(about)).float()
    between = np.array([(stage, stage + 1) for stage in range(lowered.num_stages - 1)], dtype=np.int64)
    between = between.reshape(-1, 2).T
    graph["link", "next", "link"].edge_index = torch.from_numpy(between)
    skew = np.log(slow_ranks)[between[1]] - np.log(slow_ranks)[between[0]]
    graph["link", "next", "link"].edge_attr = torch.from_numpy(skew[:, None]).float()


def _slowness(job: Job) -> tuple[Array, Array]:
    """The largest slowdown of the links, and of the ranks, of each stage, ``(stages,)``."""
    layout, stages = layout_of(job), job.parallel.pp
    ranks = np.arange(layout.num_ranks)
    links, pace = np.ones(len(ranks)), np.ones(len(ranks))
    for way in job.cluster.slow_links:
        own = ranks // layout.devices_per_node == way.node
        links[own] = np.maximum(links[own], way.slowdown)
    for slow in job.cluster.stragglers:
        pace[slow.rank] = max(pace[slow.rank], slow.slowdown)
    stage = ranks // layout.stride("pp") % stages
    slowest = [[values[stage == each].max() for each in range(stages)] for values in (links, pace)]
    return np.array(slowest[0]), np.array(slowest[1])
