from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.graph.rank_trace import Placement, RankTrace
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.traces.read_rank import read_kineto
from stepsight.testing import TraceReaderContract
from tests.dataset.kineto_files import MAIN, WORKER, KinetoFile, tiny_step


def works(trace: RankTrace) -> list[str]:
    return [str(node.work) for node in trace.program.nodes]


def read(file: KinetoFile, folder: Path, placement: Placement | None = None, layout: str = "profiler") -> RankTrace:
    return read_kineto(file.write(folder / "rank0.json", layout), placement)


class TestHost(TraceReaderContract):
    def sample(self, folder: Path) -> Path:
        return tiny_step().write(folder / "rank0.json.gz")

    def read(self, path: Path) -> RankTrace:
        return read_kineto(path)


class TestHostWithPeers(TraceReaderContract):
    def sample(self, folder: Path) -> Path:
        return tiny_step(0, 2).write(folder / "rank0.json")

    def read(self, path: Path) -> RankTrace:
        return read_kineto(path)


class TestDevice(TraceReaderContract):
    on_host = False

    def sample(self, folder: Path) -> Path:
        return device_step().write(folder / "rank0.json.gz")

    def read(self, path: Path) -> RankTrace:
        return read_kineto(path)


def device_step() -> KinetoFile:
    """Two calls that launch three kernels on two streams, and an NCCL kernel."""
    file = KinetoFile(0, 2)
    file.call("aten::addmm", 0, 50, [6], [4, 8], [8, 6]).launch(10, 1).launch(20, 2)
    file.call("aten::gelu", 60, 30, [4, 6]).launch(70, 3)
    comm = {
        "Collective name": "_allgather_base",
        "In msg nelems": 8,
        "Out msg nelems": 16,
        "dtype": "BFloat16",
        "Group size": 2,
    }
    comm |= {"Process Group Ranks": "[0, 1]", "Process Group Description": "mesh_tp"}
    file.event("cpu_op", "record_param_comms", 100, 30, MAIN, comm).launch(110, 4)
    file.kernel("gemm", 30, 40, 7, 1).kernel("bias", 75, 5, 7, 2).kernel("gelu", 90, 20, 7, 3)
    file.kernel("ncclDevKernel_AllGather_RING(x)", 130, 60, 20, 4)
    return file


def test_a_step_becomes_the_ops_it_is_made_of(tmp_path: Path) -> None:
    """Views and wrappers are no nodes; a product's gradients are told apart; a copy within a product is part of it."""
    trace = read(tiny_step(), tmp_path)
    assert works(trace) == [
        "linear[4x6x8]fp32",
        "gelu[24]fp32",
        "gelu_backward[24]fp32",
        "linear_dgrad[4x6x8]fp32",
        "linear_wgrad[4x6x8]fp32",
        "bias_grad[4x6]fp32",
        "adamw[54x2]fp32",
    ]
    assert [span.label for span in trace.spans] == ["forward", "backward", "optimizer"]


def test_both_layouts_read_the_same(tmp_path: Path) -> None:
    """The fast path and the plain one agree, recorded calls included."""
    fast, plain = (read(tiny_step(0, 2), tmp_path, layout=layout) for layout in ("profiler", "compact"))
    assert fast.program.digest_key == plain.program.digest_key
    assert np.allclose(fast.slot_s, plain.slot_s) and np.array_equal(fast.num_events, plain.num_events)


def test_a_slot_is_own_time_and_the_gap_before(tmp_path: Path) -> None:
    """The wait for a collective is in no slot; what follows the last op of a segment belongs to it."""
    trace = read(tiny_step(0, 2), tmp_path)
    linear, gelu = 0, 2
    assert trace.slot_s[linear] == pytest.approx(100e-6)  # 10 .. 110
    assert trace.slot_s[gelu] == pytest.approx(140e-6)  # 110 .. 300 but for 130 .. 180
    assert trace.wait_s[gelu] == pytest.approx(50e-6)


def test_a_blocking_collective_stands_between_its_neighbours(tmp_path: Path) -> None:
    trace = read(tiny_step(0, 2), tmp_path)
    node = trace.program.nodes[1]
    assert node.work == Collective("all_reduce", 96, 2, 2) and node.stream == "tp"
    sync = Dependency.SYNCHRONISATION
    assert trace.program.edges == ((0, 1, sync), (1, 2, sync), (0, 4, Dependency.DATA))  # what backward reads
    assert trace.meets[1].ranks == (0, 1)


def test_degrees_name_the_axis_of_a_group(tmp_path: Path) -> None:
    """What the group was called does not matter where the job says how ranks lie."""
    trace = read(tiny_step(0, 2), tmp_path, Placement(rank=0, devices_per_node=1, tp=1, dp=2))
    node = trace.program.nodes[1]
    assert node.stream == "dp" and node.work == Collective("all_reduce", 96, 2, 1)


def test_an_annotated_op_stands_for_what_it_encloses(tmp_path: Path) -> None:
    file = KinetoFile()
    file.note("stepsight::op kind=swiglu dims=64 dtype=bf16", 0, 100)
    file.call("aten::silu", 10, 20, [64]).call("aten::mul", 40, 20, [64]).call("aten::add", 110, 10, [64], [64])
    assert works(read(file, tmp_path)) == ["swiglu[64]bf16", "add[64]fp32"]


def test_a_malformed_annotation_is_refused(tmp_path: Path) -> None:
    file = KinetoFile().note("stepsight::op kind=swoosh dims=64 dtype=bf16", 0, 100)
    with pytest.raises(TraceError, match="swoosh"):
        read(file, tmp_path)


def test_a_call_of_no_known_kind_counts_only_by_itself(tmp_path: Path) -> None:
    """An unknown wrapper stands aside for a known call within; an unknown leaf is element-wise, and counted as such."""
    file = KinetoFile().call("mine::block", 0, 100, [8, 8]).call("aten::gelu", 10, 50, [8, 8])
    file.call("mine::leaf", 110, 30, [8, 8]).call("mine::inner", 115, 10, [8, 8])
    trace = read(file, tmp_path)
    assert works(trace) == ["gelu[64]fp32", "elementwise[64]fp32"]
    assert trace.unclassified_s == pytest.approx(30e-6)


def test_parts_of_the_loss_are_one_op(tmp_path: Path) -> None:
    file = KinetoFile().call("aten::log_softmax", 0, 40, [16, 10]).call("aten::nll_loss_nd", 45, 10, [16, 10], [16])
    file.call("aten::nll_loss_backward", 60, 10, [], [16, 10]).call(
        "aten::_log_softmax_backward_data", 75, 30, [16, 10]
    )
    trace = read(file, tmp_path)
    assert works(trace) == ["cross_entropy[16x10]fp32", "cross_entropy_backward[16x10]fp32"]
    assert trace.duration_s[0] == pytest.approx(50e-6)


def test_an_asynchronous_collective_runs_beside_and_is_awaited(tmp_path: Path) -> None:
    """Its times are the worker's; what was issued meanwhile does not wait for it, what follows the wait does."""
    file = KinetoFile(0, 2).call("aten::gelu", 0, 50, [8])
    file.note("stepsight::collective kind=all_reduce num_bytes=32 ranks=0,1 group=dp seq=4 async=1", 60, 10)
    file.note("gloo:all_reduce", 65, 100, thread=WORKER)
    file.call("aten::add", 80, 30, [8], [8])
    file.note("stepsight::wait seq=4 group=dp", 120, 50).call("aten::mul", 180, 10, [8])
    trace = read(file, tmp_path)
    assert [node.work.kind for node in trace.program.nodes] == ["gelu", "all_reduce", "add", "elementwise"]
    assert [(b, a) for b, a, _ in trace.program.edges] == [(0, 1), (1, 3)]
    assert trace.duration_s[1] == pytest.approx(100e-6)


def test_gradients_that_nobody_annotates_are_found(tmp_path: Path) -> None:
    """DDP's all-reduce: issue from the c10d call, times from the worker, the wait from the gap at the segment's end."""
    file = KinetoFile(0, 2).segment("step", 0, 500).segment("backward", 0, 400).segment("optimizer", 410, 50)
    file.call("aten::gelu_backward", 10, 50, [8], [8])
    file.call("c10d::allreduce_", 70, 10, [[24]]).call("aten::clone", 72, 5, [24])
    file.note("gloo:all_reduce", 75, 340, thread=WORKER).call("aten::copy_", 80, 20, [24], thread=WORKER)
    file.call("aten::gelu_backward", 100, 50, [8], [8]).call("aten::_fused_adamw_", 420, 30, [[8]], [[8]])
    trace = read(file, tmp_path)
    assert works(trace)[1] == str(Collective("all_reduce", 96, 2, 2))
    assert len(trace.program) == 4, "copies within communication are its own"
    assert trace.start_s[1] + trace.duration_s[1] <= 400e-6 + 1e-9, "it ends with its segment at the latest"
    assert trace.tail_s[0] == pytest.approx(250e-6)
    assert (1, 3) in [(b, a) for b, a, _ in trace.program.edges]


def test_a_stand_in_tells_when_its_collectives_are_over(tmp_path: Path) -> None:
    """One after the other on a link, from their issue on; nothing else would show them."""
    file = KinetoFile(0, 2).segment("step", 0, 500).segment("backward", 0, 400).segment("optimizer", 410, 50)
    file.call("aten::gelu_backward", 10, 50, [8], [8])
    for start, seconds in ((70, 100e-6), (120, 200e-6)):  # from C++: the whole call
        words = f"kind=all_reduce num_bytes=32 ranks=0,1 group=dp async=1 seconds={seconds}"
        file.note(f"stepsight::collective {words}", start, 10)
        file.call("aten::gelu_backward", start + 20, 20, [8], [8])
    words = "kind=send_recv num_bytes=8 ranks=0,1 group=pp seq=0 async=1 direction=send"
    file.note(f"stepsight::collective {words}", 170, 10).note("stepsight::modelled seconds=0.00005", 172, 6)
    file.call("aten::normal_", 173, 4, [8])  # what it does itself
    file.call("aten::_fused_adamw_", 420, 30, [[8]], [[8]])
    trace = read(file, tmp_path)
    found = {i: node.work.kind for i, node in enumerate(trace.program.nodes) if isinstance(node.work, Collective)}
    assert list(found.values()) == ["all_reduce", "all_reduce", "send_recv"]
    assert trace.start_s[list(found)] == pytest.approx([70e-6, 170e-6, 170e-6])
    assert trace.duration_s[list(found)] == pytest.approx([100e-6, 200e-6, 50e-6])
    assert len(trace.program) == 7


def test_messages_meet_by_their_number_between_two_ranks(tmp_path: Path) -> None:
    """Sequence numbers of sender and receiver differ; the n-th message from 0 to 1 is one."""
    sender = KinetoFile(0, 2).call("aten::gelu", 0, 5, [8])
    sender.note(
        "stepsight::collective kind=send_recv num_bytes=8 ranks=0,1 group=pp seq=7 async=1 direction=send", 10, 5
    )
    receiver = KinetoFile(1, 2).call("aten::gelu", 0, 5, [8])
    for seq, ranks in ((1, "1,0"), (2, "0,1")):
        words = f"kind=send_recv num_bytes=8 ranks={ranks} group=pp seq={seq} async=1 direction=recv"
        receiver.note(f"stepsight::collective {words}", 10.0 * seq, 5)
    first, second = read(sender, tmp_path / "a"), read(receiver, tmp_path / "b")
    assert first.meets[1] == second.meets[2] != second.meets[1]


def test_steps_of_an_execution_trace_observer_are_left_out(tmp_path: Path) -> None:
    file = KinetoFile()
    for index, number in enumerate((0, 5)):
        at = 1000.0 * index
        file.segment("step", at, 900).segment("forward", at + 10, 500)
        file.call("aten::gelu", at + 20, 100, [8], Record_function_id=number)
    trace = read(file, tmp_path)
    assert len(trace.spans) == 1 and len(trace.step_s) == 1
    assert trace.span.tolist() == [0, -1]


def test_the_loss_of_a_pipeline_belongs_to_its_forward(tmp_path: Path) -> None:
    file = (
        KinetoFile().segment("step", 0, 900).segment("forward", 10, 100, stage=1).segment("backward", 300, 100, stage=1)
    )
    file.call("aten::gelu", 20, 50, [8]).call("aten::cross_entropy_loss", 150, 40, [8, 4], [8])
    file.call("aten::gelu_backward", 310, 50, [8], [8])
    trace = read(file, tmp_path)
    assert trace.span.tolist() == [0, 0, 1]


def test_kernels_are_tied_to_the_calls_that_launched_them(tmp_path: Path) -> None:
    """One node per call and stream: kernels of a call are added up, and long gaps between them are not its own."""
    trace = read(device_step(), tmp_path)
    assert works(trace)[:2] == ["linear[4x6x8]fp32", "gelu[24]fp32"]
    assert trace.duration_s[:2] == pytest.approx([45e-6, 20e-6])
    node = trace.program.nodes[2]
    assert node.work == Collective("all_gather", 32, 2, 2) and node.stream == "tp"
    assert {node.stream for node in trace.program.nodes[:2]} == {"compute"}
    assert (1, 2, Dependency.SYNCHRONISATION) in trace.program.edges


def test_short_gaps_between_kernels_that_were_launched_in_time_are_their_own(tmp_path: Path) -> None:
    file = KinetoFile().segment("step", 0, 200).call("aten::gelu", 0, 10, [8]).launch(2, 1)
    file.call("aten::add", 20, 10, [8], [8]).launch(22, 2).call("aten::gelu", 50, 10, [8]).launch(52, 3)
    file.kernel("a", 30, 20, 7, 1).kernel("b", 52, 10, 7, 2).kernel("c", 64, 10, 7, 3)
    late = KinetoFile().segment("step", 0, 200).call("aten::gelu", 0, 10, [8]).launch(2, 1)
    late.call("aten::add", 50, 10, [8], [8]).launch(51, 2).kernel("a", 30, 20, 7, 1).kernel("b", 52, 10, 7, 2)
    assert read(file, tmp_path).duration_s == pytest.approx([20e-6, 12e-6, 12e-6])
    assert read(late, tmp_path).duration_s == pytest.approx([20e-6, 10e-6])


def test_the_time_to_launch_goes_from_launch_to_launch_of_a_step(tmp_path: Path) -> None:
    file = KinetoFile().segment("step", 0, 100).segment("forward", 0, 90)
    file.call("aten::gelu", 5, 30, [8]).launch(10, 1).launch(20, 2)  # two kernels: launched with the last one
    file.call("aten::add", 40, 10, [8], [8]).launch(45, 3)
    file.segment("step", 200, 100).segment("forward", 200, 90).call("aten::gelu", 205, 30, [8]).launch(230, 4)
    file.kernel("a", 30, 5, 7, 1).kernel("b", 60, 5, 7, 2).kernel("c", 70, 5, 7, 3).kernel("d", 260, 5, 7, 4)
    trace = read(file, tmp_path)
    assert trace.launch_s == pytest.approx([20e-6, 80e-6, 100e-6])
    assert trace.launch_events.tolist() == [4, 3, 4]
    cpu = read(KinetoFile().segment("step", 0, 100).call("aten::gelu", 5, 30, [8]), tmp_path)
    assert not cpu.launch_s.any() and not cpu.launch_events.any()


def test_ops_of_a_device_are_what_their_calls_are(tmp_path: Path) -> None:
    """An annotated composite is one op, parts of the loss are one, what is joined has the dtype of the op before."""
    file = KinetoFile().note("stepsight::op kind=swiglu dims=64 dtype=bf16", 0, 19)
    names = ("aten::silu", "aten::mul", "aten::cat", "aten::log_softmax", "aten::nll_loss_nd")
    dims = ([[64]], [[64]], [[[4], [4]]], [[16, 10]], [[16, 10], [16]])
    for number, (name, sizes) in enumerate(zip(names, dims, strict=True)):
        file.call(name, 10.0 * number, 8, *sizes).launch(10.0 * number + 2, number + 1)
        file.kernel(name, 100.0 * (number + 1), 10, 7, number + 1)
    trace = read(file, tmp_path)
    assert works(trace) == ["swiglu[64]bf16", "copy[8]bf16", "cross_entropy[16x10]fp32"]
    assert trace.duration_s == pytest.approx([20e-6, 10e-6, 20e-6])


def test_a_product_that_backward_computes_again_is_one_of_forward(tmp_path: Path) -> None:
    file = KinetoFile().call("autograd::engine::evaluate_function: AddmmBackward0", 0, 100, Sequence_number=7)
    file.call("aten::mm", 10, 20, [4, 6], [6, 8], Sequence_number=9).launch(12, 1).kernel("a", 50, 10, 7, 1)
    file.call("aten::mm", 40, 20, [4, 8], [8, 6], Input_Strides=[[8, 1], [6, 1]]).launch(42, 2)
    assert works(read(file.kernel("b", 70, 10, 7, 2), tmp_path)) == ["linear[4x8x6]fp32", "linear_dgrad[4x8x6]fp32"]


def test_our_annotation_says_more_of_a_collective_than_nccl(tmp_path: Path) -> None:
    file = KinetoFile(0, 4).call("aten::gelu", 0, 10, [8]).launch(2, 1).kernel("gelu", 20, 5, 7, 1)
    file.note("stepsight::collective kind=all_gather num_bytes=64 ranks=0,2 group=tp seq=0 async=1", 20, 30)
    record = {"Collective name": "_allgather_base", "In msg nelems": 1, "dtype": "Float", "Group size": 2}
    file.event("cpu_op", "record_param_comms", 25, 20, MAIN, record).launch(30, 2)
    trace = read(file.kernel("ncclDevKernel_AllGather_RING(x)", 50, 10, 20, 2), tmp_path)
    assert trace.program.nodes[1].work == Collective("all_gather", 64, 2, 2)
    assert trace.meets[1].group == trace.program.nodes[1].stream == "tp" and trace.meets[1].ranks == (0, 2)


def test_spinning_kernels_are_a_stand_ins_collectives(tmp_path: Path) -> None:
    """On CUDA the spin is the collective, copies beside it are its own, and no spinning stream computes."""
    file = KinetoFile(0, 8).call("aten::gelu", 0, 10, [8]).launch(2, 1)
    words = "kind=all_gather num_bytes=64 ranks=0,1,2,3 group=dp seq=0 async=0"
    file.note(f"stepsight::collective {words}", 20, 50).note("stepsight::modelled seconds=0.0003", 25, 40)
    file.launch(30, 2).call("aten::copy_", 35, 20, [8], [8]).launch(40, 3, "cudaMemcpyAsync").launch(45, 4)
    file.kernel("gelu", 10, 20, 7, 1).kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 40, 310, 20, 2)
    file.event("gpu_memcpy", "Memcpy DtoD", 42, 5, 21, {"stream": 21, "device": 0, "correlation": 3}, pid=0)
    file.kernel("elementwise_kernel", 48, 5, 21, 4)
    trace = read(file, tmp_path)
    assert [(node.work, node.stream) for node in trace.program.nodes] == [
        (Op("gelu", (8,), "fp32"), "compute"), (Collective("all_gather", 64, 4, 4), "dp"),
    ]  # fmt: skip
    assert trace.duration_s == pytest.approx([20e-6, 310e-6])


def test_a_recorded_wait_of_one_stream_for_another_is_an_edge(tmp_path: Path) -> None:
    file = KinetoFile().call("aten::gelu", 0, 10, [8]).launch(2, 1).launch(11, 5, "cudaEventRecord")
    file.launch(12, 6, "cudaStreamWaitEvent").call("aten::add", 20, 10, [8], [8]).launch(22, 2)
    file.kernel("a", 30, 50, 7, 1).kernel("b", 90, 10, 8, 2)
    waits = {"stream": 8, "wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 5, "correlation": 6, "device": 0}
    file.event("cuda_sync", "Stream Wait Event", 12, 0, 8, waits)
    assert read(file, tmp_path).program.edges == ((0, 1, Dependency.SYNCHRONISATION),)


def test_a_trace_without_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="at least one op"):
        read(KinetoFile().call("aten::view", 0, 1, [8]).call("mystery", 3, 1, [8]), tmp_path)


def test_equal_signatures_are_one_object(tmp_path: Path) -> None:
    file = KinetoFile().call("aten::gelu", 0, 5, [8]).call("aten::gelu", 10, 5, [8])
    first, second = (node.work for node in read(file, tmp_path).program.nodes)
    assert first is second and isinstance(first, Op)
