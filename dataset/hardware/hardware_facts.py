"""Facts about a device (peaks, bandwidths and latencies) and about fabrics: links within a node and between nodes, per
device and per direction.  All in SI units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, DTYPE_BYTES, OP_KINDS, Collective, Op

# Least and most of a device's numbers.  No device will exceed them for decades; larger numbers are errors.
_SECONDS, _RATE, _SHARE, _FLOPS, _WATTS = (0.0, 1e3), (1.0, 1e18), (0.0, 1.0), (1.0, 1e21), (0.0, 1e6)


def _fact(default: Any, least: float = 0.0, most: float = 1e18) -> Any:
    """A number within a range."""
    return field(default=default, metadata={"range": (least, most)})


# Written only if they are known.
_OPTIONAL = ("host_kinds_s", "power_w", "idle_w", "product_power_w", "exponentials_per_s")
# Kinds of op around which a dispatcher of tokens runs its host code: four in a layer's forward and backward.
_DISPATCHED = ("permute", "unpermute", "unpermute_backward")
_LOAD_S = 5.5e-7  # from memory: by each row more of the longest sum in a public trace of 8 V100 (recommendation.md)
MOST_SLOWDOWN = 1.5  # at a power limit: base clocks are about two thirds of the highest ones

THROTTLED_S = (0.8e-3, 1.6e-3)  # a product in a table is as fast as at the highest clock below, slowed in full above


class LaunchCalls(NamedTuple):
    """How a host launches, as in ``ExecutionSpec``: ``op_calls``, ``dispatch_calls`` and ``launch_blocking``."""

    op: float = 1.0
    dispatch: float = 0.0
    blocking: bool = False


ONE_LAUNCH = LaunchCalls()


@dataclass(frozen=True)
class Hardware:
    """One kind of device."""

    name: str  # as in [cluster] hardware
    kind: str  # gpu or cpu
    peak_flops: dict[str, float] = field(hash=False, metadata={"range": _FLOPS})  # FLOP/s by dtype
    memory_bandwidth_bytes_per_s: float = _fact(MISSING, *_RATE)  # of the device's main memory
    memory_bytes: float = _fact(MISSING, *_RATE)  # capacity
    # streaming multiprocessors, over which a matrix product's tiles are spread; 0: unknown
    num_processors: int = _fact(0, 0, 10**9)
    # fraction of the peak that large matrix products reach (for the roofline alone)
    compute_efficiency: float = _fact(1.0, 1e-6, 1.0)
    # fraction of the bandwidth that streaming kernels reach (likewise)
    memory_efficiency: float = _fact(1.0, 1e-6, 1.0)
    op_latency_s: float = _fact(0.0, *_SECONDS)  # time of an op that does nothing, launch included
    # rate of the special function units, which attention shares its time with; 0: unknown
    exponentials_per_s: float = _fact(0.0)
    # part of an overlapped collective's time that it takes from the device's compute (1: nothing is gained by overlap,
    # 0: communication is free while hidden)
    comm_compute_share: float = _fact(0.0, *_SHARE)
    # standard deviation of a matrix product's time between devices of this kind, of its mean: those that move in step
    # wait for the slowest
    compute_spread: float = _fact(0.0, 0.0, 10.0)
    # time in which the host launches one op; 0 where ops run on the host itself
    host_op_s: float = _fact(0.0, *_SECONDS)
    # the same by kind of op or collective, where it was measured; of an optimizer by tensor
    host_kinds_s: dict[str, float] = field(default_factory=dict, hash=False, metadata={"range": _SECONDS})
    # host_action_s, host_message_s: what the runtime of a pipeline takes before each pass of a micro-batch, and to post
    # one side of a message
    host_action_s: float = _fact(0.0, *_SECONDS)
    host_message_s: float = _fact(0.0, *_SECONDS)
    host_link_bytes_per_s: float = _fact(25e9, *_RATE)  # between device and host, per direction
    host_memory_bandwidth_bytes_per_s: float = _fact(25e9, *_RATE)  # of the host's memory, a device's part of it
    reserved_bytes: float = _fact(0.0)  # memory that no tensor can have: context, libraries, communication buffers
    # part of what is allocated and freed within a step that the allocator needs on top; what stays (parameters,
    # optimizer states, buffers of gradients) needs nothing
    fragmentation: float = _fact(0.0, 0.0, 100.0)
    power_w: float = _fact(0.0, *_WATTS)  # board power in watts, as the vendor states it; 0: unknown
    # what the board draws at its highest clock without work, which a lower clock hardly saves; 0: unknown
    idle_w: float = _fact(0.0, *_WATTS)
    # watts that training would draw at the highest clock, by the type of its products: bf16 for 16 bits and more, fp8
    # for fewer; none: unknown.  More than power_w lowers the clock, while kernels measured alone end before it falls.
    product_power_w: dict[str, float] = field(default_factory=dict, hash=False, metadata={"range": _WATTS})
    source: str = ""  # where the numbers come from, with a date

    def __post_init__(self) -> None:
        for name in ("name", "kind", "source"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).isprintable():
                raise JobError(f"{name} of a hardware must be a printable text, got {getattr(self, name)!r:.80}")
        us = f"hardware {self.name:.80}:"
        if self.kind not in ("gpu", "cpu"):
            raise JobError(f"{us} kind must be gpu or cpu, got {self.kind!r:.80}")
        for each in fields(self):
            found, (least, most) = getattr(self, each.name), each.metadata.get("range", (None, None))
            if least is None:
                continue
            if each.hash is False and not isinstance(found, dict):
                raise JobError(f"{us} {each.name} must be a table of numbers, got {found!r:.80}")
            inside = {f".{key}": value for key, value in found.items()} if each.hash is False else {"": found}
            for key, value in inside.items():
                if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                    rule = f"must be a number from {least:g} to {most:g}, got {value!r:.80}"
                    raise JobError(f"{us} {each.name + key:.80} {rule}")
        if not self.peak_flops:
            raise JobError(f"{us} peak_flops must state a peak of one dtype at least, got none")
        if strange := sorted(set(self.peak_flops) - set(DTYPE_BYTES)):
            rule = f"peak_flops must name dtypes of {', '.join(DTYPE_BYTES)}"
            raise JobError(f"{us} {rule}, got {', '.join(strange):.80}")
        if unknown := sorted(set(self.host_kinds_s) - set(OP_KINDS) - set(COLLECTIVE_KINDS)):
            raise JobError(f"{us} host_kinds_s names ops and collectives, got {', '.join(unknown):.200}")

    @property
    def has_host(self) -> bool:
        """Whether a host launches ops, which takes time."""
        return self.host_op_s > 0 or bool(self.host_kinds_s)

    def power_slowdown(self, dtype: str) -> float:
        """Slowdown of matrix products in training relative to alone, because of the power limit.

        Power beyond ``idle_w`` grows with the cube of the clock, as voltage follows it: the clock falls by the cube
        root of the excess.  ``dtype``: of most matrix products of the job.
        """
        drawn = self.product_power_w.get(power_type(dtype), 0.0)
        if not self.idle_w < self.power_w < drawn:
            return 1.0
        return float(min(((drawn - self.idle_w) / (self.power_w - self.idle_w)) ** (1 / 3), MOST_SLOWDOWN))

    def latency_s(self, op: Op) -> float:
        """Seconds of an op of no size: of each of its kernels where a host launches them, and of loads in a chain."""
        kernels, loads = (op.record.launches, op.record.chain(*op.dims)) if self.has_host else (1, 0.0)
        return self.op_latency_s * kernels + _LOAD_S * loads

    def launch_s(self, work: Op | Collective, calls: LaunchCalls = ONE_LAUNCH) -> float:
        """The host's time to launch an op or collective; ``calls`` count for kinds of which no time was measured."""
        seconds = self.host_kinds_s.get(work.kind)
        if seconds is not None:
            return seconds * launch_units(work)
        launched = calls.op * (work.record.launches if isinstance(work, Op) else 1)
        if not calls.dispatch or not isinstance(work, Op):
            return self.host_op_s * launched
        if work.kind in _DISPATCHED:
            return self.host_op_s * calls.dispatch
        names = work.record.dim_names
        return self.host_op_s * float(work.dims[names.index("groups")] if "groups" in names else launched)

    def flops_per_s(self, dtype: str) -> float:
        """Peak for a dtype."""
        if dtype not in self.peak_flops:
            raise JobError(f"hardware {self.name} states no peak for {dtype}; it has {', '.join(self.peak_flops)}")
        return self.peak_flops[dtype]

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value or name not in _OPTIONAL}


@cached(4096)
def slowest_of(devices: int) -> float:
    """Expected maximum of the slowdowns of some devices, in standard deviations above their mean.

    Blom's approximation to the largest of as many normal deviates (Statistical Estimates, 1958).
    """
    return NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def throttled(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The part of the power limit's slowdown that products in 16 bits show in tables of kernels already, 0 to 1.

    A benchmark repeats a kernel, so that with a long one the clock falls.  In the tables of H100, H200 and B200
    (SGLang 0.5.14) the best tenth of products reaches 797, 790 and 1631 TFLOP/s if they take 0.4 to 0.8 ms, and 721,
    706 and 1490 if they take 1.6 to 3.2 ms.  Products in fp8 (TensorRT-LLM) show no such fall, and A100 has none.
    """
    start, end = THROTTLED_S
    return np.clip(np.log(np.maximum(seconds, start) / start) / math.log(end / start), 0.0, 1.0)


def power_type(dtype: str) -> str:
    """A key of ``Hardware.product_power_w``: ``fp8`` for types of a byte or less, ``bf16`` for all others."""
    return "fp8" if DTYPE_BYTES[dtype] == 1 else "bf16"


def launch_units(work: Op | Collective) -> float:
    """The host's time to launch an op relative to its kind's: an optimizer iterates over its tensors."""
    if not isinstance(work, Op) or "tensors" not in work.record.dim_names:
        return 1.0
    return float(max(1, work.dims[work.record.dim_names.index("tensors")]))


def hardware_from_dict(value: Mapping[str, Any]) -> Hardware:
    """Read the result of ``Hardware.to_dict``, or a preset's table."""
    if not isinstance(value, Mapping):
        raise JobError(f"a hardware table holds the fields of Hardware, got {value!r:.80}")
    known = {field.name: field for field in fields(Hardware)}
    unknown = sorted(map(str, set(value) - set(known)))
    missing = [name for name, f in known.items() if f.default is f.default_factory is MISSING and name not in value]
    if unknown or missing:
        named = f"hardware {value['name']!s:.80}" if "name" in value else "a hardware"
        wrong = [f"{', '.join(missing)} must be stated"] if missing else []
        wrong += [f"{', '.join(unknown):.200} must be left out"] if unknown else []
        raise JobError(f"{named}: {' and '.join(wrong)}; the fields are {', '.join(known)}")
    return Hardware(**value)


# Keys of a link in a job file, with its units: least and most, the field of ``Link`` and how many of its units one is.
LINK_KEYS = {
    "bandwidth_gbytes_per_s": (1e-6, 1e6, "bandwidth_bytes_per_s", 1e9),
    "latency_us": (0.0, 1e9, "latency_s", 1e-6),
    "burst_bytes": (0.0, 1e12, "burst_bytes", 1.0),
    "adapter_gbytes_per_s": (1e-6, 1e6, "adapter_bytes_per_s", 1e9),
    "message_us": (0.0, 1e9, "message_s", 1e-6),
    "paced_us": (0.0, 1e9, "paced_s", 1e-6),
    "rendezvous_us": (0.0, 1e9, "rendezvous_s", 1e-6),
    "inject_us": (0.0, 1e9, "inject_s", 1e-6),
    "ll_gbytes_per_s": (1e-6, 1e6, "ll_bytes_per_s", 1e9),
    "direct_share": (0.01, 1.0, "direct_share", 1.0),
    "scaling_loss": (0.0, 2.0, "scaling_loss", 1.0),
}
_NEEDED = ("bandwidth_gbytes_per_s", "latency_us")


@dataclass(frozen=True, slots=True)
class Link:
    """The link of one device."""

    bandwidth_bytes_per_s: float  # per device and per direction
    latency_s: float  # time for an empty message between two devices
    burst_bytes: float = 0.0  # of what follows a pause, so much passes at once (a limited link's bucket)
    # whether NCCL uses its protocol LL128 over this link: not where adapters are not behind the devices' own PCIe
    # switch, or the network does not keep the order of 128 bytes
    ll128: bool = True
    # bandwidth of one adapter that several devices share; if smaller than the bandwidth of a device, each has its own
    adapter_bytes_per_s: float = 0.0
    # time of the host for each message that it posts: messages to one adapter follow each other no closer
    message_s: float = 1e-6
    paced_s: float = 0.0  # the same for messages of a ring beyond those that a connection of NCCL holds; 0: message_s
    rendezvous_s: float = 0.0  # the same for a message that both sides agree on first, as those of Simple; 0: 3 of them
    inject_s: float = 0.0  # added to an exchange's message of few bytes, which the host reads from the device itself
    ll_bytes_per_s: float = 0.0  # most that a node moves in LL, whose lines hosts send; 0: what NCCL counts with
    direct_share: float = 1.0  # part of the bandwidth that each rank's messages to all others reach (all-to-all)
    scaling_loss: float = 0.0  # beyond four nodes a collective's bandwidth falls as (nodes / 4) ** -scaling_loss

    def __post_init__(self) -> None:
        defaults = {each.name: each.default for each in fields(self)}
        for least, most, name, unit in LINK_KEYS.values():
            value = getattr(self, name)
            if value != defaults[name] and not least * unit <= value <= most * unit:
                raise JobError(f"a link's {name} must lie within {least * unit:g} and {most * unit:g}, got {value}")


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links within a node and between nodes."""

    name: str
    intra_node: Link
    inter_node: Link


def fabric_from_dict(name: str, table: dict[str, Any]) -> Fabric:
    """A fabric from a table with ``intra_node`` and ``inter_node`` links in Gbyte/s per device and microseconds."""
    if unknown := sorted(map(str, set(table) - {"intra_node", "inter_node", "source"})):
        raise JobError(f"fabric has keys intra_node and inter_node, got also {', '.join(unknown)}")
    return Fabric(name, *(_link(key, table.get(key)) for key in ("intra_node", "inter_node")))


def _link(key: str, link: Any) -> Link:
    """A link from its table."""
    optional = {*LINK_KEYS, "ll128"} - set(_NEEDED)
    if not isinstance(link, dict) or set(link) - optional != set(_NEEDED):
        needed = "bandwidth_gbytes_per_s (per device, per direction) and latency_us"
        rule = f"must be a table of {needed}, and may have {', '.join(sorted(optional))}"
        raise JobError(f"fabric.{key} {rule}, got {link!r:.80}")
    values: dict[str, Any] = {"ll128": link.get("ll128", True)}
    if not isinstance(values["ll128"], bool):
        raise JobError(f"fabric.{key}.ll128 must be true or false, got {values['ll128']!r:.80}")
    for name, (least, most, fact, unit) in LINK_KEYS.items():
        value = link.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise JobError(f"fabric.{key}.{name} must be a number from {least:g} to {most:g}, got {value!r:.80}")
        values |= {fact: value * unit} if name in link else {}
    return Link(**values)


# Fastest links of one device that exist (NVLink 5: 900 GB/s; XDR InfiniBand, one 800 Gb/s port per device: 100 GB/s).
FASTEST = {"intra_node": 900e9, "inter_node": 100e9}
CLOSE = 0.05  # relative difference up to which a bandwidth counts as a multiple of the usual one


def suspicious_links(fabric: Fabric, devices_per_node: int, usual: Fabric | None = None) -> tuple[str, ...]:
    """Say which bandwidths are probably of a whole node, of both directions, or in bits.

    ``usual``: links of such devices, if they are known: multiples of them are suspicious.
    """
    kinds = [(2.0, "both directions together"), (8.0, "in Gbit/s")]
    if devices_per_node > 2:
        kinds.insert(0, (float(devices_per_node), f"a node's, of {devices_per_node} devices"))
        kinds.append((2.0 * devices_per_node, f"both directions of a node's {devices_per_node} devices"))
    found, speeds = [], {name: getattr(fabric, name).bandwidth_bytes_per_s for name in FASTEST}
    unit = "bandwidth_gbytes_per_s is per device and per direction, in Gbyte/s;"
    for name, speed in speeds.items() if usual is not None else ():
        known = getattr(usual, name).bandwidth_bytes_per_s
        if what := " or ".join(words for factor, words in kinds if abs(speed / known / factor - 1) <= CLOSE):
            found.append(
                f"fabric.{name}.{unit} {speed / 1e9:g} is {speed / known:.3g} times what these devices usually have "
                f"({known / 1e9:g}): is it {what}?"
            )
    if found:
        return tuple(found)
    for name, speed in speeds.items():
        if speed > 1.05 * FASTEST[name]:
            found.append(
                f"fabric.{name}.{unit} {speed / 1e9:g} is more than any device has ({FASTEST[name] / 1e9:g}): is it a "
                f"node's ({devices_per_node} devices: {speed / 1e9 / devices_per_node:g} each), or in Gbit/s "
                f"({speed / 8e9:g} Gbyte/s)?"
            )
    inter, intra = speeds["inter_node"], speeds["intra_node"]
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
