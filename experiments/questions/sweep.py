"""A job with changed keys, and predictions over ranges of keys."""

from __future__ import annotations

import csv
import io
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError, StepsightError, shorten
from stepsight.dataset.base.registry import did_you_mean
from stepsight.dataset.hardware.hardware_facts import LINK_KEYS
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.sharding_plans import shared_batch
from stepsight.dataset.job.specs import SECTIONS
from stepsight.experiments.reports.plots import figure_file
from stepsight.experiments.reports.text_table import Number, table
from stepsight.training.corrections.intervals import interval_text, seconds_text
from stepsight.training.prediction.prediction import Prediction, predict
from stepsight.training.predictor.predictor import Predictor

MOST_JOBS = 10_000
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\+(\d+))?")
NODES, GLOBAL_BATCH = "cluster.nodes", "batch.global_batch"
FABRIC_KEYS = tuple(
    f"cluster.fabric.{link}.{fact}"
    for link in ("intra_node", "inter_node")
    for fact in ("bandwidth_gbytes_per_s", "latency_us")
)
_REPLICAS = ("parallel.dp", "parallel.dp_shard")  # these follow from the rest, unless they are changed themselves
_DEVICES = ("nodes", "devices_per_node")
_DEGREES = ("parallel.tp", "parallel.cp", "parallel.pp", "cluster.nodes", "cluster.devices_per_node")


def change_job(job: Job, values: Mapping[str, Any]) -> Job:
    """Change keys of a job, such as ``cluster.nodes`` or ``cluster.fabric.inter_node.latency_us``.

    The number of replicas follows, unless it is changed itself, as does the micro-batch of a recommendation model whose
    ranks share the batch.
    """
    unknown = [key for key in values if key not in known_keys()]
    if unknown:
        raise JobError(f"{unknown[0]!r:.80} is not a key of a job{did_you_mean(unknown[0], known_keys())}")
    stated = dict(values)
    if any(key in values for key in _DEGREES):
        stated = {**{key: 0 for key in _REPLICAS if key not in values}, **stated}
    if job.shares_batch and "batch.micro_batch" not in values:
        whole = values.get("batch.global_batch", job.batch.global_batch)
        devices = {name: values.get(f"cluster.{name}", getattr(job.cluster, name)) for name in _DEVICES}
        shared = shared_batch({"global_batch": whole}, devices)
        stated["batch.micro_batch"] = shared.get("micro_batch", job.batch.micro_batch)
    if links := {key: stated.pop(key) for key in values if key in FABRIC_KEYS}:
        stated["cluster.fabric"] = _fabric_table(job, links)
    tables: dict[str, dict[str, Any]] = {}
    for key, value in stated.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    return replace(job, **{section: replace(getattr(job, section), **table) for section, table in tables.items()})


def known_keys() -> tuple[str, ...]:
    """Every key that ``change_job`` accepts."""
    keys = [f"{section}.{field.name}" for section, spec in SECTIONS.items() for field in fields(spec)]
    return (*keys, *FABRIC_KEYS)


def _fabric_table(job: Job, links: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The job's links as a table, with some numbers changed."""
    table: dict[str, dict[str, float]] = {}
    for name in ("intra_node", "inter_node"):
        link = getattr(job.fabric, name)
        stated = {key: (getattr(link, field) / unit, least) for key, (least, _, field, unit) in LINK_KEYS.items()}
        table[name] = {key: value for key, (value, least) in stated.items() if value >= least} | {"ll128": link.ll128}
    for key, value in links.items():
        _, _, name, fact = key.split(".")
        table[name][fact] = value
    return table


@dataclass(frozen=True)
class Axis:
    """One key of a job and the values that it takes."""

    key: str  # such as ``cluster.nodes``
    values: tuple[Any, ...]  # in order

    @classmethod
    def parse(cls, text: str) -> Axis:
        """Read ``KEY=8..1024`` (doubling), ``KEY=8..64+8`` (steps of 8) or ``KEY=1,2,"full"``."""
        key, equals, words = text.partition("=")
        rule = "--vary takes KEY=FIRST..LAST, KEY=FIRST..LAST+STEP or KEY=VALUE,VALUE"
        if not equals or not words:
            raise StepsightError(f"{rule}, for example cluster.nodes=8..1024, got {text!r:.80}")
        if key not in known_keys():
            raise StepsightError(f"--vary takes a key of a job, got {key!r:.80}{did_you_mean(key, known_keys())}")
        if not (found := _RANGE.fullmatch(words)):
            return cls(key, tuple(toml_value(word.strip()) for word in words.split(",")))
        first, last, step = (int(number or 0) for number in found.groups())
        if not 0 < first <= last or (found[3] and not step):
            raise StepsightError(f"{rule} with 0 < FIRST <= LAST and STEP > 0, got {text!r:.80}")
        if step:
            return cls(key, tuple(range(first, last + 1, step)[: MOST_JOBS + 1]))
        return cls(key, tuple(first << power for power in range((last // first).bit_length())))


def toml_value(word: str) -> Any:
    """A value as TOML writes it; a text may stand without quotes."""
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word
    except ValueError as error:  # more digits than Python reads
        raise StepsightError(f"a value must be one of TOML, got {shorten(word)}: {error}") from None


COLUMNS: dict[str, Callable[[Prediction], Any]] = {
    "devices": attrgetter("job.cluster.num_devices"),
    **{name: attrgetter(name) for name in ("iteration_time_s", "low_s", "high_s", "tokens_per_s")},
    "tokens_per_s_per_device": lambda found: found.tokens_per_s / found.job.cluster.num_devices,
    "mfu": lambda found: found.mfu,
    "memory_bytes": lambda found: found.memory.peak_bytes,
    "fits": lambda found: found.memory.fits,
    "outside_share": lambda found: found.unsupported_share,
}


@dataclass(frozen=True)
class Point:
    """One job of a sweep."""

    values: dict[str, Any]  # of the varied keys
    prediction: Prediction | None  # the answer; None: the job is not legal
    problem: str = ""  # why it is not legal

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the varied keys, then the prediction; None if the job is not legal."""
        found = self.prediction
        answer = {name: None if found is None else value(found) for name, value in COLUMNS.items()}
        return {**self.values, **answer, "problem": self.problem}


def sweep(
    job: Job,
    axes: Sequence[Axis],
    predictor: Predictor | str | None = None,
    *,
    weak: bool = False,
    on_point: Callable[[int, int], None] = lambda done, of: None,
) -> list[Point]:
    """Predict a job for every combination of values; ``weak``: the global batch grows with the number of devices."""
    combinations = list(product(*(axis.values for axis in axes)))
    if not 0 < len(combinations) <= MOST_JOBS:
        raise StepsightError(f"a sweep must have 1 to {MOST_JOBS} jobs, got {len(combinations)}")
    points = []
    for number, each in enumerate(combinations):
        values = dict(zip((axis.key for axis in axes), each, strict=True))
        try:
            grown = {GLOBAL_BATCH: _grown_batch(job, values)} if weak else {}
            points.append(Point(values, predict(change_job(job, {**grown, **values}), predictor)))
        except JobError as error:
            points.append(Point(values, None, str(error)))
        on_point(number + 1, len(combinations))
    if all(point.prediction is None for point in points):
        raise StepsightError(f"no job of the sweep is legal; the first one: {points[0].problem}")
    return points


def _grown_batch(job: Job, values: dict[str, Any]) -> int:
    """The global batch in proportion to the number of devices."""
    nodes, devices = (values.get(f"cluster.{name}", getattr(job.cluster, name)) for name in _DEVICES)
    if not (isinstance(nodes, int) and isinstance(devices, int)):
        return job.batch.global_batch  # the rules of a job reject the number
    return max(1, round(job.batch.global_batch * nodes * devices / job.cluster.num_devices))


def sweep_text(job: Job, axes: Sequence[Axis], points: Sequence[Point]) -> str:
    columns: dict[str, Callable[[Prediction], object]] = {
        "iteration": lambda found: seconds_text(found.iteration_time_s),
        "interval": lambda found: interval_text(found.low_s, found.high_s),
        f"{job.unit}/s": lambda found: f"{found.tokens_per_s:,.0f}",
        "per device": lambda found: f"{found.tokens_per_s / found.job.cluster.num_devices:,.0f}",
        "MFU %": lambda found: Number(100 * found.mfu),
        "GB": lambda found: Number(found.memory.peak_bytes / 1e9),
        "fits": lambda found: "yes" if found.memory.fits else "no",
    }
    rows: list[list[object]] = []
    for point in points:
        found, values = point.prediction, [str(point.values[axis.key]) for axis in axes]
        told = ["not legal", *[""] * 6] if found is None else [cell(found) for cell in columns.values()]
        rows.append([*values, *told])
    problems = [f"not legal: {point.problem}" for point in points if point.prediction is None]
    more = [f"and {len(problems) - 3} more"] if len(problems) > 3 else []
    return "\n".join([table([*(axis.key for axis in axes), *columns], rows), *problems[:3], *more])


def sweep_csv(points: Sequence[Point]) -> str:
    rows, file = [point.to_dict() for point in points], io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def plot_sweep(axes: Sequence[Axis], points: Sequence[Point], path: Path, title: str) -> None:
    """Draw the iteration time with its interval over the last axis, a line for each value of the others."""
    *others, last = axes
    groups, values = dict[str, list[tuple[Any, float, float, float]]](), last.values
    numeric = all(isinstance(value, int | float) for value in values)
    for point in points:
        if (found := point.prediction) is not None:
            name = ", ".join(f"{axis.key.partition('.')[2]} {point.values[axis.key]}" for axis in others)
            x = point.values[last.key] if numeric else str(point.values[last.key])
            groups.setdefault(name, []).append((x, found.iteration_time_s, found.low_s, found.high_s))
    with figure_file(path, 7.0, 4.5) as drawn:
        for name, each in groups.items():
            xs, seconds, low, high = zip(*each, strict=True)
            drawn.plot(xs, seconds, marker="o", label=name)
            if numeric:
                drawn.fill_between(xs, low, high, alpha=0.15)
        if numeric and min(values) > 0 and max(values) >= 8 * min(values):
            drawn.set_xscale("log", base=2)
        drawn.set(xlabel=last.key, ylabel="iteration time (s), with interval", title=title)
        drawn.set_ylim(bottom=0)
        if len(groups) > 1:
            drawn.legend(frameon=False)
