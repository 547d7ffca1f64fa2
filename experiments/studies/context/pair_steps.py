"""Task *pairs-steps*: the step of two ranks of a host if a model says what ops lose beside each other; jobs held out.

Ops take their time alone first.  The replay then tells what runs beside what, a model tells what that costs, and the
replay is repeated with the new times: nothing of the measured overlap is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.imported.rank_graph import RankGraph
from stepsight.experiments.studies.context.edgeless_models import MODELS, Answers, Fit, given
from stepsight.experiments.studies.context.network_models import without_edges
from stepsight.experiments.studies.context.pair_runs import PairRun, read_pair_runs, spans_of
from stepsight.experiments.studies.context.pairs_task import step_graph, task_of_pairs
from stepsight.experiments.studies.context.step_errors import StepTable, step_table
from stepsight.simulator.replay.joined import join
from stepsight.simulator.replay.replay import arrivals, replay, walk

Array = NDArray[np.float64]
Asked = Callable[[Sequence[HeteroData]], Answers]
ROUNDS = 3  # of replays; more change the step by less than 0.1 %
LEAST_JOBS = 3


def judge_pair_steps(folder: Path) -> StepTable:
    """Error of a step by each model of what ops lose beside the other rank and beside collectives.

    Raises:
        TraceError: If fewer than three jobs were collected.
    """
    runs = read_pair_runs(folder)
    task = task_of_pairs(runs, folder)
    if len(set(task.groups)) < LEAST_JOBS:
        raise TraceError(f"{folder} must hold {LEAST_JOBS} jobs, got {len(set(task.groups))}: run with --collect")
    judged: dict[str, Fit] = {
        "time alone": given("baseline"),
        **task.plain_models,
        "trees, neighbours' features": MODELS["trees, neighbours' features"],
        "sum over ops, no edges": without_edges("op"),
        **task.networks,
    }
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for job in sorted(set(task.groups)):
        taught = [graph for graph, own in zip(task.graphs, task.groups, strict=True) if own != job]
        own = [run for run in runs if run.job == job]
        for name, fit in judged.items():
            ask = fit(task, taught, 0)
            found[name][job] = float(np.mean([step_error(run, ask) for run in own]))
    return step_table("pairs-steps", "error of a step of two ranks from ops beside each other", found)


def step_error(run: PairRun, ask: Asked) -> float:
    """Percent by which the steps of a run are off; the last step, which an observer slows, is left as traced."""
    spans = run.ranks[0].steps_s[list(run.steps)]
    count = len(run.ranks[0].steps_s)
    off = replay(replayed_ranks(run, ask)).replayed_s - replay(run.ranks).replayed_s
    return 100.0 * off * count / float((spans[:, 1] - spans[:, 0]).sum())


def replayed_ranks(run: PairRun, ask: Asked) -> list[RankGraph]:
    """The ranks with the times that a model predicts, from overlap that the replay finds."""
    inside = [np.isin(rank.nodes["step"], run.steps) for rank in run.ranks]
    first = [
        np.where(own & np.isfinite(alone), alone, rank.duration_s)
        for rank, own, alone in zip(run.ranks, inside, run.alone_s, strict=True)
    ]
    ranks = [replace(rank, duration_s=seconds) for rank, seconds in zip(run.ranks, first, strict=True)]
    for _ in range(ROUNDS):
        walked = walk(join(ranks))
        begin = arrivals(walked)
        bounds = [*walked.joined.first, len(begin)]
        starts = [begin[low:high] for low, high in pairwise(bounds)]
        graphs = [step_graph(run, spans_of(run, step, starts), judged=False) for step in run.steps]
        known = [graph for graph in graphs if graph is not None]
        seconds = [own.copy() for own in first]
        for graph, predicted in zip(known, ask(known)[0], strict=True):
            for place, own in enumerate(seconds):
                here = graph["op"].rank.numpy() == place
                own[graph["op"].node.numpy()[here]] = predicted[here]
        ranks = [replace(rank, duration_s=own) for rank, own in zip(run.ranks, seconds, strict=True)]
    return ranks
