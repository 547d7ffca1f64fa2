"""Compare what `plan-profile` measures first with random and grid choice: error against minutes of measuring.

    stepsight experiment selection --data DATA [--only l40s-pcie-48gb] [--pool 400] [--seeds 3] [--plot FILE] [--json]

For each device of the public tables its predictor is left out. A pool of its bf16 products stands for the full profile.
Half of the catalogue's models are the jobs asked about. The forward products of the other half judge: each by the share
of the time that it takes in training, and by the nearest product of the table. With --alike 3,000 products of the table
judge, and all count alike. The pool is measured in four orders: that of `plan-profile`, the same for products that
count alike, a random one, and that of grids over the sizes, each finer than the one before. The table shows the error
after a part of the pool, and how much of the pool each order needs to come within 2 % of the error of the full profile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.models import MODELS
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.reports.plots import FORMATS, plot_error_curves
from stepsight.experiments.reports.text_table import Number, table
from stepsight.experiments.studies.transfer_accuracy import CASES, JUDGED, Case, products
from stepsight.training.predictor.predictor import shipped_names, teacher_of
from stepsight.training.transfer.fit_transfer import fit_ops
from stepsight.training.transfer.own_table import OwnTable
from stepsight.training.transfer.posterior import choose_rows
from stepsight.training.transfer.profile_plan import CANDIDATES, LAUNCH_S, OP_S, catalogue_jobs
from stepsight.training.transfer.transferred import Transfer
from stepsight.training.transfer.wanted_ops import time_shares

Ints = NDArray[np.int64]
PARTS = (0.05, 0.1, 0.2, 0.3, 0.5)
NEAR = float(np.log(1.5))  # largest factor between a job's product and the one of the table that stands for it
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


def chosen_order(transfer: Transfer, ops: Sequence[Op], seed: int, wanted: Mapping[Op, float]) -> Ints:
    """The order of `plan-profile`: what lowers the error of the jobs' time most comes first."""
    if not wanted:
        return alike_order(transfer, ops, seed, wanted)
    targets = sorted(wanted, key=lambda op: (-wanted[op], str(op)))[:CANDIDATES]
    rows, asked = transfer.rows_of(ops)[1], transfer.rows_of(targets)[1]
    weights = np.array([wanted[op] for op in targets])
    return np.array(choose_rows(rows, len(ops), targets=asked, weights=weights)[0], dtype=np.int64)


def alike_order(transfer: Transfer, ops: Sequence[Op], seed: int, wanted: Mapping[Op, float]) -> Ints:
    """The order that lowers the error over all products most."""
    return np.array(choose_rows(transfer.rows_of(ops)[1], len(ops))[0], dtype=np.int64)


def random_order(transfer: Transfer, ops: Sequence[Op], seed: int, wanted: Mapping[Op, float]) -> Ints:
    """A shuffle."""
    return np.random.default_rng(seed + 1000).permutation(len(ops))


def grid_order(transfer: Transfer, ops: Sequence[Op], seed: int, wanted: Mapping[Op, float]) -> Ints:
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


ORDERS: dict[str, Callable[[Transfer, Sequence[Op], int, Mapping[Op, float]], Ints]] = {
    "plan-profile": chosen_order,
    "products alike": alike_order,
    "random": random_order,
    "grid": grid_order,
}


@dataclass(frozen=True)
class Judging:
    """What judges a draw of the pool.

    Attributes:
        rows: Places of products in the device's table.
        weights: How much each counts.
        wanted: Products of the jobs asked about, and their shares of the time; empty: products count alike.
    """

    rows: Ints
    weights: NDArray[np.float64]
    wanted: Mapping[Op, float]


def judged_by_jobs(rows: OwnTable, seed: int) -> Judging:
    """Half of the catalogue's models are asked about, the others judge."""
    names = np.random.default_rng(seed + 2000).permutation(sorted(MODELS)).tolist()
    asked, held = (
        {op: share for op, share in time_shares(list(catalogue_jobs(rows.hardware, part)), rows.hardware).items()
         if op.kind == "linear" and op.dtype == "bf16"}
        for part in (names[::2], names[1::2])
    )  # fmt: skip
    places, weights = np.log([op.dims for op in rows.ops.ops]), np.zeros(len(rows.ops))
    for op, share in held.items():
        off = np.abs(places - np.log(op.dims)).max(axis=1)
        if off.min() <= NEAR:
            weights[int(np.argmin(off))] += share
    found = np.flatnonzero(weights)
    return Judging(found, weights[found], asked)


def curves(
    case: Case, rows: OwnTable, pool: int, seeds: int, parts: Sequence[float] = PARTS, *, alike: bool = False
) -> list[Point]:
    """Errors by order and part of the pool."""
    teachers = [teacher_of(name) for name in shipped_names() if name not in case.without]
    nothing = np.array([], dtype=np.int64)
    found: dict[tuple[str, float], list[float]] = {}
    for seed in range(seeds):
        drawn = np.random.default_rng(seed).permutation(len(rows.ops))
        judging = Judging(drawn[pool:][:JUDGED], np.ones(JUDGED), {}) if alike else judged_by_jobs(rows, seed)
        drawn = drawn[~np.isin(drawn, judging.rows)]
        few, left = rows.take(drawn[:pool], nothing), rows.take(judging.rows, nothing).ops
        transfer = Transfer(rows.hardware, tuple(teachers))
        orders = {name: order(transfer, few.ops.ops, seed, judging.wanted) for name, order in ORDERS.items()}
        asked = [(name, part, orders[name][: max(round(part * len(few.ops)), 5)]) for name in orders for part in parts]
        for name, part, index in [*asked, (FULL, 1.0, np.arange(len(few.ops)))]:
            kernel = fit_ops(few.take(index, nothing), teachers, "", seed=seed, say=lambda text: None)
            off = np.abs(kernel.seconds(left.ops, 1) / left.seconds - 1)
            found.setdefault((name, part), []).append(100 * float(np.average(off, weights=judging.weights[: len(off)])))
            print(f"{case.device} seed {seed}: {name}, {100 * part:.0f} % of the pool", file=sys.stderr, flush=True)
    count = min(pool, len(rows.ops))
    return [
        Point(
            case.device, name, part, (LAUNCH_S + OP_S * round(part * count)) / 60, float(np.mean(errors)),
            float(np.std(errors, ddof=1) / np.sqrt(len(errors))) if len(errors) > 1 else 0.0,
        ) for (name, part), errors in found.items()
    ]  # fmt: skip


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
    parser.add_argument("--seeds", type=int, default=3, help="draws of the pool")
    parser.add_argument("--alike", action="store_true", help="judge by products that count alike, not by jobs")
    parser.add_argument("--plot", type=Path, help="write the curves to this file (.png, .svg or .pdf)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    try:
        if options.plot is not None and options.plot.suffix not in FORMATS:
            raise StepsightError(f"--plot must end in {', '.join(FORMATS)}, got {options.plot}")
        if options.pool < 50 or options.seeds < 1:
            raise StepsightError(f"--pool must be >= 50 and --seeds >= 1, got {options.pool} and {options.seeds}")
        points: list[Point] = []
        for case in CASES:
            if not case.twin and (not options.only or case.device in options.only):
                points += curves(case, products(case, options.data), options.pool, options.seeds, alike=options.alike)
        if not points:
            raise StepsightError("--only must name a device without a twin: its curve is that of the transfer study")
    except StepsightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.plot is not None:
        rows = [(each.device, each.order, each.minutes, each.error) for each in points]
        plot_error_curves(rows, options.plot, "minutes of measuring")
    figures = {"points": [asdict(point) for point in points], "enough": needed(points)}
    print(json.dumps(figures) if options.json else selection_text(points))
    return 0


if __name__ == "__main__":
    sys.exit(main())
