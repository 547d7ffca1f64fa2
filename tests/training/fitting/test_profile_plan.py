"""What to measure first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.harness.plan.plan_checks import check_plan
from stepsight.training.fitting import profile_plan as planning
from stepsight.training.predictor.predictor import teacher_of

KNOWN = find_hardware("l40s-pcie-48gb")
assert KNOWN is not None
MINE = replace(KNOWN, name="mine", peak_flops={"fp32": 50e12, "bf16": 300e12})


def test_a_plan_for_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the ops are products and attention, none twice, and collectives need two devices."""
    few = list(planning.catalogue_jobs(MINE, ("gpt2-124m", "llama3-8b")))
    monkeypatch.setattr(planning, "catalogue_jobs", lambda hardware: few)
    monkeypatch.setattr(planning, "CANDIDATES", 60)
    plan = planning.profile_plan(MINE, [teacher_of("a100-sxm")], 0.75, devices=2)
    assert check_plan(plan) == plan
    profile, links = plan["events"]
    assert links["world_size"] >= 2 and {c["group_size"] for c in links["collectives"]} == {2}
    assert 40 <= len(profile["ops"]) <= 100
    heavy = [op for op in profile["ops"] if op["kind"].startswith(("linear", "attention"))]
    assert len(heavy) / len(profile["ops"]) >= 0.5
    assert len({str(op) for op in profile["ops"]}) == len(profile["ops"])
    with pytest.raises(CollectError, match="minutes must be from"):
        planning.profile_plan(MINE, [], 0.1)
    for devices in (0, 10**400):
        with pytest.raises(CollectError, match="devices of a node must be from 1 to 1024"):
            planning.profile_plan(MINE, [], 1.0, devices=devices)


def test_a_job_decides_what_is_measured_first() -> None:
    """The ops of a job that is asked about have its time; those of the catalogue are candidates without a share."""
    job = next(iter(planning.catalogue_jobs(MINE, ("gpt3-1.3b",))))
    shares = planning.wanted_shares(MINE, [job])
    own = {op for op, share in shares.items() if share > 0}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert own < set(shares)
    assert {op.dtype for op in own if op.kind == "linear"} == {"bf16"}
