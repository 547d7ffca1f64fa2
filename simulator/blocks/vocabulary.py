"""Where tokens become activations and activations become a loss.

The vocabulary is shared by tensor-parallel ranks, or every rank has all of it: then each looks its own rows up, and,
with sequence parallelism, fetches all rows before the logits, which every rank computes.
"""

from __future__ import annotations

from stepsight.dataset.op import Op
from stepsight.simulator.blocks import eager
from stepsight.simulator.blocks.layer_parts import enter, leave
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.blocks.step import Block, Item, Saved, Step

_NOTHING: tuple[Item, ...] = ()


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
    """Learned positions are added."""
    numel = shape.local_rows * shape.model.hidden
    return Step(
        "positions",
        (shape.op("add", numel),),
        weight_grad=(shape.op("reduce", numel),),
        parameters=(shape.model.seq_len * shape.model.hidden,),
        replicated=True,
    )


def logits_and_loss(shape: RankShape, shared: bool = False, *, bias: bool = False) -> Block:
    """Logits and cross-entropy (in fp32 when training in less).

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
    if shape.vocab_tp > 1:  # largest logit; sum of exponentials and logit of the target
        reduce, scale = shape.tp_comm("all_reduce", rows * 4), Op("elementwise", (rows,), "fp32")
        statistics = (Op("copy", (rows,), "fp32"), reduce, scale, reduce, reduce, scale)
    return (*_before(shape), logits, loss(shape, rows, vocab, statistics))


def _before(shape: RankShape) -> Block:
    if shape.vocab_parallel:
        return enter(shape)
    if shape.tp.size == 1 or not shape.sequence_parallel:
        return ()
    gather = shape.tp_comm("all_gather", shape.rows * shape.model.hidden * shape.dtype_bytes)
    return (Step("tp", (gather,)),)  # every rank finds the whole gradient and keeps its rows


def loss(shape: RankShape, rows: int, classes: int, statistics: tuple[Item, ...] = ()) -> Step:
    """Cross-entropy in fp32; logits and their gradient are in the activations' dtype."""
    model = shape.model
    before, after, metrics = _NOTHING, _NOTHING, _NOTHING
    if (model.eager_kernels or model.token_metrics) and shape.precision != "fp32":
        before, after = eager.fp32_logits(shape, rows * classes)
    if model.token_metrics:
        metrics = eager.token_metrics(rows, classes)
    return Step(
        "loss",
        (*before, Op("cross_entropy", (rows, classes), "fp32"), *statistics, *metrics),
        (Op("cross_entropy_backward", (rows, classes), "fp32"), *after),
        saved=(Saved(rows * classes * 4),),
        temporary_bytes=rows * classes * (shape.dtype_bytes - 4),
    )
