"""Compare predicted with measured products of a device with few measurements, without its shipped predictor.

    stepsight experiment transfer --data DATA [--samples 50,200] [--only l40s-pcie-48gb] [--seeds 2] [--json]

For each device of the public tables the predictor of that device is left out, and in a second case also that of its
twin (H100 and H200 have one chip). Products in bf16 are drawn at random, and others of them judge. The table also shows
the errors of the same measurements learned alone, without other devices, and of the roofline.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.hardware.physics import roofline_seconds
from stepsight.dataset.tables import read_table
from stepsight.experiments.reports.text_table import Number, table
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.predictor.predictor import shipped_names, teacher_of
from stepsight.training.transfer.family_figures import LONG_S
from stepsight.training.transfer.fit_transfer import fit_ops
from stepsight.training.transfer.own_table import OwnTable, own_table

Array = NDArray[np.float64]
JUDGED = 3000  # products that judge each fit


@dataclass(frozen=True, slots=True)
class Case:
    """A device, and the predictors that are left out for it.

    Attributes:
        device: Preset of the device.
        folder: Of its tables.
        without: Predictors that are left out.
        twin: Whether a device with the same chip remains.
    """

    device: str
    folder: str
    without: tuple[str, ...]
    twin: bool


CASES = (
    Case("a100-sxm-80gb", "a100_sxm", ("a100-sxm",), False),
    Case("h100-sxm-80gb", "h100_sxm", ("h100-sxm", "h200-sxm"), False),
    Case("h100-sxm-80gb", "h100_sxm", ("h100-sxm",), True),
    Case("h200-sxm-141gb", "h200_sxm", ("h200-sxm",), True),
    Case("b200-sxm-180gb", "b200_sxm", ("b200-sxm",), False),
    Case("l40s-pcie-48gb", "l40s", (), False),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """Mean errors on other products, in percent, mean over seeds.

    Attributes:
        device, twin: As in ``Case``.
        samples: Measured products that were learned from.
        transfer, transfer_long: Of the transfer: of all products, and of those of 50 us and more.
        alone, alone_long: Of the same measurements without other devices.
        roofline: Of hardware facts alone, of all products.
    """

    device: str
    twin: bool
    samples: int
    transfer: float
    transfer_long: float
    alone: float
    alone_long: float
    roofline: float


def products(case: Case, data: Path) -> OwnTable:
    """The bf16 products of a device by the software that ran most of them.

    Raises:
        TableError: If the tables are not there.
    """
    hardware = find_hardware(case.device)
    assert hardware is not None, case.device
    read = read_table("aiconfigurator", data / "kernels/aiconfigurator/data" / case.folder / "gemm").where(
        kind="linear"
    )
    rows = own_table(read, hardware)
    names = rows.labels()
    kept = [i for i, name in enumerate(names) if name == "gemm" and rows.ops.variants[i] == 0]
    return rows.take(np.array(kept), np.array([], dtype=np.int64))


def figure_of(case: Case, rows: OwnTable, samples: int, seeds: int) -> Figure:
    """Train on some products and judge by others, for several seeds."""
    teachers = [teacher_of(name) for name in shipped_names() if name not in case.without]
    errors = []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(rows.ops))
        nothing = np.array([], dtype=np.int64)
        few, left = rows.take(order[:samples], nothing), rows.take(order[samples:][:JUDGED], nothing).ops
        by_transfer = fit_ops(few, teachers, "", seed=seed, say=lambda text: None)
        alone = fit_kernels(few.ops.ops, 1, few.ops.seconds, rows.hardware, seed=seed)
        roofline = np.array([roofline_seconds(op, rows.hardware) for op in left.ops])
        predicted = (by_transfer.seconds(left.ops, 1), replace(alone, derives=True).seconds(left.ops, 1), roofline)
        errors.append([_errors(seconds, left.seconds) for seconds in predicted])
    (transfer, transfer_long), (own, own_long), (roof, _) = np.mean(errors, axis=0).tolist()
    return Figure(case.device, case.twin, samples, transfer, transfer_long, own, own_long, roof)


def _errors(predicted: Array, measured: Array) -> tuple[float, float]:
    off = 100 * np.abs(predicted / measured - 1)
    return float(off.mean()), float(off[measured >= LONG_S].mean())


def transfer_text(figures: Sequence[Figure]) -> str:
    """The table as text."""
    header = ["device", "twin known", "samples", "transfer %", ">= 50 us", "own rows alone %", ">= 50 us", "roofline %"]
    lines = [
        [f.device, "yes" if f.twin else "no", f.samples]
        + [Number(x) for x in (f.transfer, f.transfer_long, f.alone, f.alone_long, f.roofline)]
        for f in figures
    ]
    return table(header, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="stepsight experiment transfer", description=__doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the public tables")
    parser.add_argument("--samples", default="50,200", help="numbers of measured products, separated by commas")
    parser.add_argument("--only", choices=sorted({case.device for case in CASES}), help="one device")
    parser.add_argument("--seeds", type=int, default=2, help="draws of the products")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    try:
        counts = [int(text) for text in options.samples.split(",")]
        figures = []
        for case in CASES:
            if options.only in (None, case.device):
                rows = products(case, options.data)
                for count in counts:
                    figures.append(figure_of(case, rows, count, options.seeds))
                    print(f"{case.device}: {count} samples", file=sys.stderr, flush=True)
    except (StepsightError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"figures": [asdict(f) for f in figures]}) if options.json else transfer_text(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
