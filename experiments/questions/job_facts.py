"""What a page tells about one job: its prediction, what changes it, and what to try next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from stepsight.dataset.base.bounded import read_toml
from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.schedules import SCHEDULES
from stepsight.dataset.job.specs import CHOICES, MODELS, PRECISIONS
from stepsight.experiments.questions.sweep import FABRIC_KEYS, NODES, Axis, change_job, sweep
from stepsight.experiments.reports.text_table import words
from stepsight.simulator.iteration.timeline import memory_moments
from stepsight.training.prediction.prediction import Prediction, predict
from stepsight.training.predictor.predictor import Predictor

OnStep = Callable[[int, int], None]
MOST_STEPS = 6
LEAST_GAIN = 0.002  # share of the throughput: smaller gains are within the prediction error
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of curves
Effect = dict[str, Any]  # of a change: name, values, tokens_per_s_ratio, iteration_time_s, memory_bytes, fits
EffectOf = Callable[[dict[str, Any], Callable[[], Job]], Effect | None]  # of changed values, and what changes the job


def job_facts(
    prediction: Prediction,
    predictor: Predictor | str | None,
    plan: Mapping[str, Any],
    on_step: OnStep = lambda *_: None,
) -> dict[str, Any]:
    """Collect all values of the page; ``on_step`` is called between predictions, and may raise to stop."""
    job, fabric, simulation = prediction.job, prediction.job.fabric, prediction.simulation
    scale = prediction.iteration_time_s / simulation.iteration_time_s
    links = {
        name: {"gbytes_per_s": link.bandwidth_bytes_per_s / 1e9, "latency_us": link.latency_s * 1e6}
        for name, link in (("within a node", fabric.intra_node), ("between nodes", fabric.inter_node))
    }

    def effect(values: dict[str, Any], change: Callable[[], Job]) -> Effect | None:
        """The effect of a change; None if the changed job is not legal or the same."""
        on_step(0, 0)
        try:
            other = change()
            if other == job:
                return None
            found = predict(other, predictor)
        except StepsightError:
            return None
        ratio, memory = found.tokens_per_s / prediction.tokens_per_s, found.memory
        name = ", ".join(f"{key.partition('.')[2]} = {str(value).lower()}" for key, value in values.items())
        told = {"name": name, "values": values, "tokens_per_s_ratio": ratio, "iteration_time_s": found.iteration_time_s}
        return {**told, "memory_bytes": memory.peak_bytes, "fits": memory.fits}

    return {
        **prediction.to_dict(),
        "tables": job.to_dict(),
        "fabric": {"name": fabric.name, **links},
        "explain": [row.to_dict() for row in prediction.explain(8)],
        "plan": dict(plan),
        "tornado": _tornado(job, effect),
        "curves": _curves(job, predictor, on_step),
        "next_steps": _next_steps(job, effect),
        "memory_over_time": [  # of each stage: times in seconds, and bytes from each time on
            {"stage": stage, "seconds": (begins * scale).tolist(), "bytes": moments.tolist()}
            for stage, begins, moments in memory_moments(simulation, simulation.slowest)
        ],
    }


def _curves(job: Job, predictor: Predictor | str | None, on_step: OnStep) -> dict[str, list[dict[str, Any]]]:
    """The job over numbers of nodes, and over the bandwidth between nodes."""
    axes = {NODES: tuple(sorted({max(1, int(job.cluster.nodes * factor)) for factor in FACTORS}))}
    if job.cluster.nodes > 1:
        axes[BANDWIDTH] = tuple(value_of(job, BANDWIDTH) * factor for factor in FACTORS)
    found = {}
    for key, values in axes.items():
        with suppress(StepsightError):
            points = sweep(job, [Axis(key, values)], predictor, weak=key == NODES, on_point=on_step)
            found[key] = [point.to_dict() for point in points]
    return found


def _tornado(job: Job, effect: EffectOf) -> list[dict[str, Any]]:
    """Halve and double links, latency, batch sizes and nodes: ``name``, ``half`` and ``double`` (None: not legal)."""
    rows = list[dict[str, Any]]()
    for field in fields_of(job):
        if field.is_number and field.group in (BATCH, CLUSTER):
            own, found = value_of(job, field.key), dict[str, Effect | None]()
            for way, factor in (("half", 0.5), ("double", 2)):
                values = {field.key: max(1, int(own * factor)) if isinstance(own, int) else own * factor}
                found[way] = effect(values, partial(change_job, job, values))
            if any(found.values()):
                rows.append({"name": words(field.key), **found})
    size = lambda row: max(abs(row[way]["tokens_per_s_ratio"] - 1) for way in ("half", "double") if row[way])
    return sorted(rows, key=size, reverse=True)


def _next_steps(job: Job, effect: EffectOf) -> list[Effect]:
    """Find single changes of the strategy that fit in memory and are faster, the fastest first."""
    found = list[Effect | None]()
    for field in fields_of(job):
        if field.group == STRATEGY or field.key == "batch.micro_batch":
            at = field.values.index(value_of(job, field.key))
            near = field.values[max(0, at - 1) : at + 2] if field.is_number else field.values
            found += [effect({field.key: value}, partial(changed, job, field.key, value)) for value in near]
    better = [each for each in found if each and each["fits"] and each["tokens_per_s_ratio"] > 1 + LEAST_GAIN]
    return sorted(better, key=lambda each: -each["tokens_per_s_ratio"])[:MOST_STEPS]


BANDWIDTH = "cluster.fabric.inter_node.bandwidth_gbytes_per_s"
MODEL, DEVICE, SCHEDULE, VIRTUAL = "model.name", "cluster.hardware", "parallel.schedule", "parallel.virtual_stages"
STRATEGY, BATCH, CLUSTER, SIZES = GROUPS = ("Strategy", "Batch", "Cluster", "Model")
# By group and key, the largest value of a slider that doubles; 0: from an eighth to eight times the job's own value.
_SLIDERS: dict[str, dict[str, int]] = read_toml(Path(__file__).with_name("sliders.toml"))
_AROUND = (0.125, 0.25, 0.5, 1, 2, 4, 8)
_OF_TABLES = ("model.seq_len", "model.layers", "model.hidden")  # they follow from a recommendation model's tables
_CHOSEN = ("zero_stage", "recompute", "sequence_parallel", "overlap_grad_reduce", "overlap_param_gather", "overlap_tp")


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
            rule = "a whole number" if isinstance(self.values[0], int) else "a number"
            raise StepsightError(f"{self.key} must be {rule}, got {text!r:.80}") from None

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
    return job.hardware_name if key == DEVICE else attrgetter(key)(job)


def fields_of(job: Job) -> list[Field]:
    """The fields of a job, in the order of the page; each offers the job's own value too."""
    found = []
    for group, key, most in ((group, *each) for group, keys in _SLIDERS.items() for each in keys.items()):
        if not (job.model.tables and key in _OF_TABLES):
            own = value_of(job, key)
            values = [2**power for power in range(most.bit_length())]
            if not most:
                values = [max(1, int(own * times)) if isinstance(own, int) else own * times for times in _AROUND]
            found.append(Field(group, key, tuple(sorted({own, *values})), True))
    choices: list[tuple[str, str, Iterable[Any]]] = [
        (STRATEGY, SCHEDULE, SCHEDULES.names()),
        *((STRATEGY, f"parallel.{name}", CHOICES.get(f"parallel.{name}", (False, True))) for name in _CHOSEN),
        (BATCH, "batch.precision", PRECISIONS),
        (CLUSTER, DEVICE, HARDWARE.names()),
        (SIZES, MODEL, MODELS),
    ]
    found += [
        Field(group, key, tuple(dict.fromkeys((*values, value_of(job, key)))), False) for group, key, values in choices
    ]
    return sorted(found, key=lambda field: GROUPS.index(field.group))


def changed(job: Job, key: str, value: Any) -> Job:
    """The job with a new value of one key; what depends on it follows, as replicas do."""
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
