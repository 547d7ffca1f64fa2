"""Error against measuring time: regressors trained again on nested parts of the separately measured ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepsight.dataset.base.files import read_json
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.one_gpu.judge import held_op_rows, op_errors
from stepsight.training.calibration.corrections import Calibration
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.measured.measured import HELDOUT, read_runs
from stepsight.training.predictor.prediction import predict
from stepsight.training.predictor.predictor import Predictor

PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


def learning_curve(
    predictor: Predictor,
    known: dict[Op, float],
    heldout: dict[Op, float],
    folders: Sequence[Path],
    runs: Path,
    seed: int = 0,
) -> list[dict[str, float]]:
    """One row for each part: ``ops``, ``minutes``, and errors of held-out ops and steps in percent.

    Steps are predicted by regressors alone: runs, which teach the context, are not counted in the minutes.

    Args:
        predictor: Whose hardware's facts are kept.
        known: Measured ops that teach.
        heldout: Measured ops that judge.
        folders: Collections with the plans that say how much time ops had.
        runs: Collection with the held-out runs.
        seed: Of the parts and of all that is learned.
    """
    manifests = [run.manifest for run in read_runs([runs], ("heldout",))]
    measured = np.array([manifest.iteration_time_s for manifest in manifests])
    ops = [list(known)[at] for at in np.random.default_rng(seed).permutation(len(known))]
    seconds = np.array([known[op] for op in ops])
    whole_s = event_seconds(folders)
    rows = []
    for part in PARTS:
        count = max(2, round(part * len(ops)))
        kernel = fit_kernels(ops[:count], 1, seconds[:count], predictor.hardware, seed=seed)
        part_of = replace(predictor, kernel=kernel, context=None, calibration=Calibration())
        times = np.array([predict(manifest.job, part_of).iteration_time_s for manifest in manifests])
        off = op_errors(held_op_rows(part_of, heldout)) if heldout else {}
        row = {"part": part, "ops": count, "minutes": whole_s * count / len(ops) / 60}
        if off:
            row |= {"op_mape": off["mape"], **({"long_op_mape": off["long_mape"]} if "long_mape" in off else {})}
        if len(times):
            row["step_mape"] = 100 * float(np.abs(times / measured - 1).mean())
        rows.append(row)
    return rows


def event_seconds(folders: Sequence[Path]) -> float:
    """Seconds that plans spent on training ops."""
    return sum(
        float(event["seconds"])
        for folder in folders
        for event in read_json(folder / "plan.json")["events"]
        if event["name"] != HELDOUT
    )
