"""A training script of the study of captures: ``trained_job.py JOB_JSON [--autocast]`` trains a job's model.

With ``--autocast`` it trains that of an fp32 job, under ``torch.autocast`` in bf16.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from stepsight.dataset.harness.models.parallel import Training

STEPS = 4


def train_job(asked: dict[str, Any], *, autocast: bool) -> None:
    """Train for ``STEPS`` steps."""
    if autocast:
        asked["batch"]["precision"] = "fp32"
    training = Training(asked, torch.device("cpu"))
    if autocast:
        training.model.forward = torch.autocast("cuda", torch.bfloat16)(training.model.forward)
    for _ in range(STEPS):
        training.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train_job(json.loads(sys.argv[1]), autocast=sys.argv[2:] == ["--autocast"])
