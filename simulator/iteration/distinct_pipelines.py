"""Find the distinct pipelines of ranks; equal ones are simulated once.

A pipeline is one replica: the tensor- and context-parallel ranks of all stages.  Ranks of such a group move in step, so
the slowest decides for all of them.  Replicas do not wait for each other before their gradients meet, so each distinct
one is simulated; those that share parameters or experts meet in every layer, so one stands for all of these, at the
pace of the slowest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.job.job import Job
from stepsight.simulator.clock.engine import Floats
from stepsight.simulator.durations.latency_model import LatencyModel, RooflineLatency, preset_latency
from stepsight.simulator.durations.segment_timing import AS_IT_IS, Slowdown
from stepsight.simulator.programs.lower import Lowered
from stepsight.simulator.programs.rank_layout import Layout, layout_of
from stepsight.simulator.programs.sizes import REPLICAS


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One replica, or several equal ones.

    Attributes:
        slowdowns: Of each stage.
        links: How much slower the messages of each stage's ranks are, where they leave a node.
        replicas: Numbers of those that are alike.
    """

    slowdowns: tuple[Slowdown, ...]
    links: tuple[float, ...]
    replicas: tuple[int, ...] = (0,)

    @property
    def replica(self) -> int:
        """Index of the first of them."""
        return self.replicas[0]

    @property
    def count(self) -> int:
        """Number of equal pipelines."""
        return len(self.replicas)

    @property
    def is_plain(self) -> bool:
        """Whether no message is slowed down."""
        return all(link == 1.0 for link in self.links)

    def message_factors(self, lowered: Lowered) -> Floats:
        """Slowdown of each message of the track, shape ``(num_messages,)``."""
        links, track = np.array(self.links), lowered.track
        factors: Floats = np.maximum(links[track.stage[track.source]], links[track.stage[track.target]])
        leaves = np.array([message.num_nodes > 1 for message in lowered.messages], dtype=np.bool_)
        return np.where(leaves[lowered.message], factors, 1.0)


def distinct_pipelines(job: Job, latency: LatencyModel) -> tuple[Pipeline, ...]:
    """The distinct pipelines of a job.

    Raises:
        JobError: If the devices of some nodes are unknown.
    """
    cluster, stages = job.cluster, job.parallel.pp
    if not (cluster.stragglers or cluster.slow_links or cluster.mixed):
        return (_plain(stages, job.parallel.dp),)
    layout = layout_of(job)
    ranks = np.arange(layout.num_ranks)
    nodes = ranks // layout.devices_per_node
    compute, link = np.ones(len(ranks)), np.ones(len(ranks))
    for slow in cluster.stragglers:
        compute[slow.rank] = max(compute[slow.rank], slow.slowdown)
    for way in cluster.slow_links:
        link[nodes == way.node] = np.maximum(link[nodes == way.node], way.slowdown)
    kind = np.zeros(len(ranks), dtype=np.int64)
    for number, other in enumerate(cluster.mixed):
        kind[np.isin(nodes, other.nodes)] = number + 1
    others = [other_latency(other.hardware, job) for other in cluster.mixed]
    stage = ranks // layout.stride("pp") % stages
    replica = ranks // layout.stride("dp") % job.parallel.dp
    in_step = _in_step(job, layout, beside=latency.hardware.kind != "cpu")
    found: dict[tuple[tuple[Slowdown, ...], tuple[float, ...]], list[int]] = {}
    for number in range(0, job.parallel.dp, in_step):
        slowdowns, links = [], []
        for at in range(stages):
            own = (stage == at) & (replica // in_step == number // in_step)
            slowest = [float(compute[own & (kind == k)].max(initial=0.0)) for k in range(len(others) + 1)]
            waited = tuple((model, slow) for model, slow in zip(others, slowest[1:], strict=True) if slow)
            links.append(float(link[own].max()))
            slowdown = Slowdown(slowest[0], float(link[stage == at].max()), links[-1], waited)
            slowdowns.append(AS_IT_IS if slowdown == AS_IT_IS else slowdown)
        found.setdefault((tuple(slowdowns), tuple(links)), []).append(number)
    return tuple(
        Pipeline(*key, tuple(first + more for first in numbers for more in range(in_step)))
        for key, numbers in found.items()
    )


@cached(512)
def _plain(stages: int, replicas: int) -> Pipeline:
    return Pipeline((AS_IT_IS,) * stages, (1.0,) * stages, tuple(range(replicas)))


def _in_step(job: Job, layout: Layout, *, beside: bool) -> int:
    """Neighbouring replicas that wait for each other in every layer, for parameters or for experts' tokens."""
    p = job.parallel
    shards = p.shards * p.cp if beside else p.dp * p.cp
    parameters = layout.together(REPLICAS, shards, "dp") if p.zero_stage == 3 else 1
    axes = REPLICAS if p.experts_tp == p.tp else ("tp", *REPLICAS)
    return lcm(parameters, layout.together(axes, p.ep, "dp"))


def other_latency(name: str, job: Job) -> RooflineLatency:
    """Latency model of the devices of ``cluster.mixed``.

    Raises:
        JobError: If they are unknown.
    """
    latency = preset_latency(name, job.fabric)
    if latency is None:
        raise JobError(f"cluster.mixed: {HARDWARE.unknown(name)}")
    return latency
