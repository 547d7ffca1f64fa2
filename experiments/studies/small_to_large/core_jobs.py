"""Workloads of the whole-cores half: real computation on one or two cores, one rank on each.

Held-out shapes occur in no training run and no event profile; pipelines by GPipe, full recomputation, and sequence
parallelism of Llama and T5 occur in held-out runs alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from stepsight.dataset.job.job import Job, ModelSpec
from stepsight.experiments.demo.local_jobs import STRATEGIES, job_of_strategy

RUNTIMES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        **{name: STRATEGIES[name] for name in ("single", "ddp2", "fsdp2", "tp2", "tp2sp")},
        "pp2-1f1b": STRATEGIES["pp2"],
        "pp2-gpipe": STRATEGIES["pp2gpipe"],
        "single-recompute": {"recompute": "full"},
    }
)


def _model(family: str, *sizes: int, **more: Any) -> ModelSpec:
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len")
    if family == "t5":
        more |= {"fused_attention": False}
    more |= dict(zip(names, sizes, strict=True))
    return ModelSpec(family=family, **more)


# layers, hidden, heads, kv_heads, ffn, vocab, seq_len; each with strategy, micro_batch, micro-batches per replica
TRAIN = (
    ("gpt2-a", _model("gpt", 4, 256, 4, 4, 1024, 2048, 128), (("single", 2, 2), ("tp2", 4, 1), ("pp2-1f1b", 1, 6))),
    ("gpt2-b", _model("gpt", 3, 384, 6, 6, 1536, 4096, 64), (("single", 4, 1), ("ddp2", 3, 1), ("tp2sp", 2, 2))),
    ("gpt2-c", _model("gpt", 2, 512, 8, 8, 2048, 2048, 64), (("tp2", 2, 2), ("fsdp2", 4, 1))),
    ("gpt2-d", _model("gpt", 5, 192, 6, 6, 768, 4096, 128), (("tp2", 2, 1), ("ddp2", 2, 2))),
    ("llama-a", _model("llama", 4, 256, 8, 4, 704, 2048, 128), (("single", 2, 2), ("tp2", 3, 1), ("ddp2", 3, 1))),
    ("llama-b", _model("llama", 3, 352, 11, 11, 928, 2048, 64), (("single", 6, 1), ("fsdp2", 3, 1))),
    ("llama-c", _model("llama", 6, 192, 6, 2, 512, 4096, 96), (("pp2-1f1b", 2, 4), ("tp2", 2, 2))),
    ("llama-d", _model("llama", 2, 512, 8, 8, 1376, 2048, 192), (("tp2", 1, 2), ("single", 2, 1))),
    ("bert-a", _model("bert", 4, 256, 4, 4, 1024, 2048, 128), (("single", 2, 2), ("tp2", 3, 1), ("fsdp2", 2, 1))),
    ("bert-b", _model("bert", 3, 384, 6, 6, 1536, 4096, 64), (("ddp2", 3, 1), ("pp2-1f1b", 2, 4))),
    ("bert-c", _model("bert", 2, 512, 8, 8, 2048, 2048, 96), (("single", 3, 1), ("tp2sp", 2, 1))),
    (
        "t5-a",
        _model("t5", 2, 256, 4, 4, 1024, 2048, 64, encoder_layers=2, encoder_seq_len=128),
        (("single", 2, 2), ("tp2", 3, 1), ("fsdp2", 2, 1)),
    ),
    (
        "t5-b",
        _model("t5", 3, 192, 6, 6, 768, 4096, 96, encoder_layers=2, encoder_seq_len=64),
        (("ddp2", 3, 1), ("tp2", 2, 2)),
    ),
    (
        "t5-c",
        _model("t5", 2, 384, 6, 6, 1536, 2048, 48, encoder_layers=1, encoder_seq_len=96),
        (("single", 4, 1), ("ddp2", 2, 2)),
    ),
)

HELDOUT = (
    (
        "gpt2",
        _model("gpt", 4, 320, 8, 8, 1280, 3072, 96),
        (("single", 3, 1), ("ddp2", 3, 1), ("fsdp2", 3, 1), ("tp2", 2, 2), ("tp2sp", 3, 1), ("pp2-1f1b", 2, 8)),
    ),
    ("gpt2-wide", _model("gpt", 2, 448, 8, 8, 1792, 3072, 64), (("single", 2, 3), ("tp2", 4, 1), ("pp2-gpipe", 3, 3))),
    (
        "llama",
        _model("llama", 4, 288, 6, 2, 800, 3072, 96),
        (("single", 2, 3), ("ddp2", 3, 1), ("fsdp2", 3, 1), ("tp2", 4, 1), ("tp2sp", 3, 1), ("pp2-gpipe", 2, 6)),
    ),
    ("llama-wide", _model("llama", 3, 448, 8, 4, 1184, 2560, 64), (("tp2", 2, 3), ("ddp2", 2, 2), ("pp2-1f1b", 3, 3))),
    (
        "bert",
        _model("bert", 4, 320, 10, 10, 1280, 3072, 112),
        (("single", 3, 1), ("ddp2", 2, 1), ("fsdp2", 3, 1), ("tp2", 3, 1), ("tp2sp", 2, 2), ("pp2-1f1b", 2, 5)),
    ),
    ("bert-wide", _model("bert", 2, 448, 8, 8, 1792, 2560, 64), (("single-recompute", 4, 1), ("pp2-gpipe", 4, 2))),
    (
        "t5",
        _model("t5", 2, 320, 10, 10, 1280, 3072, 80, encoder_layers=2, encoder_seq_len=112),
        (("single", 3, 1), ("ddp2", 2, 1), ("fsdp2", 3, 1), ("tp2", 2, 2), ("tp2sp", 3, 1)),
    ),
    (
        "t5-wide",
        _model("t5", 2, 448, 8, 8, 1792, 2560, 64, encoder_layers=1, encoder_seq_len=80),
        (("single", 2, 3), ("tp2", 3, 1)),
    ),
)


def named_jobs(rows: tuple[tuple[str, ModelSpec, tuple[tuple[str, int, int], ...]], ...]) -> Iterator[tuple[str, Job]]:
    """``<model>/<strategy>`` and the job of every row."""
    for name, model, runs in rows:
        for strategy, micro_batch, count in runs:
            job = job_of_strategy(replace(model, name=name), RUNTIMES[strategy], micro_batch, count)
            yield f"{name}/{strategy}", job


def profile_jobs(count: int = 28, seed: int = 0) -> list[Job]:
    """Jobs that never run; their distinct ops are measured alone, and widen the regressors' support.

    Hidden sizes of held-out jobs are left out.
    """
    rng = random.Random(seed)
    heldout = {model.hidden for _, model, _ in HELDOUT}
    hiddens = [h for h in (128, 160, 192, 256, 352, 384, 416, 512, 640, 768) if h not in heldout]
    jobs = []
    for index in range(count):
        family = ("gpt", "llama", "bert", "t5")[index % 4]
        hidden = rng.choice(hiddens)
        heads = hidden // rng.choice([d for d in (16, 32, 48, 64) if hidden % (2 * d) == 0])
        kv_heads = heads // 2 if family == "llama" and heads % 4 == 0 else heads
        ffn = 32 * rng.randint(hidden // 16, hidden // 10) if family == "llama" else 4 * hidden
        tokens, vocab = rng.choice((64, 128, 256, 384)), rng.choice((1024, 2048, 4096, 6144))
        seq_len = rng.choice([s for s in (48, 64, 128, 192) if s <= tokens])
        more = {"encoder_layers": 1, "encoder_seq_len": rng.choice((64, 96, 160))} if family == "t5" else {}
        model = _model(family, 2, hidden, heads, kv_heads, ffn, vocab, seq_len, **more)
        strategy = rng.choice(("single", "ddp2", "tp2", "tp2sp", "fsdp2") + (("pp2-1f1b",) if family != "t5" else ()))
        jobs.append(job_of_strategy(model, RUNTIMES[strategy], max(1, tokens // seq_len), 2))
    return jobs
