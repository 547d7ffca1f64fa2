"""What to measure first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepsight.dataset.errors import CollectError
from stepsight.dataset.hardware import find_hardware
from stepsight.dataset.harness.plan import check_plan
from stepsight.training.predictor.predictor import teacher_of
from stepsight.training.transfer import profile_plan as planning


def test_a_plan_for_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the ops are products, none twice, and collectives need two devices."""
    monkeypatch.setattr(planning, "MODELS", {name: {} for name in ("gpt2-124m", "llama3-8b")})
    monkeypatch.setattr(planning, "CANDIDATES", 60)
    known = find_hardware("l40s-pcie-48gb")
    assert known is not None
    device = replace(known, name="mine", peak_flops={"fp32": 50e12, "bf16": 300e12})
    plan = planning.profile_plan(device, [teacher_of("a100-sxm")], 0.75, devices=2)
    assert check_plan(plan) == plan
    profile, links = plan["events"]
    assert links["world_size"] >= 2 and {c["group_size"] for c in links["collectives"]} == {2}
    assert 40 <= len(profile["ops"]) <= 100
    products = [op for op in profile["ops"] if op["kind"].startswith("linear")]
    assert 0.4 <= len(products) / len(profile["ops"]) <= 0.6
    assert len({str(op) for op in profile["ops"]}) == len(profile["ops"])
    with pytest.raises(CollectError, match="minutes must be from"):
        planning.profile_plan(device, [], 0.1)
