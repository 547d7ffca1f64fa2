"""Kineto traces of small made-up GPU jobs, for whoever reads or replays traces; times in microseconds."""

from __future__ import annotations

from pathlib import Path

from stepsight.dataset.runs.run_folder import write_imported
from stepsight.dataset.traces.import_traces import import_ranks
from tests.dataset.kineto_files import MAIN, KinetoFile

BACKWARD = 300  # the thread on which autograd evaluates
COMPUTE, COMM = 7, 20  # streams
LAUNCH_US, DELAY_US = 5.0, 2.0  # a launch, and from its end to the kernel on an idle stream
PRODUCT = "sm80_xmma_gemm_f16f16_tn"
REDUCTION = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"


class GpuJob:
    """A training job on one GPU of ``world_size``: each step a forward and a backward product, an all-reduce if there
    are peers, a wait for it, and an update.

    Args:
        rank: Which.
        world_size: Ranks of the job.
        slow: Factor on this rank's products.
        begin: When the first step begins.
        clock: Added to every time of the file.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, slow: float = 1.0, begin: float = 1000.0, clock: float = 0.0
    ) -> None:
        self.file = KinetoFile(rank, world_size)
        self.file.header["deviceProperties"] = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]
        self.rank, self.world_size, self.slow, self.clock = rank, world_size, slow, clock
        self.now = begin  # of the main thread
        self.free = {COMPUTE: 0.0, COMM: 0.0}  # when each stream is
        self.correlation = 100
        self.sequence = 10

    def step(self, number: int, reduced_at: float | None = None) -> GpuJob:
        """One step; ``reduced_at``: when the all-reduce ends on all ranks, by the clock without offset."""
        begin, self.now = self.now, self.now + 20
        sequence = self.sequence = self.sequence + 1
        self.op("aten::addmm", PRODUCT, 400 * self.slow, [[512], [1024, 256], [256, 512]], sequence)
        self.op("my::custom", "very_own_kernel(float*)", 50, [[1024, 512]], -1)
        start = self.now + 30
        evaluate = "autograd::engine::evaluate_function: AddmmBackward0"
        inner = self.op("aten::mm", PRODUCT, 800 * self.slow, [[512, 1024], [1024, 256]], -1, BACKWARD, start)
        self.file.call(evaluate, start - 5 + self.clock, inner - start + 8, thread=BACKWARD, Sequence_number=sequence)
        if self.world_size > 1:
            inner = self.reduce(inner + 10, reduced_at)
        self.now = inner + 25  # the main thread goes on when backward is over
        optimizer = self.now
        if self.world_size > 1:
            self.runtime("cudaStreamWaitEvent", self.now, 2.0)
            self.now += 2.0
            self.free[COMPUTE] = max(self.free[COMPUTE], self.free[COMM] + DELAY_US)
        self.op("aten::_fused_adamw_", "multi_tensor_apply_kernel", 100, [[[512, 256]], [[512, 256]]], -1)
        self.file.note("Optimizer.step#AdamW.step", optimizer + self.clock, self.now - optimizer)
        done = max(self.free[COMPUTE], self.now + 3)
        self.runtime("cudaDeviceSynchronize", self.now + 1, done + 4 - self.now - 1)
        self.now = done + 10
        self.file.note(f"ProfilerStep#{number}", begin + self.clock, self.now - begin)
        return self

    def op(
        self, name: str, kernel: str, length: float, dims: list[object], sequence: int, thread: int = MAIN,
        start: float | None = None,
    ) -> float:  # fmt: skip
        """A call that launches one kernel on the compute stream; returns when the call ends."""
        begin = self.now if start is None else start
        more = {"Sequence_number": sequence} if sequence >= 0 else {}
        self.file.call(name, begin + self.clock, 15.0, *dims, thread=thread, **more)
        self.launch(kernel, begin + 4, length, COMPUTE, thread)
        if start is None:
            self.now = begin + 20
        return begin + 15

    def launch(self, kernel: str, at: float, length: float, stream: int, thread: int, **args: object) -> float:
        """A launch and its kernel; returns when the kernel ends."""
        self.correlation += 1
        correlation = self.correlation
        self.runtime("cudaLaunchKernel", at, LAUNCH_US, thread, correlation)
        begin = max(at + LAUNCH_US + DELAY_US, self.free[stream] + 1.0)
        more = {"grid": [64, 1, 1], "block": [256, 1, 1], "registers_per_thread": 32, "shared_memory": 1024, **args}
        self.file.kernel(kernel, begin + self.clock, length, stream, correlation, **more)
        self.free[stream] = begin + length
        return begin + length

    def reduce(self, at: float, until: float | None) -> float:
        """An all-reduce on its own stream, after what the compute stream was given."""
        self.free[COMM] = max(self.free[COMM], self.free[COMPUTE] + DELAY_US - 1.0)
        begin = max(at + LAUNCH_US + DELAY_US, self.free[COMM] + 1.0)
        length = 600.0 if until is None else until - begin
        said = {"Collective_name": "allreduce", "In_msg_nelems": 131072, "Out_msg_nelems": 131072, "dtype": "Float"}
        ranks = str(list(range(self.world_size)))
        said |= {"Group_size": self.world_size, "Process_Group_Name": "0", "Process_Group_Ranks": ranks}
        self.file.call("c10d::allreduce_", at - 4 + self.clock, 15.0, thread=BACKWARD)
        self.launch(REDUCTION, at, length, COMM, BACKWARD, **said)
        return at + 12

    def runtime(self, name: str, at: float, length: float, thread: int = MAIN, correlation: int = 0) -> None:
        """A call of the device's runtime."""
        self.correlation += 1
        args = {"correlation": correlation or self.correlation, "cbid": 1}
        self.file.event("cuda_runtime", name, at + self.clock, length, thread, args)


def two_ranks(steps: int = 2) -> list[KinetoFile]:
    """A job of two ranks with clocks that differ by 5 ms; the second computes half as fast, the first waits for it."""
    jobs = [GpuJob(0, 2), GpuJob(1, 2, slow=2.0, clock=5000.0)]
    for number in range(steps):
        begin = 1_000.0 + 3_600.0 * number
        for job in jobs:
            job.now = begin
            job.step(3 + number, reduced_at=begin + 3_000.0)
    return [job.file for job in jobs]


def many_sizes(collection: Path) -> None:
    """Import one traced run whose additions of many sizes take twice as long as an A100's memory allows, with launches
    of 20 microseconds each."""
    file, free = KinetoFile(), 0.0
    file.header["deviceProperties"] = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]
    for number in range(48):
        size, at = 2 ** (14 + number % 12), 1000.0 + 20.0 * number
        file.call("aten::add", at, 15.0, [size], [size])
        file.launch(at + 4, number + 1)
        length = 2e6 * 12 * size / 2.0e12 + 4.0
        free = max(at + 12, free + 1.0)
        file.kernel("elementwise_kernel", free, length, COMPUTE, number + 1)
        free += length
    found = import_ranks([file.write(collection.parent / "sizes.json")])
    write_imported(found.graphs, found.sources, collection, None, ())


def imported_collection(folder: Path, *files: KinetoFile) -> Path:
    """A collection in ``folder`` of one run: these traces, imported."""
    paths = [file.write(folder / "traces" / f"{place}.json") for place, file in enumerate(files)]
    found = import_ranks(paths)
    write_imported(found.graphs, found.sources, folder / "col", None, found.warnings)
    return folder / "col"
