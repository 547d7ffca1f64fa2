"""Run folders and collections made of small hand-made traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.dataset.kineto_files import KinetoFile, tiny_step


def job_tables(devices: int = 1) -> dict[str, Any]:
    """A tensor-parallel job on so many devices of one node."""
    return {
        "model": {"family": "gpt", "layers": 2, "hidden": 8, "heads": 2, "vocab": 64, "seq_len": 4},
        "parallel": {"tp": devices},
        "batch": {"micro_batch": 1, "global_batch": 1, "precision": "fp32"},
        "cluster": {"hardware": "local-cpu", "nodes": 1, "devices_per_node": devices, "fabric": "loopback"},
    }


def write_run(
    folder: Path, ranks: int = 1, files: list[KinetoFile] | None = None, name: str = "one", **changes: Any
) -> Path:
    """Write a run of ``tiny_step``; ``changes`` replace keys of the manifest."""
    run = folder / "runs" / name
    run.mkdir(parents=True)
    for rank, file in enumerate(files if files is not None else [tiny_step(rank, ranks) for rank in range(ranks)]):
        file.write(run / f"rank{rank}.kineto.json.gz")
    manifest = {
        "schema": 1,
        "name": name,
        "role": "train",
        "job": job_tables(ranks),
        "world_size": ranks,
        "fingerprint": {},
        "versions": {},
        "rounds": [[1e-3, 1.1e-3], [0.9e-3]],
        "profiled_seconds": [1.0e-3],
        "losses": [1.0],
        "peak_memory_bytes": [],
        "traces": {str(rank): {"kineto": f"rank{rank}.kineto.json.gz"} for rank in range(ranks)},
        **changes,
    }
    (run / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))
    return run


def write_events(folder: Path, name: str = "ops-1", **changes: Any) -> Path:
    path = folder / "events" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    op = {"kind": "linear", "dims": [4, 6, 8], "dtype": "fp32"}
    collective = {"kind": "all_reduce", "num_bytes": 96, "group_size": 2, "ranks_per_node": 2}
    records = [
        {"op": op, "seconds": 2e-6, "min_seconds": 1e-6, "repeats": 3},
        {"collective": collective, "seconds": 5e-5, "min_seconds": 4e-5, "repeats": 3},
    ]
    tree = {"schema": 1, "busy": 1, "world_size": 1, "fingerprint": {}, "records": records, "hardware": {}, **changes}
    path.write_text(json.dumps(tree))
    return path
