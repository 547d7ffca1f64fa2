"""What a statement of a compiled loop does: its operation, how often a condition holds, and what memory it touches."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

FAR, MOVES, WORK, SLOW = "far", "moves", "work", "slow"  # how dims count an operation
COSTS: Mapping[str, tuple[str, float, float]] = {  # and cycles of one on a vector of 64 bytes, and on a number
    "gather": (FAR, 2.0, 1.5), "scatter": (FAR, 2.0, 2.0),
    "load": (MOVES, 0.5, 0.5), "store": (MOVES, 1.0, 1.0), "part_load": (MOVES, 4.0, 2.0),
    "part_store": (MOVES, 8.0, 4.0), "mask_load": (MOVES, 40.0, 1.0), "mask_store": (MOVES, 150.0, 1.0),
    "many_mask_load": (MOVES, 160.0, 2.0), "many_mask_store": (MOVES, 400.0, 2.0), "copy": (MOVES, 2.0, 1.0),
    "arithmetic": (WORK, 0.5, 0.6), "integer": (WORK, 0.6, 0.3), "compare": (WORK, 0.6, 0.5),
    "logic": (WORK, 0.5, 0.3), "select": (WORK, 0.6, 1.0), "broadcast": (WORK, 0.3, 0.3), "range": (WORK, 2.0, 1.0),
    "widen": (WORK, 1.0, 0.5), "narrow": (WORK, 5.0, 4.0), "convert": (WORK, 3.0, 1.5), "cast": (WORK, 2.0, 1.0),
    "mod": (WORK, 10.0, 2.0), "carried": (WORK, 2.0, 4.0), "reduce": (WORK, 12.0, 12.0),
    "welford": (WORK, 25.0, 15.0), "welford_end": (WORK, 50.0, 30.0), "cascade": (WORK, 2.0, 4.0),
    "cascade_end": (WORK, 20.0, 10.0), "masked_reduce": (WORK, 6.0, 6.0), "transpose": (WORK, 4.0, 4.0),
    "argmax": (WORK, 4.0, 4.0), "argmax_end": (WORK, 300.0, 300.0),
    "exp_u20": (SLOW, 8.0, 8.0), "exp": (SLOW, 14.0, 10.0), "log": (SLOW, 50.0, 20.0), "log1p": (SLOW, 70.0, 30.0),
    "expm1": (SLOW, 50.0, 30.0), "tanh": (SLOW, 80.0, 40.0), "erf": (SLOW, 40.0, 30.0), "sin": (SLOW, 30.0, 15.0),
    "cos": (SLOW, 30.0, 15.0), "pow": (SLOW, 100.0, 40.0), "sqrt": (SLOW, 8.0, 5.0), "rsqrt": (SLOW, 12.0, 8.0),
    "reciprocal": (SLOW, 6.0, 4.0), "divide": (SLOW, 4.0, 3.0), "rand_cpu": (SLOW, 70.0, 30.0),
    "round": (SLOW, 1.0, 1.0), "other": (SLOW, 20.0, 20.0),
}  # fmt: skip
FLOAT, HALF, WHOLE, TRUTH = "float", "half", "int64", "bool"
_FUNCTION = re.compile(
    r"(?:\.|std::|calc_|normalized_|= |\()(rand_cpu|randn_cpu|randint64_cpu|exp_u20|exp2|exp|log1p|log2|"
    r"log10|log|expm1|tanh|erfc|erf|sin|cos|tan|asin|acos|atan|pow|"
    r"sqrt|rsqrt|reciprocal|sigmoid|lgamma|fmod|round|floor|ceil|trunc)\("
)
_COSTS_LIKE = {
    "exp2": "exp", "log2": "log", "log10": "log", "erfc": "erf", "randn_cpu": "rand_cpu", "randint64_cpu": "rand_cpu",
    "floor": "round", "ceil": "round", "trunc": "round",
}  # fmt: skip
_TELLING = (  # words that name an operation; and its name where it ends a reduction
    ("welford_combine", "welford", "welford_end"), ("cascade_sum_final", "cascade_end", ""),
    ("cascade", "cascade", ""), ("argm", "argmax", "argmax_end"), ("vec_reduce_all", "reduce", ""),
    ("masked_reduce", "masked_reduce", ""), ("transpose_mxn", "transpose", ""), ("tmpbuf", "copy", ""),
    ("::arange", "range", ""), ("blendv", "select", ""), ("?", "select", ""), ("template cast", "cast", ""),
)  # fmt: skip
_CONVERT = re.compile(r"convert<([\w:]+?)(?:,\d+,[\w:]+,\d+)?>|\.to<(\w+),")
_KINDS = (("BFloat16", HALF), ("Half", HALF), ("int", WHOLE), ("bool", TRUTH), ("Mask", TRUTH), ("float", FLOAT))
_COMPARES = re.compile(r" (?:==|!=|<=|>=|<|>) ")
_INDEX = re.compile(r"(?:(-?\d+)L? \+ )?(x\d+)(?: \+ (-?\d+)L?)?(?: % (\d+)L?)?")
_NUMBER = re.compile(r"-?\d+L?")
_CHECK = re.compile(r"(tmp\d+) (==|!=|<=|>=|<|>) (tmp\d+|-?\d+L?)")
_POINTER = re.compile(r"\b([A-Za-z][\w:]*)\*(?: __restrict__)? (\w*ptr\d+)")
_ALIAS = re.compile(r"auto (\w+) = (in_out_ptr\d+|out_ptr\d+|in_ptr\d+);")
_VECTOR_ACCESS = re.compile(r"(?:::loadu\(|loadu<[^>]*>\(|::from\(|\.store\()(\w*ptr\d+|local_\w+) \+ (.*)$")
SCALAR_ACCESS = re.compile(r"\b(\w*ptr\d+|local_\w+)\[")
_TRANSPOSE = re.compile(r"transpose_mxn<[\w:]+,(\d+),(\d+),\w+>\(")
_WIDE = re.compile(r"Vec(?:torizedN|Mask)<\w[\w:]*,(\d+)>|convert<[\w:]+,(\d+)")
LINE = 64  # bytes of a cache line, and of a vector
_SIZES = {
    "double": 8, "int64_t": 8, "int16_t": 2, "int8_t": 1, "uint8_t": 1, "bool": 1,
    "at::BFloat16": 2, "at::Half": 2, "bfloat16": 2, "half": 2,
}  # fmt: skip


def kind_of(right: str, kinds: tuple[str, ...]) -> str:
    """Type of the numbers that the right side of a statement makes of others."""
    if _COMPARES.search(right) and "?" not in right:
        return TRUTH
    if found := _CONVERT.search(right):
        return _named_kind(found[1] or found[2])
    if right.startswith(("at::vec::", "float(", "int64_t(", "bool(")):
        return _named_kind(right[: right.find("(")])
    return (kinds[-1] if "?" in right else kinds[0]) if kinds else FLOAT


def _named_kind(name: str) -> str:
    return next((kind for part, kind in _KINDS if part in name), FLOAT)


def vectors_in(line: str) -> int:
    """Vectors of a number of a statement, where its types say it; else 0."""
    wide = _WIDE.search(line)
    return int(wide[1] or wide[2]) if wide else 0


def functions_in(line: str) -> list[str]:
    """Slow functions that a statement calls."""
    found = [_COSTS_LIKE.get(each, each) for each in _FUNCTION.findall(line)]
    return [each if each in COSTS else "other" for each in found]


def name_of(line: str, made: str, taken: tuple[str, ...], *, carried: bool) -> str:
    """Name of what a statement that does not access memory does, slow functions aside; empty: nothing.

    It makes a type of some types; ``carried``: it takes its own result of the iteration before.
    """
    for word, name, ending in _TELLING:
        if word in line:
            return ending if ending and "reduce_all" in line else name
    if " / " in line or ")/(" in line:
        return "divide"
    if "convert<" in line or ".to<" in line:
        if HALF in (made, *taken):
            return "narrow" if made == HALF else "widen"
        return "convert" if made not in taken else ""
    if carried:
        return "carried"
    if _COMPARES.search(line):
        return "compare"
    if " % " in line or "mod(" in line or "div_floor" in line:
        return "mod"
    if re.search(r"Vectorized(?:N<[\w:]+,\d+>|<[\w:]+>)\(\w+\)", line):
        return "broadcast"
    if made == TRUTH or TRUTH in taken or re.search(r" [&|^] |[~!]tmp", line):
        return "logic"
    return "integer" if made == WHOLE else "arithmetic"


class Known(NamedTuple):
    """What is known of a number that depends on loop variables alone."""

    loop: str = ""  # variable that it is made of; empty: none
    offset: int = 0  # that is added, or the number itself
    modulus: int = 0  # that it is taken by; 0: none
    share: float = math.nan  # how often it holds, of a truth value; NaN: not told


def known_of(right: str, known: Mapping[str, Known], ranges: Mapping[str, tuple[int, int]]) -> Known | None:
    """What is known of the right side of an assignment; ``ranges`` are first and past-the-last values of loops."""
    right = re.sub(r"^(?:c10::convert<\w+>|static_cast<int64_t>|int64_t)\((.*)\)$", r"\1", right)
    if right in known:
        return known[right]
    if _NUMBER.fullmatch(right):
        return Known(offset=int(right.rstrip("L")))
    if found := _INDEX.fullmatch(re.sub(r"static_cast<int64_t>|[()]", "", right)):
        return Known(found[2], int(found[1] or 0) + int(found[3] or 0), int(found[4] or 0))
    if found := _CHECK.fullmatch(right):
        left, other = known.get(found[1]), known_of(found[3], known, {})
        if left is not None and other is not None and left.loop in ranges and not other.loop:
            return Known(share=_share(left, found[2], other.offset, ranges[left.loop]))
        return None
    if found := re.fullmatch(r"(tmp\d+) (&|\|) (tmp\d+)", right):
        one, two = (known.get(name, Known()).share for name in (found[1], found[3]))
        return Known(share=one * two if found[2] == "&" else 1 - (1 - one) * (1 - two))
    if found := re.fullmatch(r"[!~](tmp\d+)", right):
        return Known(share=1 - known[found[1]].share) if found[1] in known else None
    return None


def _share(value: Known, sign: str, bound: int, within: tuple[int, int]) -> float:
    """How often a comparison with a number holds while a loop goes through its values."""
    low, high = (0, value.modulus) if value.modulus else (within[0] + value.offset, within[1] + value.offset)
    count = max(high - low, 1)
    below = min(max(bound - low, 0), count) / count
    equal = float(low <= bound < high) / count
    shares = {
        "==": equal, "!=": 1 - equal, "<": below, "<=": below + equal, ">=": 1 - below, ">": 1 - below - equal
    }  # fmt: skip
    return shares[sign]


class Loop(Protocol):
    """A loop around a statement: its variable, step and number of rounds."""

    loop: str
    step: int
    trips: float


class Touch(NamedTuple):
    """An access of memory in a loop nest."""

    pointer: str  # name in the code
    writes: bool  # whether it stores
    form: str  # ``vector``, ``scalar`` or ``indirect`` (the address depends on values or is not linear)
    times: float  # how often it runs, where the innermost loop moves it
    num_bytes: int  # of one access
    stride: int  # bytes between two steps of the innermost loop that moves it
    distinct: float  # bytes of all different addresses
    masks: bool = False  # whether it moves truth values, which vectors hold in another form
    part: bool = False  # whether it moves a part of a vector


class Accesses:
    """Finds the accesses of a function's statements in its source."""

    def __init__(self, source: str) -> None:
        self._types = {name: kind for kind, name in _POINTER.findall(source)}
        self._alias: dict[str, str] = dict(_ALIAS.findall(source))

    def kind_of(self, pointer: str) -> str:
        """Type of the numbers behind a pointer."""
        return _named_kind(self._types.get(self._alias.get(pointer, pointer), ""))

    def of(self, line: str, loops: Sequence[Loop], times: float) -> Iterator[Touch]:
        """Accesses of a statement in loops that runs so often."""
        if found := _TRANSPOSE.search(line):  # the block that it reads and the one that it writes, row by row
            rows, columns = int(found[1]), int(found[2])
            source, from_stride, target, to_stride, *_ = _arguments(line[found.end() :])
            for place, apart, writes in ((source, from_stride, False), (target, to_stride, True)):
                pointer, _, index = place.partition(" + ")
                if self._alias.get(pointer, pointer) in self._types:
                    touch = self._touch(pointer, index, rows * columns, (loops, times), "vector")
                    size, apart = self._size(pointer), apart.rstrip("L);")
                    stride, often = int(apart) * size if apart.isdigit() else 0, touch.times * rows
                    yield touch._replace(writes=writes, times=often, num_bytes=columns * size, stride=stride)
        elif found := _VECTOR_ACCESS.search(line):
            index, number, *_ = _arguments(found[2])
            lanes = re.match(r"\d+", number)
            most = LINE // self._size(found[1])
            count = int(lanes[0]) if lanes else 0
            touch = self._touch(found[1], index, count or most * max(vectors_in(line), 1), (loops, times), "vector")
            part = "loadu<" in found[0] or bool(count % most)
            yield touch._replace(writes=".store(" in line, masks=self._types.get(touch.pointer) == "bool", part=part)
        else:
            stores = line.find(" = ") if " += " not in line else line.find(" += ")
            for found in SCALAR_ACCESS.finditer(line):
                touch = self._touch(found[1], _arguments(line[found.end() :])[0], 1, (loops, times), "scalar")
                writes = found.start() < stores and not line.startswith("auto ") and "tmpbuf[" not in line[:stores]
                yield touch._replace(writes=writes)

    def _size(self, pointer: str) -> int:
        return _SIZES.get(self._types.get(self._alias.get(pointer, pointer), ""), 4)

    def _touch(self, pointer: str, index: str, lanes: int, runs: tuple[Sequence[Loop], float], form: str) -> Touch:
        """An access of so many elements from an index on, in loops, so often."""
        (loops, times), size = runs, self._size(pointer)
        pointer = self._alias.get(pointer, pointer)
        factors = _linear(index, [each.loop for each in loops])
        if factors is None:
            form = "indirect" if "tmp" in index else form
            return Touch(pointer, False, form, times, size * lanes, 0, times * size * lanes)
        distinct, stride, moved = float(lanes), 0, False
        for loop in reversed(loops):
            if factor := factors.get(loop.loop, 0):
                stride = stride if moved else abs(factor) * loop.step * size
                moved, distinct = True, distinct * loop.trips
            elif not moved:
                times /= max(loop.trips, 1.0)  # the compiler takes it out of the loop
        return Touch(pointer, False, form, times, size * lanes, stride, distinct * size)


def _arguments(text: str) -> list[str]:
    """Arguments of a call or an index from the text behind its bracket, and empty ones."""
    found, depth, begin, end = [], 0, 0, len(text)
    for place, sign in enumerate(text):
        depth += (sign in "([") - (sign in ")]")
        if depth < 0:
            end = place
            break
        if sign == "," and not depth:
            found.append(text[begin:place].strip())
            begin = place + 1
    return [*found, text[begin:end].strip(), "", "", ""]


def _linear(index: str, loops: list[str]) -> dict[str, int] | None:
    """Coefficients of the loops' variables; None where the index is not linear in them."""
    found: dict[str, int] = {}
    for term in index.replace(" - ", " + -").split(" + "):
        term = term.strip().strip("()")
        if _NUMBER.fullmatch(term):
            continue
        match = re.fullmatch(r"(-?\d+)L\*(\w+)|(-?\w+)", term)
        name = (match[2] or match[3].lstrip("-")) if match else ""
        if match is None or name not in loops:
            return None
        found[name] = found.get(name, 0) + int(match[1] or 1)
    return found
