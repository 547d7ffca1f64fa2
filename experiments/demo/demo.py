"""The demo: the whole product on measurements taken from this machine."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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

TRAIN_COUNTS = {"rounds": 1, "steps": 4, "warmup": 2, "profile_steps": 2}
HELDOUT_COUNTS = {"rounds": 2, "steps": 4, "warmup": 2, "profile_steps": 2}
EVENT_SECONDS = 45.0
EXTRA_SECONDS = 90.0  # more rounds of the runs whose times vary most
SEARCH_TRIALS = 150


def demo_plan() -> dict[str, Any]:
    """Plan the demo: training runs, held-out runs, and every op and collective of the training runs."""
    training, heldout = train_jobs(), heldout_jobs()
    # Training and held-out runs alternate, so that a drift of the machine affects both equally.
    turns = [("train", job, TRAIN_COUNTS) for job in training]
    for index, job in enumerate(heldout):
        turns.insert(2 * index + 1, ("heldout", job, HELDOUT_COUNTS))
    profiled = [*training, *profile_only_jobs()]
    return make_plan(turns, profile_jobs=profiled, event_seconds=EVENT_SECONDS, extra_seconds=EXTRA_SECONDS)


def run_demo(out: Path) -> tuple[dict[str, Any], str]:
    """Measure, train, predict held-out runs, and search; all files are written to ``out``.

    Returns:
        The content of ``summary.json`` and the same as text.
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
    summary = {
        "heldout": evaluation.rows,
        **figures,
        "gnn": {
            "op_error_regressor": evaluation.op_error_regressor,
            "op_error_with_gnn": evaluation.op_error_with_gnn,
            "model": predictor.context.name if predictor.context is not None else "",
        },
        "search": {
            "best": found.best.to_dict(),
            "evaluated": found.evaluated,
            "legal": found.legal,
            "devices": target.cluster.num_devices,
            "model": target.name,
        },
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


class LocalJob(NamedTuple):
    """A job on one node of this machine, as a row of a table."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    strategy: str = "single"  # A key of ``STRATEGIES``
    micro_batch: int = 1
    num_micro_batches: int = 1  # of each replica

    def job(self) -> Job:
        """The row as a job."""
        *sizes, strategy, micro_batch, num_micro_batches = self
        stated: dict[str, Any] = dict(zip(self._fields, sizes, strict=False))
        return job_of_strategy(ModelSpec(**stated), STRATEGIES[strategy], micro_batch, num_micro_batches)


def job_of_strategy(model: ModelSpec, strategy: Mapping[str, object], micro_batch: int, num_micro_batches: int) -> Job:
    """A job on one node of this machine; ``strategy`` has the keys of its ``[parallel]`` table besides ``dp = 1``."""
    parallel = ParallelSpec(**{"dp": 1, **strategy})  # type: ignore[arg-type]
    return Job(
        model=model,
        parallel=parallel,
        batch=BatchSpec(
            micro_batch=micro_batch, global_batch=micro_batch * num_micro_batches * parallel.dp, precision="fp32"
        ),
        cluster=ClusterSpec(
            hardware="local-cpu", devices_per_node=parallel.tp * parallel.pp * parallel.dp, fabric="loopback"
        ),
    )


# Each row holds the fields of ``LocalJob``.
TRAIN = (
    ("gpt", 4, 256, 4, 4, 1024, 2048, 128, "single", 2, 1),
    ("gpt", 2, 384, 6, 6, 1536, 4096, 64, "single", 2, 2),
    ("llama", 3, 320, 5, 5, 896, 2048, 64, "single", 4, 1),
    ("llama", 5, 192, 6, 2, 512, 4096, 128, "single", 1, 3),
    ("gpt", 4, 256, 8, 8, 1024, 4096, 64, "ddp2", 4, 1),
    ("gpt", 3, 384, 6, 6, 1536, 2048, 64, "ddp2", 2, 2),
    ("llama", 4, 256, 8, 4, 768, 2048, 128, "ddp2", 2, 1),
    ("gpt", 4, 384, 6, 6, 1536, 4096, 128, "tp2", 2, 1),
    ("llama", 4, 256, 4, 4, 704, 4096, 256, "tp2", 1, 1),
    ("gpt", 3, 320, 4, 4, 1280, 2048, 128, "tp2sp", 2, 1),
    ("gpt", 4, 256, 4, 4, 1024, 4096, 64, "pp2", 1, 6),
    ("llama", 6, 256, 4, 2, 640, 2048, 64, "pp2", 2, 4),
    ("gpt", 3, 256, 4, 4, 1024, 2048, 128, "fsdp2", 2, 1),
    ("llama", 4, 320, 5, 5, 864, 2048, 64, "fsdp2", 3, 1),
    ("llama", 2, 256, 8, 8, 640, 2048, 192, "single", 2, 1),
    ("gpt", 2, 512, 8, 8, 2048, 2048, 64, "tp2", 2, 2),
    ("llama", 5, 192, 6, 6, 512, 2048, 128, "tp2", 3, 1),
    ("gpt", 5, 192, 6, 6, 768, 4096, 64, "tp2sp", 3, 2),
    ("gpt", 2, 192, 4, 4, 768, 4096, 128, "ddp2", 1, 2),
    ("gpt", 2, 384, 6, 6, 1536, 2048, 64, "fsdp2", 2, 2),
)  # fmt: skip

# No shape below occurs above; GPipe, and sequence parallelism for Llama, are not in the training runs.
HELDOUT = (
    ("gpt", 3, 448, 7, 7, 1792, 3072, 64, "single", 3, 1),
    ("llama", 4, 288, 6, 3, 800, 3072, 96, "single", 2, 3),
    ("gpt", 4, 192, 6, 6, 768, 3072, 192, "single", 1, 1),
    ("gpt", 3, 224, 7, 7, 896, 3072, 128, "ddp2", 2, 1),
    ("llama", 3, 384, 6, 6, 1024, 3072, 64, "ddp2", 3, 1),
    ("llama", 6, 224, 7, 7, 608, 2560, 64, "ddp2", 2, 3),
    ("gpt", 5, 320, 8, 8, 1280, 3072, 192, "tp2", 1, 1),
    ("llama", 3, 448, 8, 4, 1184, 3072, 128, "tp2", 1, 4),
    ("llama", 4, 288, 6, 6, 768, 2560, 128, "tp2sp", 2, 1),
    ("gpt", 4, 320, 5, 5, 1280, 3072, 64, "pp2", 2, 3),
    ("llama", 4, 288, 6, 2, 800, 2560, 96, "pp2gpipe", 1, 8),
    ("gpt", 6, 224, 7, 7, 896, 2560, 64, "pp2gpipe", 3, 2),
    ("gpt", 2, 288, 6, 6, 1152, 3072, 64, "fsdp2", 3, 1),
    ("llama", 5, 224, 7, 7, 640, 2560, 192, "fsdp2", 1, 1),
)  # fmt: skip


def train_jobs() -> list[Job]:
    return [LocalJob(*row).job() for row in TRAIN]


def heldout_jobs() -> list[Job]:
    return [LocalJob(*row).job() for row in HELDOUT]


def profile_only_jobs(count: int = 24, seed: int = 0) -> list[Job]:
    """Jobs that never run; their distinct ops are measured alone, and widen the regressors' support.

    Hidden sizes of held-out jobs are left out.
    """
    rng = random.Random(seed)
    excluded = {row[2] for row in HELDOUT}
    hiddens = [h for h in (64, 96, 128, 160, 192, 256, 352, 384, 416, 512, 640, 768) if h not in excluded]
    jobs = []
    for index in range(count):
        hidden = rng.choice(hiddens)
        head_dim = rng.choice([d for d in (16, 32, 48, 64) if hidden % (2 * d) == 0])
        heads = hidden // head_dim
        family = ("gpt", "llama")[index % 2]
        kv_heads = heads if family == "gpt" or heads % 4 else heads // 2
        ffn = 4 * hidden if family == "gpt" else 32 * rng.randint(hidden // 16, hidden // 10)
        tokens = rng.choice((64, 128, 256, 384))
        strategy = ("single", "ddp2", "tp2", "tp2sp", "single", "pp2", "fsdp2")[index % 7]
        vocab = rng.choice((1024, 2048, 4096, 6144, 8192))
        seq_len = rng.choice([s for s in (64, 128, 256, 384) if s <= tokens * 2])
        sizes = (2, hidden, heads, kv_heads, ffn, vocab, seq_len)
        jobs.append(LocalJob(family, *sizes, strategy, max(1, 2 * tokens // seq_len), 2).job())
    return jobs


def search_job() -> Job:
    """A model too large for this machine, on a cluster of sixteen such cores."""
    return Job(
        model=ModelSpec(family="gpt", layers=16, hidden=768, heads=12, vocab=8192, seq_len=256),
        parallel=ParallelSpec(),
        batch=BatchSpec(micro_batch=1, global_batch=64, precision="fp32"),
        cluster=ClusterSpec(hardware="local-cpu", nodes=8, devices_per_node=2, fabric="loopback"),
    )
