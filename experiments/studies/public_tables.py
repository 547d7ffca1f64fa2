"""Kernels and collectives of public tables, each predicted by what is left of the tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware.hardware import Fabric, Hardware, Link, find_fabric, find_hardware, roofline_seconds
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements, read_table
from stepsight.experiments.evaluation.table_errors import group_of
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.studies.study import Row, Study, cases
from stepsight.training.collectives.between_nodes import UNFITTED, BetweenNodes, fit_site, left_out_seconds
from stepsight.training.corrections.corrector import rows_by
from stepsight.training.fitting.own_table import family_figures, held_out
from stepsight.training.kernels.kernel_models import dtype_class, fit_kernels, op_rows
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.catalogue import RECIPES, read_recipe
from stepsight.training.shipped.from_tables import OpRows

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
FOLDS = 5  # a fifth of the shapes is held out
CALIBRATED_RANKS = 64


SPLITS: dict[str, dict[str, Callable[[Op], Hashable]]] = {
    "gemm": {"unseen n, k": lambda op: op.dims[1:]},
    "attention": {"unseen heads": lambda op: (*op.dims[1:3], op.dims[5])},  # heads, key-value heads and their size
}


def kernel_figures(name: str, rows: OpRows, hardware: Hardware, seed: int = 0) -> list[Row]:
    """Errors in percent of all families of one device on held-out shapes, with all splits; regressors are fitted on the
    others.
    """
    found = []
    for (family, precision), indices in rows_by([(op.family, dtype_class(op, hardware)) for op in rows.ops]).items():
        every = rows.take(np.array(indices))
        for split, group in {"random": lambda op: (op.kind, op.dims), **SPLITS.get(family, {})}.items():
            held = held_out([group(op) for op in every.ops], seed, FOLDS, fewest=1)
            kept, left = every.take(np.flatnonzero(~held)), every.take(np.flatnonzero(held))
            model = fit_kernels(kept.ops, 1, kept.seconds, hardware, variants=kept.variants, seed=seed, judged=False)
            predicted = model.regressor.seconds(op_rows(left.ops, hardware, 1, left.variants))
            ran = ["own" if variant == 0 else "others" for variant in left.variants.tolist()]
            # own: the software that the predictor predicts for
            own = family_figures(ran, predicted, left.seconds).get("own", dict.fromkeys(("mape", "mape_over_50us")))
            limits = np.array([roofline_seconds(op, hardware) for op in left.ops])
            label = f"{family}/{precision}" if precision else family
            figures = family_figures([label] * len(left), predicted, left.seconds)[label]
            figures |= {"own_mape": own["mape"], "long_mape": own["mape_over_50us"]}
            figures["roofline_mape"] = float(_off(limits, left.seconds).mean())
            found.append({"predictor": name, "ops": label, "split": split, **figures})
    return found


def _off(predicted: Array, measured: Array) -> Array:
    return np.asarray(100 * np.abs(predicted / measured - 1))


def run_kernels(options: argparse.Namespace) -> tuple[Any, str]:
    """Judge the kernels of every recipe."""
    figures = []
    for name, recipe in RECIPES.items():
        hardware = find_hardware(recipe.hardware)
        if options.only in (None, name) and hardware is not None:
            figures += kernel_figures(name, read_recipe(replace(recipe, lent={}), options.data)[0], hardware)
    columns = {"predictor": "predictor", "ops": "ops", "split": "split", "rows": "rows", "MAPE %": "mape",
               "median": "median", "p90": "p90", "own software": "own_mape", "own, long": "long_mape",
               "roofline": "roofline_mape"}  # fmt: skip
    return {"figures": figures}, table_of(figures, columns)


H100, TESTS = "h100-sxm", "collectives/nccl-tests-cluster"  # the predictor that is judged, and the table
SITES: Mapping[str, Fabric] = {  # with their links; the second states none, and its longest messages have 14 GB/s
    "cluster01": find_fabric("dgx-h100"),
    "cluster00": replace(find_fabric("dgx-h100"), name="cluster00", inter_node=Link(14e9, 10e-6)),
}


def collective_figures(
    site: str, works: Sequence[Collective], seconds: Array, links: Fabric, predictor: Predictor, start: BetweenNodes
) -> list[Row]:
    """Errors in percent of each class of one site's rows, and of all of them; ``start``: factors without the site."""
    small = small_groups(works)
    fitted = fit_site(start, [works[index] for index in np.flatnonzero(small).tolist()], links, seconds[small])
    models: dict[str, Any] = {"shipped": predictor.collective, "start": start, "calibrated": fitted}
    off = {name: _off(model.seconds(works, links), seconds) for name, model in models.items()}
    off["in_turn"] = _off(left_out_seconds(partial(fit_site, start), works, links, seconds), seconds)
    figures = []
    classes = sorted(rows_by(group_of(work, 0.0) for work in works).items())
    for (kind, size, ranks), index in [*classes, (("all", "", ""), np.arange(len(works)))]:
        judged = index[~small[index]]  # by the factors of the site's own small groups
        row = {"site": site, "kind": kind, "size": size, "ranks": ranks, "rows": len(index)}
        row |= {name: float(each[index].mean()) for name, each in off.items()}
        larger = {name: float(off[name][judged].mean()) if len(judged) else None for name in ("start", "calibrated")}
        row |= {"larger": larger["start"], "calibrated": larger["calibrated"], "calibrated_rows": len(judged)}
        figures.append(row)
    return figures


def site_rows(measured: Measurements, fabric: str = "") -> tuple[list[Collective], Array]:
    """Distinct collectives between the nodes of a site, and the median of their seconds; ``fabric``: its links, in a
    table of several sites.  Broadcasts are left out, since nccl-tests starts the next one before the last has ended.
    """
    found: dict[Collective, list[float]] = {}
    for work, links, seconds in zip(measured.works, measured.fabric, measured.seconds.tolist(), strict=True):
        if links.endswith(fabric) and isinstance(work, Collective) and work.num_nodes > 1 and work.kind != "broadcast":
            found.setdefault(work, []).append(seconds)
    return list(found), np.array([np.median(times) for times in found.values()])


def small_groups(works: Sequence[Collective]) -> Mask:
    """Rows of at most 64 ranks; if there are no others, those with fewer ranks than the median; of one layout, all."""
    ranks = np.array([work.group_size for work in works])
    most = CALIBRATED_RANKS if ranks.max() > CALIBRATED_RANKS else np.median(ranks) - 1
    return np.asarray((ranks <= most) | (ranks > most).all())


def run_collectives(options: argparse.Namespace) -> tuple[Any, str]:
    """Judge the collectives of every site: of the public table, or of folders of logs, FABRIC/SITE/LOGS."""
    predictor, figures = Predictor.load(options.predictor or H100), []
    for folder in sorted(options.logs.glob("*/*")) if options.logs else []:
        rows, start = site_rows(read_table("nccl-tests", folder)), predictor.collective.between or UNFITTED
        figures += collective_figures(folder.name, *rows, find_fabric(folder.parent.name), predictor, start)
    for site, links in {} if options.logs else SITES.items():
        rows = site_rows(read_table("nccl-tests", options.data / TESTS), site)
        figures += collective_figures(site, *rows, links, predictor, UNFITTED)
    columns = {"site": "site", "kind": "kind", "ranks": "ranks", "size": "size", "rows": "rows",
               "shipped %": "shipped", "without the site": "start", "in turn": "in_turn",
               "larger rows": "calibrated_rows", "larger": "larger", "calibrated": "calibrated"}  # fmt: skip
    return {"figures": figures}, table_of(figures, columns)


_DATA = {"--data": {"type": Path, "default": Path(), "help": "folder of the public tables"}}
_ONLY = {"--only": {"choices": list(RECIPES), "help": "one predictor's data"}}
KERNELS = Study("kernels", cases("about")["kernels"], run_kernels, {**_DATA, **_ONLY})
_PREDICTOR = {"--predictor": {"type": Path, "help": "folder of a predictor to judge in place of the shipped one"}}
_LOGS = {"--logs": {"type": Path, "help": "nccl-tests' logs to judge instead, as PRESET_OF_A_FABRIC/SITE/LOGS"}}
COLLECTIVES = Study("collectives", cases("about")["collectives"], run_collectives, {**_DATA, **_PREDICTOR, **_LOGS})
