"""A job of the harness as a script: ``captured_job.py JOB_JSON`` trains its model for a few steps."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from stepsight.dataset.harness.models.parallel import Training

STEPS = 4

if __name__ == "__main__":
    dist.init_process_group("gloo")
    training = Training(json.loads(sys.argv[1]), torch.device("cpu"))
    for _ in range(STEPS):
        training.step()
