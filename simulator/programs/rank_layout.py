"""The placement of ranks: which groups share a node.

Ranks are numbered along the axes of ``ParallelSpec.order``, the first fastest.  With Megatron's default,
``tp-cp-dp-pp``::

    rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * stage))

so tensor-parallel groups fill nodes first and pipeline neighbours are furthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached, hashed_once
from stepsight.dataset.job.job import Job
from stepsight.simulator.blocks.shape import Group

Strides = tuple[tuple[int, int], ...]  # (stride, size) of each axis of a group, fastest first


@hashed_once
@dataclass(frozen=True)
class Layout:
    """Numbers of the ranks of a job.

    Attributes:
        axes: Name and degree of each axis, fastest first.
        devices_per_node: Nodes are filled in the order of ranks.
    """

    axes: tuple[tuple[str, int], ...]
    devices_per_node: int

    @property
    def num_ranks(self) -> int:
        total = 1
        for _, size in self.axes:
            total *= size
        return total

    def stride(self, axis: str) -> int:
        """Distance between neighbours along an axis."""
        stride = 1
        for name, size in self.axes:
            if name == axis:
                return stride
            stride *= size
        raise KeyError(axis)

    def size(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def group(self, *axes: str) -> Group:
        """The group along one or several axes."""
        named = [(self.stride(name), size) for name, size in self.axes if name in axes and size > 1]
        return self.strided(_joined(named))

    def part_of(self, axes: tuple[str, ...], inner: int, size: int) -> Group:
        """A group of ``size`` ranks that skips ``inner`` ranks of the group along some axes at a time.

        Expert- and hybrid-sharded groups divide the data-parallel one: ``inner`` 1 takes neighbours.
        """
        taken: list[tuple[int, int]] = []
        for name, degree in self.axes:
            if name not in axes:
                continue
            here = gcd(degree, inner)
            inner //= here
            degree, stride = degree // here, self.stride(name) * here
            use = gcd(degree, size)
            size //= use
            if use > 1:
                taken.append((stride, use))
        return self.strided(_joined(taken))

    def together(self, axes: tuple[str, ...], size: int, axis: str) -> int:
        """Neighbours along an axis that are in one ``part_of(axes, 1, size)``."""
        for name, degree in self.axes:
            if name not in axes:
                continue
            use = gcd(degree, size)
            size //= use
            if name == axis:
                return use
        return 1

    def strided(self, strides: Strides) -> Group:
        """The group with the given strides, as seen by the one that spans the most nodes."""
        size = 1
        for _, number in strides:
            size *= number
        if size == 1:
            return Group()
        return Group(size, _per_node(strides, size, self.num_ranks, self.devices_per_node))

    def pipeline_neighbours(self, stage: int, other: int) -> int:
        """2 if all pairs of ranks that exchange messages between two stages share a node, else 1."""
        distance = abs(other - stage) * self.stride("pp")
        if distance % self.devices_per_node == 0 and distance:
            return 1
        return _pairs_share(self, min(stage, other), distance)

    def ranks_of_stage(self, stage: int) -> NDArray[np.int64]:
        """Numbers of the ranks of a pipeline stage."""
        ranks = np.arange(self.num_ranks, dtype=np.int64)
        own: NDArray[np.int64] = ranks[ranks // self.stride("pp") % self.size("pp") == stage]
        return own


def layout_of(job: Job) -> Layout:
    """The layout of a job."""
    p = job.parallel
    return _layout(p.order, (p.tp, p.cp, p.dp, p.pp), job.cluster.devices_per_node)


@cached(4096)
def _layout(order: str, degrees: tuple[int, int, int, int], devices_per_node: int) -> Layout:
    """Return one object for equal layouts, because they are keys of caches."""
    size = dict(zip(("tp", "cp", "dp", "pp"), degrees, strict=True))
    return Layout(tuple([(axis, size[axis]) for axis in order.split("-")]), devices_per_node)


def _joined(strides: list[tuple[int, int]]) -> Strides:
    """Merge neighbouring axes."""
    out: list[tuple[int, int]] = []
    for stride, size in strides:
        if out and out[-1][0] * out[-1][1] == stride:
            out[-1] = (out[-1][0], out[-1][1] * size)
        else:
            out.append((stride, size))
    return tuple(out)


@cached(4096)
def _per_node(strides: Strides, size: int, num_ranks: int, devices_per_node: int) -> int:
    """``ceil(size / nodes)`` of the worst group, such that ``Collective.num_nodes`` is the number of nodes it spans."""
    if len(strides) == 1:
        stride = strides[0][0]
        if stride % devices_per_node == 0:
            return 1
        if devices_per_node % stride == 0:
            fits = devices_per_node // stride
            if fits % size == 0:
                return size
            if size % fits == 0:
                return fits
    offsets = np.zeros(1, dtype=np.int64)
    members = np.zeros(num_ranks, dtype=np.bool_)  # ranks whose coordinate along the group's axes is 0
    members[:] = True
    ranks = np.arange(num_ranks)
    for stride, number in strides:
        offsets = (offsets[:, None] + stride * np.arange(number)).ravel()
        members &= ranks // stride % number == 0
    nodes = np.sort((ranks[members][:, None] + offsets) // devices_per_node, axis=1)
    spanned = 1 + int((np.diff(nodes, axis=1) > 0).sum(axis=1).max(initial=0))
    return -(-size // spanned)


@cached(4096)
def _pairs_share(layout: Layout, stage: int, distance: int) -> int:
    first = layout.ranks_of_stage(stage)
    near = first // layout.devices_per_node == (first + distance) // layout.devices_per_node
    return 2 if bool(near.all()) else 1
