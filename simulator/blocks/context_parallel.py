"""Context parallelism: each rank has a part of every sequence, and its attention needs all keys and values.

``ring`` (Liu et al. 2023, arXiv:2310.01889): keys and values go round while the attention to those at hand runs.  A
causal mask is balanced by giving every rank one part from the front and one from the back of the sequence, so that each
of the other ranks' keys costs half of a square.  Backward sends keys and values round again, and with them their
gradients, which are home after the last step; so does Transformer Engine.
``all_gather`` (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2): keys and values are fetched before the
attention, again before its backward, and their gradients are reduce-scattered.
"""

from __future__ import annotations

from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.heads import Heads
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.blocks.step import Comm, Item, Join

Passes = tuple[tuple[Item, ...], tuple[Item, ...]]  # forward, backward


def ring(shape: RankShape, heads: Heads) -> Passes:
    """Attention in one step per rank of the group; the first step uses the rank's own part."""
    size, near = shape.cp.size, 2 if shape.cp.per_node == shape.cp.size else 1
    kv_numel = heads.kv_numel(shape)

    def message(times: int) -> Comm:
        num_bytes = times * kv_numel * shape.dtype_bytes
        return Comm(Collective("send_recv", num_bytes, 2, near), "cp", beside=True)

    def piece(kind: str, own: bool) -> Op:
        if own or not heads.causal:
            return heads.kernel(shape, kind, heads.q_len, heads.kv_len, causal=heads.causal)
        return heads.kernel(shape, kind, heads.q_len, heads.kv_len // 2, causal=False)

    merge = (shape.op("add", heads.out_numel(shape)), shape.main_op("elementwise", heads.rows(shape)))
    forward: list[Item] = []
    backward: list[Item] = []
    for step in range(size):
        first, last = step == 0, step == size - 1
        forward += [] if last else [message(1)]
        forward += [piece("attention", first), *(() if first else merge)]
        forward += [] if last else [Join("cp")]
        # Keys and values travel in all but the last step, their gradients in all but the first.
        backward += [message((not last) + (not first)), piece("attention_backward", last), Join("cp")]
        backward += [] if first else [shape.op("add", kv_numel)]
    return tuple(forward), tuple(backward)


def all_gather(shape: RankShape, heads: Heads) -> Passes:
    """Attention of the rank's queries to all keys and values."""
    gather, scatter = gathers(shape, heads)
    kv_len = heads.kv_len * shape.cp.size
    return (
        (gather, heads.kernel(shape, "attention", heads.q_len, kv_len, causal=heads.causal)),
        (gather, heads.kernel(shape, "attention_backward", heads.q_len, kv_len, causal=heads.causal), scatter),
    )


def gathers(shape: RankShape, heads: Heads) -> tuple[Comm, Comm]:
    """Fetch all keys and values, and return their gradients."""
    num_bytes = heads.kv_numel(shape) * shape.cp.size * shape.dtype_bytes
    return (
        Comm(shape.cp.collective("all_gather", num_bytes), "cp"),
        Comm(shape.cp.collective("reduce_scatter", num_bytes), "cp"),
    )
