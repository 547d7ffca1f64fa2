"""Jobs whose predicted bytes are on record: ``python -m tests.simulator.memory.reference_values`` records them anew.

``stepsight experiment memory`` compares estimates with PyTorch's own count.  When it was last run, the estimates were
within 0.1 % (median).  Record values anew only with a change that this study, or a source, supports.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.job.execution import semantics_of
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, OptimizerSpec, ParallelSpec
from stepsight.simulator.memory import estimate_memory
from stepsight.simulator.memory.estimate import estimate_moments
from stepsight.simulator.memory.part import part_memory
from stepsight.simulator.memory.peaks import states_of
from stepsight.simulator.programs.sizes import groups_of, part_shapes, rank_shape

RECORD = Path(__file__).with_name("reference_values.json")
MODEL = {"family": "gpt", "layers": 5, "hidden": 256, "heads": 8, "vocab": 3000, "seq_len": 128}
UNFUSED = {"fused_attention": False}
TIED = {"tied_embeddings": True}
T5 = {"family": "t5", "encoder_layers": 3, "encoder_seq_len": 64}
EXPERTS = {"family": "llama", "experts": 4, "experts_per_token": 2}
LATENT = {"family": "llama", "attention": "mla", "kv_lora_rank": 64, "rope_head_dim": 16, "v_head_dim": 32}
LORA = {"family": "llama", "lora_rank": 8, "lora_targets": ("qkv", "proj"), "lora_dropout": 0.1}
# Keys of any table of a job; the others stay as in ``MODEL`` and ``job``.
JOBS: dict[str, dict[str, Any]] = {
    "eager": {},
    "eager ddp": {"dp": 4},
    "eager ddp pipeline": {"dp": 2, "pp": 2, "runtime": "torch"},
    "eager gpipe": {"pp": 4, "schedule": "gpipe", "stage_layers": (1, 2, 1, 1)},
    "eager torch split backward": {"pp": 2, "schedule": "zb-h1", "runtime": "torch"},
    "eager fsdp": {"dp": 2, "zero_stage": 3},
    "eager fsdp pipeline": {"dp": 2, "pp": 2, "zero_stage": 3},
    "eager foreach": {"dp": 2, "zero_stage": 1, "fused": False},
    "eager tied": {"dp": 2, **TIED},
    "pure bf16": {"precision": "pure-bf16", "dp": 2},
    "megatron": {"precision": "bf16", "micro_batch": 2},
    "megatron tensor parallel": {"precision": "bf16", "tp": 4, "sequence_parallel": True},
    "megatron zero 1": {"precision": "bf16", "tp": 2, "dp": 4, "zero_stage": 1},
    "megatron zero 2": {"precision": "bf16", "dp": 4, "zero_stage": 2},
    "megatron fp16": {"precision": "fp16", "dp": 2},
    "megatron fp8": {"precision": "fp8", "tp": 2},
    "megatron interleaved": {"precision": "bf16", "pp": 2, "virtual_stages": 2, "layers": 8, "micro_batches": 8},
    "megatron zero bubble": {"precision": "bf16", "pp": 4, "schedule": "zb-h1", "micro_batches": 8, "layers": 8},
    "megatron zbv": {"precision": "bf16", "pp": 2, "schedule": "zbv", "virtual_stages": 2, "layers": 8},
    "megatron dualpipev": {"precision": "bf16", "pp": 2, "schedule": "dualpipev", "virtual_stages": 2, "layers": 8},
    "megatron by torch's runtime": {"precision": "bf16", "pp": 2, "runtime": "torch", "layers": 6, "micro_batches": 6},
    "megatron by torch's runtime, split": {"precision": "bf16", "pp": 2, "runtime": "torch", "schedule": "zb-h1"},
    "megatron recompute": {"precision": "bf16", "recompute": "full", "recompute_every": 2},
    "megatron recompute pipeline": {"precision": "bf16", "pp": 2, "recompute": "full", "recompute_every": 3},
    "megatron selective": {"precision": "bf16", "recompute": "selective", **UNFUSED},
    "megatron unfused": {"precision": "bf16", "tp": 2, **UNFUSED},
    "megatron offload": {"precision": "bf16", "pp": 2, "offload_activations": True},
    "megatron offloaded optimizer": {"precision": "bf16", "dp": 2, "offload": True},
    "megatron tied": {"precision": "bf16", **TIED},
    "megatron tied pipeline": {"precision": "bf16", "pp": 2, **TIED},
    "fsdp": {"precision": "bf16", "dp": 8, "zero_stage": 3},
    "fsdp that stays gathered": {"precision": "bf16", "dp": 8, "zero_stage": 3, "reshard_after_forward": False},
    "fsdp without prefetch": {"precision": "bf16", "dp": 8, "zero_stage": 3, "prefetch": 0},
    "fsdp with prefetch": {"precision": "bf16", "dp": 8, "zero_stage": 3, "prefetch": 3},
    "fsdp tensor parallel": {"precision": "bf16", "dp": 4, "tp": 2, "zero_stage": 3},
    "fsdp recompute": {"precision": "bf16", "dp": 4, "zero_stage": 3, "recompute": "full"},
    "fsdp pipeline": {"precision": "bf16", "dp": 2, "pp": 2, "zero_stage": 3, "micro_batches": 6},
    "fsdp hybrid": {"precision": "bf16", "dp": 8, "dp_shard": 4, "zero_stage": 3},
    "fsdp of two": {"precision": "bf16", "dp": 2, "zero_stage": 2},
    "fsdp tied": {"precision": "bf16", "dp": 4, "zero_stage": 3, **TIED},
    "megatron lora": {"precision": "fp8", "fp8_parameters": True, "tp": 2, "pp": 2, **LORA},
    "fsdp lora": {"precision": "bf16", "dp": 4, "zero_stage": 3, **LORA},
    "fsdp offload": {"precision": "bf16", "dp": 4, "zero_stage": 3, "offload_activations": True},
    "fsdp vocabulary": {"precision": "bf16", "dp": 4, "zero_stage": 3, "layers": 1, "seq_len": 8, "vocab": 90000},
    "t5 recompute": {"precision": "bf16", "recompute": "full", "recompute_every": 2, **T5},
    "t5": {"precision": "bf16", "pp": 2, **T5},
    "vit": {"precision": "bf16", "dp": 4, "zero_stage": 3, "family": "vit", "patch_dim": 768, "vocab": 100},
    "experts": {"precision": "bf16", "dp": 4, "ep": 2, "zero_stage": 1, **EXPERTS},
    "experts fsdp": {"precision": "bf16", "dp": 4, "ep": 2, "zero_stage": 3, **EXPERTS},
    "latent attention": {"precision": "bf16", "tp": 2, **LATENT},
    "context parallel": {"precision": "bf16", "cp": 2, "dp": 2},
    "foreach small vocabulary": {"vocab": 128, "fused": False},
    "torch's runtime without prefetch": {"prefetch": 0, "runtime": "torch"},
    "fsdp foreach of one layer": {"precision": "bf16", "dp": 2, "zero_stage": 3, "layers": 1, "seq_len": 248,
                                  "vocab": 64, "fused": False, "prefetch": 2, "family": "bert"},
    "foreach split backward": {"pp": 2, "layers": 6, "seq_len": 40, "micro_batch": 2, "vocab": 9000, "fused": False,
                               "recompute": "selective", "schedule": "zb-h1", "zero_stage": 1, **TIED},
}  # fmt: skip


def job(changes: dict[str, Any]) -> Job:
    """The job of an entry of ``JOBS``."""
    left = dict(changes)

    def taken(spec: type, **more: Any) -> Any:
        names = set(spec.__dataclass_fields__) & set(left)
        return spec(**{**more, **{name: left.pop(name) for name in names}})

    parallel: ParallelSpec = taken(ParallelSpec, dp=1)
    micro = left.pop("micro_batches", 4)
    size = left.get("micro_batch", 1)
    batch: BatchSpec = taken(BatchSpec, micro_batch=1, global_batch=size * micro * parallel.dp, precision="fp32")
    optimizer: OptimizerSpec = taken(OptimizerSpec)
    model: ModelSpec = taken(ModelSpec, **{key: value for key, value in MODEL.items() if key not in left})
    assert not left, left
    devices = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    cluster = ClusterSpec(hardware="toy", nodes=1, devices_per_node=devices, fabric="dgx-a100")
    return Job(model=model, parallel=parallel, batch=batch, optimizer=optimizer, cluster=cluster)


def values(changes: dict[str, Any]) -> dict[str, Any]:
    """Bytes per element, of every distinct part, and of every stage of a job, at most and at the step."""
    asked, gpu = job(changes), replace(HARDWARE["a100-sxm-80gb"], reserved_bytes=1e6, fragmentation=0.25)
    semantics = semantics_of(asked, gpu.kind)
    states = states_of(asked.parallel, semantics, asked.batch.dtype, groups_of(asked))
    shape = rank_shape(asked, semantics=semantics)
    parts = [part_memory(shape, part, states.execution) for part in dict.fromkeys(part_shapes(asked))]
    memory = estimate_memory(asked, gpu)
    stages = zip(memory.bytes_of.tolist(), memory.flying.tolist(), memory.moments.tolist(), strict=True)
    named = asdict(states)
    execution = named.pop("execution")
    found = {
        "states": {**named, "gradients of a block": execution["gradients"], "gathered": execution["gathered"],
                   "placeholder_bytes": execution["placeholder_bytes"], "loss_bytes": execution["loss_bytes"]},
        "parts": [asdict(part) for part in parts],
        "stages": [[*sizes, flying, moment] for sizes, flying, moment in stages],
        "moments": [[each.max(), each[-1]] for each in estimate_moments(asked, gpu)],  # the last one: the step
    }  # fmt: skip
    tables: dict[str, Any] = json.loads(json.dumps(found))
    return tables


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(values(changes))}" for name, changes in JOBS.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
