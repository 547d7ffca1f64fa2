"""What compiled functions do, from the C++ that Inductor wrote: the terms of an op ``fused_loops``.

The code is loops with constant bounds, one statement a line, and braces around every body.  So each statement's number
of executions, and the addresses that it touches, follow from the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .inductor import Launch, Region
from .statements import (
    COSTS,
    FAR,
    FLOAT,
    LINE,
    MOVES,
    SCALAR_ACCESS,
    SLOW,
    WORK,
    Accesses,
    Known,
    Touch,
    functions_in,
    kind_of,
    known_of,
    name_of,
    vectors_in,
)

_CAST = re.compile(r"static_cast<int64_t>\(([^()]*)\)")
_FOR = re.compile(
    r"for\s*\(\s*(?:int64_t|int|long) (\w+)\s*=\s*(-?\d+)L?; \w+\s*<\s*(-?\d+)L?; \w+(?:\+\+|\s*\+=\s*(\d+)L?)\s*\)"
)
_PART = re.compile(r"C10_(?:UN)?LIKELY\((\w+) >= (-?\d+)L? && \w+ < (-?\d+)L?\)")
_TARGET = re.compile(r"^(?:auto |float |int64_t |bool |at::vec::\S+ )?(\w+)(?:\[[^=]*\])? = ")
_CALLED = re.compile(r"(tmp\d+) \? (tmp\d+)\(\)")
_POINTED = re.compile(r"\b\w*ptr\d+\b")
_ALONE = re.compile(r"= \(?\w+\)?;$|= tmp\w*\(\);$")  # a copy of a variable, or a call of a function of the body
_WORKED_OUT = re.compile(r"div_floor|\[[^\]]* % |\+ [^;]* % ")  # an index
_NAME = re.compile(r"\btmp\w*")
_WORD = re.compile(r"\b\w+\b")
_SIGNS = (" + ", " - ", " * ", " / ", ")/(")
_SKIPPED = (
    "#", "//", "return", "[&]", "()", ";", "TORCH_CHECK", "std::atomic", "inductor_cpu", "extern", "alignas",
    "__at_align", "static Welford", "Welford", "Cascade", "std::unique",
)  # fmt: skip
_REMEMBERED = 40_000  # truth values that branch prediction learns from one call to the next


class BodyOp(NamedTuple):
    """An operation of a loop's body."""

    name: str  # one of ``COSTS``
    registers: int  # vectors that it works on; 0: a number
    kind: str  # type of its numbers
    times: float  # how often it runs, where the innermost loop that changes it runs it
    inputs: tuple[int, ...] = ()  # places of the operations whose results it takes
    touch: int = -1  # place of its access of memory; -1: none
    text: str = ""  # of the statement, if it accesses memory

    @property
    def work(self) -> float:
        """Registers (or numbers) times runs."""
        return self.times * max(self.registers, 1)

    @property
    def cycles(self) -> float:
        """Of all its runs."""
        _, vector, number = COSTS[self.name]
        return (vector if self.registers else number) * self.work


class Nest(NamedTuple):
    """One loop nest of a function: the operations of its bodies in order, and its accesses of memory."""

    ops: tuple[BodyOp, ...]
    touches: tuple[Touch, ...]


class _Value(NamedTuple):
    """What is known of a variable: registers (0: a number), loops that it depends on, type, and place of its op."""

    registers: int = 0
    depth: int = 0
    kind: str = FLOAT
    op: int = -1


@dataclass
class _Scope:
    """A pair of braces: how often its body runs, its loop, and what is known within."""

    times: float
    loop: str = ""
    start: int = 0
    end: int = 1
    step: int = 1
    trips: float = 1.0
    values: dict[str, _Value] = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)
    same: dict[str, _Value] = field(default_factory=dict)

    def inner(self, times: float, **loop: Any) -> _Scope:
        """A scope within."""
        return _Scope(times, **loop, values=dict(self.values), known=dict(self.known), same=dict(self.same))

    def place(self, name: str) -> str:
        """A name by the operation that made it, so that equal statements read alike."""
        value = self.values.get(name)
        return f"#{value.op}" if value is not None and value.op >= 0 else name


class _Lambda(NamedTuple):
    """A function within a body: its name, where its operations and scopes begin, and whether it is called later."""

    name: str
    first_op: int
    level: int
    later: bool


def nests_of(source: str) -> list[Nest]:
    """Loop nests of a function in order."""
    reader = _Reader(source)
    for raw in source.split("\n"):
        line = raw.strip()
        while (made := _CAST.sub(r"\1", line)) != line:
            line = made
        if line:
            reader.read(line)
    return reader.nests


class _Reader:
    """Reads the lines of one function."""

    def __init__(self, source: str) -> None:
        self.nests: list[Nest] = []
        self._accesses = Accesses(source)
        self._scopes = [_Scope(1.0)]
        self._pending: _Scope | None = None
        self._lambdas: list[_Lambda] = []
        self._begin_nest()

    def _begin_nest(self) -> None:
        self._ops: list[BodyOp] = []
        self._touches: list[Touch] = []
        self._later: dict[str, range] = {}  # operations of functions that are called later
        self._done: dict[str, dict[Any, int]] = {}  # what was done where a condition holds

    def read(self, line: str) -> None:
        """Read the next line."""
        scope = self._scopes[-1]
        if line == "{":
            self._scopes.append(self._pending or scope.inner(scope.times))
            self._pending = None
        elif line.startswith("}"):
            self._close()
        elif line.endswith((" =", "= [&]")) and (found := _NAME.search(line)):
            self._lambdas.append(_Lambda(found[0], len(self._ops), len(self._scopes), line.endswith("[&]")))
        elif line.startswith("return") and self._lambdas:
            self._return(line.removeprefix("return ").rstrip(";"))
        elif found := _FOR.match(line):
            low, high, step = int(found[2]), int(found[3]), int(found[4] or 1)
            trips = max(0.0, -(-(high - low) // step))
            self._pending = scope.inner(scope.times * trips, loop=found[1], start=low, end=high, step=step, trips=trips)
        elif line.startswith(("if", "else")):
            self._pending = scope.inner(scope.times * self._part(line))
        elif not line.startswith(_SKIPPED):
            self._statement(line)

    def _part(self, line: str) -> float:
        """The part of a loop's rounds in which a branch is taken."""
        part = _PART.search(line)
        loop = next((each for each in reversed(self._scopes) if each.loop == part[1]), None) if part else None
        if part is None or loop is None or not loop.trips:
            return 1.0
        before, until = (len(range(loop.start, int(bound), loop.step)) for bound in (part[2], part[3]))
        return min(max(until - before, 0), loop.trips) / loop.trips

    def _return(self, right: str) -> None:
        """Keep what a function within a body makes, for the scope around it."""
        name = self._lambdas[-1].name
        if not _NAME.fullmatch(right):
            self._statement(f"auto {name} = {right};")
        value = self._scopes[-1].values.get(right if _NAME.fullmatch(right) else name, _Value())
        for scope in self._scopes[self._lambdas[-1].level - 1 :]:
            scope.values[name] = value._replace(registers=1) if right == "tmpbuf" else value

    def _close(self) -> None:
        if len(self._scopes) < 2:
            return
        gone = self._scopes.pop()
        if self._lambdas and len(self._scopes) <= self._lambdas[-1].level:
            made = self._lambdas.pop()
            if made.later:
                self._later[made.name] = range(made.first_op, len(self._ops))
        if gone.loop and not any(scope.loop for scope in self._scopes) and (self._ops or self._touches):
            self.nests.append(Nest(tuple(self._ops), tuple(self._touches)))
            for scope in self._scopes:
                scope.values = {name: value._replace(op=-1) for name, value in scope.values.items()}
                scope.same.clear()
            self._begin_nest()

    def _statement(self, line: str) -> None:
        scope = self._scopes[-1]
        loops = [each for each in self._scopes if each.loop]
        if not loops or not scope.times:
            return
        target, (left, _, right) = _TARGET.match(line), line.partition(" = ")
        name, right = target[1] if target else "", right.rstrip(";")
        if name and (told := known_of(right, scope.known, {each.loop: (each.start, each.end) for each in loops})):
            scope.known[name] = told
        if called := _CALLED.match(right):
            self._run(called[2], called[1], scope.known.get(called[1], Known()).share)
        value, inputs = self._value(line, name, loops)
        key = _NAME.sub(lambda found: scope.place(found[0]), right)
        pure = bool(name) and left.startswith("auto ")
        if pure and key in scope.same and "tmpbuf" not in line:
            scope.values[name] = scope.same[key]
            return
        times = scope.times
        for loop in loops[value.depth :]:  # the compiler takes it out of loops that do not change it
            times /= max(loop.trips, 1.0)
        touches = list(self._accesses.of(line, loops, scope.times))
        carried = bool(name) and not left.startswith("auto ") and bool(re.search(rf"\b{name}\b", right))
        wrote = self._emit(line, value, (times, inputs, carried), touches)
        if name and wrote:
            value = value._replace(op=len(self._ops) - 1)
        elif len(inputs) == 1:
            value = value._replace(op=inputs[0])
        for kept in filter(None, (name, "tmpbuf" if ".store(tmpbuf" in line else "")):
            # what a loop fills is also kept for the scopes around it
            for each in self._scopes[1:] if "tmp_acc" in kept or kept == "tmpbuf" else [scope]:
                each.values[kept] = value
        if pure and wrote:
            scope.same[key] = value

    def _run(self, name: str, condition: str, share: float) -> None:
        """A function of the body is called where a condition holds: its operations run that often.

        What another function did where the same condition holds is not done again.
        """
        done = self._done.setdefault(condition, {})
        same: dict[int, int] = {}
        for place in self._later.pop(name, ()):
            op = self._ops[place]
            key = op.name, op.kind, tuple(same.get(each, each) for each in op.inputs), op.text
            same[place] = done.setdefault(key, place)
            often = 0.0 if same[place] != place else share if share == share else 1.0
            self._ops[place] = op._replace(times=op.times * often)
            if op.touch >= 0:
                touch = self._touches[op.touch]
                self._touches[op.touch] = touch._replace(times=touch.times * often)

    def _emit(self, line: str, value: _Value, how: tuple[float, list[int], bool], touches: list[Touch]) -> bool:
        """Write the operations of a statement down; returns whether there are any."""
        (times, inputs, carried), functions = how, functions_in(line)
        self._touches += touches
        starts = not value.depth or ("tmp_acc" in line and not carried)
        if starts and not (inputs or touches or functions):
            return False  # a constant, or what a sum begins with
        names: list[tuple[str, int]] = []
        for place, touch in enumerate(touches, len(self._touches) - len(touches)):
            names += [("mod", -1)] * bool(_WORKED_OUT.search(line)) + [(_move(line, touch), place)]
        taken = tuple(self._ops[each].kind for each in inputs)
        names += [(each, -1) for each in functions]
        more = not names or (not touches and any(sign in line for sign in _SIGNS))
        if more and _NAME.search(line) and not _ALONE.search(line):
            name = name_of(line, value.kind, taken, carried=carried)
            names += [(name, -1)] if name else []
        text = line.partition(" = ")[2] if "ptr" in line else ""
        for name, at in names:
            runs, kind = times, value.kind
            if at >= 0:
                runs, kind = self._touches[at].times, self._accesses.kind_of(self._touches[at].pointer)
            registers = 0 if name == "mod" and at < 0 and "ptr" in line else value.registers
            self._ops.append(BodyOp(name, registers, kind, runs, tuple(inputs), at, text))
            inputs = [len(self._ops) - 1]
        return bool(names)

    def _value(self, line: str, target: str, loops: list[_Scope]) -> tuple[_Value, list[int]]:
        """What is known of the result of a statement, and the places of the operations whose results it takes."""
        known = self._scopes[-1].values
        values, names = [known[n] for n in _NAME.findall(line) if n in known], [each.loop for each in loops]
        depth = max([*(names.index(w) + 1 for w in _WORD.findall(line) if w in names), *(v.depth for v in values), 0])
        if not target or target.startswith(("tmp_acc", "masked_tmp_acc", "tmpbuf")) or "ptr" in target:
            depth = len(loops)
        right = line.partition(" = ")[2] or line
        kind = kind_of(right, tuple(each.kind for each in values))
        if found := _POINTED.search(right):
            kind = self._accesses.kind_of(found[0])
        registers, is_vector = max((each.registers for each in values), default=0), target.endswith("_vec")
        if wide := vectors_in(line):
            registers = wide
        elif "tmpbuf[" in line or SCALAR_ACCESS.search(line):
            registers = 0  # a lane of a vector at a time
        elif "vec_reduce_all" in line or "cascade_sum_final(&scalar" in line:
            registers *= is_vector
        elif is_vector or ("at::vec::" in line and "at::vec::convert<" not in line):
            registers = max(1, registers)
        return _Value(registers, depth, kind), list(dict.fromkeys(each.op for each in values if each.op >= 0))


def _move(line: str, touch: Touch) -> str:
    """Name of the operation that accesses memory."""
    what = "store" if touch.writes else "load"
    if touch.form == "indirect":
        return "scatter" if touch.writes else "gather"
    if touch.form == "vector" and touch.masks:
        return f"{'many_' * (touch.times * touch.num_bytes > _REMEMBERED)}mask_{what}"
    if "transpose_mxn" in line:
        return "transpose"
    return f"part_{what}" if touch.part else what


# --- dims of the op that a call is ------------------------------------------------------------------------------------

# bytes touched between two uses of a buffer that a core's caches, or all, still hold
NEAR, MIDDLE = 700_000, 12_000_000


class Use(NamedTuple):
    """What a nest does with a buffer: bytes that it reads and writes, and whether with strides."""

    read: float = 0.0
    written: float = 0.0
    strided: bool = False

    @property
    def moved(self) -> float:
        """Bytes of the buffer that are touched."""
        return max(self.read, self.written)


def is_strided(touch: Touch) -> bool:
    """Whether each access takes another line than the one before, and not the next."""
    return touch.form != "indirect" and touch.stride >= 2 * LINE and touch.stride > touch.num_bytes


def uses_of(nest: Nest, pointers: Mapping[str, str], buffers: Mapping[str, int]) -> dict[str, Use]:
    """What a nest does with each buffer, of bytes ``buffers``; ``pointers`` name them by pointers of the code."""
    found: dict[str, Use] = {}
    for touch in nest.touches:
        if touch.pointer.startswith("local"):
            continue
        name = pointers.get(touch.pointer, touch.pointer)
        whole = buffers.get(name, 0) or touch.distinct
        old, side = found.get(name, Use()), "written" if touch.writes else "read"
        moved = min(max(getattr(old, side), touch.distinct), whole)
        found[name] = old._replace(**{side: moved, "strided": old.strided or is_strided(touch)})
    return found


def launch_dims(
    nests: Sequence[Nest], launch: Launch, buffers: Mapping[str, int], since: Callable[[str], float]
) -> tuple[int, ...]:
    """Dims of the op ``fused_loops`` that a call of a compiled function is.

    ``since`` tells the bytes that were touched since a buffer was, before this call.
    """
    levels, strided, cycles = [0.0, 0.0, 0.0], [0.0, 0.0], dict.fromkeys((FAR, MOVES, "vector", "scalar", SLOW), 0.0)
    passed, last = 0.0, dict[str, float]()
    for nest in nests:
        uses = uses_of(nest, launch.pointers, buffers)
        own = sum(use.moved for use in uses.values())
        apart = 0.0
        for name, use in uses.items():
            distance = (passed - last[name] if name in last else since(name) + passed) + 0.5 * (own + use.moved)
            level = 0 if distance < NEAR else 1 if distance < MIDDLE else 2
            levels[level] += use.read + use.written
            apart += use.moved * (use.strided and level > 0)
            last[name] = passed + own
        passed += own
        far = min(apart / max(sum(use.moved for use in uses.values() if use.strided), 1.0), 1.0)
        times = sum(touch.times for touch in nest.touches if is_strided(touch))
        strided[0] += times * (1 - far)
        strided[1] += times * far
        for op in nest.ops:
            counted = COSTS[op.name][0]
            cycles[counted if counted != WORK else "vector" if op.registers else "scalar"] += op.cycles
    return tuple(round(each) for each in (*levels, *strided, *cycles.values(), len(nests)))


def region_dims(region: Region) -> list[tuple[int, ...]]:
    """Dims of the ops ``fused_loops`` that the calls of a region's compiled functions are, in order."""
    nests = {  # without those that only set up a few variables
        name: [each for each in nests_of(text) if each.touches or sum(op.work for op in each.ops) > 64]
        for name, text in region.code.items()
    }
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
        for name in dict.fromkeys(buffer for each in inside for buffer in each.buffers):
            passed += region.buffers.get(name, 0)
            touched[name] = passed
    return [found[number] for number in range(len(region.launches))]
