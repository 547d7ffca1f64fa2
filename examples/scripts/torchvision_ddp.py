"""A ResNet-50 of torchvision with data parallelism and mixed precision; needs ``torchvision``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet50

BATCH, PIXELS, STEPS = 8, 64, 4


def main() -> None:
    """Train."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    model = DistributedDataParallel(resnet50(weights=None).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(STEPS):
        images = torch.randn(BATCH, 3, PIXELS, PIXELS, device=device)
        labels = torch.randint(1000, (BATCH,), device=device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
