"""Measurements of one device in a user's tables: its ops and collectives, by software."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import PredictorError, TableError
from stepsight.dataset.hardware.hardware import FABRICS, canonical_hardware, find_fabric, find_hardware
from stepsight.dataset.hardware.hardware_facts import Fabric, Hardware
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements
from stepsight.training.collectives.collective_models import label_of
from stepsight.training.corrections.corrector import rows_by
from stepsight.training.kernels.kernel_models import label
from stepsight.training.shipped.from_tables import CollectiveRows, OpRows, medians

Array = NDArray[np.float64]


@dataclass(frozen=True)
class OwnTable:
    """Measurements of one device."""

    hardware: Hardware  # its facts
    ops: OpRows  # distinct ops of each software; variants are places in software of the op's label
    software: Mapping[str, tuple[str, ...]]  # what ran the ops, by label; first what is predicted for
    collectives: CollectiveRows  # distinct ones of library
    library: str  # what ran the collectives; empty without any
    skipped: Mapping[str, int]  # rows that are not used, by reason

    def labels(self) -> list[str]:
        """Label of each op."""
        return [label(op.family, op, self.hardware) for op in self.ops.ops]

    def take(self, ops: NDArray[np.int64], collectives: NDArray[np.int64]) -> OwnTable:
        """Select some of the rows."""
        return replace(self, ops=self.ops.take(ops), collectives=self.collectives.take(collectives))

    def sample(self, most: int, seed: int) -> OwnTable:
        """Draw at most ``most`` shapes of each label, and four fifths of them: the rest judges."""
        rng = np.random.default_rng(seed)
        first = np.flatnonzero(self.ops.variants == 0)
        names = self.labels()
        kept = _draw([names[i] for i in first.tolist()], most, rng)
        links = _draw([label_of(work) for work in self.collectives.collectives], most, rng)
        return self.take(first[kept], links)

    def split(self, seed: int, folds: int = 5) -> tuple[OwnTable, OwnTable]:
        """Split into training rows, and the held-out rows of one in ``folds`` shapes."""
        held = held_out([shape_of(op) for op in self.ops.ops], seed, folds)
        links = held_out([shape_of(work) for work in self.collectives.collectives], seed, folds)
        kept = self.take(np.flatnonzero(~held), np.flatnonzero(~links))
        return kept, self.take(np.flatnonzero(held), np.flatnonzero(links))

    def shapes(self) -> list[Hashable]:
        """All shapes of the table."""
        return [*map(shape_of, self.ops.ops), *map(shape_of, self.collectives.collectives)]


def shape_of(work: Op | Collective) -> Hashable:
    """The unit of holding out: kind and sizes, in any precision and with any software."""
    if isinstance(work, Op):
        return work.kind, work.dims
    return work.kind, work.num_bytes, work.group_size, work.ranks_per_node


def own_table(table: Measurements, hardware: Hardware, software: str = "", fabric: str = "") -> OwnTable:
    """Rows of a device (those that name none count as its); ``software``: a part or pattern of the name of what to
    predict for, by default what ran most rows; ``fabric``: of collectives whose row names none. Raises ``TableError``
    if nothing is left, or no software matches.
    """
    mine = [index for index, device in enumerate(table.device) if device in ("", hardware.name)]
    if software and not any(_matches(table.software[index], software) for index in mine):
        known = ", ".join(sorted({table.software[index] for index in mine}))
        raise TableError(f"--software must match the software of some rows ({known:.400}), got {software!r:.80}")
    others = Counter(device for device in table.device if device not in ("", hardware.name))
    skipped = Counter({f"rows of another device ({name})": count for name, count in others.items()})
    ops, named = _ops(table, mine, hardware, software, skipped)
    collectives, library = _collectives(table, mine, software, fabric, skipped)
    if not len(ops) and not len(collectives):
        why = "; ".join(f"{count}: {reason}" for reason, count in skipped.items()) or "the table is empty"
        raise TableError(f"training needs rows of ops or collectives of {hardware.name}, got none ({why})")
    return OwnTable(hardware, ops, named, collectives, library, dict(skipped))


def find_own_hardware(table: Measurements, stated: str, like: str) -> Hardware:
    """The stated device, or the table's only one (``like``: a preset with its facts); else a ``TableError``."""
    if not len(table):
        raise TableError(f"training needs rows of ops or collectives, got an empty table ({dict(table.skipped)})")
    devices = sorted({device for device in table.device if device})
    if stated:
        found = find_hardware(canonical_hardware(stated))
        if found is None:
            rule = "--hardware must name a preset or a .toml or .json file of hardware facts"
            raise TableError(f"{rule}, got {stated!r:.80}")
        if len(devices) <= 1 or found.name in devices:  # the facts are of the only device, whatever its rows call it
            return found
        raise TableError(f"the table must hold rows of {found.name}, got {', '.join(devices)}")
    if len(devices) != 1:
        rule = "a table of several devices, or of none that is named, needs --hardware NAME"
        raise TableError(f"{rule}; got {', '.join(devices) or 'none'}")
    found = find_hardware(canonical_hardware(devices[0]))
    if found is None and like and (alike := find_hardware(like)) is not None:
        return replace(alike, name=devices[0], source=f"facts of {alike.name}, which it is said to be like")
    if found is None:
        told = f"unknown device {devices[0]!r:.80}: state its facts with --hardware FILE.toml"
        raise TableError(f"{told}, or name a preset with the same chip with --like")
    return found


def _ops(
    table: Measurements, mine: Sequence[int], hardware: Hardware, software: str, skipped: Counter[str]
) -> tuple[OpRows, dict[str, tuple[str, ...]]]:
    found: dict[tuple[Op, str], list[float]] = {}
    for index in mine:
        work = table.works[index]
        if not isinstance(work, Op):
            continue
        if work.record.bound == "compute" and work.dtype not in hardware.peak_flops:
            skipped[f"the facts of {hardware.name} state no peak for {work.dtype}"] += 1
            continue
        found.setdefault((work, table.software[index]), []).append(float(table.seconds[index]))
    _count_folded(found.values(), skipped)
    labels = {op: label(op.family, op, hardware) for op, _ in found}
    counts: dict[str, Counter[str]] = {}
    for op, name in found:
        counts.setdefault(labels[op], Counter())[name] += 1
    named = {
        of: tuple(sorted(count, key=lambda name, count=count: (not _matches(name, software), -count[name], name)))  # type: ignore[misc]
        for of, count in counts.items()
    }
    return OpRows.of({(op, named[labels[op]].index(name)): times for (op, name), times in found.items()}), named


def _collectives(
    table: Measurements, mine: Sequence[int], software: str, fabric: str, skipped: Counter[str]
) -> tuple[CollectiveRows, str]:
    rows = [index for index in mine if isinstance(table.works[index], Collective)]
    ran = Counter(table.software[index] for index in rows)
    # Sums within switches are not done in 8 bits: what training sends comes first.
    order = sorted(ran, key=lambda name: (not _matches(name, software), name.endswith("int8"), -ran[name], name))
    library = order[0] if order else ""
    found: dict[tuple[Collective, Fabric], list[float]] = {}
    for index in rows:
        work, links = table.works[index], table.fabric[index]
        assert isinstance(work, Collective)
        if table.software[index] != library:
            skipped[f"collectives of another library ({table.software[index]})"] += 1
        elif links not in FABRICS and not fabric:
            skipped[f"collectives on links of which nothing is known ({links!r}): state them with --fabric"] += 1
        else:
            key = (work, FABRICS[links] if links in FABRICS else find_fabric(fabric))
            found.setdefault(key, []).append(float(table.seconds[index]))
    _count_folded(found.values(), skipped)
    works, fabrics = tuple(work for work, _ in found), tuple(links for _, links in found)
    return CollectiveRows(works, fabrics, medians(found.values()), np.ones(len(found), dtype=np.bool_)), library


def _count_folded(times: Iterable[Sequence[float]], skipped: Counter[str]) -> None:
    if folded := sum(len(each) - 1 for each in times):
        skipped["folded into the median of equal rows"] += folded


def _matches(name: str, pattern: str) -> bool:
    return bool(pattern) and (pattern.lower() in name.lower() or fnmatchcase(name.lower(), pattern.lower()))


def _draw(names: Sequence[str], most: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw at most ``most`` rows of each name, and at most four fifths of them."""
    order = rng.permutation(len(names))
    drawn = [order[at] for at in rows_by(names[index] for index in order.tolist()).values()]
    kept = [own[: min(most, max(1, 4 * len(own) // 5))] for own in drawn]
    return np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *kept]))


def held_out(shapes: Sequence[Hashable], seed: int, folds: int, fewest: int = 0) -> NDArray[np.bool_]:
    """Rows of one in ``folds`` shapes, of ``fewest`` at least, ``(rows,)``."""
    distinct = list(dict.fromkeys(shapes))
    chosen = np.random.default_rng(seed).permutation(len(distinct))[: max(len(distinct) // folds, fewest)]
    left = {distinct[index] for index in chosen.tolist()}
    return np.array([shape in left for shape in shapes], dtype=np.bool_)


LONG_S = 50e-6  # launches and clocks blur shorter times


def family_figures(names: Sequence[str], predicted: Array, measured: Array) -> dict[str, dict[str, float | int | None]]:
    """Rows, and mean, median and 90th percentile of the error in percent, by name; also of what takes 50 us."""
    figures: dict[str, dict[str, float | int | None]] = {}
    for name, members in sorted(rows_by(names).items()):
        off = 100 * np.abs(predicted[members] / measured[members] - 1)
        long = off[measured[members] >= LONG_S]
        figures[name] = {
            "rows": len(off),
            "mape": float(off.mean()),
            "median": float(np.median(off)),
            "p90": float(np.quantile(off, 0.9)),
            "mape_over_50us": float(long.mean()) if len(long) else None,
        }
    return figures


def pack_shapes(shapes: Iterable[Hashable]) -> str:
    """Digests of shapes, as text for a manifest."""
    digests = np.array(sorted({_digest(shape) for shape in shapes}), dtype="<u8")
    return base64.b64encode(digests.tobytes()).decode("ascii")


def trained_on(manifest: Mapping[str, Any], shapes: Sequence[Hashable]) -> NDArray[np.bool_]:
    """Which shapes a predictor was trained on, by its manifest, ``(shapes,)``."""
    packed = manifest.get("trained_shapes", "")
    try:
        known = np.frombuffer(base64.b64decode(packed, validate=True), dtype="<u8")
    except (ValueError, TypeError):
        raise PredictorError(f"trained_shapes of a predictor must be base64 text, got {packed!r:.40}") from None
    return np.isin(np.array([_digest(shape) for shape in shapes], dtype="<u8"), known)


def _digest(shape: Hashable) -> int:
    return int.from_bytes(hashlib.blake2b(repr(shape).encode(), digest_size=8).digest(), "little")
