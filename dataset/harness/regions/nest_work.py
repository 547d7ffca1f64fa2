"""How much work loop nests are: operations, accesses and bytes, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .loop_nests import Nest, Touch, nests_of
from .region_record import Launch, Region

LINE = 64  # bytes of a cache line
FUNCTIONS = {  # cycles of one vector, about as a CPU with vectors of 64 bytes takes
    "exp_u20": 8, "exp": 14, "log": 50, "log1p": 70, "expm1": 50, "tanh": 80, "erf": 40, "sin": 30, "cos": 30,
    "pow": 100, "sqrt": 8, "rsqrt": 12, "reciprocal": 6, "divide": 4, "rand_cpu": 70, "other": 20,
}  # fmt: skip
GROUPS = {"vec_reduce_all": 12.0, "welford": 25.0, "cascade": 2.0, "transpose_mxn": 60.0}  # cycles of one call
TERMS = (
    "read_bytes", "written_bytes", "strided", "indirect", "vector_moves", "scalar_moves", "vector", "scalar",
    "mask_stores", "mask_loads", *GROUPS, *(f"vector_{name}" for name in FUNCTIONS),
    *(f"scalar_{name}" for name in FUNCTIONS), "nests",
)  # fmt: skip
NEAR, MIDDLE = (
    700_000,
    12_000_000,
)  # bytes touched between two uses of a buffer that a core's caches, or all, still hold
MASK_STORE, MASK_LOAD = 40.0, 4.0  # vectors moved in the time of one truth value that a vector stores or loads
SCALAR_SLOW = 0.5  # cycles of a slow function on one number, over those on a vector


@dataclass(frozen=True, slots=True)
class Use:
    """What a nest does with a buffer: bytes that it reads and writes, and whether with strides."""

    read: float
    written: float
    strided: bool


def nests_by_call(region: Region) -> dict[str, list[Nest]]:
    """Nests of every compiled function; those that only set up a few variables are left out."""
    return {
        name: [each for each in nests_of(text) if each.touches or sum(each.operations.values()) > 64]
        for name, text in region.code.items()
    }


def is_strided(touch: Touch) -> bool:
    """Whether each access takes another line than the one before, and not the next."""
    return touch.form != "indirect" and touch.stride >= 2 * LINE and touch.stride > touch.num_bytes


def uses_of(nest: Nest, pointers: Mapping[str, str], buffers: Mapping[str, int]) -> dict[str, Use]:
    """What a nest does with each buffer.

    Args:
        nest: Of a compiled function.
        pointers: Names of buffers behind the function's pointers.
        buffers: Their bytes.
    """
    found: dict[str, Use] = {}
    for touch in nest.touches:
        if touch.pointer.startswith("local"):
            continue
        name = pointers.get(touch.pointer, touch.pointer)
        whole = buffers.get(name, 0) or touch.distinct
        old, moved = found.get(name, Use(0.0, 0.0, False)), min(touch.distinct, whole)
        strided = old.strided or is_strided(touch)
        if touch.writes:
            found[name] = Use(old.read, min(max(old.written, moved), whole), strided)
        else:
            found[name] = Use(min(max(old.read, moved), whole), old.written, strided)
    return found


def terms_of(nest: Nest, uses: Mapping[str, Use]) -> dict[str, float]:
    """How much a nest does of ``TERMS``."""
    found = dict.fromkeys(TERMS, 0.0)
    for name, times in nest.operations.items():
        kind, _, function = name.partition("_")
        if name in found:
            found[name] += times
        elif kind in ("vector", "scalar") and function:
            found[f"{kind}_other"] += times
    for touch in nest.touches:
        if is_strided(touch):
            found["strided"] += touch.times
        if touch.form == "indirect":
            found["indirect"] += touch.times
        elif touch.masks:
            found["mask_stores" if touch.writes else "mask_loads"] += touch.times * touch.num_bytes
        else:
            found[f"{touch.form}_moves"] += touch.times
    found["read_bytes"] = sum(use.read for use in uses.values())
    found["written_bytes"] = sum(use.written for use in uses.values())
    found["nests"] = 1.0
    return found


def launch_dims(
    nests: Iterable[Nest], launch: Launch, buffers: Mapping[str, int], since: Callable[[str], float]
) -> tuple[int, ...]:
    """Dims of the op ``fused_loops`` that a call of a compiled function is.

    Args:
        nests: Of the function.
        launch: The call.
        buffers: Bytes by name.
        since: Bytes that were touched since a buffer was, before this call.
    """
    levels, strided = [0.0, 0.0, 0.0], [0.0, 0.0]
    sums = dict.fromkeys(TERMS, 0.0)
    passed, last = 0.0, dict[str, float]()
    for nest in nests:
        uses = uses_of(nest, launch.pointers, buffers)
        own = sum(max(use.read, use.written) for use in uses.values())
        apart = 0.0
        for name, use in uses.items():
            moved = max(use.read, use.written)
            distance = (passed - last[name] if name in last else since(name) + passed) + 0.5 * (own + moved)
            level = 0 if distance < NEAR else 1 if distance < MIDDLE else 2
            levels[level] += use.read + use.written
            apart += moved * (use.strided and level > 0)
            last[name] = passed + own
        passed += own
        told = terms_of(nest, uses)
        far = apart / max(sum(max(u.read, u.written) for u in uses.values() if u.strided), 1.0)
        strided[0] += told["strided"] * (1 - min(far, 1.0))
        strided[1] += told["strided"] * min(far, 1.0)
        for name, amount in told.items():
            sums[name] += amount
    moves = sums["vector_moves"] + sums["scalar_moves"] + MASK_STORE * sums["mask_stores"]
    moves += MASK_LOAD * sums["mask_loads"]
    functions = sum(cycles * sums[f"vector_{name}"] for name, cycles in FUNCTIONS.items())
    functions += SCALAR_SLOW * sum(cycles * sums[f"scalar_{name}"] for name, cycles in FUNCTIONS.items())
    functions += sum(cycles * sums[name] for name, cycles in GROUPS.items())
    amounts = (
        *levels, *strided, sums["indirect"], moves, sums["vector"], sums["scalar"], functions, sums["nests"]
    )  # fmt: skip
    return tuple(round(each) for each in amounts)
