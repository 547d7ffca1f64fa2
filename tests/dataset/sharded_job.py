"""A made-up training job with sharded parameters: three streams, parameters gathered ahead, gradients scattered.

The host runs ahead of the device, and the trace holds no sync events, as by default.  Times in microseconds.
"""

from __future__ import annotations

import random

from tests.dataset.kineto_files import MAIN, KinetoFile

AUTOGRAD = 300  # thread
COMPUTE, GATHER, SCATTER = 7, 20, 24  # streams


class ShardedJob:
    """The job, with parts of it ``communication``, ``products`` and ``host`` times as slow.

    Args:
        seed: Of durations.
        communication, products, host: Factors on durations.
        layers: Of the model.
    """

    def __init__(
        self, seed: int, communication: float = 1.0, products: float = 1.0, host: float = 1.0, layers: int = 6
    ) -> None:
        self.random = random.Random(seed)
        self.communication, self.products, self.host, self.layers = communication, products, host, layers
        self.file = KinetoFile(0, 8)
        self.now, self.thread, self.correlation, self.sequence = 1000.0, MAIN, 10, 5
        self.free = dict.fromkeys((COMPUTE, GATHER, SCATTER), 0.0)  # when each stream is
        self.waits = dict.fromkeys((COMPUTE, GATHER, SCATTER), 0.0)  # until when its next kernel waits
        self.lengths = [self.random.uniform(50, 600) for _ in range(layers * 3)]
        self.gather_us, self.scatter_us = self.random.uniform(80, 500), self.random.uniform(80, 700)
        self.launch_us = self.random.uniform(6, 60)
        self.steps: list[float] = []

    @property
    def mean_step_us(self) -> float:
        """Mean length of a step."""
        return sum(self.steps) / len(self.steps)

    def run(self, steps: int = 3) -> ShardedJob:
        """Run some steps."""
        for number in range(steps):
            self.step(number)
        return self

    def step(self, number: int) -> None:
        """Forward, backward on autograd's thread, optimizer, and the loss copied to the host."""
        begin, self.thread = self.now, MAIN
        self.now += 30
        sequences = self.forward()
        self.now, self.thread = self.now + 35, AUTOGRAD
        scattered = self.backward(sequences)
        self.now, self.thread = self.now + 20, MAIN
        self.wait(COMPUTE, scattered)
        optimizer = self.now
        self.kernel("aten::_fused_adamw_", "multi_tensor_apply", 300, COMPUTE)
        self.file.note("Optimizer.step#AdamW.step", optimizer, self.now - optimizer)
        self.copy_back()
        self.now += 40
        self.file.note(f"ProfilerStep#{number}", begin, self.now - begin)
        self.steps.append(self.now - begin)

    def forward(self) -> list[int]:
        sequences = []
        ahead = self.gather()
        for layer in range(self.layers):
            gathered = ahead
            if layer + 1 < self.layers:
                ahead = self.gather()
            self.wait(COMPUTE, gathered)
            for part in range(3):
                self.sequence += 1
                sequences.append(self.sequence)
                length = self.lengths[3 * layer + part] * self.products
                self.kernel("aten::mm", "sm90_xmma_gemm_bf16", length, COMPUTE, self.sequence)
        return sequences

    def backward(self, sequences: list[int]) -> float:
        """Returns when the last gradients are scattered."""
        done = 0.0
        ahead = self.gather()
        for layer in reversed(range(self.layers)):
            gathered = ahead
            if layer:
                ahead = self.gather()
            self.wait(COMPUTE, gathered)
            for part in range(3):
                begin, sequence = self.now, sequences.pop()
                length = 2 * self.lengths[3 * layer + part] * self.products
                done = self.kernel("aten::mm", "sm90_xmma_gemm_bf16_backward", length, COMPUTE)
                name = "autograd::engine::evaluate_function: MmBackward0"
                self.file.call(name, begin - 1, self.now - begin + 1.5, thread=AUTOGRAD, Sequence_number=sequence)
                self.now += 2
            self.runtime("cudaEventRecord", 1.0)
            self.wait(SCATTER, done)
            scattered = self.collective("ReduceScatter", "_reduce_scatter_base", self.scatter_us, SCATTER)
        return scattered

    def gather(self) -> float:
        """Gather a layer's parameters; returns when that is done."""
        self.runtime("cudaEventRecord", 1.0)
        return self.collective("AllGather", "_allgather_base", self.gather_us, GATHER)

    def collective(self, kernel: str, name: str, length: float, stream: int) -> float:
        said = {"Collective_name": name, "In_msg_nelems": 1000, "Out_msg_nelems": 8000, "dtype": "BFloat16"}
        said |= {"Group_size": 8, "Process_Group_Name": "1"}
        full = f"ncclDevKernel_{kernel}_RING_LL(ncclDevComm*)"
        return self.kernel(f"c10d::{name}", full, length * self.communication, stream, **said)

    def kernel(self, call: str, kernel: str, length: float, stream: int, sequence: int = -1, **said: object) -> float:
        """A call that launches a kernel; returns when the kernel ends."""
        begin = self.now
        self.now += self.launch_us * self.host * self.random.uniform(0.6, 1.4)
        self.correlation += 1
        correlation = self.correlation
        self.runtime("cudaLaunchKernel", 4.5, correlation)
        waited = self.waits[stream] + (2.0 if self.waits[stream] > self.free[stream] else 0.0)
        launched = self.now + 1.7 + self.random.uniform(-0.3, 0.3)
        start = max(launched, self.free[stream] + 1.1 + self.random.uniform(-0.2, 0.4), waited)
        self.file.kernel(kernel, start, length, stream, correlation, grid=[100, 1, 1], block=[128, 1, 1], **said)
        self.free[stream], self.waits[stream] = start + length, 0.0
        more = {"Sequence_number": sequence} if sequence >= 0 else {}
        self.file.call(call, begin, self.now - begin + 1, [64, 64], thread=self.thread, **more)
        self.now += 2 * self.host
        return start + length

    def wait(self, stream: int, until: float) -> None:
        """Make a stream wait for an event; the trace says neither which stream nor which event."""
        self.runtime("cudaStreamWaitEvent", 1.0)
        self.waits[stream] = max(self.waits[stream], until)

    def copy_back(self) -> None:
        """Copy the loss to the host, which waits for it."""
        self.correlation += 1
        begin, start = self.now, max(self.now + 4, self.free[COMPUTE] + 1.2)
        args = {"stream": COMPUTE, "device": 0, "correlation": self.correlation, "bytes": 4}
        self.file.event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", start, 1.5, COMPUTE, args, pid=0)
        self.free[COMPUTE] = start + 1.5
        self.now = start + 7.5
        given = {"correlation": self.correlation}
        self.file.event("cuda_runtime", "cudaMemcpyAsync", begin, self.now - begin, MAIN, given)

    def runtime(self, name: str, length: float, correlation: int = 0) -> None:
        """A call of the device's runtime."""
        self.correlation += 1
        args = {"correlation": correlation or self.correlation}
        self.file.event("cuda_runtime", name, self.now, length, self.thread, args)
        self.now += length
