"""The model of a job as a tensor program: what it costs, and that transforms leave what it computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tensors.program import TensorProgram
from stepsight.simulator.programs.lower import lower

PLANS: dict[str, Callable[[TensorProgram], TensorProgram]] = {
    "D": lambda program: program.replicate(2),
    "T": lambda program: program.split(2),
    "P": lambda program: program.cut(2, micro_batches=2),
    "DTP": lambda program: program.replicate(2).split(2).cut(2, micro_batches=2),
    "PTD": lambda program: program.cut(2, micro_batches=2).split(2).replicate(2),
    "more parts than heads": lambda program: program.cut(2, micro_batches=2).split(8),
}
MODELS = {
    "gpt": {"family": "gpt", "tied_embeddings": True},
    "llama": {"family": "llama"},
    "llama of few groups": {"family": "llama", "kv_heads": 2},
}


def job_of(**model: Any) -> Job:
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 32, "seq_len": 6}
    tables = {"model": {**sizes, **model}, "batch": {"micro_batch": 8, "global_batch": 8, "precision": "fp32"}}
    return Job.from_dict({**tables, "cluster": {"hardware": "local-cpu", "nodes": 1, "devices_per_node": 1}})


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_transformed_job_computes_the_same(model: str, training: bool) -> None:
    """Outputs, gradients and updated parameters, in any order of the transforms."""
    program = TensorProgram.of_job(job_of(**MODELS[model]), training=training)
    values = program.random_values()
    whole = program.run(values)
    for name, plan in PLANS.items():
        made = plan(program).run(values)
        assert made.keys() == whole.keys()
        for key in whole:
            assert np.allclose(made[key], whole[key], rtol=1e-5, atol=1e-5), (name, key)


@pytest.mark.parametrize("model", MODELS)
def test_its_kernels_are_those_of_the_job(model: str) -> None:
    """Products, attention, norms and activations of the forward, and their sizes; three products stand for q, k and v
    where groups share keys."""
    job = job_of(**MODELS[model])
    lowered = lower(job, HARDWARE["local-cpu"])
    wanted = Counter[Op]()
    for program in lowered.programs:
        if program.label == "forward":
            wanted.update(node.work for node in program.nodes if isinstance(node.work, Op))
    graph = TensorProgram.of_job(job).captured().ranks[0].graph
    found = Counter(node.work for node in graph.nodes if isinstance(node.work, Op))
    products = {op for op in {*wanted, *found} if op.kind == "linear" and model == "llama of few groups"}
    left_out = {op for op in wanted if op.kind == "cross_entropy"} | products
    names = {op.kind for op in found}
    assert {"linear", "attention", "embedding"} < names and "cross_entropy" not in names
    assert {op: n for op, n in found.items() if op not in left_out and op.kind not in ("rope", "add")} == {
        op: n for op, n in wanted.items() if op not in left_out and op.kind not in ("rope", "add")
    }
    assert sum(op.flops * n for op, n in found.items() if op.kind == "linear") == sum(
        op.flops * n for op, n in wanted.items() if op.kind == "linear"
    )


def test_heads_stay_on_their_ranks() -> None:
    """Queries, keys and values of products of their own are cut by heads: two sums a layer and no gathering."""
    graph = TensorProgram.of_job(job_of(**MODELS["llama of few groups"])).split(2).captured().ranks[0].graph
    kinds = Counter(node.work.kind for node in graph.nodes if isinstance(node.work, Collective))
    assert kinds == {"all_reduce": 4}
    assert {node.work.dims[1:3] for node in graph.nodes if node.work.kind == "attention"} == {(2, 1)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"family": "bert"}}, "dense decoder"),
        ({"batch": {"micro_batch": 8, "global_batch": 8, "precision": "fp8"}}, "one of fp32, bf16, fp16, got fp8"),
    ],
)
def test_other_models_are_refused(changes: dict[str, dict[str, Any]], says: str) -> None:
    tables = job_of(family="gpt").to_dict()
    tables |= {key: {**tables[key], **value} for key, value in changes.items()}
    with pytest.raises(CaptureError, match=says):
        TensorProgram.of_job(tables)
