"""How many processors of a GPU a collective's kernel leaves to the kernels beside it.

A kernel is a grid of blocks.  A processor holds as many blocks at once as its threads, registers and shared memory
allow (NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities"), and the rest wait for the next wave.  A block of a
collective is a channel: it stays on its processor until the collective ends.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
RESERVED_SHARED_BYTES = 1024  # that the driver takes of every block since compute capability 8.0


@dataclass(frozen=True)
class Processors:
    """The processors of a GPU.

    Attributes:
        count: How many.
        registers, threads, shared_bytes, blocks: That one holds.
    """

    count: int
    registers: int = 65536
    threads: int = 2048
    shared_bytes: int = 228 * 1024
    blocks: int = 32


@dataclass(frozen=True)
class Launch:
    """How a kernel was launched; zeros where the trace does not tell."""

    blocks: int
    threads: int = 0
    registers: int = 0
    shared_bytes: int = 0


_BY_NAME = {
    "V100": Processors(80, shared_bytes=96 * 1024),
    "A100": Processors(108, shared_bytes=164 * 1024),
    "H100": Processors(132),
    "H800": Processors(132),
    "H200": Processors(132),
    "B200": Processors(148),
    "MI300X": Processors(304, shared_bytes=64 * 1024),
}
_BY_KERNEL = {"volta_": "V100", "sm80_": "A100", "cutlass_80": "A100", "ampere_": "A100", "sm90_": "H100"}


def processors_of(device_name: str, kernels: tuple[str, ...] = ()) -> Processors | None:
    """Processors of a GPU by the name in its trace, else by the names of its kernels; None where neither tells."""
    for name, found in _BY_NAME.items():
        if name in device_name:
            return found
    for word, name in _BY_KERNEL.items():
        if any(word in kernel for kernel in kernels):
            return _BY_NAME[name]
    return None


def resident_blocks(device: Processors, kernel: Launch, beside: Launch | None = None) -> int:
    """Blocks of a kernel that one processor holds at once, beside a block of another kernel."""
    taken = beside if beside is not None else Launch(0)
    warps = -(-max(kernel.threads, 1) // WARP) * WARP
    room = [
        device.blocks - (beside is not None),
        (device.threads - taken.threads) // warps,
        (device.registers - taken.registers * taken.threads) // (max(kernel.registers, 1) * warps),
    ]
    if kernel.shared_bytes:
        room.append((device.shared_bytes - taken.shared_bytes) // (kernel.shared_bytes + RESERVED_SHARED_BYTES))
    return max(min(room), 0)


def waves(device: Processors, kernel: Launch, collective: Launch | None = None) -> float:
    """How many rounds of blocks a kernel needs, beside a collective that keeps its processors.

    >>> product, gather = Launch(132, 384, 168), Launch(20, 512, 96)
    >>> waves(Processors(132), product), waves(Processors(132), product, gather)
    (1.0, 2.0)
    """
    alone = max(resident_blocks(device, kernel), 1)
    if collective is None:
        return float(-(-max(kernel.blocks, 1) // (device.count * alone)))
    held = min(collective.blocks, device.count - 1)
    room = (device.count - held) * alone + held * min(resident_blocks(device, kernel, collective), alone)
    return float(-(-max(kernel.blocks, 1) // room))


def held_ratio(device: Processors | None, collective: Launch) -> float:
    """Processors that a collective holds over those that it leaves; 0 where that is not known."""
    if device is None or collective.blocks <= 0:
        return 0.0
    held = min(collective.blocks, device.count - 1)
    return held / (device.count - held)
