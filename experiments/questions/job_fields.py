"""What people change about a job: keys, the values that are tried, and the rules that forbid some."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.schedules import SCHEDULES
from stepsight.dataset.job.specs import CHOICES, MODELS, PRECISIONS
from stepsight.experiments.questions.sweep import FABRIC_KEYS, change_job

MODEL, DEVICE, SCHEDULE, VIRTUAL = "model.name", "cluster.hardware", "parallel.schedule", "parallel.virtual_stages"
STRATEGY, BATCH, CLUSTER, SIZES = GROUPS = ("Strategy", "Batch", "Cluster", "Model")
# Group, key, and the largest value of a slider that doubles; 0: from an eighth to eight times the job's own value.
_SLIDERS: tuple[tuple[str, str, int], ...] = (
    (STRATEGY, "parallel.tp", 64),
    (STRATEGY, "parallel.pp", 128),
    (STRATEGY, "parallel.cp", 64),
    (STRATEGY, "parallel.ep", 256),
    (STRATEGY, VIRTUAL, 16),
    (BATCH, "batch.micro_batch", 64),
    (BATCH, "batch.global_batch", 0),
    (BATCH, "model.seq_len", 0),
    (CLUSTER, "cluster.nodes", 16384),
    *((CLUSTER, key, 0) for key in FABRIC_KEYS),
    (SIZES, "model.layers", 0),
    (SIZES, "model.hidden", 0),
)
_FLAGS = ("sequence_parallel", "overlap_grad_reduce", "overlap_param_gather")


@dataclass(frozen=True)
class Field:
    """One key that the page offers, with the values that can be chosen at once."""

    group: str
    key: str
    values: tuple[Any, ...]
    is_number: bool

    @property
    def test_id(self) -> str:
        return self.key.rpartition(".")[2].replace("_", "-")

    def read(self, text: str) -> Any:
        """The value of a text: one of the field's values, or any number of the same type."""
        named = {str(value): value for value in self.values}
        if text in named or not self.is_number:
            return named.get(text, text)
        try:
            return type(self.values[0])(text)
        except ValueError:
            raise StepsightError(f"{self.key} must be a number, got {text!r:.80}") from None

    def nearest(self, value: Any) -> int:
        """Number of the value that is nearest."""
        if not self.is_number:
            return self.values.index(value)
        return min(range(len(self.values)), key=lambda at: abs(self.values[at] - value))


def value_of(job: Job, key: str) -> Any:
    """The value of a key of a job."""
    if key in FABRIC_KEYS:
        _, _, place, fact = key.split(".")
        link = getattr(job.fabric, place)
        return link.latency_s * 1e6 if fact == "latency_us" else link.bandwidth_bytes_per_s / 1e9
    if key == DEVICE:
        return job.hardware_name
    section, _, name = key.partition(".")
    return getattr(getattr(job, section), name)


def fields_of(job: Job) -> list[Field]:
    """The fields of a job, in the order of the page; each offers the job's own value too."""
    found = []
    for group, key, most in _SLIDERS:
        own = value_of(job, key)
        powers = [2**power for power in range(most.bit_length())]
        found.append(Field(group, key, tuple(sorted({own, *(powers if most else _around(own))})), True))
    choices: list[tuple[str, str, Iterable[Any]]] = [
        (STRATEGY, SCHEDULE, SCHEDULES.names()),
        *((STRATEGY, f"parallel.{name}", CHOICES[f"parallel.{name}"]) for name in ("zero_stage", "recompute")),
        *((STRATEGY, f"parallel.{name}", (False, True)) for name in _FLAGS),
        (STRATEGY, "parallel.overlap_tp", CHOICES["parallel.overlap_tp"]),
        (BATCH, "batch.precision", PRECISIONS),
        (CLUSTER, DEVICE, HARDWARE.names()),
        (SIZES, MODEL, MODELS),
    ]
    found += [
        Field(group, key, tuple(dict.fromkeys((*values, value_of(job, key)))), False) for group, key, values in choices
    ]
    return sorted(found, key=lambda field: GROUPS.index(field.group))


def _around(own: Any) -> list[Any]:
    """An eighth to eight times a value."""
    factors = (0.125, 0.25, 0.5, 1, 2, 4, 8)
    return [max(1, int(own * factor)) if isinstance(own, int) else own * factor for factor in factors]


def changed(job: Job, key: str, value: Any) -> Job:
    """The job with a new value of one key; what depends on it follows, as replicas do.

    Raises:
        JobError: If the job breaks a rule; the message states it.
    """
    if value == value_of(job, key):
        return job
    if key == MODEL and value in MODELS:
        return Job.from_dict({**job.to_dict(), "model": {"name": value}})
    followed: dict[str, list[dict[str, Any]]] = {  # of schedules, what goes with some of their values alone
        DEVICE: [{"cluster.fabric": ""}],
        SCHEDULE: [{}, {VIRTUAL: 1}, {VIRTUAL: 2}],
        VIRTUAL: [{}, {SCHEDULE: "1f1b"}],
    }
    errors = []
    for more in followed.get(key, [{}]):
        try:
            return change_job(job, {key: value, **more})
        except JobError as error:
            errors.append(error)
    raise errors[0]


def broken_rules(job: Job, field: Field) -> dict[Any, str]:
    """The values of a field that the job cannot have, each with the rule that it breaks."""
    found = {}
    for value in field.values:
        try:
            changed(job, field.key, value)
        except StepsightError as error:
            found[value] = str(error)
    return found
