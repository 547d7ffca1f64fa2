"""Numbers from compiled regions: nodes for framework ops, loops and fused kernels, and typed edges between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.harness.regions.region_record import MODES, Access, FrameworkOp, Loop, Region

Array = NDArray[np.float64]
Edges = NDArray[np.int64]
EdgeType = tuple[str, str, str]

SCALAR_OPS = (
    "load", "store", "add", "sub", "mul", "truediv", "neg", "abs", "maximum", "minimum", "where", "constant", "fma",
    "to_dtype", "exp", "log", "log1p", "expm1", "tanh", "sigmoid", "erf", "sin", "cos", "sqrt", "rsqrt", "square",
    "reciprocal", "floor", "round", "trunc", "reduction", "store_reduction", "index_expr", "masked",
    "indirect_indexing", "other",
)  # fmt: skip
_SCALAR = {name: number for number, name in enumerate(SCALAR_OPS)}
_SLOW = {
    "truediv": 4, "exp": 10, "log": 12, "log1p": 14, "expm1": 12, "tanh": 16, "sigmoid": 12, "erf": 14, "sin": 16,
    "cos": 16, "sqrt": 5, "rsqrt": 6, "reciprocal": 4, "pow": 24, "libdevice_tan": 20, "round": 2,
}  # fmt: skip
ATEN_OPS = (
    "placeholder", "add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "where", "exp", "log", "log1p",
    "expm1", "tanh", "sigmoid", "erf", "sin", "cos", "sqrt", "rsqrt", "pow", "reciprocal", "clamp_min", "clamp_max",
    "sum", "mean", "amax", "amin", "var_mean", "prepare_softmax_online", "view", "permute", "expand", "unsqueeze",
    "slice", "clone", "cat", "embedding", "index", "gather", "full", "iota", "convert_element_type", "getitem",
    "compare", "other",
)  # fmt: skip
_ATEN = {name: number for number, name in enumerate(ATEN_OPS)}
_COMPARED = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_not", "bitwise_and", "bitwise_not"}
_VIEWS = {
    "reshape": "view",
    "squeeze": "view",
    "_to_copy": "convert_element_type",
    "iota": "iota",
    "scalar_tensor": "full",
}
_MOVES_NOTHING = {
    "placeholder", "view", "permute", "expand", "unsqueeze", "slice", "getitem", "full", "iota", "select", "squeeze",
}  # fmt: skip

PARTS = (
    "bytes",
    "strided_bytes",
    "inner_bytes",
    "vectors",
    "slow_vectors",
    "scalars",
    "slow_scalars",
    "masks",
    "start",
)
BYTES_PER_S, STRIDED_PER_S, SCALARS_PER_S = 4e10, 1e10, 2e9  # of one core, for the scale only
QUICK_PER_S, MASKS_PER_S = 8e9, 2e8  # of scalar code, and of masks (one byte each) that vectors store
LANES = 30.0  # by which vectors are quicker than scalar code, for the scale only
START_S = 1e-7


@dataclass(frozen=True)
class RegionNumbers:
    """A region as arrays.

    Attributes:
        x: By type of node (``op``, ``loop``, ``kernel``), ``(n, f)``.
        parts: By type of node, seconds by resource of a roofline, ``(n, len(PARTS))``.
        key: By type of node, what kind it is, ``(n,)``.
        edges: By type of edge, ``(2, e)`` and ``(e, g)``.
    """

    x: Mapping[str, Array]
    parts: Mapping[str, Array]
    key: Mapping[str, Edges]
    edges: Mapping[EdgeType, tuple[Edges, Array]]


def region_numbers(region: Region) -> RegionNumbers:
    """Arrays of a region from Inductor's scheduler."""
    kernels = sorted({loop.kernel for loop in region.loops})
    place = {kernel: number for number, kernel in enumerate(kernels)}
    member = np.array([place[loop.kernel] for loop in region.loops], dtype=np.int64)
    groups = [[loop for loop in region.loops if loop.kernel == kernel] for kernel in kernels]
    outside = _outside(region, groups)
    loops = np.array([_loop_row(loop) for loop in region.loops]).reshape(len(region.loops), -1)
    ops = np.array([_op_row(region.ops, number) for number in range(len(region.ops))])
    loop_s = np.array([_loop_parts(loop) for loop in region.loops])
    kernel_s = np.array([_kernel_parts(g, b) for g, b in zip(groups, outside, strict=True)])
    main = [max(group, key=_loop_seconds) for group in groups]
    return RegionNumbers(
        {
            "op": ops,
            "loop": loops,
            "kernel": np.array([_kernel_row(g, b) for g, b in zip(groups, outside, strict=True)]),
        },
        {
            "op": np.array([_op_parts(region.ops, number) for number in range(len(region.ops))]),
            "loop": loop_s,
            "kernel": kernel_s,
        },
        {
            "op": np.array([_aten(op.name) for op in region.ops], dtype=np.int64),
            "loop": np.array([_kind(loop) for loop in region.loops], dtype=np.int64),
            "kernel": np.array([_kind(loop) for loop in main], dtype=np.int64),
        },
        _edges(region, member, groups),
    )  # fmt: skip


def _log(value: float) -> float:
    return float(np.log1p(value))


def _aten(name: str) -> int:
    word = name.split(".")[1] if "." in name else name
    word = "compare" if word in _COMPARED else _VIEWS.get(word, word)
    return _ATEN.get(word, _ATEN["other"])


def _numel(op: FrameworkOp) -> int:
    return int(np.prod(op.shape, dtype=np.float64)) if op.shape else 1


def _op_row(ops: Sequence[FrameworkOp], number: int) -> list[float]:
    op = ops[number]
    kinds = [0.0] * len(ATEN_OPS)
    kinds[_aten(op.name)] = 1.0
    read = sum(_numel(ops[each]) * ops[each].element_bytes for each in op.inputs)
    largest = max((_numel(ops[each]) for each in op.inputs), default=0)
    made = _numel(op)
    last = op.shape[-1] if op.shape else 1
    return [
        *kinds, _log(made), _log(largest), _log(read), _log(made * op.element_bytes), _log(last),
        _log(largest / max(made, 1)), float(op.element_bytes), float(op.is_output), float(len(op.inputs)),
        float(len(op.shape)),
    ]  # fmt: skip


def _op_parts(ops: Sequence[FrameworkOp], number: int) -> list[float]:
    op = ops[number]
    parts = dict.fromkeys(PARTS, 0.0)
    if ATEN_OPS[_aten(op.name)] in _MOVES_NOTHING:
        parts["start"] = START_S / 10
        return list(parts.values())
    read = [ops[each] for each in op.inputs]
    moved = _numel(op) * op.element_bytes + sum(_numel(each) * each.element_bytes for each in read)
    numel = max([_numel(op), *(_numel(each) for each in read)])
    cost = _SLOW.get(ATEN_OPS[_aten(op.name)], 0)
    parts |= {"bytes": moved / BYTES_PER_S, "vectors": numel / SCALARS_PER_S / LANES, "start": START_S}
    parts["slow_vectors"] = numel * cost / SCALARS_PER_S / LANES
    return list(parts.values())


def _iterations(loop: Loop) -> int:
    return loop.numel * loop.reduced


def _scalars(loop: Loop) -> float:
    """Scalar operations of a loop, slow ones counted as several."""
    each = sum(count * _SLOW.get(name, 1) for name, count in loop.ops.items() if name not in ("constant", "output"))
    return float(_iterations(loop) * each)


def _rest(loop: Loop) -> float:
    """Share of a vectorised loop that remains at the end of each row."""
    return (loop.inner % loop.lanes) / max(loop.inner, 1)


def _computing(loop: Loop) -> dict[str, float]:
    """Seconds of a loop's operations: vectors if its code has them, and scalar code for the rest of each row."""
    slow = float(_iterations(loop) * sum(count * _SLOW.get(name, 0) for name, count in loop.ops.items()))
    quick = max(_scalars(loop) - slow, 0.0)
    rest = _rest(loop) / 4 if loop.tiles else 1.0
    vector = (1 - _rest(loop)) / LANES if loop.tiles else 0.0
    each = 1 / SCALARS_PER_S
    return {
        "vectors": quick * vector * each, "slow_vectors": slow * vector * each, "scalars": quick * rest / QUICK_PER_S,
        "slow_scalars": slow * rest * each,
        "masks": _iterations(loop) / MASKS_PER_S if loop.element_bytes == 1 and _COMPARED & set(loop.ops) else 0.0,
    }  # fmt: skip


def _computing_s(loop: Loop) -> float:
    return sum(_computing(loop).values())


def _moved(loop: Loop, access: Access) -> float:
    """Bytes that are accessed: of a table that is indexed, only the elements read."""
    looked = _iterations(loop) * max(loop.element_bytes, 1)
    return float(min(access.num_bytes, looked) if access.mode == "indirect" else access.num_bytes)


def _touched(loop: Loop) -> float:
    return sum(_moved(loop, each) for each in (*loop.reads, *loop.writes))


def _strided(loop: Loop) -> float:
    return sum(_moved(loop, each) for each in (*loop.reads, *loop.writes) if each.mode in ("strided", "indirect"))


def _loop_parts(loop: Loop) -> list[float]:
    strided = _strided(loop)
    parts = dict.fromkeys(PARTS, 0.0) | _computing(loop)
    parts |= {"bytes": (_touched(loop) - strided) / BYTES_PER_S, "strided_bytes": strided / STRIDED_PER_S}
    return list((parts | {"start": START_S}).values())


def _loop_seconds(loop: Loop) -> float:
    return sum(_loop_parts(loop))


def _kernel_parts(loops: Sequence[Loop], outside: tuple[float, float, float]) -> list[float]:
    parts = dict.fromkeys(PARTS, 0.0)
    for loop in loops:
        for name, seconds in _computing(loop).items():
            parts[name] += seconds
    parts |= {"bytes": (outside[0] + outside[1]) / BYTES_PER_S, "inner_bytes": outside[2] / BYTES_PER_S}
    parts |= {"strided_bytes": sum(map(_strided, loops)) / STRIDED_PER_S, "start": START_S * len(loops)}
    return list(parts.values())


def _kind(loop: Loop) -> int:
    """Extern, reduction or pointwise; and whether it is strided, indirect, or uses a slow function."""
    if loop.extern:
        return 0
    modes = {each.mode for each in (*loop.reads, *loop.writes)}
    slow = any(_SLOW.get(name, 1) > 8 for name in loop.ops)
    return 1 + 8 * (loop.reduced > 1) + 4 * ("strided" in modes) + 2 * ("indirect" in modes) + slow


def _counts(loops: Sequence[Loop]) -> list[float]:
    """Scalar ops of loops by name, for each iteration of the largest."""
    counts = [0.0] * len(SCALAR_OPS)
    largest = max(map(_iterations, loops))
    for loop in loops:
        for name, count in loop.ops.items():
            if name != "output":
                counts[_SCALAR.get(name, _SCALAR["other"])] += count * _iterations(loop) / max(largest, 1)
    return [_log(count) for count in counts]


def _access_numbers(loops: Sequence[Loop], part: str) -> list[float]:
    """Bytes by mode, largest stride, and number of the ``reads`` or ``writes`` of loops."""
    by_mode = dict.fromkeys(MODES, 0.0)
    accesses = [(loop, each) for loop in loops for each in getattr(loop, part)]
    for loop, each in accesses:
        by_mode[each.mode] += _moved(loop, each)
    stride = max((each.stride for _, each in accesses), default=0)
    return [*(_log(moved) for moved in by_mode.values()), _log(stride), _log(len(accesses))]


def _code(loops: Sequence[Loop]) -> list[float]:
    """How the loops are vectorised: seconds by the number of vectorised loops, and the length of the innermost."""
    spent = [sum(_computing_s(loop) for loop in loops if loop.tiles == tiles) for tiles in (0, 1, 2)]
    total = sum(spent) + START_S
    longest = max(loops, key=_iterations)
    slow = sum(
        _iterations(loop) * count * _SLOW[name]
        for loop in loops if not loop.tiles for name, count in loop.ops.items() if name in _SLOW
    )  # fmt: skip
    return [*(each / total for each in spent), _rest(longest), _log(longest.inner), _log(longest.lanes), _log(slow)]


def _loop_row(loop: Loop) -> list[float]:
    moved = _touched(loop)
    return [
        *_counts([loop]), *_access_numbers([loop], "reads"), *_access_numbers([loop], "writes"), *_code([loop]),
        _log(loop.numel),
        _log(loop.reduced), _log(_iterations(loop)), _log(_scalars(loop)), _log(moved),
        _log(_scalars(loop) / max(moved, 1)), float(loop.element_bytes), float(bool(loop.extern)),
        float(np.log(_loop_seconds(loop))),
    ]  # fmt: skip


def _outside(region: Region, groups: Sequence[Sequence[Loop]]) -> list[tuple[float, float, float]]:
    """Bytes that each kernel reads and writes outside itself, and bytes that stay within it."""
    users: dict[str, set[int]] = defaultdict(set)
    for number, group in enumerate(groups):
        for loop in group:
            for each in loop.reads:
                users[each.buffer].add(number)
    out = []
    for number, group in enumerate(groups):
        written = {each.buffer: each.num_bytes for loop in group for each in loop.writes}
        read: dict[str, float] = {}
        for loop in group:
            for each in loop.reads:
                if each.buffer not in written:
                    read[each.buffer] = max(read.get(each.buffer, 0.0), _moved(loop, each))
        kept = {n for n in written if n in region.outputs or users[n] - {number}}
        left = [float(moved) for name, moved in written.items() if name in kept]
        inside = [float(moved) for name, moved in written.items() if name not in kept]
        out.append((float(sum(read.values())), sum(left), sum(inside)))
    return out


def _kernel_row(loops: Sequence[Loop], outside: tuple[float, float, float]) -> list[float]:
    largest = max(loops, key=_iterations)
    scalars, moved = sum(map(_scalars, loops)), outside[0] + outside[1]
    return [
        *_counts(loops), *_access_numbers(loops, "reads"), *_access_numbers(loops, "writes"), *_code(loops),
        *(_log(each) for each in outside),
        _log(len(loops)), _log(largest.numel), _log(largest.reduced), _log(_iterations(largest)),
        _log(sum(map(_iterations, loops)) / max(_iterations(largest), 1)), _log(scalars), _log(scalars / max(moved, 1)),
        float(sum(loop.reduced > 1 for loop in loops)), float(min(loop.element_bytes for loop in loops)),
        float(any(loop.extern for loop in loops)), float(np.log(sum(_kernel_parts(loops, outside)))),
    ]  # fmt: skip


def _edges(region: Region, member: Edges, groups: Sequence[Sequence[Loop]]) -> dict[EdgeType, tuple[Edges, Array]]:
    """Edges of every type, empty ones too."""
    data = [
        (source, target, _log(_numel(region.ops[source]) * region.ops[source].element_bytes))
        for target, op in enumerate(region.ops) for source in op.inputs
    ]  # fmt: skip
    computed = [
        (op, number, _log(len(loop.origins))) for number, loop in enumerate(region.loops) for op in loop.origins
    ]
    part = [(number, int(kernel), _log(len(groups[kernel]))) for number, kernel in enumerate(member)]
    loops = [[loop] for loop in region.loops]
    named: dict[EdgeType, list[tuple[float, ...]]] = {
        ("op", "data", "op"): list(data),
        ("op", "computed_by", "loop"): list(computed),
        ("loop", "part_of", "kernel"): list(part),
        ("loop", "feeds", "loop"): _uses(loops, member, produced=True),
        ("loop", "shares", "loop"): _uses(loops, member, produced=False),
        ("kernel", "feeds", "kernel"): _uses(groups, np.arange(len(groups)), produced=True),
        ("kernel", "shares", "kernel"): _uses(groups, np.arange(len(groups)), produced=False),
    }
    widths = {kind: 4 if kind[1] in ("feeds", "shares") else 1 for kind in named}
    made = {}
    for kind, rows in named.items():
        table = np.array(rows, dtype=np.float64).reshape(len(rows), 2 + widths[kind])
        made[kind] = table[:, :2].T.astype(np.int64), table[:, 2:]
    return made


def _uses(groups: Sequence[Sequence[Loop]], member: Edges, *, produced: bool) -> list[tuple[float, ...]]:
    """Edges to each reader of a buffer: from its writer (``produced``), or from its previous reader.

    Their numbers: bytes, groups between, bytes touched since (its reuse distance), and whether both are one kernel.
    """
    touched = np.cumsum([0.0, *(sum(map(_touched, group)) for group in groups)])
    last: dict[str, int] = {}
    rows: list[tuple[float, ...]] = []
    for number, group in enumerate(groups):
        written = {each.buffer for loop in group for each in loop.writes}
        read = {each.buffer: each.num_bytes for loop in group for each in loop.reads if each.buffer not in written}
        for buffer, moved in read.items():
            if buffer in last:
                before = last[buffer]
                since = touched[number] - touched[before + 1]
                same = float(member[before] == member[number])
                rows.append((before, number, _log(moved), _log(number - before), _log(since), same))
        for buffer in written if produced else read:
            last[buffer] = number
    return rows
