"""Compare predicted with measured times of collectives between nodes, at held-out sites.

    stepsight experiment collectives --data DATA [--predictor FOLDER] [--json]

Each site is a public table with the links that its authors state.  Columns: the shipped predictor (it may have learned
from this site), the same trained without the site, NCCL's constants with nothing fitted, and the factors fitted on the
site's own rows of at most 64 ranks, or of its smaller half where it has no more.  The last column judges only the rows
that were not fitted.
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
from stepsight.dataset.hardware.hardware import Fabric, Link, find_fabric
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.tables import Measurements, read_table
from stepsight.experiments.evaluation.table_errors import group_of
from stepsight.experiments.reports.text_table import Number, table
from stepsight.training.collectives.between_nodes import UNFITTED, fit_site
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.catalogue import RECIPES, read_links
from stepsight.training.shipped.from_tables import CollectiveRows, fit_links

Array = NDArray[np.float64]

CALIBRATED_RANKS = 64


@dataclass(frozen=True, slots=True)
class Site:
    """Measurements between the nodes of one cluster.

    Attributes:
        name: For people.
        format: Of ``dataset.tables.FORMATS``.
        path: Within the folder of all data.
        fabric: Name of the fabric in the table's rows.
        links: What its authors state.
        predictor: Of the device.
    """

    name: str
    format: str
    path: str
    fabric: str
    links: Fabric
    predictor: str


# The links of ``cluster00`` are not stated: 14 GB/s are the bandwidth of its longest messages.  Vidur's networks
# between nodes are left out: several devices share their adapters in an unknown way.
_H100 = find_fabric("dgx-h100")
_NCCL_TESTS = ("nccl-tests", "collectives/nccl-tests-cluster")
SITES = (
    Site("cluster01", *_NCCL_TESTS, "nccl-tests-example-cluster01", _H100, "h100-sxm"),
    Site(
        "cluster00",
        *_NCCL_TESTS,
        "nccl-tests-example-cluster00",
        replace(_H100, name="cluster00", inter_node=Link(14e9, 10e-6)),
        "h100-sxm",
    ),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """Mean absolute errors of one class of rows, in percent; None if it is empty.

    Attributes:
        site, kind, size, ranks: Which rows.
        rows: Their number: the median of each collective that was measured several times.
        shipped: Of the shipped predictor.
        left_out: Of the same trained without the site.
        unfitted: Of NCCL's constants.
        calibrated_rows: Rows that were not fitted when the factors were fitted on small groups.
        calibrated: Error of these.
    """

    site: str
    kind: str
    size: str
    ranks: str
    rows: int
    shipped: float | None
    left_out: float | None
    unfitted: float | None
    calibrated_rows: int
    calibrated: float | None


def figures_of(site: Site, data: Path, predictor: Predictor) -> list[Figure]:
    """Figures of each class of one site's rows, and of all of its rows."""
    works, seconds = _rows(site, read_table(site.format, data / site.path))
    small = _small(works)
    links, _ = read_links(RECIPES[site.predictor], data)
    others = fit_links(_without(links, site, works)).between
    assert others is not None
    own = [work for work, fitted in zip(works, small, strict=True) if fitted]
    tuned = fit_site(others, own, site.links, seconds[small])
    off = {
        "shipped": _off(predictor.collective.seconds(works, site.links), seconds),
        "left_out": _off(others.seconds(works, site.links), seconds),
        "unfitted": _off(UNFITTED.seconds(works, site.links), seconds),
        "calibrated": _off(tuned.seconds(works, site.links), seconds),
    }
    classes: dict[tuple[str, str, str], list[int]] = {}
    for index, work in enumerate(works):
        classes.setdefault(group_of(work, 0.0), []).append(index)
    groups = [*sorted(classes.items()), (("all", "", ""), list(range(len(works))))]
    return [_figure(site.name, group, np.array(index), off, small) for group, index in groups]


def _rows(site: Site, measured: Measurements) -> tuple[list[Collective], Array]:
    """Distinct collectives between the nodes of a site, and the median of their seconds."""
    found: dict[Collective, list[float]] = {}
    for work, fabric, seconds in zip(measured.works, measured.fabric, measured.seconds, strict=True):
        if fabric == site.fabric and isinstance(work, Collective) and work.num_nodes > 1:
            found.setdefault(work, []).append(float(seconds))
    return list(found), np.array([np.median(times) for times in found.values()])


def _small(works: Sequence[Collective]) -> NDArray[np.bool_]:
    """Rows of at most 64 ranks; if there are no others, those with fewer ranks than the median."""
    ranks = np.array([work.group_size for work in works])
    most = CALIBRATED_RANKS if ranks.max() > CALIBRATED_RANKS else np.median(ranks) - 1
    return np.asarray(ranks <= most)


def _without(links: CollectiveRows, site: Site, works: Sequence[Collective]) -> CollectiveRows:
    """Rows without those of a site, which are the ones that equal its own on its own links."""
    own = set(works)
    kept = [
        index
        for index, (work, fabric) in enumerate(zip(links.collectives, links.fabrics, strict=True))
        if not (work in own and fabric == site.links)
    ]
    return links.take(np.array(kept, dtype=np.int64))


def _off(predicted: Array, measured: Array) -> Array:
    return np.asarray(100 * np.abs(predicted / measured - 1))


def _figure(
    site: str, group: tuple[str, str, str], index: NDArray[np.int64], off: dict[str, Array], small: NDArray[np.bool_]
) -> Figure:
    judged = index[~small[index]]
    means = {name: float(values[index].mean()) for name, values in off.items()}
    return Figure(
        site,
        *group,
        len(index),
        means["shipped"],
        means["left_out"],
        means["unfitted"],
        len(judged),
        float(off["calibrated"][judged].mean()) if len(judged) else None,
    )


def collective_text(figures: Sequence[Figure]) -> str:
    """The table as text."""
    header = ["site", "kind", "ranks", "size", "rows", "shipped %", "left out", "unfitted", "not fitted", "calibrated"]
    lines = [
        [f.site, f.kind, f.ranks, f.size, f.rows, *map(_cell, (f.shipped, f.left_out, f.unfitted)), f.calibrated_rows]
        for f in figures
    ]
    lines = [[*line, _cell(f.calibrated)] for line, f in zip(lines, figures, strict=True)]
    return table(header, lines)


def _cell(value: float | None) -> object:
    return "-" if value is None else Number(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="stepsight experiment collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the public tables")
    parser.add_argument("--predictor", type=Path, help="folder of a predictor to judge in place of the shipped one")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    figures: list[Figure] = []
    try:
        for site in SITES:
            predictor = Predictor.load(options.predictor or site.predictor)
            figures += figures_of(site, options.data, predictor)
    except StepsightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"figures": [asdict(figure) for figure in figures]}, allow_nan=False))
    else:
        print(collective_text(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
