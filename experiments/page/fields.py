"""What can be changed on the page: keys of a job, their values, and the rules that forbid some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.schedules import SCHEDULES
from stepsight.dataset.job.specs import CHOICES, MODELS, PRECISIONS
from stepsight.experiments.questions.sweep import change_job

MODEL, HARDWARE_KEY, FABRIC = "model.name", "cluster.hardware", "cluster.fabric"
_BANDWIDTH = "cluster.fabric.inter_node.bandwidth_gbytes_per_s"
# Group, key, and the largest value of a slider that doubles; 0: from an eighth to eight times the job's own value.
_SLIDERS: tuple[tuple[str, str, int], ...] = (
    ("Strategy", "parallel.tp", 64),
    ("Strategy", "parallel.pp", 128),
    ("Strategy", "parallel.cp", 64),
    ("Strategy", "parallel.ep", 256),
    ("Strategy", "parallel.virtual_stages", 16),
    ("Batch", "batch.micro_batch", 64),
    ("Batch", "batch.global_batch", 0),
    ("Batch", "model.seq_len", 0),
    ("Cluster", "cluster.nodes", 16384),
    ("Cluster", _BANDWIDTH, 0),
    ("Model", "model.layers", 0),
    ("Model", "model.hidden", 0),
)


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
    if key == _BANDWIDTH:
        return job.fabric.inter_node.bandwidth_bytes_per_s / 1e9
    if key == HARDWARE_KEY:
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
    choices: list[tuple[str, str, Sequence[Any]]] = [
        ("Strategy", "parallel.schedule", SCHEDULES.names()),
        ("Strategy", "parallel.zero_stage", tuple(CHOICES["parallel.zero_stage"])),
        ("Strategy", "parallel.recompute", tuple(CHOICES["parallel.recompute"])),
        ("Strategy", "parallel.sequence_parallel", (False, True)),
        ("Batch", "batch.precision", PRECISIONS),
        ("Cluster", HARDWARE_KEY, HARDWARE.names()),
        ("Model", MODEL, tuple(MODELS)),
    ]
    for group, key, values in choices:
        own = value_of(job, key)
        found.append(Field(group, key, (*values, *(() if own in values else (own,))), False))
    return sorted(found, key=lambda field: ("Strategy", "Batch", "Cluster", "Model").index(field.group))


def _around(own: Any) -> list[Any]:
    """An eighth to eight times a value."""
    factors = (0.125, 0.25, 0.5, 1, 2, 4, 8)
    return [max(1, int(own * factor)) if isinstance(own, int) else own * factor for factor in factors]


def changed(job: Job, key: str, value: Any) -> Job:
    """The job with a new value of one key; what depends on it follows, as replicas do.

    Raises:
        JobError: If the job breaks a rule; the message states it.
    """
    if key == HARDWARE_KEY:
        return job if value == job.hardware_name else change_job(job, {key: value, FABRIC: ""})
    if key == MODEL and value in MODELS:
        return Job.from_dict({**job.to_dict(), "model": {"name": value}})
    return job if value == value_of(job, key) else change_job(job, {key: value})


def broken_rules(job: Job, field: Field) -> dict[Any, str]:
    """The values of a field that the job cannot have, each with the rule that it breaks."""
    found = {}
    for value in field.values:
        try:
            changed(job, field.key, value)
        except StepsightError as error:
            found[value] = str(error)
    return found
