"""The identity of a machine: the device, the host and the versions that times depend on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from .device_clocks import ask


def gpu_name(device: torch.device) -> str:
    """Return the name by which ``nvidia-smi`` knows a GPU, whatever the order of GPUs in this process."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    name = f"GPU-{uuid.removeprefix('GPU-')}"
    alone = torch.cuda.device_count() == 1 and "CUDA_VISIBLE_DEVICES" not in os.environ
    return "0" if alone and not ask(name, "clocks.sm") else name


def fingerprint(device: torch.device) -> dict[str, Any]:
    """Return the properties of the machine that times depend on."""
    facts: dict[str, Any] = {
        "device": "cpu",
        "machine": platform.machine(),
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "torch": torch.__version__,
        "threads_per_rank": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = ask(gpu_name(device), "driver_version")
        facts |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "num_processors": properties.multi_processor_count,
            "cache_bytes": int(getattr(properties, "L2_cache_size", 0)),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **({"driver": driver[0]} if driver else {}),
        }
    return facts


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
