"""How much work loop nests are: operations, accesses and bytes, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .accesses import LINE, Touch
from .body_ops import CALLS, CYCLES, FUNCTIONS, MOVES, OPS, PLAIN
from .loop_nests import Nest, nests_of
from .region_record import Launch, Region

FORMS = ("vector", "scalar")
TERMS = ("read_bytes", "written_bytes", "strided", *(f"{form}_{name}" for form in FORMS for name in OPS), "nests")
NEAR, MIDDLE = (
    700_000,
    12_000_000,
)  # bytes touched between two uses of a buffer that a core's caches, or all, still hold


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
        found[name] += times
    found["strided"] = sum(touch.times for touch in nest.touches if is_strided(touch))
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
    spent = {
        (form, name): CYCLES[name][place] * sums[f"{form}_{name}"] for place, form in enumerate(FORMS) for name in OPS
    }
    far = sum(spent[form, name] for form in FORMS for name in ("gather", "scatter"))
    moves = sum(spent[form, name] for form in FORMS for name in MOVES) - far
    slow = sum(spent[form, name] for form in FORMS for name in FUNCTIONS)
    vector, scalar = (sum(spent[form, name] for name in (*PLAIN, *CALLS)) for form in FORMS)
    amounts = *levels, *strided, far, moves, vector, scalar, slow, sums["nests"]
    return tuple(round(each) for each in amounts)


def region_dims(region: Region) -> list[tuple[int, ...]]:
    """Dims of the ops ``fused_loops`` that the calls of a region's compiled functions are, in order."""
    nests = nests_by_call(region)
    numbers = {loop: number for number, launch in enumerate(region.launches) for loop in launch.loops}
    loops = {loop.name: loop for loop in region.loops}
    found: dict[int, tuple[int, ...]] = {}
    passed, touched = 0.0, dict[str, float]()

    def since(name: str) -> float:
        return passed - touched[name] if name in touched else float("inf")

    for loop in region.loops:
        number = numbers.get(loop.name)
        if number in found or (number is None and not loop.extern):
            continue
        inside = [loop]
        if number is not None:
            launch = region.launches[number]
            inside = [loops[name] for name in launch.loops]
            found[number] = launch_dims(nests[launch.call], launch, region.buffers, since)
        for name in dict.fromkeys(access.buffer for each in inside for access in (*each.reads, *each.writes)):
            passed += region.buffers.get(name, 0)
            touched[name] = passed
    return [found[number] for number in range(len(region.launches))]
