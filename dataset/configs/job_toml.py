"""A job as the text of a job file."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from typing import Any

from stepsight.dataset.configs.documents import toml_text
from stepsight.dataset.job import Job
from stepsight.dataset.specs import SECTIONS


def job_toml(job: Job) -> str:
    """A job file that reads back as an equal job; what holds its default is left out where no framework fills it."""
    tables: dict[str, Any] = {"framework": job.framework} if job.framework else {}
    for section, spec in SECTIONS.items():
        table = asdict(getattr(job, section))
        default = {item.name: () if item.default is MISSING else item.default for item in fields(spec)}
        tables[section] = {
            key: value for key, value in table.items() if value is not None and (job.framework or value != default[key])
        }
    return toml_text(tables)
