"""Compare what `plan-profile` measures first with random and grid choice: error against minutes of measuring.

    stepsight experiment selection --data DATA [--only l40s-pcie-48gb] [--pool 400] [--seeds 2] [--json]

For each device of the public tables its predictor is left out. A pool of its bf16 products stands for the full profile;
3,000 other products judge. The products of the pool are measured in three orders: that of `plan-profile`, a random one,
and that of grids over the sizes, each finer than the one before. The table shows the error after a part of the pool,
and how much of the pool each order needs to come within 2 % of the error of the full profile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.errors import StepsightError
from stepsight.dataset.op import Op
from stepsight.experiments.reports.text_table import Number, table
from stepsight.experiments.studies.transfer_accuracy import CASES, JUDGED, Case, products
from stepsight.training.predictor.predictor import shipped_names, teacher_of
from stepsight.training.shipped.from_tables import OpRows
from stepsight.training.transfer.fit_transfer import fit_ops
from stepsight.training.transfer.own_table import OwnTable
from stepsight.training.transfer.posterior import choose_rows
from stepsight.training.transfer.profile_plan import LAUNCH_S, OP_S
from stepsight.training.transfer.transferred import Transfer

Ints = NDArray[np.int64]
PARTS = (0.05, 0.1, 0.2, 0.3, 0.5)
AS_GOOD = 1.02  # times the error of the full profile
FULL = "full profile"


@dataclass(frozen=True, slots=True)
class Point:
    """Mean error after some products of the pool were measured.

    Attributes:
        device: Preset of the device.
        order: Who chose.
        part: Of the pool.
        minutes: Of measuring, as plans count them.
        error: Mean absolute error on other products, percent; mean over seeds.
        spread: Standard error over seeds.
    """

    device: str
    order: str
    part: float
    minutes: float
    error: float
    spread: float


def chosen_order(transfer: Transfer, ops: Sequence[Op], seed: int) -> Ints:
    """The order of `plan-profile`: the most informative first."""
    return np.array(choose_rows(transfer.rows_of(ops)[1], len(ops)), dtype=np.int64)


def random_order(transfer: Transfer, ops: Sequence[Op], seed: int) -> Ints:
    """A shuffle."""
    return np.random.default_rng(seed + 1000).permutation(len(ops))


def grid_order(transfer: Transfer, ops: Sequence[Op], seed: int) -> Ints:
    """One product in each cell of a grid over the logarithms of the sizes, then of grids of twice as many steps."""
    logs = np.log([op.dims for op in ops])
    unit = (logs - logs.min(axis=0)) / np.maximum(np.ptp(logs, axis=0), 1e-9)
    left, found, steps = list(range(len(ops))), [], 2
    while left:
        cells = np.minimum((unit[left] * steps).astype(np.int64), steps - 1)
        centre = np.abs(unit[left] * steps - cells - 0.5).sum(axis=1)
        best: dict[tuple[int, ...], int] = {}
        for place in np.argsort(centre, kind="stable").tolist():
            best.setdefault(tuple(cells[place].tolist()), place)
        taken = set(best.values())
        found += [left[place] for place in sorted(taken)]
        left = [each for place, each in enumerate(left) if place not in taken]
        steps *= 2
    return np.array(found, dtype=np.int64)


ORDERS: dict[str, Callable[[Transfer, Sequence[Op], int], Ints]] = {
    "plan-profile": chosen_order,
    "random": random_order,
    "grid": grid_order,
}


def curves(case: Case, rows: OwnTable, pool: int, seeds: int, parts: Sequence[float] = PARTS) -> list[Point]:
    """Errors by order and part of the pool."""
    teachers = [teacher_of(name) for name in shipped_names() if name not in case.without]
    nothing = np.array([], dtype=np.int64)
    found: dict[tuple[str, float], list[float]] = {}
    for seed in range(seeds):
        drawn = np.random.default_rng(seed).permutation(len(rows.ops))
        few, left = rows.take(drawn[:pool], nothing), rows.take(drawn[pool:][:JUDGED], nothing).ops
        transfer = Transfer(rows.hardware, tuple(teachers))
        orders = {name: order(transfer, few.ops.ops, seed) for name, order in ORDERS.items()}
        asked = [(name, part, orders[name][: max(round(part * len(few.ops)), 5)]) for name in orders for part in parts]
        for name, part, index in [*asked, (FULL, 1.0, np.arange(len(few.ops)))]:
            kernel = fit_ops(few.take(index, nothing), teachers, "", seed=seed, say=lambda text: None)
            found.setdefault((name, part), []).append(_error(kernel.seconds(left.ops, 1), left))
            print(f"{case.device} seed {seed}: {name}, {100 * part:.0f} % of the pool", file=sys.stderr, flush=True)
    count = min(pool, len(rows.ops))
    return [
        Point(
            case.device, name, part, (LAUNCH_S + OP_S * round(part * count)) / 60, float(np.mean(errors)),
            float(np.std(errors, ddof=1) / np.sqrt(len(errors))) if len(errors) > 1 else 0.0,
        ) for (name, part), errors in found.items()
    ]  # fmt: skip


def _error(predicted: NDArray[np.float64], rows: OpRows) -> float:
    return 100 * float(np.abs(predicted / rows.seconds - 1).mean())


def needed(points: Sequence[Point]) -> dict[str, dict[str, float | None]]:
    """By device and order: the least part of the pool that is as good as all of it; None: none that was tried."""
    found: dict[str, dict[str, float | None]] = {}
    for device in dict.fromkeys(point.device for point in points):
        own = [point for point in points if point.device == device]
        full = next(point.error for point in own if point.order == FULL)
        found[device] = {
            name: min((p.part for p in own if p.order == name and p.error <= AS_GOOD * full), default=None)
            for name in ORDERS
        }
    return found


def selection_text(points: Sequence[Point]) -> str:
    """For the terminal."""
    enough = needed(points)
    parts = sorted({point.part for point in points if point.order != FULL})
    header = ["device", "measured first by", *(f"{100 * part:.0f} % of the pool" for part in parts), "all", "enough"]
    lines = []
    for device, by_order in enough.items():
        errors = {(p.order, p.part): p.error for p in points if p.device == device}
        for name, part in by_order.items():
            cells = [Number(errors[name, each], 2) for each in parts]
            told = "more" if part is None else f"{100 * part:.0f} %"
            lines.append([device, name, *cells, Number(errors[FULL, 1.0], 2), told])
    return table(header, lines) + "\nmean error % on other products; enough: part within 2 % of the error of all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="stepsight experiment selection", description=__doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the public tables")
    parser.add_argument("--only", choices=sorted({case.device for case in CASES}), action="append", help="a device")
    parser.add_argument("--pool", type=int, default=400, help="products of the full profile")
    parser.add_argument("--seeds", type=int, default=2, help="draws of the pool")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    try:
        if options.pool < 50 or options.seeds < 1:
            raise StepsightError(f"--pool must be >= 50 and --seeds >= 1, got {options.pool} and {options.seeds}")
        points: list[Point] = []
        for case in CASES:
            if not case.twin and (not options.only or case.device in options.only):
                points += curves(case, products(case, options.data), options.pool, options.seeds)
        if not points:
            raise StepsightError("--only must name a device without a twin: its curve is that of the transfer study")
    except StepsightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures = {"points": [asdict(point) for point in points], "enough": needed(points)}
    print(json.dumps(figures) if options.json else selection_text(points))
    return 0


if __name__ == "__main__":
    sys.exit(main())
