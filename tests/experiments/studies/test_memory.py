"""Memory against PyTorch's tracker, and against published runs where their table is at hand."""

import os
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.experiments.evaluation.runs_table import Row
from stepsight.experiments.studies.memory import (
    SOURCES,
    published_job,
    published_rows,
    summarise_memory,
    tracked_job,
    tracked_row,
)

ROOT = Path(__file__).parents[3]
RUNS = Path(os.environ.get("STEPSIGHT_DATA", ROOT.parent / "shared" / "data")) / "e2e" / "published_runs.csv.gz"
SIZE: dict[str, Any] = {"layers": 2, "hidden": 256, "heads": 4, "vocab": 1024, "seq_len": 128, "micro_batch": 2}
LLAMA: dict[str, Any] = {"family": "llama", "kv_heads": 2, "ffn": 704}


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize(
    ("rank", "change"),
    [
        (0, {"micro_batches": 2}),
        (0, {**LLAMA, "recompute": "full", "layers": 4}),
        (0, {"tp": 2, "sequence_parallel": True}),
        (0, {**LLAMA, "dp": 8, "zero_stage": 3, "layers": 4}),
        (0, {"dp": 4, "zero_stage": 3, "precision": "bf16", "vocab": 128, "layers": 4}),
        (1, {"pp": 2, "micro_batches": 4, "layers": 4}),
        (0, {"pp": 2, "tp": 2, "micro_batches": 4, "schedule": "gpipe"}),
    ],
)
def test_within_three_percent_of_pytorchs_tracker(rank: int, change: dict[str, Any]) -> None:
    """Peak bytes of a real training step whose tensors are fake."""
    row = tracked_row(tracked_job({**SIZE, **change}), rank)
    assert abs(row["error"]) <= 0.03, row


def test_what_the_fake_world_cannot_run() -> None:
    """DDP reads data that is not there."""
    with pytest.raises(JobError, match="needs zero_stage 3 or pp > 1"):
        tracked_row(tracked_job({**SIZE, "dp": 2}))


@pytest.mark.skipif(not RUNS.exists(), reason=f"no table of published runs at {RUNS} (set STEPSIGHT_DATA)")
def test_published_runs() -> None:
    """Median error of each source at most 8 %; every row that says how much is compared or left out with a reason."""
    rows, skipped = published_rows(RUNS)
    assert len(rows) > 4 * sum(skipped.values())
    figures = summarise_memory(rows)
    assert figures["published"]["median"] <= 0.08
    for source in SOURCES:
        assert figures[source.word]["median"] <= 0.09, source.word


def test_rows_that_leave_out_what_matters() -> None:
    """An empty cell without a usual value is a reason to leave a row out."""
    with pytest.raises(JobError, match="selective recomputation is chosen op by op there"):
        published_job(Row({"recompute": "selective"}), SOURCES[1])
