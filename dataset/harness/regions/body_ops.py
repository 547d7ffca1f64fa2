"""What one statement of a loop's body does: its operation, and how often a condition on loop variables holds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

FUNCTIONS = (
    "exp_u20", "exp", "log", "log1p", "expm1", "tanh", "erf", "sin", "cos", "pow", "sqrt", "rsqrt", "reciprocal",
    "divide", "rand_cpu", "round", "other",
)  # fmt: skip
MOVES = (
    "load",
    "store",
    "part_load",
    "part_store",
    "mask_load",
    "mask_store",
    "many_mask_load",
    "many_mask_store",
    "gather",
    "scatter",
    "copy",
)
PLAIN = (
    "arithmetic", "integer", "compare", "logic", "select", "broadcast", "range", "widen", "narrow", "convert", "cast",
    "mod", "carried",
)  # fmt: skip
CALLS = (
    "reduce",
    "welford",
    "welford_end",
    "cascade",
    "cascade_end",
    "masked_reduce",
    "transpose",
    "argmax",
    "argmax_end",
)
OPS = (*MOVES, *PLAIN, *CALLS, *FUNCTIONS)
FLOAT, HALF, WHOLE, TRUTH = "float", "half", "int64", "bool"
_FUNCTION = re.compile(
    r"(?:\.|std::|calc_|normalized_|= |\()(rand_cpu|randn_cpu|randint64_cpu|exp_u20|exp2|exp|log1p|log2|"
    r"log10|log|expm1|tanh|erfc|erf|sin|cos|tan|asin|acos|atan|pow|"
    r"sqrt|rsqrt|reciprocal|sigmoid|lgamma|fmod|round|floor|ceil|trunc)\("
)
_NAMED = {
    "exp2": "exp", "log2": "log", "log10": "log", "erfc": "erf", "randn_cpu": "rand_cpu", "randint64_cpu": "rand_cpu",
    "floor": "round", "ceil": "round", "trunc": "round",
}  # fmt: skip
_DIVIDES = re.compile(r" / |\)/\(")
_CONVERT = re.compile(r"convert<([\w:]+?)(?:,\d+,[\w:]+,\d+)?>|\.to<(\w+),")
_KINDS = (("BFloat16", HALF), ("Half", HALF), ("int", WHOLE), ("bool", TRUTH), ("Mask", TRUTH), ("float", FLOAT))
_COMPARES = re.compile(r" (?:==|!=|<=|>=|<|>) ")
_INDEX = re.compile(r"(?:(-?\d+)L? \+ )?(x\d+)(?: \+ (-?\d+)L?)?(?: % (\d+)L?)?")
_NUMBER = re.compile(r"-?\d+L?")
_CHECK = re.compile(r"(tmp\d+) (==|!=|<=|>=|<|>) (tmp\d+|-?\d+L?)")


CYCLES = {  # of one on a vector and on a number, about as a core with vectors of 64 bytes takes
    "load": (0.5, 0.5), "store": (1.0, 1.0), "part_load": (4.0, 2.0), "part_store": (8.0, 4.0),
    "mask_load": (40.0, 1.0), "mask_store": (150.0, 1.0), "many_mask_load": (160.0, 2.0),
    "many_mask_store": (400.0, 2.0), "gather": (2.0, 1.5), "scatter": (2.0, 2.0), "copy": (2.0, 1.0),
    "arithmetic": (0.5, 0.6), "integer": (0.6, 0.3), "compare": (0.6, 0.5), "logic": (0.5, 0.3), "select": (0.6, 1.0),
    "broadcast": (0.3, 0.3), "range": (2.0, 1.0), "widen": (1.0, 0.5), "narrow": (5.0, 4.0), "convert": (3.0, 1.5),
    "cast": (2.0, 1.0), "mod": (10.0, 2.0), "carried": (2.0, 4.0), "reduce": (12.0, 12.0), "welford": (25.0, 15.0),
    "welford_end": (50.0, 30.0), "cascade": (2.0, 4.0), "cascade_end": (20.0, 10.0), "masked_reduce": (6.0, 6.0),
    "transpose": (4.0, 4.0), "argmax": (4.0, 4.0), "argmax_end": (300.0, 300.0), "exp_u20": (8.0, 8.0),
    "exp": (14.0, 10.0), "log": (50.0, 20.0), "log1p": (70.0, 30.0), "expm1": (50.0, 30.0), "tanh": (80.0, 40.0),
    "erf": (40.0, 30.0), "sin": (30.0, 15.0), "cos": (30.0, 15.0), "pow": (100.0, 40.0), "sqrt": (8.0, 5.0),
    "rsqrt": (12.0, 8.0), "reciprocal": (6.0, 4.0), "divide": (4.0, 3.0), "rand_cpu": (70.0, 30.0),
    "round": (1.0, 1.0), "other": (20.0, 20.0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BodyOp:
    """An operation of a loop's body.

    Attributes:
        name: One of ``OPS``.
        registers: Vectors that it works on; 0: a number.
        kind: Type of its numbers.
        times: How often it runs, where the innermost loop that changes it runs it.
        inputs: Places of the operations whose results it takes.
        carried: Whether it takes its own result of the iteration before.
        touch: Place of its access of memory; -1: none.
    """

    name: str
    registers: int
    kind: str
    times: float
    inputs: tuple[int, ...] = ()
    carried: bool = False
    touch: int = -1

    @property
    def term(self) -> str:
        """The name that its work is counted by."""
        return f"{'vector' if self.registers else 'scalar'}_{self.name}"

    @property
    def work(self) -> float:
        """Registers (or numbers) times runs."""
        return self.times * max(self.registers, 1)


def kind_of(right: str, kinds: tuple[str, ...]) -> str:
    """Type of the numbers that a statement makes.

    Args:
        right: The statement.
        kinds: Types of what it takes.
    """
    if _COMPARES.search(right) and "?" not in right:
        return TRUTH
    if found := _CONVERT.search(right):
        return named_kind(found[1] or found[2])
    if right.startswith(("at::vec::", "float(", "int64_t(", "bool(")):
        return named_kind(right[: right.find("(")])
    return (kinds[-1] if "?" in right else kinds[0]) if kinds else FLOAT


def named_kind(name: str) -> str:
    """Type of numbers by its name in the code."""
    return next((kind for part, kind in _KINDS if part in name), FLOAT)


def functions_in(line: str) -> list[str]:
    """Slow functions that a statement calls."""
    found = [_NAMED.get(each, each) for each in _FUNCTION.findall(line)]
    return [each if each in FUNCTIONS else "other" for each in found]


def name_of(line: str, made: str, taken: tuple[str, ...], *, carried: bool) -> str:
    """Name of what a statement that does not access memory does, slow functions aside; empty: nothing.

    Args:
        line: The statement.
        made: Type of its result.
        taken: Types of what it takes.
        carried: Whether it takes its own result of the iteration before.
    """
    for word, name in (
        ("welford_combine", "welford_end" if "reduce_all" in line else "welford"), ("cascade_sum_final", "cascade_end"),
        ("cascade", "cascade"), ("argm", "argmax_end" if "reduce_all" in line else "argmax"),
        ("vec_reduce_all", "reduce"), ("masked_reduce", "masked_reduce"),
        ("transpose_mxn", "transpose"), ("tmpbuf", "copy"), ("::arange", "range"), ("blendv", "select"),
        ("?", "select"), ("template cast", "cast"),
    ):  # fmt: skip
        if word in line:
            return name
    if _DIVIDES.search(line):
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


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a number that depends on loop variables alone.

    Attributes:
        loop: Variable that it is made of; empty: none.
        offset: That is added, or the number itself.
        modulus: That it is taken by; 0: none.
        share: How often it holds, of a truth value; NaN: not told.
    """

    loop: str = ""
    offset: int = 0
    modulus: int = 0
    share: float = math.nan


def known_of(right: str, known: Mapping[str, Known], ranges: Mapping[str, tuple[int, int]]) -> Known | None:
    """What is known of the right side of an assignment.

    Args:
        right: The text.
        known: Of variables.
        ranges: First and past-the-last value of loop variables.
    """
    right = re.sub(r"^(?:c10::convert<\w+>|static_cast<int64_t>|int64_t)\((.*)\)$", r"\1", right)
    if right in known:
        return known[right]
    if _NUMBER.fullmatch(right):
        return Known(offset=int(right.rstrip("L")))
    if found := _INDEX.fullmatch(re.sub(r"static_cast<int64_t>|[()]", "", right)):
        return Known(found[2], int(found[1] or 0) + int(found[3] or 0), int(found[4] or 0))
    if found := _CHECK.fullmatch(right):
        left, other = known.get(found[1]), known.get(found[3])
        if other is None and _NUMBER.fullmatch(found[3]):
            other = Known(offset=int(found[3].rstrip("L")))
        if left is not None and other is not None and left.loop in ranges and not other.loop:
            return Known(share=_share(left, found[2], other.offset, ranges[left.loop]))
        return None
    if found := re.fullmatch(r"(tmp\d+) (&|\|) (tmp\d+)", right):
        one, two = (known[name].share if name in known else math.nan for name in (found[1], found[3]))
        return Known(share=one * two if found[2] == "&" else 1 - (1 - one) * (1 - two))
    if found := re.fullmatch(r"[!~](tmp\d+)", right):
        return Known(share=1 - known[found[1]].share) if found[1] in known else None
    return None


def _share(value: Known, sign: str, bound: int, within: tuple[int, int]) -> float:
    first, last = within
    if value.modulus:
        low, high = 0, value.modulus
    else:
        low, high = first + value.offset, last + value.offset
    count = max(high - low, 1)
    below = min(max(bound - low, 0), count) / count
    equal = float(low <= bound < high) / count
    shares = {
        "==": equal, "!=": 1 - equal, "<": below, "<=": below + equal, ">=": 1 - below, ">": 1 - below - equal
    }  # fmt: skip
    return shares[sign]
