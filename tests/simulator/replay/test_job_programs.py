"""A job's step as programs takes as long as the job, and makes the same graphs as a trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepsight
from stepsight.dataset import TraceGraphs
from stepsight.dataset.base.errors import JobError, PredictorError, TraceError
from stepsight.dataset.capture.captured import read_captured, write_captured
from stepsight.dataset.graph.program import OP, Program
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.run_manifest import read_manifest
from stepsight.dataset.trace_graphs.graph_dataset import make_dataset
from stepsight.experiments.questions.describe import describe
from stepsight.experiments.reports.run_texts import captures_differ
from stepsight.features.node_features import SegmentGraph
from stepsight.simulator.replay.captured_step import time_captured
from stepsight.simulator.replay.job_programs import captured_job, unmeasured_job, unmeasured_run
from stepsight.training.prediction.captured_prediction import predict_captured

EXAMPLES = Path(__file__).parents[3] / "examples"
PIPELINE, SHARDED = "local-gpt-pp2.toml", "llama3-70b-fsdp-512.toml"
RECORDED = "dlrm-dcnv2-64h100.toml"  # its host replays a recorded graph of the step


@pytest.mark.parametrize(
    "name",
    [PIPELINE, "local-gpt-tp2.toml", "local-llama-ddp2.toml", "bert-large-ddp-16.toml", RECORDED, SHARDED],
)
def test_programs_take_as_long_as_their_job(name: str) -> None:
    job = stepsight.Job.from_file(EXAMPLES / name)
    prediction = stepsight.predict(job)
    step = time_captured(captured_job(job).graphs, prediction.latency)
    assert step.iteration_time_s == pytest.approx(prediction.simulation.iteration_time_s, rel=1e-4)
    if name == RECORDED:  # whose breakdown names other parts
        return
    parts = {cause: seconds / prediction.simulation.iteration_time_s for cause, seconds in step.breakdown.items()}
    told = {cause: seconds / prediction.iteration_time_s for cause, seconds in prediction.breakdown.items()}
    assert parts == pytest.approx(told, abs=0.006)


@pytest.mark.parametrize("parallel", [{"schedule": "zb-h1"}, {"zero_stage": 1}, {"zero_stage": 3, "virtual_stages": 2}])
def test_a_pipeline_sends_when_its_pass_has_ended(parallel: dict[str, Any]) -> None:
    """The last backward ends with a collective of the replicas, which the message to the next stage does not wait for;
    the host launches each pass anew, and messages take nothing from the computation.
    """
    job = stepsight.Job.from_dict({
        "model": {"family": "gpt", "layers": 8, "hidden": 1024, "heads": 16, "vocab": 32000, "seq_len": 1024},
        "parallel": {"pp": 4, "dp": 2, "schedule": "1f1b", **parallel},
        "batch": {"micro_batch": 1, "global_batch": 16, "precision": "bf16"},
        "cluster": {"hardware": "a100-sxm-80gb", "nodes": 1, "devices_per_node": 8},
    })  # fmt: skip
    prediction = stepsight.predict(job)
    step = time_captured(captured_job(job).graphs, prediction.latency)
    assert step.iteration_time_s == pytest.approx(prediction.simulation.iteration_time_s, rel=2e-3)


def test_a_program_is_timed_in_context_pass_by_pass() -> None:
    """A context model gets the segments that it gets for the job: equal ones once."""
    job = stepsight.Job.from_file(EXAMPLES / PIPELINE)
    asked: list[str] = []

    def context(graph: SegmentGraph, alone: Any) -> Any:
        asked.append(graph.program.label)
        return alone * (2.0 if graph.program.label == "backward" else 1.5) * (1 + len(alone) / 100)

    predictor = stepsight.Predictor.load("a100-sxm").with_context(context)
    job = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, hardware="a100-sxm-80gb"))
    prediction = stepsight.predict(job, predictor)
    of_job, num_asked = prediction.simulation.iteration_time_s, len(asked)
    found = predict_captured(captured_job(job), "a100-sxm-80gb", "loopback", predictor)
    assert found.iteration_time_s == pytest.approx(of_job, rel=2e-3)
    assert sorted(set(asked[num_asked:])) == ["backward", "forward", "optimizer"] and len(asked) <= 2 * num_asked
    graphs = [each.replace(device="cpu") for each in captured_job(job).graphs]  # in context, ops hold the host's time
    waits = [each.replace(delay_s=np.where(into_ops(each), 1.0, 0.0)) for each in graphs]
    times = [time_captured(each, prediction.latency).iteration_time_s for each in (graphs, waits)]
    assert times == [pytest.approx(found.iteration_time_s, rel=2e-3)] * 2


def into_ops(graph: Program) -> np.ndarray:
    return graph.columns["kind"][graph.edge_columns["target"]] == OP


def test_one_rank_of_a_program_is_shown_and_predicted_by_its_path(tmp_path: Path) -> None:
    """An edited program is saved anywhere, and what differs from the first one is shown."""
    program = captured_job(stepsight.Job.from_file(EXAMPLES / PIPELINE)).graphs[0]
    program.save(tmp_path / "first")
    linear = [node for node, each in enumerate(program.nodes) if each.work.kind == "linear"]
    program.remove(linear).save(tmp_path / "edited" / "rank0")
    told = describe(tmp_path / "first.json")
    assert told["ranks"][0]["ops_by_kind"]["linear"] == len(linear) and "memory unknown" in told["text"]
    one, other = (read_captured(tmp_path / name) for name in ("first", "edited/rank0"))
    assert captures_differ(one.to_dict(), other.to_dict())["ranks"][0]["ops_by_kind"] == {"linear": [len(linear), 0]}
    assert predict_captured(one, "local-cpu").iteration_time_s == stepsight.predict(program).iteration_time_s


def test_a_program_is_saved_edited_and_predicted(tmp_path: Path) -> None:
    job = stepsight.Job.from_file(EXAMPLES / SHARDED)
    write_captured(captured_job(job), tmp_path / "step")
    assert read_captured(tmp_path / "step").world_size == 512
    program = stepsight.Program.load(tmp_path / "step" / "rank0")
    whole = stepsight.predict(program)
    assert whole.iteration_time_s == pytest.approx(stepsight.predict(job).simulation.iteration_time_s, rel=2e-3)
    assert sum(whole.breakdown.values()) == pytest.approx(whole.iteration_time_s) and "512 x h100" in repr(whole)
    assert whole.memory["fits"] is None and any("memory of tensors is not known" in text for text in whole.warnings)
    twice = program.of_parts([program, program, program.part([0], "")])
    steps = np.repeat([0, 1, -1], [len(program), len(program), 1])
    facts = {name: getattr(program, name) for name in ("rank", "world_size", "device_name")}
    traced = twice.replace(columns={**twice.columns, "step": steps}, slowed=(0,), steps_s=np.zeros((2, 2)), **facts)
    assert stepsight.predict(traced).iteration_time_s == pytest.approx(whole.iteration_time_s)  # of one step alone
    assert repr(program).endswith("streams, rank 0 of 512 on h100-sxm-80gb)")
    attention = [node for node, each in enumerate(program.nodes) if each.work.kind == "attention"]
    without = stepsight.predict(program.remove(attention))
    saved = sum(stepsight.predict(program.part([node], "one")).iteration_time_s for node in attention[:1])
    assert 0 < whole.iteration_time_s - without.iteration_time_s < 2 * len(attention) * saved
    assert stepsight.predict(program, "roofline").source.startswith("roofline")
    with pytest.raises(JobError, match="do not go with a program"):
        stepsight.predict(program, latency="mine")  # type: ignore[call-overload]
    with pytest.raises(PredictorError, match="device_name"):
        stepsight.predict(program.replace(device_name=""))
    with pytest.raises(PredictorError, match="must have nodes"):
        stepsight.predict(program.remove(range(len(program))))
    columns = program.edge_columns
    back = {**columns, "source": columns["target"], "target": columns["source"]}
    with pytest.raises(TraceError, match="the program"):
        stepsight.predict(program.replace(edge_columns=back))


def test_a_job_gives_graphs_without_targets(tmp_path: Path) -> None:
    run = unmeasured_run(EXAMPLES / PIPELINE)
    told = make_dataset((), tmp_path / "data", unmeasured=[run])
    graphs = TraceGraphs(tmp_path / "data")
    assert told["step_graphs"] == 2 and told["edges"]["rendezvous"] > 0
    assert {graph.segment for graph in graphs} == {"step", "forward", "backward", "optimizer"}
    for graph in graphs:
        for kind in ("op", "collective"):
            assert graph[kind].y.isnan().all() and graph[kind].x.isfinite().all()
    program = run.segments[0].program
    made = program.to_heterodata()
    assert np.array_equal(made["op"].x, TraceGraphs(tmp_path / "data", scope="segment")[0]["op"].x)
    assert made["op"].num_nodes == sum(isinstance(node.work, Op) for node in program.nodes)


@pytest.mark.parametrize("name", ["gpt-4L-256h-tp1-pp2", "gpt-3L-256h-tp1-pp1-dp2z3"])
def test_graphs_of_a_job_are_those_of_its_trace(tmp_path: Path, name: str) -> None:
    """Node and edge types, columns of features and of edges, and what data edges say: bytes and reuse distance."""
    (folder,) = (EXAMPLES / "collection" / "runs").glob(f"{name}*")
    asked = unmeasured_job(read_manifest(folder).job)
    make_dataset((), tmp_path / "asked", unmeasured=[asked])
    make_dataset([folder], tmp_path / "traced")
    one, other = (TraceGraphs(tmp_path / part, scope="segment") for part in ("traced", "asked"))
    told = {(graph.segment, tuple(graph["op"].signature.flatten().tolist())): graph for graph in other}
    data = ("op", "data", "op")
    for graph in one:
        same = told[graph.segment, tuple(graph["op"].signature.flatten().tolist())]
        assert graph.metadata() == same.metadata()
        for kind in ("op", "collective"):
            assert graph[kind].x.shape == same[kind].x.shape and np.allclose(graph[kind].x, same[kind].x, atol=1e-6)
        pairs = [dict(zip(map(tuple, each[data].edge_index.T.tolist()), each[data].edge_attr.tolist(), strict=True))
                 for each in (graph, same)]  # fmt: skip
        both = [pair for pair in pairs[1] if pair in pairs[0]]
        assert len(both) >= 0.95 * max(map(len, pairs))
        assert all(pairs[0][pair][1:] == pairs[1][pair][1:] for pair in both)  # the first is the overlap in time
    steps = [TraceGraphs(tmp_path / part, scope="step") for part in ("traced", "asked")]
    kinds = [{key for graph in graphs for key in graph.edge_types if graph[key].num_edges} for graphs in steps]
    relations = ("data", "stream_order", "synchronisation")  # the job has one rank of each stage, and no calls
    assert {key for key in kinds[0] if key[1] in relations} <= kinds[1]
