"""Sizes of a micro-batch on one rank, from which blocks are made."""

from __future__ import annotations

from dataclasses import dataclass

from stepsight.dataset.base.caching import hashed_once
from stepsight.dataset.job.execution import COMPUTE_DTYPE, CORE_DTYPE, KernelSemantics
from stepsight.dataset.job.specs import QUANTIZED, ModelSpec
from stepsight.dataset.kinds.op import DTYPE_BYTES, Collective, Op
from stepsight.simulator.blocks.step import Comm


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as a rank sees it.

    Attributes:
        size: Ranks.
        per_node: Its ranks that share a node.
    """

    size: int = 1
    per_node: int = 1

    def collective(self, kind: str, num_bytes: int) -> Collective:
        return Collective(kind, num_bytes, self.size, self.per_node)


@hashed_once
@dataclass(frozen=True)
class RankShape:
    """Sizes of a micro-batch on one rank; ranks with equal shapes run equal blocks.

    Attributes:
        model: The whole model.
        micro_batch: Sequences.
        precision: Of matrix products: one of ``MIXED``, or a 16-bit type.
        kernels: What the execution engine does in a block.
        tp, cp, ep: Groups.
        expert_tp: Tensor-parallel degree of the experts (1 or that of ``tp``).
        sequence_parallel: Whether norms and residuals hold ``1 / tp`` of the rows.
        vocab_parallel: Whether the vocabulary is shared by ``tp``.
        context_parallel: ``ring`` or ``all_gather``.
        offload_activations: Whether what is kept moves to the host and back.
        scatter_p2p: Whether ranks pass on their parts of activations, gathered where they arrive.
        overlap_tp: As in ``ParallelSpec``.
        overlap_ep, dispatcher: As in ``ParallelSpec``.
        recompute_modules: As in ``ParallelSpec``, without the attention core.
        compute_share: Part of an overlapped collective's time that the computation loses.
    """

    model: ModelSpec
    micro_batch: int
    precision: str
    kernels: KernelSemantics
    tp: Group = Group()
    cp: Group = Group()
    ep: Group = Group()
    expert_tp: int = 1
    sequence_parallel: bool = False
    vocab_parallel: bool = True
    context_parallel: str = "ring"
    offload_activations: bool = False
    scatter_p2p: bool = False
    overlap_tp: str = ""
    overlap_ep: bool = False
    dispatcher: str = "alltoall"
    recompute_modules: tuple[str, ...] = ()
    compute_share: float = 0.0

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
        """An op in the main type."""
        return Op(kind, dims, self.kernels.main_dtype)

    def gemm(self, kind: str, *dims: int) -> Op:
        """A matrix product, in the precision's own dtype."""
        return Op(kind, dims, self.precision)

    def core_product(self, *dims: int) -> Op:
        """A product of unfused attention."""
        return Op("batched_matmul", dims, CORE_DTYPE[self.precision])

    def tp_comm(self, kind: str, num_bytes: int, *, beside: bool = False) -> Comm:
        return Comm(self.tp.collective(kind, num_bytes), "tp", beside)
