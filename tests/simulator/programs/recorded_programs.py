"""Jobs whose work is on record: ``python -m tests.simulator.programs.recorded_programs`` records it anew.

Of each job: how often each kind of op and of collective runs, its FLOP and bytes; a checksum of each segment (events,
names, gradients, order); and the iteration time by hardware facts.  Record it anew only with a change that a source
supports.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.hardware.hardware import HARDWARE, find_fabric
from stepsight.dataset.job.specs import ExecutionSpec
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import iteration_flops, lower
from stepsight.simulator.programs.segment import Segment
from tests.simulator.memory.reference_values import EXPERTS, JOBS, LATENT, T5, job

RECORD = Path(__file__).with_name("recorded_programs.json")
BF16 = {"precision": "bf16"}
SHARED = {**EXPERTS, "shared_experts": 1, "expert_ffn": 128}
MORE: dict[str, dict[str, Any]] = {
    "deepspeed zero 3": {**BF16, "dp": 4, "zero_stage": 3, "recompute": "full", "engine": "deepspeed-0.3"},
    "deepspeed pipeline": {"precision": "fp16", "pp": 2, "dp": 2, "runtime": "deepspeed", "engine": "deepspeed-0.3"},
    "overlapped tensor parallel": {**BF16, "tp": 4, "sequence_parallel": True, "overlap_tp": "backward"},
    "split tensor parallel": {**BF16, "tp": 4, "sequence_parallel": True, "overlap_tp": "torch-async"},
    "scattered messages": {**BF16, "tp": 2, "pp": 2, "scatter_p2p": True},
    "scattered messages, recomputed": {**BF16, "tp": 2, "pp": 2, "scatter_p2p": True, "recompute": "full"},
    "whole vocabulary": {**BF16, "tp": 2, "sequence_parallel": True, "vocab_parallel": False},
    "ring, grouped queries": {**BF16, "cp": 4, "family": "llama", "kv_heads": 2, "seq_len": 256},
    "gathered context": {**BF16, "cp": 2, "family": "llama", "context_parallel": "all_gather"},
    "gathered context, unfused": {**BF16, "cp": 2, "context_parallel": "all_gather", "fused_attention": False},
    "unfused with dropout": {**BF16, "fused_attention": False, "dropout": 0.1, "kv_heads": 4},
    "eager llama": {"family": "llama", "engine": "eager-pytorch", **BF16, "qk_norm": True},
    "bert": {**BF16, "family": "bert", "tp": 2, "loss_share": 0.15},
    "t5 in fp32": {"fused_attention": False, "tp": 2, **T5},
    "experts over nodes": {**BF16, "dp": 4, "ep": 4, "imbalance": 1.3, **SHARED},
    "experts, each token once": {**BF16, "dp": 4, "ep": 4, "dispatcher": "deepep", **EXPERTS},
    "experts of a half": {**BF16, "tp": 2, "dp": 2, "ep": 2, "expert_tp": 2, "sequence_parallel": True, **EXPERTS},
    "experts with biases": {**BF16, "dp": 2, "ep": 2, "expert_bias": True, "gated_mlp": True, **EXPERTS},
    "experts in fp8": {"precision": "fp8", "dp": 2, "ep": 2, "capacity_factor": 1.0, "moe_every": 2, **EXPERTS},
    "latent queries": {**BF16, "q_lora_rank": 32, "recompute": "selective",
                       "recompute_modules": ("layernorm", "mla_up_proj", "mlp"), **LATENT},
    "fp8 with biases": {"precision": "fp8", "tp": 2, "sequence_parallel": True},
    "fused loss": {**BF16, "fused_loss": True, "metric_losses": 2},
    "buckets": {**BF16, "dp": 4, "bucket_mbytes": 1},
    "buckets of experts": {**BF16, "dp": 4, "ep": 2, "bucket_mbytes": 1, **EXPERTS},
    "zero 2 in pipeline": {**BF16, "pp": 2, "dp": 2, "zero_stage": 1, "schedule": "looped-bfs", "virtual_stages": 2,
                           "layers": 8},
    "overlap of two tensor ranks": {**BF16, "tp": 2, "sequence_parallel": True, "overlap_tp": "backward"},
    "fsdp on a cpu": {"dp": 4, "zero_stage": 3, "kind": "cpu"},
    "fsdp pipeline on a cpu": {"dp": 2, "pp": 2, "zero_stage": 3, "kind": "cpu"},
    "deepspeed zero 3, every second layer": {**BF16, "dp": 4, "zero_stage": 3, "recompute": "full",
                                             "recompute_every": 2, "engine": "deepspeed-0.3"},
    "buckets after backward": {**BF16, "dp": 4, "bucket_mbytes": 1, "overlap_grad_reduce": False},
}  # fmt: skip
ALL = {**JOBS, **MORE}


def values(changes: dict[str, Any]) -> dict[str, Any]:
    """The work of a job."""
    left = dict(changes)
    engine, kind = left.pop("engine", ""), left.pop("kind", "gpu")
    asked = job(left)
    if engine:
        asked = replace(asked, execution=ExecutionSpec(engine=engine))
    hardware = replace(HARDWARE["h100-sxm-80gb"], kind=kind)
    lowered = lower(asked, hardware)
    counts, flops, sizes = Counter[str](), Counter[str](), Counter[str]()
    for segment in lowered.segments:
        for node in segment.program.nodes:
            work = node.work
            counts[work.kind] += 1
            sizes[work.kind] += round(work.num_bytes)
            if isinstance(work, Op):
                flops[work.kind] += round(work.flops)
    simulation = simulate(asked, RooflineLatency(hardware, find_fabric("dgx-a100")))
    return {
        "work": {kind: [counts[kind], flops[kind], sizes[kind]] for kind in sorted(counts)},
        "segments": [f"{segment.label} {_checksum(segment):08x}" for segment in lowered.segments],
        "order": zlib.crc32(repr((lowered.segment.tolist(), lowered.optimizer.tolist(), lowered.message.tolist(),
                                  [str(m) for m in lowered.messages], lowered.meets.tolist())).encode()),
        "flops": list(iteration_flops(lowered)),
        "seconds": simulation.iteration_time_s,
        "breakdown": simulation.breakdown,
    }  # fmt: skip


def _checksum(segment: Segment) -> int:
    nodes = [(str(node.work), node.stream, node.name, node.share) for node in segment.program.nodes]
    edges = sorted(str(edge) for edge in segment.program.all_edges() if edge[2] is not Dependency.DATA)
    gradients = [list(each.gradients) for each in segment.passages]
    return zlib.crc32(repr((nodes, edges, gradients, segment.events.tolist(), segment.joined)).encode())


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(values(changes))}" for name, changes in ALL.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
