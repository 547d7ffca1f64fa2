"""Similarity of two jobs, for corrections: similar jobs have similar errors.

What a simulator gets wrong about a job (an unmodelled kernel, a habit of the framework) depends on the shapes of its
ops, on precision, strategy and software, and hardly on the number of devices.  So likeness falls with the distance
between shapes, in doublings, and not with size; that a correction drifts with size is a small part of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.job.job import Job

Array = NDArray[np.float64]

# Doublings of each quantity that correspond to one unit of distance.
SCALES = {
    "hidden": 1.0,
    "layers": 2.0,
    "seq_len": 1.0,
    "micro_batch_tokens": 1.5,
    "head_dim": 0.5,
    "kv_heads_share": 2.0,
    "ffn_over_hidden": 0.5,
    "tp": 1.0,
    "pp": 1.5,
    "cp": 1.0,
    "ep": 1.0,
    "virtual_stages": 2.0,
}
# Distance between jobs that differ in one of these.
UNLIKE = {"software": 0.7, "device": 0.7, "precision": 1.0, "recompute": 1.0, "family": 1.0, "mixture": 2.0}
NEAR, WIDE = 1.0, 3.0  # distances at which two kinds of similarity fall to exp(-1/2)
NEAR_PART, WIDE_PART, DRIFT_PART = 0.7, 0.3, 0.05  # shares of the variance
MOST_DOUBLINGS = 1000.0  # larger numbers are typing mistakes
DRIFT_DOUBLINGS = 2.0  # doublings of the number of devices over which a correction's drift decorrelates


@dataclass(frozen=True, slots=True)
class Likeness:
    """The features of a job that its similarity depends on.

    Attributes:
        place: Doublings over ``SCALES``, ``(len(SCALES),)``.
        labels: In the order of ``UNLIKE``.
        doublings: Of one device.
    """

    place: tuple[float, ...]
    labels: tuple[str, ...]
    doublings: float

    @classmethod
    def of(cls, job: Job, software: str = "") -> Likeness:
        """Features of a job; ``software`` names the framework in any words, empty: unknown."""
        m, p, batch = job.model, job.parallel, job.batch
        tokens = batch.micro_batch * m.seq_len / p.cp
        kv_share = (m.kv_heads or m.heads) / m.heads
        values = (
            m.hidden, m.layers, m.seq_len, tokens, m.head_size, kv_share,
            (m.expert_ffn or m.ffn or 4 * m.hidden) / m.hidden, p.tp, p.pp, p.cp, p.ep, p.virtual_stages,
        )  # fmt: skip
        place = np.log2(np.array(values, float)) / np.array(list(SCALES.values()))
        mixture = "mixture" if m.experts else "dense"
        labels = (software, job.hardware_name, batch.precision, p.recompute, m.family, mixture)
        return cls(tuple(place.tolist()), labels, float(np.log2(job.cluster.num_devices)))

    def to_dict(self) -> dict[str, object]:
        return {"place": list(self.place), "labels": list(self.labels), "doublings": self.doublings}

    @classmethod
    def from_dict(cls, value: dict[str, object]) -> Likeness:
        place, labels = value["place"], value["labels"]
        if not isinstance(place, list) or not isinstance(labels, list):
            raise ValueError(f"place and labels must be lists, got {place!r:.40} and {labels!r:.40}")
        if (len(place), len(labels)) != (len(SCALES), len(UNLIKE)):
            raise ValueError(f"{len(SCALES)} places and {len(UNLIKE)} labels must be there, got {place} and {labels}")
        numbers = tuple(map(float, [*place, value["doublings"]]))
        if not all(abs(number) <= MOST_DOUBLINGS for number in numbers):
            raise ValueError(f"places and doublings must lie within +-{MOST_DOUBLINGS:g}, got {numbers}")
        return cls(numbers[:-1], tuple(map(str, labels)), numbers[-1])


def covariance(one: Sequence[Likeness], two: Sequence[Likeness]) -> Array:
    """Covariance of unit-variance corrections, ``(len(one), len(two))``; 1 for a job with itself."""
    places, others = np.array([row.place for row in one]), np.array([row.place for row in two])
    squared = ((places[:, None] - others[None]) ** 2).sum(axis=2)
    for index, distance in enumerate(UNLIKE.values()):
        left, right = (np.array([row.labels[index] for row in rows]) for rows in (one, two))
        squared += distance**2 * (left[:, None] != right[None])
    sizes, counts = np.array([row.doublings for row in one]), np.array([row.doublings for row in two])
    near = np.exp(-squared / (2 * NEAR**2))
    drift = near * np.exp(-np.abs(sizes[:, None] - counts[None]) / DRIFT_DOUBLINGS)
    wide = np.exp(-squared / (2 * WIDE**2))
    own = NEAR_PART - DRIFT_PART
    return np.asarray(own * near + DRIFT_PART * drift + WIDE_PART * wide)
