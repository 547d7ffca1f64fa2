"""Kernels, collectives and whole devices of public tables, each predicted by what is left of the tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware.hardware import Fabric, Hardware, Link, find_fabric, find_hardware, roofline_seconds
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements, read_table
from stepsight.experiments.evaluation.table_errors import group_of
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.studies.study import Row, Study
from stepsight.training.collectives.between_nodes import UNFITTED, fit_site
from stepsight.training.fitting.own_table import LONG_S
from stepsight.training.kernels.kernel_models import dtype_class, fit_kernels, op_rows
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.catalogue import RECIPES, read_links, read_recipe
from stepsight.training.shipped.from_tables import CollectiveRows, OpRows, fit_links

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
FOLDS = 5  # a fifth of the shapes is held out
CALIBRATED_RANKS = 64
JUDGED = 3000  # products that judge each fit of a transfer


# --- kernels ----------------------------------------------------------------------------------------------------------


SPLITS: dict[str, dict[str, Callable[[Op], Hashable]]] = {
    "gemm": {"unseen n, k": lambda op: op.dims[1:]},
    "attention": {"unseen heads": lambda op: (*op.dims[1:3], op.dims[5])},  # heads, key-value heads and their size
}


def kernel_figures(name: str, rows: OpRows, hardware: Hardware, seed: int = 0) -> list[Row]:
    """Errors in percent of all families of one device on held-out shapes, with all splits."""
    families: dict[tuple[str, str], list[int]] = {}
    for index, op in enumerate(rows.ops):
        families.setdefault((op.family, dtype_class(op, hardware)), []).append(index)
    found = []
    for (family, precision), indices in families.items():
        own = rows.take(np.array(indices))
        for split, group in {"random": lambda op: (op.kind, op.dims), **SPLITS.get(family, {})}.items():
            held = held_out([group(op) for op in own.ops], seed)
            label = f"{family}/{precision}" if precision else family
            found.append({"predictor": name, "ops": label, "split": split, **_kernel_errors(own, held, hardware, seed)})
    return found


def held_out(groups: Sequence[Hashable], seed: int) -> Mask:
    """Rows of a fifth of the groups, ``(rows,)``."""
    distinct = list(dict.fromkeys(groups))
    chosen = np.random.default_rng(seed).permutation(len(distinct))[: max(len(distinct) // FOLDS, 1)]
    left = {distinct[index] for index in chosen.tolist()}
    return np.array([group in left for group in groups], dtype=np.bool_)


def _kernel_errors(rows: OpRows, held: Mask, hardware: Hardware, seed: int) -> Row:
    """Fit regressors on the rows that are not held out, and compare the others with their predictions."""
    kept, left = rows.take(np.flatnonzero(~held)), rows.take(np.flatnonzero(held))
    model = fit_kernels(kept.ops, 1, kept.seconds, hardware, variants=kept.variants, seed=seed, judged=False)
    off = _off(model.regressor.seconds(op_rows(left.ops, hardware, 1, left.variants)), left.seconds)
    own = left.variants == 0  # of the software that the predictor predicts for
    return {
        "rows": len(left),
        "mape": float(off.mean()),
        "median": float(np.median(off)),
        "p90": float(np.percentile(off, 90)),
        "own_mape": _mean(off[own]),
        "long_mape": _mean(off[own & (left.seconds >= LONG_S)]),
        "roofline_mape": _mean(_off(np.array([roofline_seconds(op, hardware) for op in left.ops]), left.seconds)),
    }


def _off(predicted: Array, measured: Array) -> Array:
    return np.asarray(100 * np.abs(predicted / measured - 1))


def _mean(off: Array) -> float | None:
    return float(off.mean()) if len(off) else None


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


# --- collectives between nodes ----------------------------------------------------------------------------------------


class Site(NamedTuple):
    """Measurements between the nodes of one cluster: its table, the links that are stated, and the predictor."""

    name: str
    path: str
    links: Fabric
    predictor: str


# The links of ``cluster00`` are not stated: 14 GB/s are the bandwidth of its longest messages.
_H100, _TESTS = find_fabric("dgx-h100"), "collectives/nccl-tests-cluster"
SITES = (
    Site("cluster01", _TESTS, _H100, "h100-sxm"),
    Site("cluster00", _TESTS, replace(_H100, name="cluster00", inter_node=Link(14e9, 10e-6)), "h100-sxm"),
)


def collective_figures(site: Site, data: Path, predictor: Predictor) -> list[Row]:
    """Errors in percent of each class of one site's rows, and of all of them."""
    works, seconds = site_rows(site, read_table("nccl-tests", data / site.path))
    small = small_groups(works)
    links, _ = read_links(RECIPES[site.predictor], data)
    others = fit_links(without(links, site, works)).between
    assert others is not None
    own = [work for work, fitted in zip(works, small, strict=True) if fitted]
    models: dict[str, Any] = {
        "shipped": predictor.collective,
        "left_out": others,
        "unfitted": UNFITTED,
        "calibrated": fit_site(others, own, site.links, seconds[small]),
    }
    off = {name: _off(model.seconds(works, site.links), seconds) for name, model in models.items()}
    classes: dict[tuple[str, str, str], list[int]] = {}
    for place, work in enumerate(works):
        classes.setdefault(group_of(work, 0.0), []).append(place)
    figures = []
    for (kind, size, ranks), index in [*sorted(classes.items()), (("all", "", ""), list(range(len(works))))]:
        judged = [each for each in index if not small[each]]
        row = {"site": site.name, "kind": kind, "size": size, "ranks": ranks, "rows": len(index)}
        row |= {name: _mean(off[name][judged if name == "calibrated" else index]) for name in models}
        figures.append({**row, "calibrated_rows": len(judged)})
    return figures


def site_rows(site: Site, measured: Measurements) -> tuple[list[Collective], Array]:
    """Distinct collectives between the nodes of a site, and the median of their seconds."""
    found: dict[Collective, list[float]] = {}
    for work, fabric, seconds in zip(measured.works, measured.fabric, measured.seconds, strict=True):
        if fabric == f"nccl-tests-example-{site.name}" and isinstance(work, Collective) and work.num_nodes > 1:
            found.setdefault(work, []).append(float(seconds))
    return list(found), np.array([np.median(times) for times in found.values()])


def small_groups(works: Sequence[Collective]) -> Mask:
    """Rows of at most 64 ranks; if there are no others, those with fewer ranks than the median."""
    ranks = np.array([work.group_size for work in works])
    most = CALIBRATED_RANKS if ranks.max() > CALIBRATED_RANKS else np.median(ranks) - 1
    return np.asarray(ranks <= most)


def without(links: CollectiveRows, site: Site, works: Sequence[Collective]) -> CollectiveRows:
    """Rows without those of a site, which are the ones that equal its own on its own links."""
    own, pairs = set(works), zip(links.collectives, links.fabrics, strict=True)
    kept = [index for index, (work, fabric) in enumerate(pairs) if not (work in own and fabric == site.links)]
    return links.take(np.array(kept, dtype=np.int64))


def run_collectives(options: argparse.Namespace) -> tuple[Any, str]:
    """Judge the collectives of every site."""
    figures = []
    for site in SITES:
        figures += collective_figures(site, options.data, Predictor.load(options.predictor or site.predictor))
    columns = {"site": "site", "kind": "kind", "ranks": "ranks", "size": "size", "rows": "rows",
               "shipped %": "shipped", "left out": "left_out", "unfitted": "unfitted",
               "not fitted": "calibrated_rows", "calibrated": "calibrated"}  # fmt: skip
    return {"figures": figures}, table_of(figures, columns)


_DATA = {"--data": {"type": Path, "required": True, "help": "folder of the public tables"}}
KERNELS = Study(
    "kernels",
    "Compare predicted with measured times of kernels, on held-out shapes of public tables. "
    "A fifth of the shapes is held out in turn: shapes at random, and all shapes of some weights (n and k of a "
    "product) or heads (of an attention), for every software that ran them. The roofline is that of the preset.",
    run_kernels,
    {**_DATA, "--only": {"choices": list(RECIPES), "help": "one predictor's data"}},
)
COLLECTIVES = Study(
    "collectives",
    "Compare predicted with measured times of collectives between nodes, at held-out sites. "
    "Columns: the shipped predictor (it may have learned from this site), the same trained without the site, NCCL's "
    "constants with nothing fitted, and factors fitted on the site's own rows of at most 64 ranks, or of its smaller "
    "half where it has no more. The last column judges only the rows that were not fitted.",
    run_collectives,
    {**_DATA, "--predictor": {"type": Path, "help": "folder of a predictor to judge in place of the shipped one"}},
)
