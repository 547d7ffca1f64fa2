"""Speed figures: ``make bench`` prints them and writes ``bench.json``.  Medians, one core; rates by CPU time."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import timeit
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from stepsight.dataset.base.caching import clear_caches
from stepsight.dataset.base.files import write_json
from stepsight.dataset.job.job import Job
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.search.settings import Space
from stepsight.experiments.search.strategies import strategies
from stepsight.experiments.studies.study import Row, Study
from stepsight.training.prediction.ask_many import FEWEST, ask_many, predict_many
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JOB = "gpt3-175b-1024"
SPACE = Space(schedules=(("1f1b", 1), ("gpipe", 1)))  # of the jobs for ``predict_many``


def median_seconds(call: Callable[[], object], repeats: int = 30) -> float:
    """Median wall time of a call after two warm-up calls."""
    call()
    call()
    return statistics.median(timeit.repeat(call, number=1, repeat=repeats))


def warm_up(job: Job) -> None:
    """Wait until the loops over arrays are compiled."""
    for micro_batches in (96, 192, 384):
        changed = replace(job, batch=replace(job.batch, global_batch=micro_batches * job.parallel.dp))
        for schedule in ("1f1b", "gpipe", "zb-h1"):
            for zero_stage in (0, 1, 3):
                predict(replace(changed, parallel=replace(job.parallel, schedule=schedule, zero_stage=zero_stage)))
    ask_many([job] * FEWEST)  # intervals have compiled loops of their own


def rates(job: Job) -> Row:
    """Rates by CPU time: distinct strategies around a job, the same again, and with intervals; events of a timeline."""
    distinct = list(strategies(job, SPACE))

    def rate(ask: Callable[[], Iterable[object]]) -> float:
        started = time.process_time()
        deque(ask(), maxlen=0)
        return len(distinct) / (time.process_time() - started)

    def fresh(ask: Callable[[], Iterable[object]]) -> float:
        clear_caches()
        predict(job)  # loads its predictor again
        return rate(ask)

    times = lambda: (prediction.iteration_time_s for prediction in predict_many(distinct))
    first, second, asked = fresh(times), rate(times), fresh(lambda: [ask_many(distinct)])
    prediction = predict(job)  # op-level events of all stages, as the JSON of a trace file
    events = sum(piece.count(b'"ph":"X"') for piece in prediction.timeline_json("op"))
    seconds = median_seconds(lambda: sum(map(len, prediction.timeline_json("op"))), 3)
    return {
        "predict_many_jobs_per_s": first,
        "predict_many_jobs": len(distinct),
        "predict_many_again_jobs_per_s": second,
        "ask_many_jobs_per_s": asked,
        "timeline_events": events,
        "timeline_events_per_s": events / seconds,
    }


def bench(predictor: Predictor | None = None) -> Row:
    """Measure all figures, in the form of ``bench.json``."""
    jobs = {path.stem: Job.from_file(path) for path in sorted(EXAMPLES.glob("*.toml"))}

    def ask(job: Job) -> tuple[float, bool]:  # the two values that a search needs
        learned = predictor if predictor is not None and predictor.hardware.name == job.cluster.hardware else None
        prediction = predict(job, learned)
        return prediction.iteration_time_s, prediction.memory.fits

    warm_up(jobs[JOB])
    found = rates(jobs[JOB])
    predict_ms = {name: 1e3 * median_seconds(partial(ask, job)) for name, job in jobs.items()}
    code = "import time; t = time.perf_counter(); import stepsight; print(time.perf_counter() - t)"
    imports = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(7)]
    import_s = statistics.median(float(run.stdout) for run in imports)
    return {"import_s": import_s, "predict_ms": predict_ms, **found}


def bench_text(figures: Row) -> str:
    """The figures as tables."""
    distinct = f"jobs/s of a core ({figures['predict_many_jobs']} distinct)"
    values = [
        ("import stepsight", 1e3 * figures["import_s"], "ms"),
        *((f"predict {name}", ms, "ms") for name, ms in figures["predict_ms"].items()),
        ("predict_many", figures["predict_many_jobs_per_s"], distinct),
        ("predict_many, asked again", figures["predict_many_again_jobs_per_s"], "jobs/s of a core"),
        ("ask_many, with intervals and memory", figures["ask_many_jobs_per_s"], distinct),
        ("op-level timeline", figures["timeline_events_per_s"] / 1e6, "million events/s"),
    ]
    keys = ("figure", "value", "unit")
    return table_of([dict(zip(keys, each, strict=True)) for each in values], {key: key for key in keys}, 2)


def run(options: argparse.Namespace) -> tuple[Row, str]:
    """Measure, and write ``bench.json``."""
    figures = bench(None if options.predictor is None else Predictor.load(options.predictor))
    write_json(options.out, figures)
    return figures, bench_text(figures)


OPTIONS = {
    "--out": {"type": Path, "default": Path("bench.json"), "help": "file of the figures"},
    "--predictor": {"type": Path, "help": "a trained predictor for the jobs of its hardware"},
}
STUDY = Study("bench", __doc__ or "", run, OPTIONS)
