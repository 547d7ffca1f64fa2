"""``show`` tells people what a predictor is; ``--json`` has its manifest whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stepsight.experiments.questions.describe import describe
from stepsight.experiments.questions.predictor_summary import predictor_text
from stepsight.training.corrections.intervals import Intervals, NodeDoubts
from stepsight.training.predictor.predictor import Predictor
from tests.gnn.random_networks import random_network


def test_one_from_tables() -> None:
    """Whom it serves, what was measured, lent and carried over, errors by family, and where intervals come from."""
    text = describe(Path("h200-sxm"))["text"]
    assert "for          h200-sxm-141gb\n" in text
    assert "ops and 615 collectives on their own, in 15 files of aiconfigurator, vidur, simumax, nccl-tests" in text
    assert "lent         by h100-sxm-80gb: add, attention, gelu" in text and "kinds by ratio (linear_dgrad, " in text
    assert "kernels      gemm/fp8 of TensorRT-LLM (cuBLAS, one scale) or SGLang" in text
    assert "published runs of 16 sources, those of jobs alike" in text and "gemm/fp8" in text
    assert "a100-sxm-40gb too" in describe(Path("a100-sxm"))["text"]
    assert "sources" not in text.replace("16 sources", "") and "{" not in text


def test_json_has_the_whole_manifest() -> None:
    shown = describe(Path("a100-sxm"))
    del shown["text"]
    nothing = {"form": "none", "strengths": {"table": 0.0, "features": 0.0, "graph": 0.0}, "held_back": {}}
    assert shown == {"predictor": "a100-sxm", **Predictor.load("a100-sxm").manifest, "context": nothing}


def test_one_from_own_runs() -> None:
    """Runs instead of files, what the context model brought, the interval that held-back runs gave."""
    manifest = {
        "num_ops": 1200, "num_collectives": 0, "runs": ["a", "b"], "collections": ["/runs/mine"], "digest": "d1",
        "versions": {"torch": "2.13.0"}, "created": "2026-01-02T03:04:05Z", "metrics": {"mape_percent": 3.21},
        "context": {"held_back": {"none": 1.0, "auto": 0.31}},
    }  # fmt: skip
    network = random_network()
    own = replace(Predictor.load("a100-sxm"), manifest=manifest, intervals=Intervals(0.1, 0.9, 12), context=network)
    text = predictor_text(Path("mine"), own)
    assert "learned from 1,200 ops and 0 collectives on their own, 2 runs in /runs/mine" in text
    told = "context network (table 0.90, features 0.70, graph 0.40); errors on runs held back: none 1.00, auto 0.31"
    assert f"context      {told}" in text
    assert own.context_facts == {
        "form": "graph", "strengths": {"table": 0.9, "features": 0.7, "graph": 0.4}, **manifest["context"]
    }  # fmt: skip
    assert "held back    iterations of runs held back 3.2 % off on average" in text
    assert "interval     -9.5 % to +10.5 %, for 90 %, by 12 runs held back" in text
    assert "made         2026-01-02T03:04:05Z, digest d1, with torch 2.13.0" in text


def test_a_large_doubt_is_a_factor() -> None:
    """Percent would read as a mistake."""
    of = lambda half: predictor_text(Path("mine"), replace(Predictor.load("a100-sxm"), doubts=NodeDoubts({"": half})))
    assert "off by at most 65 %; 0 kinds" in of(0.5)
    assert "off by at most a factor of 12.7 (with few runs held back, the largest error of an op counts)" in of(2.54)


def test_one_from_tables_of_an_unknown_device() -> None:
    """No published run judged it: the interval is wide by default; kernels without names are left out."""
    shipped = Predictor.load("a100-sxm")
    kernel = replace(shipped.kernel, software={"gemm": ("",)})
    text = predictor_text(Path("mine"), replace(shipped, kernel=kernel, hardware=replace(shipped.hardware, name="my")))
    assert "interval     wide by default, -" in text and "`stepsight calibrate` on measured runs" in text
    assert "\nkernels " not in text
