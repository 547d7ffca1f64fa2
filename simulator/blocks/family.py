"""Model families: the blocks that each family consists of.

A family is one small file of functions that return lists of steps; a user adds one with ``register_family``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.base.registry import check_takes
from stepsight.dataset.job.specs import FAMILIES, ModelSpec
from stepsight.simulator.blocks import bert, dense, t5, vit
from stepsight.simulator.blocks.step import Block, RankShape, Step, offloaded, recomputed

LayerKinds = tuple[tuple[str, int], ...]


def _all_alike(model: ModelSpec) -> LayerKinds:
    return (("layer", model.layers),)


def _one_activation(shape: RankShape, layers_before: int) -> int:
    return shape.local_rows * shape.model.hidden * shape.dtype_bytes


@dataclass(frozen=True)
class Family:
    """A model family: functions that make the blocks of its parts.

    Attributes:
        embedding: ``(shape, shared) -> Block``: what comes first; ``shared`` if its table is the head's on this rank.
        layer: ``(shape, kind) -> Block``: one layer.
        head: ``(shape, shared) -> Block``: what comes last, the loss included.
        layer_kinds: Kinds of the layers in model order, run-length encoded.
        boundary_bytes: ``(shape, layers_before)``: bytes that pass from one pipeline part to the next.

    Raises:
        JobError: On construction, if one is no function of these arguments.
    """

    embedding: Callable[[RankShape, bool], Block]
    layer: Callable[[RankShape, str], Block]
    head: Callable[[RankShape, bool], Block]
    layer_kinds: Callable[[ModelSpec], LayerKinds] = _all_alike
    boundary_bytes: Callable[[RankShape, int], int] = _one_activation

    def __post_init__(self) -> None:
        for name, arguments in (
            ("embedding", ("shape", "shared")),
            ("layer", ("shape", "kind")),
            ("head", ("shape", "shared")),
            ("layer_kinds", ("model",)),
            ("boundary_bytes", ("shape", "layers_before")),
        ):
            check_takes(f"{name} of a model family", getattr(self, name), arguments, JobError)


_BUILT_IN = {
    "gpt": Family(dense.embedding, dense.layer, dense.head, dense.layer_kinds),
    "llama": Family(dense.embedding, dense.layer, dense.head, dense.layer_kinds),
    "bert": Family(bert.embedding, bert.layer, bert.head),
    "t5": Family(t5.embedding, t5.layer, t5.head, t5.layer_kinds, t5.boundary_bytes),
    "vit": Family(vit.embedding, vit.layer, vit.head),
}
dict.update(FAMILIES, _BUILT_IN)  # the names alone are declared with the specs, which know no blocks


def register_family(name: str, family: Family) -> None:
    """Register a family of your own, so that jobs can say ``[model] family = name``.

    Raises:
        JobError: If the name is taken, or ``family`` is no ``Family``.
    """
    FAMILIES.register(name, _checked(name, family))


def find_family(name: str) -> Family:
    """Return the blocks of a family.

    Raises:
        JobError: If the name is not known, or what a package brings under it is no ``Family``.
    """
    return _checked(name, FAMILIES[name])


def _checked(name: str, family: Any) -> Family:
    if not isinstance(family, Family):
        raise JobError(f"model family {name!r:.80} must be a simulator.blocks.Family, got {family!r:.80}")
    return family


def _block(name: str, part: str, *arguments: Any) -> Block:
    """Make the steps of a part of a family's model; a mistake in a user's family becomes a ``JobError``."""
    function = getattr(find_family(name), part)
    if name in _BUILT_IN:
        return cast(Block, function(*arguments))
    try:
        block = function(*arguments)
    except StepsightError:
        raise
    except Exception as error:  # a user's function can raise any exception
        raise JobError(f"model family {name!r:.80}: {part} raises {type(error).__name__}: {error}") from error
    if not isinstance(block, tuple) or not all(isinstance(step, Step) for step in block):
        raise JobError(f"model family {name!r:.80}: {part} must return a tuple of steps, got {block!r:.80}")
    return block


@cached(4096)
def embedding_block(shape: RankShape, shared: bool = False) -> Block:
    """Blocks before the first layer."""
    return _block(shape.model.family, "embedding", shape, shared)


@cached(4096)
def layer_block(shape: RankShape, kind: str) -> Block:
    """One layer; some modules are recomputed, or its kept activations are offloaded, if the job says so."""
    block = recomputed(_block(shape.model.family, "layer", shape, kind), shape.recompute_modules)
    return offloaded(block, shape.dtype) if shape.offload_activations else block


@cached(4096)
def head_block(shape: RankShape, shared: bool = False) -> Block:
    """Blocks after the last layer."""
    return _block(shape.model.family, "head", shape, shared)
