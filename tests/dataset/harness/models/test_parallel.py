"""Every parallel strategy trains the same model as one rank does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import harness_jobs as jobs
import pytest

STRATEGIES = {
    2: [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "sequence_parallel": True, "recompute": "full"},
        {"pp": 2},
        {"pp": 2, "schedule": "gpipe"},
        {"pp": 2, "virtual_stages": 2, "layers": 4},
        {"pp": 2, "virtual_stages": 2, "schedule": "zbv", "layers": 4},
        {"dp": 2, "bucket_mbytes": 0.002},
        {"dp": 2, "overlap_grad_reduce": False, "bucket_mbytes": 0.002},
        {"dp": 2, "zero_stage": 1, "bucket_mbytes": 0.002},
        {"dp": 2, "zero_stage": 1, "overlap_grad_reduce": False},
        {"dp": 2, "zero_stage": 2, "bucket_mbytes": 0.002},
        {"dp": 2, "zero_stage": 3},
        {"cp": 2},
        {"cp": 2, "recompute": "full"},
        {"cp": 2, "context_parallel": "all_gather"},
        {"cp": 2, "context_parallel": "all_gather", "zero_stage": 3},
    ],
    4: [
        {"tp": 2, "pp": 2},
        {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "gpipe"},
        {"dp": 2, "tp": 2, "sequence_parallel": True},
        {"dp": 2, "tp": 2, "zero_stage": 3},
        {"dp": 2, "pp": 2},
        {"dp": 2, "pp": 2, "zero_stage": 3},
        {"dp": 2, "pp": 2, "zero_stage": 1},
        {"dp": 2, "tp": 2, "zero_stage": 2},
        {"cp": 4},
        {"cp": 4, "context_parallel": "all_gather"},
        {"cp": 2, "tp": 2, "sequence_parallel": True},
        {"cp": 2, "dp": 2, "zero_stage": 1},
        {"cp": 2, "pp": 2, "zero_stage": 3},
    ],
}
EXPERTS = {  # strategies of mixtures
    2: [
        {"dp": 2},
        {"pp": 2},
        {"pp": 2, "virtual_stages": 2, "schedule": "zbv", "layers": 4},
        {"dp": 2, "ep": 2, "bucket_mbytes": 0.002},
        {"dp": 2, "ep": 2, "recompute": "full"},
        {"dp": 2, "ep": 2, "overlap_grad_reduce": False},
        {"dp": 2, "ep": 2, "zero_stage": 1},
        {"dp": 2, "ep": 2, "zero_stage": 2},
        {"dp": 2, "ep": 2, "zero_stage": 3},
    ],
    4: [{"dp": 4, "ep": 4}, {"dp": 2, "ep": 2, "pp": 2, "zero_stage": 3}],
}
MODELS = {
    "gpt": {},
    "llama": jobs.LLAMA,
    "gated gpt": {"gated_mlp": True, "kv_heads": 2},
    "bert": {"family": "bert"},
    "t5": jobs.T5,
    "gated t5": {**jobs.T5, "gated_mlp": True},
    "mixture": jobs.MIXTURE,
    "some mixtures": {**jobs.MIXTURE, "layers": 4, "dense_layers": 1, "moe_every": 2},
    "lone experts": {**jobs.MIXTURE, "experts": 2, "experts_per_token": 1},
}
TWICE = ("gpt", "llama", "bert", "t5")  # also on four ranks


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    return {name: jobs.losses(jobs.job(model)) for name, model in MODELS.items()}


def _strategies(name: str, model: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """The strategies of a model."""
    if "experts" in model:  # the copies that experts drop are those of a micro-batch: it stays the same
        layers = model["layers"]
        return [s for s in EXPERTS[ranks] if ranks == 2 or name == "mixture" if s.get("layers", layers) == layers]
    if ranks == 4 and name not in TWICE:
        return []
    refused = {"pp", "cp"} if model.get("family") == "t5" else set[str]() if name in TWICE else {"cp"}
    return [s for s in STRATEGIES[ranks] if not refused & {*s}]


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_equal_those_of_one_rank(ranks: int, alone: dict[str, list[float]], tmp_path: Path) -> None:
    """Forward, backward and every gradient reduction are right, for products of strategies too; no rank unpickles."""
    cases = [(name, s) for name, model in MODELS.items() for s in _strategies(name, model, ranks)]
    micro_batch = 1 if ranks == 4 else 2
    given = [jobs.job(MODELS[n], 2 if "experts" in MODELS[n] else micro_batch, **s) for n, s in cases]
    (tmp_path / "jobs.json").write_text(json.dumps(given))
    code, output = jobs.run_ranks([str(tmp_path / "jobs.json"), str(tmp_path / "losses.json")], ranks, tmp_path)
    assert code == 0, output[-3000:]
    for (name, strategy), found in zip(cases, json.loads((tmp_path / "losses.json").read_text()), strict=True):
        assert found == pytest.approx(alone[name], abs=2e-5), (name, strategy)


def test_training_goes_somewhere(alone: dict[str, list[float]]) -> None:
    """A comparison of losses means something only where they move."""
    assert all(losses[0] - losses[2] > 0.01 for losses in alone.values())


def test_micro_batches_and_recompute_change_nothing(alone: dict[str, list[float]]) -> None:
    assert jobs.losses(jobs.job(micro_batch=8)) == pytest.approx(alone["gpt"], abs=1e-5)
    assert jobs.losses(jobs.job(jobs.LLAMA, recompute="full")) == pytest.approx(alone["llama"], abs=1e-5)


def test_mixed_precision_keeps_parameters_in_fp32(alone: dict[str, list[float]]) -> None:
    """With and without recomputation, losses are close to those of fp32."""
    for recompute in ("none", "full"):
        job = jobs.job(jobs.LLAMA, recompute=recompute)
        job["batch"]["precision"] = "bf16"
        assert jobs.losses(job) == pytest.approx(alone["llama"], abs=5e-3)


def test_tied_embeddings_share_one_weight() -> None:
    found = jobs.losses(jobs.job({"tied_embeddings": True}))
    assert found[2] < found[0]
