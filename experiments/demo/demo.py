"""The demo: the whole product on measurements taken from this machine."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import check_writable, write_json, write_text
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.experiments.reports.job_texts import demo_text
from stepsight.experiments.reports.plots import plot_predicted_against_measured, plot_search
from stepsight.experiments.search.search import search
from stepsight.experiments.tasks.collecting import available_ranks, run_plan
from stepsight.training.fitting.train_runs import evaluate_heldout, train
from stepsight.training.measured.planning import make_plan
from stepsight.training.tracking.tracking import reopened

TRAIN_COUNTS = {"rounds": 1, "steps": 4, "warmup": 2, "profile_steps": 4}
HELDOUT_COUNTS = {"rounds": 2, "steps": 4, "warmup": 2, "profile_steps": 4}
EVENT_SECONDS = 45.0
EXTRA_SECONDS = 90.0  # more rounds of the runs whose times vary most
SEARCH_TRIALS = 150


def demo_plan() -> dict[str, Any]:
    """Plan the demo: training runs, held-out runs, and every op and collective of the training runs."""
    training, heldout = jobs_of("train"), jobs_of("heldout")
    # Training and held-out runs alternate, so that a drift of the machine affects both equally.
    turns = [("train", job, TRAIN_COUNTS) for job in training]
    for index, job in enumerate(heldout):
        turns.insert(2 * index + 1, ("heldout", job, HELDOUT_COUNTS))
    profiled = [*training, *jobs_of("profile")]
    return make_plan(turns, profile_jobs=profiled, event_seconds=EVENT_SECONDS, extra_seconds=EXTRA_SECONDS)


def run_demo(out: Path) -> tuple[dict[str, Any], str]:
    """Measure, train, predict held-out runs, and search; all files are written to ``out``.  The content of
    ``summary.json``, and the same as text.
    """
    if available_ranks() < 2:
        raise CollectError(f"the demo needs 2 cores (or GPUs) for 2 ranks, got {available_ranks()}")
    check_writable(out)
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    say("collecting: real runs of 1 and 2 ranks, and every distinct op once")
    collection = out / "collection"
    run_plan(demo_plan(), collection)
    say("training: regressors, then the context GNN; tracked in MLflow")
    uri = f"sqlite:///{(out / 'mlflow.db').resolve()}"
    predictor = train([collection], out / "predictor", hardware_name="local-cpu", tracking_uri=uri, progress=True)
    say("predicting the held-out runs")
    evaluation = evaluate_heldout(predictor, collection, role="heldout")
    figures = {name: getattr(evaluation, name) for name in ("mape", "floor", "spearman", "coverage")}
    logged = {f"heldout_{name}": value for name, value in figures.items()}
    reopened(uri, predictor.manifest["mlflow_run_id"]).log({}, logged, {})
    say("searching a strategy for a larger cluster")
    target = search_job()
    found = search(target, predictor, trials=SEARCH_TRIALS)
    rows = [choice.to_dict() for choice in found.choices]
    op_errors = {name: getattr(evaluation, name) for name in ("op_error_regressor", "op_error_with_gnn")}
    sizes = {"evaluated": found.evaluated, "legal": found.legal, "devices": target.cluster.num_devices}
    summary = {
        "heldout": evaluation.rows,
        **figures,
        "gnn": {**op_errors, "model": predictor.context.name if predictor.context is not None else ""},
        "search": {"best": found.best.to_dict(), **sizes, "model": target.name},
        "mlflow_run_id": predictor.manifest["mlflow_run_id"],
    }
    plot_predicted_against_measured(evaluation.rows, out / "predicted_vs_measured.png", "held-out runs on this machine")
    plot_search(rows, out / "search.png", f"{target.name}, {target.cluster.num_devices} devices")
    best = found.best.prediction
    assert best is not None  # strategies that fit were timed
    write_text(out / "timeline.json", json.dumps(best.timeline("op")))
    summary["seconds"] = time.monotonic() - started
    text = demo_text(summary)
    write_text(out / "summary.txt", text + "\n")
    write_json(out / "summary.json", summary)
    files = "summary.json, summary.txt, predicted_vs_measured.png, search.png, predictor/, mlflow.db"
    return summary, f"{text}\nwritten to {out}: {files}\nand timeline.json: open it at https://ui.perfetto.dev"


STRATEGIES: dict[str, dict[str, object]] = {
    "single": {},
    "ddp2": {"dp": 2},
    "fsdp2": {"dp": 2, "zero_stage": 3},
    "tp2": {"tp": 2},
    "tp2sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "pp2gpipe": {"pp": 2, "schedule": "gpipe"},
}


_SIZES = ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len")


def sized_job(
    sizes: Sequence[Any], parallel: Mapping[str, Any], batches: tuple[int, int] = (1, 1), **cluster: Any
) -> Job:
    """A job of a model from its ``sizes``, as ``_SIZES``, and fields of ``ParallelSpec``; on one node of this machine
    in fp32 unless fields of ``cluster`` and its ``precision`` differ.  ``batches``: the micro-batch, and the number of
    micro-batches of each replica.
    """
    split, (micro_batch, number) = ParallelSpec(**{"dp": 1, **parallel}), batches
    stated = {"hardware": "local-cpu", "fabric": "loopback", "nodes": 1, "precision": "fp32", **cluster}
    precision = stated.pop("precision")
    return Job(
        model=ModelSpec(**dict(zip(_SIZES, sizes, strict=True))),
        parallel=split,
        batch=BatchSpec(micro_batch=micro_batch, global_batch=micro_batch * number * split.dp, precision=precision),
        cluster=ClusterSpec(devices_per_node=split.tp * split.pp * split.dp // stated["nodes"], **stated),
    )


def jobs_of(role: str) -> list[Job]:
    """The jobs of ``jobs.csv`` with a role. Jobs to profile never run: their distinct ops are measured alone, and widen
    the regressors' support. No shape of a held-out job occurs in the others; GPipe, and sequence parallelism for Llama,
    are not in the training runs.
    """
    text = resources.files(__package__).joinpath("jobs.csv").read_text("utf-8")
    rows = [[int(word) if word.isdigit() else word for word in row] for row in csv.reader(text.splitlines())]
    return [
        sized_job(sizes, STRATEGIES[str(strategy)], (int(micro), int(number)))
        for own, *sizes, strategy, micro, number in rows
        if own == role
    ]


def search_job() -> Job:
    """A model too large for this machine, on a cluster of sixteen such cores."""
    return Job(
        model=ModelSpec(family="gpt", layers=16, hidden=768, heads=12, vocab=8192, seq_len=256),
        parallel=ParallelSpec(),
        batch=BatchSpec(micro_batch=1, global_batch=64, precision="fp32"),
        cluster=ClusterSpec(hardware="local-cpu", nodes=8, devices_per_node=2, fabric="loopback"),
    )
