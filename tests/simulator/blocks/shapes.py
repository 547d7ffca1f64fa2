"""Small ranks for tests of blocks, and what is counted in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepsight.dataset.job.execution import ENGINE_SEMANTICS, KernelSemantics, default_engine
from stepsight.dataset.job.job import ModelSpec
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.step import Block, Comm, Group, Item, Join, OverlappedOp, RankShape

GEMMS = ("linear", "linear_dgrad", "linear_wgrad", "batched_matmul", "attention", "attention_backward")


def small_model(family: str = "gpt", **changes: Any) -> ModelSpec:
    """Two layers, 64 wide, with 4 heads."""
    sizes: dict[str, Any] = {
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2 if family == "llama" else 4,
        "ffn": 256,
        "vocab": 512,
        "seq_len": 32,
        "gated_mlp": family == "llama",
        "expert_ffn": 128,
    }
    if family == "t5":
        sizes |= {"encoder_layers": 3, "encoder_seq_len": 64}
    if family == "vit":
        sizes |= {"patch_dim": 48, "seq_len": 33}
    return ModelSpec(family=family, **(sizes | changes))


def small_shape(
    family: str = "gpt",
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    precision: str = "fp32",
    model: dict[str, Any] | None = None,
    kernels: dict[str, Any] | None = None,
    **changes: Any,
) -> RankShape:
    """Two sequences of the small model on one rank, by the default engine of the precision."""
    groups = {"tp": Group(tp, tp), "cp": Group(cp, cp), "ep": Group(ep, ep)}
    semantics = replace(default_kernels(precision), **(kernels or {}))
    return RankShape(small_model(family, **(model or {})), 2, precision, semantics, **groups, **changes)


def default_kernels(precision: str) -> KernelSemantics:
    """Of the default engine of a precision."""
    return ENGINE_SEMANTICS[default_engine(precision)].kernels


def items(block: Block, *, backward: bool = False) -> list[Item]:
    """What one pass issues, in order."""
    if backward:
        return [item for step in reversed(block) for item in step.full_backward]
    return [item for step in block for item in step.forward]


def both(block: Block) -> list[Item]:
    """Forward and backward."""
    return items(block) + items(block, backward=True)


def words(block: Block, *, backward: bool = False) -> str:
    """Kinds in order; what runs beside the computation begins with ``~``, a join is ``|``."""
    found = []
    for item in items(block, backward=backward):
        if isinstance(item, Op):
            found.append(item.kind)
        elif isinstance(item, Join):
            found.append("|")
        else:
            beside = isinstance(item, OverlappedOp) or item.beside
            found.append(("~" if beside else "") + item.work.kind)
    return " ".join(found)


def ops(block: Block, *kinds: str) -> list[Op]:
    """Ops of some kinds (or all) of both passes."""
    return [item for item in both(block) if isinstance(item, Op) and (not kinds or item.kind in kinds)]


def collectives(block: Block, stream: str, *, backward: bool | None = None) -> list[Collective]:
    """Collectives of a stream, of one or of both passes."""
    found = both(block) if backward is None else items(block, backward=backward)
    return [item.work for item in found if isinstance(item, Comm) and item.stream == stream]


def flops(block: Block, *kinds: str) -> float:
    """Of some kinds of op in both passes."""
    return sum(op.flops for op in ops(block, *kinds))


def parameters(block: Block) -> int:
    return sum(sum(step.parameters) for step in block)
