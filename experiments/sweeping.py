"""Predictions of a job over ranges of its keys."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.base.registry import did_you_mean
from stepsight.dataset.job.job import Job
from stepsight.experiments.changed_jobs import change_job, known_keys
from stepsight.training.predictor.prediction import Prediction, predict

if TYPE_CHECKING:
    from stepsight.training.predictor.predictor import Predictor

MOST_JOBS = 10_000
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\+(\d+))?")
NODES, GLOBAL_BATCH = "cluster.nodes", "batch.global_batch"


@dataclass(frozen=True)
class Axis:
    """One key of a job and the values that it takes.

    Attributes:
        key: Such as ``cluster.nodes``.
        values: In order.
    """

    key: str
    values: tuple[Any, ...]

    @classmethod
    def parse(cls, text: str) -> Axis:
        """Read ``KEY=8..1024`` (doubling), ``KEY=8..64+8`` (steps of 8) or ``KEY=1,2,"full"``.

        Raises:
            StepsightError: If the text is none of these, or the key is unknown.
        """
        key, equals, words = text.partition("=")
        rule = "--vary takes KEY=FIRST..LAST, KEY=FIRST..LAST+STEP or KEY=VALUE,VALUE"
        if not equals or not words:
            raise StepsightError(f"{rule}, for example cluster.nodes=8..1024, got {text!r:.80}")
        if key not in known_keys():
            raise StepsightError(f"--vary takes a key of a job, got {key!r:.80}{did_you_mean(key, known_keys())}")
        found = _RANGE.fullmatch(words)
        if not found:
            return cls(key, tuple(_value(word.strip()) for word in words.split(",")))
        first, last = int(found[1]), int(found[2])
        if not 0 < first <= last or (found[3] and not int(found[3])):
            raise StepsightError(f"{rule} with 0 < FIRST <= LAST and STEP > 0, got {text!r:.80}")
        if found[3]:
            return cls(key, tuple(range(first, last + 1, int(found[3]))[: MOST_JOBS + 1]))
        return cls(key, tuple(first << power for power in range((last // first).bit_length())))


def _value(word: str) -> Any:
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word


@dataclass(frozen=True)
class Point:
    """One job of a sweep.

    Attributes:
        values: Of the varied keys.
        prediction: The answer; None: the job is not legal.
        problem: Why it is not legal.
    """

    values: dict[str, Any]
    prediction: Prediction | None
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the varied keys, then the prediction; None if the job is not legal."""
        found, answer = self.prediction, dict.fromkeys(COLUMNS)
        if found is not None:
            devices = found.job.cluster.num_devices
            answer = {
                "devices": devices,
                "iteration_time_s": found.iteration_time_s,
                "low_s": found.low_s,
                "high_s": found.high_s,
                "tokens_per_s": found.tokens_per_s,
                "tokens_per_s_per_device": found.tokens_per_s / devices,
                "mfu": found.mfu,
                "memory_bytes": found.memory.peak_bytes,
                "fits": found.memory.fits,
                "outside_share": found.unsupported_share,
            }
        return {**self.values, **answer, "problem": self.problem}


COLUMNS = (
    "devices", "iteration_time_s", "low_s", "high_s", "tokens_per_s", "tokens_per_s_per_device", "mfu", "memory_bytes",
    "fits", "outside_share",
)  # fmt: skip


def sweep(
    job: Job,
    axes: Sequence[Axis],
    predictor: Predictor | str | None = None,
    *,
    weak: bool = False,
    on_point: Callable[[int, int], None] = lambda done, of: None,
) -> list[Point]:
    """Predict a job for every combination of values.

    Args:
        job: The job to start from.
        axes: Keys and their values; the last one varies fastest.
        predictor: As in ``predict``.
        weak: Whether the global batch grows with the number of devices (weak scaling).
        on_point: Called with the number of jobs done, and of all.

    Raises:
        StepsightError: If there are too many jobs, or none is legal; the message gives the first reason.
    """
    combinations = list(product(*(axis.values for axis in axes)))
    if not 0 < len(combinations) <= MOST_JOBS:
        raise StepsightError(f"a sweep must have 1 to {MOST_JOBS} jobs, got {len(combinations)}")
    points = []
    for number, values in enumerate(combinations):
        points.append(_point(job, dict(zip((axis.key for axis in axes), values, strict=True)), predictor, weak))
        on_point(number + 1, len(combinations))
    if all(point.prediction is None for point in points):
        raise StepsightError(f"no job of the sweep is legal; the first one: {points[0].problem}")
    return points


def _grown_batch(job: Job, values: dict[str, Any]) -> int:
    """The global batch in proportion to the number of devices."""
    cluster = job.cluster
    nodes, devices = values.get(NODES, cluster.nodes), values.get("cluster.devices_per_node", cluster.devices_per_node)
    if not all(isinstance(number, int) for number in (nodes, devices)):
        return job.batch.global_batch  # the rules of a job reject the number
    return max(1, round(job.batch.global_batch * int(nodes) * int(devices) / cluster.num_devices))


def _point(job: Job, values: dict[str, Any], predictor: Predictor | str | None, weak: bool) -> Point:
    try:
        grown = {GLOBAL_BATCH: _grown_batch(job, values)} if weak and GLOBAL_BATCH not in values else {}
        return Point(values, predict(change_job(job, {**values, **grown}), predictor))
    except JobError as error:
        return Point(values, None, str(error))
