"""Accesses of memory in the statements of a compiled function: what they touch, with what strides, and how often."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from .body_ops import FLOAT, named_kind

_POINTER = re.compile(r"\b([A-Za-z][\w:]*)\*(?: __restrict__)? (\w*ptr\d+)")
_ALIAS = re.compile(r"auto (\w+) = (in_out_ptr\d+|out_ptr\d+|in_ptr\d+);")
_VECTOR_ACCESS = re.compile(r"(?:::loadu\(|loadu<[^>]*>\(|::from\(|\.store\()(\w*ptr\d+|local_\w+) \+ (.*)$")
SCALAR_ACCESS = re.compile(r"\b(\w*ptr\d+|local_\w+)\[")
_TRANSPOSE = re.compile(r"transpose_mxn<[\w:]+,(\d+),(\d+),\w+>\(")
WIDE = re.compile(r"Vec(?:torizedN|Mask)<\w[\w:]*,(\d+)>|convert<[\w:]+,(\d+)")
LINE = 64  # bytes of a cache line, and of a vector
SIZES = {
    "float": 4, "double": 8, "int64_t": 8, "int32_t": 4, "int16_t": 2, "int8_t": 1, "uint8_t": 1, "bool": 1,
    "at::BFloat16": 2, "at::Half": 2, "bfloat16": 2, "half": 2,
}  # fmt: skip


class Loop(Protocol):
    """A loop around a statement: its variable, step and number of rounds."""

    loop: str
    step: int
    trips: float


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
        part: Whether it moves a part of a vector.
    """

    pointer: str
    writes: bool
    form: str
    times: float
    num_bytes: int
    stride: int
    distinct: float
    masks: bool = False
    part: bool = False


class Accesses:
    """Finds the accesses of a function's statements.

    Args:
        source: Of the function.
    """

    def __init__(self, source: str) -> None:
        kinds = {name: kind for kind, name in _POINTER.findall(source)}
        self.sizes = {name: SIZES.get(kind, 4) for name, kind in kinds.items()}
        self.masks = {name for name, kind in kinds.items() if kind == "bool"}
        self._kinds = {name: named_kind(kind) for name, kind in kinds.items()}
        self._alias: dict[str, str] = dict(_ALIAS.findall(source))

    def name_of(self, pointer: str) -> str:
        """A pointer's name in the arguments of the function."""
        return self._alias.get(pointer, pointer)

    def kind_of(self, pointer: str) -> str:
        """Type of the numbers behind a pointer."""
        return self._kinds.get(self.name_of(pointer), FLOAT)

    def of(self, line: str, loops: Sequence[Loop], times: float) -> Iterator[Touch]:
        """Accesses of a statement in loops that runs so often."""
        if found := _TRANSPOSE.search(line):
            yield from self._transposed(line, found, (loops, times))
            return
        if found := _VECTOR_ACCESS.search(line):
            index, lanes = _split_last(found[2])
            name = self.name_of(found[1])
            size = self.sizes.get(name, 4)
            whole = _whole(line, size)
            writes, masks = ".store(" in line, name in self.masks
            touch = _touch(name, writes, "vector", (index, size, lanes or whole), (loops, times))
            yield replace(touch, masks=masks, part="loadu<" in found[0] or bool(lanes and lanes % (LINE // size)))
            return
        stores = line.find(" = ") if " += " not in line else line.find(" += ")
        for found in SCALAR_ACCESS.finditer(line):
            name = self.name_of(found[1])
            index = _bracketed(line, found.end())
            writes = found.start() < stores and not line.startswith("auto ") and "tmpbuf[" not in line[:stores]
            yield _touch(name, writes, "scalar", (index, self.sizes.get(name, 4), 1), (loops, times))

    def _transposed(self, line: str, found: re.Match[str], runs: tuple[Sequence[Loop], float]) -> Iterator[Touch]:
        """The block that a transposition reads or writes, row by row."""
        rows, columns = int(found[1]), int(found[2])
        parts = _arguments(line[found.end() :])
        for place in (0, 2):
            name, _, index = parts[place].partition(" + ")
            name = self.name_of(name)
            if name in self.sizes:
                size, apart = self.sizes[name], parts[place + 1].rstrip("L);")
                touch = _touch(name, place > 0, "vector", (index, size, rows * columns), runs)
                stride = int(apart) * size if apart.isdigit() else 0
                yield replace(touch, times=touch.times * rows, num_bytes=columns * size, stride=stride)


def _whole(line: str, size: int) -> int:
    """Elements of a vector access that does not say how many."""
    wide = WIDE.search(line)
    return LINE // size * (int(wide[1] or wide[2]) if wide else 1)


def _arguments(text: str) -> list[str]:
    """Arguments of a call, from the text behind its parenthesis."""
    found, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([") - (sign in ")]")
        if depth < 0 or (sign == "," and not depth):
            found.append(text[start:place].strip())
            start = place + 1
            if depth < 0:
                break
    return found + [""] * (4 - len(found))


def _touch(
    name: str, writes: bool, form: str, where: tuple[str, int, int], runs: tuple[Sequence[Loop], float]
) -> Touch:
    """An access of the elements from an index on (index, bytes of one, number), in loops, so often."""
    (index, size, lanes), (loops, times) = where, runs
    coefficients = _linear(index, [each.loop for each in loops])
    if coefficients is None:
        form = "indirect" if "tmp" in index else form
        return Touch(name, writes, form, times, size * lanes, 0, times * size * lanes)
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
