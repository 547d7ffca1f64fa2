"""Recommendation models: embedding tables beside a bottom MLP, their interaction, a top MLP.

``dot`` (Naumov et al. 2019, arXiv:1906.00091): products of all pairs of vectors.  ``dcn-v2`` (Wang et al. 2020,
arXiv:2008.13535): cross layers of low rank, ``x0 * (U (V x) + b) + x``.

One rank stands for all: it looks up what the slowest one does, and exchanges the largest messages, since all wait for
these.  Sums travel while the bottom MLP runs; its gradients are summed while the gradients of sums travel and rows are
updated, so its backward is a layer of its own, while its forward is a part of the embedding's.  Indices of the next
batch travel beside this one (torchrec's ``TrainPipelineSparseDist``), or before the lookups.
"""

from __future__ import annotations

from dataclasses import replace

from stepsight.dataset.job.model_spec import ModelSpec
from stepsight.dataset.job.sharding import Lookup, RankTables
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.layer_parts import linear
from stepsight.simulator.blocks.step import Block, Comm, Flow, Group, Item, Join, RankShape, Saved, Step

INDICES, SUMS = "cp", "ep"  # streams of the two exchanges


def dlrm_embedding(shape: RankShape, shared: bool = False) -> Block:
    """Lookups and their exchange, and the bottom MLP beside it."""
    tables = shape.tables
    assert tables is not None, "the rules of a job ask for tables"
    exchange, back = _exchange(shape, tables)
    indices: Block = ()
    if tables.num_ranks > 1 and tables.lookups:
        indices = (Step("indices", _all_to_all(tables, tables.index_bytes, INDICES, beside=tables.pipelined)),)
    flows = ((step, (Flow.DROP_IN_FORWARD,) * (Flow.DROP in step.flow)) for step in _bottom(shape, tables))
    beside = [replace(step, backward=(), weight_grad=(), parameters=(), flow=flow) for step, flow in flows]
    return (
        *indices,
        _lookups(shape, tables),
        Step("sums", exchange, (*back, *([Join(SUMS)] if back else []))),
        *beside,
        Step("meet", (Join(SUMS), Join(INDICES), *_joined(shape))),
    )


def _bottom(shape: RankShape, tables: RankTables) -> Block:
    """What runs beside the exchange of sums: lookups in replicas, and the bottom MLP."""
    first, *others = _mlp(shape, "bottom", shape.model.dense_features, shape.model.bottom_mlp)
    own_flow = Flow.KEEP, Flow.DROP  # numbers of a sample need no gradient
    plain = replace(first, backward=(), weight_grad_first=False, flow=own_flow)
    return (*_replicated(shape, tables), plain, *others)


def dlrm_layer(shape: RankShape, kind: str) -> Block:
    """A cross layer, or the products of all pairs; ``bottom``: the backward of the bottom MLP."""
    model, rows = shape.model, shape.rows
    if kind == "bottom":
        assert shape.tables is not None, "the rules of a job ask for tables"
        meet = Step("meet", backward=_joined(shape), flow=(Flow.JOIN,))
        return (*(replace(step, forward=(), saved=()) for step in _bottom(shape, shape.tables)), meet)
    if kind == "dot":
        vectors, dim = len(model.tables) + 1, model.hidden
        whole, pairs = shape.core_product(rows, vectors, vectors, dim), vectors * (vectors - 1) // 2
        picked = shape.op("copy", rows * (pairs + dim))
        grad = shape.core_product(rows, vectors, dim, vectors)
        saved = (Saved(rows * vectors * dim * shape.dtype_bytes),)
        return (Step("pairs", (whole, picked), (picked, shape.op("fill", rows * vectors**2), grad, grad), saved=saved),)
    width = cross_width(model)
    add, keeps = shape.op("add", rows * width), Saved(rows * width * shape.dtype_bytes)
    cross = Step(
        "cross", (shape.op("cross", rows * width),), (shape.op("cross_backward", rows * width),), saved=(keeps,)
    )
    if shape.kernels.separate_kernels:  # a product and a sum; two products and two sums
        cross = replace(cross, forward=(add,) * 2, backward=(add,) * 4)
    return (
        linear(shape, "cross_v", model.cross_rank, width, rows, bias=False),
        linear(shape, "cross_u", width, model.cross_rank, rows),
        cross,
    )


def dlrm_head(shape: RankShape, shared: bool = False) -> Block:
    """The top MLP and the loss of one logit a sample."""
    model, vectors = shape.model, len(shape.model.tables) + 1
    width = vectors * (vectors - 1) // 2 + model.hidden if model.interaction == "dot" else cross_width(model)
    loss = shape.main_op("elementwise", shape.rows)
    return (*_mlp(shape, "top", width, model.top_mlp, ends=True), Step("loss", (loss,), (loss,)))


def dlrm_kinds(model: ModelSpec) -> tuple[tuple[str, int], ...]:
    """The bottom MLP, and one layer of pairs or cross layers."""
    return ("bottom", 1), ("dot" if model.interaction == "dot" else "cross", model.layers - 1)


def cross_width(model: ModelSpec) -> int:
    """Values of a sample that the cross layers see."""
    return sum(table.dim for table in model.tables) + model.bottom_mlp[-1]


def _mlp(shape: RankShape, name: str, width: int, sizes: tuple[int, ...], *, ends: bool = False) -> Block:
    """Linears with ReLU between them; ``ends``: without one after the last."""
    steps: list[Step] = []
    for number, size in enumerate(sizes):
        steps.append(linear(shape, f"{name}{number}", size, width, shape.rows))
        width = size
        if not (ends and number == len(sizes) - 1):
            numel = shape.rows * size
            ops = shape.op("relu", numel), shape.op("relu_backward", numel)
            steps.append(Step("relu", ops[:1], ops[1:], saved=(Saved(numel * shape.dtype_bytes),)))
    return tuple(steps)


def _joined(shape: RankShape) -> tuple[Op, ...]:
    """The concatenation of sums and the bottom MLP's output, and its gradient."""
    return (shape.op("copy", shape.rows * cross_width(shape.model)),)


def lookup_op(look: Lookup, *, backward: bool = False) -> Op:
    """One call on all tables of a ``Lookup``."""
    dims = (look.indices, look.dim, look.bags, min(look.distinct, look.indices), look.tables)
    kind, more = ("table_lookup_backward", (look.state,)) if backward else ("table_lookup", ())
    return Op(kind, (*dims, *more), look.dtype)


def lookup_ops(tables: RankTables) -> list[Op]:
    return [op for look in (*tables.lookups, *_of_replicas(tables)) for ops in both_ways(look) for op in ops]


def both_ways(look: Lookup) -> tuple[list[Op], list[Op]]:
    """Ops of a lookup forward and backward; rows that the device does not have come and go over its link."""
    moved = [Op("missed_rows", (look.missed, look.dim), look.dtype)] if look.missed else []
    return [*moved, lookup_op(look)], [lookup_op(look, backward=True), *moved]


def _of_replicas(tables: RankTables) -> list[Lookup]:
    return [look._replace(state=0, missed=0) for look in tables.replicated]  # the dense optimizer has their states


def _lookups(shape: RankShape, tables: RankTables) -> Step:
    """Lookups in the rank's own shards; backward steps the optimizer of the rows."""
    both = [both_ways(look) for look in tables.lookups]
    forward, backward = ([op for ops in way for op in ops] for way in zip(*both, strict=True)) if both else ([], [])
    most = max((op.num_bytes for op in backward), default=0.0)
    sums = sum(look.bags * look.dim for look in tables.lookups) * shape.dtype_bytes
    indices = 8 * sum(look.indices for look in tables.lookups)
    kept = Saved(indices * (2 if tables.pipelined else 1))
    return Step("lookups", tuple(forward), tuple(backward), saved=(kept,), temporary_bytes=int(sums + indices - most))


def _replicated(shape: RankShape, tables: RankTables) -> Block:
    """Lookups in replicated tables, whose dense gradients are summed as other parameters' are."""
    if not tables.replicated:
        return ()
    forward, backward = (tuple([lookup_op(look, backward=b) for look in _of_replicas(tables)]) for b in (False, True))
    filled = tuple([shape.main_op("fill", numel) for numel in tables.replicated_rows])
    return (Step("replicated_tables", forward, (), (*filled, *backward), tables.replicated_rows),)


def _all_to_all(tables: RankTables, num_bytes: int, stream: str, *, beside: bool) -> tuple[Comm, ...]:
    """An exchange of all ranks: directly, or within nodes and then between them."""
    nodes = tables.num_ranks // tables.per_node
    levels = [Group(tables.num_ranks, tables.per_node)]
    if tables.hierarchical and nodes > 1 and tables.per_node > 1:
        levels = [Group(tables.per_node, tables.per_node), Group(nodes, 1)]
    return tuple([Comm(level.collective("all_to_all", num_bytes), stream, beside) for level in levels])


def _exchange(shape: RankShape, tables: RankTables) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Collectives that bring sums to their samples, and those that bring gradients back."""
    if tables.num_ranks == 1 or not tables.lookups:
        return (), ()
    far = _all_to_all(tables, tables.pooled * shape.dtype_bytes, SUMS, beside=True)
    if not tables.in_node or tables.per_node == 1:
        return far, far[::-1]
    node, size = Group(tables.per_node, tables.per_node), tables.in_node * shape.dtype_bytes
    near = [Comm(node.collective(kind, size), SUMS, True) for kind in ("reduce_scatter", "all_gather")]
    return (near[0], *far), (*far[::-1], near[1])
