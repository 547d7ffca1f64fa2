"""What ranks of a box sleep: the times given, no block too short, and what they say to each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.job.specs import OptimizerSpec, Straggler
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_manifest import HARDWARE, Box, read_box
from stepsight.simulator.programs.lower import signatures
from stepsight.training.measured.planning import SHORTEST_BLOCK_S, SleepingLatency, box_plan, paces, sleeps_of

FOUR = read_box("4x1@200mbit")
COUNTS = {"rounds": 2, "steps": 1, "warmup": 1, "profile_steps": 0}


def _job(box: Box = FOUR, batches: int = 4, model: dict[str, Any] | None = None, **parallel: Any) -> Job:
    sizes = {"family": "gpt", "layers": 8, "hidden": 256, "heads": 16, "vocab": 2048, "seq_len": 128, **(model or {})}
    dp = box.num_ranks // (parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("cp", 1))
    job = Job(
        model=ModelSpec(**sizes),
        parallel=ParallelSpec(dp=dp, **parallel),
        batch=BatchSpec(micro_batch=1, global_batch=batches * dp, precision="fp32"),
        cluster=ClusterSpec(hardware=HARDWARE, nodes=box.nodes, devices_per_node=box.ranks_per_node),
    )
    return box.holds(job)


def _latency(box: Box = FOUR) -> SleepingLatency:
    hardware = find_hardware(HARDWARE)
    assert hardware is not None
    return SleepingLatency(hardware, box.links)


def _items(sleeps: dict[str, Any], kind: str) -> list[list[Any]]:
    held = [sleeps["blocks"][number] for part in sleeps["parts"] for number in part]
    return [
        item
        for block in held
        for step in block
        for key in ("forward", "backward", "weight")
        for item in step[key]
        if item[0] == kind
    ]


def _slept(sleeps: dict[str, Any]) -> float:
    """Seconds that a micro-batch sleeps in all parts together."""
    return sum(item[4] for item in _items(sleeps, "op"))


def test_ranks_sleep_as_long_as_they_are_given() -> None:
    """Every op has the time of the latency model, but those that are done for real."""
    job, latency = _job(pp=4), _latency()
    sleeps = sleeps_of(job, latency)
    ops = [Op(kind, tuple(dims), dtype) for _, kind, dims, dtype, _ in _items(sleeps, "op")]
    assert all(op.record.slept for op in ops)
    slept = {op.kind for op in signatures(job, latency.hardware)[0] if op.record.slept}
    assert {op.kind for op in ops} >= slept - {"adamw"}
    assert [item[4] for item in _items(sleeps, "op")] == latency.op_seconds(ops).tolist()
    assert _slept(sleeps) == pytest.approx(latency.op_seconds(ops).sum())


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"pp": 4}, {"pp": 2, "virtual_stages": 2}, {}, {"zero_stage": 3}])
def test_however_it_is_cut_a_micro_batch_sleeps_alike(parallel: dict[str, Any]) -> None:
    whole = _slept(sleeps_of(_job(), _latency()))
    assert _slept(sleeps_of(_job(**parallel), _latency())) == pytest.approx(whole)


def test_parts_hold_every_layer_and_pass_a_micro_batchs_activations() -> None:
    sleeps = sleeps_of(_job(pp=4), _latency())
    assert [len(part) for part in sleeps["parts"]] == [3, 2, 2, 3]  # with the embedding and the head
    assert sleeps["boundary_numel"] == [128 * 256] * 3
    assert len(sleeps["optimizer"]) == 4
    assert sleeps["table"] == ""


def test_tensor_parallel_ranks_hold_half_of_what_is_split() -> None:
    whole, half = (_numel(sleeps_of(_job(tp=tp), _latency())) for tp in (1, 2))
    assert whole > 12 * 256**2 * 8  # the layers' matrices alone
    assert whole / 2 < half < 0.55 * whole


def _numel(sleeps: dict[str, Any]) -> int:
    held = [sleeps["blocks"][number] for part in sleeps["parts"] for number in part]
    return sum(sum(step["parameters"]) for block in held for step in block)


def test_tensor_parallel_ranks_meet_twice_forward_and_backward_in_every_layer() -> None:
    assert _items(sleeps_of(_job(), _latency()), "tp") == []
    activations = 128 * 256 * 4
    reduces = [item for item in _items(sleeps_of(_job(tp=2), _latency()), "tp") if item[2] == activations]
    assert {item[1] for item in reduces} == {"all_reduce"}
    assert 8 * 4 <= len(reduces) <= 8 * 4 + 4
    kinds = {item[1] for item in _items(sleeps_of(_job(tp=2, sequence_parallel=True), _latency()), "tp")}
    assert {"all_gather", "reduce_scatter"} <= kinds


def test_a_layer_that_sleeps_too_little_is_refused() -> None:
    """On a device whose ops begin sooner; one layer of the same job on the box's own takes long enough."""
    latency = _latency()
    quick = SleepingLatency(replace(latency.hardware, op_latency_s=1e-3), latency.fabric)
    job = _job(model={"seq_len": 16, "hidden": 64, "heads": 4})
    with pytest.raises(CollectError, match=r"must sleep at least 80 ms forward and backward, got \d+\.\d ms for gpt"):
        sleeps_of(job, quick)
    assert SHORTEST_BLOCK_S == 0.08
    assert _slept(sleeps_of(job, latency)) > 8 * SHORTEST_BLOCK_S


def test_a_schedule_that_torch_has_no_class_for_is_written_down() -> None:
    table = sleeps_of(_job(pp=4, schedule="zb-h1", batches=8), _latency())["table"]
    rows = table.split()
    assert len(rows) == 4 and "0F0" in rows[0] and "3W7" in rows[3]


def test_ranks_that_share_sequences_or_experts_exchange_what_is_lowered() -> None:
    """Gathered keys and values of eight layers, forward and backward; copies of tokens to experts and back."""
    shared = sleeps_of(_job(cp=2, context_parallel="all_gather"), _latency())
    kinds = [kind for _, kind, _ in _items(shared, "cp")]
    assert (kinds.count("all_gather"), kinds.count("reduce_scatter"), len(kinds)) == (16, 8, 24)
    mixture = {"family": "llama", "experts": 4, "experts_per_token": 2, "expert_ffn": 512, "capacity_factor": 1.0}
    sent = sleeps_of(_job(model=mixture, ep=4), _latency())
    assert {kind for _, kind, _ in _items(sent, "ep")} == {"all_to_all"} and len(_items(sent, "ep")) == 32
    of_experts = [step["parameters"] for block in sent["blocks"] for step in block if "expert" in step]
    assert of_experts == [[2 * 512 * 256], [512 * 256]]


def test_a_slow_rank_has_a_pace_of_its_own() -> None:
    job = _job()
    assert paces(job) == [1.0] * 4
    cluster = replace(job.cluster, stragglers=(Straggler(rank=2, slowdown=1.5),))
    assert paces(replace(job, cluster=cluster)) == [1.0, 1.0, 1.5, 1.0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"zero_stage": 1}, r"zero_stage 0 \(DDP\) or 3 \(FSDP2\), got 1"),
        ({"recompute": "full"}, "recompute none, got 'full'"),
        ({"cp": 2}, r"has context_parallel = all_gather, got 'ring'"),
        ({"overlap_grad_reduce": False}, r"a box runs parallel\.overlap_grad_reduce = True, got False"),
        ({"pp": 4, "batches": 2}, "as many micro-batches as stages, got 2 < 4"),
        ({"pp": 4, "model": {"tied_embeddings": True}}, "ties embeddings only within one stage"),
    ],
)
def test_what_a_box_cannot_run_is_refused(changes: dict[str, Any], says: str) -> None:
    options = dict(changes)
    if "cp" in options:
        job = _job()
        job = replace(job, parallel=replace(job.parallel, cp=2, dp=2))
    else:
        job = _job(**options)
    with pytest.raises(CollectError, match=says):
        sleeps_of(job, _latency())


def test_an_optimizer_that_a_box_does_not_run_is_refused() -> None:
    job = replace(_job(), optimizer=OptimizerSpec(fused=False))
    with pytest.raises(CollectError, match=r"a box runs optimizer\.fused = True, got False"):
        sleeps_of(job, _latency())


def test_a_plan_names_runs_and_what_is_measured() -> None:
    runs = [("one", "train", _job(), COUNTS), ("", "train", _job(pp=4), COUNTS)]
    message = Collective("all_reduce", 1024, 4, 1)
    plan = box_plan(FOUR, runs, _latency(), collectives=[message], event_seconds=2.0)
    assert plan["box"] == FOUR.to_dict()
    first, second = (run["name"] for run in plan["runs"])
    assert first == "one" and "pp4" in second
    assert plan["events"][0]["world_size"] == 4
    assert box_plan(FOUR, runs, _latency(), collectives=[message])["events"] == []
    with pytest.raises(CollectError, match="names must be unique, got 'one' twice"):
        box_plan(FOUR, [runs[0], runs[0]], _latency())


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("gpipe", 1), ("1f1b", 2), ("looped-bfs", 2), ("interleaved-zb", 2), ("zbv", 2), ("dualpipev", 2), ("zb-h1", 1)],
)
def test_every_schedule_of_the_harness_has_a_plan(schedule: str, virtual: int) -> None:
    job = _job(pp=4, batches=8, schedule=schedule, virtual_stages=virtual)
    (run,) = box_plan(FOUR, [("a", "train", job, COUNTS)], _latency())["runs"]
    assert len(run["sleeps"]["parts"]) == 4 * virtual
