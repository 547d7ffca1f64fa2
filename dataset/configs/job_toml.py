"""A job as the text of a job file."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from typing import Any

from stepsight.dataset.configs.documents import toml_text
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import SECTIONS


def job_toml(job: Job) -> str:
    """Write a job file that reads back as an equal job; defaults that no profile sets are left out."""
    tables: dict[str, Any] = {"framework": job.framework} if job.framework else {}
    for section, spec in SECTIONS.items():
        table = asdict(getattr(job, section))
        default = {item.name: () if item.default is MISSING else item.default for item in fields(spec)}
        tables[section] = {
            key: value for key, value in table.items() if value is not None and (job.framework or value != default[key])
        }
    return toml_text(tables)
