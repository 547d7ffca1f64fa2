"""Kinds are registered and removed; names and codes are never shared."""

from dataclasses import replace

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.kinds import (
    COLLECTIVE_KINDS,
    OP_KINDS,
    OpKind,
    kinds_version,
    register_op_kind,
    registered_collective_kind,
    registered_op_kind,
    unregister_op_kind,
)
from stepsight.dataset.kinds.collective_kind import CollectiveKind
from stepsight.dataset.kinds.op import Collective, Op


def _kind(name: str = "scan", code: int = -1) -> OpKind:
    return OpKind(
        name=name,
        family="scan",
        dim_names=("batch", "length"),
        flops=lambda b, n: 3.0 * b * n,
        elements=lambda b, n: 2.0 * b * n,
        code=code,
        in_harness=False,
    )


def test_a_registered_kind_is_known_until_it_is_removed() -> None:
    before, version = tuple(OP_KINDS), kinds_version()
    with registered_op_kind(_kind()) as kind:
        op = Op("scan", (4, 8), "fp32")
        assert op.record is kind and (op.flops, op.num_bytes) == (96.0, 256.0)
        assert kinds_version() != version
    assert tuple(OP_KINDS) == before
    with pytest.raises(ValueError, match="op kind must be one of"):
        Op("scan", (4, 8), "fp32")


def test_a_registered_collective_is_known_until_it_is_removed() -> None:
    gossip = CollectiveKind(name="gossip", counts="the message to a neighbour", passes=0.5)
    with registered_collective_kind(gossip):
        assert Collective("gossip", 8, 2, 2).record is gossip
    assert "gossip" not in COLLECTIVE_KINDS


def test_codes_of_the_package_never_change() -> None:
    """Trained predictors hold them: the kinds that they were trained on keep the numbers of that time."""
    assert {OP_KINDS[name].code for name in ("linear", "attention", "add", "cast")} == {0, 4, 24, 51}
    assert sorted(kind.code for kind in OP_KINDS.values())[:52] == list(range(52))
    assert [kind.code for kind in COLLECTIVE_KINDS.values()][:6] == list(range(6))


def test_a_code_that_is_not_given_follows_from_the_name_alone() -> None:
    assert _kind().code == _kind().code >= 1000
    assert _kind("scan").code != _kind("scan_backward").code
    assert _kind(code=77).code == 77


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_kind("linear"), "op kind 'linear' comes with stepsight"),
        (_kind("all_reduce"), "op kind 'all_reduce': the name is taken"),
        (replace(_kind(), base="scan"), "op kind 'scan': base must be another kind that is registered already"),
        (replace(_kind(), base="other"), "base must be another kind that is registered already, got 'other'"),
        (replace(_kind(), base="linear"), r"base_dims must return the dims \('m', 'n', 'k'\) of linear, got \(1, 1\)"),
        (_kind(code=4), "op kind 'scan': codes must differ, got 4 for 'attention' and 'scan'"),
    ],
)
def test_names_and_codes_are_never_shared(kind: OpKind, message: str) -> None:
    before = tuple(OP_KINDS)
    with pytest.raises(StepsightError, match=message):
        register_op_kind(kind)
    assert tuple(OP_KINDS) == before


def test_kinds_of_the_package_stay() -> None:
    with pytest.raises(StepsightError, match="only what was registered can be removed, got 'add'"):
        unregister_op_kind("add")


def test_a_record_can_be_changed_into_another() -> None:
    longer = replace(OP_KINDS["gelu"], name="gelu_exact", code=-1, flops=lambda n: 20.0 * n)
    with registered_op_kind(longer):
        assert Op("gelu_exact", (8,)).flops == 2 * Op("gelu", (8,)).flops
