"""``stepsight calibrate`` of a table of collectives: fit a cluster's network on small groups, judge by larger ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import PredictorError, TableError
from stepsight.dataset.base.files import digest
from stepsight.dataset.hardware.hardware import Fabric
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.tables import Measurements
from stepsight.experiments.calibration.calibrate_runs import LEAST_GAIN
from stepsight.experiments.calibration.calibration_gain import save_calibrated
from stepsight.experiments.evaluation.error_metrics import Errors, errors
from stepsight.experiments.reports.text_table import Number, table
from stepsight.features.nccl_choices import CHOICE_TERMS
from stepsight.training.collectives.between_nodes import BetweenNodes, fit_site, link_doubts
from stepsight.training.prediction.prediction import named_predictor
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.predictor.predictor_manifest import check_output

Array = NDArray[np.float64]

_PLACE = re.compile(r"\b(?:in|out-of)-place\b")
FEWEST = 8  # collectives between nodes that a calibration takes
LARGER, LAYOUTS = "larger groups", "each layout left out in turn"


@dataclass(frozen=True)
class LinksReport:
    """Result of a calibration of collectives: its changes, its evidence, and whether it was written.

    Attributes:
        source: The predictor before calibration, in words.
        calibrated: The predictor after it.
        fitted: Number of distinct collectives that it was fitted on.
        by: Which collectives judged it.
        before, after: Errors on these.
        doubts: What contradicts the stated links; empty if they may be as stated.
        software: What ran them: NCCL's version and environment, as far as the logs say.
        left_out: Number of rows of each other software.
        out: The folder asked for; it is written only if ``released``.
    """

    source: str
    calibrated: Predictor
    fitted: int
    by: str
    before: Errors
    after: Errors
    doubts: tuple[str, ...]
    out: Path
    software: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def released(self) -> bool:
        """Whether nothing contradicts the stated links, and held-out collectives are predicted better than before."""
        return not self.doubts and (self.after.mape or 0.0) < (1 - LEAST_GAIN) * (self.before.mape or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; errors in percent."""
        between = self.calibrated.collective.between
        assert between is not None
        value: dict[str, Any] = {
            "predictor": self.source,
            "fitted": self.fitted,
            "factors": {
                name: dict(zip(CHOICE_TERMS, factors.tolist(), strict=True))
                for name, factors in between.factors.items()
            },
            "evidence": {"by": self.by, "before": self.before.to_dict(), "after": self.after.to_dict()},
            "doubts": list(self.doubts),
            "software": self.software,
            "left_out": dict(self.left_out),
            "released": self.released,
        }
        return {**value, "out": str(self.out)} if self.released else value


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

    Raises:
        TableError: If the table has too few collectives between nodes, or none of that software.
        PredictorError: If the predictor does not model NCCL between nodes, or ``out`` is something else.
    """
    predictor = named_predictor(predictor) if isinstance(predictor, str) else predictor
    check_output(out)
    start = predictor.collective.between
    if start is None:
        raise PredictorError(
            f"calibrating collectives takes a predictor of NCCL between nodes, got {predictor.source}: start from one "
            "that comes with stepsight"
        )
    rows, chosen, left_out = _one_software(_between_nodes(Measurements.from_parquet(path)), software)
    works, seconds = list(rows), np.array([np.median(times) for times in rows.values()])
    if len(works) < FEWEST:
        raise TableError(f"a calibration takes at least {FEWEST} collectives between nodes, got {len(works)} in {path}")
    doubts = link_doubts(works, fabric, seconds)
    small = np.array([work.group_size <= max_devices for work in works])
    if not small.any():
        small[:] = True
    fitted = _fit(start, works, seconds, small, fabric)
    by, judged, after = LARGER, ~small, fitted.seconds(works, fabric)
    if small.all():
        by, judged, after = LAYOUTS, small, _left_out(start, works, seconds, fabric)
    before = start.seconds(works, fabric)
    measured = seconds[judged].tolist()
    report = LinksReport(
        predictor.source,
        replace(predictor, collective=replace(predictor.collective, between=fitted)),
        int(small.sum()),
        by,
        errors(before[judged].tolist(), measured),
        errors(after[judged].tolist(), measured),
        doubts,
        out,
        chosen,
        left_out,
    )
    if report.released:
        _save(report, path, fabric)
    return report


def _between_nodes(measured: Measurements) -> dict[str, dict[Collective, list[float]]]:
    """Seconds of each collective between nodes, by the software that ran it, whether in place or not."""
    found: dict[str, dict[Collective, list[float]]] = {}
    for work, seconds, software in zip(measured.works, measured.seconds.tolist(), measured.software, strict=True):
        if isinstance(work, Collective) and work.num_nodes > 1:
            rows = found.setdefault(_PLACE.sub("", software).strip(), {})
            rows.setdefault(work, []).append(seconds)
    return found


def _one_software(
    found: dict[str, dict[Collective, list[float]]], asked: str
) -> tuple[dict[Collective, list[float]], str, dict[str, int]]:
    """Rows of one software, which that is, and the number of rows of each other one.

    Raises:
        TableError: If none is the one that is asked for.
    """
    counts = {name: sum(map(len, rows.values())) for name, rows in found.items()}
    fitting = [name for name in found if asked in name]
    if found and not fitting:
        raise TableError(f"the software must contain {asked!r:.80}; the table has {'; '.join(sorted(found))}")
    chosen = max(fitting, key=lambda name: counts[name], default="")
    return found.get(chosen, {}), chosen, {name: count for name, count in counts.items() if name != chosen}


def _fit(
    start: BetweenNodes, works: Sequence[Collective], seconds: Array, rows: NDArray[np.bool_], fabric: Fabric
) -> BetweenNodes:
    return fit_site(start, [works[index] for index in np.flatnonzero(rows).tolist()], fabric, seconds[rows])


def _left_out(start: BetweenNodes, works: Sequence[Collective], seconds: Array, fabric: Fabric) -> Array:
    """Seconds of each layout by a fit that did not see it, ``(works,)``."""
    layouts = [(work.group_size, work.ranks_per_node) for work in works]
    predicted = np.empty(len(works))
    for layout in dict.fromkeys(layouts):
        held = np.array([one == layout for one in layouts])
        model = start if held.all() else _fit(start, works, seconds, ~held, fabric)
        predicted[held] = model.seconds([work for work, out in zip(works, held, strict=True) if out], fabric)
    return predicted


def _save(report: LinksReport, path: Path, fabric: Fabric) -> None:
    value, file = report.to_dict(), digest(path.read_bytes())
    record = {key: value[key] for key in ("predictor", "fitted", "factors", "evidence")}
    evidence = [file, report.software, repr(fabric), str(record["factors"])]
    record |= {"software": report.software, "fabric": fabric.name, "tables": {path.name: file}}
    save_calibrated(report.calibrated, report.out, evidence, "calibrated_links", record)


def links_text(report: LinksReport) -> str:
    """The report for people."""
    header = ["judged by", "collectives", "mean error %", "after", "bias", "after"]
    before, after = report.before, report.after
    cells = [report.by, before.used]
    cells += [Number(value or 0.0) for value in (before.mape, after.mape, before.bias, after.bias)]
    verdict = f"wrote {report.out}"
    if not report.released:
        verdict = "REFUSED, nothing was written: " + (
            "the stated links are contradicted"
            if report.doubts
            else f"it does not lower the mean error on {report.by} by {100 * LEAST_GAIN:g} % of it"
        )
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
