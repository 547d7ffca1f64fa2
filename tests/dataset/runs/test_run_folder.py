from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.job.specs import Straggler
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_folder import read_collection, read_event_file, read_run
from stepsight.dataset.runs.run_manifest import read_box, read_manifest
from tests.dataset.kineto_files import tiny_step
from tests.dataset.run_folders import job_tables, write_events, write_run

OP = {"kind": "add", "dims": [8], "dtype": "fp32"}
COLLECTIVE = {"kind": "all_reduce", "num_bytes": 8, "group_size": 2, "ranks_per_node": 2}


def test_a_manifest_tells_the_truth_of_a_run(tmp_path: Path) -> None:
    manifest = read_manifest(write_run(tmp_path, 2))
    assert manifest.iteration_time_s == pytest.approx(1e-3)
    assert len(manifest.step_seconds) == 3 and manifest.busy == 2
    assert manifest.job.parallel.tp == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": 2}, "schema = 1, got 2"),
        ({"job": None}, "got no job"),
        ({"rounds": []}, "timed steps"),
        ({"rounds": [[]]}, "timed steps"),
        ({"rounds": [[1e-3], []]}, "timed steps"),
        ({"rounds": [[0.0]]}, "timed steps"),
        ({"rounds": ["fast"]}, "right type"),
        ({"rounds": [["1"]]}, "rounds must be a number, got '1'"),
        ({"rounds": [[float("nan")]]}, "finite, got NaN"),
        ({"rounds": 3}, "rounds must be a list, got 3"),
        ({"role": 3}, "role must be a text, got 3"),
        ({"world_size": "2"}, "world_size must be a whole number, got '2'"),
        ({"fingerprint": []}, "fingerprint must be a table"),
        ({"traces": {"0": "x"}}, "must be a table, got 'x'"),
        ({"traces": {"0": {"kineto": "../x"}}}, "must have no folder, got '../x'"),
        ({"world_size": 3}, "3 != 2"),
        ({"job": {**job_tables(2), "batch": {"micro_batch": 0, "global_batch": 1}}}, "batch.micro_batch must be > 0"),
        ({"traces": {"0": {"kineto": "rank0.kineto.json.gz"}}}, "rank 1 is missing"),
        ({"traces": {"0": {"et": "x"}, "1": {"et": "x"}}}, "must have a trace of a known format (kineto, chakra)"),
        ({"traces": {}}, "must have traces"),
    ],
)
def test_a_wrong_manifest_is_refused_in_one_line(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    run = write_run(tmp_path, 2, **changes)
    with pytest.raises(TraceError) as caught:
        read_run(run)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_stand_in_has_the_trace_of_its_rank_alone(tmp_path: Path) -> None:
    batch = {"micro_batch": 1, "global_batch": 8, "precision": "fp32"}
    told = {"job": {**job_tables(8), "parallel": {"dp": 8}, "batch": batch}, "stand_in": {"rank": 3}}
    run = write_run(tmp_path, files=[], world_size=1, traces={"3": {"kineto": "rank3.kineto.json.gz"}}, **told)
    tiny_step(3, 8).write(run / "rank3.kineto.json.gz")
    manifest = read_manifest(run)
    assert (manifest.stand_in, manifest.busy, manifest.whole) == (3, 1, True)
    (trace,) = read_run(run).ranks
    assert trace.rank == 3


def test_a_stage_that_waits_for_no_other_tells_nothing_of_its_jobs_iteration(tmp_path: Path) -> None:
    job = {**job_tables(2), "parallel": {"pp": 2}}
    told: dict[str, object] = {"job": job, "traces": {}}
    assert read_manifest(write_run(tmp_path, files=[], ranks=2, **told)).whole
    stage = write_run(tmp_path, files=[], name="stage", **{**told, "stand_in": {"rank": 1}, "world_size": 1})
    assert not read_manifest(stage).whole


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stand_in": 3}, "stand_in must be a table, got 3"),
        ({"stand_in": {"rank": "3"}}, "stand_in.rank must be a whole number, got '3'"),
        ({"stand_in": {"rank": 2}}, "stand_in.rank must be one of the job's 2 ranks, got 2"),
        ({"world_size": 2}, "a stand-in is one rank outside of a box, got world_size = 2"),
        ({"traces": {"0": {"kineto": "x"}}}, "must have a trace of rank 1, got ranks [0]"),
    ],
)
def test_a_wrong_stand_in_is_refused_in_one_line(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    told: dict[str, object] = {"job": job_tables(2), "world_size": 1, "traces": {}, "stand_in": {"rank": 1}}
    with pytest.raises(TraceError) as caught:
        read_manifest(write_run(tmp_path, files=[], **{**told, **changes}))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}'])
def test_a_broken_manifest_is_refused(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path)
    (run / "manifest.json").write_text(text)
    with pytest.raises(TraceError, match=r"manifest\.json"):
        read_run(run)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"must have manifest\.json"):
        read_run(tmp_path)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"\\ud800": 1}', "[" * 10**5], ids=["twice", "half", "deep"])
def test_json_that_nobody_writes_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path)
    (run / "manifest.json").write_text(text)
    with pytest.raises(TraceError, match=r"^.*must have manifest\.json of whole JSON, .*$"):
        read_run(run)


def test_the_trace_of_another_rank_is_refused(tmp_path: Path) -> None:
    """A trace says whose it is, and the manifest which file was written."""
    run = write_run(tmp_path / "a", 2)
    (run / "rank1.kineto.json.gz").write_bytes((run / "rank0.kineto.json.gz").read_bytes())
    with pytest.raises(TraceError, match="rank 1 must be its own, got that of rank 0"):
        read_run(run)
    run = write_run(tmp_path / "b", digests={"rank0.kineto.json.gz": "0123"})
    with pytest.raises(TraceError, match="as it was written: SHA-256 0123"):
        read_run(run)


@pytest.mark.parametrize("plan", [{"runs": 3}, {"runs": [3]}, {"events": [{}]}])
def test_a_damaged_plan_in_a_collection_is_one_line(tmp_path: Path, plan: dict[str, object]) -> None:
    write_run(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"schema": 1, **plan}))
    with pytest.raises(TraceError, match=r"plan\.json must hold lists "):
        read_collection(tmp_path)


def test_a_missing_trace_file_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, 2)
    (run / "rank1.kineto.json.gz").unlink()
    with pytest.raises(TraceError, match="rank1"):
        read_run(run)


def test_a_run_is_cut_into_its_segments(tmp_path: Path) -> None:
    segments = read_run(write_run(tmp_path, 2)).segments()
    assert [(s.rank, s.label) for s in segments] == [
        (rank, label) for rank in (0, 1) for label in ("forward", "backward", "optimizer")
    ]
    forward = segments[0]
    assert [node.work.kind for node in forward.program.nodes] == ["linear", "all_reduce", "gelu"]
    assert [(b, a) for b, a, _ in forward.program.edges] == [(0, 1), (1, 2)]
    assert forward.program.label == "forward" and forward.slot_s.shape == (3,) and forward.busy == 2


def test_equal_programs_of_different_ranks_are_one(tmp_path: Path) -> None:
    segments = read_run(write_run(tmp_path, 2)).segments()
    assert segments[0].program is segments[3].program


def test_a_collective_takes_the_mean_of_its_ranks(tmp_path: Path) -> None:
    """The same collective is matched across ranks; its slot holds the time that equal ranks wait for each other."""
    trace = read_run(write_run(tmp_path, 2))
    assert trace.rendezvous == [{0: 1, 1: 1}]
    assert [rank.duration_s[1] for rank in trace.ranks] == pytest.approx([50e-6, 60e-6])
    slots = [segment.slot_s[1] for segment in trace.segments() if segment.label == "forward"]
    assert slots[0] == slots[1] and 50e-6 < slots[0] <= 55e-6


def test_ranks_that_are_known_to_be_slow_do_not_lengthen_collectives(tmp_path: Path) -> None:
    """The simulator makes the others wait for a straggler: a collective takes as long as on the rank that came last."""
    trace = read_run(write_run(tmp_path, 2))
    slow = replace(trace.manifest.job.cluster, stragglers=(Straggler(rank=0, slowdown=1.5),))
    told = replace(trace, manifest=replace(trace.manifest, job=replace(trace.manifest.job, cluster=slow)))
    slots = [segment.slot_s[1] for segment in told.segments() if segment.label == "forward"]
    assert slots[0] == slots[1] <= 50e-6


def test_slots_and_waits_add_up_to_the_segment(tmp_path: Path) -> None:
    for segment in read_run(write_run(tmp_path, 2)).segments():
        ops = np.array([node.stream == "compute" for node in segment.program.nodes])
        assert segment.slot_s[ops].sum() + segment.wait_s == pytest.approx(segment.span_s)


def test_slots_are_scaled_to_the_step_without_a_profiler(tmp_path: Path) -> None:
    """A profiled step of 1 ms that takes 0.95 ms without a profiler gives slots that add up to 0.95 of the time."""
    trace = read_run(write_run(tmp_path, rounds=[[0.95e-3]]))
    raw = trace.ranks[0].slot_s.sum()
    assert sum(segment.slot_s.sum() for segment in trace.segments()) == pytest.approx(0.95 * raw, rel=0.01)


def test_a_collection_is_what_is_complete_and_what_is_absent(tmp_path: Path) -> None:
    write_run(tmp_path, name="a")
    write_run(tmp_path, name="b", role="heldout", traces={})
    (tmp_path / "runs" / ".c.partial").mkdir()
    write_events(tmp_path, "ops-1")
    plan = {"schema": 1, "runs": [{"name": n} for n in "abc"], "events": [{"name": "ops-1"}, {"name": "ops-2"}]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    collection = read_collection(tmp_path)
    assert [manifest.name for manifest in collection] == ["a", "b"]
    assert collection.absent == ("c",) and collection.absent_events == ("ops-2",)
    assert collection.missing == ["runs/c", "events/ops-2.json"]
    assert [trace.manifest.name for trace in collection.traces()] == ["a"]
    assert not list(collection.traces("heldout"))


def test_a_folder_that_is_no_collection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"must hold plan\.json or runs/"):
        read_collection(tmp_path)
    with pytest.raises(TraceError, match="must be a folder"):
        read_collection(tmp_path / "absent")


def test_a_segment_without_work_is_left_out(tmp_path: Path) -> None:
    file = tiny_step().segment("forward", 960, 5, micro_batch=1)
    labels = [segment.label for segment in read_run(write_run(tmp_path, files=[file])).segments()]
    assert labels.count("forward") == 1


def test_what_was_measured(tmp_path: Path) -> None:
    facts = {"memory_bytes": 8, "peak_flops": {"fp32": 1e9}, "a_later_fact": "x"}
    file = read_event_file(write_events(tmp_path, busy=2, hardware=facts))
    assert file.works == (Op("linear", (4, 6, 8), "fp32"), Collective("all_reduce", 96, 2, 2))
    assert (file.seconds, file.busy) == ((2e-6, 5e-5), 2)
    assert file.hardware == {"memory_bytes": 8.0, "peak_flops": {"fp32": 1e9}}


def test_events_of_a_box_say_which(tmp_path: Path) -> None:
    box = read_box("2x2@200mbit")
    assert read_event_file(write_events(tmp_path, box=box.to_dict(), world_size=4)).box == box
    assert read_event_file(write_events(tmp_path, "outside")).box is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": 3}, "schema = 1, got 3"),
        ({"busy": 0}, "busy must be >= 1, got 0"),
        ({"busy": True}, "busy must be a whole number, got True"),
        ({"records": None}, "records must be a list, got None"),
        ({"records": [3]}, "a record must be a table, got 3"),
        ({"records": [{"seconds": 1.0}]}, "no 'collective'"),
        ({"records": [{"op": OP}]}, "seconds must be a number within +-1e+30, got None"),
        ({"records": [{"op": OP, "seconds": 0}]}, "seconds must be > 0, got 0"),
        ({"records": [{"op": OP, "seconds": float("inf")}]}, "finite, got Infinity"),
        ({"records": [{"op": OP, "seconds": 10**400}]}, "seconds must be a number"),
        ({"records": [{"op": {**OP, "dims": ["8"]}, "seconds": 1}]}, "dims must be a whole number, got '8'"),
        ({"records": [{"op": {**OP, "dims": [2**60]}, "seconds": 1}]}, "dims must lie within"),
        ({"records": [{"op": {**OP, "dtype": []}, "seconds": 1}]}, "must be an event profile"),
        ({"records": [{"op": {**OP, "call": []}, "seconds": 1}]}, "must be an event profile"),
        ({"records": [{"collective": {**COLLECTIVE, "num_bytes": "8"}, "seconds": 1}]}, "num_bytes must be a whole"),
        ({"records": [{"collective": {**COLLECTIVE, "colour": 8}, "seconds": 1}]}, "colour"),
        ({"hardware": {"peak_flops": "x"}}, "peak_flops must be a table, got 'x'"),
        ({"hardware": {"peak_flops": {"fp32": "x"}}}, "peak_flops.fp32 must be a number within +-1e+30, got 'x'"),
        ({"hardware": {"memory_bytes": 0}}, "memory_bytes must lie within 1 and 1e+18, got 0"),
        ({"hardware": {"comm_compute_share": 2}}, "comm_compute_share must lie within 0 and 1, got 2"),
        ({"busy": 10**400}, "busy must lie within"),
        ({"hardware": {"memory_bytes": "x"}}, "memory_bytes must be a number within +-1e+30, got 'x'"),
        ({"box": {"nodes": 2}}, "a box has nodes, ranks_per_node, mbits_per_s"),
        (
            {"box": read_box("4x2@200mbit").to_dict(), "world_size": 4},
            "world_size must equal the box's ranks, got 4 != 8",
        ),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = write_events(tmp_path, **changes)
    with pytest.raises(TraceError) as caught:
        read_event_file(path)
    assert says in str(caught.value) and "ops-1.json" in str(caught.value) and "\n" not in str(caught.value)
