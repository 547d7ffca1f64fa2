"""Modules of a layer that backward recomputes: Megatron-Core's ``recompute_modules``.

Source: Megatron-Core 0.12 to 0.18, ``transformer/transformer_config.py``, and where each module asks for itself:
``layernorm`` and ``mlp`` (of dense layers) in ``transformer_layer.py``, ``moe_act`` in ``moe/experts.py``, ``moe`` and
``shared_experts`` in ``moe/moe_layer.py`` and ``moe/shared_experts.py``, ``mla_up_proj`` in
``multi_latent_attention.py``.  The attention core is repeated elsewhere (``lowering.passages``), as it may be several
kernels whose statistics are kept.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import groupby

from stepsight.simulator.blocks.step import Block, Item, Step

WHOLE = ("mlp", "shared_experts", "moe")  # checkpoints: they keep their input alone


def in_module(block: Block, module: str, *, whole: bool = False) -> Block:
    """Steps as parts of a module, but for those that are parts of another one, if not the ``whole`` block is."""
    return tuple([step if step.module and not whole else replace(step, module=module) for step in block])


def recomputed(block: Block, modules: Collection[str]) -> Block:
    """A layer some of whose modules run again in backward, just before their own backward.

    What a recomputed module makes is not kept; it is there again while the module's backward runs.

    Args:
        block: The layer.
        modules: Some of ``RECOMPUTE_MODULES``, without the attention core.
    """
    if not modules:
        return block
    found: list[Step] = []
    for module, run in groupby(block, lambda step: step.module):
        steps = tuple([_without(step, modules) for step in run])
        if module not in modules:
            found += steps
            continue
        again: list[Item] = [item for step in steps for item in step.forward]
        made = sum(step.saved_bytes for step in steps[1:]) if module in WHOLE else 0
        if module in WHOLE:
            steps = (steps[0], *(replace(step, saved=()) for step in steps[1:]))
        found += [*steps, Step(f"{module}.again", backward=tuple(again), temporary_bytes=made)]
    return tuple(found)


def _without(step: Step, modules: Collection[str]) -> Step:
    """A step without the tensors that recomputed modules make again."""
    kept = tuple([tensor for tensor in step.saved if tensor.made_by not in modules])
    return step if len(kept) == len(step.saved) else replace(step, saved=kept)
