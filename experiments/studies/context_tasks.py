"""Tasks on which context models are compared: nodes of programs and whole iterations, with groups that are held out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import PHASES, Node, Program
from stepsight.dataset.hardware.hardware import HARDWARE as PRESETS
from stepsight.dataset.hardware.hardware import find_fabric, usual_fabric
from stepsight.dataset.runs.run_folder import read_collection
from stepsight.experiments.studies.families import FAMILIES
from stepsight.experiments.tasks.scripts import Script, collect_script
from stepsight.features.graph_features import SegmentGraph
from stepsight.training.collectives.collective_models import fit_collectives
from stepsight.training.context.examples import Measured, Taught, measured_runs
from stepsight.training.context.fit_context import Example
from stepsight.training.fitting.train_runs import with_host, with_imported
from stepsight.training.kernels.host_calls import HostCalls
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.measured.imported_ops import HostStep, learn_host_calls, read_graphs
from stepsight.training.measured.measured import (
    MeasuredRun,
    fill_from_traces,
    read_imported_runs,
    read_profiles,
    read_runs,
)
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]
SCRIPT = Path(__file__).with_name("families.py")
COUNTS = {"warmup": 3, "rounds": 4, "steps": 6, "profile_steps": 4}  # of a script
PARTS = 3  # of the families that teach; regressors of the others give their seconds alone


@dataclass(frozen=True)
class Split:
    """What models learn from, and what judges them."""

    seen: Sequence[Measured]  # what each teaching run measured, with seconds alone for training
    unseen: Sequence[Measured]  # the same, with seconds alone by regressors that never saw them
    judged: Mapping[str, Sequence[Example]]  # nodes that judge, by run
    runs: Sequence[MeasuredRun] = ()  # runs whose iterations judge
    predictor: Predictor | None = None  # gives the seconds alone of these iterations


@dataclass(frozen=True)
class Task:
    """What context models are asked."""

    name: str
    about: str  # what is predicted, and what is held out
    groups: Mapping[str, str]  # group of each run that judges; a split never parts a group
    split: Callable[[frozenset[str]], Split]  # from the groups that are held out
    is_fixed: bool = False  # all groups are judged at once, by models that other runs taught
    compares: str = "forms"  # of the network, or ``edges`` that it and trees hear


def edges_task(folder: Path) -> Task:
    """As ``runs``, with the data edges of execution traces, which ``train`` does not read."""
    return replace(runs_task(folder, ("step", "segment")), name="edges", compares="edges")


def runs_task(folder: Path, scopes: Sequence[str] = ("segment",)) -> Task:
    """Ops in context and whole iterations of collections, as ``train`` reads them; runs held out."""
    predictor, runs = _regressors(_collections(folder))
    if "step" in scopes:
        graphs = read_graphs([run.manifest.folder for run in runs if isinstance(run, MeasuredRun)], scopes)
        runs = [replace(run, segments=own.segments) for run, own in zip(runs, graphs, strict=True)]
    names = [run.name for run in runs]
    seen = dict(zip(names, measured_runs(runs, predictor), strict=True))
    unseen = dict(zip(names, measured_runs(runs, predictor.left_out), strict=True))

    def split(held: frozenset[str]) -> Split:
        teach = [name for name in names if name not in held]
        return Split(
            [seen[name] for name in teach],
            [unseen[name] for name in teach],
            {name: unseen[name][0] for name in names if name in held},
            [run for run in runs if run.name in held and isinstance(run, MeasuredRun) and run.whole],
            predictor.left_out,
        )

    about = "ops in context and iterations of collected runs; runs held out"
    return Task("runs", about, {name: name for name in names}, split)


def cluster_task(folder: Path) -> Task:
    """Iterations of 8 and 16 ranks in boxes (``judge``), learned from boxes of at most 4 (``profile``)."""
    predictor, small = _regressors(_collections(folder / "profile"))
    found = [run for each in _collections(folder / "judge") for run in read_collection(each).runs]
    spread = lambda run: (max(run.step_seconds) - min(run.step_seconds)) / run.iteration_time_s
    large = {run.name: MeasuredRun(run, ()) for run in sorted(found, key=spread, reverse=True) if run.whole}
    seen, unseen = (measured_runs(small, each) for each in (predictor, predictor.left_out))
    split = Split(seen, unseen, {}, list(large.values()), predictor)
    about = "iterations of 8 and 16 ranks in boxes, learned from at most 4; the steadiest run of a job judges"
    return Task("cluster", about, {name: name for name in large}, lambda held: split, is_fixed=True)


def collect_families(folder: Path) -> None:
    """Measure the script of every family of models on this machine; what is there stays."""
    for family in FAMILIES:
        if not (folder / family / "plan.json").exists():
            print(f"collect {family}", file=sys.stderr, flush=True)
            collect_script(
                Script(SCRIPT, (family,), None, COUNTS, 180.0, "train"), folder / family, 0.0, progress=False
            )


def ops_task(folder: Path) -> Task:
    """Calls of scripts that a CPU runs eagerly; families of models held out."""
    named = {step.name: step for step in _script_steps(folder)}

    def measured(names: Iterable[str], costs: HostCalls) -> dict[str, Measured]:
        return {name: (_step_examples(named[name], _seconds(named[name], costs)), []) for name in names}

    def split(held: frozenset[str]) -> Split:
        teach = sorted(set(named) - held)
        found: dict[str, Measured] = {}
        for turn in range(PARTS):  # seconds alone come from other families, as they do where a family judges
            others = [named[name] for place, name in enumerate(teach) if place % PARTS != turn]
            found |= measured(teach[turn::PARTS], learn_host_calls(others))
        judged = measured(held, learn_host_calls([named[name] for name in teach]))
        own = list(found.values())
        return Split(own, own, {name: examples for name, (examples, _) in judged.items()})

    about = "calls of scripts that a CPU runs eagerly; families of models held out"
    return Task("ops", about, {name: name for name in named}, split)


SCRIPTS = "scripts"
TASKS: Mapping[str, tuple[str, Callable[[Path], Task]]] = {  # with the folder of their data
    "runs": ("runs", runs_task),
    "edges": ("runs", edges_task),
    "cluster": ("cluster", cluster_task),
    "ops": (SCRIPTS, ops_task),
}


def _collections(folder: Path) -> list[Path]:
    """The folder, if it is a collection, else those in it that are."""
    within = [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]
    found = [path for path in within if (path / "runs").is_dir()]
    if not found:
        raise TraceError(f"{folder} must be a collection or hold some, got none")
    return found


def _regressors(collections: Sequence[Path]) -> tuple[Predictor, list[Taught]]:
    """A predictor without a context model, and the runs that taught it, as ``train`` makes it."""
    runs = read_runs(collections, ("train",))
    name = runs[0].manifest.job.hardware_name if runs else "local-cpu"
    imported = read_imported_runs(collections, name)
    profile = read_profiles(collections, find_fabric(usual_fabric(name)), imported)
    device = next((str(run.manifest.fingerprint.get("device", "cpu")) for run in runs), profile.device or "cpu")
    hardware = with_imported(with_host(profile.hardware(name, device), runs), imported)
    fill_from_traces(profile, runs)
    kernel = fit_kernels(profile.ops, profile.op_busy, np.array(profile.op_seconds), hardware, seed=0)
    collective = fit_collectives(profile.collectives, profile.fabrics, np.array(profile.collective_seconds), seed=0)
    return Predictor(hardware, kernel, collective), [*runs, *imported]


def _script_steps(folder: Path) -> list[HostStep]:
    """The step of every script that ``collect_families`` collected there, named as its family."""
    found = []
    for path in sorted(folder.glob("*/plan.json")):
        steps = [run.host for run in read_imported_runs([path.parent], "local-cpu") if run.host is not None]
        found += [replace(step, name=path.parent.name) for step in steps[:1]]
    if not found:
        raise TraceError(f"{folder} must hold scripts that `experiment context --collect` measured, got none")
    return found


def _seconds(step: HostStep, costs: HostCalls) -> Array:
    """What regressors say of the calls of a step, ``(n,)``."""
    return np.maximum(costs.seconds(step.calls, step.ops, step.phase.tolist()) / costs.scale, 1e-7)


def _step_examples(step: HostStep, alone: Array) -> list[Example]:
    """The calls of a step as one program for each phase, in order."""
    found = []
    for number, label in enumerate(PHASES):
        own = np.flatnonzero(step.phase == number)
        if len(own):
            program = Program(tuple(Node(step.ops[place]) for place in own.tolist()), (), label)
            graph = SegmentGraph(program, PRESETS["local-cpu"], 1)
            found.append(Example(graph, alone[own], np.maximum(step.op_s[own], 1e-7), step.name))
    return found
