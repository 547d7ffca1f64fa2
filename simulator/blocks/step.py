"""Steps, one module call each, as data; and the sizes of a micro-batch on one rank, from which they are made.

A block is a tuple of steps.  Its backward pass is its steps' ``backward`` and ``weight_grad`` in reverse order.

``recomputed``: modules of a layer that backward recomputes, Megatron-Core's ``recompute_modules``.  Source: Megatron-
Core 0.12 to 0.18, ``transformer/transformer_config.py``, and where each module asks for itself: ``layernorm`` and
``mlp`` (of dense layers) in ``transformer_layer.py``, ``moe_act`` in ``moe/experts.py``, ``moe`` and ``shared_experts``
in ``moe/moe_layer.py`` and ``moe/shared_experts.py``, ``mla_up_proj`` in ``multi_latent_attention.py``.  The attention
core is repeated elsewhere (``programs.block_pass``), as it may be several kernels whose statistics are kept.

``offloaded``: what a layer keeps leaves beside the next layer's forward and comes back beside the backward of the layer
after it (vDNN, Rhu et al. 2016, arXiv:1602.08124; so does Transformer Engine).  Layers in a row are alike, so each
block carries its own bytes from its first step to its last: as many transfers, one layer earlier.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby

from stepsight.dataset.base.caching import hashed_once
from stepsight.dataset.job.execution import COMPUTE_DTYPE, CORE_DTYPE, KernelSemantics
from stepsight.dataset.job.sharding import RankTables
from stepsight.dataset.job.specs import QUANTIZED, ModelSpec
from stepsight.dataset.kinds.op import DTYPE_BYTES, Collective, Op


@dataclass(frozen=True, slots=True)
class Comm:
    """A collective on the stream of its group."""

    work: Collective  # its signature
    stream: str = "tp"  # tp, cp, ep or cp_kv: which group, hence which stream and which line of the breakdown
    # false: the computation waits for it immediately.  True: it starts when the computation has come to it and runs
    # beside what follows, until a Join.
    beside: bool = False


@dataclass(frozen=True, slots=True)
class OverlappedOp:
    """An op on its own stream (``offload``); it overlaps with the computation until a ``Join``."""

    work: Op
    stream: str = "offload"


@dataclass(frozen=True, slots=True)
class LostTime:
    """Computation time lost to a ``share`` of an overlapping collective; ``stream``: which line of the breakdown."""

    work: Collective
    share: float
    stream: str = "tp"


@dataclass(frozen=True, slots=True)
class Join:
    """The computation waits until a stream is empty."""

    stream: str


Item = Op | Comm | OverlappedOp | LostTime | Join


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that forward keeps for backward."""

    num_bytes: int  # on one rank
    name: str = ""  # equal names within a block are the same tensor and are kept once
    outside: bool = False  # of an attention core: made before it, so selective recomputation keeps it
    made_by: str = ""  # the module that makes it, one of RECOMPUTE_MODULES: kept only if that is not recomputed


class Flow(StrEnum):
    """Which tensors an item reads and hands on, if not what the item before it made.

    ``programs.data_flow`` follows these marks in order, with what is handed on and a stack of what was kept.
    """

    KEEP = "keep"  # what comes in goes onto the stack, and is handed on too
    SWAP = "swap"  # what comes in goes onto the stack, and what was its top is handed on instead
    DROP = "drop"  # nothing is handed on
    DROP_IN_FORWARD = "drop_in_forward"  # the same, in forward alone
    JOIN = "join"  # the first item also reads the top of the stack, and takes it off
    JOIN_AT_LAST = "join_at_last"  # the last item does (a sum)
    ASIDE = "aside"  # items read nothing, and hand nothing on
    RUN_AGAIN = "run_again"  # the backward of the step is a forward that runs again, with a stack of its own
    # added by passes to items, the last ones to items that hand nothing on
    RAN_AGAIN = "ran_again"  # what ran again is over
    BEGIN_BACKWARD = "begin_backward"  # of a step: gradients of its parameters read what is handed on here
    PARAMETERS = "parameters"  # it reads parameters
    GRADIENTS_TOO = "gradients_too"  # it makes gradients of parameters beside that of the input
    GRADIENT = "gradient"  # it makes a gradient of a parameter from what arrived at its step
    GRADIENT_CONTINUED = "gradient_continued"  # it reads the item before it, and its result replaces that gradient
    COPY_FIRST = "copy_first"  # it copies the first gradient of its step
    COPY_LAST = "copy_last"  # it copies the last one
    COPY_AGAIN = "copy_again"  # it copies what the item before it made
    IN_BUCKET = "in_bucket"  # after one of these: into a bucket, where others are
    PARAMETERS_IN = "parameters_in"  # it copies parameters into a message
    PARAMETERS_OUT = "parameters_out"  # it copies them out of it
    GRADIENTS_IN = "gradients_in"  # it copies gradients into a message


@dataclass(frozen=True, slots=True)
class Step:
    """One module call."""

    name: str  # for people (qkv)
    forward: tuple[Item, ...] = ()  # items in order
    backward: tuple[Item, ...] = ()  # items that give the gradient of the input, in order
    weight_grad: tuple[Item, ...] = ()  # items that give the gradients of the parameters; nothing else waits for them
    # elements of each parameter tensor on one rank, in the order in which gradients arrive
    parameters: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()  # likewise of parameters that are not trained
    narrow: tuple[int, ...] = ()  # those of them that are gathered in 8 bits
    # whether autograd computes the weights' gradients before the input's (linears without bias)
    weight_grad_first: bool = False
    # whether tensor-parallel ranks hold the same parameters; with sequence parallelism each has a part of their
    # gradient
    replicated: bool = False
    expert: bool = False  # whether the parameters are experts', which fewer replicas share
    saved: tuple[Saved, ...] = ()  # what forward keeps for backward; each tensor is named by one step
    # what forward or backward needs for a moment beside what its ops read and write; negative where they say too much
    temporary_bytes: int = 0
    in_place: bool = False  # whether it needs nothing beside what it keeps, which its gradient overwrites
    attention_core: bool = False  # whether selective recomputation repeats this step
    module: str = ""  # what it is part of, one of RECOMPUTE_MODULES or empty: jobs may name modules to recompute
    # whether full recomputation leaves out its products, since what they return is kept
    output_kept: bool = False
    flow: tuple[Flow, ...] = ()  # which tensors its items read, if not what the step before made
    # whether a recomputation that ends with this step leaves out its product, since the step keeps its inputs alone
    ends_unneeded: bool = False

    @property
    def saved_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.saved)

    @property
    def products(self) -> tuple[Op, ...]:
        """Matrix products of its forward."""
        return tuple([item for item in self.forward if isinstance(item, Op) and item.record.family.endswith("gemm")])

    @property
    def full_backward(self) -> tuple[Item, ...]:
        """Both parts of the backward, in the order of autograd."""
        if self.weight_grad_first:
            return self.weight_grad + self.backward
        return self.backward + self.weight_grad


Block = tuple[Step, ...]


WHOLE = ("mlp", "shared_experts", "moe")  # checkpoints: they keep their input alone


def in_module(block: Block, module: str, *, whole: bool = False) -> Block:
    """Steps as parts of a module, but for those that are parts of another one, if not the ``whole`` block is."""
    return tuple([step if step.module and not whole else replace(step, module=module) for step in block])


def recomputed(block: Block, modules: Collection[str]) -> Block:
    """A layer some of whose ``modules`` run again in backward, just before their own backward.

    What a recomputed module makes is not kept; it is there again while the module's backward runs.
    """
    if not modules:
        return block
    found: list[Step] = []
    for module, run in groupby(block, lambda step: step.module):
        steps = tuple([replace(s, saved=tuple([each for each in s.saved if each.made_by not in modules])) for s in run])
        if module not in modules:
            found += steps
            continue
        again: list[Item] = [item for step in steps for item in step.forward]
        made = sum(step.saved_bytes for step in steps[1:]) if module in WHOLE else 0
        if module in WHOLE:
            steps = (steps[0], *(replace(step, saved=()) for step in steps[1:]))
        found += [*steps, Step(f"{module}.again", backward=tuple(again), temporary_bytes=made, flow=(Flow.RUN_AGAIN,))]
    return tuple(found)


def kept_bytes(block: Block) -> int:
    """Bytes that a block keeps for its backward; each named tensor counts once."""
    named = {tensor.name: tensor.num_bytes for step in block for tensor in step.saved if tensor.name}
    return sum(named.values()) + sum(t.num_bytes for step in block for t in step.saved if not t.name)


def offloaded(block: Block, dtype: str, share: float = 1.0) -> Block:
    """A layer of which a share of the kept activations is copied to the host and back while it computes."""
    numel = math.ceil(kept_bytes(block) * share / DTYPE_BYTES[dtype])
    if not numel:
        return block
    leave = Step("offload", (OverlappedOp(Op("to_host", (numel,), dtype)),), (Join("offload"),))
    arrive = Step("offload", (Join("offload"),), (OverlappedOp(Op("from_host", (numel,), dtype)),))
    return (leave, *block, arrive)


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as a rank sees it; ``per_node``: its ranks that share a node."""

    size: int = 1
    per_node: int = 1

    def collective(self, kind: str, num_bytes: int) -> Collective:
        return Collective(kind, num_bytes, self.size, self.per_node)


@hashed_once
@dataclass(frozen=True)
class RankShape:
    """Sizes of a micro-batch on one rank; ranks with equal shapes run equal blocks."""

    model: ModelSpec  # the whole model
    micro_batch: int  # sequences
    precision: str  # of matrix products: one of MIXED, or a 16-bit type
    kernels: KernelSemantics  # what the execution engine does in a block
    # tp, cp, ep: groups
    tp: Group = Group()
    cp: Group = Group()
    ep: Group = Group()
    expert_tp: int = 1  # tensor-parallel degree of the experts (1 or that of tp)
    sequence_parallel: bool = False  # whether norms and residuals hold 1 / tp of the rows
    vocab_parallel: bool = True  # whether the vocabulary is shared by tp
    context_parallel: str = "ring"  # as in ParallelSpec
    offload_share: float = 0.0  # part of what is kept that moves to the host and back
    scatter_p2p: bool = False  # whether ranks pass on their parts of activations, gathered where they arrive
    overlap_tp: str = ""  # as in ParallelSpec
    # overlap_ep, dispatcher: as in ParallelSpec
    overlap_ep: bool = False
    dispatcher: str = "alltoall"
    recompute_modules: tuple[str, ...] = ()  # as in ParallelSpec, without the attention core
    compute_share: float = 0.0  # part of an overlapped collective's time that the computation loses
    tables: RankTables | None = None  # what the slowest rank does for embedding tables; None: the model has none

    @property
    def dtype(self) -> str:
        """Type of activations and of all ops except matrix products."""
        return COMPUTE_DTYPE[self.precision]

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def casts(self) -> bool:
        """Whether the activations' type differs from the main type, so that tensors are cast to it and back."""
        return self.dtype != self.kernels.main_dtype

    @property
    def quantizes(self) -> bool:
        """Whether operands of matrix products are converted to a narrower type."""
        return self.precision in QUANTIZED

    @property
    def main_bytes(self) -> int:
        """Bytes of an element in the main type."""
        return DTYPE_BYTES[self.kernels.main_dtype]

    @property
    def gemm_bytes(self) -> int:
        """Bytes of an element of a matrix product's operand."""
        return DTYPE_BYTES[self.precision]

    @property
    def operand_bytes(self) -> int:
        """Bytes of an element of a product's operand that tensor-parallel ranks gather.

        In fp8 they cast first and gather 8 bits (Transformer Engine 1.0 to 2.2, ``module/linear.py`` and
        ``grad_output_preprocess``; torchao's ``Float8ColwiseParallel`` and ``Float8RowwiseParallel``), but with a scale
        for each row they gather 16 (torchtitan, ``parallelize_llama.py``, 2025).
        """
        return 1 if self.precision == "fp8" and self.kernels.fp8_gathers else self.dtype_bytes

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence on this rank (of the decoder, if there is also an encoder)."""
        return (self.model.unpadded_len or self.model.seq_len) // self.cp.size

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch on this rank."""
        return self.micro_batch * self.seq_len

    @property
    def local_rows(self) -> int:
        """Tokens in norms and residuals."""
        return self.local(self.rows)

    @property
    def rows_before_columns(self) -> int:
        """Tokens of the input that a column-parallel linear keeps."""
        return self.rows if self.kernels.keeps_gathered_input else self.local_rows

    @property
    def vocab_tp(self) -> int:
        """Ranks that share the vocabulary."""
        return self.tp.size if self.vocab_parallel else 1

    def local(self, rows: int) -> int:
        """The share of a number of rows that belongs to this rank in norms and residuals."""
        return rows // self.tp.size if self.sequence_parallel else rows

    def op(self, kind: str, *dims: int) -> Op:
        return Op(kind, dims, self.dtype)

    def main_op(self, kind: str, *dims: int) -> Op:
        return Op(kind, dims, self.kernels.main_dtype)

    def gemm(self, kind: str, *dims: int) -> Op:
        """A matrix product, in the precision's own dtype."""
        return Op(kind, dims, self.precision)

    def core_product(self, *dims: int) -> Op:
        """A product of unfused attention."""
        return Op("batched_matmul", dims, CORE_DTYPE[self.precision])

    def tp_comm(self, kind: str, num_bytes: int, *, beside: bool = False) -> Comm:
        return Comm(self.tp.collective(kind, num_bytes), "tp", beside)
