"""MLPs, gated or not."""

from __future__ import annotations

from stepsight.dataset.job.specs import ModelSpec
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.blocks import eager
from stepsight.simulator.blocks.layer_parts import column_linear, entered, left, row_linear
from stepsight.simulator.blocks.shape import RankShape
from stepsight.simulator.blocks.step import Block, Saved, Step


def activation_kind(model: ModelSpec) -> str:
    """Activation of the MLP: ReLU or gated GELU for T5 (Raffel et al. 2019, arXiv:1910.10683), GELU or gated SiLU
    otherwise.
    """
    if model.family == "t5":
        return "geglu" if model.gated_mlp else "relu"
    return "swiglu" if model.gated_mlp else "gelu"


def activation(shape: RankShape, rows: int, ffn: int) -> Step:
    """The activation between the two linears."""
    kind, numel = activation_kind(shape.model), rows * ffn
    width = 2 * ffn if shape.model.gated_mlp else ffn
    forward: tuple[Op, ...] = (shape.op(kind, numel),)
    backward: tuple[Op, ...] = (shape.op(f"{kind}_backward", numel),)
    if shape.kernels.separate_kernels and shape.model.gated_mlp:
        forward, backward = eager.gated(shape, numel)
    return Step(
        kind,
        forward,
        backward,
        saved=(Saved(rows * width * shape.dtype_bytes),),
        temporary_bytes=numel * shape.dtype_bytes if shape.model.gated_mlp else 0,  # the gate is computed again
    )


def mlp(shape: RankShape, ffn: int = 0, prefix: str = "", *, keeps: str = "") -> Block:
    """A tensor-parallel MLP without norm and residual.

    Args:
        shape: The rank.
        ffn: Inner size on all ranks together, 0: the model's.
        prefix: Of the names of its linears.
        keeps: Name of its input, where other steps keep the same tensor.
    """
    model, own = shape.model, (ffn or shape.model.ffn) // shape.tp.size
    first, width = ("gate_up", 2 * own) if model.gated_mlp else ("fc1", own)
    return (
        *entered(shape, column_linear(shape, prefix + first, width, model.hidden, keeps=keeps)),
        activation(shape, shape.rows, own),
        *left(shape, row_linear(shape, prefix + ("down" if model.gated_mlp else "fc2"), model.hidden, own)),
    )
