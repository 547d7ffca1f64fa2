"""Compare predicted with measured times of kernels, on held-out shapes of public tables.

    stepsight experiment kernels --data DATA [--only a100-sxm] [--json]

A fifth of the shapes is held out in turn, in two ways: shapes at random, and all shapes of some weights (n and k of a
product) or heads (of an attention). A shape is held out for every software that ran it. The table also shows the errors
of a roofline from the preset's facts, of which nothing is fitted. Measurements that a predictor took over from another
device are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import Hardware, find_hardware
from stepsight.dataset.hardware.physics import roofline_seconds
from stepsight.dataset.kinds.op import OP_KINDS, Op
from stepsight.experiments.reports.text_table import Number, table
from stepsight.training.kernels.derived_kinds import dtype_class
from stepsight.training.kernels.kernel_models import fit_kernels, op_rows
from stepsight.training.shipped.catalogue import RECIPES, read_recipe
from stepsight.training.shipped.from_tables import OpRows

FOLDS = 5
LONG_S = 50e-6  # launches and clocks blur shorter times; a training step consists of longer kernels


@dataclass(frozen=True, slots=True)
class Figure:
    """Errors on held-out shapes, in percent.

    Attributes:
        predictor: Whose data.
        ops: Family, with the precision where it has kernels of its own.
        split: ``random``, or what was unseen.
        rows: Held out, of every software.
        mape, median, p90: Of all of them.
        own_mape: Of the software that the predictor predicts for; NaN if none of it was measured.
        long_mape: Of those, only what takes ``LONG_S`` and more; NaN if nothing does.
        roofline_mape: The preset's roofline on all.
    """

    predictor: str
    ops: str
    split: str
    rows: int
    mape: float
    median: float
    p90: float
    own_mape: float
    long_mape: float
    roofline_mape: float


def _shape(op: Op) -> Hashable:
    return op.kind, op.dims


def _weights(op: Op) -> Hashable:
    return op.dims[1:]


def _heads(op: Op) -> Hashable:
    dims = dict(zip(OP_KINDS[op.kind].dim_names, op.dims, strict=True))
    return dims["heads"], dims["kv_heads"], dims["head_dim"]


SPLITS: dict[str, dict[str, Callable[[Op], Hashable]]] = {
    "gemm": {"unseen n, k": _weights},
    "attention": {"unseen heads": _heads},
}


def figures_of(name: str, rows: OpRows, hardware: Hardware, seed: int = 0) -> list[Figure]:
    """Figures of all families of one device, each with all its splits."""
    families: dict[tuple[str, str], list[int]] = {}
    for index, op in enumerate(rows.ops):
        families.setdefault((op.family, dtype_class(op, hardware)), []).append(index)
    found = []
    for (family, precision), indices in families.items():
        own = rows.take(np.array(indices))
        label = f"{family}/{precision}" if precision else family
        splits: dict[str, Callable[[Op], Hashable]] = {
            "random": lambda op: (op.kind, op.dims),
            **SPLITS.get(family, {}),
        }
        for split, group in splits.items():
            held = held_out([group(op) for op in own.ops], seed)
            found.append(_figure(own, held, hardware, seed, predictor=name, ops=label, split=split))
    return found


def held_out(groups: Sequence[Hashable], seed: int) -> NDArray[np.bool_]:
    """Rows of a fifth of the groups, ``(rows,)``."""
    distinct = list(dict.fromkeys(groups))
    chosen = np.random.default_rng(seed).permutation(len(distinct))[: max(len(distinct) // FOLDS, 1)]
    left = {distinct[index] for index in chosen.tolist()}
    return np.array([group in left for group in groups], dtype=np.bool_)


def _figure(
    rows: OpRows, held: NDArray[np.bool_], hardware: Hardware, seed: int, *, predictor: str, ops: str, split: str
) -> Figure:
    """Fit regressors on the rows that are not held out, and compare the others with their predictions."""
    kept, left = rows.take(np.flatnonzero(~held)), rows.take(np.flatnonzero(held))
    model = fit_kernels(kept.ops, 1, kept.seconds, hardware, variants=kept.variants, seed=seed, judged=False)
    predicted = model.regressor.seconds(op_rows(left.ops, hardware, 1, left.variants))
    roofline = np.array([roofline_seconds(op, hardware) for op in left.ops])
    off = 100 * np.abs(predicted / left.seconds - 1)
    own = off[left.variants == 0]
    long = own[left.seconds[left.variants == 0] >= LONG_S]
    return Figure(
        predictor,
        ops,
        split,
        len(left),
        float(off.mean()),
        float(np.median(off)),
        float(np.percentile(off, 90)),
        _mean(own),
        _mean(long),
        float(100 * np.abs(roofline / left.seconds - 1).mean()),
    )


def _mean(off: NDArray[np.float64]) -> float:
    return float(off.mean()) if len(off) else float("nan")


def kernel_text(figures: Sequence[Figure]) -> str:
    """The table as text."""
    header = ["predictor", "ops", "split", "rows", "MAPE %", "median", "p90", "own software", "own, long", "roofline"]
    lines = [
        [f.predictor, f.ops, f.split, f.rows]
        + [Number(x) for x in (f.mape, f.median, f.p90, f.own_mape, f.long_mape, f.roofline_mape)]
        for f in figures
    ]
    return table(header, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="stepsight experiment kernels", description=__doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the public tables")
    parser.add_argument("--only", choices=list(RECIPES), help="one predictor's data")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    figures: list[Figure] = []
    try:
        for name, recipe in RECIPES.items():
            if options.only in (None, name):
                hardware = find_hardware(recipe.hardware)
                assert hardware is not None, recipe.hardware
                figures += figures_of(name, read_recipe(replace(recipe, lent={}), options.data)[0], hardware)
    except StepsightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        rows = [{key: None if value != value else value for key, value in asdict(f).items()} for f in figures]
        print(json.dumps({"figures": rows}, allow_nan=False))
    else:
        print(kernel_text(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
