"""A compiled region: framework ops, the loops that Inductor makes from them, and the kernels that fuse the loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MODES = ("contiguous", "broadcast", "strided", "indirect")  # how the innermost loop walks over a buffer


@dataclass(frozen=True, slots=True)
class Access:
    """A buffer that a loop reads or writes.

    Attributes:
        buffer: Its name.
        num_bytes: Distinct bytes that are touched, at most those of the buffer.
        mode: One of ``MODES``.
        stride: Elements between two steps of the innermost loop; 0 where the mode is not ``strided``.
    """

    buffer: str
    num_bytes: int
    mode: str
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop nest of Inductor, or a call of a library (an extern kernel).

    Attributes:
        name: Of the loop.
        kernel: Number of the fused kernel that it is in.
        call: Name of the compiled function that holds the kernel; empty if it was not compiled.
        extern: Name of the library's op; empty for a loop.
        numel: Elements of the outer loops.
        reduced: Elements of the inner reduction for each of them, 1 without one.
        element_bytes: Of its output's type.
        ops: How often each scalar op runs for one element.
        reads: Buffers that it reads.
        writes: Buffers that it writes.
        origins: Numbers of the framework ops that it computes.
        tiles: Loops that are vectorised: 0 (scalar code), 1, or 2 (blocks that are transposed).
        lanes: Elements of a vector.
        inner: Length of the loop that is vectorised, of the innermost one in scalar code.
    """

    name: str
    kernel: int
    call: str
    extern: str
    numel: int
    reduced: int
    element_bytes: int
    ops: Mapping[str, int]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    origins: tuple[int, ...] = ()
    tiles: int = 0
    lanes: int = 1
    inner: int = 1


@dataclass(frozen=True, slots=True)
class FrameworkOp:
    """An op of the graph before fusion.

    Attributes:
        name: Of its overload, such as ``aten.mul.Tensor``; ``placeholder`` for an input.
        shape: Of its (first) output.
        element_bytes: Of its output's type.
        inputs: Numbers of the ops whose outputs it reads.
        is_output: Whether the region returns it.
    """

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    inputs: tuple[int, ...]
    is_output: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """A call of a compiled function.

    Attributes:
        call: Name of the function.
        pointers: Name of the buffer behind each pointer of its source.
        loops: Names of the loops that it runs.
    """

    call: str
    pointers: Mapping[str, str]
    loops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A graph that Inductor compiles as one.

    Attributes:
        direction: ``forward``, ``backward`` or ``inference``.
        ops: Before fusion, in order.
        loops: After fusion, in the order in which they run.
        buffers: Bytes of every buffer by name.
        inputs: Names of buffers that come from outside.
        outputs: Names of buffers that are returned.
        code: Source of every compiled function by its name.
        launches: Calls of compiled functions in order.
    """

    direction: str
    ops: tuple[FrameworkOp, ...]
    loops: tuple[Loop, ...]
    buffers: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)
    launches: tuple[Launch, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Region:
        """Read the result of ``to_dict``."""
        loops = []
        for each in values["loops"]:
            accesses = {name: tuple(Access(**access) for access in each[name]) for name in ("reads", "writes")}
            loops.append(Loop(**{**each, **accesses, "origins": tuple(each["origins"])}))
        ops = [
            FrameworkOp(**{**each, "shape": tuple(each["shape"]), "inputs": tuple(each["inputs"])})
            for each in values["ops"]
        ]
        return cls(
            values["direction"],
            tuple(ops),
            tuple(loops),
            dict(values["buffers"]),
            tuple(values["inputs"]),
            tuple(values["outputs"]),
            dict(values.get("code", {})),
            tuple(Launch(e["call"], dict(e["pointers"]), tuple(e["loops"])) for e in values.get("launches", ())),
        )
