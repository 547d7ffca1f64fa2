"""Train a predictor on tables: rows of the device, and rows of other devices for kinds that it lacks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.hardware.hardware import Fabric, Hardware, find_fabric, roofline_seconds
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements
from stepsight.training.collectives.between_nodes import UNFITTED, fit_between_nodes
from stepsight.training.collectives.collective_models import CollectiveModel, fit_collectives, label_of
from stepsight.training.corrections.corrector import rows_by
from stepsight.training.kernels.kernel_models import (
    MAX_LOG_RATIO,
    MIN_LOG_RATIO,
    KernelModel,
    Ratio,
    base_of,
    fit_kernels,
)

Array = NDArray[np.float64]

MIN_EVIDENCE = 4  # fewest rows of a kind, and of its base, for a ratio
CLOSE = 1.05  # sizes of one collective closer than this count as equal


def medians(times: Iterable[Sequence[float]]) -> Array:
    return np.array([np.median(each) for each in times], dtype=np.float64)


@dataclass(frozen=True)
class OpRows:
    """Distinct measured ops, shapes ``(rows,)``: the median where an op was measured several times."""

    ops: tuple[Op, ...]  # signatures
    seconds: Array  # of one call
    variants: NDArray[np.int64]  # which group of software ran it; 0 is the one to predict for

    @classmethod
    def of(cls, times: Mapping[tuple[Op, int], Sequence[float]]) -> OpRows:
        """The median of the times of each op and variant."""
        variants = np.array([variant for _, variant in times], dtype=np.int64)
        return cls(tuple(op for op, _ in times), medians(times.values()), variants)

    def __len__(self) -> int:
        return len(self.ops)

    def take(self, index: NDArray[np.int64]) -> OpRows:
        return OpRows(tuple(self.ops[i] for i in index), self.seconds[index], self.variants[index])


def op_table(table: Measurements, device: str, software: Sequence[str]) -> OpRows:
    """Ops of one device; ``software``: patterns of what ran them and of its precision, first what to predict for."""
    groups = [re.compile(pattern) for pattern in software]
    variants: dict[str, int] = {}
    found: dict[tuple[Op, int], list[float]] = {}
    for work, seconds, where, name in zip(table.works, table.seconds, table.device, table.software, strict=True):
        if isinstance(work, Op) and where == device:
            ran = f"{name} {work.dtype}"
            if ran not in variants:
                variants[ran] = next((index for index, group in enumerate(groups) if group.search(ran)), -1)
            variant = variants[ran]
            if variant >= 0:
                found.setdefault((work, variant), []).append(float(seconds))
    return OpRows.of(found)


def sample(labels: Sequence[str], most: int) -> NDArray[np.int64]:
    """Up to ``most`` rows of each label, drawn at random."""
    order = np.random.default_rng(0).permutation(len(labels)).tolist()
    drawn = rows_by(labels[index] for index in order)
    return np.sort(np.concatenate([np.array(order)[places[:most]] for places in drawn.values()]))


def in_known_precisions(table: Measurements, hardware: Hardware) -> Measurements:
    """The rows but for products in a precision of which the hardware states no peak; those count as skipped."""
    products = [isinstance(work, Op) and work.record.bound == "compute" and work for work in table.works]
    known = np.array([not op or op.dtype in hardware.peak_flops for op in products], dtype=np.bool_)
    why = f"the facts of {hardware.name} state no peak for their precision"
    skipped = {**table.skipped, **({why: int((~known).sum())} if not known.all() else {})}
    return replace(table.take(known), skipped=skipped)


def lend(table: Measurements, lender: Hardware, hardware: Hardware) -> Measurements:
    """Ops of a device as if measured on another one with the same chip: times scaled by the ratio of rooflines."""
    own = table.where(device=lender.name)
    ops = [work for work in own.works if isinstance(work, Op)]
    longer = np.array([roofline_seconds(op, hardware) / roofline_seconds(op, lender) for op in ops], dtype=np.float64)
    return replace(own, seconds=own.seconds * longer, device=(hardware.name,) * len(own))


def fit_table(rows: OpRows, hardware: Hardware, others: Measurements, *, seed: int = 0) -> KernelModel:
    """Fit one device's ops.

    ``rows``: measured on it.  ``hardware``: the device; kinds that were not measured stream at its bandwidth, or run at
    its roofline.  ``others``: rows of other devices, for ratios of kinds that ``rows`` lacks.  Raises ``TableError`` if
    there are no rows.
    """
    if not len(rows):
        raise TableError(f"fitting {hardware.name} needs measured ops of it, got none")
    model = fit_kernels(rows.ops, 1, rows.seconds, hardware, variants=rows.variants, seed=seed)
    model = replace(model, derives=True, hardware=hardware)
    return replace(model, ratios=fit_ratios(model, others))


def fit_ratios(model: KernelModel, others: Measurements) -> dict[str, Ratio]:
    """Slowdown relative to the base of each kind that a device lacks, from devices that have both.

    A device is compared with itself: what a kind takes there over what the model says of its base, against what the
    base itself takes there over it; sums over ops, so that the long ones count.  Devices count alike.
    """
    rows = [index for index, work in enumerate(others.works) if isinstance(work, Op)]
    ops = [work for work in others.works if isinstance(work, Op)]
    predicted = model.seconds(ops, 1)
    sums: dict[tuple[str, str], Array] = {}
    for index, op, seconds in zip(rows, ops, predicted, strict=True):
        key = (others.device[index], op.kind)
        sums.setdefault(key, np.zeros(3))[:] += (others.seconds[index], seconds, 1)
    ratios = {}
    for example in {op.kind: op for op in ops}.values():
        base = base_of(example, model.hardware)
        if base is None or example.kind in model.regressor.physics:
            continue
        found = {
            device: float(np.log(own[0] / own[1]) - np.log(its[0] / its[1]))
            for (device, kind), own in sums.items()
            if kind == example.kind
            and (its := sums.get((device, base.kind), np.zeros(3)))[2] >= MIN_EVIDENCE
            and own[2] >= MIN_EVIDENCE
        }
        if found:
            log_ratio = float(np.clip(np.mean(list(found.values())), MIN_LOG_RATIO, MAX_LOG_RATIO))
            ratios[example.kind] = Ratio(round(log_ratio, 4), f"a ratio measured on {' and '.join(sorted(found))}")
    return ratios


@dataclass(frozen=True)
class CollectiveRows:
    """Distinct measured collectives, shapes ``(rows,)``: the median where one was measured several times."""

    collectives: tuple[Collective, ...]  # signatures
    fabrics: tuple[Fabric, ...]  # the links of each
    seconds: Array  # of one call
    own: NDArray[np.bool_]  # whether it was measured on the device itself, rather than on another one's links

    def __len__(self) -> int:
        return len(self.collectives)

    def take(self, index: NDArray[np.int64]) -> CollectiveRows:
        pick = index.tolist()
        collectives, fabrics = (tuple(column[i] for i in pick) for column in (self.collectives, self.fabrics))
        return CollectiveRows(collectives, fabrics, self.seconds[index], self.own[index])


def collective_table(
    table: Measurements, device: str, lenders: Sequence[str], links: Mapping[str, str], software: str
) -> CollectiveRows:
    """Collectives of a device (and of lenders) within its nodes, and of all devices between nodes, by what ``software``
    ran; ``links``: preset of each name of a fabric, rows on others are left out.
    """
    found: dict[tuple[Collective, str], list[tuple[float, bool]]] = {}
    columns = (table.works, table.seconds, table.device, table.fabric, table.software)
    for work, seconds, where, fabric, name in zip(*columns, strict=True):
        if not isinstance(work, Collective) or fabric not in links or not re.search(software, name):
            continue
        if where in (device, *lenders) or work.num_nodes > 1:
            found.setdefault((work, links[fabric]), []).append((float(seconds), where == device))
    newest: dict[tuple[object, ...], int] = {}
    kept = []
    for work, fabric in sorted(found, key=lambda key: (key[1], key[0].kind, key[0].num_bytes)):
        group = (fabric, work.kind, work.group_size, work.ranks_per_node)
        if work.num_bytes >= CLOSE * newest.get(group, 0):
            newest[group] = work.num_bytes
            kept.append((work, fabric))
    return CollectiveRows(
        tuple(work for work, _ in kept),
        tuple(find_fabric(fabric) for _, fabric in kept),
        medians([seconds for seconds, _ in found[key]] for key in kept),
        np.array([any(own for _, own in found[key]) for key in kept], dtype=np.bool_),
    )


def fit_links(rows: CollectiveRows, *, seed: int = 0, lender: CollectiveModel | None = None) -> CollectiveModel:
    """Fit NCCL's collectives; kinds that were measured only on other links are marked.

    ``lender``: answers for kinds that ``rows`` lack, and its factors are the prior between nodes.
    """
    across = np.array([c.num_nodes > 1 for c in rows.collectives], dtype=np.bool_)
    within, between = rows.take(np.flatnonzero(~across)), rows.take(np.flatnonzero(across))
    model = fit_collectives(within.collectives, within.fabrics, within.seconds, seed=seed, nccl=True)
    nodes = UNFITTED if lender is None or lender.between is None else lender.between
    if len(between):
        start = None if lender is None else lender.between
        nodes = fit_between_nodes(between.collectives, between.fabrics, between.seconds, start=start)
    measured = {label_of(c) for c, own in zip(rows.collectives, rows.own, strict=True) if own}
    known, regressor = set(map(label_of, rows.collectives)), model.regressor
    if lender is not None:
        known |= set(lender.labels)
        parts: dict[str, Any] = {}
        for part in ("physics", "trees", "neighbours", "support"):
            lent, own = getattr(lender.regressor, part), getattr(regressor, part)
            parts[part] = {**{label: of for label, of in lent.items() if label not in regressor.physics}, **own}
        regressor = replace(regressor, **parts)
    return replace(model, regressor=regressor, between=nodes, carried=tuple(sorted(known - measured)))


LEAST_ROWS, LEAST_SIDE = 4096, 1024  # fewest products that are long enough for an estimate
CONVERSION_ROWS = 20
MOST_BYTES = 12.0  # memory traffic per element: three passes and their writes, at a low bandwidth


def products_alone(table: Measurements, hardware: Hardware) -> Measurements:
    """The same rows, with 8-bit products without the conversion of their input.

    What an element's conversion takes is found for every device and software from their own rows, and is bounded by
    what memory needs for it; nothing becomes faster than the roofline at the device's peaks.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, work in enumerate(table.works):
        if isinstance(work, Op) and work.kind == "linear" and work.dtype == "fp8":
            groups.setdefault((table.device[index], table.software[index]), []).append(index)
    seconds = table.seconds.copy()
    for (device, _), rows in groups.items():
        if device == hardware.name:
            dims = np.array([table.works[i].dims for i in rows], dtype=np.float64)  # type: ignore[union-attr]
            m, n, k = dims.T
            computed, moved = 2 * m * n * k / hardware.flops_per_s("fp8"), m * k + n * k + m * n
            least = np.maximum(computed, moved / hardware.memory_bandwidth_bytes_per_s)
            without = seconds[rows] - conversion_seconds(dims, seconds[rows], hardware) * m * k
            seconds[rows] = np.minimum(seconds[rows], np.maximum(without, least))
    return replace(table, seconds=seconds)


def conversion_seconds(dims: Array, seconds: Array, hardware: Hardware) -> float:
    """Time of the conversion per element of the input of products ``m, n, k``; 0 if too few rows show it."""
    m, n, k = dims.T
    long = (m >= LEAST_ROWS) & (n >= LEAST_SIDE) & (k >= LEAST_SIDE)
    if long.sum() < CONVERSION_ROWS or len(set(n[long])) < 2:
        return 0.0
    terms = np.stack([m * k, m * n * k], axis=1)[long] / seconds[long, None]  # errors relative to the time
    (element, _), *_ = np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)
    return float(np.clip(element, 0.0, MOST_BYTES / hardware.memory_bandwidth_bytes_per_s))
