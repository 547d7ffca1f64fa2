"""The hardware of a run: a row's words for devices and networks as presets or links."""

from __future__ import annotations

import re
from typing import Any

from stepsight.dataset.hardware.hardware import fabric_names, find_fabric, find_hardware, hardware_names, usual_fabric
from stepsight.experiments.evaluation.runs_table import Row, RowError, number_in

# Words of a row's hardware, the usual size of its memory in GB, and the kind of preset; the first that fits.
_DEVICES: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("gb300",), 279, "gb300-sxm"),
    (("b300",), 270, "b300-sxm"),
    (("gb200",), 186, "gb200-sxm"),
    (("b200",), 180, "b200-sxm"),
    (("h200",), 141, "h200-sxm"),
    (("h100", "pcie"), 80, "h100-pcie"),
    (("h100",), 80, "h100-sxm"),
    (("a100", "pcie"), 80, "a100-pcie"),
    (("a100",), 80, "a100-sxm"),
    (("v100", "pcie"), 32, "v100-pcie"),
    (("v100",), 32, "v100-sxm"),
    (("l40s",), 48, "l40s-pcie"),
    (("a40",), 48, "a40-pcie"),
)
# Words of a row's network between nodes, and the devices and presets that they stand for.
_FABRICS: tuple[tuple[str, str, str], ...] = (
    ("omni-path", "a100", "jean-zay-a100"),
    ("4 x 100gb roce", "a100", "roce-400-a100"),
    ("1600 gbps node-node", "a100", "roce-1600-a100"),
    ("inter_node_bandwidth=800 gbps", "a100", "a100-hdr-800"),
    ("400 gb/s rdma per gpu", "h100", "grand-teton-h100"),
    ("roce 400 gb/s per gpu", "h100", "grand-teton-h100"),
)
_BY_MACHINE = (("dgx-1", "dgx-1v"), ("dgx-2", "dgx-2"))  # words of the hardware itself
# Words that may stand beside a device's without making it another one.
_REMARKS = re.compile(r"nvidia|tesla|gpus?|tensor|core|hgx|dgx|nvl72|superchip|sxm[0-9]?|pcie|hbm[0-9]e?")
_MEMORY = re.compile(r"([0-9]{1,4}) ?gb\b")
_PORTS = re.compile(r"(?:(\d+) ?x ?)?(\d+) ?g(?:b/s|bps|bit/s|b)\b")
# Devices that NVLink joins, where these are more than a node has.
NVLINK_DOMAIN = {"gb200-nvl72": 72, "gb300-nvl72": 72}


def preset_of_device(row: Row) -> str:
    """The preset of a row's devices.

    Raises:
        RowError: If there is none.
    """
    text = row.text("hardware")
    if find_hardware(text) is not None:
        return text
    lower = text.lower()
    main = re.sub(r"\(.*?\)", " ", lower).split(",")[0]  # the rest are remarks
    stated, memory = _MEMORY.search(main), row.whole("gpu_mem_gb")
    if stated is not None and memory not in (None, int(stated[1])):
        raise RowError(f"hardware {text!r:.60} and gpu_mem_gb state different memories")
    memory = memory or (int(stated[1]) if stated else None)
    said = set(re.findall("[a-z0-9]+", _MEMORY.sub(" ", main))) | ({"pcie"} if "pcie" in lower else set())
    known = [words[0] for words, _, _ in _DEVICES if len(words) == 1]
    for words, usual, kind in _DEVICES:
        if said.issuperset(words) and all(map(_REMARKS.fullmatch, said - set(words))):
            name = f"{kind}-{memory or usual}gb"
            if find_hardware(name) is not None:
                return name
            known = [other for other in hardware_names() if other.startswith(f"{kind}-")]
            break
    named = repr(text[:60]) if text else "an unnamed device"
    raise RowError(f"no hardware preset for {named}{f' of {memory} GB' if memory else ''} (known: {', '.join(known)})")


def fabric_of(row: Row, hardware: str, gpus_per_node: int) -> Any:
    """A preset's name, or links from the ports that the row states; otherwise the usual fabric of the devices."""
    text, usual = row.text("inter_interconnect"), usual_fabric(hardware)
    if text in fabric_names():
        return text
    lower, machine = text.lower(), row.text("hardware").lower()
    named = [fabric for word, device, fabric in _FABRICS if word in lower and device in hardware]
    named += [fabric for word, fabric in _BY_MACHINE if word in machine]
    if named:
        return named[0]
    ports = _PORTS.search(lower)
    if ports is None:
        return usual
    gbits = number_in(ports[2], "inter_interconnect") * number_in(ports[1] or "1", "inter_interconnect")
    per_device = gbits / 8 / (1 if "per gpu" in lower else gpus_per_node)
    fabric = find_fabric(usual)
    if per_device * 1e9 == fabric.inter_node.bandwidth_bytes_per_s:
        return usual
    within, between = fabric.intra_node, fabric.inter_node
    slower = 1.5 if "roce" in lower or "rdma" in lower else 1.0  # Ethernet's latency over InfiniBand's
    return {
        "intra_node": _link(within.bandwidth_bytes_per_s / 1e9, within.latency_s),
        "inter_node": _link(per_device, between.latency_s * slower),
    }


def _link(gbytes_per_s: float, latency_s: float) -> dict[str, float]:
    return {"bandwidth_gbytes_per_s": gbytes_per_s, "latency_us": latency_s * 1e6}


def cluster_of(row: Row) -> dict[str, Any]:
    """The ``[cluster]`` table of a row's job."""
    gpus = row.gpus
    hardware = preset_of_device(row)
    per_node = min(gpus, _gpus_per_node(row))
    fabric = fabric_of(row, hardware, per_node)
    domain = NVLINK_DOMAIN.get(fabric) if isinstance(fabric, str) else None
    if domain is not None:
        per_node = max(size for size in range(1, domain + 1) if gpus % size == 0)
    if per_node < 1 or gpus % per_node:
        raise RowError("gpus_per_node does not divide gpus")
    return {"hardware": hardware, "nodes": gpus // per_node, "devices_per_node": per_node, "fabric": fabric}


def _gpus_per_node(row: Row) -> int:
    """GPUs per node as the row states or implies; 8 if it states nothing.  A partly used node is one node."""
    nodes, stated = row.whole("nodes"), row.whole("gpus_per_node")
    if nodes is None:
        return 8 if stated is None else stated
    of_each = row.gpus // max(nodes, 1) if stated is None else stated
    if nodes * of_each != row.gpus and not (nodes == 1 and row.gpus < of_each):
        raise RowError(f"nodes * gpus_per_node must be gpus, got {nodes} * {of_each} != {row.gpus}")
    return of_each
