import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import Program, ProgramBuilder
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.hardware.hardware import find_fabric
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_manifest import Box, RunManifest, read_box
from stepsight.training.fitting.train_runs import train
from stepsight.training.measured.measured import (
    MOST_TRAINING_RANKS,
    STALL,
    MeasuredRun,
    Profile,
    average,
    check_hardware,
    read_profiles,
    read_runs,
)
from tests.dataset.run_folders import write_events, write_run

EXAMPLES = Path(__file__).parents[3] / "examples"
LOOPBACK = find_fabric("loopback")
ADD, GELU = Op("add", (1000,), "fp32"), Op("gelu", (1000,), "fp32")


def _program(count: int = 4) -> Program:
    builder = ProgramBuilder("forward")
    for _ in range(count):
        builder.add(ADD)
        builder.add(GELU)
    return builder.build()


def _segment(slots: np.ndarray, run: str = "r") -> TracedSegment:
    return TracedSegment(_program(), slots, "forward", 0, 1, run)


def test_executions_of_one_segment_are_averaged() -> None:
    one, two = np.full(8, 1e-4), np.full(8, 2e-4)
    ((mean, repeats),) = average([_segment(one), _segment(two)])
    assert repeats == 2
    assert mean.slot_s == pytest.approx(np.full(8, 1.5e-4))


def test_an_interruption_is_cut_to_a_few_medians_of_its_signature() -> None:
    slots = np.tile([1e-4, 3e-4], 4)
    slots[2] = 50e-3
    ((mean, _),) = average([_segment(slots)])
    assert mean.slot_s[2] == pytest.approx(STALL * 1e-4)
    assert np.delete(mean.slot_s, 2) == pytest.approx(np.delete(slots, 2))


def test_runs_stay_apart() -> None:
    assert len(average([_segment(np.full(8, 1e-4)), _segment(np.full(8, 2e-4), "other")])) == 2


def _events(folder: Path, busy: int, hardware: dict[str, object], records: list[dict[str, object]]) -> None:
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    (folder / "events").mkdir(exist_ok=True)
    table = {"schema": 1, "busy": busy, "records": records, "hardware": hardware}
    (folder / "events" / f"world{busy}.json").write_text(json.dumps(table))


def test_peaks_are_those_of_a_device_that_computes_alone(tmp_path: Path) -> None:
    op = {"op": {"kind": "add", "dims": [1000], "dtype": "fp32"}, "seconds": 1e-5}
    message = {"kind": "all_reduce", "num_bytes": 64, "group_size": 2, "ranks_per_node": 2}
    alone = {"peak_flops": {"fp32": 8e10}, "memory_bandwidth_bytes_per_s": 2e10, "memory_bytes": 8e9}
    both = {**alone, "peak_flops": {"fp32": 5e10}, "comm_compute_share": 0.7, "unknown": 1}
    _events(tmp_path, 1, alone, [op])
    _events(tmp_path, 2, both, [op, {"collective": message, "seconds": 1e-4}])
    profile = read_profiles([tmp_path], LOOPBACK)
    hardware = profile.hardware("my-box", "cpu")
    assert (hardware.peak_flops["fp32"], hardware.comm_compute_share) == (8e10, 0.7)
    assert profile.ops == [ADD, ADD]
    assert profile.op_busy == [1, 2]
    assert profile.collectives == [Collective("all_reduce", 64, 2, 2)]


def test_a_peak_that_one_collection_measured_is_kept(tmp_path: Path) -> None:
    """A CPU's peak of bf16 is measured where ops of bf16 are; a later collection without such once made it unknown."""
    facts = {"memory_bandwidth_bytes_per_s": 2e10, "memory_bytes": 8e9}
    for name, peaks in (("a", {"fp32": 8e10, "bf16": 2e11}), ("b", {"fp32": 9e10})):
        _events(tmp_path / name, 1, {**facts, "peak_flops": peaks}, [])
    hardware = read_profiles([tmp_path / "a", tmp_path / "b"], LOOPBACK).hardware("my-box", "cpu")
    assert hardware.peak_flops == {"fp32": 9e10, "bf16": 2e11}


@pytest.mark.parametrize("record", [{"op": {"kind": "add"}, "seconds": 1}, {"seconds": 1}, {"op": {}, "seconds": 0}])
def test_a_broken_event_profile_is_refused(tmp_path: Path, record: dict[str, object]) -> None:
    _events(tmp_path, 1, {}, [record])
    with pytest.raises(TraceError, match=r"world1\.json must be an event profile"):
        read_profiles([tmp_path], LOOPBACK)


def test_events_that_judge_are_never_trained_on(tmp_path: Path) -> None:
    _events(tmp_path, 1, {}, [{"op": {"kind": "add", "dims": [8], "dtype": "fp32"}, "seconds": 1.0}])
    alone = read_profiles([tmp_path], LOOPBACK)
    (tmp_path / "events" / "heldout.json").write_text((tmp_path / "events" / "world1.json").read_text())
    assert read_profiles([tmp_path], LOOPBACK) == alone


def test_a_collection_counts_once(tmp_path: Path) -> None:
    (tmp_path / "c" / "runs").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "c")
    for folders in ([tmp_path / "c"] * 2, [tmp_path / "c", tmp_path / "link"]):
        for read in (partial(read_profiles, fabric=LOOPBACK), partial(read_runs, roles=None)):
            with pytest.raises(TraceError, match=r"every collection must be named once, got .*c and "):
                read(folders)


def test_hardware_without_facts_is_refused() -> None:
    with pytest.raises(TraceError, match="must hold event profiles with hardware facts, or 'my-box' must be a preset"):
        Profile(LOOPBACK).hardware("my-box", "cpu")


def _box_run(folder: Path, box: Box, *, named: bool = True) -> None:
    """A run in a box that was only timed, and whether it names the box."""
    job = Job(
        model=ModelSpec(family="gpt", layers=2, hidden=256, heads=16, vocab=2048, seq_len=128),
        parallel=ParallelSpec(dp=box.num_ranks),
        batch=BatchSpec(micro_batch=1, global_batch=box.num_ranks, precision="fp32"),
        cluster=ClusterSpec(hardware="box", devices_per_node=box.num_ranks),
    )
    held = box.holds(job).to_dict()
    write_run(folder, 0, job=held, world_size=box.num_ranks, box=box.to_dict() if named else None)


def test_four_ranks_of_a_box_may_train(tmp_path: Path) -> None:
    """Collectives are on the box's links, whatever is usual for the hardware."""
    box = read_box("2x2@200mbit")
    _box_run(tmp_path, box)
    write_events(tmp_path, world_size=box.num_ranks, box=box.to_dict())
    assert box.num_ranks == MOST_TRAINING_RANKS
    assert [run.manifest.box for run in read_runs([tmp_path], None)] == [box]
    assert read_profiles([tmp_path], LOOPBACK).fabrics == [box.links]


@pytest.mark.parametrize("text", ["5x1@200mbit", "8x1@200mbit", "4x4@200mbit"])
def test_no_run_or_event_of_more_ranks_of_a_box_can_train(tmp_path: Path, text: str) -> None:
    """They judge predictions.  A run is known by its box and by its hardware."""
    box = read_box(text)
    rule = rf"at most 4 ranks of a box may train: .*; got {box.num_ranks} ranks in .*"
    _box_run(tmp_path / "runs-alone", box)
    _box_run(tmp_path / "unnamed", box, named=False)
    (tmp_path / "events-alone" / "runs").mkdir(parents=True)
    write_events(tmp_path / "events-alone", world_size=box.num_ranks, box=box.to_dict())
    for name in ("runs-alone", "unnamed", "events-alone"):
        for hardware in ("box", "local-cpu"):
            with pytest.raises(TraceError, match=rule):
                train([tmp_path / name], tmp_path / "out", hardware_name=hardware, progress=False)
    with pytest.raises(TraceError, match=rule):
        read_runs([tmp_path / "runs-alone"], ("heldout", "train"))
    with pytest.raises(TraceError, match=rule):
        read_profiles([tmp_path / "events-alone"], LOOPBACK)
    assert not (tmp_path / "out").exists()


def test_compiled_and_eager_runs_do_not_train_together(tmp_path: Path) -> None:
    for name, compiled in (("eager", False), ("compiled", True)):
        write_run(tmp_path / "c", name=name, compile=compiled)
    runs = read_runs([tmp_path / "c"], ("train",))
    check_hardware([run for run in runs if run.manifest.compiled], runs[0].manifest.job.cluster.hardware)
    with pytest.raises(TraceError, match="must be compiled, or of none: got 1 of 2"):
        check_hardware(runs, runs[0].manifest.job.cluster.hardware)


def test_another_device_than_the_fingerprint_names_is_refused(tmp_path: Path) -> None:
    """Both in event files and in runs, whatever hardware their jobs name."""
    _events(tmp_path, 1, {}, [{"op": {"kind": "add", "dims": [1000], "dtype": "fp32"}, "seconds": 1e-5}])
    path = tmp_path / "events" / "world1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fingerprint": {"device": "cpu"}}))
    profile = read_profiles([tmp_path], LOOPBACK)
    with pytest.raises(TraceError, match="device must be 'h100-sxm-80gb', got 'cpu'"):
        profile.hardware("h100-sxm-80gb", profile.device)
    assert profile.hardware("local-cpu", profile.device).kind == "cpu"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fingerprint": {"device": "NVIDIA A100-SXM4-80GB"}}))
    profile = read_profiles([tmp_path], LOOPBACK)  # without runs, files alone say what kind of device it is
    assert profile.hardware("a100-sxm-80gb", profile.device).kind == "gpu"
    job = Job.from_file(EXAMPLES / "llama3-70b-fsdp-512.toml")
    name = job.hardware_name
    for device in ("cpu", "NVIDIA A100-SXM4-80GB"):
        manifest = RunManifest(
            folder=tmp_path, name="run", job=job, world_size=1, rounds=((1.0,),), fingerprint={"device": device}
        )
        with pytest.raises(TraceError, match=f"device must be '{name}', got '{device}'"):
            check_hardware([MeasuredRun(manifest, ())], name)
