"""What facts alone imply: roofline time of an op, latency-bandwidth time of a collective.

Both carry the scale that the learned parts correct.
"""

from __future__ import annotations

from stepsight.dataset.hardware.hardware import Fabric, Hardware
from stepsight.dataset.kinds.op import Collective, Op


def roofline_seconds(op: Op, hardware: Hardware) -> float:
    """Seconds of one op at the hardware's reachable peaks (Williams et al. 2009, doi:10.1145/1498765.1498785).

    Transfers take the link to the host instead, ops on the host its memory, calls of the host its time for a launch.
    """
    bound = op.record.bound
    if bound == "host":
        return op.dims[0] * hardware.host_op_s
    if bound == "host_memory":
        return op.num_bytes / hardware.host_memory_bandwidth_bytes_per_s + hardware.op_latency_s
    if bound == "host_link":
        return op.num_bytes / hardware.host_link_bytes_per_s + hardware.op_latency_s
    if bound == "memory" and op.dtype not in hardware.peak_flops:  # as masks, whose elements have the bytes of an fp8
        peak = max(hardware.peak_flops.values())
    else:
        peak = hardware.flops_per_s(op.dtype)
    compute = op.flops / (peak * hardware.compute_efficiency)
    memory = op.num_bytes / (hardware.memory_bandwidth_bytes_per_s * hardware.memory_efficiency)
    return max(compute, memory) + hardware.op_latency_s


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
