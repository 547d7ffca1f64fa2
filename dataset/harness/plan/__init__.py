"""Plans: what to run and what to measure. Checked completely before anything starts; standard library only.

A plan is a JSON object::

    {"schema": 1,
     "runs": [{"name", "role", "job": {model, parallel, batch, cluster}, "rounds": 3, "steps": 4, "warmup": 2,
               "profile_steps": 2, "stand_in": {"rank", "collectives"},        # optional: see plan_checks
               "table": CSV}],                     # of a schedule that torch has no class for
     "events": [{"name", "world_size", "ops": [{kind, dims, dtype}], "collectives": [{kind, num_bytes, group_size,
                 ranks_per_node}], "seconds": 20}],
     "device": "auto",                                  # optional: cpu, cuda
     "compile": false,                                  # optional: composite ops by torch.compile
     "box": {"nodes", "ranks_per_node", "mbits_per_s": [rate of each node's link], "latency_ms": [...]}}   # optional

A plan with ``box`` is for a cluster in a box (``latency_ms`` is optional).  Each of its runs also has ``sleeps`` (see
``models.sleeping``), because its ranks sleep instead of computing.

A job is what ``stepsight.dataset.job.job.Job.to_dict`` writes, with every key filled in.
"""

from .plan_checks import MOST_CPU as MOST_CPU
from .plan_checks import OPTIONS as OPTIONS
from .plan_checks import SCHEMA as SCHEMA
from .plan_checks import WRITTEN as WRITTEN
from .plan_checks import check_plan as check_plan
from .plan_checks import job_problems as job_problems
from .plan_checks import num_micro_batches as num_micro_batches
from .plan_checks import ranks_needed as ranks_needed
from .plan_checks import world_size as world_size
from .plan_checks import world_sizes as world_sizes
