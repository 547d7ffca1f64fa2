"""The kernels that PyTorch runs for norms, rotary positions, gated activations and losses without fusion.

Element by element in the activations' type, with the main type (fp32) in between where the modules say so
(``nn.RMSNorm`` before PyTorch 2.8; torchtitan's ``apply_rotary_emb``, 2024-25, in complex fp32; ``F.silu(gate) * up``;
``cross_entropy`` of fp32 logits).  Where both types are one, nothing is cast.
"""

from __future__ import annotations

from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks.shape import RankShape

Ops = tuple[Op, ...]


def casts(shape: RankShape, numel: int) -> Ops:
    """Cast to the main type, or back."""
    return (shape.op("cast", numel),) if shape.casts else ()


def rms_norm(shape: RankShape, rows: int, width: int) -> tuple[Ops, Ops]:
    """RMSNorm, forward and backward: cast to fp32, square, mean, multiply by the inverse root, cast back, multiply by
    the weight.
    """
    numel = rows * width
    cast = casts(shape, numel)
    each, add, reduce = (shape.main_op(kind, numel) for kind in ("elementwise", "add", "reduce"))
    forward = (*cast, each, reduce, each, *cast, shape.op("elementwise", numel))
    backward = (
        *(shape.op(kind, numel) for kind in ("elementwise", "add", "reduce")),
        *cast, each, add, reduce, each, add, *cast,
    )  # fmt: skip
    return forward, backward


def rope(shape: RankShape, numel: int) -> Ops:
    """Rotary positions: a cast to fp32, a complex product and a cast back, in forward and in backward."""
    return *casts(shape, numel), shape.main_op("elementwise", numel), *casts(shape, numel)


def gated(shape: RankShape, numel: int) -> tuple[Ops, Ops]:
    """The activation of the gate, and its product with the other branch; backward has two products and one more."""
    product = shape.op("add", numel)  # as much traffic as an addition
    return (shape.op("elementwise", numel), product), (product, product, product)


def metric_losses(shape: RankShape, rows: int, vocab: int) -> Ops:
    """Losses for metrics, each with its own cast of the logits, as autocast does it.

    Composer's ``Trainer._eval_train_metrics`` updates the metrics of the model after every micro-batch; those of
    llm-foundry's models are ``LanguageCrossEntropy`` and ``LanguagePerplexity``, each a ``CrossEntropyLoss`` (2023).
    """
    return (*casts(shape, rows * vocab), shape.main_op("cross_entropy", rows, vocab)) * shape.model.metric_losses


def token_metrics(shape: RankShape, rows: int, vocab: int) -> Ops:
    """Cross-entropy of every token: loss, the two largest logits and their index, difference to the maximum,
    exponentials, sum.

    InternEvo, ``internlm/model/metrics.py``, 2023-24 (``AccPerplex``), after every micro-batch on fp32 logits.
    """
    read, both = (shape.main_op(kind, rows * vocab) for kind in ("reduce", "elementwise"))
    return read, read, read, read, both, both, read
