"""Fabrics: the links within a node and between nodes. Only facts, in SI units, per device and per direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stepsight.dataset.base.errors import JobError

# Keys of a link in a job file, with its units.
_RANGES = {
    "bandwidth_gbytes_per_s": (1e-6, 1e6),
    "latency_us": (0.0, 1e9),
    "burst_bytes": (0.0, 1e12),
    "adapter_gbytes_per_s": (1e-6, 1e6),
    "message_us": (0.0, 1e9),
}
_NEEDED, _OPTIONAL = (
    {"bandwidth_gbytes_per_s", "latency_us"},
    {"burst_bytes", "adapter_gbytes_per_s", "ll128", "message_us"},
)


@dataclass(frozen=True, slots=True)
class Link:
    """The link of one device.

    Attributes:
        bandwidth_bytes_per_s: Per device and per direction.
        latency_s: Time for an empty message between two devices.
        burst_bytes: Of what follows a pause, so much passes at once (a limited link's bucket).
        ll128: Whether NCCL uses its protocol LL128 over this link: not where adapters are not behind the devices' own
            PCIe switch, or the network does not keep the order of 128 bytes.
        adapter_bytes_per_s: Bandwidth of one adapter that several devices share; if smaller than the bandwidth of a
            device, each has its own.
        message_s: Time of the host for each message that it posts: messages to one adapter follow each other no closer.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    burst_bytes: float = 0.0
    ll128: bool = True
    adapter_bytes_per_s: float = 0.0
    message_s: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 <= self.burst_bytes <= 1e12:
            raise JobError(f"a link's burst_bytes must lie within 0 and 1e12, got {self.burst_bytes}")
        if not (1e3 <= self.bandwidth_bytes_per_s <= 1e15 and 0 <= self.latency_s <= 1e3):
            raise JobError(
                "a link needs bandwidth_bytes_per_s from 1e3 to 1e15 and latency_s from 0 to 1000, got "
                f"{self.bandwidth_bytes_per_s} and {self.latency_s}"
            )
        if not 0 <= self.adapter_bytes_per_s <= 1e15:
            raise JobError(f"a link's adapter_bytes_per_s must lie within 0 and 1e15, got {self.adapter_bytes_per_s}")
        if not 0 <= self.message_s <= 1e3:
            raise JobError(f"a link's message_s must lie within 0 and 1000, got {self.message_s}")


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links within a node and between nodes."""

    name: str
    intra_node: Link
    inter_node: Link


def _link(key: str, link: Any) -> Link:
    """A link from its table."""
    if not isinstance(link, dict) or set(link) - _OPTIONAL != _NEEDED:
        raise JobError(
            f"fabric.{key} must be a table of bandwidth_gbytes_per_s (per device, per direction) and latency_us, and "
            f"may have {', '.join(sorted(_OPTIONAL))}, got {link!r:.80}"
        )
    for name, number in link.items():
        if name == "ll128":
            if not isinstance(number, bool):
                raise JobError(f"fabric.{key}.ll128 must be true or false, got {number!r:.80}")
            continue
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise JobError(f"fabric.{key}.{name} must be a number, got {number!r:.80}")
        least, most = _RANGES[name]
        if not least <= number <= most:
            raise JobError(f"fabric.{key}.{name} must be a number from {least:g} to {most:g}, got {number!r:.80}")
    return Link(
        link["bandwidth_gbytes_per_s"] * 1e9,
        link["latency_us"] * 1e-6,
        link.get("burst_bytes", 0.0),
        link.get("ll128", True),
        link.get("adapter_gbytes_per_s", 0.0) * 1e9,
        link.get("message_us", 1.0) * 1e-6,
    )


def fabric_from_dict(name: str, table: dict[str, Any]) -> Fabric:
    """A fabric from a table with ``intra_node`` and ``inter_node`` links in Gbyte/s per device and microseconds."""
    links = {key: _link(key, table.get(key)) for key in ("intra_node", "inter_node")}
    unknown = set(table) - set(links) - {"source"}
    if unknown:
        raise JobError(f"fabric has keys intra_node and inter_node, got also {', '.join(sorted(unknown))}")
    return Fabric(name, links["intra_node"], links["inter_node"])


# Fastest links of one device that exist (NVLink 5: 900 GB/s; XDR InfiniBand, one 800 Gb/s port per device: 100 GB/s).
FASTEST_INTRA, FASTEST_INTER = 900e9, 100e9


CLOSE = 0.05  # relative difference up to which a bandwidth counts as a multiple of the usual one


def _looks_like(link: Link, usual: Link, devices_per_node: int) -> str:
    """A probable mistake in a bandwidth relative to the device's usual one; empty if it is plausible."""
    times = link.bandwidth_bytes_per_s / usual.bandwidth_bytes_per_s
    kinds = [(2.0, "both directions together"), (8.0, "in Gbit/s")]
    if devices_per_node > 2:
        kinds.insert(0, (float(devices_per_node), f"a node's, of {devices_per_node} devices"))
        kinds.append((2.0 * devices_per_node, f"both directions of a node's {devices_per_node} devices"))
    return " or ".join(what for factor, what in kinds if abs(times / factor - 1) <= CLOSE)


def suspicious_links(fabric: Fabric, devices_per_node: int, usual: Fabric | None = None) -> tuple[str, ...]:
    """Bandwidths that are probably of a whole node, of both directions, or in bits.

    Args:
        fabric: Links as stated, which are to be one device's, in one direction, in bytes.
        devices_per_node: Of the cluster.
        usual: The usual links of the device, if they are known: multiples of them are suspicious.

    Returns:
        What looks wrong, for people.
    """
    found = []
    if usual is not None:
        for name, link, own in (
            ("intra_node", fabric.intra_node, usual.intra_node),
            ("inter_node", fabric.inter_node, usual.inter_node),
        ):
            what = _looks_like(link, own, devices_per_node)
            speed, known = link.bandwidth_bytes_per_s / 1e9, own.bandwidth_bytes_per_s / 1e9
            if what:
                found.append(
                    f"fabric.{name}.bandwidth_gbytes_per_s is per device and per direction, in Gbyte/s; {speed:g} is "
                    f"{speed / known:.3g} times what these devices usually have ({known:g}): is it {what}?"
                )
        if found:
            return tuple(found)
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
    adapter = fabric.inter_node.adapter_bytes_per_s
    if 0 < adapter < inter:
        found.append(
            f"fabric.inter_node.adapter_gbytes_per_s has no effect: it is the bandwidth of one adapter that several "
            f"devices share, and {adapter / 1e9:g} is less than bandwidth_gbytes_per_s of one device ({inter / 1e9:g})"
        )
    if devices_per_node > 1 and inter > intra:
        found.append(
            f"fabric.inter_node is faster than intra_node ({inter / 1e9:g} > {intra / 1e9:g} Gbyte/s per device): "
            f"is it a node's ({devices_per_node} devices: {inter / 1e9 / devices_per_node:g} each)?"
        )
    return tuple(found)
