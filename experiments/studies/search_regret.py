"""Compare searches of random jobs with the best of all strategies of their spaces.

Every job is searched at the default settings in a process that knows nothing of it yet, and then all of its strategies
are asked about.  Regret is how much longer the search's best takes than the best of all.
"""

from __future__ import annotations

import argparse
import sys
import time
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

JOBS = 30
MOST_DRAWN = 100
MOST_LEGAL = 20_000  # strategies of a job
OF_LLAMA = ("mixtral", "deepseek")
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
        fabric = {
            "intra_node": {"bandwidth_gbytes_per_s": random.choice([50, 200, 450, 900]), "latency_us": 3.0},
            "inter_node": {"bandwidth_gbytes_per_s": random.choice([3, 12.5, 25, 100]), "latency_us": 10.0},
        }
    devices = 8 * nodes
    return Job.from_dict(
        {
            "model": {**model, "family": "llama" if name in OF_LLAMA else name, "name": name},
            "parallel": {"tp": 1},
            "batch": {"micro_batch": 1, "global_batch": devices * random.choice([1, 2, 4, 8]), "precision": "bf16"},
            "cluster": {"hardware": hardware, "nodes": nodes, "devices_per_node": 8, "fabric": fabric},
        }
    )


def compare(job: Job, *, enumerates: bool, space: str) -> Row | None:
    """Search one job and, on request, predict all of its strategies; None if none fits."""
    clear_caches()
    since = time.process_time()
    found = search(job, space=space)
    seconds = time.process_time() - since
    if not found.choices or not found.choices[0].fits:
        return None
    row = {
        "job": f"{job.model_name}-{job.model.layers}L-{job.model.hidden}h",
        "devices": job.cluster.num_devices,
        "cluster": f"{job.hardware_name} {job.fabric.name}",
        "global_batch": job.batch.global_batch,
        "legal": found.legal,
        "evaluated": found.evaluated,
        "gap_percent": found.gap_percent,
        "search_cpu_s": seconds,
        "best_s": found.best.timed[0],
    }
    if enumerates:
        since = time.process_time()
        best = search(job, space=space, sampler="enumerate").best.timed[0]
        row["enumerate_cpu_s"] = time.process_time() - since
        row["regret_percent"] = max(0.0, 100.0 * (found.best.timed[0] / best - 1.0))
    return row


def run(options: argparse.Namespace) -> tuple[Any, str]:
    """Draw jobs until enough have a strategy that fits, search and compare."""
    enumerates, random, drawn = not options.no_enumeration, Random(options.seed), 0
    rows: list[Row] = []
    while len(rows) < options.jobs:
        job, drawn = drawn_job(random), drawn + 1
        if drawn > MOST_DRAWN * options.jobs:
            raise StepsightError(f"--most-legal must leave one job of {MOST_DRAWN} at least, got {options.most_legal}")
        try:
            legal = len(Grid(job, Space.of(options.space)))
        except StepsightError:
            continue
        if legal <= options.most_legal and (row := compare(job, enumerates=enumerates, space=options.space)):
            rows.append(row)
            regret = f", regret {row['regret_percent']:.4f} %" if enumerates else ""
            print(f"{len(rows)}/{options.jobs}  {job!r}: {row['search_cpu_s']:.1f} s{regret}", file=sys.stderr)
    keys = ["job", "devices", "cluster", "global_batch", "legal", "evaluated", "search_cpu_s"]
    keys += ["enumerate_cpu_s", "regret_percent"] if enumerates else []
    lines = [table_of(rows, {key.replace("_", " "): key for key in keys}, 4)]
    slowest, proved = max(row["search_cpu_s"] for row in rows), sum(row["gap_percent"] == 0 for row in rows)
    lines.append(f"{len(rows)} jobs: {proved} proved optimal; slowest search {slowest:.1f} s of CPU")
    if enumerates:
        lines.append(f"largest regret {max(row['regret_percent'] for row in rows):.4f} %")
    return {"jobs": rows}, "\n".join(lines)


STUDY = Study(
    "search",
    __doc__ or "",
    run,
    {
        "--jobs": {"type": int, "default": JOBS, "help": "jobs to draw"},
        "--seed": {"type": int, "default": 0, "help": "of the draw"},
        "--most-legal": {"type": int, "default": MOST_LEGAL, "help": "leave out jobs with more strategies"},
        "--space": {"default": "usual", "help": "as of search"},
        "--no-enumeration": {"action": "store_true", "help": "search only"},
    },
)
