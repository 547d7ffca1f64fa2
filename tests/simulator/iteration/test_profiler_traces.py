"""Predicted traces satisfy the rules by which HTA, TensorBoard and our own import read traces of PyTorch's profiler."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.hardware.hardware import Fabric, Hardware, Link
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import Simulation, simulate
from stepsight.simulator.iteration.timeline import num_kernels, profiler_traces
from stepsight.simulator.replay.replay import replay
from tests.simulator.conftest import JobMaker

Trace = dict[str, Any]


@pytest.fixture
def simulation(make_job: JobMaker, gpu: Hardware) -> Simulation:
    job = make_job(pp=2, dp=2, tp=2, micro_batches=3, bucket_mbytes=0.05)
    return simulate(job, RooflineLatency(gpu, Fabric("toy", Link(1e10, 3e-6), Link(1e10, 3e-6))))


@pytest.fixture
def traces(simulation: Simulation) -> dict[int, Trace]:
    return {rank: json.loads(json.dumps(trace)) for rank, trace in profiler_traces(simulation)}


def of(trace: Trace, category: str) -> list[Trace]:
    return [event for event in trace["traceEvents"] if event.get("cat") == category and event["ph"] == "X"]


def test_every_trace_names_its_rank(traces: dict[int, Trace]) -> None:
    """HTA refuses traces without a rank; two stages of two data-parallel, tensor-parallel ranks are 0 and 4."""
    assert list(traces) == [0, 4]
    for rank, trace in traces.items():
        assert trace["distributedInfo"] == {"backend": "nccl", "rank": rank, "world_size": 8}


def test_one_step_holds_every_host_event(traces: dict[int, Trace], simulation: Simulation) -> None:
    for trace in traces.values():
        (step,) = (event for event in of(trace, "user_annotation") if event["name"].startswith("ProfilerStep#"))
        passes = [event for event in of(trace, "user_annotation") if event is not step]
        assert len(passes) == 7  # three micro-batches, forward and backward, and the optimizer
        assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(passes))
        end = step["ts"] + step["dur"]
        for event in [*of(trace, "cpu_op"), *of(trace, "cuda_runtime")]:
            assert step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= end
        assert max(event["ts"] + event["dur"] for event in of(trace, "kernel")) <= end + 1e-3
        assert step["dur"] == pytest.approx(simulation.iteration_time_s * 1e6, abs=3.0)


def test_each_kernel_has_one_earlier_launch(traces: dict[int, Trace]) -> None:
    """Kernels and launches are joined by correlation; streams are numbers; kernels of a stream never overlap."""
    for trace in traces.values():
        launches = {event["args"]["correlation"]: event for event in of(trace, "cuda_runtime")}
        kernels = of(trace, "kernel")
        assert len(launches) == len(kernels) == len({event["args"]["correlation"] for event in kernels})
        for kernel in kernels:
            launch = launches[kernel["args"]["correlation"]]
            assert launch["ts"] + launch["dur"] <= kernel["ts"]
            assert kernel["tid"] == kernel["args"]["stream"] and isinstance(kernel["tid"], int)
        for stream in {event["tid"] for event in kernels}:
            spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in kernels if e["tid"] == stream)
            assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(spans))


def test_collectives_are_known_by_name(traces: dict[int, Trace]) -> None:
    """HTA and TensorBoard tell communication by ``nccl`` in the names of kernels and operators."""
    kernels = [event for trace in traces.values() for event in of(trace, "kernel")]
    collectives = [event for event in kernels if event["name"].startswith("ncclDevKernel_")]
    assert {"ncclDevKernel_AllReduce_Sum_RING", "ncclDevKernel_SendRecv"} <= {
        event["name"].split("(")[0] for event in collectives
    }
    assert all("nccl" not in event["name"] for event in kernels if event["tid"] == 7)  # the computation


def test_an_import_finds_ops_and_times(traces: dict[int, Trace], simulation: Simulation, tmp_path: Path) -> None:
    """Every op is recognised, and the replay takes as long as the prediction."""
    paths = []
    for rank, trace in traces.items():
        paths.append(tmp_path / f"rank{rank}.json")
        paths[-1].write_text(json.dumps(trace))
    graphs = import_ranks(paths, [], None).graphs
    assert all(graph.columns["known"][graph.on_device].all() for graph in graphs)
    assert replay(graphs).measured_s == pytest.approx(simulation.iteration_time_s, rel=0.05)
    for graph in graphs:  # training, with forward, backward and optimizer, and backward after its forward
        assert not any("inference" in text for text in graph.warnings)
        assert set(graph.columns["phase"][graph.on_device].tolist()) == {0, 1, 2}
        assert graph.dependency_counts()["data"] > 10


def test_chosen_stages(traces: dict[int, Trace], simulation: Simulation) -> None:
    """The traces of chosen stages are those that are made with all; kernels are counted beforehand."""
    ((rank, trace),) = profiler_traces(simulation, stages=[1])
    same = json.loads(json.dumps(trace))
    assert rank == 4
    assert [(e["ts"], e["dur"]) for e in of(same, "kernel")] == [(e["ts"], e["dur"]) for e in of(traces[4], "kernel")]
    messages = sum("SendRecv" in event["name"] for event in of(same, "kernel"))
    assert num_kernels(simulation)[1] == len(of(same, "kernel")) - messages


def test_hta_reads_them(traces: dict[int, Trace], tmp_path: Path) -> None:
    analysis = pytest.importorskip("hta.trace_analysis", reason="needs HolisticTraceAnalysis")
    for rank, trace in traces.items():
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace))
    table = analysis.TraceAnalysis(trace_dir=str(tmp_path)).get_temporal_breakdown(visualize=False)
    assert sorted(table["rank"]) == [0, 4]
