"""Records of kinds, checked when they are built, and their registries."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.kinds import COLLECTIVE_KINDS, OP_KINDS, OpKind, kinds_version
from stepsight.dataset.kinds.kind_table import CollectiveKind
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
    with OP_KINDS.registered("scan", _kind()) as kind:
        op = Op("scan", (4, 8), "fp32")
        assert op.record is kind and (op.flops, op.num_bytes) == (96.0, 256.0)
        assert kinds_version() != version
    assert tuple(OP_KINDS) == before
    with pytest.raises(ValueError, match="op kind must be one of"):
        Op("scan", (4, 8), "fp32")


def test_a_registered_collective_is_known_until_it_is_removed() -> None:
    gossip = CollectiveKind(name="gossip", counts="the message to a neighbour", passes=0.5)
    with COLLECTIVE_KINDS.registered("gossip", gossip):
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
        OP_KINDS.register(kind.name, kind)
    assert tuple(OP_KINDS) == before


def test_kinds_of_the_package_stay() -> None:
    with pytest.raises(StepsightError, match="only what was registered can be removed, got 'add'"):
        OP_KINDS.unregister("add")


def test_a_record_can_be_changed_into_another() -> None:
    longer = replace(OP_KINDS["gelu"], name="gelu_exact", code=-1, flops=lambda n: 20.0 * n)
    with OP_KINDS.registered(longer.name, longer):
        assert Op("gelu_exact", (8,)).flops == 2 * Op("gelu", (8,)).flops


SCAN: dict[str, Any] = {
    "name": "scan",
    "family": "scan",
    "dim_names": ("batch", "length"),
    "flops": lambda b, n: 3.0 * b * n,
    "elements": lambda b, n: 2.0 * b * n,
    "in_harness": False,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "a b"}, "op kind 'a b': a name must be an identifier"),
        ({"name": 7}, "op kind 7: a name must be an identifier"),
        ({"family": ""}, "family must be a name, got ''"),
        ({"dim_names": ()}, "dim_names must be a tuple of at least 1 different identifiers, got ()"),
        ({"dim_names": ("n", "n")}, "different identifiers, got ('n', 'n')"),
        ({"dim_names": ("batch size", "n")}, "different identifiers, got ('batch size', 'n')"),
        ({"dim_names": "bn"}, "different identifiers, got 'bn'"),
        ({"flags": ("causal",)}, "flags must be among batch, length, got causal"),
        ({"aligned": ("m",)}, "aligned must be among batch, length, got m"),
        ({"padded": "m"}, "padded must be among batch, length, got m"),
        ({"bound": "disk"}, "bound must be one of compute, memory, host_memory, host_link, host, got 'disk'"),
        ({"code": "7"}, "code must be a whole number >= 0, or -1"),
        ({"code": -2}, "code must be a whole number >= 0, or -1"),
        ({"base": None}, "base must be a name, got None"),
        ({"streams": 1}, "streams must be True or False, got 1"),
        ({"calls": {"aten::scan": 3}}, "calls must be a table of functions by names of calls"),
        ({"flops": 6.0}, "flops must be a function of batch, length, got 6.0"),
        ({"flops": lambda n: n}, "flops must take 2 (batch, length), got (n)"),
        ({"elements": lambda b, n, k: n}, "elements must take 2 (batch, length), got (b, n, k)"),
        ({"flops": lambda b, n: -b * n}, "flops(8, 8) must be a finite number >= 0, got -64"),
        ({"elements": lambda b, n: nan}, "elements(8, 8) must be a finite number >= 0, got nan"),
        ({"units": lambda b, n: inf}, "units(8, 8) must be a finite number >= 0, got inf"),
        ({"flops": lambda b, n: None}, "flops(8, 8) must be a finite number >= 0, but it raises TypeError"),
        (
            {"flops": lambda b, n: 1 / (n - 1)},
            "flops(1, 1) must be a finite number >= 0, but it raises ZeroDivisionErr",
        ),
        ({"operands": lambda b, n: (b, n)}, "operands(8, 8) must be three finite numbers >= 0, got (8, 8)"),
        ({"grid": lambda b, n: (b, n, 0)}, "grid(8, 8) must be three sizes >= 1, got (8, 8, 0)"),
        ({"base_dims": lambda b, n: b * n}, "base_dims(8, 8) must be a tuple of sizes >= 0, got 64"),
    ],
)
def test_a_record_with_a_mistake_is_refused(changed: dict[str, Any], message: str) -> None:
    OpKind(**SCAN)
    with pytest.raises(StepsightError) as caught:
        OpKind(**{**SCAN, **changed})
    assert message in str(caught.value)


def test_a_cost_that_is_no_number_is_refused_where_it_is_asked_for() -> None:
    """Checks of the record see a few dims only; an op of other dims says what is wrong with its kind."""
    grown = OpKind(**{**SCAN, "flops": lambda b, n: 100.0 - n, "elements": lambda b, n: nan if n > 8 else n})
    with OP_KINDS.registered(grown.name, grown):
        assert Op("scan", (1, 8)).flops == 92.0
        with pytest.raises(StepsightError, match=r"flops of scan\[1x200\]bf16 must be a finite number >= 0, got -100"):
            _ = Op("scan", (1, 200)).flops
        with pytest.raises(StepsightError, match=r"elements of scan\[1x200\]bf16 must be .* >= 0, got nan"):
            _ = Op("scan", (1, 200)).num_bytes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "a-b"}, "collective kind 'a-b': a name must be an identifier"),
        ({"counts": ""}, "counts must be a line of text, got ''"),
        ({"route": "torus"}, "route must be one of ring, direct, message, got 'torus'"),
        ({"passes": 0}, "passes must be a finite number > 0, got 0"),
        ({"passes": nan}, "passes must be a finite number > 0, got nan"),
        ({"buffers": 0.5}, "buffers must be a finite number >= 1, got 0.5"),
        ({"trees": "yes"}, "trees must be True or False, got 'yes'"),
        ({"nccl_names": {"gossip": "Left"}}, "nccl_names must be a table of In or Out by name"),
        ({"c10d_calls": {"c10d::gossip": "0"}}, "c10d_calls must be a table of inputs by call"),
        ({"test_names": "gossip"}, "test_names must be a tuple of names, got 'gossip'"),
    ],
)
def test_a_record_of_a_collective_with_a_mistake_is_refused(changed: dict[str, Any], message: str) -> None:
    gossip = replace(COLLECTIVE_KINDS["broadcast"], name="gossip", code=-1)
    with pytest.raises(StepsightError) as caught:
        replace(gossip, **changed)
    assert message in str(caught.value)


def test_records_of_the_package_keep_the_rules() -> None:
    for kind in (*OP_KINDS.values(), *COLLECTIVE_KINDS.values()):
        assert replace(kind).code == kind.code
