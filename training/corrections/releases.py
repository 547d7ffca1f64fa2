"""How the speed of a framework changes from release to release, beside what its profile states.

The rate comes from 53 pairs of published runs of 13 models: the same layout on the same devices with two releases of
NeMo that have one profile (DGX Cloud's recipes, Megatron-Bridge's summaries, MLPerf's LoRA rounds).  The later run is
faster by 0.67 % a month on average, +- 0.53 % over models.  With a whole model left out, the full rate predicts the
later run no better than no drift, and a half predicts it slightly better (4.53 to 4.61 % error instead of 4.65 %), so
the rate in the profile (``drift_log``) is multiplied by its value over its value and its standard error.
"""

from __future__ import annotations

import re

from stepsight.dataset.base.files import preset
from stepsight.dataset.job.frameworks import release_month
from stepsight.dataset.job.job import Job

TAUGHT = ("2024-04", "2026-08")  # first and last release of the pairs: outside, the drift stands still
_DRIFTS = preset("job_facts.toml")["drifts"]


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


def rate_of(job: Job) -> tuple[float, str]:
    """The drift of a job's software a month, in log units, and the month for which the time holds; 0: none is known.

    It is the profile's, or what ``job_facts.toml`` tells of the chip and the precision.
    """
    profile = job.profile
    if profile is None or not profile.drift_log:
        return 0.0, ""
    chip, precision = job.cluster.hardware, job.batch.precision
    own = [t for t in _DRIFTS if re.match(t["hardware"], chip) and precision in t["precisions"]]
    return (own[0]["log"], own[0]["since"]) if own else (profile.drift_log, profile.drift_from)


def drift_of(job: Job) -> float:
    """Logarithm of the factor on a job's time by the release that it states; 0 if either is unknown."""
    date = stated_month(job)
    log, since = rate_of(job) if date else (0.0, "")
    return log * months_taught(since, date) if log else 0.0
