"""How the speed of a framework changes from release to release, beside what its profile states.

The rate comes from 53 pairs of published runs of 13 models: the same layout on the same devices with two releases of
NeMo that have one profile (DGX Cloud's recipes, Megatron-Bridge's summaries, MLPerf's LoRA rounds).  The later run is
faster by 0.67 % a month on average, +- 0.53 % over models.  With a whole model left out, the full rate predicts the
later run no better than no drift, and a half predicts it slightly better (4.53 to 4.61 % error instead of 4.65 %), so
the rate in the profile (``drift_log``) is multiplied by its value over its value and its standard error.
"""

from __future__ import annotations

import math

from stepsight.dataset.job.frameworks import Framework, release_month
from stepsight.dataset.job.job import Job

TAUGHT = ("2024-04", "2026-08")  # first and last release of the pairs: outside, the drift stands still


def stated_month(job: Job) -> str:
    """The date of a job's software, or the month in the tag of its container or framework; empty: it states none."""
    return job.execution.date or release_month(job.execution.container) or release_month(job.framework)


def months_of(date: str) -> int:
    """Months since year 0; the middle of a year that states no month."""
    year, _, month = date[:7].partition("-")
    return 12 * int(year) + (int(month) - 1 if month else 6)


def months_taught(since: str, until: str) -> int:
    """Months between two dates, as far as they lie within the dated pairs."""
    first, last = map(months_of, TAUGHT)
    return min(max(months_of(until), first), last) - min(max(months_of(since), first), last)


def drift_log(profile: Framework | None, date: str) -> float:
    """Logarithm of the factor on the time of a profile's runs at a date; 0 if either is unknown."""
    if profile is None or not (profile.drift_log and date):
        return 0.0
    return profile.drift_log * months_taught(profile.drift_from, date)


def drift_of(job: Job) -> float:
    """Logarithm of the factor on a job's time by the release that it states."""
    date = stated_month(job)
    return drift_log(job.profile, date) if date else 0.0


def drift_text(job: Job) -> str:
    """The drift of a job's release in words; empty: there is none."""
    log_factor = drift_of(job)
    if not log_factor or job.profile is None:
        return ""
    since = f"the profile holds for {job.profile.drift_from}"
    return f"{stated_month(job)}, {100 * math.expm1(log_factor):+.1f} % by the drift of dated runs ({since})"
