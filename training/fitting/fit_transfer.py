"""Fit a device's ops and collectives on its own table and on the shipped predictors of other devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.hardware.hardware import Fabric, find_fabric, roofline_seconds, usual_fabric
from stepsight.dataset.kinds.op import Op
from stepsight.training.collectives.between_nodes import UNFITTED, fit_between_nodes
from stepsight.training.collectives.collective_models import CollectiveModel, fit_collectives, label_of
from stepsight.training.corrections.posterior import Correction, fit_correction
from stepsight.training.fitting.own_table import OwnTable
from stepsight.training.kernels.kernel_models import KernelModel, fit_kernels, label
from stepsight.training.kernels.transferred import Teacher, Transfer, measured_range, name_of
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.regression.regressor import Regressor
from stepsight.training.shipped.from_tables import CollectiveRows

Array = NDArray[np.float64]
Say = Callable[[str], None]
T = TypeVar("T")

ENOUGH = 2000  # fewest rows of a label for its own trees: B200 7.7 % against 8.5, L40S 9.4 against 12.5
FEWEST = 5  # fewest rows of a label and software for a correction


def fit_ops(own: OwnTable, teachers: Sequence[Teacher], like: str, *, seed: int, say: Say) -> KernelModel:
    """Fit a device's ops: by its own trees if it has many rows, else by other devices' predictors.

    Args:
        own: Its rows.
        teachers: Other devices' ops; none: everything is fitted from its own rows.
        like: Name of the teacher whose efficiency is the first guess; empty: the mean of all.
        seed: Of everything random.
        say: Reports progress.
    """
    names = np.array(own.labels(), dtype=object)
    counts = {name: int((names == name).sum()) for name in dict.fromkeys(names.tolist())}
    many = np.array([not teachers or counts[name] >= ENOUGH for name in names], dtype=np.bool_)
    kernel = KernelModel(own.hardware, Regressor({}, {}, {}, {}))
    if many.any():
        rows = own.ops.take(np.flatnonzero(many))
        say(f"trees: {len(rows)} ops of {', '.join(dict.fromkeys(names[many].tolist()))}")
        kernel = fit_kernels(
            rows.ops, 1, rows.seconds, own.hardware, variants=rows.variants, seed=seed, judged=not teachers
        )
    transfer = Transfer(own.hardware, tuple(teachers), like)
    posteriors, support = {}, {}
    for name, index in _groups(own, names, ~many).items():
        rows = own.ops.take(np.array(index))
        say(f"transfer: {len(rows)} ops of {name}")
        posteriors[name] = _correct(transfer, rows.ops, rows.seconds, seed)
        support[name] = measured_range(rows.ops)
    return replace(
        kernel,
        derives=own.hardware.kind == "gpu",
        software=dict(own.software),
        transfer=replace(transfer, posteriors=posteriors, support=support) if teachers else None,
    )


def _groups(own: OwnTable, names: NDArray[np.object_], few: NDArray[np.bool_]) -> dict[str, list[int]]:
    """Rows of each label and software with enough rows for a correction."""
    found: dict[str, list[int]] = {}
    for index in np.flatnonzero(few).tolist():
        found.setdefault(name_of(names[index], int(own.ops.variants[index])), []).append(index)
    return {name: index for name, index in found.items() if len(index) >= FEWEST}


def _correct(transfer: Transfer, ops: Sequence[Op], seconds: Array, seed: int) -> Correction:
    """The correction of ops of one label, in any precision."""
    roofline = np.array([roofline_seconds(op, transfer.hardware) for op in ops])
    residuals, blocks = np.log(seconds / roofline), []
    order: list[int] = []
    for dtype in dict.fromkeys(op.dtype for op in ops):
        index = [place for place, op in enumerate(ops) if op.dtype == dtype]
        base, rows = transfer.rows_of([ops[place] for place in index])
        residuals[index] -= base
        blocks.append(rows)
        order += index
    rows = {term: np.concatenate([block[term] for block in blocks]) for term in blocks[0]}
    return fit_correction(rows, residuals[order], seconds[order], seed)


def fit_links_of(rows: CollectiveRows, lender: Predictor, *, seed: int) -> CollectiveModel:
    """Fit a device's collectives; kinds that were not measured on it come from another device's links.

    Args:
        rows: Measured on it.
        lender: A predictor of the package, whose links are the nearest.
        seed: Of everything random.
    """
    other = lender.collective
    across = np.array([work.num_nodes > 1 for work in rows.collectives], dtype=np.bool_)
    within, between = rows.take(np.flatnonzero(~across)), rows.take(np.flatnonzero(across))
    model = fit_collectives(within.collectives, within.fabrics, within.seconds, seed=seed, nccl=True)
    own, base = model.regressor, other.regressor

    def both(mine: Mapping[str, T], lent: Mapping[str, T]) -> dict[str, T]:
        return {**{name: part for name, part in lent.items() if name not in own.physics}, **mine}

    regressor = replace(
        own,
        physics=both(own.physics, base.physics),
        trees=both(own.trees, base.trees),
        neighbours=both(own.neighbours, base.neighbours),
        support=both(own.support, base.support),
    )
    nodes = other.between
    if len(between):
        nodes = fit_between_nodes(between.collectives, between.fabrics, between.seconds, start=other.between)
    measured = {label_of(work) for work in rows.collectives}
    carried = tuple(sorted(set(other.labels) - measured))
    return replace(model, regressor=regressor, between=nodes or UNFITTED, carried=carried)


def nearest_links(fabric: Fabric, predictors: Sequence[Predictor]) -> Predictor:
    """The predictor whose device has the most similar usual links within a node."""

    def distance(predictor: Predictor) -> float:
        links = find_fabric(usual_fabric(predictor.hardware.name)).intra_node
        return abs(float(np.log(links.bandwidth_bytes_per_s / fabric.intra_node.bandwidth_bytes_per_s)))

    return min(predictors, key=distance)


def label_of_work(op: Op, model: KernelModel) -> str:
    """Family of an op, with the precision if it has its own kernels."""
    return label(op.family, op, model.hardware)
