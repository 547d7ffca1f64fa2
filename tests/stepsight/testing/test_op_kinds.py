"""The package's own kinds, and one of a user, keep the contracts; a broken one does not."""

from dataclasses import replace
from typing import Any

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.harness.base.collective_calls import CALLS
from stepsight.dataset.kinds import COLLECTIVE_KINDS, OP_KINDS, CollectiveKind, OpKind
from stepsight.testing.kinds import CollectiveKindContract, OpKindContract


class TestOwnOpKinds(OpKindContract):
    @pytest.fixture(params=OP_KINDS.values(), ids=lambda kind: kind.name)
    def kind(self, request: pytest.FixtureRequest) -> OpKind:
        kind: OpKind = request.param
        return kind

    def small_dims(self, kind: OpKind) -> tuple[int, ...]:
        """A convolution has at most three spatial dims."""
        return tuple(
            2 if name == "spatial" else size
            for name, size in zip(kind.dim_names, super().small_dims(kind), strict=True)
        )


class TestOwnCollectiveKinds(CollectiveKindContract):
    @pytest.fixture(params=COLLECTIVE_KINDS.values(), ids=lambda kind: kind.name)
    def kind(self, request: pytest.FixtureRequest) -> CollectiveKind:
        kind: CollectiveKind = request.param
        return kind

    def test_the_harness_runs_it(self, kind: CollectiveKind) -> None:
        assert kind.name in CALLS


class TestUsersOpKind(OpKindContract):
    @pytest.fixture
    def kind(self) -> OpKind:
        return replace(OP_KINDS["gelu"], name="gelu_exact", code=-1, calls={}, in_harness=False)


@pytest.mark.parametrize(
    ("test", "wrong"),
    [
        ("test_its_costs_are_numbers", {"flops": lambda n: 100.0 - n}),
        ("test_its_costs_are_numbers", {"elements": lambda n: 0.0, "flops": lambda n: 0.0}),
        ("test_its_costs_grow_with_every_dim", {"flops": lambda n: 1.0 / max(n, 1)}),
        ("test_its_terms_and_features_are_finite", {"units": lambda n: n if n < 512 else float("inf")}),
        ("test_its_tiles_are_sizes", {"grid": lambda n: (1, 512 // n - 1 if n > 8 else n, 1)}),
        ("test_its_base_is_another_kind", {"base": "wrong"}),
        ("test_the_harness_runs_it_where_it_says_so", {"in_harness": True}),
    ],
)
def test_a_wrong_record_breaks_the_contract(test: str, wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"name": "wrong", "code": -1, "calls": {}, "in_harness": False}
    kind = replace(OP_KINDS["gelu"], **(right | wrong))
    with pytest.raises((AssertionError, StepsightError)):
        getattr(OpKindContract(), test)(kind)
