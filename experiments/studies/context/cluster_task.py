"""Task *cluster*: iterations of 8 and 16 ranks in boxes, learned from boxes of at most 4.

The simulator says which ops, collectives and messages make up the iteration: seconds of each times how often it lies on
the critical path.  Models correct these seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.graph_data import relation_pairs
from stepsight.dataset.hardware.hardware import Fabric
from stepsight.dataset.imported.graph_schema import kind_names
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, Collective, Op
from stepsight.dataset.runs.box_spec import HARDWARE
from stepsight.dataset.runs.run_manifest import RunManifest, read_manifest
from stepsight.experiments.studies.context.cluster_links import add_links
from stepsight.experiments.studies.context.cluster_waits import waited_seconds
from stepsight.experiments.studies.context.context_task import ContextTask, Design
from stepsight.experiments.studies.context.edgeless_models import Answers, Fit, Fitted
from stepsight.experiments.studies.context.network_models import network
from stepsight.features.graph_features import STREAMS
from stepsight.training.context.examples import iteration_times
from stepsight.training.context.fit_context import Whole
from stepsight.training.context.held_back import CANDIDATES
from stepsight.training.context.through_simulator import Iteration
from stepsight.training.fit import train
from stepsight.training.measured.box_plans import SleepingLatency
from stepsight.training.measured.measured import MeasuredRun
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
LABELS = ("forward", "backward", "input", "weight", "optimizer")
KINDS = tuple(sorted(COLLECTIVE_KINDS))
MESSAGES = "send_recv"
SMALL = "at most 4 ranks"
STEADY = 0.03  # largest less smallest repeat, in parts of the median; runs that vary more do not judge
EPOCHS = 40
BOUND = 0.3  # log units of a node's correction


@dataclass(frozen=True)
class BoxRun:
    """A run and what the simulator says of it.

    Attributes:
        manifest: Of its folder.
        iteration: The job as a function of its nodes, by regressors.
        facts: The same by facts of links alone.
    """

    manifest: RunManifest
    iteration: Iteration
    facts: Iteration


def cluster_task(folder: Path) -> ContextTask:
    """The task, from collections of boxes in ``profile`` (at most 4 ranks) and ``judge``; ``predictor`` is kept there.

    Raises:
        TraceError: If one of them is missing.
    """
    small, large = _runs(folder / "profile"), _runs(folder / "judge")
    if not small or not large:
        raise TraceError(f"{folder} must hold runs of boxes in profile/ and judge/, got {len(small)} and {len(large)}")
    predictor = _predictor(folder).without_context
    kept = _steadiest(large)
    runs = [_box_run(manifest, predictor) for manifest in [*small, *kept]]
    graphs = [run_graph(run, number) for number, run in enumerate(runs)]
    names = [run.manifest.name for run in runs]
    groups = [SMALL] * len(small) + names[len(small) :]
    judging = [run.manifest.step_seconds for run in runs[len(small) :]]
    spreads = [abs(float(np.log(max(each) / min(each)))) for each in judging]
    shipped, *others = reversed(CANDIDATES)
    linked = Design("op", None, ("uses", "next", "meets"))
    return ContextTask(
        "cluster",
        "error of iterations of 8 and 16 ranks, learned from at most 4",
        graphs,
        groups,
        whole=True,
        floor=float(np.mean(spreads)),
        designs={
            "links and groups": linked,
            "links": Design("op", ("link",)),
            "groups and stages": Design("op", None, ("meets", "belongs", "spans")),
            "order and concurrency": Design("op", ("op",)),
            "all edges": Design("op"),
        },
        plain_models={f"{name}, through the simulator": _through(name, runs, predictor) for name in others[-2::-1]},
        networks={
            "GNN: links and groups, labels of waits too": network(linked, labels=(1.0, 1.0)),
            f"{shipped}, through the simulator": _through(shipped, runs, predictor),
        },
        teachers=(SMALL,),
        bound=BOUND,
        epochs=EPOCHS,
        rest=False,
        notes=(f"{len(large) - len(kept)} runs that were measured twice, or vary by over 3 %, do not judge",),
    )


def _runs(folder: Path) -> list[RunManifest]:
    found = [read_manifest(path.parent) for path in sorted(folder.glob("*/runs/*/manifest.json"))]
    return [each for each in found if each.whole and each.job.hardware_name == HARDWARE]


def _steadiest(runs: Sequence[RunManifest]) -> list[RunManifest]:
    """The steadiest measurement of each job, where it is steady."""
    best: dict[str, RunManifest] = {}
    for run in sorted(runs, key=_spread, reverse=True):
        best[run.name] = run
    return [run for _, run in sorted(best.items()) if _spread(run) <= STEADY]


def _spread(run: RunManifest) -> float:
    return (max(run.step_seconds) - min(run.step_seconds)) / run.iteration_time_s


def _predictor(folder: Path) -> Predictor:
    path = folder / "predictor"
    if not (path / "manifest.json").exists():
        collections = sorted(each.parent for each in (folder / "profile").glob("*/plan.json"))
        train(collections, path, hardware_name=HARDWARE)
    return Predictor.load(path)


def _box_run(manifest: RunManifest, predictor: Predictor) -> BoxRun:
    job = manifest.job
    assert isinstance(job.fabric, Fabric)
    facts = SleepingLatency(predictor.hardware, job.fabric)
    return BoxRun(manifest, Iteration.of(job, predictor.latency(job)), Iteration.of(job, facts))


def run_graph(run: BoxRun, number: int) -> HeteroData:
    """An iteration as a graph of ops, collectives and messages, stages and groups of ranks.

    Args:
        run: What ran.
        number: Of the run in the task.
    """
    iteration, manifest = run.iteration, run.manifest
    baseline, total = _spent(iteration)  # 1e-12 where a node is not on the critical path
    roofline, _ = _spent(run.facts)
    graph, programs = HeteroData(), iteration.lowered.programs
    works = [node.work for program in programs for node in program.nodes]
    streams = [node.stream for program in programs for node in program.nodes]
    labels = [program.label for program in programs for _ in program.nodes]
    numbers = _numbers(works, streams, labels, iteration.alone)
    message = Collective(MESSAGES, max((int(m.num_bytes) for m in iteration.lowered.messages), default=1), 2, 1)
    last = _numbers([message], ["pp"], [""], np.array([max(baseline[-1], 1e-9)]))
    share = (baseline / total)[:, None]
    graph["op"].x = torch.from_numpy(
        np.concatenate([np.concatenate([numbers, last]), share, _job_numbers(run, len(share))], axis=1)
    ).float()
    graph["op"].baseline = torch.from_numpy(baseline).float()
    graph["op"].roofline = torch.from_numpy(roofline).float()
    names = {name: place for place, name in enumerate(kind_names())}
    codes = [6 * names[work.kind] + (LABELS.index(label) if label in LABELS else 5) for work, label
             in zip([*works, message], [*labels, ""], strict=True)]  # fmt: skip
    graph["op"].key = torch.tensor(codes)
    waited = np.append(waited_seconds(manifest, iteration, baseline[:-1]), np.nan)
    graph["op"].seconds = torch.from_numpy(waited).float()
    graph["op"].weight = torch.from_numpy(np.nan_to_num(waited) / total).float()
    graph.total = torch.tensor([manifest.iteration_time_s]).float()
    graph.number = number
    _add_groups(graph, [*works, message], [*streams, "pp"], baseline / total)
    _add_stages(graph, iteration, baseline / total)
    add_links(graph, manifest.job, iteration, baseline / total)
    _add_order(graph, iteration)
    return graph


def _spent(iteration: Iteration) -> tuple[Array, float]:
    """Seconds of the iteration by node, ``(nodes + 1,)``, the last for messages and the host; and their sum."""
    total, counts = iteration.seconds_and_counts(iteration.alone)
    spent = counts * iteration.alone
    return np.append(spent, max(total - float(spent.sum()), 0.0)) + 1e-12, total


def _numbers(works: Sequence[Op | Collective], streams: Sequence[str], labels: Sequence[str], alone: Array) -> Array:
    """Features of nodes, ``(n, f)``."""
    rows = []
    for work, stream, label, seconds in zip(works, streams, labels, alone.tolist(), strict=True):
        is_op = isinstance(work, Op)
        size, near = (1, 1) if isinstance(work, Op) else (work.group_size, work.ranks_per_node)
        slept = float(isinstance(work, Op) and work.record.slept)
        rows.append(
            [
                float(is_op),
                slept,
                np.log(max(seconds, 1e-7)),
                np.log1p(float(work.num_bytes)),
                np.log(size),
                near / size,
            ]
            + [float(work.kind == kind) for kind in KINDS]
            + [float(stream.startswith(each)) for each in STREAMS]
            + [float(label == each) for each in LABELS]
        )
    return np.array(rows)


def _job_numbers(run: BoxRun, count: int) -> Array:
    """What all nodes of a run share: degrees, micro-batches per stage, links."""
    job = run.manifest.job
    fabric, parallel = job.fabric, job.parallel
    assert isinstance(fabric, Fabric)
    numbers = [parallel.tp, parallel.pp, parallel.dp, job.num_micro_batches / parallel.pp]
    row = [*np.log(numbers).tolist(), np.log(fabric.inter_node.bandwidth_bytes_per_s / 1e7), float(parallel.zero_stage)]
    return np.tile(row, (count, 1))


def _add_groups(graph: HeteroData, works: Sequence[Op | Collective], streams: Sequence[str], share: Array) -> None:
    """Groups of ranks that meet: a node for each axis and size, which its collectives meet at."""
    places: dict[tuple[str, int], int] = {}
    pairs, bytes_of = [], np.zeros(len(works))
    for node, (work, stream) in enumerate(zip(works, streams, strict=True)):
        if isinstance(work, Collective):
            pairs.append((node, places.setdefault((stream[:2], work.group_size), len(places))))
            bytes_of[node] = work.num_bytes
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    used = np.bincount(ends[1], share[ends[0]], minlength=len(places))
    moved = np.bincount(ends[1], bytes_of[ends[0]], minlength=len(places))
    rows = [[np.log(size), *(float(axis == each[:2]) for each in STREAMS)] for axis, size in places]
    graph["group"].x = torch.from_numpy(
        np.column_stack([np.array(rows), used, used.sum() - used, np.log1p(moved)])
    ).float()
    _edges(graph, ("op", "meets", "group"), ends, np.stack([share[ends[0]], np.log1p(bytes_of[ends[0]])], axis=1))


def _add_stages(graph: HeteroData, iteration: Iteration, share: Array) -> None:
    """Segments: a node for each program, which its ops belong to, and the groups that it speaks with."""
    bounds = iteration.bounds
    owner = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    spent = np.bincount(owner, share[:-1], minlength=len(bounds) - 1)
    labels = [[float(p.label == each) for each in LABELS] for p in iteration.lowered.programs]
    graph["segment"].x = torch.from_numpy(np.column_stack([np.array(labels), spent, np.log1p(np.diff(bounds))])).float()
    ends = np.stack([np.arange(len(owner)), owner])
    _edges(graph, ("op", "belongs", "segment"), ends, share[:-1, None])
    met = graph["op", "meets", "group"].edge_index.numpy()
    met = met[:, met[0] < len(owner)]
    spans = np.unique(np.stack([owner[met[0]], met[1]]), axis=1)
    _edges(graph, ("segment", "spans", "group"), spans, np.ones((spans.shape[1], 1)))


def _add_order(graph: HeteroData, iteration: Iteration) -> None:
    """Dependencies within segments, and what may run at the same time."""
    found: dict[str, list[Ints]] = {"order": [], "beside": []}
    for begin, program in zip(iteration.bounds.tolist(), iteration.lowered.programs, strict=False):
        for relation, pairs in relation_pairs(program).items():
            found["beside" if relation == "may_run_concurrently" else "order"].append(pairs + begin)
    seconds = np.log(np.maximum(np.append(iteration.alone, 1e-7), 1e-7))
    for name, parts in found.items():
        ends = np.concatenate([np.zeros((2, 0), dtype=np.int64), *parts], axis=1)
        _edges(graph, ("op", name, "op"), ends, seconds[ends].T)


def _edges(graph: HeteroData, kind: tuple[str, str, str], ends: Ints, about: Array) -> None:
    graph[kind].edge_index = torch.from_numpy(np.ascontiguousarray(ends).astype(np.int64))
    graph[kind].edge_attr = torch.from_numpy(about).float()


def _through(name: str, runs: Sequence[BoxRun], predictor: Predictor) -> Fit:
    """A context model of the product, which learns from whole iterations through the simulator."""

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        taught = [runs[int(graph.number)] for graph in graphs]
        wholes = [Whole(run.iteration, m.iteration_time_s, m.busy, m.name) for run in taught for m in (run.manifest,)]
        context = CANDIDATES[name]([], wholes, predictor.hardware, seed)

        def answer(asked: Sequence[HeteroData]) -> Answers:
            measured = [MeasuredRun(runs[int(graph.number)].manifest, ()) for graph in asked]
            return [np.zeros(0)] * len(asked), iteration_times(measured, replace(predictor, context=context))

        return answer

    return fit
