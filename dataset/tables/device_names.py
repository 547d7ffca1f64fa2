"""Names of devices as drivers give them, to names of hardware presets."""

from __future__ import annotations

import re
from types import MappingProxyType

# What `nvidia-smi` and `torch.cuda.get_device_name` say.
PRESETS = MappingProxyType(
    {
        "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
        "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
        "NVIDIA A100-PG509-200": "a100-sxm-40gb",  # of Meta's servers
        "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
        "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
        "NVIDIA H100": "h100-sxm-80gb",  # as some tables shorten it
        "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
        "NVIDIA H100 PCIe": "h100-pcie-80gb",
        "NVIDIA H100 NVL": "h100-nvl-94gb",
        "NVIDIA H200": "h200-sxm-141gb",
        "NVIDIA B200": "b200-sxm-180gb",
        "NVIDIA GB200": "gb200-sxm-186gb",
        "NVIDIA L4": "l4-pcie-24gb",
        "NVIDIA L40S": "l40s-pcie-48gb",
        "NVIDIA A40": "a40-pcie-48gb",
        "Tesla V100-SXM2-16GB": "v100-sxm-16gb",
        "Tesla V100-SXM2-32GB": "v100-sxm-32gb",
        "Tesla V100-SXM2-16GB-LS": "v100-sxm-16gb",
        "Tesla V100-SXM2-32GB-LS": "v100-sxm-32gb",
        "Tesla V100-DGXS-16GB": "v100-sxm-16gb",
        "Tesla V100-DGXS-32GB": "v100-sxm-32gb",
        "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
        "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
        "Tesla T4": "t4-pcie-16gb",
        "AMD Instinct MI300X": "mi300x-192gb",
        "AMD Instinct MI300X OAM": "mi300x-192gb",
        "AMD Instinct MI300X VF": "mi300x-192gb",  # a virtual function: the whole device
        "AMD Instinct MI250X": "mi250x-gcd-64gb",
        "Tesla P4": "p4-pcie-8gb",
    }
)


def device_name(told: str) -> str:
    """Preset of a device; where none is known, its name in lower case with dashes."""
    told = told.strip()
    return PRESETS.get(told) or re.sub(r"[^a-z0-9]+", "-", told.removeprefix("NVIDIA ").lower()).strip("-")
