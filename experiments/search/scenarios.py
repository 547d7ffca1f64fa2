"""Scenarios: clusters, batches and sequence lengths; each is searched for its best strategy, and they are compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.job.job import ClusterSpec, Job
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.experiments.search.job_search import Manner, search_job
from stepsight.experiments.search.objectives import REGRET
from stepsight.training.predictor.prediction import predict

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

MOST = 1000  # scenarios


@dataclass(frozen=True, kw_only=True)
class Scenarios:
    """Clusters, batches and sequence lengths to compare; every combination is a scenario. Empty: as in the job.

    Attributes:
        nodes: Numbers of nodes.
        clusters: Hardware with its usual fabric, or hardware and fabric: ``a100-sxm-80gb@dgx-a100``.  Names of presets
            or paths of ``.toml`` files.
        global_batches: Global batches in sequences.
        seq_lens: Sequence lengths in tokens.

    Raises:
        StepsightError: If a value is not allowed.
    """

    nodes: tuple[int, ...] = ()
    clusters: tuple[str, ...] = ()
    global_batches: tuple[int, ...] = ()
    seq_lens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise StepsightError(f"{field.name} of scenarios must be a list of values, got {values!r:.80}")
            for value in values:
                text = field.name == "clusters"
                whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
                if not (isinstance(value, str) and value.partition("@")[0] if text else whole):
                    words = "hardware, or hardware@fabric" if text else "whole numbers > 0"
                    raise StepsightError(f"{field.name} of scenarios must be {words}, got {value!r:.80}")
            object.__setattr__(self, field.name, tuple(dict.fromkeys(values)))
        if self.count > MOST:
            raise StepsightError(f"scenarios must be <= {MOST}, got {self.count}")

    @property
    def count(self) -> int:
        """Number of scenarios."""
        return math.prod(max(1, len(getattr(self, field.name))) for field in fields(self))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is varied."""
        return not (self.nodes or self.clusters or self.global_batches or self.seq_lens)

    def of(self, job: Job) -> Iterator[tuple[str, Job | JobError]]:
        """Each scenario in words, with the job in a legal strategy on it, or the reason why there is none."""
        nobody = (None,)
        for nodes, cluster, batch, length in itertools.product(
            self.nodes or nobody, self.clusters or nobody, self.global_batches or nobody, self.seq_lens or nobody
        ):
            words = f"{nodes or job.cluster.nodes} nodes of {cluster or job.cluster.hardware}"
            words += f", global batch {batch or job.batch.global_batch}, {length or job.model.seq_len} tokens"
            try:
                yield words, moved(job, _cluster(job.cluster, nodes, cluster), batch, length)
            except JobError as error:
                yield words, error


def _cluster(own: ClusterSpec, nodes: int | None, named: str | None) -> ClusterSpec:
    """The job's cluster with another number of nodes, or another hardware and fabric."""
    if nodes is not None:
        own = replace(own, nodes=nodes)
    if named is not None:
        hardware, _, fabric = named.partition("@")
        own = replace(own, hardware=hardware, fabric=fabric)
    return own


def moved(job: Job, cluster: ClusterSpec, global_batch: int | None = None, seq_len: int | None = None) -> Job:
    """Move a job to another cluster, with its own strategy if that is legal there, else with the first legal one.

    Raises:
        JobError: If no strategy is legal, with the rules that the plainest one breaks.
    """
    model = job.model if seq_len is None else replace(job.model, seq_len=seq_len)
    batch = job.batch if global_batch is None else replace(job.batch, global_batch=global_batch)
    one = replace(batch, micro_batch=1)
    devices, own = cluster.num_devices, job.parallel
    plain = replace(
        own, cp=1, ep=1, schedule="1f1b", virtual_stages=1, stage_layers=(), dp_shard=0, sequence_parallel=False
    )
    tried = [(own, batch)]
    tried += [
        (replace(plain, tp=tp, pp=pp), one)
        for pp in range(1, min(devices, model.total_layers) + 1)
        for tp in _powers(cluster.devices_per_node)
        if devices % (tp * pp) == 0
    ]
    reason: JobError | None = None
    for parallel, sized in tried:
        dp = max(1, devices // (parallel.tp * parallel.cp * parallel.pp))
        try:
            return replace(job, model=model, batch=sized, cluster=cluster, parallel=replace(parallel, dp=dp))
        except JobError as error:
            reason = error if reason is None or parallel.tp == parallel.pp == 1 else reason
    assert reason is not None
    raise reason


def _powers(most: int) -> list[int]:
    return [size for size in (2**power for power in range(most.bit_length())) if size <= most]


def search_scenarios(job: Job, predictor: Predictor | str | None, manner: Manner, scenarios: Scenarios) -> SearchResult:
    """Search every scenario, and compare their strategies.

    Returns:
        The strategies of all scenarios, best first; ``own`` is the job as it was given.

    Raises:
        JobError: If no scenario has a legal strategy.
        StepsightError: If the goal is the least expected regret, which is for one cluster and batch.
    """
    if manner.goal.robust == REGRET:
        raise StepsightError(f"robust {REGRET} is for one cluster and batch: search the best scenario again with it")
    found: list[SearchResult] = []
    skipped: list[str] = []
    for words, candidate in scenarios.of(job):
        if isinstance(candidate, JobError):
            skipped.append(f"{words}: {candidate}")
            continue
        name = manner.study_name and f"{manner.study_name}: {words}"
        try:
            found.append(search_job(candidate, predictor, replace(manner, study_name=name)))
        except JobError as error:
            skipped.append(f"{words}: {error}")
    if not found:
        raise JobError(f"no scenario can be searched: {skipped[0]}")
    return merged(job, predictor, found, skipped)


def merged(job: Job, predictor: Predictor | str | None, found: list[SearchResult], skipped: list[str]) -> SearchResult:
    """Merge the results of several scenarios."""
    goal = found[0].goal
    own = next((one.own for one in found if one.own is not None and one.own.job == job), None)
    own = own or Choice.of(predict(job, predictor), lambda asked: predict(asked, predictor))
    choices = sorted((choice for one in found for choice in one.choices), key=lambda choice: choice.rank(goal))
    fitting = [one for one in found if one.choices and one.choices[0].fits]
    plans = sorted((one.best for one in fitting), key=lambda choice: choice.rank(goal))
    gaps = [one.gap_percent for one in found if one.undecided or (one.choices and one.choices[0].fits)]
    gap: float | None = None
    if plans and None not in gaps:
        least = min(
            goal.score(one.best.job, one.best.timed) / (1.0 + (one.gap_percent or 0.0) / 100.0) for one in fitting
        )
        gap = max(0.0, 100.0 * (goal.score(plans[0].job, plans[0].timed) / least - 1.0))
    return SearchResult(
        choices,
        evaluated=sum(one.evaluated for one in found),
        legal=sum(one.legal for one in found),
        own=own,
        gap_percent=gap,
        undecided=sum(one.undecided for one in found),
        rivals=next((one.rivals for one in fitting if one.best is plans[0]), ()),
        goal=goal,
        plans=plans,
        skipped=tuple(skipped),
        expert_loads=found[0].expert_loads,
    )
