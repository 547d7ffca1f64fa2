"""The work that one rank puts into the slots of a plan."""

from __future__ import annotations

from stepsight.dataset.caching import cached
from stepsight.dataset.op import DTYPE_BYTES, Collective, Op
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.lowering.part_units import Unit
from stepsight.simulator.lowering.passages import Passage, items_passage
from stepsight.simulator.lowering.replicas import Replicas, bucket_works
from stepsight.simulator.lowering.sizes import Groups
from stepsight.simulator.lowering.slots import ROOT, Slot

_GATHERING = ("copy_in", "copy_out", "gather")


class SlotWork:
    """What fills the slots of a plan.

    Args:
        shape: The rank.
        units: Of the part, in forward order.
        passages: Of each unit.
        replicas: Who shares.
    """

    def __init__(
        self, shape: RankShape, units: tuple[Unit, ...], passages: tuple[Passage, ...], replicas: Replicas
    ) -> None:
        self._shape, self._units, self._passages, self._replicas = shape, units, passages, replicas

    def of(self, slot: Slot) -> Passage | Collective:
        """The work of a slot."""
        if slot.what == "run":
            return self._passages[slot.unit]
        if slot.what in _GATHERING:
            sizes = sum(self._tensors(slot.unit, False)), sum(self._tensors(slot.unit, True))
            return _gathering(slot.what, slot.expert, sizes, self._shape.dtype, self._replicas.groups)
        tensors, replicas = self._tensors(slot.unit, slot.expert), self._replicas
        if slot.what == "add":
            shards = replicas.expert_shards if slot.expert else replicas.shards
            return _adds(tensors, shards, self._shape.kernels.main_dtype)
        if slot.what == "grad_in":
            return _copy(sum(tensors), self._shape.kernels.main_dtype)
        work = bucket_works(replicas, sum(tensors), expert=slot.expert)[slot.second]
        assert work is not None, slot
        return work

    def _tensors(self, index: int, expert: bool) -> tuple[int, ...]:
        """Elements of each parameter tensor, in the order in which gradients arrive."""
        if index != ROOT:
            unit = self._units[index]
            return unit.expert_tensors if expert else unit.tensors
        wrapped = [unit for unit in reversed(self._units) if unit.root]
        return tuple([n for unit in wrapped for n in (unit.expert_tensors if expert else unit.tensors)])


@cached(8192)
def _gathering(what: str, expert: bool, sizes: tuple[int, int], dtype: str, groups: Groups) -> Passage | Collective:
    """Of a unit's parameters: the copy of a shard into the message, the message, the copy out of it.

    ``sizes``: elements of others' and of experts' parameters.
    """
    numel, expert_numel = sizes
    if what == "gather":
        group = groups.experts if expert else groups.shard
        return group.collective("all_gather", sizes[expert] * DTYPE_BYTES[dtype])
    shard = -(-numel // groups.shard.size) + -(-expert_numel // groups.experts.size)
    return items_passage((Op("copy", (shard if what == "copy_in" else numel + expert_numel,), dtype),), what)


@cached(8192)
def _copy(numel: int, dtype: str) -> Passage:
    """Gradients into their message."""
    return items_passage((Op("copy", (numel,), dtype),), "copy_in")


@cached(4096)
def _adds(tensors: tuple[int, ...], shards: int, dtype: str) -> Passage:
    """Sums of gradients are added to those of earlier micro-batches, tensor by tensor, as they are declared."""
    ops = tuple([Op("add", (-(-tensor // shards),), dtype) for tensor in reversed(tensors)])
    return items_passage(ops, "accumulate")
