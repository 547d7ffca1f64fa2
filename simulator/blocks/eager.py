"""What PyTorch runs where nothing fuses the operations of norms, rotary positions, gated activations and losses.

Element by element in 16 bits, with fp32 in between where the modules say so (``nn.RMSNorm`` before PyTorch 2.8;
torchtitan's ``apply_rotary_emb``, 2024-25, in complex fp32; ``F.silu(gate) * up``; ``cross_entropy`` of fp32 logits).
"""

from __future__ import annotations

from stepsight.dataset.op import Op
from stepsight.simulator.blocks.shape import RankShape

Ops = tuple[Op, ...]


def _full(kind: str, numel: int) -> Op:
    return Op(kind, (numel,), "fp32")


def rms_norm(shape: RankShape, rows: int, width: int) -> tuple[Ops, Ops]:
    """Forward: to fp32, square, mean, times its root's inverse, back, times the weight.  Backward of each."""
    numel = rows * width
    cast = shape.op("cast", numel)
    forward = (
        cast, _full("elementwise", numel), _full("reduce", numel), _full("elementwise", numel), cast,
        shape.op("elementwise", numel),
    )  # fmt: skip
    backward = (
        shape.op("elementwise", numel), shape.op("add", numel), shape.op("reduce", numel), cast,
        _full("elementwise", numel), _full("add", numel), _full("reduce", numel), _full("elementwise", numel),
        _full("add", numel), cast,
    )  # fmt: skip
    return forward, backward


def rope(shape: RankShape, numel: int) -> Ops:
    """To fp32, a complex product, back; backward does the same."""
    return shape.op("cast", numel), _full("elementwise", numel), shape.op("cast", numel)


def gated(shape: RankShape, numel: int) -> tuple[Ops, Ops]:
    """The activation of the gate, and a product with what it lets through; backward has two products and one more."""
    product = shape.op("add", numel)  # as much traffic as an addition
    return (shape.op("elementwise", numel), product), (product, product, product)


def fp32_logits(shape: RankShape, numel: int) -> tuple[Ops, Ops]:
    """Logits to fp32, and their gradient back."""
    return (shape.op("cast", numel),), (shape.op("cast", numel),)


def token_metrics(rows: int, vocab: int) -> Ops:
    """Loss, two largest and the place of the largest, difference to it, exponentials and their sum, of every token.

    InternEvo, ``internlm/model/metrics.py``, 2023-24 (``AccPerplex``), after every micro-batch on fp32 logits.
    """
    numel = rows * vocab
    read, both = _full("reduce", numel), _full("elementwise", numel)
    return read, read, read, read, both, both, read
