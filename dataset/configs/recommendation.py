"""Configurations of recommendation models: torchrec's plans are written."""

from __future__ import annotations

import json

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.key_table import ConfigText
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.sharding import placements_of
from stepsight.dataset.job.sharding_plans import plan_tables


def write_plan(job: Job) -> ConfigText:
    """Write where the tables of a job lie as torchrec's plan.

    Raises:
        JobError: If the job has no tables.
    """
    if not job.model.tables:
        raise JobError(f"torchrec's plan is of a dlrm, got family {job.model.family!r:.80}")
    places = placements_of(job.model.tables, job.sharding, job.table_ranks)
    plan = plan_tables(job.model.tables, places, job.table_ranks.per_node)
    note = "the key of the plan is the path of the EmbeddingBagCollection in the model: rename it"
    return ConfigText(text=json.dumps(plan, indent=1) + "\n", suffix=".json", notes=(note,))
