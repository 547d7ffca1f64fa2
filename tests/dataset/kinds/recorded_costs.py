"""Every op kind and collective kind, on record: ``python -m tests.dataset.kinds.recorded_costs`` records them anew.

Closed forms of the kinds that a model spends its time in are in ``test_closed_forms``; this record guards the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, OP_KINDS, Op

RECORD = Path(__file__).with_name("recorded_costs.json")
PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
# Arguments of calls: of a convolution of an image (also with a stride, and transposed), attention, tables, lists.
CALLS: tuple[tuple[list[Any], list[str]], ...] = (
    ([[2, 6, 9, 11], [10, 3, 2, 5], [10], [2], [2], [2]], ["", "", "", "[2, 3]", "[0, 0]", "[1, 1]", "False", "", "1"]),
    ([[2, 6, 9, 11], [6, 5, 2, 3], [10]], ["", "", "", "[2]", "[0, 0]", "[1, 1]", "True", "", "1"]),
    ([[2, 10, 4, 5], [2, 6, 9, 11], [10, 3, 3, 3]], ["", "", "", "", "", "", "", "", "", "", "[False, True, True]"]),
    ([[2, 4, 7, 16], [2, 8, 7, 32], [2, 2, 11, 32], [2, 2, 11, 32]], [*[""] * 4, "True", "False", "True", *["1"] * 8]),
    ([[12, 16], [20, 3], [5], [7, 16], [16], [16]], ["5", "6", "7", "8", "9", "10", "11"]),
    ([[5, 3, 7], [24, 7], [24, 6], [24]], ["0.5", "0.", "False"]),
    ([[3, 4, 8], [[5, 2], [7]], [], [8]], []),
    ([[9], [6, 5, 8], [8], [3], [5], [40]], []),
    ([[[3, 4], [5]], [2, 2]], []),
    ([], []),
)


def costs(kind: str) -> list[Any]:
    """All that a record has: costs of ops whose dims are different primes or 1, each flag 0 and 1; properties; calls.

    Costs are FLOP, bytes, units, operands, grid and base dims.  Calls are listed by what they say of ``CALLS``.
    """
    if kind in COLLECTIVE_KINDS:
        return list(json.loads(json.dumps(list(vars(COLLECTIVE_KINDS[kind]).values()))))
    record, found = OP_KINDS[kind], []
    sizes = [dict(zip(record.dim_names, each, strict=False)) for each in (PRIMES, PRIMES, (1,) * len(PRIMES))]
    for flag, by_name in enumerate(sizes):
        dims = tuple(flag % 2 if name in record.flags else size for name, size in by_name.items())
        op = Op(kind, dims, "bf16")
        more = [function and function(*dims) for function in (record.units, record.operands, record.grid)]
        found.append([op.flops, op.num_bytes, *more, record.base_dims(*dims)])
    properties = [value for value in vars(record).values() if not callable(value) and value is not record.calls]
    calls: dict[str, str] = {}
    for name, dims_of in record.calls.items():
        said = json.dumps([dims_of({"Input Dims": shapes, "Concrete Inputs": words}) for shapes, words in CALLS])
        calls[said] = f"{calls.get(said, '')} {name}".strip()
    return list(json.loads(json.dumps([*found, properties, calls])))


if __name__ == "__main__":
    kinds = (*sorted(OP_KINDS), *sorted(COLLECTIVE_KINDS))
    RECORD.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(costs(k))}" for k in kinds) + "\n}\n", "utf-8")
