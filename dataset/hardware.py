"""Hardware: what devices and links are.  Facts only, in SI units, per device and per direction."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from stepsight.dataset.errors import JobError
from stepsight.dataset.op import COLLECTIVE_KINDS, OP_KINDS, Collective, Op


@dataclass(frozen=True, slots=True)
class Link:
    """One device's way to others.

    Attributes:
        bandwidth_bytes_per_s: Per device and per direction.
        latency_s: Time for an empty message between two devices.
        burst_bytes: Of what follows a pause, so much passes at once (a limited link's bucket).
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.burst_bytes <= 1e12:
            raise JobError(f"a link's burst_bytes must lie within 0 and 1e12, got {self.burst_bytes}")
        if not (1e3 <= self.bandwidth_bytes_per_s <= 1e15 and 0 <= self.latency_s <= 1e3):
            raise JobError(
                "a link needs bandwidth_bytes_per_s from 1e3 to 1e15 and latency_s from 0 to 1000, got "
                f"{self.bandwidth_bytes_per_s} and {self.latency_s}"
            )


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links within a node and between nodes."""

    name: str
    intra_node: Link
    inter_node: Link


# Least and most of a device's numbers.  No device has more within decades; beyond, a number is an error or made up.
_SECONDS, _RATE, _BYTES, _SHARE, _FLOPS = (0.0, 1e3), (1.0, 1e18), (1.0, 1e18), (0.0, 1.0), (1.0, 1e21)
_RANGES = {
    "memory_bandwidth_bytes_per_s": _RATE,
    "memory_bytes": _BYTES,
    "num_processors": (0, 10**9),
    "compute_efficiency": (1e-6, 1.0),
    "memory_efficiency": (1e-6, 1.0),
    "op_latency_s": _SECONDS,
    "comm_compute_share": _SHARE,
    "compute_spread": (0.0, 10.0),
    "host_op_s": _SECONDS,
    "host_action_s": _SECONDS,
    "host_message_s": _SECONDS,
    "host_link_bytes_per_s": _RATE,
    "host_memory_bandwidth_bytes_per_s": _RATE,
    "reserved_bytes": (0.0, 1e18),
    "fragmentation": (0.0, 100.0),
}


@dataclass(frozen=True)
class Hardware:
    """One kind of device.

    Attributes:
        name: As in ``[cluster] hardware``.
        kind: ``gpu`` or ``cpu``.
        peak_flops: FLOP/s by dtype.
        memory_bandwidth_bytes_per_s: Of the device's main memory.
        memory_bytes: Capacity.
        num_processors: Streaming multiprocessors, over which a matrix product's tiles are spread; 0: unknown.
        compute_efficiency: Fraction of the peak that large matrix products reach (for the roofline alone).
        memory_efficiency: Fraction of the bandwidth that streaming kernels reach (likewise).
        op_latency_s: Time of an op that does nothing, launch included.
        comm_compute_share: Part of an overlapped collective's time that it takes from the device's compute
            (1: nothing is gained by overlap, 0: communication is free while hidden).
        compute_spread: Standard deviation of a matrix product's time between devices of this kind, of its mean: those
            that move in step wait for the slowest.
        host_op_s: Time in which the host launches one op; 0 where ops run on the host itself.
        host_kinds_s: The same by kind of op or collective, where it was measured; of an optimizer by tensor.
        host_action_s, host_message_s: What the runtime of a pipeline takes before each pass of a micro-batch, and to
            post one side of a message.
        host_link_bytes_per_s: Between device and host, per direction.
        host_memory_bandwidth_bytes_per_s: Of the host's memory, a device's part of it.
        reserved_bytes: Memory that no tensor can have: context, libraries, communication buffers.
        fragmentation: Part of what tensors take that the allocator needs on top.
        source: Where the numbers come from, with a date.
    """

    name: str
    kind: str
    peak_flops: dict[str, float] = field(hash=False)
    memory_bandwidth_bytes_per_s: float
    memory_bytes: float
    num_processors: int = 0
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    op_latency_s: float = 0.0
    comm_compute_share: float = 0.0
    compute_spread: float = 0.0
    host_op_s: float = 0.0
    host_kinds_s: dict[str, float] = field(default_factory=dict, hash=False)
    host_action_s: float = 0.0
    host_message_s: float = 0.0
    host_link_bytes_per_s: float = 25e9
    host_memory_bandwidth_bytes_per_s: float = 25e9
    reserved_bytes: float = 0.0
    fragmentation: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for table in ("peak_flops", "host_kinds_s"):
            if not isinstance(getattr(self, table), dict):
                raise JobError(
                    f"hardware {self.name!s:.80}: {table} must be a table of numbers, got {getattr(self, table)!r:.80}"
                )
        numbers = {name: (getattr(self, name), within) for name, within in _RANGES.items()}
        numbers |= {f"peak_flops.{dtype}": (peak, _FLOPS) for dtype, peak in self.peak_flops.items()}
        numbers |= {f"host_kinds_s.{kind}": (value, _SECONDS) for kind, value in self.host_kinds_s.items()}
        for name, (value, (least, most)) in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise JobError(
                    f"hardware {self.name!s:.80}: {name:.80} must be a number from {least:g} to {most:g}, "
                    f"got {value!r:.80}"
                )
        for name in ("name", "kind", "source"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).isprintable():
                raise JobError(f"{name} of a hardware must be a printable text, got {getattr(self, name)!r:.80}")
        if not self.peak_flops:
            raise JobError(f"hardware {self.name:.80}: peak_flops must state a peak of one dtype at least, got none")
        unknown = sorted(set(self.host_kinds_s) - set(OP_KINDS) - set(COLLECTIVE_KINDS))
        if unknown:
            raise JobError(
                f"hardware {self.name}: host_kinds_s names ops and collectives, got {', '.join(unknown):.200}"
            )

    @property
    def has_host(self) -> bool:
        """Whether a host launches ops, and takes time for it."""
        return self.host_op_s > 0 or bool(self.host_kinds_s)

    def launch_s(self, work: Op | Collective) -> float:
        """What the host takes to launch an op or collective."""
        seconds = self.host_kinds_s.get(work.kind)
        return self.host_op_s if seconds is None else seconds * launch_units(work)

    def flops_per_s(self, dtype: str) -> float:
        """Peak for a dtype."""
        if dtype not in self.peak_flops:
            raise JobError(f"hardware {self.name} states no peak for {dtype}; it has {', '.join(self.peak_flops)}")
        return self.peak_flops[dtype]

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "host_kinds_s" or value}


def launch_units(work: Op | Collective) -> float:
    """How many times what its kind takes the host takes to launch it: an optimizer goes through its tensors."""
    if not isinstance(work, Op) or "tensors" not in work.record.dim_names:
        return 1.0
    return float(max(1, work.dims[work.record.dim_names.index("tensors")]))


def hardware_from_dict(value: dict[str, Any]) -> Hardware:
    """Read what ``Hardware.to_dict`` wrote, or a preset's table."""
    if not isinstance(value, dict):
        raise JobError(f"a hardware table holds the fields of Hardware, got {value!r:.80}")
    try:
        return Hardware(**value)
    except TypeError as error:
        raise JobError(
            f"a hardware table holds the fields of Hardware, got {sorted(value)!s:.80} ({error!s:.80})"
        ) from None


@cache
def _presets() -> dict[str, dict[str, Any]]:
    text = resources.files("stepsight.dataset").joinpath("presets/hardware.toml").read_text("utf-8")
    return tomllib.loads(text)


def hardware_names() -> tuple[str, ...]:
    """Names of the presets."""
    return tuple(_presets()["hardware"])


def find_hardware(name: str) -> Hardware | None:
    """The preset of that name, or None."""
    table = _presets()["hardware"].get(name)
    return None if table is None else hardware_from_dict({"name": name, **table})


def fabric_names() -> tuple[str, ...]:
    return tuple(_presets()["fabric"])


def find_fabric(name: str) -> Fabric:
    """The preset fabric of that name.

    Raises:
        JobError: If there is none; the message lists those there are.
    """
    table = _presets()["fabric"].get(name)
    if table is None:
        raise JobError(f"fabric must be one of {', '.join(fabric_names())} or a table of links, got {name!r:.80}")
    return fabric_from_dict(name, table)


MOST_NUMBER = 1e100


# A word of a hardware's name and the fabric of its vendor's own systems; the first that fits.
_USUAL_FABRICS = {
    ("h100", "pcie"): "pcie-gen5",
    ("pcie",): "pcie-gen4",
    ("a100",): "dgx-a100",
    ("h100",): "dgx-h100",
    ("h200",): "dgx-h100",
    ("b200",): "dgx-b200",
    ("b300",): "dgx-b300",
    ("gb200",): "gb200-nvl72",
    ("gb300",): "gb300-nvl72",
    ("v100",): "dgx-1v",
    ("cpu",): "loopback",
}


def usual_fabric(hardware: str) -> str:
    """The fabric that comes with some hardware, where a job names none."""
    words = set(hardware.split("-"))
    return next((fabric for needed, fabric in _USUAL_FABRICS.items() if words.issuperset(needed)), "dgx-a100")


def fabric_from_dict(name: str, table: dict[str, Any]) -> Fabric:
    """A fabric from a table with ``intra_node`` and ``inter_node`` links in Gbyte/s per device and microseconds."""
    links = {}
    for key in ("intra_node", "inter_node"):
        link = table.get(key)
        if not isinstance(link, dict) or set(link) - {"burst_bytes"} != {"bandwidth_gbytes_per_s", "latency_us"}:
            raise JobError(
                f"fabric.{key} must be a table of bandwidth_gbytes_per_s (per device, per direction) and latency_us, "
                f"got {link!r:.80}"
            )
        for field_name, number in link.items():
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise JobError(f"fabric.{key}.{field_name} must be a number, got {number!r:.80}")
            if not -MOST_NUMBER < number < MOST_NUMBER:
                raise JobError(f"fabric.{key}.{field_name} must be a number of less than {MOST_NUMBER:g}")
        links[key] = Link(link["bandwidth_gbytes_per_s"] * 1e9, link["latency_us"] * 1e-6, link.get("burst_bytes", 0.0))
    unknown = set(table) - set(links) - {"source"}
    if unknown:
        raise JobError(f"fabric has keys intra_node and inter_node, got also {', '.join(sorted(unknown))}")
    return Fabric(name, links["intra_node"], links["inter_node"])


# Fastest links of one device that exist (NVLink 5: 900 GB/s; XDR InfiniBand, one 800 Gb/s port per device: 100 GB/s).
FASTEST_INTRA, FASTEST_INTER = 900e9, 100e9


def suspicious_links(fabric: Fabric, devices_per_node: int) -> tuple[str, ...]:
    """Bandwidths that look like those of a whole node, or in bits, where those of one device in bytes are asked for."""
    found = []
    for name, link, fastest in (
        ("intra_node", fabric.intra_node, FASTEST_INTRA),
        ("inter_node", fabric.inter_node, FASTEST_INTER),
    ):
        speed = link.bandwidth_bytes_per_s
        if speed > 1.05 * fastest:
            found.append(
                f"fabric.{name}.bandwidth_gbytes_per_s is per device and per direction, in Gbyte/s; {speed / 1e9:g} is "
                f"more than any device has ({fastest / 1e9:g}): is it a node's ({devices_per_node} devices: "
                f"{speed / 1e9 / devices_per_node:g} each), or in Gbit/s ({speed / 8e9:g} Gbyte/s)?"
            )
    inter, intra = fabric.inter_node.bandwidth_bytes_per_s, fabric.intra_node.bandwidth_bytes_per_s
    if devices_per_node > 1 and inter > intra:
        found.append(
            f"fabric.inter_node is faster than intra_node ({inter / 1e9:g} > {intra / 1e9:g} Gbyte/s per device): "
            f"is it a node's ({devices_per_node} devices: {inter / 1e9 / devices_per_node:g} each)?"
        )
    return tuple(found)
