"""``stepsight calibrate`` of imported traces: kernels, launches and overlap as real steps on a GPU show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.base.files import digest
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.run_folder import MANIFEST, is_imported, read_imported, run_folders
from stepsight.experiments.calibration.report import Change, Report, starting_predictor
from stepsight.experiments.reports.text_table import table
from stepsight.training.corrections.traced import fit_traced
from stepsight.training.kernels.kernel_models import label
from stepsight.training.measured.imported_facts import Overlap, launch_seconds, overlap_of, with_facts
from stepsight.training.measured.imported_ops import HELDOUT, ImportedTimes, imported_times, read_imported_segments
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]

FEWEST = 8  # distinct ops that a calibration takes


@dataclass(frozen=True, kw_only=True)
class TracesReport(Report):
    """Result of a calibration on traces: its changes, and its evidence.

    Attributes:
        runs: Names of the runs.
        changes: Errors on traced ops, each left out when it was predicted, by family; ``all`` of all.
        launches: Seconds that the host takes for each kind, as the traces say.
        overlap: What compute loses beside collectives, None where no trace tells.
    """

    KEY = "calibrated_traces"
    RECORDED = ("kinds", "evidence", "host_kinds_s", "overlap")

    runs: tuple[str, ...]
    changes: Mapping[str, Change]
    launches: Mapping[str, float]
    overlap: Overlap | None

    @property
    def kernels_better(self) -> bool:
        """Whether ops that were left out are predicted better than before."""
        return self.changes["all"].is_gain

    @property
    def released(self) -> bool:
        """Whether the traces improved anything."""
        return self.kernels_better or bool(self.launches) or self.overlap is not None

    def values(self) -> dict[str, Any]:
        return {
            "runs": list(self.runs),
            "kinds": sorted(self.calibrated.kernel.traced),
            "evidence": {name: change.to_dict() for name, change in self.changes.items()},
            "host_kinds_s": dict(self.launches),
            "overlap": None if self.overlap is None else vars(self.overlap),
        }


def calibrate_traces(paths: Sequence[Path], predictor: Predictor | str, out: Path) -> TracesReport:
    """Correct a predictor with imported traces of its hardware, and write it if it improves.

    Kernels are corrected by kind, launches and overlap replaced where the traces tell; what does not lower the error
    on ops that were left out is left as it was.  The shipped predictor itself is never changed.

    Args:
        paths: Collections or run folders that ``import kineto`` wrote.
        predictor: To start from, or its name.
        out: Folder of the predictor to write.

    Raises:
        TraceError: If there are no imported runs of that hardware, or too few ops.
        PredictorError: If ``out`` is something else.
    """
    start = starting_predictor(predictor, out)
    folders = [folder for path in paths for folder in run_folders(path) if is_imported(folder)]
    folders = [folder for folder in folders if read_imported(folder).role != HELDOUT]
    if not folders:
        raise TraceError(f"calibration takes runs that `stepsight import kineto` wrote, got none in {paths[0]}")
    runs = read_imported_segments(folders, start.hardware.name)
    times = imported_times(runs)
    ops, measured = traced_medians(times, start.hardware)
    if len(ops) < FEWEST:
        raise TraceError(
            f"calibration takes at least {FEWEST} distinct ops of known sizes, got {len(ops)}: record shapes while "
            "profiling (record_shapes=True)"
        )
    predicted = start.kernel.seconds(ops, 1)
    labels = [label(op.kind, op, start.hardware) for op in ops]
    traced, left_out = fit_traced(ops, predicted, measured, labels)
    steps = [run.steps for run in runs if run.device != "cpu"]
    changes = changes_by_family(ops, predicted, predicted * np.exp(left_out), measured)
    launches, overlap = launch_seconds(steps), overlap_of(steps)
    kernel = replace(start.kernel, traced={**start.kernel.traced, **traced}) if changes["all"].is_gain else start.kernel
    hardware = with_facts(start.hardware, launches, overlap)
    report = TracesReport(
        source=start.source,
        calibrated=replace(start, hardware=hardware, kernel=replace(kernel, hardware=hardware)),
        out=out,
        runs=tuple(run.name for run in runs),
        changes=changes,
        launches=launches,
        overlap=overlap,
    )
    files = {folder.name: digest((folder / MANIFEST).read_bytes()) for folder in folders}
    report.save([*files.values()], runs=files)
    return report


def traced_medians(times: ImportedTimes, hardware: Hardware) -> tuple[list[Op], Array]:
    """Distinct ops in a precision that the hardware has, and the median of their seconds, ``(ops,)``."""
    ops = [op for op in times.ops if op.dtype in hardware.peak_flops]
    return ops, np.array([np.median(times.ops[op]) for op in ops])


def changes_by_family(ops: Sequence[Op], before: Array, after: Array, measured: Array) -> dict[str, Change]:
    """Errors of all ops, and of each family, from seconds of shape ``(ops,)``."""
    families: dict[str, list[int]] = {"all": list(range(len(ops)))}
    for index, op in enumerate(ops):
        families.setdefault(op.family, []).append(index)
    return {name: Change.of(before[rows], after[rows], measured[rows]) for name, rows in families.items()}


def traces_text(report: TracesReport) -> str:
    """The report for people."""
    cells = [[name, change.before.used, *change.cells("mape", "median")] for name, change in report.changes.items()]
    header = ["family", "distinct ops", "mean error %", "calibrated", "median error %", "calibrated"]
    lines = [
        f"calibrated {report.source} on {len(report.runs)} imported run(s); each op was left out when it was judged",
        table(header, cells),
        f"kernels corrected: {', '.join(sorted(report.calibrated.kernel.traced)) or 'none'}",
    ]
    if not report.kernels_better:
        lines.append("kernels are left as they were: ops that were left out are predicted no better")
    told = ", ".join(f"{kind} {1e6 * spent:.1f}" for kind, spent in report.launches.items())
    lines.append(f"launches, microseconds of the host: {told or 'too few to tell, left as they were'}")
    lines.append(_overlap_text(report.overlap))
    lines.append(f"wrote {report.out}" if report.released else "REFUSED, nothing was written: the traces teach nothing")
    return "\n".join(lines)


def _overlap_text(overlap: Overlap | None) -> str:
    if overlap is None:
        return "overlap: too few ops beside collectives to tell, left as it was"
    return (
        f"overlap: {overlap.ops} ops beside collectives for {1e3 * overlap.seconds:.1f} ms take {overlap.slowdown:.2f} "
        f"times as long as alone; {100 * overlap.share:.0f} % of the overlapped time is lost"
    )
