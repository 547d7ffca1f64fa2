"""The work of one pipeline stage for a micro-batch: forward and backward segments of its parts of the model.

Equal blocks in a row are one unit.  What an engine does beside the blocks is in ``dataset.job.execution``.  With
autograd's accumulation, gradients are added by one ``add`` for each parameter tensor, and DDP scales each into its
bucket (``copy``), which it sends once it holds ``bucket_mbytes`` (an explicit size leaves no smaller first bucket).
All-gathers carry parameters in the training type, or linears' weights in 8 bits (``KernelSemantics.fp8_weights``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from stepsight.dataset.base.caching import HashedTuple, Memo, cached, hashed_once
from stepsight.dataset.job.execution import KernelSemantics
from stepsight.dataset.kinds.op import DTYPE_BYTES, Collective, Op
from stepsight.simulator.blocks.family import embedding_block, head_block, layer_block
from stepsight.simulator.blocks.layer_parts import arrivals
from stepsight.simulator.blocks.step import Block, Flow, RankShape
from stepsight.simulator.programs import plans
from stepsight.simulator.programs.block_pass import (
    FORWARD,
    INPUT,
    WEIGHT,
    BackwardSpec,
    BlockPass,
    backward_pass,
    forward_pass,
    items_pass,
)
from stepsight.simulator.programs.buckets import BucketPlan, plan_buckets, send_buckets
from stepsight.simulator.programs.segment import Segment, Slot
from stepsight.simulator.programs.sizes import SILENT, PartShape, Replicas, bucket_works

Tensors = tuple[tuple[int, ...], tuple[int, ...]]  # elements of others' and of experts' parameter tensors


@dataclass(frozen=True, slots=True)
class Unit:
    """Equal consecutive blocks of a part."""

    block: Block  # one of them
    name: str  # layer{}, embedding or head
    first: int = 0  # number of the first
    times: int = 1  # how many
    again: bool = True  # whether full recomputation repeats them
    root: bool = False  # whether FSDP wraps them with the model itself rather than each on its own

    @property
    def tensors(self) -> Tensors:
        """Elements of a block's parameter tensors, of others and of experts, in the order in which gradients arrive."""
        known = _TENSORS.get(id(self.block))
        if known is None:
            found: tuple[list[int], list[int]] = ([], [])
            for step in reversed(self.block):
                found[step.expert].extend(step.parameters)
            _TENSORS[id(self.block)] = known = (self.block, (tuple(found[0]), tuple(found[1])))
        return known[1]

    def gathered(self, *, whole: bool) -> Tensors:
        """The same as they are gathered: a weight in 8 bits counts half its elements.

        ``whole``: with those that are frozen (FSDP).
        """
        found: tuple[list[int], list[int]] = ([], [])
        for step in reversed(self.block):
            own = step.parameters + step.frozen * whole
            found[step.expert].extend([-(-numel // 2) if numel in step.narrow else numel for numel in own])
        return tuple(found[0]), tuple(found[1])


_TENSORS: Memo[int, tuple[Block, Tensors]] = Memo("tensors of blocks", 20_000)


@cached(4096)
def part_units(shape: RankShape, part: PartShape, every: int = 1) -> tuple[Unit, ...]:
    """Blocks of a part in forward order; every ``every``-th layer is recomputed."""
    shared = shape.model.tied_embeddings and part.first and part.last
    here, there = arrivals(shape) if shape.scatter_p2p else ((), ())
    units = [Unit(embedding_block(shape, shared), "embedding", root=True)] if part.first else []
    if here and not part.first:
        units.append(Unit(here, "arrival", again=False))
    number = 0
    for kind, count in part.layers:
        block, end = layer_block(shape, kind), number + count
        while number < end:
            alike = end - number if every == 1 else 1 if number % every == 0 else every - number % every
            times = min(alike, end - number)
            units.append(Unit(block, "layer{}", number, times, number % every == 0))
            number += times
    if part.last:
        units.append(Unit(head_block(shape, shared), "head", root=True))
    elif there:
        units.append(Unit(there, "arrival", again=False))
    return tuple(units)


_PASSAGES: Memo[tuple[int, BackwardSpec | None, str], tuple[Block, BlockPass]] = Memo("passages of blocks", 20_000)


def block_pass_of(block: Block, backward: BackwardSpec | None = None, casts: str = "") -> BlockPass:
    """Forward or backward of a block, cached by identity: blocks are made once, and hashing one is more expensive.

    ``casts``: as in ``forward_pass``.
    """
    key = id(block), backward, casts
    known = _PASSAGES.get(key)
    if known is None:
        passage = forward_pass(block, casts) if backward is None else backward_pass(block, backward, casts)
        _PASSAGES[key] = known = (block, passage)  # a reference to the block keeps its id unique
    return known[1]


class Pass(NamedTuple):
    """One kind of passage of a micro-batch through a part: ``forward``, ``backward``, or ``input`` or ``weight`` for
    halves of a backward; and whether it is the part's first of an iteration, its last.
    """

    label: str
    first: bool
    last: bool


@hashed_once
@dataclass(frozen=True)
class Call:
    """The kind of a segment, independent of the rank and of its part of the model.

    ``replicas``: those that it exchanges something with; ``SILENT`` if it does not.  ``backward`` and ``traffic``: what
    backward does, None in a forward.  ``casts``: whether parameters are cast where they are used.
    """

    replicas: Replicas
    backward: BackwardSpec | None = None
    traffic: plans.BackwardTraffic | None = None
    casts: bool = False


@cached(4096)
def calls_of(
    kernels: KernelSemantics, replicas: Replicas, recompute: tuple[str, int], passes: tuple[Pass, ...]
) -> HashedTuple[Call]:
    """The segments of a rank's parts in each pass; ``recompute``: and ``recompute_every`` of ``ParallelSpec``."""
    return HashedTuple([_call_of(kernels, replicas, recompute, own) for own in passes])


def _call_of(kernels: KernelSemantics, replicas: Replicas, recompute: tuple[str, int], own: Pass) -> Call:
    gathers = replicas.fully_sharded and replicas.gathering.reshard
    casts = kernels.casts_parameters and not replicas.fully_sharded
    if own.label == FORWARD:
        updates = replicas.overlap_parameters and replicas.zero_stage in (1, 2) and replicas.shards > 1
        asks = gathers or ((updates or replicas.fully_sharded) and own.first)
        return _call(replicas if asks else SILENT, casts=casts)
    reduces = replicas.reduces(own.last) and own.label != INPUT
    who = replicas if (gathers and own.label != WEIGHT) or reduces else SILENT
    weights, accumulate = own.label != INPUT, not own.first
    adds = weights and kernels.accumulation == "autograd" and not replicas.accumulates_shards
    kind, every = recompute
    bucket = reduces and replicas.bucket_copies and replicas.zero_stage < 2
    spec = BackwardSpec(
        own.label,
        kind,
        whole=kernels.whole_layers_again and not replicas.fully_sharded,
        accumulate=accumulate and adds,
        bucket=bucket and replicas.groups.replicas.size > 1,
        bucket_experts=bucket and replicas.groups.experts.size > 1,
        dtype=kernels.main_dtype,
    )
    again = gathers and replicas.gathering.lists and kind == "full" and every == 1
    traffic = plans.BackwardTraffic(every, gathers, reduces, accumulate and reduces, again)
    return _call(who, spec, traffic, casts=casts)


_call = cached(4096)(Call)  # equal calls are one object, because they are keys of caches


@cached(8192)
def part_segments(shape: RankShape, part: PartShape, calls: HashedTuple[Call]) -> tuple[Segment, ...]:
    return tuple([_segment(shape, part, call) for call in calls])


@cached(16384)
def _segment(shape: RankShape, part: PartShape, call: Call) -> Segment:
    spec, traffic, replicas = call.backward, call.traffic, call.replicas
    if spec is None or traffic is None:
        units, passages, patterns = _part_run(shape, part, 1, None, call.casts, replicas.fully_sharded)
        plan = plans.forward_plan(patterns, replicas.pattern)
    elif traffic.reduces and replicas.zero_stage < 2:
        return send_buckets(spec.part, *_bucket_plan(shape, part, traffic.every, spec, call.casts), replicas)
    else:
        units, passages, patterns = _part_run(shape, part, traffic.every, spec, call.casts, replicas.fully_sharded)
        plan = plans.backward_plan(patterns, replicas.pattern, spec.part, traffic)
    dtypes = shape.dtype, shape.kernels.main_dtype

    def work(slot: Slot) -> BlockPass | Collective | Op:
        if slot.what == "run":
            return passages[slot.unit]
        gathers, whole = slot.what.removesuffix(plans.TWICE) in GATHERS, replicas.fully_sharded
        own = [u for u in reversed(units) if u.root] if slot.unit == plans.ROOT else [units[slot.unit]]
        others, experts = zip(*[u.gathered(whole=whole) if gathers else u.tensors for u in own], strict=True)
        tensors = tuple(chain(*others)), tuple(chain(*experts))
        return _replica_work((slot.what, slot.expert, slot.second), tensors, dtypes, replicas)

    return plan.filled(work)


GATHERS = ("copy_in", "copy_out", "gather")  # slots of parameters, frozen ones included
# DeepSpeed 0.3: tensors of fewer elements stay on every rank (stage3_param_persistence_threshold), and so do, between
# recomputation and backward, those that are used again before this many elements of others (stage3_max_reuse_distance).
# Each rank's part of a list costs the host a view and a copy.
_STAYS, _REUSED = 100_000, 10**9
_CALLS_PER_PART = 2


@cached(32768)
def _replica_work(
    slot: tuple[str, bool, bool], tensors: Tensors, dtypes: tuple[str, str], replicas: Replicas
) -> BlockPass | Collective | Op:
    """The work of one of the replicas' slots of a unit.

    ``slot``: ``what``, ``expert`` and ``second`` of it; ``tensors``: of the unit, in the order in which gradients
    arrive; ``dtypes``: of activations, and the main one.
    """
    (what, expert, second), (dtype, main_dtype), groups = slot, dtypes, replicas.groups
    sizes, gathers = (groups.shard.size, groups.experts.size), what.removesuffix(plans.TWICE)
    if gathers in GATHERS:
        lists = replicas.gathering.lists
        parts = [_gathered(each, lists=lists, twice=what != gathers) for each in tensors]
        if gathers == "gather":
            group = groups.experts if expert else groups.shard
            return group.collective("all_gather", sum(parts[expert]) * DTYPE_BYTES[dtype])
        numel = sum(map(sum, parts))
        if gathers == "copy_out":
            return items_pass((Op("copy", (numel,), dtype),), gathers, (Flow.PARAMETERS_OUT,))
        copy = Op("copy", (sum(-(-sum(part) // size) for part, size in zip(parts, sizes, strict=True)),), dtype)
        if not lists:
            casts = (Op("cast", copy.dims, dtype),) if replicas.gathering.casts else ()
            return items_pass((*casts, copy), gathers, (Flow.PARAMETERS_IN,))
        whole = Op("fill", (numel,), dtype)  # torch.zeros, into which the chunks arrive
        return items_pass((whole, _list_calls(parts, sizes, dtype), copy), gathers, (Flow.PARAMETERS_IN,))
    if what == "grad_lists":  # of every tensor, including those that stay on every rank
        return _list_calls(tensors, sizes, dtype)
    if what == "grad_in":  # copy gradients into the message, in its type
        kind = "copy" if replicas.gradient_bytes == DTYPE_BYTES[dtype] else "cast"
        return items_pass((Op(kind, (sum(tensors[expert]),), dtype),), "copy_in", (Flow.GRADIENTS_IN,))
    if what == "add":  # add to the sums of earlier micro-batches, tensor by tensor, in the order of declaration
        shards = replicas.expert_shards if expert else replicas.shards
        ops = tuple([Op("add", (-(-tensor // shards),), main_dtype) for tensor in reversed(tensors[expert])])
        return items_pass(ops, "accumulate", (Flow.ASIDE,))
    work = bucket_works(replicas, sum(tensors[expert]), expert=expert)[second]
    assert work is not None, what
    return work


def _list_calls(parts: Sequence[tuple[int, ...]], sizes: tuple[int, int], dtype: str) -> Op:
    """What lists of each rank's part of some tensors cost the host."""
    return Op(
        "host_calls", (_CALLS_PER_PART * sum(len(p) * size for p, size in zip(parts, sizes, strict=True)),), dtype
    )


def _gathered(tensors: tuple[int, ...], *, lists: bool, twice: bool) -> tuple[int, ...]:
    """Gathered elements of some tensors, which are in the order of backward."""
    large = tuple([numel for numel in tensors if numel >= _STAYS]) if lists else ()
    if not large:
        return tensors
    between = [2 * sum(large[:place]) for place in range(len(large))]  # forward and backward of the tensors after it
    again = [numel for numel, others in zip(large, between, strict=True) if others >= _REUSED]
    return (*large, *again) if twice else large


@cached(8192)
def _part_run(
    shape: RankShape, part: PartShape, every: int, spec: BackwardSpec | None, casts: bool, whole: bool
) -> tuple[tuple[Unit, ...], tuple[BlockPass, ...], plans.Patterns]:
    """A part's units in forward order, the passage of each, and the properties that plans depend on.

    ``spec``: of the backward; None: the forward.  ``casts``: as in ``Call``.  ``whole``: whether frozen parameters are
    gathered too (FSDP).
    """
    units, to = part_units(shape, part, every), shape.dtype if casts and shape.casts else ""
    once = replace(spec, recompute="none", whole=False) if spec and spec.recompute == "full" else spec
    passages = tuple([block_pass_of(u.block, spec if u.again and not u.root else once, to) for u in units])
    numbers = []
    for u, p in zip(units, passages, strict=True):
        others, experts = u.tensors
        loss = p.first_step if u.name == "head" else 0  # of a head's backward, the first step is the loss
        gathered = u.gathered(whole=True) if whole else u.tensors
        there = (len(others), len(experts)), sum(gathered[0]) > 0, sum(gathered[1]) > 0
        numbers.append((u.name, u.first, u.times, u.root, p.num_nodes, loss, *there))
    return units, passages, _patterns(tuple(numbers))


@cached(4096)
def _patterns(numbers: tuple[tuple[Any, ...], ...]) -> plans.Patterns:
    """Return one object for equal patterns, because they are keys of caches."""
    return plans.Patterns([plans.UnitPattern(at, *own) for at, own in enumerate(numbers)])


@cached(4096)
def _bucket_plan(
    shape: RankShape, part: PartShape, every: int, spec: BackwardSpec, casts: bool
) -> tuple[tuple[BlockPass, ...], BucketPlan]:
    units, passages, _ = _part_run(shape, part, every, spec, casts, False)
    pairs = zip(units[::-1], passages[::-1], strict=True)
    return plan_buckets([(p, unit.times, unit.name, unit.first + unit.times - 1) for unit, p in pairs])
