"""A job of the harness as a script: ``captured_job.py JOB_JSON [--autocast]`` trains its model for a few steps.

With ``--autocast`` the model is that of an fp32 job, and runs under ``torch.autocast`` in bf16.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from stepsight.dataset.harness.models.parallel import Training

STEPS = 4

if __name__ == "__main__":
    dist.init_process_group("gloo")
    asked, autocast = json.loads(sys.argv[1]), sys.argv[2:] == ["--autocast"]
    if autocast:
        asked["batch"]["precision"] = "fp32"
    training = Training(asked, torch.device("cpu"))
    if autocast:
        training.model.forward = torch.autocast("cuda", torch.bfloat16)(training.model.forward)
    for _ in range(STEPS):
        training.step()
