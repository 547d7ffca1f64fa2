"""Ops of a device with few measurements: other devices' efficiency at its roofline, and a correction.

``seconds(op) = roofline(op) * exp(efficiency(op) + correction(op))``.  The efficiency (log of time over roofline) is
that of predictors that come with the package, the teachers: their mean, or that of the device that is said to be alike.
The correction is one Gaussian process for each family and precision (``posterior``), which sees the teachers'
efficiencies, the op's shape, its tiles on this device's processors, and this device's roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.hardware.hardware import Hardware, roofline_seconds
from stepsight.dataset.kinds.op import Op
from stepsight.features.named_columns import columns_of
from stepsight.features.op_features import op_feature_names, op_features
from stepsight.training.corrections.corrector import Support
from stepsight.training.corrections.posterior import LINEAR, Correction
from stepsight.training.kernels.kernel_models import OUTSIDE, KernelModel, label
from stepsight.training.regression.regressor import rows_by

Array = NDArray[np.float64]
_COLUMNS = {
    "shape": ("log_dim", "log_tiles_per_processor"),
    "tiles": ("log_waste_",),
    "roofline": ("log_roofline_s", "log_intensity"),
}


def own_columns() -> dict[str, tuple[str, ...]]:
    """Features of ops that each term of the covariance reads."""
    return {term: tuple(n for n in op_feature_names() if n.startswith(starts)) for term, starts in _COLUMNS.items()}


@dataclass(frozen=True, eq=False)
class Teacher:
    """A shipped predictor whose efficiencies are used.

    Attributes:
        name: Of the predictor.
        digest: Of it, as its manifest says.
        kernel: Its ops.
    """

    name: str
    digest: str
    kernel: KernelModel

    def efficiency(self, ops: Sequence[Op]) -> Array:
        """Log of time over roofline of each op, ``(ops,)``."""
        roofline = [roofline_seconds(op, self.kernel.hardware) for op in ops]
        return np.asarray(np.log(self.kernel.seconds(ops, 1) / np.array(roofline)))

    def knows(self, op: Op) -> bool:
        """Whether its device supports the op's precision."""
        return op.record.bound != "compute" or op.dtype in self.kernel.hardware.peak_flops


@dataclass(frozen=True, eq=False)
class Transfer:
    """Ops by other devices' efficiency and by the measured ones.

    Attributes:
        hardware: The device.
        teachers: Whose efficiencies count.
        like: Name of the teacher whose efficiency is the first guess; empty: the mean of all.
        posteriors: Corrections by label and software (``name_of``).
        support: Lowest and highest log dims that were measured, by label and software.
        columns: Features that each term of the covariance reads.
    """

    hardware: Hardware
    teachers: tuple[Teacher, ...]
    like: str = ""
    posteriors: Mapping[str, Correction] = field(default_factory=dict)
    support: Mapping[str, Support] = field(default_factory=dict)
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=own_columns)

    def seconds(self, ops: Sequence[Op], variants: Sequence[int] | NDArray[np.int64] | int = 0) -> Array:
        """Seconds of each op, ``(ops,)``.

        Args:
            ops: Of any kinds.
            variants: Which software runs each; 0 is the one to predict for.
        """
        seconds = np.array([roofline_seconds(op, self.hardware) for op in ops], dtype=np.float64)
        which = np.broadcast_to(np.asarray(variants), (len(ops),)).tolist()
        groups = rows_by((self._posterior_name(op, variant), op.dtype) for op, variant in zip(ops, which, strict=True))
        for (name, _), members in groups.items():
            base, rows = self.rows_of([ops[index] for index in members])
            seconds[members] *= np.exp(base)
            if name in self.posteriors:
                seconds[members] *= np.exp(self.posteriors[name].mean(rows, seconds[members]))
        return seconds

    def rows_of(self, ops: Sequence[Op]) -> tuple[Array, dict[str, Array]]:
        """First estimate of the log-efficiency, ``(ops,)``, and the posterior's columns, of ops of one precision."""
        known = [teacher for teacher in self.teachers if teacher.knows(ops[0])]
        told = np.zeros((len(ops), len(self.teachers)))
        for column, teacher in enumerate(self.teachers):
            if teacher in known:
                told[:, column] = teacher.efficiency(ops)
        guessing = [i for i, t in enumerate(self.teachers) if t in known and self.like in ("", t.name)]
        guessing = guessing or [i for i, t in enumerate(self.teachers) if t in known]
        base = told[:, guessing].mean(axis=1) if guessing else np.zeros(len(ops))
        names, features = op_feature_names(), op_features(ops, self.hardware, 1)
        rows = {LINEAR: np.column_stack([np.where(told == 0.0, 0.0, told - base[:, None]), base])}
        rows |= {term: features[:, columns_of(wanted, names, "a transfer")] for term, wanted in self.columns.items()}
        return base, rows

    def unsupported(self, op: Op) -> str:
        """Why an op lies outside the measured range; empty if it lies within."""
        name = self._posterior_name(op, 0)
        if name not in self.posteriors:
            return f"{op}: no {op.kind} was measured; predicted from other devices' efficiency"
        low, high = self.support[name]
        place = _place(op)[: len(low)]
        excess = float(Support(low[: len(place)], high[: len(place)]).beyond(place).sum())
        return f"{op}: {np.exp(excess):.1f} x outside the measured range" if excess > OUTSIDE else ""

    def _posterior_name(self, op: Op, variant: int) -> str:
        own = label(op.family, op, self.hardware)
        return name_of(own, variant) if name_of(own, variant) in self.posteriors else name_of(own, 0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "teachers": {teacher.name: teacher.digest for teacher in self.teachers},
            "like": self.like,
            "columns": {term: list(names) for term, names in self.columns.items()},
            "posteriors": {name: posterior.to_dict() for name, posterior in self.posteriors.items()},
            "support": {name: [low.tolist(), high.tolist()] for name, (low, high) in self.support.items()},
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], hardware: Hardware, teacher_of: Callable[[str], Teacher]) -> Transfer:
        """Read the result of ``to_dict``.

        Raises:
            PredictorError: If a teacher of the package is no longer the one that it was trained with.
        """
        teachers = tuple(teacher_of(str(name)) for name in value["teachers"])
        for teacher in teachers:
            if teacher.digest != value["teachers"][teacher.name]:
                raise PredictorError(
                    f"this predictor was trained with another version of {teacher.name}: train it again from its table"
                )
        posteriors = {str(name): Correction.from_dict(table) for name, table in value["posteriors"].items()}
        support = {
            str(name): Support(np.array(low, dtype=np.float64), np.array(high, dtype=np.float64))
            for name, (low, high) in value["support"].items()
        }
        if set(support) != set(posteriors) or any(
            p.long.rows[LINEAR].shape[1] != len(teachers) + 1 for p in posteriors.values()
        ):
            raise PredictorError("every correction must have a range and a column for each teacher")
        columns = {term: tuple(map(str, value["columns"][term])) for term in _COLUMNS}
        return cls(hardware, teachers, str(value["like"]), posteriors, support, columns)


def name_of(label: str, variant: int) -> str:
    """Name of the correction of a label with one software."""
    return f"{label}#{variant}"


def measured_range(ops: Sequence[Op]) -> Support:
    """Lowest and highest log dims of ops."""
    longest = max(len(op.dims) for op in ops)
    places = np.array([np.pad(_place(op), (0, longest - len(op.dims)), mode="edge") for op in ops])
    return Support.of(places)


def _place(op: Op) -> Array:
    return np.log(np.maximum(op.dims, 1.0))
