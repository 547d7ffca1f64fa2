"""Counts of what a compiled function does, from the C++ that Inductor wrote: operations, and accesses of memory.

The code is loops with constant bounds, one statement a line, and braces around every body.  So each statement's number
of executions, and the addresses that it touches, follow from the text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

_CAST = re.compile(r"static_cast<int64_t>\(([^()]*)\)")
_FOR = re.compile(
    r"for\s*\(\s*(?:int64_t|int|long) (\w+)\s*=\s*(-?\d+)L?; \w+\s*<\s*(-?\d+)L?; \w+(?:\+\+|\s*\+=\s*(\d+)L?)\s*\)"
)
_PART = re.compile(r"C10_(?:UN)?LIKELY\((\w+) >= (-?\d+)L? && \w+ < (-?\d+)L?\)")
_POINTER = re.compile(r"\b([A-Za-z][\w:]*)\*(?: __restrict__)? (\w*ptr\d+)")
_ALIAS = re.compile(r"auto (\w+) = (in_out_ptr\d+|out_ptr\d+|in_ptr\d+);")
_VECTOR_ACCESS = re.compile(r"(?:::loadu\(|::from\(|\.store\()(\w*ptr\d+|local_\w+) \+ (.*)$")
_SCALAR_ACCESS = re.compile(r"\b(\w*ptr\d+|local_\w+)\[")
_TARGET = re.compile(r"^(?:auto |float |int64_t |bool )?(\w+)(?:\[[^=]*\])? = ")
_NAME = re.compile(r"\btmp\w*")
_WIDE = re.compile(r"VectorizedN<\w[\w:]*,(\d+)>|convert<[\w:]+,(\d+)")
_SLOW = re.compile(
    r"(?:\.|std::|calc_|normalized_|= )(rand_cpu|randn_cpu|randint64_cpu|exp_u20|exp2|exp|log1p|log2|"
    r"log10|log|expm1|tanh|erfc|erf|sin|cos|tan|asin|acos|atan|pow|"
    r"sqrt|rsqrt|reciprocal|sigmoid|lgamma|fmod|round|floor|ceil|trunc)\("
)
_SEVERAL = ("vec_reduce_all", "welford", "transpose_mxn", "cascade")  # calls of many operations
_WORD = re.compile(r"\b\w+\b")
SIZES = {
    "float": 4, "double": 8, "int64_t": 8, "int32_t": 4, "int16_t": 2, "int8_t": 1, "uint8_t": 1, "bool": 1,
    "at::BFloat16": 2, "at::Half": 2, "bfloat16": 2, "half": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Touch:
    """An access of memory in a loop nest.

    Attributes:
        pointer: Name in the code.
        writes: Whether it stores.
        form: ``vector``, ``scalar`` or ``indirect`` (the address depends on values or is not linear).
        times: How often it runs, where the innermost loop moves it.
        num_bytes: Of one access.
        stride: Bytes between two steps of the innermost loop that moves it.
        distinct: Bytes of all different addresses.
        masks: Whether it moves truth values, which vectors hold in another form.
    """

    pointer: str
    writes: bool
    form: str
    times: float
    num_bytes: int
    stride: int
    distinct: float
    masks: bool = False


@dataclass(frozen=True, slots=True)
class Nest:
    """One loop nest of a function.

    Attributes:
        operations: By name (``vector``, ``scalar``, ``vector_exp`` …), how often they run.
        touches: Accesses of memory.
    """

    operations: Mapping[str, float]
    touches: tuple[Touch, ...]


@dataclass
class _Scope:
    """A pair of braces: how often its body runs, its loop, and what is known of variables.

    Of each variable: registers (0: a scalar), and how many loops it depends on.
    """

    times: float
    loop: str = ""
    start: int = 0
    step: int = 1
    trips: float = 1.0
    known: dict[str, tuple[int, int]] = field(default_factory=dict)


def nests_of(source: str) -> list[Nest]:
    """Loop nests of a function in order."""
    return _Reader(source).nests


class _Reader:
    """Reads one function."""

    def __init__(self, source: str) -> None:
        self.nests: list[Nest] = []
        kinds = {name: kind for kind, name in _POINTER.findall(source)}
        self._sizes = {name: SIZES.get(kind, 4) for name, kind in kinds.items()}
        self._masks = {name for name, kind in kinds.items() if kind == "bool"}
        self._alias = dict(_ALIAS.findall(source))
        self._scopes = [_Scope(1.0)]
        self._pending: _Scope | None = None
        self._counts: dict[str, float] = defaultdict(float)
        self._touches: list[Touch] = []
        self._lambdas: list[tuple[str, int]] = []  # names that are being computed, and their registers
        for line in _lines(source):
            self._line(line)

    def _line(self, line: str) -> None:
        if line == "{":
            outer = self._scopes[-1]
            self._scopes.append(self._pending or _Scope(outer.times, known=dict(outer.known)))
            self._pending = None
        elif line.startswith("}"):
            self._close()
        elif line.startswith("()") and self._lambdas:
            name, width = self._lambdas.pop()
            self._scopes[-1].known[name] = width, sum(bool(each.loop) for each in self._scopes)
        elif line.endswith(" =") and (found := _NAME.search(line)):
            self._lambdas.append((found[0], 0))
        elif line.startswith("return") and self._lambdas:
            self._returns(line)
        elif found := _FOR.match(line):
            self._pending = self._loop(found)
        elif line.startswith(("if", "else")):
            self._pending = self._branch(line)
        elif not line.startswith(("#", "//", "return", "[&]", "TORCH_CHECK", "std::atomic", "inductor_cpu", "extern")):
            self._statement(line)

    def _returns(self, line: str) -> None:
        """Whether the value of a lambda is a vector: of a buffer of several numbers, or of vectors."""
        width, _ = self._variable(line, "", [])
        self._lambdas[-1] = self._lambdas[-1][0], max(width, int("tmpbuf" in line))

    def _close(self) -> None:
        if len(self._scopes) < 2:
            return
        gone = self._scopes.pop()
        if gone.loop and not any(scope.loop for scope in self._scopes) and (self._counts or self._touches):
            self.nests.append(Nest(dict(self._counts), tuple(self._touches)))
            self._counts, self._touches = defaultdict(float), []

    def _loop(self, found: re.Match[str]) -> _Scope:
        name, low, high, step = found[1], int(found[2]), int(found[3]), int(found[4] or 1)
        trips = max(0.0, -(-(high - low) // step))
        outer = self._scopes[-1]
        return _Scope(outer.times * trips, name, low, step, trips, dict(outer.known))

    def _branch(self, line: str) -> _Scope:
        outer = self._scopes[-1]
        times = outer.times
        if part := _PART.search(line):
            loop = next((scope for scope in reversed(self._scopes) if scope.loop == part[1]), None)
            if loop is not None and loop.trips:
                inside = len(range(loop.start, int(part[3]), loop.step)) - len(
                    range(loop.start, int(part[2]), loop.step)
                )
                times *= min(max(inside, 0), loop.trips) / loop.trips
        return _Scope(times, known=dict(outer.known))

    def _statement(self, line: str) -> None:
        scope = self._scopes[-1]
        loops = [each for each in self._scopes if each.loop]
        if not loops or not scope.times:
            return
        target = _TARGET.match(line)
        width, depth = self._variable(line, target[1] if target else "", loops)
        if target:
            scope.known[target[1]] = width, depth
        touches = list(self._accesses(line, loops, scope.times))
        self._touches += touches
        if self._is_constant(line):
            return
        times = scope.times * max(width, 1)
        for loop in loops[depth:]:  # the compiler takes it out of loops that do not change it
            times /= max(loop.trips, 1.0)
        kind = "vector" if width else "scalar"
        for slow in _SLOW.findall(line):
            self._counts[f"{kind}_{slow}"] += times
        if " / " in line:
            self._counts[f"{kind}_divide"] += times
        name = next((each for each in _SEVERAL if each in line), kind)
        self._counts[name] += times

    def _variable(self, line: str, target: str, loops: list[_Scope]) -> tuple[int, int]:
        """Registers of what a statement computes (0: a scalar), and how many loops it depends on."""
        known = [self._scopes[-1].known.get(name, (0, 0)) for name in _NAME.findall(line)]
        names = [each.loop for each in loops]
        depths = [names.index(word) + 1 for word in _WORD.findall(line) if word in names]
        depth = max([*depths, *(each[1] for each in known), 0])
        if target.startswith("tmp_acc") or not target or "ptr" in target or target.startswith("tmpbuf"):
            depth = len(loops)
        if wide := _WIDE.search(line):
            return int(wide[1] or wide[2]), depth
        widths = [each[0] for each in known]
        if "vec_reduce_all" in line:
            return 0, depth
        if "at::vec::" in line or "decltype(" in line or target.endswith("_vec"):
            return max([1, *widths]), depth
        return max(widths, default=0), depth

    @staticmethod
    def _is_constant(line: str) -> bool:
        _, _, right = line.partition(" = ")
        return bool(right) and not _NAME.search(right) and "ptr" not in right

    def _accesses(self, line: str, loops: list[_Scope], times: float) -> Iterator[Touch]:
        if found := _VECTOR_ACCESS.search(line):
            index, lanes = _split_last(found[2])
            name = str(self._alias.get(found[1], found[1]))
            size = self._sizes.get(name, 4)
            writes, masks = ".store(" in line, name in self._masks
            touch = _touch(name, writes, "vector", (index, size, lanes or 16), (loops, times))
            yield replace(touch, masks=masks)
            return
        stores = line.find(" = ")
        for found in _SCALAR_ACCESS.finditer(line):
            name = str(self._alias.get(found[1], found[1]))
            index = _bracketed(line, found.end())
            writes = found.start() < stores and not line.startswith("auto ") and "tmpbuf[" not in line[:stores]
            yield _touch(name, writes, "scalar", (index, self._sizes.get(name, 4), 1), (loops, times))


def _touch(name: str, writes: bool, form: str, where: tuple[str, int, int], runs: tuple[list[_Scope], float]) -> Touch:
    """An access of the elements from an index on (index, bytes of one, number), in loops, so often."""
    (index, size, lanes), (loops, times) = where, runs
    coefficients = _linear(index, [each.loop for each in loops])
    if coefficients is None:
        return Touch(name, writes, "indirect", times, size * lanes, 0, times * size * lanes)
    distinct, stride, moved = float(lanes), 0, False
    for loop in reversed(loops):
        coefficient = coefficients.get(loop.loop, 0)
        if coefficient:
            if not moved:
                stride, moved = abs(coefficient) * loop.step * size, True
            distinct *= loop.trips
        elif not moved:
            times /= max(loop.trips, 1.0)  # the compiler takes it out of the loop
    return Touch(name, writes, form, times, size * lanes, stride, distinct * size)


def _linear(index: str, loops: list[str]) -> dict[str, int] | None:
    """Coefficients of the loops' variables; None where the index is not linear in them."""
    found: dict[str, int] = {}
    for term in index.replace(" - ", " + -").split(" + "):
        term = term.strip().strip("()")
        if re.fullmatch(r"-?\d+L?", term):
            continue
        match = re.fullmatch(r"(-?\d+)L\*(\w+)|(-?\w+)", term)
        if match is None:
            return None
        name, factor = match[2] or match[3].lstrip("-"), int(match[1] or 1)
        if name not in loops:
            return None
        found[name] = found.get(name, 0) + factor
    return found


def _lines(source: str) -> Iterator[str]:
    for raw in source.split("\n"):
        line = raw.strip()
        while (made := _CAST.sub(r"\1", line)) != line:
            line = made
        if line:
            yield line


def _split_last(text: str) -> tuple[str, int]:
    """The index of a vector access, and how many elements it takes (0: not said)."""
    depth = 0
    for place, sign in enumerate(text):
        if sign in "([":
            depth += 1
        elif sign in ")]":
            depth -= 1
            if depth < 0:
                return text[:place], 0
        elif sign == "," and not depth:
            number = re.match(r"\s*(\d+)", text[place + 1 :])
            return text[:place], int(number[1]) if number else 0
    return text, 0


def _bracketed(line: str, start: int) -> str:
    depth = 1
    for place in range(start, len(line)):
        depth += (line[place] == "[") - (line[place] == "]")
        if not depth:
            return line[start:place]
    return line[start:]
