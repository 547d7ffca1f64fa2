"""Step time of captured scripts of held-out families: without, and with measurements of their slowest calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stepsight.dataset.capture.captured import MANIFEST
from stepsight.dataset.hardware.hardware import HARDWARE, find_fabric, usual_fabric
from stepsight.dataset.imported.rank_graph import OP, RankGraph
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.architectures.family_programs import program_folder, read_alone, read_program
from stepsight.experiments.studies.architectures.family_runs import CONFIGURATIONS, read_runs_of_families, steps_of
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.replay.captured_step import time_captured
from stepsight.training.kernels.host_calls import Alone, HostCalls
from stepsight.training.measured.host_costs import learn_host_calls
from stepsight.training.measured.host_steps import HostStep

FOLDS = 3
_HARDWARE = "local-cpu"


@dataclass(frozen=True)
class Judged:
    """One script of a held-out family.

    Attributes:
        name: Family and configuration.
        measured_s: Median step.
        spread: Log-ratio of the medians of two collections, NaN where there is one.
        as_is_s: Predicted by what other families teach.
        after_s: Predicted after its heavy unknown calls were measured.
        known, known_after: Part of the predicted computation in calls that were measured.
        traced_s: Predicted from its own traced calls: what a perfect model of single calls would say.
    """

    name: str
    measured_s: float
    spread: float
    as_is_s: float
    after_s: float
    known: float
    known_after: float
    traced_s: float


class HostLatency(RooflineLatency):
    """Durations of calls on a host."""

    def __init__(self, host: HostCalls) -> None:
        super().__init__(HARDWARE[_HARDWARE], find_fabric(usual_fabric(_HARDWARE)))
        self.host_times = host


def folds_of(families: Sequence[str], folds: int = FOLDS) -> dict[str, int]:
    """The fold in which each family is held out."""
    order = np.random.default_rng(0).permutation(len(families))
    return {sorted(families)[place]: turn % folds for turn, place in enumerate(order.tolist())}


def judge(out: Path, families: Sequence[str]) -> list[Judged]:
    """Predict every captured script from the families of the other folds."""
    repeats: dict[tuple[str, int], list[HostStep]] = {}
    for run, found in steps_of(read_runs_of_families(out, families)):
        repeats.setdefault((run.family, run.configuration), []).append(found)
    steps = {key: _mean(each) for key, each in repeats.items()}
    spreads = {key: float(np.log(each[-1].step_s / each[0].step_s)) for key, each in repeats.items() if len(each) > 1}
    programs = [
        (family, number)
        for family in families
        for number in range(CONFIGURATIONS)
        if (program_folder(out, family, number) / MANIFEST).exists() and (family, number) in steps
    ]
    alone = {key: read_alone(out, *key) for key in programs}
    fold = folds_of(families)
    judged = []
    for turn in range(FOLDS):
        kept = [key for key in steps if fold[key[0]] != turn]
        costs = learn_host_calls([steps[key] for key in kept])
        for key in programs:
            if fold[key[0]] == turn:
                graph = read_program(out, *key).ranks[0].graph
                judged.append(
                    _judged(
                        key,
                        graph,
                        steps[key],
                        spreads.get(key, float("nan")),
                        costs,
                        alone[key],
                    )
                )
    return sorted(judged, key=lambda each: each.name)


def _judged(
    key: tuple[str, int],
    graph: RankGraph,
    step: HostStep,
    spread: float,
    costs: HostCalls,
    alone: Alone,
) -> Judged:
    after = replace(costs, alone=alone)
    traced = costs.scale * step.op_s.sum() + step.counts() @ np.array(costs.gaps_s) + costs.step_s
    as_is_s, known = _predicted(graph, costs)
    after_s, known_after = _predicted(graph, after)
    return Judged(f"{key[0]}-{key[1]}", step.step_s, spread, as_is_s, after_s, known, known_after, float(traced))


def _predicted(graph: RankGraph, costs: HostCalls) -> tuple[float, float]:
    """Seconds of a step, and the share of its computation in measured calls."""
    timed = time_captured([graph], HostLatency(costs))
    nodes = graph.nodes
    total = known = 0.0
    for node in np.flatnonzero((nodes["kind"] == OP) & (nodes["work"] >= 0)).tolist():
        op, seconds = graph.works[nodes["work"][node]], float(timed.graphs[0].duration_s[node])
        total += seconds
        if isinstance(op, Op) and costs.is_known(graph.names[nodes["name"][node]], op):
            known += seconds
    return timed.iteration_time_s, known / max(total, 1e-12)


def _mean(steps: Sequence[HostStep]) -> HostStep:
    """One step of several collections of a script: geometric means."""
    alike = [step for step in steps if step.ops == steps[0].ops]
    op_s = np.exp(np.mean([np.log(np.maximum(step.op_s, 1e-8)) for step in alike], axis=0))
    return replace(steps[0], op_s=op_s, step_s=float(np.exp(np.mean([np.log(step.step_s) for step in alike]))))
