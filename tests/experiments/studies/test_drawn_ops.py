"""Ops are drawn alike each time, within bounds; what judges is like nothing that teaches."""

from __future__ import annotations

import pytest

from stepsight.dataset.hardware.hardware import Hardware, find_hardware, roofline_seconds
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.drawn_ops import OpSpace, draw, likeness, op_space, split
from stepsight.experiments.studies.one_gpu_plans import CPU as LOCAL


def _facts(name: str) -> Hardware:
    found = find_hardware(name)
    assert found is not None
    return found


@pytest.mark.parametrize(("space", "name"), [(op_space("cuda"), "h200-sxm-141gb"), (op_space("cpu"), LOCAL)])
def test_draws_are_distinct_and_within_bounds(space: OpSpace, name: str) -> None:
    hardware = _facts(name)
    ops = draw(space, 500, hardware, seed=3)
    assert len(set(ops)) == len(ops) > 450
    assert ops == draw(space, 500, hardware, seed=3) != draw(space, 500, hardware, seed=4)
    assert max(op.num_bytes for op in ops) <= space.most_bytes
    assert max(roofline_seconds(op, hardware) for op in ops) <= space.most_s
    families = {op.family for op in ops}
    assert families >= {"gemm", "attention", "norm", "elementwise", "loss", "embedding", "optimizer", "reduce"}


def test_a_gpu_is_asked_for_what_the_issue_names() -> None:
    ops = draw(op_space("cuda"), 1500, _facts("h200-sxm-141gb"), seed=0)
    products = [op for op in ops if op.family == "gemm"]
    assert {op.dtype for op in products} == {"bf16", "fp16", "fp8", "tf32"}
    assert {op.kind for op in products} == {"linear", "linear_dgrad", "linear_wgrad"}
    assert not [op for op in products if op.dtype == "fp8" and any(dim % 16 for dim in op.dims)]
    attention = [op for op in ops if op.family == "attention"]
    assert {op.dims[5] for op in attention} == {64, 80, 96, 112, 128}
    assert {op.dims[6] for op in attention} == {0, 1}
    assert {op.dims[1] // op.dims[2] for op in attention} >= {1, 2, 4}


def test_some_families_alone() -> None:
    ops = draw(op_space("cuda"), 60, _facts("h200-sxm-141gb"), 0, ("norm", "loss"))
    assert {op.family for op in ops} == {"norm", "loss"}


def test_what_judges_is_like_nothing_that_teaches() -> None:
    drawn = draw(op_space("cpu"), 400, _facts(LOCAL), seed=0)
    needed = [op for op in drawn[:40] if 448 not in op.dims]
    unseen = [Op("linear", (64, 448, 448), "fp32"), Op("layer_norm", (64, 448), "fp32")]
    train, heldout = split(drawn, needed, unseen, seed=0)
    assert set(needed) <= set(train)
    assert set(heldout) <= set(drawn)
    assert not {likeness(op) for op in train} & {likeness(op) for op in [*heldout, *unseen]}
    assert {op.family for op in heldout} == {op.family for op in drawn}
    assert len(heldout) <= 60


def test_likeness_is_weights_heads_or_width() -> None:
    assert likeness(Op("linear", (8, 16, 32))) == likeness(Op("linear_wgrad", (99, 16, 32), "fp8"))
    assert likeness(Op("attention", (1, 8, 8, 512, 512, 64, 1))) == likeness(
        Op("attention_backward", (4, 2, 1, 512, 512, 64, 0))
    )
    assert likeness(Op("rms_norm", (8, 64))) == likeness(Op("layer_norm", (9, 64)))
    assert likeness(Op("add", (8,))) != likeness(Op("add", (9,)))
