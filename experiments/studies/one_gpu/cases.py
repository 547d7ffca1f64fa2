"""Runs of the study: training steps to train on, others to judge, and single ranks of large jobs.

A held-out run has a hidden size, products' (n, k), a vocabulary, a sequence and a number and size of micro-batches
that no training run has.  Rows are in the order of importance: where time is short, the last ones are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stepsight.dataset.hardware.hardware import find_hardware, usual_fabric
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec

STAND_IN = "stand-in"  # role of a run of one rank of a large job
CPU = "local-cpu"
ASSUMED_FABRIC = "dgx-a100"  # for emulated ranks on an unknown GPU: the delays of their collectives follow from it


@dataclass(frozen=True, slots=True)
class StepCase:
    """One run.

    Attributes:
        job: What runs.
        role: ``train``, ``heldout`` or ``STAND_IN``.
        launch_bound: Whether a GPU would wait for its host most of the time.
        compiled: Whether it also runs with compiled kernels.
        rank: The one that runs, of a stand-in.
    """

    job: Job
    role: str
    launch_bound: bool = False
    compiled: bool = False
    rank: int = 0


# family, layers, hidden, heads, kv_heads, ffn, vocab, seq_len, micro_batch, micro-batches, and words: launch-bound,
# compiled, recompute
Row = tuple[str, int, int, int, int, int, int, int, int, int, str]
GPU_TRAIN: tuple[Row, ...] = (
    ("gpt", 12, 768, 12, 12, 3072, 50304, 1024, 8, 1, ""),
    ("llama", 4, 256, 4, 4, 768, 8192, 512, 1, 1, "launch-bound compiled"),
    ("llama", 8, 2048, 32, 8, 8192, 128256, 2048, 2, 1, "compiled"),
    ("gpt", 6, 2048, 16, 16, 8192, 51200, 2048, 4, 1, "recompute"),
    ("gpt", 4, 256, 4, 4, 1024, 8192, 512, 1, 1, "launch-bound"),
    ("llama", 4, 4096, 32, 8, 14336, 128256, 8192, 1, 1, "compiled"),
    ("llama", 8, 768, 12, 4, 2048, 32000, 1024, 2, 1, "launch-bound compiled"),
    ("gpt", 4, 2560, 32, 32, 10240, 50304, 2048, 4, 1, ""),
    ("llama", 4, 4096, 32, 8, 14336, 128256, 2048, 4, 2, "recompute"),
    ("gpt", 8, 1536, 16, 16, 6144, 50304, 4096, 2, 1, ""),
    ("llama", 10, 1024, 16, 16, 2816, 32000, 512, 16, 1, "compiled"),
    ("gpt", 6, 512, 8, 8, 2048, 32000, 1024, 2, 2, "launch-bound"),
    ("llama", 3, 5120, 40, 40, 13824, 32000, 2048, 4, 1, ""),
    ("gpt", 3, 4096, 32, 32, 16384, 51200, 2048, 4, 2, ""),
    ("llama", 6, 3072, 24, 8, 8192, 128256, 4096, 1, 4, ""),
    ("gpt", 12, 1024, 16, 16, 4096, 50304, 1024, 16, 1, ""),
)
GPU_HELDOUT: tuple[Row, ...] = (
    ("llama", 5, 320, 5, 5, 896, 24576, 768, 1, 3, "launch-bound compiled"),
    ("gpt", 9, 1280, 20, 20, 5120, 49152, 1536, 6, 1, ""),
    ("llama", 5, 2816, 22, 2, 7680, 100352, 3072, 3, 1, "compiled"),
    ("gpt", 4, 384, 6, 6, 1536, 24576, 768, 1, 3, "launch-bound"),
    ("llama", 4, 3584, 28, 4, 18944, 152064, 6144, 1, 3, ""),
    ("gpt", 5, 2304, 24, 24, 9216, 49152, 1536, 3, 2, "recompute"),
    ("llama", 9, 640, 10, 5, 1792, 49152, 1536, 1, 5, "launch-bound compiled"),
    ("gpt", 6, 1792, 14, 14, 7168, 49152, 3072, 3, 1, ""),
)
CPU_TRAIN: tuple[Row, ...] = (
    ("gpt", 4, 256, 4, 4, 1024, 2048, 128, 2, 1, ""),
    ("llama", 3, 320, 5, 5, 896, 2048, 64, 4, 1, ""),
    ("llama", 2, 64, 2, 2, 192, 512, 64, 1, 1, "launch-bound"),
    ("gpt", 2, 384, 6, 6, 1536, 4096, 64, 2, 2, ""),
    ("llama", 5, 192, 6, 2, 512, 4096, 128, 1, 4, ""),
    ("gpt", 2, 128, 4, 4, 512, 1024, 64, 2, 1, "launch-bound"),
    ("gpt", 3, 512, 8, 8, 2048, 2048, 64, 2, 1, "recompute"),
    ("llama", 4, 256, 8, 4, 768, 2048, 256, 1, 1, ""),
    ("llama", 3, 384, 6, 6, 1024, 4096, 128, 2, 1, "recompute"),
    ("gpt", 5, 160, 5, 5, 640, 1024, 128, 4, 1, ""),
)
CPU_HELDOUT: tuple[Row, ...] = (
    ("gpt", 3, 448, 7, 7, 1792, 3072, 96, 3, 1, ""),
    ("llama", 4, 288, 6, 3, 800, 3072, 96, 1, 3, ""),
    ("gpt", 2, 96, 3, 3, 384, 1536, 48, 1, 3, "launch-bound"),
    ("llama", 3, 224, 7, 7, 608, 2560, 192, 3, 1, "recompute"),
    ("gpt", 4, 352, 11, 11, 1408, 2560, 48, 3, 2, ""),
)


def step_cases(device: str, hardware: str) -> list[StepCase]:
    """Runs of a device: ``cuda`` in pure bf16 on some hardware, or ``cpu`` in fp32 (``local-cpu``), on one rank."""
    rows = (GPU_TRAIN, GPU_HELDOUT) if device == "cuda" else (CPU_TRAIN, CPU_HELDOUT)
    found = []
    for role, of_role in zip(("train", "heldout"), rows, strict=True):
        for *sizes, words in of_role:
            parallel = {"recompute": "full"} if "recompute" in words else {}
            job = _job(device, hardware, sizes, parallel)
            found.append(StepCase(job, role, "launch-bound" in words, "compiled" in words and device == "cuda"))
    return found


# What of a large job is one rank's, cut to a few layers: model and micro-batches as above, parallel, nodes, rank.
_TP8 = {"tp": 8, "sequence_parallel": True}
GPU_STAND_INS: tuple[tuple[tuple[Any, ...], dict[str, Any], int, int], ...] = (
    (("llama", 2, 8192, 64, 8, 28672, 128256, 4096, 1, 2), _TP8, 1, 0),  # Llama 70B
    (("gpt", 32, 12288, 96, 96, 49152, 51200, 2048, 1, 16), {**_TP8, "pp": 16}, 16, 40),  # GPT-3 175B, sixth stage
    (("llama", 6, 4096, 32, 8, 14336, 128256, 4096, 1, 1), {"dp": 64, "zero_stage": 3}, 8, 0),  # Llama 8B
)
CPU_STAND_INS: tuple[tuple[tuple[Any, ...], dict[str, Any], int, int], ...] = (
    (("llama", 3, 256, 8, 4, 768, 2048, 128, 2, 1), {"tp": 2}, 1, 0),
    (("gpt", 8, 256, 4, 4, 1024, 2048, 128, 1, 4), {"pp": 4}, 1, 1),
    (("gpt", 3, 256, 4, 4, 1024, 2048, 128, 2, 1), {"dp": 8, "zero_stage": 3}, 2, 0),
)


def stand_ins(device: str, hardware: str) -> list[StepCase]:
    """Single ranks of jobs that are larger than this machine."""
    rows = GPU_STAND_INS if device == "cuda" else CPU_STAND_INS
    return [
        StepCase(_job(device, hardware, sizes, parallel, nodes), STAND_IN, rank=rank)
        for sizes, parallel, nodes, rank in rows
    ]


def _job(device: str, hardware: str, sizes: Any, parallel: dict[str, Any], nodes: int = 1) -> Job:
    family, layers, hidden, heads, kv_heads, ffn, vocab, seq_len, micro_batch, num_micro_batches = sizes
    split = ParallelSpec(**{"dp": 1, **parallel})
    model = ModelSpec(
        family=family, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab,
        seq_len=seq_len,
    )  # fmt: skip
    batch = BatchSpec(
        micro_batch=micro_batch,
        global_batch=micro_batch * num_micro_batches * split.dp,
        precision="pure-bf16" if device == "cuda" else "fp32",
    )
    devices = split.tp * split.pp * split.dp // nodes
    fabric = usual_fabric(hardware) if find_hardware(hardware) is not None else ASSUMED_FABRIC
    cluster = ClusterSpec(hardware=hardware, nodes=nodes, devices_per_node=devices, fabric=fabric)
    return Job(model=model, parallel=split, batch=batch, cluster=cluster)
