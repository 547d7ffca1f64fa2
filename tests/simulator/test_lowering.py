from collections import Counter

import pytest

from stepsight.dataset.hardware import Hardware
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.program import Program
from stepsight.simulator.lowering import lower, signatures
from stepsight.simulator.parts import part_shapes
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
