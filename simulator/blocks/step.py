"""Steps: one module call each, as data. A block is a tuple of steps.

A block's backward pass is its steps' ``backward`` and ``weight_grad`` in reverse order.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepsight.dataset.kinds.op import Collective, Op


@dataclass(frozen=True, slots=True)
class Comm:
    """A collective on the stream of its group.

    Attributes:
        work: Its signature.
        stream: ``tp``, ``cp``, ``ep`` or ``cp_kv``: which group, hence which stream and which line of the breakdown.
        beside: False: the computation waits for it immediately.  True: it starts when the computation has come to it
            and runs beside what follows, until a ``Join``.
    """

    work: Collective
    stream: str = "tp"
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Beside:
    """An op on its own stream (``offload``); it overlaps with the computation until a ``Join``."""

    work: Op
    stream: str = "offload"


@dataclass(frozen=True, slots=True)
class Lost:
    """Computation time lost to an overlapping collective, which occupies some of the device's cores.

    Attributes:
        work: The collective's signature.
        share: Part of its time.
        stream: Which line of the breakdown.
    """

    work: Collective
    share: float
    stream: str = "tp"


@dataclass(frozen=True, slots=True)
class Join:
    """The computation waits until a stream is empty."""

    stream: str


Item = Op | Comm | Beside | Lost | Join


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that forward keeps for backward.

    Attributes:
        num_bytes: On one rank.
        name: Equal names within a block are the same tensor and are kept once.
        outside: Of an attention core: made before it, so selective recomputation keeps it.
        made_by: The module that makes it, one of ``RECOMPUTE_MODULES``: kept only if that is not recomputed.
    """

    num_bytes: int
    name: str = ""
    outside: bool = False
    made_by: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One module call.

    Attributes:
        name: For people (``qkv``).
        forward: Items in order.
        backward: Items that give the gradient of the input, in order.
        weight_grad: Items that give the gradients of the parameters; nothing else waits for them.
        parameters: Elements of each parameter tensor on one rank, in the order in which gradients arrive.
        weight_grad_first: Whether autograd computes the weights' gradients before the input's (linears without bias).
        replicated: Whether tensor-parallel ranks hold the same parameters; with sequence parallelism each has a part of
            their gradient.
        expert: Whether the parameters are experts', which fewer replicas share.
        saved: What forward keeps for backward; each tensor is named by one step.
        temporary_bytes: What forward or backward needs for a moment beside what its ops read and write; negative where
            they say too much.
        attention_core: Whether selective recomputation repeats this step.
        module: What it is part of, one of ``RECOMPUTE_MODULES`` or empty: jobs may name modules to recompute.
        output_kept: Whether full recomputation leaves out its last op, a product, since what it returns is kept.
        ends_unneeded: Whether a recomputation that ends with this step leaves out its last op, since the step keeps its
            inputs alone.
    """

    name: str
    forward: tuple[Item, ...] = ()
    backward: tuple[Item, ...] = ()
    weight_grad: tuple[Item, ...] = ()
    parameters: tuple[int, ...] = ()
    weight_grad_first: bool = False
    replicated: bool = False
    expert: bool = False
    saved: tuple[Saved, ...] = ()
    temporary_bytes: int = 0
    attention_core: bool = False
    module: str = ""
    output_kept: bool = False
    ends_unneeded: bool = False

    @property
    def saved_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.saved)

    @property
    def full_backward(self) -> tuple[Item, ...]:
        """Both parts of the backward, in the order of autograd."""
        if self.weight_grad_first:
            return self.weight_grad + self.backward
        return self.backward + self.weight_grad


Block = tuple[Step, ...]
