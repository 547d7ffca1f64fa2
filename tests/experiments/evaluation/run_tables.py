"""Small tables of runs for tests."""

import gzip
from pathlib import Path
from typing import Any

from stepsight.experiments.evaluation.row_jobs import PublishedJob, jobs_of, run_digest
from stepsight.experiments.evaluation.runs_table import Row

COLUMNS: dict[str, Any] = {
    "row_id": 1,
    "source": "lab",
    "hardware": "A100-SXM",
    "gpu_mem_gb": 80.0,
    "nodes": 2.0,
    "gpus_per_node": 8.0,
    "gpus": 16.0,
    "inter_interconnect": "",
    "framework": "Megatron-LM",
    "model_name": "GPT-x",
    "family": "gpt",
    "layers": 8.0,
    "hidden": 1024.0,
    "ffn": 4096.0,
    "heads": 16.0,
    "kv_heads": "",
    "vocab": 50257.0,
    "seq_len": 1024.0,
    "experts": "",
    "top_k": "",
    "gated_mlp": 0.0,
    "tied_embeddings": 1.0,
    "tp": 4.0,
    "pp": 2.0,
    "vp": 1.0,
    "cp": 1.0,
    "ep": 1.0,
    "dp": 2.0,
    "zero_stage": "0",
    "sequence_parallel": 0.0,
    "micro_batch": 2.0,
    "global_batch": 64.0,
    "recompute": "full",
    "precision": "fp16",
    "iteration_time_s": 1.0,
    "iter_time_derivation": "direct",
    "quality": "A",
    "notes": "",
}


def run_row(**changes: Any) -> Row:
    """A row of 16 A100 with some cells changed."""
    return Row({key: str(value) for key, value in {**COLUMNS, **changes}.items()})


def job_of(row: Row) -> PublishedJob:
    """The first of a row's jobs: the only one where the row leaves nothing open."""
    return jobs_of(row)[0]


def digest_of(row: Row) -> str:
    """Of the run that a row tells of."""
    return run_digest(job_of(row).job, row.measured_s)


def write_runs(path: Path, *rows: Row) -> Path:
    """A table of rows; packed where the name ends in ``.gz``."""
    lines = [",".join(COLUMNS), *(",".join(row.cells[key] for key in COLUMNS) for row in rows)]
    text = "\n".join(lines) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path
