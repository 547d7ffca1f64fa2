from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware, find_fabric, find_hardware
from stepsight.dataset.job.job import ExecutionSpec, Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.memory.estimate import FIELDS, estimate_memory
from stepsight.simulator.programs.lower import lower, signatures
from stepsight.simulator.programs.sizes import part_shapes
from stepsight.simulator.schedules import find_schedule, write_schedule
from tests.simulator.conftest import JobMaker


def kinds(program: Program, stream: str | None = None) -> Counter[str]:
    return Counter(node.work.kind for node in program.nodes if stream in (None, node.stream))


def test_layers_are_split_evenly_and_the_rest_goes_to_earlier_stages(make_job: JobMaker) -> None:
    parts = part_shapes(make_job(model={"layers": 10}, pp=4))
    assert [part.num_layers for part in parts] == [3, 3, 2, 2]
    assert [part.first for part in parts] == [True, False, False, False]
    assert [part.last for part in parts] == [False, False, False, True]


def test_layers_are_split_as_told(make_job: JobMaker) -> None:
    parts = part_shapes(make_job(model={"layers": 10}, pp=4, stage_layers=(1, 4, 4, 1)))
    assert [part.num_layers for part in parts] == [1, 4, 4, 1]


def test_only_later_micro_batches_accumulate(make_job: JobMaker, cpu: Hardware) -> None:
    low = lower(make_job(micro_batches=3), cpu)
    first, later = low.program("backward", 0, 0), low.program("backward", 0, 1)
    extra = kinds(later) - kinds(first)
    tensors = sum(op.dims[1] for op in low.all_works if op.kind == "adamw")
    assert extra == Counter({"add": tensors})


def test_ddp_reduces_all_gradients_once_in_buckets(make_job: JobMaker, cpu: Hardware) -> None:
    low = lower(make_job(dp=2, micro_batches=2, bucket_mbytes=0.1), cpu)
    assert not kinds(low.program("backward", 0, 0), "dp")
    sent = [n.work for n in low.program("backward", 0, 1).nodes if n.stream == "dp"]
    numel = next(op.dims[0] for op in low.all_works if op.kind == "adamw")
    assert sum(work.num_bytes for work in sent if isinstance(work, Collective)) == 4 * numel
    assert all(work.kind == "all_reduce" for work in sent)
    assert all(work.num_bytes >= 0.1 * 2**20 for work in sent[:-1] if isinstance(work, Collective))


def test_overlapped_collectives_take_a_share_of_the_computation(make_job: JobMaker, cpu: Hardware) -> None:
    """All but the last bucket, which nothing runs beside."""
    program = lower(make_job(dp=2, micro_batches=1, bucket_mbytes=0.1), cpu).program("backward")
    shares = [n.share for n in program.nodes if isinstance(n.work, Collective) and n.stream == "compute"]
    assert shares == [cpu.comm_compute_share] * (kinds(program, "dp")["all_reduce"] - 1)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_zero_scatters_gradients_and_gathers_parameters(make_job: JobMaker, gpu: Hardware, zero_stage: int) -> None:
    """Volumes of ZeRO-1 and -2: one reduce-scatter of the gradients, one all-gather of the parameters."""
    low = lower(make_job(dp=4, micro_batches=2, zero_stage=zero_stage, precision="bf16"), gpu)
    optimizer = low.program("optimizer")
    adamw = optimizer.nodes[0].work
    gathered = [n.work.num_bytes for n in optimizer.nodes if isinstance(n.work, Collective)]
    scattered = [n.work.num_bytes for n in low.program("backward", 0, 1).nodes if n.stream == "dp"]
    assert isinstance(adamw, Op)
    assert sum(gathered) == pytest.approx(2 * 4 * adamw.dims[0], rel=1e-3)
    assert sum(scattered) == pytest.approx(4 * 4 * adamw.dims[0], rel=1e-3)
    assert bool(kinds(low.program("backward", 0, 0), "dp")) == (zero_stage == 2)


def test_fsdp_gathers_twice_and_scatters_once(make_job: JobMaker, gpu: Hardware) -> None:
    """Per micro-batch: root and layers forward, layers again backward; root and layers reduced (4 layers)."""
    low = lower(make_job(dp=4, zero_stage=3, micro_batches=2), gpu)
    for micro_batch in range(2):
        assert kinds(low.program("forward", 0, micro_batch), "dp") == {"all_gather": 5}
        assert kinds(low.program("backward", 0, micro_batch), "dp") == {"all_gather": 4, "reduce_scatter": 5}


def test_sequence_parallel_sums_replicated_gradients(make_job: JobMaker, gpu: Hardware) -> None:
    """Norms (9 of 2 x 64) and positions: each rank saw a part of the rows."""
    optimizer = lower(make_job(tp=2, sequence_parallel=True), gpu).program("optimizer")
    numel = 9 * 2 * 64 + 32 * 64
    assert [node.work for node in optimizer.nodes][:3] == [
        Op("copy", (numel,), "fp32"), Collective("all_reduce", 4 * numel, 2, 2), Op("copy", (numel,), "fp32"),
    ]  # fmt: skip


def test_pipelines_on_cpu_reduce_gradients_after_the_schedule(make_job: JobMaker, cpu: Hardware) -> None:
    low = lower(make_job(pp=2, dp=2, bucket_mbytes=0.1), cpu)
    assert not any(kinds(low.program("backward", 0, micro), "dp") for micro in range(4))
    optimizer = low.program("optimizer")
    sent = [node.work.num_bytes for node in optimizer.nodes if isinstance(node.work, Collective)]
    assert len(sent) > 1
    assert sum(sent) == 4 * next(n.work.dims[0] for n in optimizer.nodes if n.work.kind == "adamw")


def test_recomputation_repeats_the_forward(make_job: JobMaker, gpu: Hardware) -> None:
    none, selective, full = (
        kinds(lower(make_job(tp=2, recompute=how, precision="bf16"), gpu).program("backward"))
        for how in ("none", "selective", "full")
    )
    assert selective - none == {"attention": 4}
    layers = {"layer_norm": 8, "linear": 16, "attention": 4, "add": 8, "gelu": 4, "all_reduce": 8}
    assert full - none == layers


def test_torch_stops_recomputing_early(make_job: JobMaker, cpu: Hardware) -> None:
    """The last all-reduce and the residual after it keep nothing for the backward."""
    none, full = (kinds(lower(make_job(tp=2, recompute=how), cpu).program("backward")) for how in ("none", "full"))
    assert full - none == {"layer_norm": 8, "linear": 16, "attention": 4, "add": 4, "gelu": 4, "all_reduce": 4}


@pytest.mark.parametrize(("checkpoint", "products"), [("", 3), ("early-stop", 3), ("reentrant", 4)])
def test_torch_does_not_run_the_last_product_again(
    make_job: JobMaker, cpu: Hardware, checkpoint: str, products: int
) -> None:
    """It keeps its inputs before it runs, and nothing in a layer of 4 products is kept later."""
    asked = [
        replace(make_job(recompute=how), execution=ExecutionSpec(checkpoint=checkpoint)) for how in ("none", "full")
    ]
    none, full = (kinds(lower(job, cpu).program("backward")) for job in asked)
    assert (full - none)["linear"] == products * asked[0].model.layers


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_recomputation_that_keeps_projections(make_job: JobMaker, gpu: Hardware, precision: str, apart: bool) -> None:
    """Of the 4 products of a layer, those before and after attention are kept, and the last one is not needed."""
    asked = [
        replace(
            make_job(recompute=how, precision=precision, model={"separate_linears": apart}),
            execution=ExecutionSpec(checkpoint="projections"),
        )
        for how in ("none", "full")
    ]
    none, full = (lower(job, gpu) for job in asked)
    again = kinds(full.program("backward")) - kinds(none.program("backward"))
    layers = asked[0].model.layers
    assert (again["linear"], again["attention"]) == (layers, layers)
    early = replace(asked[1], execution=ExecutionSpec(checkpoint="early-stop"))
    model, tokens = early.model, early.batch.micro_batch * early.model.seq_len
    kept = layers * tokens * 4 * model.hidden * 2  # queries, keys, values and the output, in 16 bits
    moments = [estimate_memory(job, gpu).bytes_of[0, FIELDS.index("activations")] for job in (early, asked[1])]
    assert moments[1] - moments[0] == kept


def test_pipeline_stages_hold_what_they_should(make_job: JobMaker, cpu: Hardware) -> None:
    low = lower(make_job(pp=2), cpu)
    first, last = low.program("forward", 0), low.program("forward", 1)
    assert kinds(first)["embedding"] == 1 and not kinds(first)["cross_entropy"]
    assert kinds(last)["cross_entropy"] == 1 and not kinds(last)["embedding"]
    assert low.messages == (Collective("send_recv", 32 * 64 * 4, 2, 2),)


def test_messages_between_nodes_are_told_apart(make_job: JobMaker, gpu: Hardware) -> None:
    low = lower(make_job(pp=4, devices_per_node=2), gpu)
    assert {message.ranks_per_node for message in low.messages} == {1, 2}


def test_sequence_parallel_divides_messages(make_job: JobMaker, gpu: Hardware) -> None:
    low = lower(make_job(pp=2, tp=2, sequence_parallel=True), gpu)
    assert low.messages[0].num_bytes == 32 * 64 * 4 // 2


def test_equal_questions_are_lowered_once(make_job: JobMaker, cpu: Hardware) -> None:
    assert lower(make_job(pp=2), cpu) is lower(make_job(pp=2), cpu)


def test_signatures_are_all_that_is_asked(make_job: JobMaker, gpu: Hardware) -> None:
    job = make_job(tp=2, pp=2, dp=2)
    ops, collectives = signatures(job, gpu)
    nodes = {node.work for program in lower(job, gpu).programs for node in program.nodes}
    assert nodes <= ops | collectives
    assert {work.kind for work in collectives} == {"all_reduce", "send_recv"}


@pytest.mark.parametrize(("parts", "message"), [((0, 4), 0), ((4, 0), 1)])
def test_a_stage_may_hold_the_embedding_or_the_head_alone(
    make_job: JobMaker, gpu: Hardware, parts: tuple[int, ...], message: int
) -> None:
    """As in Llama 3: no layer, and yet work and gradients."""
    program = lower(make_job(pp=2, dp=2, stage_layers=parts), gpu).program("backward", message, 3)
    assert not kinds(program)["attention_backward"]
    assert kinds(program, "dp")["all_reduce"] == 1


@pytest.mark.parametrize("stages", [1, 2])
def test_a_users_table_is_as_good_as_ours(make_job: JobMaker, gpu: Hardware, tmp_path: Path, stages: int) -> None:
    """A schedule written to a file gives the time that it has by its name, with a single stage too."""
    path = tmp_path / "own.csv"
    write_schedule(find_schedule("1f1b", stages, 4), path)
    latency = RooflineLatency(gpu, find_fabric("dgx-a100"))
    times = [simulate(make_job(pp=stages, schedule=name), latency).iteration_time_s for name in ("1f1b", str(path))]
    assert times[0] == times[1]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", "must hold pp = 2 ranks, 4 micro-batches .*, got 2, 2 and 2"),
        ("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n", "must hold a row for each of pp = 2 ranks, got 1"),
        ("0B0,0F0\n1F0,1B0\n", "must not deadlock, got: stage 0 at B0 of part 0 waits for .*B0 of part 1"),
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B0\n", "need a forward and a backward each, got 7 < 2 . 2 . 2 actions"),
    ],
)  # fmt: skip
def test_tables_that_are_not_the_jobs_are_refused(
    make_job: JobMaker, gpu: Hardware, tmp_path: Path, table: str, message: str
) -> None:
    """In one line, with the numbers, or with who waits for what."""
    path = tmp_path / "own.csv"
    path.write_text(table)
    with pytest.raises(JobError, match=message) as caught:
        lower(make_job(pp=2, schedule=str(path)), gpu)
    assert "\n" not in str(caught.value)


def tables(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A job of eight devices."""
    base: dict[str, dict[str, Any]] = {
        "model": {"family": "llama", "layers": 8, "hidden": 64, "heads": 8, "vocab": 256, "seq_len": 64},
        "parallel": {},
        "batch": {"micro_batch": 1, "global_batch": 8},
        "optimizer": {},
        "cluster": {"hardware": "a100-sxm-80gb", "nodes": 2, "devices_per_node": 4},
    }
    return {section: {**table, **changes.get(section, {})} for section, table in base.items()}


EXPERTS = {"experts": 6, "experts_per_token": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"layers": 3}, "parallel": {"pp": 4}}, "every pipeline stage needs a layer: .*, got 3 < 4"),
        ({"parallel": {"pp": 2, "stage_layers": [4, 3]}}, "add up to 8, got 3 at least and 7 in sum"),
        ({"parallel": {"pp": 2, "stage_layers": [9, -1]}}, "stage_layers must be >= 0 .*, got -1 at least"),
        ({"parallel": {"pp": 2, "stage_layers": [8]}}, "must have pp .* = 2 entries, got 1"),
        ({"model": EXPERTS, "parallel": {"ep": 4}}, "parallel.ep must divide model.experts, got 6 % 4 = 2"),
        ({"model": {"seq_len": 8}, "parallel": {"cp": 8}}, r"needs 2 \* cp to divide model.seq_len, got 8 % 16 = 8"),
        ({"parallel": {"order": "tp-dp-pp"}}, "parallel.order must name tp, cp, dp, pp once each"),
        ({"parallel": {"stage_layers": 4}}, "parallel.stage_layers must be a list, got 4"),
        ({"parallel": {"stage_layers": ["4"]}}, "parallel.stage_layers must hold a whole number each, got '4'"),
        ({"parallel": {"order": 1}}, "parallel.order must be a string, got 1"),
        ({"parallel": {"cp": 2.0}}, "parallel.cp must be a whole number, got 2.0"),
        ({"parallel": {"ep": "2"}}, "parallel.ep must be a whole number, got '2'"),
        ({"parallel": {"prefetch": -1}}, "parallel.prefetch must be >= 0 .*, got -1"),
        ({"parallel": {"bucket_mbytes": "25"}}, "parallel.bucket_mbytes must be a number, got '25'"),
        ({"parallel": {"bucket_mbytes": float("nan")}}, "parallel.bucket_mbytes must be > 0 .*, got nan"),
        ({"parallel": {"sequence_parallel": 1}}, "parallel.sequence_parallel must be true or false, got 1"),
        ({"parallel": {"reshard_after_forward": "no"}}, "reshard_after_forward must be true or false, got 'no'"),
        ({"parallel": {"expert_tp": True}}, "parallel.expert_tp must be a whole number, got True"),
        ({"parallel": {"zero_stage": 4}}, "parallel.zero_stage must be one of 0, 1, 2, 3, got 4"),
        ({"parallel": {"recompute_every": 0}}, "parallel.recompute_every must be > 0 .*, got 0"),
        ({"parallel": {"runtime": "magic"}}, "parallel.runtime must be one of '', .*, deepspeed, got 'magic'"),
        ({"parallel": {"context_parallel": "star"}}, "parallel.context_parallel must be one of ring, .*, torch"),
        ({"model": {"imbalance": 0.5, **EXPERTS}}, "model.imbalance must be >= 1 .*, got 0.5"),
        ({"model": {"capacity_factor": "1"}}, "model.capacity_factor must be a number, got '1'"),
        ({"model": {"attention": "flash"}}, "model.attention must be one of mha, mla, got 'flash'"),
        ({"optimizer": {"kind": "sgd"}}, "optimizer.kind must be one of adam, adamw, got 'sgd'"),
        ({"optimizer": {"offload": "yes"}}, "optimizer.offload must be true or false, got 'yes'"),
        ({"optimizer": {"clip_grad_norm": 1.0}}, "optimizer.clip_grad_norm must be true or false, got 1.0"),
        ({"cluster": {"stragglers": [{"rank": 8, "slowdown": 2.0}]}}, "rank must lie in 0 ... 7, got 8"),
        ({"cluster": {"stragglers": [{"rank": 0, "slowdown": 0.5}]}}, "a slowdown must lie from 1 to 1000.0, got 0.5"),
        ({"cluster": {"stragglers": [{"rank": 0}]}}, r"missing key cluster.stragglers\[0\].slowdown"),
        ({"cluster": {"stragglers": {"rank": 0}}}, "cluster.stragglers must be a list, got"),
        ({"cluster": {"slow_links": [{"node": 2, "slowdown": 2.0}]}}, "node must lie in 0 ... 1, got 2"),
        ({"cluster": {"slow_links": [{"node": "a", "slowdown": 2.0}]}}, "node must be a whole number, got 'a'"),
        ({"cluster": {"mixed": [{"nodes": 1, "hardware": "x"}]}}, "nodes must be a list, got 1"),
        ({"cluster": {"mixed": [{"nodes": [1], "hardware": ""}]}}, "hardware must name a device, got ''"),
        ({"cluster": {"mixed": ["h100"]}}, r"cluster.mixed\[0\] must be a table, got 'h100'"),
        ({"batch": {"precision": "int8"}}, "batch.precision must be one of fp32, .*bf16, .*, got 'int8'"),
    ],
)  # fmt: skip
def test_jobs_that_cannot_be(changes: dict[str, dict[str, Any]], message: str) -> None:
    """Each is one line with the rule and the value."""
    with pytest.raises(JobError, match=message) as caught:
        Job.from_dict(tables(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ((300.0, 200.0), ["fabric.inter_node", "both directions of a node's 4 devices"]),
        ((2400.0, 25.0), ["fabric.intra_node", "both directions of a node's 4 devices"]),
        ((300.0, 25.0), []),
    ],
)
def test_a_nodes_bandwidth_is_a_warning(links: tuple[float, float], words: list[str]) -> None:
    """Per device is asked for: what is more than any device has is allowed, and said."""
    intra, inter = ({"bandwidth_gbytes_per_s": speed, "latency_us": 5.0} for speed in links)
    job = Job.from_dict(tables(cluster={"fabric": {"intra_node": intra, "inter_node": inter}}))
    assert bool(job.warnings) == bool(words)
    assert all(word in " ".join(job.warnings) for word in words)


@pytest.mark.parametrize(("name", "precision"), [("a100-sxm-80gb", "fp8"), ("local-cpu", "fp8")])
def test_a_device_without_a_precision_is_an_error(make_job: JobMaker, name: str, precision: str) -> None:
    hardware = find_hardware(name)
    assert hardware is not None
    with pytest.raises(JobError, match=rf"hardware {name} states no peak for fp8; it has fp32"):
        simulate(make_job(precision=precision), RooflineLatency(hardware, find_fabric("loopback")))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_cpus_train_in_what_they_have(make_job: JobMaker, precision: str) -> None:
    hardware = find_hardware("local-cpu")
    assert hardware is not None
    for strategy in ({}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero_stage": 3}):
        result = simulate(make_job(precision=precision, **strategy), RooflineLatency(hardware, find_fabric("loopback")))
        assert result.iteration_time_s > 0


def test_context_and_sequence_parallel_together(make_job: JobMaker, gpu: Hardware) -> None:
    """Norms hold 1 / (cp tp) of the tokens; tensor-parallel collectives carry 1 / cp of them."""
    program = lower(make_job(tp=2, cp=2, sequence_parallel=True), gpu).program("forward")
    norms = {node.work.dims for node in program.nodes if isinstance(node.work, Op) and node.work.kind == "layer_norm"}
    assert norms == {(32 // 4, 64)}
    gathers = {node.work.num_bytes for node in program.nodes if node.work.kind == "all_gather"}
    assert gathers == {32 // 2 * 64 * 4}


def test_without_vocabulary_parallelism_every_rank_has_all_of_it(make_job: JobMaker, gpu: Hardware) -> None:
    """Logits of all words, and no collective around embedding and loss."""
    shared, whole = (lower(make_job(tp=2, vocab_parallel=how), gpu).program("forward") for how in (True, False))
    logits = [max(node.work.dims[1] for node in p.nodes if node.work.kind == "linear") for p in (shared, whole)]  # type: ignore[union-attr]
    assert logits == [128, 256]
    assert kinds(shared, "tp")["all_reduce"] - kinds(whole, "tp")["all_reduce"] == 1 + 3


def test_shares_of_ranks_travel_one_by_one(make_job: JobMaker, gpu: Hardware) -> None:
    """A broadcast of parameters for each rank; gradients likewise after the backward, unless a share fills a bucket."""
    for bucket_mbytes, times in ((1e6, 2), (1e-3, 1)):
        job = make_job(dp=4, zero_stage=1, zero_by_rank=True, bucket_mbytes=bucket_mbytes)
        sent = [n.work for n in lower(job, gpu).program("optimizer").nodes if isinstance(n.work, Collective)]
        assert [work.kind for work in sent].count("broadcast") == times * 4
        assert not {"all_gather", "reduce_scatter"} & {work.kind for work in sent}
