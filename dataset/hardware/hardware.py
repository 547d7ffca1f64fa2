"""Known hardware and fabrics by name, and those in users' files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from stepsight.dataset.base.bounded import parsing
from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import SUFFIXES, file_version, only_one, preset, read_facts
from stepsight.dataset.base.registry import Registry, did_you_mean, instance_of
from stepsight.dataset.hardware.hardware_facts import Fabric as Fabric
from stepsight.dataset.hardware.hardware_facts import Hardware as Hardware
from stepsight.dataset.hardware.hardware_facts import Link as Link
from stepsight.dataset.hardware.hardware_facts import fabric_from_dict as fabric_from_dict
from stepsight.dataset.hardware.hardware_facts import hardware_from_dict as hardware_from_dict
from stepsight.dataset.hardware.hardware_facts import launch_units as launch_units
from stepsight.dataset.hardware.hardware_facts import suspicious_links as suspicious_links
from stepsight.dataset.kinds.op import DTYPE_BYTES, Collective, Op

BOX = "box"  # the preset of clusters in a box, whose roofline gives the sleeping times
LEAST_FACT = 1e6  # FLOP/s, byte/s and byte of a device in a user's file: below, the number is in another unit


def reported_devices() -> Mapping[str, str]:
    """Presets by the names that drivers report."""
    return preset("hardware.toml")["reported"]  # type: ignore[no-any-return]


@cached(1)
def _presets() -> tuple[Mapping[str, Hardware], Mapping[str, Fabric]]:
    """Hardware and fabrics of the package."""
    return _from_tables(preset("hardware.toml"))


def _from_tables(tables: Mapping[str, Any]) -> tuple[Mapping[str, Hardware], Mapping[str, Fabric]]:
    hardware = {n: hardware_from_dict({"name": n, **table}) for n, table in tables.get("hardware", {}).items()}
    return hardware, {name: fabric_from_dict(name, table) for name, table in tables.get("fabric", {}).items()}


HARDWARE: Registry[Hardware] = Registry(
    "hardware",
    lambda: _presets()[0],
    group="stepsight.hardware",
    check=instance_of(Hardware),
    more="a .json or .toml file",
)
FABRICS: Registry[Fabric] = Registry(
    "fabric",
    lambda: _presets()[1],
    group="stepsight.fabrics",
    check=instance_of(Fabric),
    more="a .json or .toml file, or a table of links",
)


def find_hardware(name: str) -> Hardware | None:
    """The hardware of a name, or of a ``.json`` or ``.toml`` file; None if the name is unknown."""
    if name.startswith("{"):
        return _stated(name)
    return _hardware_file(name)[0] if name.endswith(SUFFIXES) else HARDWARE.get(name)


def canonical_hardware(name: str) -> str:
    """The preset that a usual name means (``H100``, ``A100-SXM4-80GB``); other names unchanged."""
    if not name or name.startswith("{") or name.endswith(SUFFIXES) or name in HARDWARE:
        return name
    words, aliases = device_words(name), preset("hardware.toml")["alias"]
    if words in HARDWARE:
        return words
    same = [known for known in HARDWARE if set(words.split("-")) == set(known.split("-"))]
    begins = [known for known in HARDWARE if known.startswith(f"{words}-")]
    return aliases.get(words) or next((found[0] for found in (same, begins) if len(found) == 1), name)


def unknown_hardware(name: str) -> str:
    """The error for an unknown name: the rule, the value, and the probable intention."""
    message = HARDWARE.unknown(name)
    near = "" if "did you mean" in message else did_you_mean(device_words(name), preset("hardware.toml")["alias"])
    return message + near


def stated_hardware(table: Mapping[str, Any]) -> str:
    """The table ``[cluster.hardware]`` of a job as the text that represents it in a ``Job``."""
    with parsing("cluster.hardware must be a table of numbers and texts", JobError):
        return json.dumps({"name": "custom", **table}, sort_keys=True)


@cached(64)
def _stated(text: str) -> Hardware:
    """The hardware in a job's own table."""
    try:
        found = hardware_from_dict(json.loads(text))
    except ValueError as error:
        raise JobError(f"cluster.hardware: {error}") from None
    if found.name in HARDWARE:
        raise JobError(f"cluster.hardware.name: {found.name!r} is the name of a known hardware: choose another name")
    return found


def hardware_name(name: str) -> str:
    """The name of the hardware in a ``.json`` or ``.toml`` file; of everything else, the name itself."""
    own = find_hardware(name) if name.startswith("{") or name.endswith(SUFFIXES) else None
    return name if own is None else own.name


def find_fabric(name: str) -> Fabric:
    """The fabric of that name, or of a ``.json`` or ``.toml`` file."""
    return only_one(facts_in(name)[1], "fabric", name) if name.endswith(SUFFIXES) else FABRICS[name]


def _hardware_file(path: str) -> tuple[Hardware, Mapping[str, Fabric]]:
    """The hardware of a file, and the fabrics beside it."""
    hardware, fabrics = facts_in(path)
    found = only_one(hardware, "hardware", path)
    if found.name in HARDWARE:
        raise JobError(f"{path}: {found.name!r} is already the name of a known hardware: choose another name")
    return found, fabrics


def facts_in(path: str) -> tuple[Mapping[str, Hardware], Mapping[str, Fabric]]:
    """Hardware and fabrics of a file, by name."""
    return _read_facts(path, file_version(path))


@cached(64)
def _read_facts(path: str, version: tuple[int, int]) -> tuple[Mapping[str, Hardware], Mapping[str, Fabric]]:
    """Content of a file; ``version`` makes the cache read a changed file again."""
    try:
        found = _from_tables(read_facts(path, ("hardware", "fabric")))
    except JobError as error:
        raise JobError(f"{path}: {error}") from None
    for hardware in found[0].values():
        facts = {f"peak_flops.{dtype}": (peak, "FLOP/s") for dtype, peak in hardware.peak_flops.items()}
        facts["memory_bandwidth_bytes_per_s"] = hardware.memory_bandwidth_bytes_per_s, "byte/s"
        facts["memory_bytes"] = hardware.memory_bytes, "byte"
        for name, (value, unit) in facts.items():
            if value < LEAST_FACT:  # in units that are 10^9 or 10^12 times too large, as TFLOP/s and Gbyte/s
                rule = f"{name} is in {unit}, of which a device has {LEAST_FACT:g} at least"
                advice = f"write {value:g}e9 or {value:g}e12 in place of {value:g}"
                raise JobError(f"{path}: hardware {hardware.name:.80}: {rule}: {advice}")
    return found


def usual_fabric(hardware: str, default: str | None = None) -> str:
    """The usual fabric of a hardware: the one in its file, that of its vendor's own systems, or ``default``."""
    if hardware.endswith(SUFFIXES) and _hardware_file(hardware)[1]:
        return hardware
    words = set(hardware_name(hardware).split("-"))
    usual: dict[str, str] = preset("hardware.toml")["usual_fabric"]
    found = next((fabric for needed, fabric in usual.items() if words.issuperset(needed.split())), default)
    if found is None and find_hardware(hardware) is None:
        rule = "for hardware that only a predictor knows, state cluster.fabric too"
        raise JobError(f"cluster.{unknown_hardware(hardware)}; {rule}")
    if found is None:
        beside = "a [fabric.NAME] in its file, " if hardware.endswith(SUFFIXES) else ""
        raise JobError(
            f"cluster.fabric must be stated, since no usual fabric is known for hardware {hardware!r:.80}: name one of "
            f"{', '.join(FABRICS.names())}, a .json or .toml file, {beside}or a table of links"
        )
    return found


def read_fabric_words(text: str, hardware: str) -> tuple[tuple[str, ...], str]:
    """Presets that words for links between nodes name (``8x 400 Gb/s InfiniBand per node``), the best first; a warning.

    Numbers, remarks in parentheses and words that name no technology other than InfiniBand and RoCE say nothing here.
    Ethernet alone may be RoCE or NCCL's sockets, which are ten times slower: it is not understood.
    """
    from difflib import get_close_matches  # slow to import, and seldom needed

    if text in FABRICS:
        return (text,), ""
    table, links = preset("hardware.toml")["fabric_words"], find_fabric(usual_fabric(hardware)).intra_node
    named, usual = table["presets"], {"nccl", *hardware_name(hardware).split("-"), *table["usual"].split()}
    said = re.sub(r"\([^)]*\)", " ", text.lower()).replace("omni-path", "omnipath")
    said = re.sub(r"(?<![a-z0-9])(?:\d+x)?[\d.]*(?=[a-z])", " ", said)  # 8x100GbE
    words = dict.fromkeys(re.findall(r"(?<![a-z0-9])[a-z][a-z0-9]+", said))
    if {"roce", "rocev2", "rdma"} & words.keys():
        words = {word: None for word in words if word not in table["either"]}

    def fits(preset: str) -> bool:
        return FABRICS[preset].intra_node.bandwidth_bytes_per_s == links.bandwidth_bytes_per_s

    found = [preset for word in words for preset in named.get(word, ()) if fits(preset)]
    unknown = [word for word in words if word not in usual]
    if found or not unknown:
        return tuple(dict.fromkeys(found)), ""
    known = {**named, **table["either"]}
    near = [preset for word in unknown for key in get_close_matches(word, known) for preset in known[key]]
    listed = ", ".join([*dict.fromkeys(filter(fits, [*near, *FABRICS]))][:6])
    told = f"words for the fabric of {hardware_name(hardware)} are not understood ({', '.join(unknown):.80})"
    return (), f"{told}: links as of InfiniBand are assumed; name a preset, such as {listed}"


_VENDORS = re.compile(
    r"^(nvidia|amd|intel|google|huawei|apple|tesla|instinct|geforce|habana|cloud)-|-(gpu|oam|server|tensor-core)$"
)


def device_words(name: str) -> str:
    """A name in lower case with dashes, without the vendor and the number of its socket."""
    words, before = re.sub(r"[^a-z0-9.]+", "-", name.strip().lower()).strip("-"), ""
    while before != words:
        before, words = words, _VENDORS.sub("", words)
    words = re.sub(r"(\d)-gb\b", r"\1gb", re.sub(r"\bsxm\d\b", "sxm", words))
    return re.sub(r"\b(hbm\d?e?|gddr\d?x?|vram)\b-?", "", words).strip("-")


def roofline_seconds(op: Op, hardware: Hardware) -> float:
    """Seconds of one op at the hardware's reachable peaks (Williams et al. 2009, doi:10.1145/1498765.1498785).

    Transfers take the link to the host instead, ops on the host its memory, calls of the host its time for a launch.
    Batched products in 16 bits of rows that are no multiples of 16 bytes miss the tensor cores' efficient kernels
    (NVIDIA, "Matrix Multiplication Background User's Guide", 2023): they are taken to run at the rate of fp32, as two
    of BLOOM's runs with heads of 108 did (rows 3343 and 3348 of the first table).
    """
    bound = op.record.bound
    if bound == "host":
        return op.dims[0] * hardware.host_op_s
    if bound in ("host_memory", "host_link"):
        memory, link = hardware.host_memory_bandwidth_bytes_per_s, hardware.host_link_bytes_per_s
        return op.num_bytes / (memory if bound == "host_memory" else link) + hardware.op_latency_s
    if bound == "memory" and op.dtype not in hardware.peak_flops:  # as masks, whose elements have the bytes of an fp8
        peak = max(hardware.peak_flops.values())
    else:
        peak = hardware.flops_per_s(op.dtype)
    if op.kind == "batched_matmul" and DTYPE_BYTES[op.dtype] == 2 and any(size % 8 for size in op.dims[2:]):
        peak = min(peak, hardware.peak_flops.get("fp32", peak))
    compute = op.flops / (peak * hardware.compute_efficiency)
    memory = op.num_bytes / (hardware.memory_bandwidth_bytes_per_s * hardware.memory_efficiency)
    return max(compute, memory) + hardware.latency_s(op)


def exponential_seconds(op: Op, hardware: Hardware) -> float:
    """Seconds of an attention's exponentials, one for each pair of a query and a key; 0 where no rate is known."""
    if not hardware.exponentials_per_s or not op.record.keeps_second_operand or op.record.operands is None:
        return 0.0
    return op.record.operands(*op.dims)[1] * (0.5 if op.dims[-1] else 1.0) / hardware.exponentials_per_s


def alpha_beta_seconds(collective: Collective, fabric: Fabric) -> float:
    """Seconds of one collective by steps and bytes on the slowest link it crosses.

    Ring costs as in Thakur et al. 2005 (doi:10.1177/1094342005051521) with a hierarchical latency: a group of
    ``n`` ranks on ``m`` nodes pays ``n / m`` steps within a node and ``m`` between nodes.  What crosses nodes leaves
    through the links of all the group's ranks on a node at once (NCCL's rings, one per NIC), but no faster than these
    can be reached within the node; a message takes its own link, and so does what each rank has for others
    (all-to-all), of which only what is for other nodes leaves the node.
    """
    size, nodes = collective.group_size, collective.num_nodes
    link = fabric.inter_node if nodes > 1 else fabric.intra_node
    record = collective.record
    if record.route == "message":
        return link.latency_s + collective.num_bytes / link.bandwidth_bytes_per_s
    near, bandwidth = collective.ranks_per_node, link.bandwidth_bytes_per_s
    latency = (near - 1) * fabric.intra_node.latency_s + (nodes - 1) * fabric.inter_node.latency_s
    if record.route == "direct":
        within = (near - 1) / size * collective.num_bytes / fabric.intra_node.bandwidth_bytes_per_s
        across = (size - near) / size * collective.num_bytes / bandwidth
        return latency + max(within, across)
    if nodes > 1:
        bandwidth = min(fabric.intra_node.bandwidth_bytes_per_s, near * bandwidth)
    return record.passes * (latency + (size - 1) / size * collective.num_bytes / bandwidth)
