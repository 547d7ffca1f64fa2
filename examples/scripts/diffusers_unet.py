"""Diffusers' U-Net learns to take noise out of images, with data parallelism; needs ``diffusers``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn.parallel import DistributedDataParallel

BATCH, PIXELS, STEPS = 4, 32, 4


def main() -> None:
    """Train."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    model = UNet2DModel(
        sample_size=PIXELS, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)  # fmt: skip
    trained = DistributedDataParallel(model)
    noising, optimizer = DDPMScheduler(), torch.optim.AdamW(trained.parameters(), 1e-4)
    for _ in range(STEPS):
        images, noise = (torch.randn(BATCH, 3, PIXELS, PIXELS, device=device) for _ in range(2))
        steps = torch.randint(1000, (BATCH,), device=device)
        found = trained(noising.add_noise(images, noise, steps), steps).sample
        F.mse_loss(found, noise).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
