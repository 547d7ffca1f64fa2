"""The work of one rank for the slots of a plan."""

from __future__ import annotations

from stepsight.dataset.base.caching import cached
from stepsight.dataset.kinds.op import DTYPE_BYTES, Collective, Op
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.programs.part_units import Unit
from stepsight.simulator.programs.passages import Passage, items_passage
from stepsight.simulator.programs.replicas import Replicas, bucket_works
from stepsight.simulator.programs.slots import ROOT, TWICE, Slot

_GATHERING = ("copy_in", "copy_out", "gather")
# DeepSpeed 0.3: tensors of fewer elements stay on every rank (stage3_param_persistence_threshold), and so do, between
# recomputation and backward, those that are used again before this many elements of others (stage3_max_reuse_distance).
# Each rank's part of a list costs the host a view and a copy.
_STAYS, _REUSED = 100_000, 10**9
_CALLS_PER_PART = 2


class SlotWork:
    """Fills the slots of a plan.

    Args:
        shape: The rank.
        units: Of the part, in forward order.
        passages: Of each unit.
        replicas: Who shares.
    """

    def __init__(
        self, shape: RankShape, units: tuple[Unit, ...], passages: tuple[Passage, ...], replicas: Replicas
    ) -> None:
        self._dtypes = shape.dtype, shape.kernels.main_dtype
        self._units, self._passages, self._replicas = units, passages, replicas
        self._works: dict[int, _UnitWork] = {}

    def of(self, slot: Slot) -> Passage | Collective | Op:
        """The work of a slot."""
        if slot.what == "run":
            return self._passages[slot.unit]
        work = self._works.get(slot.unit)
        if work is None:
            self._works[slot.unit] = work = _unit_work(self._tensors(slot.unit), self._dtypes, self._replicas)
        return work.of(slot)

    def _tensors(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Elements of ordinary and of experts' parameter tensors, in the order in which gradients arrive."""
        if index != ROOT:
            unit = self._units[index]
            return unit.tensors, unit.expert_tensors
        wrapped = [unit for unit in reversed(self._units) if unit.root]
        others = tuple([n for unit in wrapped for n in unit.tensors])
        return others, tuple([n for unit in wrapped for n in unit.expert_tensors])


class _UnitWork:
    """The replicas' work on the parameters and gradients of one unit; each is made once.

    Args:
        tensors: Elements of others' and of experts' parameter tensors, in the order in which gradients arrive.
        dtypes: Of activations, and the main one.
        replicas: Who shares.
    """

    def __init__(
        self, tensors: tuple[tuple[int, ...], tuple[int, ...]], dtypes: tuple[str, str], replicas: Replicas
    ) -> None:
        self._tensors, self._dtypes, self._replicas = tensors, dtypes, replicas
        self._known: dict[tuple[str, bool, bool], Passage | Collective | Op] = {}

    def of(self, slot: Slot) -> Passage | Collective | Op:
        """The work of a slot of this unit."""
        key = slot.what, slot.expert, slot.second
        known = self._known.get(key)
        if known is None:
            self._known[key] = known = self._make(*key)
        return known

    def _make(self, what: str, expert: bool, second: bool) -> Passage | Collective | Op:
        replicas, tensors = self._replicas, self._tensors[expert]
        main_dtype = self._dtypes[1]
        if what.removesuffix(TWICE) in _GATHERING:
            return self._gathering(what.removesuffix(TWICE), expert, twice=what.endswith(TWICE))
        if what == "grad_lists":  # of every tensor, including those that stay on every rank
            parts = len(self._tensors[False]) * replicas.groups.shard.size
            parts += len(self._tensors[True]) * replicas.groups.experts.size
            return Op("host_calls", (_CALLS_PER_PART * parts,), self._dtypes[0])
        if what == "grad_in":  # copy gradients into the message, in its type
            dtype = self._dtypes[0]
            kind = "copy" if replicas.gradient_bytes == DTYPE_BYTES[dtype] else "cast"
            return items_passage((Op(kind, (sum(tensors),), dtype),), "copy_in")
        if what == "add":  # add to the sums of earlier micro-batches, tensor by tensor, in the order of declaration
            shards = replicas.expert_shards if expert else replicas.shards
            ops = tuple([Op("add", (-(-tensor // shards),), main_dtype) for tensor in reversed(tensors)])
            return items_passage(ops, "accumulate")
        work = bucket_works(replicas, sum(tensors), expert=expert)[second]
        assert work is not None, what
        return work

    def _gathering(self, what: str, expert: bool, *, twice: bool) -> Passage | Collective:
        """The ops and collectives that gather parameters: once, or separately for recomputation and backward."""
        groups, dtype, gathering = self._replicas.groups, self._dtypes[0], self._replicas.gathering
        lists = gathering.lists
        others, experts = (_gathered(tensors, lists=lists, twice=twice) for tensors in self._tensors)
        if what == "gather":
            group = groups.experts if expert else groups.shard
            return group.collective("all_gather", sum(experts if expert else others) * DTYPE_BYTES[dtype])
        if what == "copy_out":
            return items_passage((Op("copy", (sum(others) + sum(experts),), dtype),), what)
        shard = -(-sum(others) // groups.shard.size) + -(-sum(experts) // groups.experts.size)
        copy = Op("copy", (shard,), dtype)
        if not lists:
            casts = (Op("cast", (shard,), dtype),) if gathering.casts else ()
            return items_passage((*casts, copy), what)
        parts = len(others) * groups.shard.size + len(experts) * groups.experts.size
        whole = Op("fill", (sum(others) + sum(experts),), dtype)  # torch.zeros, into which the chunks arrive
        return items_passage((whole, Op("host_calls", (_CALLS_PER_PART * parts,), self._dtypes[0]), copy), what)


def _gathered(tensors: tuple[int, ...], *, lists: bool, twice: bool) -> tuple[int, ...]:
    """Gathered elements of some tensors, which are in the order of backward."""
    large = tuple([numel for numel in tensors if numel >= _STAYS]) if lists else ()
    if not large:
        return tensors
    between = [2 * sum(large[:place]) for place in range(len(large))]  # forward and backward of the tensors after it
    again = [numel for numel, others in zip(large, between, strict=True) if others >= _REUSED]
    return (*large, *again) if twice else large


_unit_work = cached(8192)(_UnitWork)
