"""The contracts of op kinds and collective kinds.

A record checks its own names and types when it is built, and its functions for a few dims; the contracts check what
follows from it for more.  Kinds that are not registered are registered for the length of each test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from math import inf
from operator import le
from typing import Any

from stepsight.dataset.hardware.hardware import FABRICS, HARDWARE, alpha_beta_seconds, roofline_seconds
from stepsight.dataset.kinds import COLLECTIVE_KINDS, OP_KINDS, CollectiveKind, OpKind
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.features.collective_features import COLLECTIVE_TERMS, NCCL_TERMS, collective_terms, nccl_terms
from stepsight.features.node_features import OP_TERMS, op_features, op_position, op_terms
from stepsight.training.kernels.kernel_models import base_of

_SIZES = ((8, 8), (3, 64), (1, 1), (512, 16))  # dims at even and at odd places
_DEVICES = ("h100-sxm-80gb", "local-cpu")
_FABRICS = (FABRICS["dgx-h100"], FABRICS["loopback"])


class OpKindContract:
    """Tests that every kind of op passes: the record that the fixture ``kind`` returns."""

    def small_dims(self, kind: OpKind) -> tuple[int, ...]:
        """Dims of an op that the harness can run quickly; override it if dims of 8 are not valid."""
        return _dims(kind, (8, 8))

    def test_its_costs_are_numbers(self, kind: OpKind) -> None:
        """FLOP and bytes are finite and not negative, also if a trace has no sizes; an op has some work."""
        with _ops_of(kind) as ops:
            for op in (*ops, Op(kind.name, (0,) * len(kind.dim_names))):
                assert 0 <= op.flops < inf and 0 <= op.num_bytes < inf, f"costs of {op}: {op.flops}, {op.num_bytes}"
            for op in ops:
                busy = op.flops + op.num_bytes > 0 or kind.bound == "host"
                assert busy, f"{op} must do or move something, or have the host do so"

    def test_its_costs_grow_with_every_dim(self, kind: OpKind) -> None:
        """No larger dim makes an op cheaper, except flags, which may."""
        with _ops_of(kind) as ops:
            for op, (index, name) in product(ops, enumerate(kind.dim_names)):
                if name not in kind.flags:
                    larger = Op(op.kind, (*op.dims[:index], op.dims[index] + 1, *op.dims[index + 1 :]), op.dtype)
                    costs = [(each.flops, each.num_bytes, *op_terms(each)) for each in (op, larger)]
                    assert all(map(le, *costs)), f"{larger} must cost at least as much as {op}"

    def test_its_terms_and_features_are_finite(self, kind: OpKind) -> None:
        """Physics and trees get numbers: non-negative terms, one row of features, a position."""
        with _ops_of(kind) as ops:
            for op in ops:
                terms, single = op_terms(op), Op(op.kind, op.dims, "fp32")
                assert len(terms) == len(OP_TERMS) and all(0 <= term < inf for term in terms), f"terms of {op}: {terms}"
                for hardware in (HARDWARE[name] for name in _DEVICES):
                    assert abs(op_features([single], hardware, 1)).max() < inf, f"features of {op} must be finite"
                    assert 0 <= roofline_seconds(single, hardware) < inf
                assert len(op_position(op)) == len(op.dims) + 2

    def test_its_tiles_are_sizes(self, kind: OpKind) -> None:
        """The grid, if there is one, has at least one output of at least one element."""
        with _ops_of(kind) as ops:
            for op in ops:
                grid = kind.grid(*op.dims) if kind.grid else (1, 1, 1)
                assert len(grid) == 3 and min(grid) >= 1, f"the grid of {op} must hold three sizes >= 1, got {grid}"

    def test_its_base_is_another_kind(self, kind: OpKind) -> None:
        """The chain of kinds that replace an unmeasured one ends."""
        with _ops_of(kind) as ops:
            for at in ops:
                base: Op | None = at
                for _ in range(len(OP_KINDS) + 1):
                    base = base and base_of(base, HARDWARE[_DEVICES[0]])
                assert base is None, f"bases of {kind.name} must end, got {base}"

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


class CollectiveKindContract:
    """Tests that every kind of collective passes: the record that the fixture ``kind`` returns."""

    def test_its_time_grows_with_its_bytes(self, kind: CollectiveKind) -> None:
        """The time by physics grows with the bytes, within a node and across nodes, on every fabric."""
        with _known(COLLECTIVE_KINDS, kind):
            for near, fabric in product((1, 2), _FABRICS):
                few, many = (Collective(kind.name, num_bytes, 2, near) for num_bytes in (1000, 10**8))
                assert 0 < alpha_beta_seconds(few, fabric) < alpha_beta_seconds(many, fabric) < inf

    def test_its_terms_are_finite(self, kind: CollectiveKind) -> None:
        """Terms are not negative, on one host's links and with NCCL."""
        with _known(COLLECTIVE_KINDS, kind):
            for sizes, fabric in product(((2, 2), (2, 1), (8, 8), (64, 8)), _FABRICS):
                work = Collective(kind.name, 2**20, *sizes)
                for terms_of, names in ((collective_terms, COLLECTIVE_TERMS), (nccl_terms, NCCL_TERMS)):
                    terms = terms_of(work, fabric)
                    assert len(terms) == len(names) and all(0 <= term < inf for term in terms), f"{work}: {terms}"


def _known(registry: Any, kind: OpKind | CollectiveKind) -> Any:
    """A context in which a kind is registered."""
    return nullcontext() if registry.get(kind.name) is kind else registry.registered(kind.name, kind)


@contextmanager
def _ops_of(kind: OpKind) -> Iterator[list[Op]]:
    """Ops of a kind, which is registered meanwhile."""
    with _known(OP_KINDS, kind):
        yield [Op(kind.name, _dims(kind, sizes)) for sizes in _SIZES]


def _dims(kind: OpKind, sizes: tuple[int, int]) -> tuple[int, ...]:
    return tuple(1 if name in kind.flags else sizes[index % 2] for index, name in enumerate(kind.dim_names))
