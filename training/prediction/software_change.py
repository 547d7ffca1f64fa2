"""What another release of a framework changes: its profile, and a slow drift within the profile.

The drift comes from 53 pairs of published runs of 13 models: the same layout on the same devices with two releases of
NeMo that have one profile (DGX Cloud's recipes, Megatron-Bridge's summaries, MLPerf's LoRA rounds).  The later run is
faster by 0.67 % a month on average, +- 0.53 % over models.  With a whole model left out, the full rate predicts the
later run no better than no drift, and a half predicts it slightly better (4.53 to 4.61 % error instead of 4.65 %), so
the rate is multiplied by its value over its value and its standard error.  Nine pairs of ten differ by less than
``SPREAD_LOG`` for the square root of the months between them, beside the drift.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from stepsight.dataset.job.frameworks import release_month
from stepsight.dataset.job.job import Job

P = TypeVar("P", bound=Any)  # a prediction
RATE_LOG = {"nemo": -0.0067 * 0.0067 / (0.0067 + 0.0053)}  # a month, by framework; all others: no dated pairs
SPREAD_LOG = 0.05
TAUGHT = ("2024-04", "2026-08")  # first and last release of the pairs: outside, the drift stands still
USUAL = {"nemo": "2025-10"}  # the middle of the dated runs that the profile was compared with


@dataclass(frozen=True)
class SoftwareChange:
    """The drift from one release to another: its factor in log units, half of its 90 % interval, and a text."""

    log_factor: float = 0.0
    doubt_log: float = 0.0
    text: str = ""


def with_change(prediction: P, change: SoftwareChange | None) -> P:
    """A prediction of a job with the drift to another release of its software; None: as it is."""
    if change is None:
        return prediction
    seconds = prediction.iteration_time_s * math.exp(change.log_factor)
    changed: P = replace(prediction, iteration_time_s=seconds, change=change)
    return changed


def change_facts(change: SoftwareChange | None) -> dict[str, Any]:
    """The drift as plain values for JSON."""
    return {} if change is None else {"change": asdict(change)}


def software_stated(date: str, container: str) -> dict[str, Any]:
    """Keys of a job with other software, if any is named; a container replaces the date of the job."""
    boxed = {"execution.container": container} if container else {}
    return {"execution.date": date, **boxed} if date or boxed else {}


def software_change(usual: Job, asked: Job) -> SoftwareChange:
    """The drift between the software that a job states and the one that is asked about."""
    before, after = (_named(job) for job in (usual, asked))
    family = after.partition("-")[0]
    since, until = _date(usual) or USUAL.get(family, ""), _date(asked)
    if not family:
        return SoftwareChange(text="the job names no framework, so another release changes nothing")
    if not since or not until:
        which = "the job states no date" if until else "no month is known of the container"
        return SoftwareChange(text=f"{which}, so nothing but the profile of {after} counts: no drift is known from it")
    months = _months(until) - _months(since)
    doubt = SPREAD_LOG * math.sqrt(abs(months))
    name = f"{after} of {until} instead of {since}"
    if before != after:
        return SoftwareChange(0.0, doubt, f"{name}: profile {after} instead of {before or 'none'}, without a drift")
    first, last = map(_months, TAUGHT)
    within = min(max(_months(until), first), last) - min(max(_months(since), first), last)
    rate = RATE_LOG.get(family, 0.0)
    log_factor, beyond = rate * within, abs(months) - abs(within)
    doubt = math.hypot(doubt, rate * beyond)
    if not rate:
        return SoftwareChange(0.0, doubt, f"{name}: no pairs of dated runs of {family}, so the time stays")
    percent = 100 * math.expm1(log_factor)
    return SoftwareChange(log_factor, doubt, f"{name}: {percent:+.1f} % by the drift of 53 pairs of dated runs")


def _named(job: Job) -> str:
    profile = job.profile
    return "" if profile is None else profile.name


def _date(job: Job) -> str:
    return job.execution.date or release_month(job.execution.container)


def _months(date: str) -> int:
    """Months since year 0; the middle of a year that states no month."""
    year, _, month = date[:7].partition("-")
    return 12 * int(year) + (int(month) - 1 if month else 6)
