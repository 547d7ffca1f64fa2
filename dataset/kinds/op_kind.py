"""The record of an op kind: all of its properties, except how the harness runs it.

Functions of a kind take its dims as positional arguments, in the order of ``dim_names``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.kinds.kind_table import check_functions, check_names, check_record, code_of

Args = Mapping[str, Any]  # of a call in a profiler's trace: "Input Dims", "Concrete Inputs", …
Dims = tuple[int, ...]
Bound = Literal["compute", "memory", "host_memory", "host_link", "host"]

STREAMED = "add"  # base of streaming kinds: an addition that moves as many bytes


def _nothing(*dims: int) -> float:
    return 0.0


def _same(*dims: int) -> Dims:
    return dims


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class OpKind:
    """Properties of one kind of op: the meaning of its dims, its cost, and its names in libraries.

    Attributes:
        name: As in ``Op.kind``.
        family: Ops of a family share a regressor (``gemm``, ``attention``, ``norm``, …).
        dim_names: Names of ``Op.dims``, in order.
        flops: FLOP of one call (one multiply-add is two).
        elements: Elements that one call reads plus those that it writes.
        bound: What bounds its time: the device's arithmetic or memory, the host's memory, the link to the host, or the
            time in which the host makes its first dim of calls.
        code: Number that represents the kind in the features of trees.  It never changes, because trained predictors
            hold it.  The package's first kinds have numbers of their own; -1 takes one from the name.
        flags: Dims that are 0 or 1.
        in_harness: Whether the harness has a callable of this name (``dataset/harness/ops``), so that it can run it.
        units: Parts of a call that each cost time: rows, heads, matrices, tensors.  0: none.
        operands: Elements of up to three operands that caches treat differently.  None: all ``elements`` in one.
        keeps_second_operand: Whether a fused kernel keeps its second operand on the chip, as attention its scores.
        grid: Number of independent matrices of the output, and the rows and columns of each: what a GPU cuts into
            tiles.  None: the kind is not tiled.
        aligned: Dims whose divisibility by powers of two decides which kernel runs.
        padded: Dim that GPU libraries pad to the next size that they have a kernel for.
        streams: Whether time grows in proportion to the first dim beyond the longest op that was measured.
        base: Kind whose efficiency tells most about this one where this one was not measured.  ``STREAMED``: an
            addition of as many bytes.  Empty: none does.
        base_dims: Dims of that op.
        reads_saved: Whether it reads what forward saved for backward.
        weight_gradient: Whether it computes the gradient of a linear's weight from its input and output gradient.
        slept: Whether ranks of a cluster in a box sleep for it.  False: it takes so little that they run it.
        calls: Calls of frameworks that are this op, and how the dims follow from a call's arguments (None: the call
            does no work).
        in_parts: Whether consecutive calls of equal dims are parts of one op.

    Raises:
        StepsightError: On construction, if a field has a wrong type or value, or if a function does not take the dims
            or does not return what it must for a few of them.
    """

    name: str
    family: str
    dim_names: tuple[str, ...]
    flops: Callable[..., float]
    elements: Callable[..., float]
    bound: Bound = "memory"
    code: int = -1
    flags: tuple[str, ...] = ()
    in_harness: bool = True
    units: Callable[..., float] = _nothing
    operands: Callable[..., tuple[float, float, float]] | None = None
    keeps_second_operand: bool = False
    grid: Callable[..., tuple[int, int, int]] | None = None
    aligned: tuple[str, ...] = ()
    padded: str = ""
    streams: bool = False
    base: str = STREAMED
    base_dims: Callable[..., Dims] = _same
    reads_saved: bool = True
    weight_gradient: bool = False
    slept: bool = True
    calls: Mapping[str, Callable[[Args], Dims | None]] = field(default_factory=dict)
    in_parts: bool = False

    def __post_init__(self) -> None:
        check_record(self, "op kind", {"bound": Bound}, [f.name for f in fields(self) if isinstance(f.default, bool)])
        what = f"op kind {self.name!r}:"
        check_names(f"{what} dim_names", self.dim_names, at_least=1)
        check_names(f"{what} flags", self.flags, among=self.dim_names)
        check_names(f"{what} aligned", self.aligned, among=self.dim_names)
        check_names(f"{what} padded", (self.padded,) if self.padded else (), among=self.dim_names)
        for field_name in ("family", "base"):
            value = getattr(self, field_name)
            if not isinstance(value, str) or not (value.isidentifier() or (not value and field_name == "base")):
                raise StepsightError(f"{what} {field_name} must be a name, got {value!r:.80}")
        if not isinstance(self.calls, Mapping) or not all(map(callable, self.calls.values())):
            raise StepsightError(f"{what} calls must map names of calls to functions, got {self.calls!r:.80}")
        check_functions(self)
        object.__setattr__(self, "code", code_of(self.name, self.code))

    def __repr__(self) -> str:
        return f"<OpKind {self.name}>"


def check_base(kind: OpKind, known: Mapping[str, OpKind]) -> None:
    """Check that the base of a kind is another kind that is known, and that ``base_dims`` returns dims of it.

    Raises:
        StepsightError: If not.
    """
    if kind.base in ("", STREAMED):
        return
    if kind.base == kind.name or kind.base not in known:
        raise StepsightError(f"base must be another kind that is registered already, got {kind.base!r:.80}")
    takes, got = known[kind.base].dim_names, kind.base_dims(*(1 for _ in kind.dim_names))
    if len(got) != len(takes):
        raise StepsightError(f"base_dims must return the dims {takes} of {kind.base}, got {got}")
