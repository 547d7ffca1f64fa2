"""The graph of one rank: kinds, dependencies and steps of a small made-up job."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.graph_files import write_graph
from stepsight.dataset.graph.program import COLLECTIVE, HOST, WHY, WHY_NUMBER, Dependency, Program
from stepsight.dataset.trace_graphs.traced_graphs import step_graphs
from stepsight.dataset.traces.read_rank import lateness, read_rank
from tests.dataset.kineto_files import KinetoFile, tiny_step
from tests.dataset.traced_jobs import PRODUCT, REDUCTION, GpuJob, two_ranks


def graph_of(tmp_path: Path, file: KinetoFile) -> Program:
    return read_rank(file.write(tmp_path / "trace.json"))


def edges(graph: Program, why: str) -> list[tuple[str, str]]:
    names = [graph.names[name] for name in graph.columns["name"].tolist()]
    ends = zip(
        graph.edge_columns["source"].tolist(),
        graph.edge_columns["target"].tolist(),
        graph.edge_columns["why"].tolist(),
        strict=True,
    )
    return [(names[a], names[b]) for a, b, number in ends if WHY[number].value == why]


def test_every_kernel_has_a_place(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, GpuJob().step(1).file)
    work = {
        graph.names[n]: graph.works[w]
        for n, w in zip(graph.columns["name"], graph.columns["work"], strict=True)
        if w >= 0
    }
    assert str(work["very_own_kernel(float*)"]).startswith("opaque[64x256x32x1024]")
    assert work["multi_tensor_apply_kernel"].kind == "adamw"
    found = [(graph.kind_of(n), graph.works[graph.columns["work"][n]]) for n in range(len(graph)) if graph.on_device[n]]
    assert found[0][0] == "linear" and found[0][1].dims == (1024, 512, 256)
    assert found[2][0] in ("linear_dgrad", "linear_wgrad")
    assert graph.columns["phase"][graph.on_device].tolist() == [0, 0, 1, 2]


def test_launches_streams_and_waits_are_tied(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, two_ranks()[0])
    assert ("cudaLaunchKernel", REDUCTION) in edges(graph, "launch")
    assert len(edges(graph, "launch")) == int(graph.on_device.sum())
    assert (PRODUCT, "very_own_kernel(float*)") in edges(graph, "stream_order")
    waits = edges(graph, "synchronisation")
    assert (PRODUCT, REDUCTION) in waits  # inferred: no sync events in the trace
    assert (REDUCTION, "multi_tensor_apply_kernel") in waits
    assert ("multi_tensor_apply_kernel", "cudaDeviceSynchronize") in waits
    assert (PRODUCT, PRODUCT) in edges(graph, "data")  # forward to backward, by autograd's number
    assert set(graph.columns["kind"][graph.columns["group"] >= 0].tolist()) == {COLLECTIVE}


def test_backward_hangs_together_with_the_thread_that_starts_it(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, GpuJob().step(1).file)
    host = graph.columns["kind"] == HOST
    a, b = graph.edge_columns["source"], graph.edge_columns["target"]
    both = host[a] & host[b]
    across = graph.columns["stream"][a[both]] != graph.columns["stream"][b[both]]
    assert across.sum() == 2  # to autograd's thread, and back


def test_nothing_starts_later_than_its_dependencies_explain(tmp_path: Path) -> None:
    for file in two_ranks():
        assert lateness(graph_of(tmp_path, file)).max() < 5e-6


def test_edges_lead_forward_and_ends_precede_starts(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, two_ranks()[1])
    assert (graph.edge_columns["source"] < graph.edge_columns["target"]).all()
    ready = graph.end_s[graph.edge_columns["source"]] + graph.delay_s
    assert (ready <= graph.start_s[graph.edge_columns["target"]] + 3e-6).all()


def test_steps_without_annotations_come_from_the_optimizer_or_from_repetition(tmp_path: Path) -> None:
    job = GpuJob()
    for number in range(5):
        job.step(number)
    bare = [event for event in job.file.events if not event["name"].startswith("ProfilerStep")]
    job.file.events = bare
    by_optimizer = graph_of(tmp_path, job.file)
    job.file.events = [event for event in bare if not event["name"].startswith(("Optimizer", "autograd"))]
    for event in job.file.events:
        event["args"].pop("Sequence number", None)
    by_repetition = graph_of(tmp_path, job.file)
    period = np.diff(by_optimizer.steps_s, axis=1).mean()
    assert len(by_optimizer.steps_s) >= 4 and len(by_repetition.steps_s) >= 3
    assert np.diff(by_repetition.steps_s, axis=1).ravel() == pytest.approx(period, rel=0.02)


def test_kernels_without_recorded_launches_follow_their_framework_calls(tmp_path: Path) -> None:
    file = GpuJob().step(1).file
    calls = [
        event for event in file.events if event.get("cat") == "cpu_op" and not event["name"].startswith("autograd")
    ]
    kernels = [event for event in file.events if event.get("cat") == "kernel"]
    for number, (call, kernel) in enumerate(zip(calls, kernels, strict=True), 1):
        call["args"]["External id"] = kernel["args"]["External id"] = number
    file.events = [event for event in file.events if event.get("cat") != "cuda_runtime"]
    graph = graph_of(tmp_path, file)
    assert graph.dependency_counts()["launch"] == len(kernels)
    assert any("launches were not recorded" in warning for warning in graph.warnings)


def test_ties_that_do_not_hold_are_told(tmp_path: Path) -> None:
    file = GpuJob().step(1).step(2).step(3).file
    kernels = [event for event in file.events if event.get("cat") == "kernel"]
    for event in kernels:
        event["args"]["correlation"] = kernels[0]["args"]["correlation"]
    assert any("correlation ids repeat" in warning for warning in graph_of(tmp_path, file).warnings)
    file = GpuJob().step(1).file
    for event in file.events:
        if event.get("cat") == "cpu_op":
            event["ts"] += 1e6
    assert any("no framework call encloses" in warning for warning in graph_of(tmp_path, file).warnings)
    assert not graph_of(tmp_path, GpuJob().step(1).file).warnings


@pytest.mark.parametrize("ts", ["nan", "inf", 1e300, -1e9])
@pytest.mark.parametrize("name", ["cpu_op", "kernel", "user_annotation", "record_param_comms"])
def test_times_that_no_clock_has_are_refused(name: str, ts: object, tmp_path: Path) -> None:
    file = GpuJob().step(1).file
    own = {"cat": name} if name != "record_param_comms" else {"cat": "cpu_op", "name": name}
    file.events.append({"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": ts, "dur": 5, "args": {}, **own})
    with pytest.raises(TraceError, match="ts and dur must lie within"):
        graph_of(tmp_path, file)


def test_kernels_alone_are_a_graph(tmp_path: Path) -> None:
    file = GpuJob().step(1).step(2).step(3).file
    file.events = [event for event in file.events if event.get("cat") == "kernel"]
    graph = graph_of(tmp_path, file)
    assert graph.unrecorded_s.sum() > 0 and len(graph.steps_s) >= 1


def test_host_traces_are_graphs_too(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, tiny_step(0, 2))
    counts = graph.dependency_counts()
    assert graph.device == "cpu" and counts["host_order"] and counts["launch"] and counts["synchronisation"]
    assert counts["data"] == 1


def test_compiled_functions_on_a_host_are_warned_of(tmp_path: Path) -> None:
    """The library calls within one are ops; its fused kernels are not in the trace."""
    file = tiny_step()
    file.call("## Call CompiledFxGraph f123 ##", 25, 90)
    graph = graph_of(tmp_path, file)
    assert [text for text in graph.warnings if "functions of torch.compile" in text]
    assert any(work.kind == "linear" for work in graph.works)
    assert not graph_of(tmp_path, tiny_step()).warnings


@pytest.mark.parametrize("world_size", [1, 2])
def test_graphs_round_trip_through_files(tmp_path: Path, world_size: int) -> None:
    graph = graph_of(tmp_path, GpuJob(0, world_size).step(1).file)
    write_graph(graph, tmp_path / "out", "rank0")
    again = Program.load(tmp_path / "out" / "rank0")
    for name in ("start_s", "duration_s", "delay_s", "steps_s", "unrecorded_s"):
        assert np.array_equal(getattr(again, name), getattr(graph, name))
    assert all(np.array_equal(again.columns[name], graph.columns[name]) for name in graph.columns)
    assert (again.works, again.names, again.streams, again.groups) == (
        graph.works,
        graph.names,
        graph.streams,
        graph.groups,
    )


def test_stored_graphs_with_wild_indices_are_refused(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, GpuJob().step(1).file)
    wild = graph.replace(columns={**graph.columns, "work": graph.columns["work"] + 1000})
    write_graph(wild, tmp_path / "out", "rank0")
    with pytest.raises(TraceError, match="work of nodes must be from -1 to"):
        Program.load(tmp_path / "out" / "rank0")


def test_an_execution_trace_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "et.json"
    node = {"id": 1, "name": "aten::rot90", "rf_id": 3, "inputs": [[5, 6, 0, 4, 4, "cuda:0"]], "outputs": []}
    path.write_text(json.dumps({"schema": "1.0.1", "nodes": [node]}))
    with pytest.raises(TraceError, match="same run"):
        read_rank(GpuJob().step(1).file.write(tmp_path / "t.json"), None, path)


def test_an_annotated_op_depends_on_what_its_parts_read(tmp_path: Path) -> None:
    """Kernels of a composite belong to its annotation; what an execution trace tells of its parts is its own."""
    file = KinetoFile()
    file.note("stepsight::op kind=swiglu dims=64 dtype=fp32", 5, 40)
    for number, name in enumerate(("aten::silu", "aten::mul", "aten::add")):
        begin = 10.0 + 20 * number
        file.call(name, begin, 15, [64], Record_function_id=7 + number).launch(begin + 5, number + 1)
        file.kernel(name, 100.0 + 50 * number, 30, 7, number + 1)
    path, (one, other) = tmp_path / "et.json", ([[5, number, 0, 64, 4, "cuda:0"]] for number in (1, 2))
    calls = [("aten::silu", [], one), ("aten::mul", one, other), ("aten::add", other, [])]
    nodes = [
        {"id": place, "name": name, "rf_id": 6 + place, "inputs": read, "outputs": written}
        for place, (name, read, written) in enumerate(calls, 1)
    ]
    path.write_text(json.dumps({"schema": "1.0.1", "nodes": nodes}))
    graph = read_rank(file.write(tmp_path / "t.json"), None, path)
    kernels = np.flatnonzero(graph.on_device)
    data = graph.edge_columns["why"] == WHY_NUMBER[Dependency.DATA]
    assert [graph.kind_of(node) for node in kernels] == ["swiglu", "swiglu", "add"]
    assert graph.edge_columns["source"][data].tolist() == [kernels[1]]
    assert graph.edge_columns["target"][data].tolist() == [kernels[2]]


def test_an_observed_step_gives_its_dependencies_and_not_its_times(tmp_path: Path) -> None:
    """The observer made the second step three times as long: the first one's times count, with the second's edges."""
    file = KinetoFile()
    for step, (begin, slow) in enumerate(((0.0, 1.0), (1000.0, 3.0))):
        file.segment("step", begin, 900)
        for number, name in enumerate(("aten::gelu", "aten::add", "aten::mul")):
            record = {"Record_function_id": 7 + number} if step else {}
            file.call(name, begin + 10 + number * 60 * slow, 50 * slow, [64], **record)
    path = tmp_path / "et.json"
    tensors = [[[5, number, 0, 64, 4, "cpu"]] for number in (1, 2, 3)]
    nodes = [
        {"id": place, "name": name, "rf_id": 6 + place, "inputs": read, "outputs": written}
        for place, (name, read, written) in enumerate(
            [("aten::gelu", [], tensors[0]), ("aten::add", [], tensors[1]), ("aten::mul", tensors[0], tensors[2])], 1
        )
    ]
    path.write_text(json.dumps({"schema": "1.0.1", "nodes": nodes}))
    graph = read_rank(file.write(tmp_path / "t.json"), None, path)
    ops = np.flatnonzero(graph.columns["step"] == 0)
    ops = ops[graph.on_device[ops]]
    assert len(graph.steps_s) == 1 and graph.duration_s[ops] == pytest.approx([50e-6] * 3)
    data = graph.edge_columns["why"] == WHY_NUMBER[Dependency.DATA]
    assert (ops[0], ops[2]) in set(
        zip(graph.edge_columns["source"][data], graph.edge_columns["target"][data], strict=True)
    )
    assert np.exp(step_graphs([graph]).rows["op"]["y"]) == pytest.approx(50e-6, rel=1e-5)
    assert read_rank(file.write(tmp_path / "t.json")).observed == 1


def test_an_observed_step_stays_where_no_other_has_its_work(tmp_path: Path) -> None:
    """A stub of a step before the observed one says nothing of a training step."""
    file = KinetoFile().segment("step", 0.0, 50).call("aten::add", 10, 5, [64]).segment("step", 100.0, 900)
    for number in range(6):
        file.call("aten::gelu", 110 + 60 * number, 50, [64], Record_function_id=7 + number)
    graph = read_rank(file.write(tmp_path / "t.json"))
    assert len(graph.steps_s) == 2 and graph.observed == 0 and graph.slowed == (1,)
    assert "they stay" in " ".join(graph.warnings)


def test_kernels_without_gaps_are_not_missing(tmp_path: Path) -> None:
    """A trace of kernels alone, each of which starts when the one before ends, lacks none."""
    file = KinetoFile()
    for number in range(4):
        file.kernel("ampere_sgemm_128x64_tn", 10.0 * number, 10.0, 7, number)
    assert not [told for told in graph_of(tmp_path, file).warnings if "missing" in told]
