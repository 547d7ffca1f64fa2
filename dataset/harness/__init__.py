"""The harness: real multi-process training, traced and timed, on the machines that a predictor is for.

Needs torch >= 2.11 and the standard library alone, and imports nothing else of stepsight: copy this folder to a
cluster as ``harness`` and run ``python -m harness plan.json --out DIR`` there.  Importing it imports no torch.

Each room imports only rooms below it:

====================  ==================================================================================
``scripts/``          a user's own training script: its steps found, timed and traced, or emulated
``running/``          ``launch.collect(plan, out)`` checks, starts workers, shows progress, resumes; ``worker`` is one
                      rank or all ranks of a cluster in a ``box``; ``collection`` goes through runs and events
``emulation/``        one process in the place of a rank of a larger job, its collectives replaced by delays
``capturing/``        one rank of a user's script in a fake world: tensors without values, every kernel written down
``measuring/``        steps, ops and collectives timed; hardware facts; a GPU's clocks beside all that
``models/``           a job as a sharded model, schedule and optimizer: ``parallel`` is the training step; ``sleeping``
                      is one whose computation is slept
``ops/``              one op by its signature made callable, and the composite ops that models run
``plan/``             what a plan holds, and its rules; standard library only
``base/``             annotations of traces, collectives of ``torch.distributed`` by kind, cores, files, progress
====================  ==================================================================================
"""

from .base.errors import HarnessError

__all__ = ["HarnessError"]
