"""Issue order: programs as a framework's host thread makes them.

Streams: ``compute``; ``tp`` (blocking collectives of a tensor-parallel group); ``dp`` (data-parallel collectives,
beside the computation where the framework overlaps them).
"""

from __future__ import annotations

from dataclasses import dataclass

from stepsight.dataset.op import Collective, Op
from stepsight.dataset.program import Dependency, ProgramBuilder
from stepsight.simulator.layers import Block, Work


@dataclass(frozen=True, slots=True)
class DataParallel:
    """How replicas of a rank agree.

    Attributes:
        size: Replicas.
        per_node: How many of them share a node.
        zero_stage: 0 to 3.
        bucket_bytes: A gradient bucket is sent when it holds at least this much.
        overlaps: Whether FSDP's collectives run beside the computation (not on CPU).
        after_schedule: Whether gradients are reduced one bucket after the other when all backwards are done
            (plain data parallelism of a pipeline on CPU, as our harness does it).
        compute_share: Part of an overlapped collective's time taken from the compute stream.
    """

    size: int = 1
    per_node: int = 1
    zero_stage: int = 0
    bucket_bytes: int = 25 * 2**20
    overlaps: bool = True
    after_schedule: bool = False
    compute_share: float = 0.0

    @property
    def fully_sharded(self) -> bool:
        return self.zero_stage == 3 and self.size > 1

    def collective(self, kind: str, num_bytes: int) -> Collective:
        return Collective(kind, num_bytes, self.size, self.per_node)


class Emitter:
    """Adds work to a program as a framework's host thread issues it."""

    def __init__(self, label: str, dp: DataParallel) -> None:
        self.builder = ProgramBuilder(label)
        self.dp = dp
        self._last: int | None = None  # newest node of the computation (compute or blocking)
        self._awaited: list[int] = []  # nodes that the next compute node waits for
        self._taken: dict[int, tuple[Collective, str]] = {}  # sent, and no computation issued since

    def emit(self, work: Work, name: str) -> None:
        """An op, or a collective of the tensor-parallel group that blocks."""
        if isinstance(work, Op):
            for collective, of in self._taken.values():
                self._compute(collective, f"{of} (cores)", self.dp.compute_share)
            self._taken.clear()
            self._compute(work, name)
        else:
            self.block(work, "tp", name)

    def block(self, work: Collective, stream: str, name: str) -> int:
        """A collective that starts when the computation reaches it and that the computation waits for."""
        index = self.builder.add(work, stream, name, after=self._reached(), why=Dependency.SYNCHRONISATION)
        self._last, self._awaited = index, [index]
        return index

    def send(self, work: Collective, name: str) -> int:
        """A data-parallel collective beside the computation; what follows loses ``compute_share`` of its time."""
        index = self.builder.add(work, "dp", name, after=self._reached(), why=Dependency.SYNCHRONISATION)
        if self.dp.compute_share > 0:
            self._taken[index] = (work, name)
        return index

    def _reached(self) -> list[int]:
        return sorted({*self._awaited, *([] if self._last is None else [self._last])})

    def _compute(self, work: Work, name: str, share: float = 1.0) -> None:
        self._last = self.builder.add(
            work, "compute", name, after=self._awaited, why=Dependency.SYNCHRONISATION, share=share
        )
        self._awaited = []

    def wait(self, index: int) -> None:
        """The next op or blocking collective waits for a node; if nothing runs beside it, nothing is lost."""
        if index not in self._awaited:
            self._awaited.append(index)
        self._taken.pop(index, None)

    def forward(self, block: Block, name: str) -> None:
        """Forward of a block."""
        for step in block:
            for work in step.forward:
                self.emit(work, f"{name}.{step.name}")
