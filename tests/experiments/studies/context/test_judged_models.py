"""Tasks of calls and of clusters, and what the benchmark keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import ParallelSpec
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.box_spec import HARDWARE, read_box
from stepsight.experiments.studies.context.cluster_task import BoxRun, run_graph
from stepsight.experiments.studies.context.context_coverage import Residuals, errors_of, residuals_of
from stepsight.experiments.studies.context.context_task import ContextTask
from stepsight.experiments.studies.context.edgeless_models import table
from stepsight.experiments.studies.context.judged_cache import Judged, JudgedCache
from stepsight.experiments.studies.context.over_regressors import ProductRegressors
from stepsight.experiments.studies.context.traced_ops_task import Script, script_graph
from stepsight.experiments.studies.small_to_large.box_cases import MODELS, case
from stepsight.training.context.through_simulator import Iteration
from stepsight.training.measured.box_plans import SleepingLatency
from stepsight.training.measured.host_steps import HostStep


def _script(family: str, number: int, factor: float = 1.0) -> Script:
    """A product, an addition and the same product again."""
    linear, add = Op("linear", (64, 64 + 32 * number, 64), "fp32"), Op("add", (4096 * (number + 1),), "fp32")
    seconds = factor * np.array([4e-4, 1e-5, 4e-4]) * (number + 2)
    step = HostStep("s", (linear, add, linear), ("aten::mm", "aten::add", "aten::mm"), np.zeros(3, int), seconds, 1e-3)
    return Script(f"{family}-{number}", step, np.array([[0, 1], [1, 2]]), float("nan"))


def _task(scripts: list[Script]) -> ContextTask:
    labels = ["add/add", "linear"]
    hardware = find_hardware("local-cpu")
    assert hardware is not None
    graphs = [script_graph(script, number, labels, hardware) for number, script in enumerate(scripts)]
    return ContextTask("ops", "for a test", graphs, [script.name.split("-")[0] for script in scripts])


def test_a_script_is_a_graph_of_its_calls() -> None:
    """Weights are shares of time; equal calls, calls that follow and calls that share data are joined."""
    (graph,) = _task([_script("a", 0)]).graphs
    assert float(graph["op"].weight.sum()) == pytest.approx(1.0)
    assert graph["op", "again", "op"].edge_index.tolist() == [[0], [2]]
    assert graph["op", "order", "op"].edge_index.tolist() == [[0, 1], [1, 2]]
    assert torch.isfinite(graph["op"].x).all() and torch.isfinite(graph["op"].around).all()


def test_a_table_over_the_products_regressors_learns_what_they_miss() -> None:
    """Each family's calls are known from other families; a factor for all corrects what is left."""
    scripts = [_script(family, number) for family in "abcd" for number in range(3)]
    task = _task(scripts)
    product = ProductRegressors([script.step for script in scripts], task.groups)
    taught, asked = task.graphs[:9], task.graphs[9:]
    for fit in (product.alone, product.corrected(table)):
        off = residuals_of(task, asked, fit(task, taught, 0)(asked))
        assert errors_of(task, asked, off)[0].max() < 0.05


def test_what_was_judged_is_not_judged_again(tmp_path: Path) -> None:
    """The second benchmark reads what the first one kept, unless the data differ."""
    calls: list[int] = []

    def judge() -> Any:
        calls.append(1)
        return Judged(np.array([0.5]), np.array([0.6]), Residuals([np.array([0.25, 0.75])], np.array([0.4])), 1.0)

    task = _task([_script("a", 0)])
    for _ in range(2):
        found = JudgedCache(tmp_path, task).get(("model", 0), judge)
        assert (found.logs.tolist(), found.relative.tolist(), found.seconds) == ([0.5], [0.6], 1.0)
        assert [own.tolist() for own in found.off.nodes] == [[0.25, 0.75]]
        assert found.off.totals.tolist() == [0.4]
    assert len(calls) == 1
    JudgedCache(tmp_path, _task([_script("a", 0, 2.0)])).get(("model", 0), judge)
    JudgedCache(None, task).get(("model", 0), judge)
    assert len(calls) == 3


def test_small_runs_teach_and_all_others_judge() -> None:
    """Where there are teachers, there is one fold."""
    task = ContextTask("t", "a", _task([_script("a", n) for n in range(3)]).graphs, ["small", "b", "c"], whole=True,
                       teachers=("small",))  # fmt: skip
    assert task.folds(3, 0) == [([0], [1, 2])]
    assert task.weights().tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("parallel", [ParallelSpec(tp=2), ParallelSpec(pp=4, virtual_stages=2)])
def test_the_nodes_of_an_iteration_add_up_to_it(parallel: ParallelSpec, tmp_path: Path) -> None:
    """Seconds on the critical path, with messages and the host, are the simulator's answer."""
    job: Job = case("gpt2", MODELS["gpt2"], read_box("8x1@100mbit"), parallel).job
    hardware = find_hardware(HARDWARE)
    assert hardware is not None
    iteration = Iteration.of(job, SleepingLatency(hardware, job.fabric))
    graph = run_graph(
        BoxRun(cast(Any, SimpleNamespace(job=job, iteration_time_s=1.0, folder=tmp_path)), iteration, iteration), 0
    )
    total, _ = iteration.seconds_and_counts(iteration.alone)
    assert float(graph["op"].baseline.double().sum()) == pytest.approx(total, rel=1e-5)
    assert graph["op", "meets", "group"].num_edges > 0
    assert graph["link"].num_nodes == job.parallel.pp
    busy = graph["link"].x[:, :2]
    assert bool((busy[:, 0] > 0).all()) == (job.parallel.tp > 1)  # collectives of tensor parallelism in every pass
    assert bool((busy[:, 1] > 0).all()) == (job.parallel.pp > 1)  # messages between stages
