"""Numbers from collectives on a fabric: the terms of their time, and features for the trees.

A collective is seen relative to the links that it crosses, so what is learned on one fabric serves others: links of
another rate, nodes of another size.  ``collective_terms`` are those of messages that a host sends itself.

``nccl_terms`` are those of NCCL: rings go from rank to rank within a node, and from node to node through the adapters
of all ranks at once.  All-to-all and messages go straight to their target.  Sums over many nodes also go up and down
trees, whose depth is logarithmic (NVIDIA, "Massively scale your deep learning training with NCCL 2.4", 2019).

``choice_terms`` are the times of each algorithm (ring, tree, NVLS tree, PAT) and protocol (LL, LL128, Simple) that NCCL
may choose between nodes; it compares a latency plus bytes over a bandwidth, and runs the cheapest.  The constants are
those of its own comparison (``presets/nccl.toml``).  They hold for NVLink and InfiniBand as in the vendor's own
systems.  A fabric's stated bandwidths scale them, and the latency that it states beyond InfiniBand's is added to each
step.  CollNet is left out, since it needs switches that sum, which a fabric does not state.  A partly filled node
counts as a full one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.files import preset
from stepsight.dataset.hardware.hardware import Fabric
from stepsight.dataset.kinds.op import Collective

Array = NDArray[np.float64]

COLLECTIVE_TERMS = ("calls", "steps", "buffer_bytes", "wire_seconds", "messages")
OVERLAPPING = (3, 4)  # terms that overlap, in each of the three lists: the longer one counts
COLLECTIVE_FEATURES = ("kind", "log_bytes", "log_group_size", "log_ranks_per_node", "log_wire_seconds")
COLLECTIVE_AXES = 4  # of ``collective_position``


def ring_steps(collective: Collective) -> float:
    """Consecutive messages in a ring; 1 for a point-to-point message."""
    record = collective.record
    return 1.0 if record.route == "message" else record.passes * (collective.group_size - 1)


def wire_bytes(collective: Collective) -> float:
    """Bytes that each rank sends in a ring (Thakur et al. 2005, doi:10.1177/1094342005051521)."""
    if collective.record.route == "message":
        return float(collective.num_bytes)
    return ring_steps(collective) * collective.num_bytes / collective.group_size


def wire_seconds(collective: Collective, fabric: Fabric) -> float:
    """Seconds that the slowest link of a collective takes for the bytes that must cross it.

    A link's bandwidth is that of one device; what leaves a node leaves through those of all the group's ranks there.
    """
    if collective.num_nodes == 1:
        return wire_bytes(collective) / fabric.intra_node.bandwidth_bytes_per_s
    link = fabric.inter_node
    near = collective.ranks_per_node if collective.record.route == "ring" else 1
    return max(0.0, wire_bytes(collective) / near - link.burst_bytes) / link.bandwidth_bytes_per_s


def collective_terms(collective: Collective, fabric: Fabric) -> tuple[float, ...]:
    """Quantities whose weighted sum is a collective's time, in the order of ``COLLECTIVE_TERMS``.

    Of the link's seconds and of the messages of all ranks (work of a host that ranks share) the longer counts.
    """
    steps = ring_steps(collective)
    messages = steps * collective.group_size
    return (1.0, steps, float(collective.num_bytes), wire_seconds(collective, fabric), messages)


def collective_features(collectives: Sequence[Collective], fabrics: Sequence[Fabric], *, nccl: bool = False) -> Array:
    """Features for trees, shape ``(len(collectives), len(COLLECTIVE_FEATURES))``."""
    rows = np.empty((len(collectives), len(COLLECTIVE_FEATURES)))
    for row, c, fabric in zip(rows, collectives, fabrics, strict=True):
        on_links = _longest(c, fabric) if nccl else wire_seconds(c, fabric) + 1e-9
        numbers = np.log1p(c.num_bytes), np.log(c.group_size), np.log(c.ranks_per_node), np.log(on_links)
        row[:] = c.record.code, *numbers
    return rows


def collective_position(collective: Collective, fabric: Fabric, *, nccl: bool = False) -> Array:
    """Position of a collective among its kind: log of bytes, group size, ranks per node and seconds on the links."""
    seconds = _longest(collective, fabric) if nccl else max(wire_seconds(collective, fabric), 1e-9)
    return np.log([max(collective.num_bytes, 1), collective.group_size, collective.ranks_per_node, seconds])


NCCL_TERMS = ("calls", "steps", "buffer_bytes", "seconds_between_nodes", "seconds_within_node")


def seconds_between(collective: Collective, fabric: Fabric) -> float:
    """Seconds that a node's adapters take for the bytes that leave it; 0 within a node."""
    if collective.num_nodes == 1:
        return 0.0
    size, near = collective.group_size, collective.ranks_per_node
    bandwidth = fabric.inter_node.bandwidth_bytes_per_s
    if collective.record.route == "direct":
        return collective.num_bytes * (size - near) / size / bandwidth
    return wire_bytes(collective) / (near * bandwidth)


def seconds_within(collective: Collective, fabric: Fabric) -> float:
    """Seconds that a rank's link within the node takes for the bytes to its neighbours; 0 without neighbours."""
    size, near = collective.group_size, collective.ranks_per_node
    if near == 1:
        return 0.0
    bandwidth = fabric.intra_node.bandwidth_bytes_per_s
    if collective.record.route == "direct":
        return collective.num_bytes * (near - 1) / size / bandwidth
    return wire_bytes(collective) / bandwidth


def nccl_terms(collective: Collective, fabric: Fabric) -> tuple[float, ...]:
    """Quantities whose weighted sum is a collective's time, in the order of ``NCCL_TERMS``."""
    transfers = seconds_between(collective, fabric), seconds_within(collective, fabric)
    return (1.0, ring_steps(collective), float(collective.num_bytes), *transfers)


def tree_terms(collective: Collective, fabric: Fabric) -> tuple[float, ...]:
    """Terms of an all-reduce by a tree over nodes: chains within nodes, and few steps between them."""
    calls, _, *rest = nccl_terms(collective, fabric)
    steps = 2.0 * (collective.ranks_per_node - 1 + ceil(log2(max(collective.num_nodes, 2))))
    return (calls, steps, *rest)


def _longest(collective: Collective, fabric: Fabric) -> float:
    return max(seconds_between(collective, fabric), seconds_within(collective, fabric), 1e-9)


# Seconds by NCCL's constants, each of which a fitted factor multiplies: a call's own, latencies of its steps in LL,
# those in other protocols, bytes through the adapters of a node, and bytes through a rank's link within the node.
# Where there are no protocols: the latency of the network, and what each rank that a rank sends to costs.
CHOICE_TERMS = ("call", "quick_steps", "bulk_steps", "adapters", "links_within_node")

LINK_FACTS = 13  # numbers of ``link_facts``
US = 1e-6
LL, LL128, SIMPLE = range(3)
NCCL = SimpleNamespace(**preset("nccl.toml"))


def link_facts(fabric: Fabric) -> Array:
    """Bandwidth and latency of the links within a node and between nodes, whether LL128 crosses nodes, the
    bandwidth of an adapter, the loss with nodes, the host's time for a message, a paced one, a rendezvous and
    (added) an injected one, the most bytes/s in LL, and the share of an all-to-all, ``(LINK_FACTS,)``."""
    near, far = fabric.intra_node, fabric.inter_node
    links = [near.bandwidth_bytes_per_s, near.latency_s, far.bandwidth_bytes_per_s, far.latency_s]
    adapter = max(far.adapter_bytes_per_s, far.bandwidth_bytes_per_s)
    hosts = [far.message_s, far.paced_s or far.message_s, far.rendezvous_s or 3 * far.message_s, far.inject_s]
    own = [float(far.ll128), adapter, far.scaling_loss, *hosts, far.ll_bytes_per_s or np.inf, far.direct_share]
    return np.array([*links, *own])


def choice_terms(collectives: Sequence[Collective], links: Array) -> Array:
    """Seconds by term of every choice that NCCL has for collectives of one kind.

    ``collectives``: of one kind.  ``links``: ``link_facts`` of the one fabric, or of each one's fabric, a row each.
    Returns seconds, ``(collectives, choices, len(CHOICE_TERMS))``.  Of each choice, they add up to its time, except
    that of the terms ``OVERLAPPING`` the longer counts.  A choice that NCCL does not have there is infinitely long.
    """
    sizes = np.array([(c.num_bytes, c.group_size, c.ranks_per_node) for c in collectives], float).reshape(-1, 3)
    record = collectives[0].record
    layout = _Layout(sizes, np.broadcast_to(links, (len(sizes), LINK_FACTS)))
    if record.route == "message":
        return _message(layout)
    if record.route == "direct":
        return _direct(layout)
    protocols = (LL, LL128, SIMPLE)
    choices = [_ring(layout, record.passes, record.trees, protocol) for protocol in protocols]
    if record.trees:  # collectives that sum
        choices += [*(_tree(layout, protocol) for protocol in protocols), _nvls_tree(layout)]
    elif record.passes == 1:
        choices.append(_pat(layout))
    return np.stack(choices, axis=1)


class _Layout:
    """Sizes of collectives and facts of their links, one array ``(collectives,)`` each."""

    def __init__(self, sizes: Array, links: Array) -> None:
        self.num_bytes, group, self.near = sizes.T
        self.nodes = np.ceil(group / self.near)
        self.across = self.nodes > 1
        self.ranks = self.nodes * self.near
        self.near_bandwidth, near_latency, self.far_bandwidth, self.far_latency, *own = links.T
        self.has_ll128, self.adapter, loss, *hosts, self.most_ll, self.direct_share = own
        self.far_bandwidth = self.far_bandwidth / np.maximum(self.nodes / 4, 1.0) ** loss
        self.message, self.paced, self.rendezvous, self.injected = (each / US for each in hosts)
        self.near_pace = near_latency / NCCL.near_latency
        self.far_pace = np.minimum(self.far_latency / NCCL.far_latency, 1.0)
        self.far_wait = np.maximum(self.far_latency - NCCL.far_latency, 0.0) / US
        self.doublings = np.log2(self.nodes)

    def terms(self, call: Array | float, quick: Array | float, bulk: Array | float, *transfers: Array) -> Array:
        """Terms of one choice: microseconds of latencies, then seconds of transfers, ``(collectives, terms)``."""
        latencies = (np.broadcast_to(US * np.asarray(part, float), self.nodes.shape) for part in (call, quick, bulk))
        return np.stack([*latencies, *transfers], axis=-1)

    def far(self, step: Array | float, protocol: int, waits: float = 1.0) -> Array:
        """Microseconds of a step between nodes that takes ``step`` of them by NCCL's constants."""
        growth = 1.0 if protocol == LL else 1 + NCCL.step_growth * self.doublings
        return np.asarray(growth * step * self.far_pace + waits * NCCL.waits[protocol] * self.far_wait)

    def steps(self, protocol: int, call: Array | float, steps: Array, transfers: tuple[Array, Array]) -> Array:
        """Terms of a choice of a protocol with the given microseconds per step."""
        quick, bulk = (steps, 0.0) if protocol == LL else (0.0, steps)
        return self.terms(call, quick, bulk, *transfers)


def _message(layout: _Layout) -> Array:
    latency = np.where(layout.across, layout.far_latency / US, layout.near_pace * NCCL.near["ring"][SIMPLE])
    between = np.where(layout.across, layout.num_bytes / layout.far_bandwidth, 0.0)
    within = np.where(layout.across, 0.0, layout.num_bytes / layout.near_bandwidth)
    return layout.terms(NCCL.message_call, latency, 0.0, between, within)[:, None]


def _direct(layout: _Layout) -> Array:
    others = layout.ranks - layout.near
    latency = layout.across * layout.far_latency / US
    slowed = 1 + NCCL.crowded * others / (others + NCCL.connections)
    each = np.maximum(NCCL.direct_far * slowed, layout.message)
    each += layout.injected * (layout.num_bytes <= NCCL.inject_bytes * layout.ranks)
    peers = (layout.near - 1) * NCCL.direct_near * layout.near_pace + others * each
    core = 1 + NCCL.core_growth * np.maximum(layout.doublings - 1, 0.0)
    between = core * layout.num_bytes * (1 - 1 / layout.nodes) / (layout.far_bandwidth * layout.direct_share)
    within = layout.num_bytes * (layout.near - 1) / layout.ranks / layout.near_bandwidth
    return layout.terms(NCCL.direct_call, latency, peers, between, within)[:, None]


def _ring(layout: _Layout, passes: float, trees: bool, protocol: int) -> Array:
    far_steps = passes * (layout.nodes - 1)
    near_steps = passes * (layout.ranks - 1) - far_steps
    near = layout.near_pace * NCCL.near["ring"][protocol]
    held = np.minimum(NCCL.connection_holds / np.maximum(near_steps + far_steps, 1.0), 1.0)
    posted = layout.rendezvous if protocol == SIMPLE else held * layout.message + (1 - held) * layout.paced
    near = np.where(layout.across, np.maximum(near, posted), near)
    far = layout.far(np.where(layout.near > 1, NCCL.far["ring"][protocol], NCCL.far["tree"][protocol]), protocol)
    far = np.maximum(far, posted)
    slower = np.where(layout.across, NCCL.plateau, 1.0) if trees and protocol == SIMPLE else 1.0
    share = passes * (layout.ranks - 1) / layout.ranks
    transfers = _transfers(layout, share, NCCL.ring_share[protocol], protocol)
    return layout.steps(
        protocol, NCCL.call["ring"][protocol], slower * (near_steps * near + far_steps * far), transfers
    )


def _tree(layout: _Layout, protocol: int) -> Array:
    near = 2 * (layout.near - 1) * NCCL.near["tree"][protocol] * layout.near_pace
    filled = np.minimum(layout.num_bytes, NCCL.tree_chunk[protocol]) * NCCL.line[protocol] / layout.adapter / US
    far = 2 * layout.doublings * (layout.far(NCCL.far["tree"][protocol], protocol) + filled)
    sizes = np.log2(np.maximum(layout.num_bytes, 1.0)) - 6
    part = np.interp(sizes, np.arange(len(NCCL.tree_part[protocol])), NCCL.tree_part[protocol])
    most = np.array(NCCL.tree_most)[np.digitize(layout.near_bandwidth, NCCL.tree_links)]
    leaving = np.where(layout.nodes > 2, 2.0, 2.0 / np.clip(most / layout.adapter, 1.0, 2.0))
    transfers = _transfers(layout, 2.0, NCCL.tree_share[protocol] * part, protocol, leaving)
    return layout.steps(protocol, NCCL.call["tree"][protocol], near + far, transfers)


def _nvls_tree(layout: _Layout) -> Array:
    far = 2 * layout.doublings * layout.far(NCCL.nvls_far, SIMPLE)
    share = NCCL.nvls_share * np.where(layout.nodes > 2, 0.5, 1.0)
    between = layout.across * layout.num_bytes / (share * layout.near * layout.far_bandwidth)
    within = layout.num_bytes / (NCCL.nvls_within * layout.near_bandwidth)
    has = (layout.near_bandwidth >= NCCL.nvls_link) & (layout.near >= NCCL.nvls_near)
    return layout.terms(np.where(has, NCCL.nvls_call * layout.near_pace, np.inf), 0.0, far, between, within)


def _pat(layout: _Layout) -> Array:
    far = layout.doublings * layout.far(NCCL.pat_far, SIMPLE, 1 / NCCL.pat_overlap) + NCCL.pat_near * layout.ranks
    between = layout.num_bytes * (layout.ranks - 1) / layout.ranks / (NCCL.pat_share * layout.far_bandwidth)
    has = layout.across & (layout.near == 1)
    return layout.terms(np.where(has, NCCL.pat_call, np.inf), 0.0, far, between, 0.0 * between)


def _transfers(
    layout: _Layout, share: Array | float, part: Array | float, protocol: int, leaving: Array | None = None
) -> tuple[Array, Array]:
    """Seconds in which a node's adapters, and a rank's link within the node, move ``share`` of the bytes.

    ``leaving`` is the share that the adapters move, if that is another one.
    """
    moved = share * layout.num_bytes
    left = moved if leaving is None else leaving * layout.num_bytes
    between = layout.across * left / (part * layout.near * layout.far_bandwidth)
    within = (layout.near > 1) * moved / (part * layout.near_bandwidth)
    if protocol == LL:
        most = NCCL.ll_most * np.maximum(1.0, layout.near_bandwidth / NCCL.ll_link) * np.where(layout.across, 1.0, 4.0)
        across = np.maximum(between, moved / np.minimum(most, layout.most_ll))
        return np.where(layout.across, across, 0.0), np.maximum(within, np.where(layout.across, 0.0, moved / most))
    if protocol == LL128:  # none over PCIe, nor where the network does not keep the order of 128 bytes
        within = np.where((layout.near_bandwidth >= NCCL.ll128_link) & (layout.has_ll128 > 0), within, np.inf)
    return between, within
