"""Compare searches of random jobs with the best of all strategies of their spaces.

Every job is searched at the default settings in a process that knows nothing of it yet, and then all of its strategies
are asked about.  Regret is how much longer the search's best takes than the best of all.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from random import Random
from typing import Any

from stepsight.dataset.base.caching import clear_caches
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.search.search import search
from stepsight.experiments.search.settings import Space
from stepsight.experiments.search.strategies import Grid
from stepsight.experiments.studies.study import Row, Study, cases

MOST_DRAWN = 100
CLUSTERS = {"a100-sxm-80gb": "dgx-a100", "h100-sxm-80gb": "dgx-h100", "b200-sxm-180gb": "dgx-b200"}


def drawn_job(random: Random) -> Job:
    """A job whose model, cluster, fabric and batch are drawn at random."""
    families = cases("search")
    name = random.choice(list(families))
    model = {"seq_len": random.choice([4096, 8192]), **random.choice(families[name])}
    hardware = random.choice(list(CLUSTERS))
    nodes = 2 ** random.randint(0, 11)
    fabric: Any = CLUSTERS[hardware]
    if random.random() < 0.4:
        near, far = random.choice([50, 200, 450, 900]), random.choice([3, 12.5, 25, 100])
        links = {"intra_node": (near, 3.0), "inter_node": (far, 10.0)}
        fabric = {key: {"bandwidth_gbytes_per_s": rate, "latency_us": us} for key, (rate, us) in links.items()}
    batch = {"micro_batch": 1, "global_batch": 8 * nodes * random.choice([1, 2, 4, 8]), "precision": "bf16"}
    return Job.from_dict(
        {
            "model": {**model, "family": "llama" if name in ("mixtral", "deepseek") else name, "name": name},
            "parallel": {"tp": 1},
            "batch": batch,
            "cluster": {"hardware": hardware, "nodes": nodes, "devices_per_node": 8, "fabric": fabric},
        }
    )


def compare(job: Job) -> Row | None:
    """Search one job, and predict all of its strategies; None if none fits."""
    clear_caches()
    since = time.process_time()
    found = search(job)
    if not found.any_fits:
        return None
    seconds, since = time.process_time() - since, time.process_time()
    best = search(job, sampler="enumerate").best.timed[0]
    return {
        "job": f"{job.model_name}-{job.model.layers}L-{job.model.hidden}h",
        "devices": job.cluster.num_devices,
        "cluster": f"{job.hardware_name} {job.fabric.name}",
        "global_batch": job.batch.global_batch,
        "legal": found.legal,
        "evaluated": found.evaluated,
        "gap_percent": found.gap_percent,
        "search_cpu_s": seconds,
        "best_s": found.best.timed[0],
        "enumerate_cpu_s": time.process_time() - since,
        "regret_percent": max(0.0, 100.0 * (found.best.timed[0] / best - 1.0)),
    }


def run(options: argparse.Namespace) -> tuple[Any, str]:
    """Draw jobs until enough have a strategy that fits, search and compare."""
    random, drawn, rows = Random(options.seed), 0, list[Row]()
    while len(rows) < options.jobs:
        job, drawn = drawn_job(random), drawn + 1
        if drawn > MOST_DRAWN * options.jobs:
            raise StepsightError(f"--most-legal must leave one job of {MOST_DRAWN} at least, got {options.most_legal}")
        with suppress(StepsightError):
            if len(Grid(job, Space())) <= options.most_legal and (row := compare(job)):
                rows.append(row)
                told = f"{row['search_cpu_s']:.1f} s, regret {row['regret_percent']:.4f} %"
                print(f"{len(rows)}/{options.jobs}  {job!r}: {told}", file=sys.stderr)
    keys = ["job", "devices", "cluster", "global_batch", "legal", "evaluated", "search_cpu_s", "enumerate_cpu_s"]
    slowest, proved = max(row["search_cpu_s"] for row in rows), sum(row["gap_percent"] == 0 for row in rows)
    lines = [
        table_of(rows, {key.replace("_", " "): key for key in (*keys, "regret_percent")}, 4),
        f"{len(rows)} jobs: {proved} proved optimal; slowest search {slowest:.1f} s of CPU",
        f"largest regret {max(row['regret_percent'] for row in rows):.4f} %",
    ]
    return {"jobs": rows}, "\n".join(lines)


STUDY = Study(
    "search",
    __doc__ or "",
    run,
    {
        "--jobs": {"type": int, "default": 30, "help": "jobs to draw"},
        "--seed": {"type": int, "default": 0, "help": "of the draw"},
        "--most-legal": {"type": int, "default": 20_000, "help": "leave out jobs with more strategies"},
    },
)
