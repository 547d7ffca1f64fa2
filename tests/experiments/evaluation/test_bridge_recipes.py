"""Recipes of Megatron-Bridge are found by model, device, precision, degrees and release."""

import pytest

from stepsight.dataset.job.specs import DISPATCHERS, RECOMPUTE_MODULES
from stepsight.experiments.evaluation.bridge_recipes import Recipe, find_recipe, recipes


def recipe(model: str, hardware: str, precision: str, release: str, **degrees: int) -> Recipe | None:
    return find_recipe(model, hardware, precision, f"{release} NeMo Container", degrees)


def test_every_line_is_one_that_a_job_can_say() -> None:
    for line in recipes():
        assert line.dispatcher in DISPATCHERS and line.graphs in ("none", "parts", "whole")
        assert set(line.recompute) <= set(RECOMPUTE_MODULES)
    assert [line.release for line in recipes()] == sorted(line.release for line in recipes())


@pytest.mark.parametrize(
    ("release", "dispatcher"), [("26.02", "alltoall"), ("26.04", "hybridep"), ("26.06", "alltoall")]
)
def test_the_newest_one_up_to_a_release_counts(release: str, dispatcher: str) -> None:
    """GPT-OSS on B200 sent copies, then tokens once, then copies again."""
    found = recipe("gptoss120b", "B200", "BF16", release, ep=8, micro_batch=4)
    assert found is not None and found.habits()["recompute_modules"] == ("layernorm", "moe_act")
    if release != "26.02":
        assert found.dispatcher == dispatcher


def test_degrees_tell_variants_apart() -> None:
    """Virtual stages mark the recipe for B300 that overlapped."""
    overlapped = recipe("qwen3235ba22b", "B300", "MXFP8", "26.02.01", pp=8, vp=4, ep=8, micro_batch=1)
    plain = recipe("qwen3235ba22b", "B300", "MXFP8", "26.04", pp=8, ep=8, micro_batch=2)
    assert overlapped is not None and overlapped.overlap and overlapped.dispatcher == "alltoall"
    assert plain is not None and not plain.overlap


def test_whole_graphs_fuse_experts_and_leave_the_host_nothing() -> None:
    whole = recipe("qwen330ba3b", "GB300", "MXFP8", "26.06", ep=8, micro_batch=8)
    assert whole is not None
    assert whole.habits() == {
        "dispatcher": "hybridep", "overlap_ep": True, "fused_experts": True, "dispatch_calls": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(("model", "release"), [("llama370b", "26.02"), ("qwen330ba3b", "25.09"), ("qwen330ba3b", "")])
def test_other_models_and_earlier_runs_have_none(model: str, release: str) -> None:
    assert recipe(model, "GB200", "MXFP8", release) is None
