"""One simulated iteration: segments, the schedule over segments, the optimizer; and what lies on its critical path.

A segment is a map between the clocks of a stage, of its computation and of its replicas' traffic (see
``segment_timing``), so every distinct one is timed once, and the result is exactly that of the whole op-level graph.

Without a pipeline the host, which launches, runs ahead of its device from one segment into the next, and has a clock of
its own.  In a pipeline it waits for messages, and starts each segment with the computation.

A pipeline is one replica: the tensor- and context-parallel ranks of all stages.  Ranks of such a group move in step, so
the slowest decides for all of them.  Replicas do not wait for each other before their gradients meet, so each distinct
one is simulated; those that share parameters or experts meet in every layer, so one stands for all of these, at the
pace of the slowest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import numpy as np

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import HARDWARE, Hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.dlrm import INDICES, SUMS, lookup_ops
from stepsight.simulator.clock.engine import HOST, NUM_CLOCKS, Floats, Ints, add_path
from stepsight.simulator.clock.track import TrackRun, path_uses, run_track, through, track_clocks
from stepsight.simulator.durations.latency_model import LatencyModel, RooflineLatency, preset_latency
from stepsight.simulator.durations.segment_timing import AS_IT_IS, OpTimes, Slowdown, Timer, timer_of
from stepsight.simulator.memory import Memory as Memory
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.programs.lower import Lowered, lower
from stepsight.simulator.programs.op_level import STREAMS
from stepsight.simulator.programs.sizes import REPLICAS, Layout, layout_of, rank_shape


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One replica, or several equal ones."""

    slowdowns: tuple[Slowdown, ...]  # of each stage
    links: tuple[float, ...]  # how much slower the messages of each stage's ranks are, where they leave a node
    replicas: tuple[int, ...]  # numbers of those that are alike

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
    compute, link = np.ones((2, layout.num_ranks))
    for slow in cluster.stragglers:
        compute[slow.rank] = max(compute[slow.rank], slow.slowdown)
    for way in cluster.slow_links:
        own = layout.nodes == way.node
        link[own] = np.maximum(link[own], way.slowdown)
    others = [other_latency(other.hardware, job) for other in cluster.mixed]
    kind, stage, replica = layout.mixed_kinds(cluster.mixed), layout.coordinates("pp"), layout.coordinates("dp")
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


def begin_optimizers(low: Lowered, clocks: Floats) -> Floats:
    """When each stage's optimizer starts, shape ``(num_stages, ...)``: stages of one group wait for the last of them.
    ``clocks``: of each stage after its last action, shape ``(num_stages, ..., K)``.
    """
    begin: Floats = clocks[..., :NUM_CLOCKS].max(axis=-1)
    latest = np.full(begin.shape, -np.inf)
    np.maximum.at(latest, low.meets, begin)
    return latest[low.meets]


def enter_optimizers(low: Lowered, clocks: Floats, begin: Floats) -> Floats:
    """Clocks of each stage when its optimizer starts, shape of ``clocks``; arguments as in ``begin_optimizers``."""
    entry = clocks.copy()
    entry[..., 0] = begin
    if clocks.shape[-1] > HOST and low.semantics.overlap.reads_norm:  # the host is then no longer ahead
        entry[..., HOST] = np.maximum(entry[..., HOST], begin)
    return entry


@dataclass(frozen=True, eq=False)
class PipelineRun:
    """One pipeline of ranks, all micro-batches, before the optimizer."""

    pipeline: Pipeline  # which ranks
    lowered: Lowered  # what they run
    segments: Ints  # index into lowered.segments of each row of transition
    slowdowns: tuple[Slowdown, ...]  # condition of each row; one for all
    rows: Ints  # row of each action, shape (num_actions,)
    transition: Floats  # paths from clock to clock, shape (num_rows, K, K); K: see Simulation.clocks
    message_seconds: Floats  # of each of the track's messages
    host: tuple[float, float]  # seconds that the runtime takes before each action, and to post a side of a message
    clocks: Floats  # of each stage at the end, shape (num_stages, K)

    @cached_property
    def run(self) -> TrackRun:
        """When every action and message runs; ``run.segment`` indexes ``rows``."""
        return run_track(self.lowered.track, self.rows, self.transition, self.message_seconds, self.host)

    def condition(self, row: int) -> Slowdown:
        """The slowdown of a row."""
        return self.slowdowns[row if len(self.slowdowns) > 1 else 0]


@dataclass(frozen=True, eq=False)
class Simulation:
    """One simulated iteration: when everything runs, what lies on the critical path, breakdown, memory and timeline."""

    job: Job  # what was asked
    hardware: Hardware  # what it runs on
    lowered: Lowered  # its segments and schedule
    timer: Timer  # durations
    pipeline_runs: tuple[PipelineRun, ...]  # distinct pipelines; one, unless replicas differ
    begin: Floats  # when each stage's optimizer starts, shape (num_stages,), seconds
    # clocks of each stage at that time, shape (num_stages, K): NUM_CLOCKS, and without a pipeline the host's
    clocks: Floats
    finish: Floats  # clocks after it, same shape

    @cached_property
    def iteration_time_s(self) -> float:
        """Seconds of one iteration: until the last stage has finished."""
        return float(self.finish[:, :NUM_CLOCKS].max())

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the iteration by activity of a device, mean over stages; they add up to the iteration time.

        ``compute`` ops of forward and backward; ``tp_communication``, ``cp_communication``, ``ep_communication`` what
        collectives of these groups hold up; ``dp_communication`` time that a stage stands still for its replicas, or
        that their collectives take from its computation; ``host`` waiting for launches, and for copies to the host;
        ``optimizer``; ``pp_communication`` what the iteration would be shorter if messages between stages took no
        time; ``bubble`` the rest: waiting for other stages.  A recommendation model has ``lookups`` of the mean rank,
        ``imbalance`` (what the slowest rank's take beyond), ``dense``, ``index_exchange`` and ``all_to_all`` instead.
        """
        return _break_down(self)

    @property
    def memory(self) -> Memory:
        """Bytes that each stage needs."""
        return estimate_memory(self.job, self.hardware)

    @property
    def carried(self) -> bool:
        """Whether the host has its own clock."""
        return len(self.clocks[0]) > HOST

    @cached_property
    def entry(self) -> Floats:
        """Clocks of each stage when its optimizer starts, shape of ``clocks``."""
        return enter_optimizers(self.lowered, self.clocks, self.begin)

    @cached_property
    def slowest(self) -> PipelineRun:
        """The pipeline that determines when the last optimizer starts."""
        return max(self.pipeline_runs, key=lambda pipeline_run: float(pipeline_run.clocks[:, :NUM_CLOCKS].max()))

    @cached_property
    def work_seconds(self) -> Floats:
        """Seconds of each distinct signature alone, in the order of ``lowered.all_works``."""
        return self.timer.work_seconds(self.lowered.all_works)

    @cached_property
    def op_counts(self) -> dict[Op | Collective, float]:
        """How often each signature lies on the critical path: ``n_i = dT / dt_i``; ``sum(n_i * t_i)`` is the time."""
        counts = zip(self.lowered.all_works, self.work_counts.tolist(), strict=True)
        return {work: count for work, count in counts if count > 0}

    @property
    def launches_share(self) -> float:
        """Share of the time that is determined by the host's launches, and by no op or collective."""
        return max(0.0, 1.0 - float(self.work_counts @ self.work_seconds) / self.iteration_time_s)

    @cached_property
    def work_counts(self) -> Floats:
        """``op_counts`` as an array over ``lowered.all_works``, zeros included."""
        return self._on_path(slowed=True)

    def work_uses(self) -> Floats:
        """How often each of ``lowered.all_works`` lies on the critical path, without its slowdown there."""
        return self._on_path(slowed=False)

    def _on_path(self, *, slowed: bool) -> Floats:
        index = {work: at for at, work in enumerate(self.lowered.all_works)}
        counts = np.zeros(len(index))
        for segment, condition, uses in self.segment_uses():
            times, graph = self.ops_of(segment, condition), self.lowered.segments[segment].graph
            works, amount = self.lowered.segments[segment].works, graph.share
            if slowed:
                amount = times.seconds / self.timer.work_seconds(works)[graph.work]  # share, context and slowdown
            place = np.array([index[work] for work in works], dtype=np.int32)[graph.work]
            for to, since in np.argwhere(uses > 0).tolist():
                last = int(times.last[to, since])
                add_path(times.critical[since], last, place, amount, uses[to, since], counts)
        for message, uses in zip(self.lowered.messages, self.message_uses(), strict=True):
            counts[index[message]] += uses
        return counts

    def ops_of(self, segment: int, condition: Slowdown) -> OpTimes:
        return self.timer.ops(self.lowered.segments[segment], condition, carried=self.carried)

    @cached_property
    def _path(self) -> tuple[PipelineRun, Floats, Floats, tuple[int, Floats]]:
        """The pipeline on the critical path, the counts of its ``transition`` and messages; the stage whose optimizer
        ends last, and the counts of that optimizer's paths.
        """
        clocks = np.array([pipeline_run.clocks for pipeline_run in self.pipeline_runs])
        stage, to = divmod(int(self.finish[:, :NUM_CLOCKS].argmax()), NUM_CLOCKS)
        since = int((self.entry[stage] + self.optimizer_paths(carried=self.carried)[stage, to]).argmax())
        if since != 0 and self.entry[stage, since] == self.clocks[stage, since]:  # it waited for no other clock
            pipeline, before, clock = int(clocks[:, stage, since].argmax()), stage, since
        else:
            together = np.flatnonzero(self.lowered.meets == self.lowered.meets[stage])
            ends = clocks[:, together, :NUM_CLOCKS]
            pipeline, place, clock = (int(at) for at in np.unravel_index(ends.argmax(), ends.shape))
            before = int(together[place])
        last = np.zeros((self.clocks.shape[1], self.clocks.shape[1]))
        last[to, since] = 1.0
        uses, message_uses, _, _ = path_uses(self.pipeline_runs[pipeline].run, before, clock)
        return self.pipeline_runs[pipeline], uses, message_uses, (stage, last)

    def segment_uses(self) -> list[tuple[int, Slowdown, Floats]]:
        """Segment, condition, and how often the critical path passes it from clock to clock, ``(to, from)``."""
        pipeline_run, uses, _, (stage, last) = self._path
        found: dict[tuple[int, Slowdown], Floats] = {}
        for row in np.flatnonzero((uses > 0).any(axis=(1, 2))).tolist():
            key = (int(pipeline_run.segments[row]), pipeline_run.condition(row))
            found[key] = found.get(key, 0.0) + uses[row]
        optimizer = (int(self.lowered.optimizer[stage]), self.optimizer_condition(stage), last)
        return [*((*key, uses) for key, uses in found.items()), optimizer]

    def message_uses(self) -> Floats:
        """How often each distinct message lies on the critical path, counted in its undisturbed time."""
        pipeline_run, _, uses, _ = self._path
        factors = pipeline_run.pipeline.message_factors(self.lowered)
        counts = np.zeros(len(self.lowered.messages))
        np.add.at(counts, self.lowered.message, uses * factors)
        return counts

    def optimizer_condition(self, stage: int) -> Slowdown:
        """The largest slowdown of a stage's optimizer."""
        found = dict.fromkeys(pipeline_run.pipeline.slowdowns[stage] for pipeline_run in self.pipeline_runs)
        if len(found) == 1:
            return next(iter(found))
        segment = self.lowered.segments[int(self.lowered.optimizer[stage])]
        return max(found, key=lambda slowdown: float(self.timer.segment(segment, slowdown).transition.max()))

    def optimizer_paths(self, *, carried: bool) -> Floats:
        """Paths through every stage's optimizer, ``(num_stages, to, from)``; ``carried``: with the host's clock."""
        low, timer = self.lowered, self.timer
        conditions = {run.condition(0) for run in self.pipeline_runs if len(run.slowdowns) == 1}
        if len(self.pipeline_runs) == len(conditions) == 1:  # optimizers are numbered one after the other
            first, condition = int(low.optimizer.min()), conditions.pop()
            distinct = [timer.paths(segment, condition, carried=carried) for segment in low.segments[first:]]
            return np.array(distinct)[low.optimizer - first]
        keys = [(at, self.optimizer_condition(stage)) for stage, at in enumerate(low.optimizer.tolist())]
        return np.array([timer.paths(low.segments[at], own, carried=carried) for at, own in keys])


def simulate(job: Job, latency: LatencyModel) -> Simulation:
    """Simulate one iteration of a job, whose ops and collectives take on ``latency.hardware`` what ``latency`` says."""
    lowered = lower(job, latency.hardware)
    return simulate_lowered(job, lowered, timer_of(latency), latency.hardware, distinct_pipelines(job, latency))


def simulate_lowered(
    job: Job, lowered: Lowered, timer: Timer, hardware: Hardware, pipelines: tuple[Pipeline, ...]
) -> Simulation:
    each = timer.work_seconds(lowered.messages)
    message_seconds = each[lowered.message] if len(each) != 1 else np.full(len(lowered.message), each[0])
    host = (hardware.host_action_s, hardware.host_message_s) if job.parallel.pp > 1 else (0.0, 0.0)
    pipeline_runs = tuple(_pass(lowered, timer, pipeline, message_seconds, host) for pipeline in pipelines)
    clocks = pipeline_runs[0].clocks
    for pipeline_run in pipeline_runs[1:]:
        clocks = np.maximum(clocks, pipeline_run.clocks)
    begin = begin_optimizers(lowered, clocks)
    simulation = Simulation(job, hardware, lowered, timer, pipeline_runs, begin, clocks, np.empty_like(clocks))
    optimizers = simulation.optimizer_paths(carried=simulation.carried)
    simulation.finish[:] = through(optimizers, simulation.entry)
    return simulation


def _pass(
    lowered: Lowered, timer: Timer, pipeline: Pipeline, message_seconds: Floats, host: tuple[float, float]
) -> PipelineRun:
    track, conditions = lowered.track, tuple(dict.fromkeys(pipeline.slowdowns))
    carried = lowered.num_stages == 1
    if len(conditions) == 1:
        segments, slowdowns, rows = lowered.table, conditions, lowered.place
        distinct = [timer.paths(segment, conditions[0], carried=carried) for segment in lowered.segments]
        transition = np.array(distinct)[segments]
    else:
        place = np.array([conditions.index(slowdown) for slowdown in pipeline.slowdowns])
        pairs, inverse = np.unique(lowered.segment * len(conditions) + place[track.stage], return_inverse=True)
        segments, rows = (pairs // len(conditions)).astype(np.int32), inverse.astype(np.int32)
        slowdowns = tuple(conditions[pair % len(conditions)] for pair in pairs.tolist())
        found = zip(segments.tolist(), slowdowns, strict=True)
        transition = np.array([timer.paths(lowered.segments[at], slow, carried=carried) for at, slow in found])
    plain = all(link == 1.0 for link in pipeline.links)
    seconds = message_seconds if plain else message_seconds * pipeline.message_factors(lowered)
    clocks = track_clocks(track, rows, transition, seconds, host)
    return PipelineRun(pipeline, lowered, segments, slowdowns, rows, transition, seconds, host, clocks)


CATEGORIES = (
    "compute",
    "tp_communication",
    "cp_communication",
    "ep_communication",
    "dp_communication",
    "pp_communication",
    "host",
    "bubble",
    "optimizer",
)


def _break_down(simulation: Simulation) -> dict[str, float]:
    """Seconds by category, mean over stages of the slowest pipeline; see ``Simulation.breakdown``."""
    low, total, pipeline_run = simulation.lowered, simulation.iteration_time_s, simulation.slowest
    run, stages = pipeline_run.run, low.num_stages
    runs = np.bincount(pipeline_run.rows, minlength=len(pipeline_run.segments)) / stages
    used = np.flatnonzero(runs).tolist()
    time = simulation.timer.segment
    times = [time(low.segments[pipeline_run.segments[row]], pipeline_run.condition(row)) for row in used]
    streams = dict(zip(STREAMS, runs[used] @ np.stack([each.by_stream for each in times]), strict=True))
    if simulation.carried:
        free = np.ascontiguousarray(pipeline_run.transition[:, :NUM_CLOCKS, :NUM_CLOCKS])
        host = float(pipeline_run.clocks[0, 0] - _ends(pipeline_run, free, pipeline_run.message_seconds)[0, 0])
    else:
        host = float(runs[used] @ np.array([each.host for each in times]))
    seconds = {"compute": streams["compute"], "host": host + streams["offload"]}
    seconds |= {f"{axis}_communication": streams[axis] for axis in ("tp", "cp", "ep")}
    inside = float((run.log.finish[:, 0] - run.log.start[:, 0]).sum()) / stages - sum(seconds.values())
    # The optimizer's ops; the remaining time between a stage's last backward and its end is traffic, or waiting for
    # others.
    optimizers = enumerate(low.optimizer.tolist())
    ends = [time(low.segments[at], simulation.optimizer_condition(stage)) for stage, at in optimizers]
    seconds["optimizer"] = float(np.stack([end.by_stream for end in ends])[:, 0].mean())
    until = simulation.clocks[:, :NUM_CLOCKS].max(axis=1) - simulation.clocks[:, 0]
    after = simulation.finish[:, :NUM_CLOCKS].max(axis=1) - simulation.begin
    launched = 0.0
    if simulation.hardware.has_host:
        paths = simulation.optimizer_paths(carried=True)[:, :NUM_CLOCKS, :NUM_CLOCKS]
        ended = through(paths, simulation.entry[:, :NUM_CLOCKS]).max(axis=1)
        launched = float((after - (ended - simulation.begin)).mean())
    data = inside + float((until + after).mean()) - seconds["optimizer"] - launched
    seconds["host"] += launched
    seconds["dp_communication"] = max(data, 0.0)
    seconds["pp_communication"] = 0.0
    if low.track.num_messages:
        alone = _ends(pipeline_run, pipeline_run.transition, np.zeros(len(pipeline_run.message_seconds)))
        seconds["pp_communication"] = max(0.0, float(pipeline_run.clocks.max() - alone.max()))
    seconds["bubble"] = total - sum(seconds.values())
    if seconds["bubble"] < 0:  # messages that overlap
        seconds["pp_communication"] = max(0.0, seconds["pp_communication"] + seconds.pop("bubble"))
        seconds["bubble"] = max(0.0, total - sum(seconds.values()))
    found = {category: float(seconds[category]) for category in CATEGORIES}
    tables = rank_shape(simulation.job).tables if simulation.job.model.tables else None
    if tables is None:
        return found
    # Lookups of the mean rank, what the slowest one takes beyond, the dense part, and the two exchanges as far as the
    # computation waits for them.
    lookups = float(simulation.timer.work_seconds(lookup_ops(tables)).sum()) * low.num_micro_batches
    parts = {"lookups": lookups * tables.mean_share, "imbalance": lookups * (1.0 - tables.mean_share)}
    parts["dense"] = max(found.pop("compute") - lookups, 0.0)
    parts |= {line: found.pop(f"{stream}_communication") for stream, line in _LINES.items()}
    return parts | {key: value for key, value in found.items() if key not in ("tp_communication", "pp_communication")}


# Lines of the breakdown of a recommendation model, in place of those of its streams.
_LINES = {INDICES: "index_exchange", SUMS: "all_to_all"}


def _ends(pipeline_run: PipelineRun, transition: Floats, messages: Floats) -> Floats:
    """Clocks of a pipeline's stages at the end with other paths through segments, or other messages."""
    return track_clocks(pipeline_run.lowered.track, pipeline_run.rows, transition, messages, pipeline_run.host)


def exchange_facts(breakdown: Mapping[str, float]) -> dict[str, float]:
    """Of a recommendation model's breakdown: seconds that a rank waits for communication, and the slowest rank's
    lookups over those of the mean; empty for other models.
    """
    if "lookups" not in breakdown:
        return {}
    waits = sum(breakdown[name] for name in ("index_exchange", "all_to_all", "dp_communication"))
    lookups = breakdown["lookups"]
    return {"exposed_communication": waits, "imbalance": (lookups + breakdown["imbalance"]) / max(lookups, 1e-12)}
