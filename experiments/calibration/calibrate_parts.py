"""``stepsight calibrate`` of parts of a predictor: a cluster's own collectives correct its network, imported traces
kernels, launches and overlap.  Collectives of small groups are fitted and larger ones judge; each traced op is left out
when it is judged.  First what all calibrations report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import PredictorError, TableError, TraceError
from stepsight.dataset.base.files import digest
from stepsight.dataset.hardware.hardware import Fabric
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_folder import MANIFEST, is_imported, read_imported, run_folders
from stepsight.dataset.tables import Measurements
from stepsight.experiments.evaluation.error_metrics import Errors, Times, errors
from stepsight.experiments.reports.text_table import Number, table
from stepsight.features.collective_features import CHOICE_TERMS
from stepsight.training.collectives.between_nodes import fit_site, keep_better, left_out_seconds, link_doubts
from stepsight.training.corrections.corrector import fit_traced, rows_by
from stepsight.training.fitting.own_table import pack_shapes, shape_of
from stepsight.training.kernels.kernel_models import label
from stepsight.training.measured.imported_facts import Overlap, launch_seconds, overlap_of, with_facts
from stepsight.training.measured.imported_ops import HELDOUT, imported_times, read_imported_segments
from stepsight.training.predictor.model_tables import check_output
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.tracking.tracking import load_predictor

LEAST_GAIN = 0.02  # of the mean error: less is chance


def starting_predictor(predictor: Predictor | str, out: Path) -> Predictor:
    """The predictor that a calibration begins with."""
    check_output(out)
    return load_predictor(predictor) if isinstance(predictor, str) else predictor


@dataclass(frozen=True, kw_only=True)
class Change:
    """Errors on the same measurements, which were not fitted."""

    before: Errors  # without calibration
    after: Errors  # with it

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
class Report:
    """Result of a calibration."""

    source: str  # the predictor before calibration, in words
    calibrated: Predictor  # the predictor after it
    out: Path  # the folder asked for
    values: Mapping[str, Any]  # what was fitted and how it was judged, plain values
    lines: Sequence[str]  # the same for people
    problems: Sequence[str]  # why the calibrated predictor is no better; empty: it was written

    @property
    def released(self) -> bool:
        """Whether the calibrated predictor is better, so that it was written."""
        return not self.problems

    @property
    def text(self) -> str:
        """The report for people."""
        refused = f"REFUSED, nothing was written: {'; '.join(self.problems)}"
        return "\n".join([*self.lines, f"wrote {self.out}" if self.released else refused])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; errors in percent."""
        value = {"predictor": self.source, **self.values, "released": self.released}
        return {**value, "out": str(self.out)} if self.released else value

    def save(self, key: str, recorded: Sequence[str], evidence: Sequence[str], **more: Any) -> None:
        """Write the calibrated predictor if it is better; its manifest has the values that are ``recorded``."""
        if self.released:
            value, manifest = self.to_dict(), self.calibrated.manifest
            record = {name: value[name] for name in ("predictor", *recorded)} | more
            own = digest(str(manifest.get("digest", "")), *evidence)
            replace(self.calibrated, manifest={**manifest, "name": "", "digest": own, key: record}).save(self.out)


_PLACE = re.compile(r"\b(?:in|out-of)-place\b")
FEWEST_COLLECTIVES = 8  # collectives between nodes that a calibration takes
LARGER, LEFT_OUT = "larger groups", "each {} left out in turn"
_HEADER = ["judged by", "collectives", "mean error %", "after", "bias", "after"]
_OTHERS = "left out {} rows of other software (--software takes them instead): {}"


def calibrate_links(
    path: Path, predictor: Predictor | str, fabric: Fabric, out: Path, *, max_devices: int = 64, software: str = ""
) -> Report:
    """Fit the network's factors on a cluster's own collectives, and write the predictor if it predicts others better.

    Of the table of measurements (.parquet) only collectives between nodes are taken, by one software: that of most
    rows, or one that contains ``software`` (``nccl 2.27.3``, ``NCCL_PROTO=Simple``), since another version or
    environment of NCCL is another network.  Groups of at most ``max_devices`` ranks are fitted; larger ones judge each
    kind and size, or layouts left out in turn.  Nothing is written if measurements contradict the stated ``fabric``.
    """
    predictor = starting_predictor(predictor, out)
    start = predictor.collective.between
    if start is None:
        rule = "calibrating collectives takes a predictor of NCCL between nodes, as those that come with stepsight are"
        raise PredictorError(f"{rule}, got {predictor.source}")
    measured = Measurements.from_parquet(path)
    rows, chosen, left_out = _one_software(measured, software)
    works, seconds = list(rows), np.array([np.median(times) for times in rows.values()])
    small = np.array([work.group_size <= max_devices for work in works])
    small |= not small.any()
    taught, judged = np.flatnonzero(small), np.flatnonzero(~small)
    fitted = fit_site(start, [works[index] for index in taught.tolist()], fabric, seconds[taught])
    one = len({(work.group_size, work.ranks_per_node) for work in works}) == 1
    if len(judged):
        fitted = keep_better(start, fitted, [works[index] for index in judged.tolist()], fabric, seconds[judged])
        by, after = LARGER, fitted.seconds(works, fabric)
    else:
        by = LEFT_OUT.format("size of the only layout" if one else "layout")
        after = left_out_seconds(partial(fit_site, start), works, fabric, seconds)
        judged = np.arange(len(works))
    change = Change.of(start.seconds(works, fabric)[judged], after[judged], seconds[judged])
    factors = {name: dict(zip(CHOICE_TERMS, own.tolist(), strict=True)) for name, own in fitted.factors.items()}
    doubts = link_doubts(works, fabric, seconds)
    problems = [] if change.is_gain else [f"it does not lower the mean error on {by} by {100 * LEAST_GAIN:g} % of it"]
    number, told = int(small.sum()), {"doubts": list(doubts), "software": chosen, "left_out": left_out}
    report = Report(
        source=predictor.source,
        calibrated=replace(predictor, collective=replace(predictor.collective, between=fitted)),
        out=out,
        values={"fitted": number, "factors": factors, "evidence": {"by": by, **change.to_dict()}, **told},
        lines=[
            f"calibrated {predictor.source} on {number} collectives between nodes",
            table(_HEADER, [[by, change.before.used, *change.cells("mape", "bias")]]),
            *(_OTHERS.format(count, name or "not stated") for name, count in left_out.items()),
            *(f"doubt: {doubt}" for doubt in doubts),
        ],
        problems=["the stated links are contradicted"] if doubts else problems,
    )
    file = digest(path.read_bytes())
    shapes = pack_shapes(shape_of(work) for work, own in zip(works, small, strict=True) if own)
    files = sorted({each.digest for each in measured.files.values()})
    of = {"fitted_shapes": shapes, "files": files, "fabric": fabric.name, "tables": {path.name: file}}
    recorded, evidence = ("fitted", "factors", "evidence", "software"), [file, chosen, repr(fabric), str(factors)]
    report.save("calibrated_links", recorded, evidence, **of)
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
    if (got := len(found.get(chosen, ()))) < FEWEST_COLLECTIVES:
        raise TableError(f"a calibration takes at least {FEWEST_COLLECTIVES} collectives between nodes, got {got}")
    return found[chosen], chosen, {name: count for name, count in counts.items() if name != chosen}


FEWEST_OPS = 8  # distinct ops that a calibration takes


def calibrate_traces(paths: Sequence[Path], predictor: Predictor | str, out: Path) -> Report:
    """Correct a predictor with imported traces of its hardware, and write it if it improves: kernels by kind, launches
    and overlap where the traces tell. What does not lower the error on ops that were left out is left as it was. The
    shipped predictor itself is never changed.
    """
    start = starting_predictor(predictor, out)
    folders = [folder for path in paths for folder in run_folders(path) if is_imported(folder)]
    folders = [folder for folder in folders if read_imported(folder).role != HELDOUT]
    if not folders:
        raise TraceError(f"calibration takes runs that `stepsight import kineto` wrote, got none in {paths[0]}")
    runs = read_imported_segments(folders, start.hardware.name)
    times = imported_times(runs)
    ops = [op for op in times if isinstance(op, Op) and op.dtype in start.hardware.peak_flops]
    measured = np.array([np.median(times[op]) for op in ops])
    if len(ops) < FEWEST_OPS:
        rule = f"calibration takes at least {FEWEST_OPS} distinct ops of known sizes, got {len(ops)}"
        raise TraceError(f"{rule}: record shapes while profiling (record_shapes=True)")
    predicted = start.kernel.seconds(ops, 1)
    traced, left_out = fit_traced(ops, predicted, measured, [label(op.kind, op, start.hardware) for op in ops])
    after, families = predicted * np.exp(left_out), {"all": np.arange(len(ops)), **rows_by(op.family for op in ops)}
    changes = {name: Change.of(predicted[at], after[at], measured[at]) for name, at in families.items()}
    steps = [run.steps for run in runs if run.device != "cpu"]
    launches, overlap, better = launch_seconds(steps), overlap_of(steps), changes["all"].is_gain
    kernel = replace(start.kernel, traced={**start.kernel.traced, **traced}) if better else start.kernel
    hardware = with_facts(start.hardware, launches, overlap)
    report = Report(
        source=start.source,
        calibrated=replace(start, hardware=hardware, kernel=replace(kernel, hardware=hardware)),
        out=out,
        values={
            "runs": [run.name for run in runs],
            "kinds": sorted(kernel.traced),
            "evidence": {name: change.to_dict() for name, change in changes.items()},
            "host_kinds_s": dict(launches),
            "overlap": None if overlap is None else vars(overlap),
        },
        lines=[
            f"calibrated {start.source} on {len(runs)} imported run(s); each op was left out when it was judged",
            *_traces_lines(changes, sorted(kernel.traced), launches, overlap),
        ],
        problems=[] if better or launches or overlap else ["the traces teach nothing"],
    )
    files = {folder.name: digest((folder / MANIFEST).read_bytes()) for folder in folders}
    report.save("calibrated_traces", ("kinds", "evidence", "host_kinds_s", "overlap"), [*files.values()], runs=files)
    return report


def _traces_lines(
    changes: Mapping[str, Change], kinds: Sequence[str], launches: Mapping[str, float], overlap: Overlap | None
) -> list[str]:
    header = ["family", "distinct ops", "mean error %", "calibrated", "median error %", "calibrated"]
    cells = [[name, change.before.used, *change.cells("mape", "median")] for name, change in changes.items()]
    lines = [table(header, cells), f"kernels corrected: {', '.join(kinds) or 'none'}"]
    if not changes["all"].is_gain:
        lines.append("kernels are left as they were: ops that were left out are predicted no better")
    told = ", ".join(f"{kind} {1e6 * spent:.1f}" for kind, spent in launches.items())
    lines.append(f"launches, microseconds of the host: {told or 'too few to tell, left as they were'}")
    if overlap is None:
        return [*lines, "overlap: too few ops beside collectives to tell, left as it was"]
    return [
        *lines,
        f"overlap: {overlap.ops} ops beside collectives for {1e3 * overlap.seconds:.1f} ms take "
        f"{overlap.slowdown:.2f} times as long as alone; {100 * overlap.share:.0f} % of the overlapped time is lost",
    ]
