"""Tasks on which context models are compared: nodes of programs and whole iterations, with groups that are held out."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import Node, Program
from stepsight.dataset.graph.rank_graph import COLLECTIVE, OP, OPAQUE, PHASES, RankGraph
from stepsight.dataset.hardware.hardware import HARDWARE as PRESETS
from stepsight.dataset.hardware.hardware import Hardware, find_fabric, usual_fabric
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.run_folder import read_collection
from stepsight.dataset.runs.run_manifest import RunManifest
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.experiments.studies.families import FAMILIES
from stepsight.experiments.tasks.script_collecting import Script, collect_script
from stepsight.features.host_call_features import call_label
from stepsight.training.collectives.collective_models import fit_collectives
from stepsight.training.context.examples import Taught, make_examples, make_wholes
from stepsight.training.context.fit_context import Example, Whole
from stepsight.training.fitting.train_runs import with_host, with_imported
from stepsight.training.kernels.host_calls import HostCalls
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.measured.host_steps import HostStep, learn_host_calls
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
ONE, TWO = "one-rank", "two-ranks"
COUNTS = {"warmup": 3, "rounds": 4, "steps": 6, "profile_steps": 4}  # of a script
PARTS = 3  # of the families that teach; regressors of the others give their seconds alone
LEAST_S = 5e-5  # of a call beside another rank: shorter ones are mostly the profiler's own time
ALONE, OVERLAPPED, FEWEST = 0.02, 0.1, 2  # share of a kernel's time: below, it runs alone; above, it is judged


@dataclass(frozen=True)
class Split:
    """What models learn from, and what judges them.

    Attributes:
        examples, wholes: Teach.
        judged: Nodes that judge, by run.
        runs: Whose iterations judge.
        predictor: Gives the seconds alone of these iterations; None without any.
    """

    examples: Sequence[Example]
    wholes: Sequence[Whole]
    judged: Mapping[str, Sequence[Example]]
    runs: Sequence[MeasuredRun] = ()
    predictor: Predictor | None = None


@dataclass(frozen=True)
class Task:
    """What context models are asked.

    Attributes:
        name: Of the task.
        about: What is predicted, and what is held out.
        hardware: Of all runs.
        groups: Group of each run that judges; a split never parts a group.
        split: From the groups that are held out to what teaches and judges.
        is_fixed: Whether all groups are judged at once, by models that other runs taught.
    """

    name: str
    about: str
    hardware: Hardware
    groups: Mapping[str, str]
    split: Callable[[frozenset[str]], Split]
    is_fixed: bool = False


def runs_task(folder: Path) -> Task:
    """Ops in context and whole iterations of collections, as ``train`` reads them; runs held out."""
    predictor, runs = _regressors(_collections(folder))
    examples = make_examples(runs, predictor)
    wholes = make_wholes([run for run in runs if isinstance(run, MeasuredRun)], predictor)

    def split(held: frozenset[str]) -> Split:
        unseen = predictor.left_out
        return Split(
            [each for each in examples if each.run not in held],
            [each for each in wholes if each.run not in held],
            {run.name: make_examples([run], unseen) for run in runs if run.name in held},
            [run for run in runs if run.name in held and isinstance(run, MeasuredRun) and run.whole],
            unseen,
        )

    about = "ops in context and iterations of collected runs; runs held out"
    return Task("runs", about, predictor.hardware, {run.name: run.name for run in runs}, split)


def cluster_task(folder: Path) -> Task:
    """Iterations of 8 and 16 ranks in boxes (``judge``), learned from boxes of at most 4 (``profile``)."""
    predictor, small = _regressors(_collections(folder / "profile"))
    found = [run for each in _collections(folder / "judge") for run in read_collection(each).runs]
    large = {run.name: MeasuredRun(run, ()) for run in sorted(found, key=_spread, reverse=True) if run.whole}
    wholes = make_wholes([run for run in small if isinstance(run, MeasuredRun)], predictor)
    split = Split(make_examples(small, predictor), wholes, {}, list(large.values()), predictor)
    about = "iterations of 8 and 16 ranks in boxes, learned from at most 4; the steadiest run of a job judges"
    return Task("cluster", about, predictor.hardware, {name: name for name in large}, lambda held: split, is_fixed=True)


def collect_families(folder: Path) -> None:
    """Measure the script of every family of models, on one and on two ranks of this machine; what is there stays."""
    for ranks, name in ((None, ONE), (2, TWO)):
        for family in FAMILIES:
            if not (folder / name / family / "plan.json").exists():
                print(f"collect {family}, ranks {ranks or 1}", file=sys.stderr, flush=True)
                script = Script(SCRIPT, (family,), ranks, COUNTS, 180.0, "train")
                collect_script(script, folder / name / family, 0.0, progress=False)


def ops_task(folder: Path) -> Task:
    """Calls of scripts that a CPU runs eagerly; families of models held out."""
    named = {step.name: step for step in _script_steps(folder / ONE)}

    def examples_of(names: Iterable[str], costs: HostCalls) -> list[Example]:
        return [each for name in names for each in _step_examples(named[name], _seconds(named[name], costs), 1)]

    def split(held: frozenset[str]) -> Split:
        teach = sorted(set(named) - held)
        examples: list[Example] = []
        for turn in range(PARTS):  # seconds alone come from other families, as they do where a family judges
            others = [named[name] for place, name in enumerate(teach) if place % PARTS != turn]
            examples += examples_of(teach[turn::PARTS], learn_host_calls(others))
        costs = learn_host_calls([named[name] for name in teach])
        return Split(examples, [], {name: examples_of([name], costs) for name in held})

    about = "calls of scripts that a CPU runs eagerly; families of models held out"
    return Task("ops", about, PRESETS["local-cpu"], {name: name for name in named}, split)


def pairs_task(folder: Path) -> Task:
    """Calls beside a second rank of the host, from scripts that were collected on one and on two ranks."""
    alone = learn_host_calls(_script_steps(folder / ONE))
    examples: dict[str, list[Example]] = {}
    for step in _script_steps(folder / TWO):
        pairs = zip(step.calls, step.ops, strict=True)
        known = np.array([alone.known.get((call_label(call, op), op), np.nan) for call, op in pairs])
        inside = replace(step, op_s=np.where(known >= LEAST_S, step.op_s, np.nan))
        examples[step.name] = _step_examples(inside, np.where(known > 0, known, _seconds(step, alone)), 2)
    about = "calls of two ranks of a host, from their time alone; families of models held out"
    return _nodes_task("pairs", about, "local-cpu", examples)


def overlap_task(folder: Path) -> Task:
    """Kernels of a GPU beside collectives, from their time alone; folders of traces of a job held out."""
    jobs = {
        path.name: [rank for file in sorted(path.glob("*.json*")) for rank in import_ranks([file]).graphs]
        for path in sorted(folder.iterdir())
        if path.is_dir()
    }
    examples = {name: own for name, ranks in jobs.items() if (own := _overlap_examples(name, ranks))}
    about = "kernels beside collectives, from their time alone; jobs held out"
    return _nodes_task("overlap", about, "h100-sxm-80gb", examples)


def _nodes_task(name: str, about: str, hardware: str, examples: Mapping[str, Sequence[Example]]) -> Task:
    """A task whose nodes judge by known seconds alone."""
    if not examples:
        raise TraceError(f"task {name} needs ops that were measured alone and beside others, got none")

    def split(held: frozenset[str]) -> Split:
        teach = [each for run, own in examples.items() if run not in held for each in own]
        return Split(teach, [], {run: own for run, own in examples.items() if run in held})

    return Task(name, about, PRESETS[hardware], {run: run for run in examples}, split)


SCRIPTS = "scripts"
TASKS: Mapping[str, tuple[str, Callable[[Path], Task]]] = {  # with the folder of their data
    "runs": ("runs", runs_task),
    "cluster": ("cluster", cluster_task),
    "ops": (SCRIPTS, ops_task),
    "pairs": (SCRIPTS, pairs_task),
    "overlap": ("overlap", overlap_task),
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


def _spread(run: RunManifest) -> float:
    return (max(run.step_seconds) - min(run.step_seconds)) / run.iteration_time_s


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


def _step_examples(step: HostStep, alone: Array, busy: int) -> list[Example]:
    """The calls of a step as one program for each phase, in order."""
    found = []
    for number, label in enumerate(PHASES):
        own = np.flatnonzero(step.phase == number)
        if len(own):
            program = Program(tuple(Node(step.ops[place]) for place in own.tolist()), (), label)
            found.append(Example(program, alone[own], np.maximum(step.op_s[own], 1e-7), busy, step.name))
    return found


def _overlap_examples(job: str, ranks: Sequence[RankGraph]) -> list[Example]:
    """Each step of each rank as a program of its streams; kernels beside collectives are judged."""
    shares = [_overlapped(rank) for rank in ranks]
    times: dict[object, list[float]] = defaultdict(list)
    for rank, share in zip(ranks, shares, strict=True):
        for node in np.flatnonzero((rank.nodes["kind"] == OP) & (share < ALONE)).tolist():
            times[_signature(rank, node)].append(float(rank.duration_s[node]))
    usual = {key: float(np.median(found)) for key, found in times.items() if len(found) >= FEWEST}
    examples = []
    for place, (rank, share) in enumerate(zip(ranks, shares, strict=True)):
        for step in np.unique(rank.nodes["step"]).tolist():
            own = np.flatnonzero((rank.nodes["step"] == step) & (rank.nodes["work"] >= 0) & (rank.duration_s > 0))
            works = [rank.works[work] for work in rank.nodes["work"][own].tolist()]
            alone = np.array([usual.get(_signature(rank, node), np.nan) for node in own.tolist()])
            learnable = [isinstance(w, Op) and w.kind != OPAQUE and min(w.dims, default=0) > 0 for w in works]
            judged = np.isfinite(alone) & (share[own] > OVERLAPPED) & np.array(learnable, dtype=np.bool_)
            if judged.any():
                streams = [rank.streams[stream] for stream in rank.nodes["stream"][own].tolist()]
                program = Program(tuple(map(Node, works, streams)), (), f"{place}")
                seconds = rank.duration_s[own]
                given = np.where(np.isfinite(alone), alone, seconds)
                examples.append(Example(program, given, np.where(judged, seconds, np.nan), 1, job))
    return examples


def _signature(rank: RankGraph, node: int) -> tuple[object, ...]:
    nodes = rank.nodes
    work = int(nodes["work"][node])
    return nodes["name"][node], rank.works[work] if work >= 0 else None, nodes["blocks"][node], nodes["threads"][node]


def _overlapped(rank: RankGraph) -> Array:
    """Share of each node's time in which a collective runs on another stream, ``(n,)``."""
    spans = np.flatnonzero((rank.nodes["kind"] == COLLECTIVE) & (rank.duration_s > 0))
    both = np.zeros(len(rank))
    for span in spans.tolist():
        other = rank.nodes["stream"] != rank.nodes["stream"][span]
        common = np.minimum(rank.end_s, rank.end_s[span]) - np.maximum(rank.start_s, rank.start_s[span])
        both += np.where(other, np.maximum(common, 0.0), 0.0)
    return np.minimum(both / np.maximum(rank.duration_s, 1e-12), 1.0)
