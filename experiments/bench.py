"""Speed figures: ``make bench`` prints them and writes ``bench.json``.  Medians, one core."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepsight.dataset.files import write_json
from stepsight.dataset.job import Job
from stepsight.experiments.search import strategies
from stepsight.experiments.tables import Number, table
from stepsight.training.prediction import predict, predict_many
from stepsight.training.predictor import Predictor

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def median_seconds(call: Callable[[], object], repeats: int = 30) -> float:
    """Median wall time of a call after two warm-up calls."""
    call()
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def import_seconds(repeats: int = 7) -> float:
    """Median time of ``import stepsight`` in fresh interpreters, their own start left out."""
    code = "import time; t = time.perf_counter(); import stepsight; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(repeats)]
    return statistics.median(float(run.stdout) for run in runs)


def scaling(job: Job) -> list[dict[str, Any]]:
    """Time of a prediction as micro-batches, and data-parallel replicas, grow."""
    rows = []
    for micro_batches, dp in ((48, 8), (96, 8), (192, 8), (384, 8), (192, 16), (192, 64)):
        parallel = replace(job.parallel, dp=dp)
        nodes = parallel.tp * parallel.pp * dp // job.cluster.devices_per_node
        changed = replace(
            job,
            parallel=parallel,
            batch=replace(job.batch, global_batch=micro_batches * dp * job.batch.micro_batch),
            cluster=replace(job.cluster, nodes=nodes),
        )
        seconds = median_seconds(lambda j=changed: predict(j))  # type: ignore[misc]
        rows.append({"micro_batches": micro_batches, "dp": dp, "ms": 1e3 * seconds})
    return rows


def bench(predictor: Predictor | None = None) -> dict[str, Any]:
    """All figures, in the shape of ``bench.json``."""
    predict_ms = {}
    for path in sorted(EXAMPLES.glob("*.toml")):
        job = Job.from_file(path)
        learned = predictor if predictor is not None and predictor.hardware.name == job.cluster.hardware else None
        predict_ms[path.stem] = 1e3 * median_seconds(lambda j=job, p=learned: predict(j, p))  # type: ignore[misc]
    large = Job.from_file(EXAMPLES / "gpt3-175b-1024.toml")
    distinct = list(strategies(large))
    started = time.perf_counter()
    predict_many(distinct)
    elapsed = time.perf_counter() - started
    return {
        "import_s": import_seconds(),
        "predict_ms": predict_ms,
        "predict_many_jobs_per_s": len(distinct) / elapsed,
        "predict_many_jobs": len(distinct),
        "scaling": scaling(large),
    }


def main() -> None:
    """Entry point of ``make bench``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    parser.add_argument("--predictor", type=Path, help="a trained predictor for the jobs of its hardware")
    arguments = parser.parse_args()
    figures = bench(None if arguments.predictor is None else Predictor.load(arguments.predictor))
    rows: list[list[object]] = [["import stepsight", Number(1e3 * figures["import_s"], 0), "ms"]]
    rows += [[f"predict {name}", Number(ms, 2), "ms"] for name, ms in figures["predict_ms"].items()]
    rows.append(["predict_many, distinct strategies", Number(figures["predict_many_jobs_per_s"], 0), "jobs/s"])
    rows += [
        [f"  {r['micro_batches']} micro-batches, dp {r['dp']}", Number(r["ms"], 2), "ms"] for r in figures["scaling"]
    ]
    print(table(["figure", "value", "unit"], rows))
    write_json(arguments.out, figures)


if __name__ == "__main__":
    main()
