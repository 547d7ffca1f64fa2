"""Whole iterations with low-rank adapters: closed forms and invariants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator import RooflineLatency, lower, simulate
from stepsight.simulator.memory import estimate_memory

GPU = HARDWARE["h100-sxm-80gb"]
LAYERS, HIDDEN, FFN, RANK = 8, 4096, 8192, 8
LORA = {"lora_rank": RANK, "lora_targets": ["qkv", "proj"]}
TRAINED = LAYERS * RANK * (HIDDEN + 3 * HIDDEN + 2 * HIDDEN)  # rank * (inputs + outputs) of both linears


def job(model: dict[str, Any], **parallel: Any) -> Job:
    sizes = {
        "family": "llama",
        "layers": LAYERS,
        "hidden": HIDDEN,
        "heads": 8,
        "ffn": FFN,
        "vocab": 1024,
        "seq_len": 256,
    }
    return Job.from_dict(
        {
            "model": {**sizes, **model},
            "parallel": parallel,
            "batch": {"micro_batch": 1, "global_batch": 16},
            "cluster": {"hardware": GPU.name, "nodes": 1, "devices_per_node": 8},
        }
    )


STRATEGIES: list[dict[str, Any]] = [
    {"tp": 2, "sequence_parallel": True, "zero_stage": 1, "overlap_tp": "split"},
    {"tp": 2, "overlap_tp": "backward"},
    {"pp": 4, "virtual_stages": 2},
    {"pp": 2, "schedule": "zb-h1", "recompute": "selective"},
    {"zero_stage": 3, "recompute": "full"},
    {"cp": 2, "zero_stage": 2, "recompute": "full"},
]


@pytest.mark.parametrize("parallel", STRATEGIES, ids=str)
def test_adapters_take_less_time_and_memory_than_training_all(parallel: dict[str, Any]) -> None:
    full, lora = (job(model, **parallel) for model in ({}, LORA))
    times = [simulate(each, RooflineLatency(GPU, each.fabric)).iteration_time_s for each in (full, lora)]
    memories = [estimate_memory(each, GPU).stages[0] for each in (full, lora)]
    assert times[1] < times[0]
    assert memories[1].optimizer + memories[1].gradients < 0.1 * (memories[0].optimizer + memories[0].gradients)


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"pp": 4}, {"zero_stage": 3}], ids=str)
def test_the_optimizer_steps_the_adapters_alone(parallel: dict[str, Any]) -> None:
    """All ranks of a replica together step each adapter once, and replicas reduce as many gradients."""
    asked = job(LORA, **parallel)
    lowered, p = lower(asked, GPU), asked.parallel
    steps = [node.work for number in lowered.optimizer for node in lowered.segments[number].program.nodes]
    stepped = sum(work.dims[0] for work in steps if isinstance(work, Op) and work.kind == "adamw")
    assert stepped * p.tp * (p.dp if p.zero_stage else 1) == TRAINED


def test_fsdp_gathers_frozen_parameters_and_reduces_adapters() -> None:
    asked = job(LORA, zero_stage=3)
    lowered = lower(asked, GPU)
    sent: dict[str, int] = {}
    for label in ("forward", "backward"):
        for node in lowered.program(label, 0, 1).nodes:
            if isinstance(node.work, Collective) and node.share == 1:
                sent[f"{label} {node.work.kind}"] = sent.get(f"{label} {node.work.kind}", 0) + node.work.num_bytes
    whole = TRAINED + LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN) + 2 * 1024 * HIDDEN + HIDDEN
    assert sent["forward all_gather"] == 2 * whole
    assert sent["backward reduce_scatter"] == 4 * TRAINED


def test_attention_in_8_bits_is_its_own_op_and_keeps_less() -> None:
    asked = job({}, tp=2)
    asked = replace(asked, batch=replace(asked.batch, precision="fp8"))
    narrow = replace(asked, batch=replace(asked.batch, fp8_attention=True, fp8_activations=True))
    kinds = [{w.dtype for w in lower(each, GPU).all_works if w.kind == "attention"} for each in (asked, narrow)]
    assert kinds == [{"bf16"}, {"fp8"}]
    kept = [estimate_memory(each, GPU).stages[0].activations for each in (asked, narrow)]
    assert kept[1] < kept[0]
    plain = replace(asked, batch=replace(asked.batch, precision="bf16", fp8_attention=True))
    assert {w.dtype for w in lower(plain, GPU).all_works if w.kind == "attention"} == {"bf16"}
