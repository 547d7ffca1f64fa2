"""Costs of every op kind, on record: ``python -m tests.dataset.kinds.recorded_costs`` records them anew.

Closed forms of the kinds that a model spends its time in are in ``test_closed_forms``; this record guards the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stepsight.dataset.kinds.op import OP_KINDS, Op

RECORD = Path(__file__).with_name("recorded_costs.json")
PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def costs(kind: str) -> list[Any]:
    """FLOP, bytes, units, operands, grid and base dims of one op whose dims are different primes (flags are 1)."""
    record = OP_KINDS[kind]
    dims = tuple(1 if name in record.flags else prime for name, prime in zip(record.dim_names, PRIMES, strict=False))
    op = Op(kind, dims, "bf16")
    more = [function and function(*dims) for function in (record.units, record.operands, record.grid)]
    found = [op.flops, op.num_bytes, *more, record.base, record.base_dims(*dims), record.bound, record.streams]
    return list(json.loads(json.dumps(found)))


if __name__ == "__main__":
    lines = (f"{json.dumps(kind)}: {json.dumps(costs(kind))}" for kind in sorted(OP_KINDS))
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
