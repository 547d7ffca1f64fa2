"""``stepsight calibrate`` of parts of a predictor; first what all calibrations report.

A cluster's own collectives correct its network; imported traces correct kernels, launches and overlap.

Collectives of small groups are fitted and larger ones judge; each traced op is left out when it is judged.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import PredictorError, TableError, TraceError
from stepsight.dataset.base.files import digest
from stepsight.dataset.hardware.hardware import Fabric
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.runs.run_folder import MANIFEST, is_imported, read_imported, run_folders
from stepsight.dataset.tables import Measurements
from stepsight.experiments.evaluation.error_metrics import Errors, Times, errors
from stepsight.experiments.reports.text_table import Number, table
from stepsight.features.collective_features import CHOICE_TERMS
from stepsight.training.collectives.between_nodes import BetweenNodes, fit_site, left_out_seconds, link_doubts
from stepsight.training.corrections.corrector import fit_traced
from stepsight.training.fitting.own_table import pack_shapes, shape_of
from stepsight.training.kernels.kernel_models import label
from stepsight.training.measured.imported_facts import Overlap, launch_seconds, overlap_of, with_facts
from stepsight.training.measured.imported_ops import HELDOUT, imported_times, read_imported_segments
from stepsight.training.predictor.model_tables import check_output
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.tracking.store import load_predictor

LEAST_GAIN = 0.02  # of the mean error: less is chance


def starting_predictor(predictor: Predictor | str, out: Path) -> Predictor:
    """The predictor that a calibration begins with."""
    check_output(out)
    return load_predictor(predictor) if isinstance(predictor, str) else predictor


@dataclass(frozen=True, kw_only=True)
class Change:
    """Errors on the same measurements, which were not fitted."""

    # before, after: without and with calibration
    before: Errors
    after: Errors

    @classmethod
    def of(cls, before_s: Times, after_s: Times, measured_s: Times) -> Change:
        """The change of predicted seconds."""
        return cls(before=errors(before_s, measured_s), after=errors(after_s, measured_s))

    @property
    def is_gain(self) -> bool:
        """Whether the mean error falls by ``LEAST_GAIN`` of it."""
        return (self.after.mape or 0.0) < (1 - LEAST_GAIN) * (self.before.mape or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; errors in percent."""
        return {"before": self.before.to_dict(), "after": self.after.to_dict()}

    def cells(self, *names: str) -> list[Number]:
        """Cells of a table: each error before and after."""
        return [Number(getattr(found, name) or 0.0) for name in names for found in (self.before, self.after)]


@dataclass(frozen=True, kw_only=True)
class Report(ABC):
    """Result of a calibration."""

    KEY: ClassVar[str]  # of the record in the manifest of the calibrated predictor
    RECORDED: ClassVar[tuple[str, ...]]  # keys of ``to_dict`` that the record has

    source: str  # the predictor before calibration, in words
    calibrated: Predictor  # the predictor after it
    out: Path  # the folder asked for; it is written only if ``released``

    @property
    @abstractmethod
    def released(self) -> bool:
        """Whether the calibrated predictor is better, so that it was written."""

    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Plain values of what was fitted and how it was judged."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; errors in percent."""
        value = {"predictor": self.source, **self.values(), "released": self.released}
        return {**value, "out": str(self.out)} if self.released else value

    def save(self, evidence: Sequence[str], **more: Any) -> None:
        """Write the calibrated predictor if it is better, with what fitted and judged it in its manifest."""
        if not self.released:
            return
        value, manifest = self.to_dict(), self.calibrated.manifest
        record = {key: value[key] for key in ("predictor", *self.RECORDED)} | more
        own = digest(str(manifest.get("digest", "")), *evidence)
        replace(self.calibrated, manifest={**manifest, "name": "", "digest": own, self.KEY: record}).save(self.out)


# --- a table of collectives -------------------------------------------------------------------------------------------

_PLACE = re.compile(r"\b(?:in|out-of)-place\b")
FEWEST_COLLECTIVES = 8  # collectives between nodes that a calibration takes
LARGER, LAYOUTS = "larger groups", "each layout left out in turn"


@dataclass(frozen=True, kw_only=True)
class LinksReport(Report, Change):
    """Result of a calibration of collectives; errors are those on the collectives that judged it."""

    KEY = "calibrated_links"
    RECORDED = ("fitted", "factors", "evidence", "software")

    fitted: int  # number of distinct collectives that it was fitted on
    by: str  # which collectives judged it
    doubts: tuple[str, ...]  # what contradicts the stated links; empty if they may be as stated
    software: str = ""  # what ran them: NCCL's version and environment, as far as the logs say
    left_out: Mapping[str, int] = field(default_factory=dict)  # number of rows of each other software

    @property
    def released(self) -> bool:
        """Whether nothing contradicts the stated links, and held-out collectives are predicted better than before."""
        return not self.doubts and self.is_gain

    def values(self) -> dict[str, Any]:
        between = self.calibrated.collective.between
        assert between is not None
        return {
            "fitted": self.fitted,
            "factors": {
                name: dict(zip(CHOICE_TERMS, own.tolist(), strict=True)) for name, own in between.factors.items()
            },
            "evidence": {"by": self.by, **Change.to_dict(self)},
            "doubts": list(self.doubts),
            "software": self.software,
            "left_out": dict(self.left_out),
        }


def calibrate_links(
    path: Path, predictor: Predictor | str, fabric: Fabric, out: Path, *, max_devices: int = 64, software: str = ""
) -> LinksReport:
    """Fit the network's factors on a cluster's own collectives, and write the predictor if it predicts others better.

    Args:
        path: Table of measurements (.parquet), as ``import`` writes it; only collectives between nodes are taken.
        predictor: To start from.
        fabric: The cluster's links, as stated.
        out: Folder of the predictor to write.
        max_devices: Groups of at most this many ranks are fitted; larger ones judge.  Without any, layouts are left out
            in turn.
        software: Part of the software whose rows are taken (``nccl 2.27.3``, ``NCCL_PROTO=Simple``); by default that
            of most rows, since another version or environment of NCCL is another network.
    """
    predictor = starting_predictor(predictor, out)
    start = predictor.collective.between
    if start is None:
        raise PredictorError(
            f"calibrating collectives takes a predictor of NCCL between nodes, got {predictor.source}: start from one "
            "that comes with stepsight"
        )
    measured = Measurements.from_parquet(path)
    rows, chosen, left_out = _one_software(measured, software)
    works, seconds = list(rows), np.array([np.median(times) for times in rows.values()])
    if len(works) < FEWEST_COLLECTIVES:
        raise TableError(
            f"a calibration takes at least {FEWEST_COLLECTIVES} collectives between nodes, got {len(works)} in {path}"
        )
    doubts = link_doubts(works, fabric, seconds)
    small = np.array([work.group_size <= max_devices for work in works])
    if not small.any():
        small[:] = True

    def fit(rows: NDArray[np.bool_]) -> BetweenNodes:
        return fit_site(start, [works[index] for index in np.flatnonzero(rows).tolist()], fabric, seconds[rows])

    fitted = fit(small)
    by, judged, after = LARGER, ~small, fitted.seconds(works, fabric)
    if small.all():
        by, judged, after = LAYOUTS, small, left_out_seconds(works, fabric, fit, alone=start)
    change = Change.of(start.seconds(works, fabric)[judged], after[judged], seconds[judged])
    own = replace(predictor, collective=replace(predictor.collective, between=fitted))
    shared: dict[str, Any] = {"source": predictor.source, "calibrated": own, "out": out, **vars(change)}
    told: dict[str, Any] = {
        "fitted": int(small.sum()),
        "by": by,
        "doubts": doubts,
        "software": chosen,
        "left_out": left_out,
    }
    report = LinksReport(**shared, **told)
    file, factors = digest(path.read_bytes()), str(report.values()["factors"])
    shapes = pack_shapes(shape_of(work) for work, own in zip(works, small, strict=True) if own)
    rows_of = {"fitted_shapes": shapes, "files": sorted({each.digest for each in measured.files.values()})}
    report.save([file, chosen, repr(fabric), factors], fabric=fabric.name, tables={path.name: file}, **rows_of)
    return report


def _one_software(measured: Measurements, asked: str) -> tuple[dict[Collective, list[float]], str, dict[str, int]]:
    """Seconds of each collective between nodes by one software, which that is, and the number of rows of each other."""
    found: dict[str, dict[Collective, list[float]]] = {}  # by software, whether in place or not
    for work, seconds, software in zip(measured.works, measured.seconds.tolist(), measured.software, strict=True):
        if isinstance(work, Collective) and work.num_nodes > 1:
            found.setdefault(_PLACE.sub("", software).strip(), {}).setdefault(work, []).append(seconds)
    counts = {name: sum(map(len, rows.values())) for name, rows in found.items()}
    fitting = [name for name in found if asked in name]
    if found and not fitting:
        raise TableError(f"the software must contain {asked!r:.80}; the table has {'; '.join(sorted(found))}")
    chosen = max(fitting, key=lambda name: counts[name], default="")
    return found.get(chosen, {}), chosen, {name: count for name, count in counts.items() if name != chosen}


def links_text(report: LinksReport) -> str:
    """The report for people."""
    header = ["judged by", "collectives", "mean error %", "after", "bias", "after"]
    cells = [report.by, report.before.used, *report.cells("mape", "bias")]
    why = f"it does not lower the mean error on {report.by} by {100 * LEAST_GAIN:g} % of it"
    why = "the stated links are contradicted" if report.doubts else why
    verdict = f"wrote {report.out}" if report.released else f"REFUSED, nothing was written: {why}"
    return "\n".join(
        [
            f"calibrated {report.source} on {report.fitted} collectives between nodes",
            table(header, [cells]),
            *(
                f"left out {count} rows of other software (--software takes them instead): {name or 'not stated'}"
                for name, count in report.left_out.items()
            ),
            *(f"doubt: {doubt}" for doubt in report.doubts),
            verdict,
        ]
    )


# --- imported traces --------------------------------------------------------------------------------------------------

FEWEST_OPS = 8  # distinct ops that a calibration takes


@dataclass(frozen=True, kw_only=True)
class TracesReport(Report):
    """Result of a calibration on traces: its changes, and its evidence."""

    KEY = "calibrated_traces"
    RECORDED = ("kinds", "evidence", "host_kinds_s", "overlap")

    runs: tuple[str, ...]  # names of the runs
    # errors on traced ops, each left out when it was predicted, by family; ``all`` of all
    changes: Mapping[str, Change]
    launches: Mapping[str, float]  # seconds that the host takes for each kind, as the traces say
    overlap: Overlap | None  # what compute loses beside collectives, None where no trace tells

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
    """
    start = starting_predictor(predictor, out)
    folders = [folder for path in paths for folder in run_folders(path) if is_imported(folder)]
    folders = [folder for folder in folders if read_imported(folder).role != HELDOUT]
    if not folders:
        raise TraceError(f"calibration takes runs that `stepsight import kineto` wrote, got none in {paths[0]}")
    runs = read_imported_segments(folders, start.hardware.name)
    times = imported_times(runs)
    ops = [op for op in times.ops if op.dtype in start.hardware.peak_flops]
    measured = np.array([np.median(times.ops[op]) for op in ops])
    if len(ops) < FEWEST_OPS:
        raise TraceError(
            f"calibration takes at least {FEWEST_OPS} distinct ops of known sizes, got {len(ops)}: record shapes while "
            "profiling (record_shapes=True)"
        )
    predicted = start.kernel.seconds(ops, 1)
    labels = [label(op.kind, op, start.hardware) for op in ops]
    traced, left_out = fit_traced(ops, predicted, measured, labels)
    steps = [run.steps for run in runs if run.device != "cpu"]
    after, families = predicted * np.exp(left_out), {"all": [*range(len(ops))]}
    for index, op in enumerate(ops):
        families.setdefault(op.family, []).append(index)
    changes = {name: Change.of(predicted[at], after[at], measured[at]) for name, at in families.items()}
    launches, overlap = launch_seconds(steps), overlap_of(steps)
    kernel = replace(start.kernel, traced={**start.kernel.traced, **traced}) if changes["all"].is_gain else start.kernel
    hardware = with_facts(start.hardware, launches, overlap)
    own = replace(start, hardware=hardware, kernel=replace(kernel, hardware=hardware))
    found: dict[str, Any] = {"changes": changes, "launches": launches, "overlap": overlap}
    report = TracesReport(source=start.source, calibrated=own, out=out, runs=tuple(run.name for run in runs), **found)
    files = {folder.name: digest((folder / MANIFEST).read_bytes()) for folder in folders}
    report.save([*files.values()], runs=files)
    return report


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
    overlap = report.overlap
    if overlap is None:
        lines.append("overlap: too few ops beside collectives to tell, left as it was")
    else:
        lines.append(
            f"overlap: {overlap.ops} ops beside collectives for {1e3 * overlap.seconds:.1f} ms take "
            f"{overlap.slowdown:.2f} times as long as alone; {100 * overlap.share:.0f} % of the overlapped time is lost"
        )
    lines.append(f"wrote {report.out}" if report.released else "REFUSED, nothing was written: the traces teach nothing")
    return "\n".join(lines)
