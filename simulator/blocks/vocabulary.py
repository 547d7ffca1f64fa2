"""The embedding, and the head with its loss.

The vocabulary is shared by tensor-parallel ranks, or every rank has all of it: then each looks its own rows up, and,
with sequence parallelism, fetches all rows before the logits, which every rank computes.
"""

from __future__ import annotations

from stepsight.simulator.blocks.layer_parts import enter, leave, main_casts, metric_losses, token_metrics
from stepsight.simulator.blocks.step import Block, Item, RankShape, Saved, Step


def tokens(shape: RankShape, shared: bool = False, *, again: bool = False) -> Block:
    """Embedding of the tokens.

    ``shared``: its table is also the logits' on this rank, so two gradients are added.  ``again``: the same table once
    more, counted where it is first used.
    """
    hidden, vocab = shape.model.hidden, shape.model.vocab // shape.vocab_tp
    parallel = shape.vocab_tp > 1
    rows = shape.rows if parallel else shape.local_rows
    join = (shape.op("add", vocab * hidden),) if shared or again else ()
    table = Step(
        "embedding",
        (shape.op("embedding", rows, hidden, vocab),),
        weight_grad=(shape.op("embedding_backward", rows, hidden, vocab), *join),
        parameters=() if again else (vocab * hidden,),
        replicated=shape.tp.size > 1 and not parallel,
    )
    return (table, *(leave(shape) if parallel else ()))


def positions(shape: RankShape) -> Step:
    """Add the learned positions."""
    numel = shape.local_rows * shape.model.hidden
    return Step(
        "positions",
        (shape.op("add", numel),),
        weight_grad=(shape.op("reduce", numel),),
        parameters=(shape.model.seq_len * shape.model.hidden,),
        replicated=True,
    )


def logits_and_loss(shape: RankShape, shared: bool = False, *, bias: bool = False) -> Block:
    """Logits and cross-entropy (in the main type).

    ``shared``: the table is the embedding's on this rank and is counted there.
    """
    model, vocab, rows = shape.model, shape.model.vocab // shape.vocab_tp, shape.rows
    logits = Step(
        "logits",
        (shape.op("linear", rows, vocab, model.hidden),),
        (shape.op("linear_dgrad", rows, vocab, model.hidden),),
        (shape.op("linear_wgrad", rows, vocab, model.hidden), *([shape.op("bias_grad", rows, vocab)] if bias else [])),
        (*([vocab] if bias else []), *([] if shared else [vocab * model.hidden])),
        weight_grad_first=not bias,
        saved=(Saved(shape.rows_before_columns * model.hidden * shape.dtype_bytes),),
    )
    statistics: tuple[Item, ...] = ()
    if shape.vocab_tp > 1:  # maximum of the logits; sum of exponentials and the target's logit
        reduce, scale = shape.tp_comm("all_reduce", rows * shape.main_bytes), shape.main_op("elementwise", rows)
        statistics = (shape.main_op("copy", rows), reduce, scale, reduce, reduce, scale)
    return (*_before(shape), logits, loss(shape, rows, vocab, statistics))


def _before(shape: RankShape) -> Block:
    if shape.vocab_parallel:
        return enter(shape)
    if shape.tp.size == 1 or not shape.sequence_parallel:
        return ()
    gather = shape.tp_comm("all_gather", shape.rows * shape.model.hidden * shape.dtype_bytes)
    return (Step("tp", (gather,)),)  # each rank computes the whole gradient and keeps its rows


def loss(shape: RankShape, rows: int, classes: int, statistics: tuple[Item, ...] = ()) -> Step:
    """Cross-entropy in the main type; logits and their gradient are in the activations' type, as is everything with
    ``fused_loss``.
    """
    kernels, size, again = shape.kernels, shape.main_bytes, metric_losses(shape, rows, classes)
    if shape.model.fused_loss:
        ends = shape.op("cross_entropy", rows, classes), shape.op("cross_entropy_backward", rows, classes)
        saved = (Saved(rows * classes * shape.dtype_bytes),)
        return Step("loss", (ends[0], *statistics, *again), (ends[1],), saved=saved)
    apart = kernels.separate_kernels or kernels.token_metrics or kernels.casts_parameters
    casts = main_casts(shape, rows * classes) if apart else ()
    metrics = token_metrics(shape, rows, classes) if kernels.token_metrics else ()
    return Step(
        "loss",
        (*casts, shape.main_op("cross_entropy", rows, classes), *statistics, *metrics, *again),
        (shape.main_op("cross_entropy_backward", rows, classes), *casts),
        saved=(Saved(rows * classes * size),),
        temporary_bytes=rows * classes * (shape.dtype_bytes - size),
    )
