"""Task *ops*: seconds of the calls of training scripts that a CPU runs eagerly; families of models held out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import HeteroData

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.base.files import digest, digest_files
from stepsight.dataset.hardware.hardware import Hardware, find_hardware
from stepsight.dataset.hardware.physics import roofline_seconds
from stepsight.dataset.imported.graph_dataset import make_dataset
from stepsight.dataset.imported.imported_run import has_traces, run_folders
from stepsight.dataset.imported.trace_graphs import TraceGraphs
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.context.context_task import ContextTask, Design
from stepsight.experiments.studies.context.edgeless_models import table, trees
from stepsight.experiments.studies.context.neighbour_features import neighbour_features
from stepsight.experiments.studies.context.network_models import network, without_edges
from stepsight.experiments.studies.context.over_regressors import ProductRegressors
from stepsight.features.host_call_features import call_features, call_label
from stepsight.training.measured.host_steps import HostStep, host_step

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
LEAST_S = 4e-6  # that any call takes beside its roofline
TOGETHER = 32  # runs whose graphs are in memory at once
CACHE = "ops-steps.pt"
EPOCHS = 30
_NUMBER = re.compile(r"[-_]\d+$")


@dataclass(frozen=True)
class Script:
    """What a script's host did in a step.

    Attributes:
        name: ``FAMILY-NUMBER``.
        step: Its calls, geometric means over repeats.
        data: ``(2, e)``: calls that make and use a tensor.
        spread: Mean |log| between repeats, weighted by time; NaN where there is one.
    """

    name: str
    step: HostStep
    data: Ints
    spread: float


def ops_task(folder: Path) -> ContextTask:
    """The task, from collections of scripts called ``FAMILY-NUMBER``, or from folders of such (repeats).

    Raises:
        TraceError: If no collection holds steps of a host that were also timed without a profiler.
    """
    scripts = read_scripts(folder)
    if not scripts:
        raise TraceError(f"{folder} must hold collections of scripts that a CPU ran (`collect --script`), got none")
    hardware = find_hardware("local-cpu")
    assert hardware is not None
    labels = sorted({label for script in scripts for label in _labels(script.step)})
    graphs = [script_graph(script, number, labels, hardware) for number, script in enumerate(scripts)]
    steps = [script.step for script in scripts]
    groups = [_NUMBER.sub("", script.name) for script in scripts]
    spreads = [script.spread for script in scripts if np.isfinite(script.spread)]
    product = ProductRegressors(steps, groups)
    over = {
        "table": table,
        "trees, neighbours' features": trees(neighbour_features),
        "sum without edges": without_edges("op"),
    }
    return ContextTask(
        "ops",
        "time-weighted |log| error of calls within steps, families held out",
        graphs,
        groups,
        floor=float(np.mean(spreads)) if spreads else None,
        designs={
            "data, order and repetition edges": Design("op"),
            "data edges": Design("op", None, ("data",)),
            "all edges, one round": Design("op", layers=1),
        },
        plain_models={"product: physics, trees and known calls": product.alone}
        | {f"product, then {name}": product.corrected(fit) for name, fit in over.items()},
        networks={"GNN over the product, all edges": product.corrected(network(Design("op")))},
        epochs=EPOCHS,
    )


def read_scripts(folder: Path) -> list[Script]:
    """Every script of a folder; kept beside them, because reading takes minutes."""
    runs = list(_runs(folder))
    key = digest(digest_files([run / "manifest.json" for _, run in runs]), *(name for name, _ in runs))
    path = folder / CACHE
    if path.exists():
        known = torch.load(path, weights_only=True)
        if known["key"] == key:
            return [_script(each) for each in known["scripts"]]
    found: dict[str, list[tuple[HostStep, Ints]]] = {}
    for begin in range(0, len(runs), TOGETHER):
        part = runs[begin : begin + TOGETHER]
        for (name, _), step in zip(part, _read([run for _, run in part]), strict=True):
            if step is not None:
                found.setdefault(name, []).append(step)
    scripts = [_merged(name, repeats) for name, repeats in sorted(found.items())]
    torch.save({"key": key, "scripts": [_plain(script) for script in scripts]}, path)
    return scripts


def _runs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names of scripts, and run folders, of all repeats."""
    within = sorted(path for path in folder.iterdir() if path.is_dir())
    for path in within:
        if (path / "runs").is_dir():
            yield from ((path.name, run) for run in run_folders(path) if has_traces(run))
        elif path.name.startswith("repeat"):
            yield from _runs(path)


def _read(runs: Sequence[Path]) -> list[tuple[HostStep, Ints] | None]:
    with TemporaryDirectory(prefix="stepsight-") as scratch:
        make_dataset(runs, Path(scratch) / "dataset", scopes=("step",))
        graphs = TraceGraphs(Path(scratch) / "dataset")
        places: list[list[int]] = [[] for _ in runs]
        for place, run in enumerate(graphs.values("source")):
            places[run].append(place)
        found: list[tuple[HostStep, Ints] | None] = []
        for own in places:
            step = host_step(graphs, own) if own else None
            if step is None:
                found.append(None)
            else:
                found.append((step, graphs.column(("op", "data", "op"), "edge_index", [step.place])[0]))
    return found


def _merged(name: str, repeats: Sequence[tuple[HostStep, Ints]]) -> Script:
    (first, data), alike = repeats[0], [step for step, _ in repeats if step.ops == repeats[0][0].ops]
    logs = np.log(np.maximum([step.op_s for step in alike], 1e-8))
    weight = np.exp(logs.mean(axis=0))
    spread = float(np.average(np.abs(logs[0] - logs[-1]), weights=weight)) if len(alike) > 1 else float("nan")
    step_s = float(np.exp(np.mean([np.log(step.step_s) for step in alike])))
    return Script(name, HostStep(name, first.ops, first.calls, first.phase, weight, step_s), data, spread)


def _plain(script: Script) -> dict[str, object]:
    step = script.step
    return {
        "name": script.name,
        "ops": [[op.kind, list(op.dims), op.dtype] for op in step.ops],
        "calls": list(step.calls),
        "phase": torch.from_numpy(step.phase),
        "op_s": torch.from_numpy(step.op_s),
        "step_s": step.step_s,
        "data": torch.from_numpy(np.ascontiguousarray(script.data)),
        "spread": script.spread,
    }


def _script(of: dict[str, object]) -> Script:
    told: dict[str, object] = of
    ops = tuple(Op(kind, tuple(dims), dtype) for kind, dims, dtype in told["ops"])  # type: ignore[attr-defined]
    phase, op_s, data = (told[name].numpy() for name in ("phase", "op_s", "data"))  # type: ignore[attr-defined]
    name, calls = str(told["name"]), tuple(map(str, told["calls"]))  # type: ignore[call-overload]
    step = HostStep(name, ops, calls, phase, op_s, float(told["step_s"]))  # type: ignore[arg-type]
    return Script(name, step, data, float(told["spread"]))  # type: ignore[arg-type]


def script_graph(script: Script, number: int, labels: Sequence[str], hardware: Hardware) -> HeteroData:
    """A step as a graph: its calls, and edges of data, of order, and between calls of one signature.

    Args:
        script: The step.
        number: Of the script in the task, which ``over_regressors`` reads.
        labels: Of all calls of the task.
        hardware: For the roofline.
    """
    step, graph = script.step, HeteroData()
    baseline = LEAST_S + np.array([roofline_seconds(op, hardware) for op in step.ops])
    own = np.nan_to_num(call_features(step.calls, step.ops, step.phase.tolist(), baseline))
    named = [labels.index(label) for label in _labels(step)]
    pairs = {"data": script.data, "order": _in_order(len(step.ops)), "again": _again(step)}
    graph["op"].x = torch.from_numpy(
        np.concatenate([own, np.eye(len(labels))[named], np.eye(3)[step.phase]], 1)
    ).float()
    graph["op"].baseline = torch.from_numpy(baseline).float()
    graph["op"].roofline = graph["op"].baseline
    graph["op"].key = torch.tensor([4 * label + phase for label, phase in zip(named, step.phase.tolist(), strict=True)])
    graph["op"].seconds = torch.from_numpy(np.maximum(step.op_s, 1e-7)).float()
    graph["op"].weight = graph["op"].seconds / graph["op"].seconds.sum()
    graph["op"].around = torch.from_numpy(_around(step, pairs, own)).float()
    for name, ends in pairs.items():
        graph["op", name, "op"].edge_index = torch.from_numpy(ends.astype(np.int64))
        graph["op", name, "op"].edge_attr = torch.from_numpy(_about(step, ends)).float()
    graph.total = torch.tensor([step.step_s]).float()
    graph.number = number
    return graph


def _labels(step: HostStep) -> list[str]:
    return [call_label(call, op) for call, op in zip(step.calls, step.ops, strict=True)]


def _in_order(count: int) -> Ints:
    return np.stack([np.arange(count - 1), np.arange(1, count)]) if count > 1 else np.zeros((2, 0), dtype=np.int64)


def _again(step: HostStep) -> Ints:
    """Each call, and the next one of its signature."""
    last: dict[tuple[str, Op], int] = {}
    pairs = []
    for place, key in enumerate(zip(step.calls, step.ops, strict=True)):
        if key in last:
            pairs.append((last[key], place))
        last[key] = place
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T


def _about(step: HostStep, ends: Ints) -> Array:
    """Of each edge: bytes of the source, calls between, and bytes moved between, as logarithms, ``(e, 3)``."""
    moved = np.array([float(op.num_bytes) for op in step.ops])
    before = np.concatenate([[0.0], np.cumsum(moved)])
    source, target = ends
    since = np.abs(before[target] - before[np.minimum(source + 1, len(moved))])
    return np.stack([np.log1p(moved[source]), np.log1p(np.abs(target - source)), np.log1p(since)], axis=1)


def _around(step: HostStep, pairs: dict[str, Ints], own: Array) -> Array:
    """Hand-made features of order, ``(n, f)``: the calls before and after, and how far data come and go."""
    count = len(step.ops)
    parts = [np.roll(own[:, :9], shift, axis=0) for shift in (2, 1, -1)]
    for name in ("data", "again"):
        ends, about = pairs[name], _about(step, pairs[name])
        for side in (1, 0):
            nearest = np.full((count, 3), 40.0)
            np.minimum.at(nearest, ends[side], about)
            farthest = np.zeros((count, 3))
            np.maximum.at(farthest, ends[side], about)
            parts += [nearest, farthest, np.bincount(ends[side], minlength=count)[:, None].astype(float)]
    moved = np.cumsum([float(op.num_bytes) for op in step.ops])
    parts.append(np.stack([np.log1p(moved), np.arange(count) / count, np.full(count, np.log1p(moved[-1]))], axis=1))
    return np.concatenate(parts, axis=1)
