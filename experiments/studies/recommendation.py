"""Recommendation models: predicted and measured lookups on this machine, and placements against torchrec's planner."""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.harness.ops.callables import op_call
from stepsight.dataset.harness.ops.input_pool import Pool
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.reports.text_table import table
from stepsight.experiments.search.search import search
from stepsight.experiments.studies.study import Study
from stepsight.training.kernels.kernel_models import fit_kernels

_FORWARD, _BACKWARD = "table_lookup", "table_lookup_backward"
_WARM = 2  # rounds that are not counted
_DEVICES = (2, 4, 8, 16)
NEAR = 1.05  # times the best


def drawn_ops(count: int, seed: int) -> list[Op]:
    """Lookups of random sizes and localities, forward and backward."""
    draw, ops = random.Random(seed), list[Op]()
    for _ in range(count):
        tables, hidden, samples = (
            draw.choice((1, 2, 4, 8, 16)),
            draw.choice((16, 32, 64, 128)),
            draw.choice((256, 512, 1024, 2048)),
        )
        pooling = math.exp(draw.uniform(0.0, math.log(40.0)))
        bags = samples * tables
        indices = max(bags, int(bags * pooling))
        distinct = max(tables, int(indices * math.exp(draw.uniform(math.log(0.02), 0.0))))
        dims = indices, hidden, bags, distinct, tables
        ops += [Op(_FORWARD, dims, "fp32"), Op(_BACKWARD, (*dims, 1), "fp32")]
    return ops


def measure(ops: Sequence[Op], rounds: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Shortest seconds of each op on one core, over rounds that take all of them in turn: other load comes and goes."""
    torch.set_num_threads(1)
    pool = Pool(torch.device("cpu"), "fp32")
    least = np.full(len(ops), np.inf)
    for at, op in enumerate(ops):
        call = op_call(op.kind, list(op.dims), pool)
        for turn in range(_WARM + rounds):
            inputs = call.inputs()
            begin = time.perf_counter()
            call.run(*inputs)
            seconds = time.perf_counter() - begin
            least[at] = min(least[at], seconds) if turn >= _WARM else np.inf
    return least


def run_lookups(options: argparse.Namespace) -> tuple[Any, str]:
    """Errors of lookups that taught nothing."""
    ops = drawn_ops(options.ops, options.seed)
    before, seconds = os.getloadavg()[0], measure(ops, options.rounds)
    hardware = find_hardware("local-cpu")
    assert hardware is not None
    judged = np.arange(len(ops)) // 2 % 3 == 0  # forward and backward of a signature together
    model = fit_kernels([op for op, own in zip(ops, judged, strict=True) if not own], 1, seconds[~judged], hardware)
    told: dict[str, Any] = {"load": [before, os.getloadavg()[0]], "trained_on": int((~judged).sum())}
    rows = []
    for kind in (_FORWARD, _BACKWARD):
        mine = [at for at in np.flatnonzero(judged).tolist() if ops[at].kind == kind]
        error = np.abs(model.seconds([ops[at] for at in mine], 1) / seconds[mine] - 1.0)
        figures = {"ops": len(mine), "geometric_mean": float(np.exp(np.log(np.maximum(error, 1e-4)).mean()))}
        figures |= {"mean": float(error.mean()), "p90": float(np.quantile(error, 0.9))}
        told[kind] = figures
        rows.append([kind, str(len(mine)), *(f"{100 * figures[key]:.1f}" for key in ("geometric_mean", "mean", "p90"))])
    text = table(["op", "judged", "geometric mean, %", "mean, %", "p90, %"], rows)
    return told, f"{text}\nload of the machine: {before:.1f} before, {told['load'][1]:.1f} after"


def drawn_job(seed: int) -> Job:
    """A random model with the statistics of the public data sets of FBGEMM: most tables small, few hot ones."""
    draw = random.Random(seed)
    tables = [
        {
            "rows": int(min(10 ** draw.gauss(5.2, 1.1), 5e7)) + 64,
            "dim": draw.choice((32, 64, 128)),
            "pooling": float(min(max(1, round(draw.lognormvariate(1.2, 1.2))), 60)),
            "zipf": draw.uniform(0.6, 1.2),
        }
        for _ in range(draw.randint(20, 80))
    ]
    devices, samples = draw.choice(_DEVICES), draw.choice((1024, 2048, 4096))
    per_node = min(devices, 8)
    return Job.from_dict(
        {
            "framework": "torchrec",
            "model": {"family": "dlrm", "tables": tables, "interaction": "dcn-v2", "cross_layers": 2},
            "sharding": {"rule": "table-wise"},
            "batch": {"micro_batch": samples, "global_batch": samples * devices, "precision": "fp32"},
            "cluster": {"hardware": "a100-sxm-80gb", "nodes": devices // per_node, "devices_per_node": per_node},
        }
    )


def run_placements(options: argparse.Namespace) -> tuple[Any, str]:
    """Predicted iterations of the placements of each method, as multiples of the best; none of them is measured."""
    found: dict[str, list[float]] = {}
    for task in range(options.tasks):
        result = search(drawn_job(options.seed + task), trials=options.trials, top=1)
        times = {"search": result.best.timed[0], **result.baselines}
        least = min(seconds for seconds in times.values() if seconds is not None)
        for name, seconds in times.items():
            found.setdefault(name, []).append(math.inf if seconds is None else seconds / least)
    legal = {name: [ratio for ratio in ratios if ratio < math.inf] for name, ratios in found.items()}
    told = {
        name: {
            "tasks": len(ratios),
            "regret": float(np.mean(ratios)) - 1.0,
            "within_5_percent": sum(r <= 1.05 for r in ratios),
        }
        for name, ratios in legal.items()
        if ratios
    }
    rows = [
        [name, str(own["tasks"]), f"{100 * own['regret']:.1f}", f"{own['within_5_percent']} of {options.tasks}"]
        for name, own in told.items()
    ]
    return told, table(["placement", "legal", "predicted regret, %", "within 5 %"], rows)


LOOKUPS = Study(
    "lookups",
    "predicted and measured lookups in embedding tables on one core of this machine; with FBGEMM where it is installed",
    run_lookups,
    {
        "--ops": {"type": int, "default": 90, "help": "signatures, a third of which judges"},
        "--rounds": {"type": int, "default": 15, "help": "calls of each"},
        "--seed": {"type": int, "default": 0},
    },
)
PLACEMENTS = Study(
    "placements",
    "predicted iterations with tables placed by the search, by simple rules and by torchrec's planner",
    run_placements,
    {
        "--tasks": {"type": int, "default": 20},
        "--trials": {"type": int, "default": 20000, "help": "placements that the search judges"},
        "--seed": {"type": int, "default": 0},
    },
)
