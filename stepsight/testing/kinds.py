"""The contracts of op kinds and collective kinds.

Subclass a contract and give it a ``kind`` fixture that returns the record::

    class TestMyKind(OpKindContract):
        @pytest.fixture
        def kind(self) -> OpKind:
            return MY_KIND

Kinds that are not registered are registered for the length of each test.  A record checks its own names and types when
it is built, and its functions for a few dims; the contracts check what follows from it for more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any

from stepsight.dataset.hardware.hardware import alpha_beta_seconds, find_fabric, find_hardware, roofline_seconds
from stepsight.dataset.kinds import COLLECTIVE_KINDS, OP_KINDS, CollectiveKind, OpKind
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.features.collective_features import COLLECTIVE_TERMS, NCCL_TERMS, collective_terms, nccl_terms
from stepsight.features.op_features import OP_TERMS, op_features, op_position, op_terms
from stepsight.training.kernels.kernel_models import base_of

_SIZES = ((8, 8), (3, 64), (1, 1), (512, 16))  # dims at even and at odd places
_GPU, _CPU = "h100-sxm-80gb", "local-cpu"
_FABRICS = ("dgx-h100", "loopback")


class OpKindContract:
    """Shared tests of op kinds."""

    def small_dims(self, kind: OpKind) -> tuple[int, ...]:
        """Dims of an op that the harness can run quickly; override it if dims of 8 are not valid."""
        return self._dims(kind, (8, 8))

    def test_its_costs_are_numbers(self, kind: OpKind) -> None:
        """FLOP and bytes are finite and not negative, also if a trace has no sizes; an op has some work."""
        with _known_op(kind):
            for op in (*self._ops(kind), Op(kind.name, (0,) * len(kind.dim_names))):
                assert 0 <= op.flops < inf and 0 <= op.num_bytes < inf, f"costs of {op}: {op.flops}, {op.num_bytes}"
            for op in self._ops(kind):
                busy = op.flops + op.num_bytes > 0 or kind.bound == "host"
                assert busy, f"{op} must do or move something, or have the host do so"

    def test_its_costs_grow_with_every_dim(self, kind: OpKind) -> None:
        """No larger dim makes an op cheaper, except flags, which may."""
        with _known_op(kind):
            for op in self._ops(kind):
                for index, name in enumerate(kind.dim_names):
                    if name not in kind.flags:
                        larger = Op(op.kind, (*op.dims[:index], op.dims[index] + 1, *op.dims[index + 1 :]), op.dtype)
                        pairs = zip(self._costs(op), self._costs(larger), strict=True)
                        assert all(less <= more for less, more in pairs), f"{larger} must cost at least as much as {op}"

    def test_its_terms_and_features_are_finite(self, kind: OpKind) -> None:
        """Physics and trees get numbers: non-negative terms, one row of features, a position."""
        with _known_op(kind):
            for op in self._ops(kind):
                terms = op_terms(op)
                assert len(terms) == len(OP_TERMS) and all(0 <= term < inf for term in terms), f"terms of {op}: {terms}"
                for name in (_GPU, _CPU):
                    hardware = find_hardware(name)
                    assert hardware is not None
                    dtype = Op(op.kind, op.dims, "fp32")
                    assert abs(op_features([dtype], hardware, 1)).max() < inf, f"features of {op} must be finite"
                    assert 0 <= roofline_seconds(dtype, hardware) < inf
                assert len(op_position(op)) == len(op.dims) + 2

    def test_its_tiles_are_sizes(self, kind: OpKind) -> None:
        """The grid, if there is one, has at least one output of at least one element."""
        with _known_op(kind):
            for op in self._ops(kind):
                grid = kind.grid(*op.dims) if kind.grid else (1, 1, 1)
                assert len(grid) == 3 and min(grid) >= 1, f"the grid of {op} must hold three sizes >= 1, got {grid}"

    def test_its_base_is_another_kind(self, kind: OpKind) -> None:
        """The chain of kinds that replace an unmeasured one ends."""
        hardware = find_hardware(_GPU)
        assert hardware is not None
        with _known_op(kind):
            for op in self._ops(kind):
                at: Op | None = op
                for _ in range(len(OP_KINDS) + 1):
                    at = base_of(at, hardware) if at is not None else None
                assert at is None, f"bases of {kind.name} must end, got {at}"

    def test_the_harness_runs_it_where_it_says_so(self, kind: OpKind) -> None:
        """The callable of its name runs twice on a CPU; a kind without one says so."""
        import torch

        from stepsight.dataset.harness.base.errors import HarnessError
        from stepsight.dataset.harness.ops.callables import op_call
        from stepsight.dataset.harness.ops.input_pool import Pool

        pool = Pool(torch.device("cpu"), "fp32", numel=64)
        try:
            call = op_call(kind.name, list(self.small_dims(kind)), pool)
        except HarnessError as error:
            assert not kind.in_harness, f"the harness must run {kind.name}, or in_harness be False: {error}"
            return
        assert kind.in_harness, f"the harness has {kind.name}: in_harness must be True"
        for _ in range(2):
            call.run(*call.inputs())

    def _ops(self, kind: OpKind) -> Iterator[Op]:
        return (Op(kind.name, self._dims(kind, sizes)) for sizes in _SIZES)

    def _dims(self, kind: OpKind, sizes: tuple[int, int]) -> tuple[int, ...]:
        names = enumerate(kind.dim_names)
        return tuple(1 if name in kind.flags else sizes[index % 2] for index, name in names)

    def _costs(self, op: Op) -> tuple[float, ...]:
        return op.flops, op.num_bytes, *op_terms(op)


class CollectiveKindContract:
    """Shared tests of collective kinds."""

    def test_its_time_grows_with_its_bytes(self, kind: CollectiveKind) -> None:
        """The time by physics grows with the bytes, within a node and across nodes, on every fabric."""
        with _known_collective(kind):
            for near in (1, 2):
                few, many = (Collective(kind.name, num_bytes, 2, near) for num_bytes in (1000, 10**8))
                for name in _FABRICS:
                    fabric = find_fabric(name)
                    assert 0 < alpha_beta_seconds(few, fabric) < alpha_beta_seconds(many, fabric) < inf

    def test_its_terms_are_finite(self, kind: CollectiveKind) -> None:
        """Terms are not negative, on one host's links and with NCCL."""
        with _known_collective(kind):
            for size, near in ((2, 2), (2, 1), (8, 8), (64, 8)):
                work = Collective(kind.name, 2**20, size, near)
                for name in _FABRICS:
                    fabric = find_fabric(name)
                    for terms, names in (
                        (collective_terms(work, fabric), COLLECTIVE_TERMS),
                        (nccl_terms(work, fabric), NCCL_TERMS),
                    ):
                        assert len(terms) == len(names) and all(0 <= term < inf for term in terms), f"{work}: {terms}"


def _known_op(kind: OpKind) -> AbstractContextManager[Any]:
    return nullcontext() if OP_KINDS.get(kind.name) is kind else OP_KINDS.added(kind)


def _known_collective(kind: CollectiveKind) -> AbstractContextManager[Any]:
    return nullcontext() if COLLECTIVE_KINDS.get(kind.name) is kind else COLLECTIVE_KINDS.added(kind)
