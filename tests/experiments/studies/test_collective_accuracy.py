"""A made-up site that is as its links say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_fabric
from stepsight.dataset.kinds.op import Collective
from stepsight.experiments.studies import collective_accuracy as study
from stepsight.training.collectives.between_nodes import BetweenNodes
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.from_tables import CollectiveRows

SITE = study.SITES[0]
WORKS = [Collective("all_reduce", 1 << power, 8 * nodes, 8) for power in range(20, 30) for nodes in (2, 4, 16)]
TRUTH = BetweenNodes({}, {}, {}).seconds(WORKS, SITE.links)


def _rows(names: str) -> CollectiveRows:
    fabrics = (find_fabric(names),) * len(WORKS)
    return CollectiveRows(tuple(WORKS), fabrics, TRUTH, np.ones(len(WORKS), bool))


def test_a_site_is_left_out_whole() -> None:
    assert len(study._without(_rows("dgx-h100"), SITE, WORKS)) == 0
    assert len(study._without(_rows("dgx-a100"), SITE, WORKS)) == len(WORKS)


def test_what_is_fitted_is_not_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """The columns of a site that behaves as NCCL's constants say."""
    monkeypatch.setattr(study, "read_table", lambda format, path: None)
    monkeypatch.setattr(study, "_rows", lambda site, table: (WORKS, TRUTH))
    monkeypatch.setattr(study, "read_links", lambda recipe, data: (_rows("dgx-h100"), None))
    figures = study.figures_of(SITE, study.Path("."), Predictor.load("h100-sxm"))
    everything = figures[-1]
    assert (everything.rows, everything.calibrated_rows) == (30, 10)
    assert everything.unfitted == pytest.approx(0, abs=1e-9) and everything.left_out == pytest.approx(0, abs=1e-9)
    assert everything.calibrated is not None and everything.calibrated < 1
    assert sum(figure.rows for figure in figures[:-1]) == 30
    assert "calibrated" in study.collective_text(figures)


def test_a_site_of_small_groups_is_judged_by_its_larger_half() -> None:
    small = [replace(work, group_size=min(work.group_size, 32)) for work in WORKS]
    assert study._small(WORKS).sum() == 20 and study._small(small).sum() == 10
