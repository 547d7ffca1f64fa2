"""Compare predicted peak memory with measured peak memory.

    stepsight experiment memory [RUNS.csv.gz] [--json]

The first reference is PyTorch's own count of every tensor, in training steps of the harness on fake tensors. The second
one is the column memory_gb of a table of published runs, if one is given. Its sources count differently: bytes that the
allocator gave to tensors, bytes that it reserved, or what the device shows. The part that the allocator holds beyond
tensors where memory is not short was fitted on runs of at most 8 GPUs; the table marks them as fitted, and the errors
leave them out. It is more than a job needs, as the allocator gives such blocks back before it fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import Hardware, find_hardware
from stepsight.dataset.job.job import Job
from stepsight.experiments.evaluation.row_jobs import job_of
from stepsight.experiments.evaluation.runs_table import Row as Run
from stepsight.experiments.evaluation.runs_table import read_runs_table
from stepsight.experiments.reports.text_table import Number, table
from stepsight.simulator.memory import StageMemory, estimate_memory

GIB = 2**30
FITTED_GPUS = 8  # the next constant was fitted on runs with at most this many
HELD_SHARE = 0.15  # share of tensors' bytes: blocks that the allocator keeps without a tensor


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One comparison.

    Attributes:
        source, name: Where the truth comes from, and the job.
        truth_bytes, estimate_bytes: At the peak.
        judges: False if a constant was fitted on it.
    """

    source: str
    name: str
    truth_bytes: float
    estimate_bytes: float
    judges: bool = True

    @property
    def error(self) -> float:
        return self.estimate_bytes / self.truth_bytes - 1

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


# --- PyTorch in a fake world ------------------------------------------------------------------------------------------

_SIZES: tuple[dict[str, Any], ...] = (
    {"layers": 4, "hidden": 256, "heads": 4, "vocab": 1024, "seq_len": 256, "micro_batch": 4},
    {"layers": 4, "hidden": 512, "heads": 4, "vocab": 1024, "seq_len": 64, "micro_batch": 1},
    {"layers": 6, "hidden": 512, "heads": 8, "vocab": 8192, "seq_len": 128, "micro_batch": 2},
)
_LLAMA: dict[str, Any] = {"family": "llama", "ffn": 704}
_WAYS: tuple[tuple[int, dict[str, Any]], ...] = (  # rank, changes
    (0, {}),
    (0, {"micro_batches": 3}),
    (0, {**_LLAMA, "kv_heads": 2}),
    (0, {**_LLAMA, "micro_batches": 3}),
    (0, {"tied_embeddings": True}),
    (0, {"recompute": "full"}),
    (0, {**_LLAMA, "recompute": "full", "micro_batches": 2}),
    (0, {"tp": 2}),
    (0, {"tp": 2, "sequence_parallel": True}),
    (0, {**_LLAMA, "tp": 4, "sequence_parallel": True, "micro_batches": 2}),
    (0, {"dp": 8, "zero_stage": 3}),
    (0, {**_LLAMA, "dp": 8, "zero_stage": 3, "micro_batches": 2}),
    (0, {"dp": 4, "zero_stage": 3, "recompute": "full"}),
    (0, {"dp": 4, "zero_stage": 3, "recompute": "full", "micro_batches": 3}),
    (0, {"dp": 4, "tp": 2, "zero_stage": 3, "sequence_parallel": True}),
    # In bf16 the harness has its loss in bf16, unlike other frameworks: a small vocabulary makes this unimportant.
    (0, {"dp": 8, "zero_stage": 3, "precision": "bf16", "vocab": 128}),
    (0, {**_LLAMA, "dp": 64, "zero_stage": 3, "precision": "bf16", "vocab": 128, "recompute": "full"}),
    (0, {"pp": 2, "micro_batches": 4}),
    (1, {"pp": 2, "micro_batches": 4}),
    (1, {"pp": 4, "layers": 4, "micro_batches": 8}),
    (0, {"pp": 4, "layers": 4, "micro_batches": 8, "schedule": "gpipe"}),
    (3, {"pp": 4, "layers": 4, "micro_batches": 4, "recompute": "full"}),
    (2, {"pp": 2, "tp": 2, "micro_batches": 4, "sequence_parallel": True}),
    (0, {"pp": 2, "dp": 2, "micro_batches": 4}),
)
_MODEL = ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "tied_embeddings")


def tracked_job(values: Mapping[str, Any]) -> Job:
    """A job of the harness from sizes and changes."""
    merged: dict[str, Any] = {"family": "gpt", "tp": 1, "pp": 1, "dp": 1, "micro_batches": 1, **values}
    micro, many = merged.pop("micro_batch"), merged.pop("micro_batches")
    model = {key: merged.pop(key) for key in _MODEL if key in merged}
    precision = merged.pop("precision", "fp32")
    devices = merged["tp"] * merged["pp"] * merged["dp"]
    return Job.from_dict(
        {
            "model": model,
            "parallel": merged,
            "batch": {"micro_batch": micro, "global_batch": micro * many * merged["dp"], "precision": precision},
            "cluster": {"hardware": "local-cpu", "devices_per_node": devices, "fabric": "loopback"},
        }
    )


def tracked_rows() -> Iterator[MemoryRow]:
    """Every size with every strategy."""
    for size in _SIZES:
        for rank, change in _WAYS:
            yield tracked_row(tracked_job({**size, **change}), rank)


def tracked_row(job: Job, rank: int = 0) -> MemoryRow:
    """One rank of a job, tracked and estimated."""
    from stepsight.experiments.studies.memory_truth import tracked_peak

    hardware = find_hardware("local-cpu")
    assert hardware is not None
    p = job.parallel
    stage = estimate_memory(job, hardware).stages[rank // (p.tp * p.dp)]
    name = job.name + (f" {p.recompute}" if p.recompute != "none" else "") + (f" rank {rank}" if rank else "")
    return MemoryRow("MemTracker", name, tracked_peak(job, rank), stage.tensors)


# --- published runs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryColumn:
    """What a source's column counts, in GiB.

    Attributes:
        word: That its name holds.
        hardware: A preset with its devices' reserve.
        fragments: Whether blocks that the allocator holds and no tensor fills are in it.
        context: Whether what the driver and libraries hold is in it.
        fused_attention: Of its framework.
    """

    word: str
    hardware: str
    fragments: bool
    context: bool
    fused_attention: bool = True

    def count(self, stage: StageMemory, hardware: Hardware) -> float:
        """The value that the source would have measured."""
        tensors = stage.tensors * (1 + HELD_SHARE) if self.fragments else stage.tensors
        return tensors + hardware.reserved_bytes if self.context else tensors


SOURCES = (
    MemoryColumn("SimuMax", "h100-sxm-80gb", False, False),  # torch.cuda.max_memory_allocated, largest of all ranks
    MemoryColumn("torchtitan", "h100-sxm-80gb", True, False),  # torch.cuda's reserved bytes
    MemoryColumn("BLOOM", "a100-sxm-80gb", True, True, False),  # nvidia-smi
)


def published_job(row: Run, source: MemoryColumn) -> Job:
    """The job of a row, on devices with a known reserve.

    Raises:
        JobError: If the row leaves out what matters, or no job says what ran.
    """
    if source.word == "torchtitan" and row.text("recompute") == "selective":
        raise JobError("selective recomputation is chosen op by op there")
    job = job_of(row).job
    precision = "fp16" if job.batch.precision == "fp16" else "bf16"  # only the products are in fp8
    return replace(
        job,
        model=replace(job.model, fused_attention=source.fused_attention),
        batch=replace(job.batch, precision=precision),
        cluster=replace(job.cluster, hardware=source.hardware),
    )


def published_rows(path: Path) -> tuple[list[MemoryRow], dict[str, int]]:
    """Rows of a table with measured memory, and why others of them were left out."""
    rows: list[MemoryRow] = []
    skipped: dict[str, int] = defaultdict(int)
    for run in read_runs_table(path):
        used = run.real("memory_gb")
        if used is None:
            continue
        source = next((s for s in SOURCES if s.word in run.source), None)
        try:
            if source is None:
                raise JobError("what it counts is unknown")
            job = published_job(run, source)
        except JobError as error:
            skipped[f"{run.source.split()[0]}: {error}"] += 1
            continue
        hardware = find_hardware(source.hardware)
        assert hardware is not None
        memory = estimate_memory(job, replace(hardware, memory_bytes=float("1e15")))
        estimate = source.count(memory.stages[memory.fullest], hardware)
        fitted = source.context and job.cluster.num_devices <= FITTED_GPUS
        rows.append(MemoryRow(source.word, job.name, used * GIB, estimate, not fitted))
    return rows, dict(skipped)


# --- figures ----------------------------------------------------------------------------------------------------------


def summarise_memory(rows: list[MemoryRow]) -> dict[str, dict[str, float]]:
    """Number, median and largest absolute error, and median signed error, by source and over all published runs."""
    groups = defaultdict(list)
    for row in rows:
        if row.judges:
            groups[row.source].append(row.error)
            if row.source != "MemTracker":
                groups["published"].append(row.error)
    return {
        name: {
            "rows": len(errors),
            "median": statistics.median(map(abs, errors)),
            "worst": max(map(abs, errors)),
            "bias": statistics.median(errors),
        }
        for name, errors in groups.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="stepsight experiment memory", description=__doc__, formatter_class=formatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("runs", type=Path, nargs="?", help="table of published runs (.csv.gz)")
    options = parser.parse_args(arguments)
    rows = list(tracked_rows())
    skipped: dict[str, int] = {}
    if options.runs is not None:
        published, skipped = published_rows(options.runs)
        rows += published
    figures = summarise_memory(rows)
    if options.json:
        print(json.dumps({"summary": figures, "rows": [r.to_dict() for r in rows], "skipped": skipped}, indent=1))
        return 0
    lines = [
        [
            r.source,
            r.name,
            Number(r.truth_bytes / 1e9, 3),
            Number(r.estimate_bytes / 1e9, 3),
            Number(100 * r.error),
            "" if r.judges else "fitted",
        ]
        for r in rows
    ]
    print(table(["source", "job", "truth GB", "estimate GB", "error %", ""], lines))
    sums = [[n, f["rows"], *(Number(100 * f[k]) for k in ("median", "worst", "bias"))] for n, f in figures.items()]
    print("\n" + table(["source", "rows", "median %", "worst %", "bias %"], sums))
    for why, count in skipped.items():
        print(f"left out {count}: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
