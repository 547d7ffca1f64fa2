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
from stepsight.experiments.calibration.report import LEAST_GAIN, Change, Report, starting_predictor
from stepsight.experiments.reports.text_table import table
from stepsight.features.collective_features import CHOICE_TERMS
from stepsight.training.collectives.between_nodes import BetweenNodes, fit_site, link_doubts
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]

_PLACE = re.compile(r"\b(?:in|out-of)-place\b")
FEWEST = 8  # collectives between nodes that a calibration takes
LARGER, LAYOUTS = "larger groups", "each layout left out in turn"


@dataclass(frozen=True, kw_only=True)
class LinksReport(Report, Change):
    """Result of a calibration of collectives; errors are those on the collectives that judged it.

    Attributes:
        fitted: Number of distinct collectives that it was fitted on.
        by: Which collectives judged it.
        doubts: What contradicts the stated links; empty if they may be as stated.
        software: What ran them: NCCL's version and environment, as far as the logs say.
        left_out: Number of rows of each other software.
    """

    KEY = "calibrated_links"
    RECORDED = ("fitted", "factors", "evidence", "software")

    fitted: int
    by: str
    doubts: tuple[str, ...]
    software: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)

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
                name: dict(zip(CHOICE_TERMS, factors.tolist(), strict=True))
                for name, factors in between.factors.items()
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

    Raises:
        TableError: If the table has too few collectives between nodes, or none of that software.
        PredictorError: If the predictor does not model NCCL between nodes, or ``out`` is something else.
    """
    predictor = starting_predictor(predictor, out)
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
    change = Change.of(start.seconds(works, fabric)[judged], after[judged], seconds[judged])
    report = LinksReport(
        source=predictor.source,
        calibrated=replace(predictor, collective=replace(predictor.collective, between=fitted)),
        out=out,
        fitted=int(small.sum()),
        by=by,
        before=change.before,
        after=change.after,
        doubts=doubts,
        software=chosen,
        left_out=left_out,
    )
    file = digest(path.read_bytes())
    evidence = [file, chosen, repr(fabric), str(report.values()["factors"])]
    report.save(evidence, fabric=fabric.name, tables={path.name: file})
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


def links_text(report: LinksReport) -> str:
    """The report for people."""
    header = ["judged by", "collectives", "mean error %", "after", "bias", "after"]
    cells = [report.by, report.before.used, *report.cells("mape", "bias")]
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
