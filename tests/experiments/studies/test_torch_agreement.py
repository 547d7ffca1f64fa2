"""Memory against PyTorch's tracker."""

from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.experiments.studies.torch_agreement import tracked_job, tracked_row

SIZE: dict[str, Any] = {"layers": 2, "hidden": 256, "heads": 4, "vocab": 1024, "seq_len": 128, "micro_batch": 2}
LLAMA: dict[str, Any] = {"family": "llama", "kv_heads": 2, "ffn": 704}

MIXTURE: dict[str, Any] = {**LLAMA, "experts": 4, "experts_per_token": 2, "expert_ffn": 352, "capacity_factor": 1.0}


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
        (0, {"cp": 2, "zero_stage": 3, "context_parallel": "all_gather"}),
        (0, {"cp": 2, "pp": 2, "micro_batches": 4}),
        (0, {**MIXTURE, "dp": 2, "ep": 2, "pp": 2, "micro_batches": 4, "layers": 4}),
    ],
)
def test_within_three_percent_of_pytorchs_tracker(rank: int, change: dict[str, Any]) -> None:
    """Peak bytes of a real training step whose tensors are fake."""
    row = tracked_row(tracked_job({**SIZE, **change}), rank)
    assert abs(row["error"]) <= 0.03, row


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_experts_that_fsdp_leaves_alone_are_updated_with_the_others() -> None:
    """AdamW takes sharded and whole parameters; the estimate counts gathered copies of experts that are whole here."""
    row = tracked_row(tracked_job({**SIZE, **MIXTURE, "dp": 2, "ep": 2, "zero_stage": 3}))
    assert 0 <= row["error"] <= 0.15, row


def test_what_the_fake_world_cannot_run() -> None:
    """DDP reads data that is not there."""
    with pytest.raises(JobError, match="needs zero_stage 3 or pp > 1"):
        tracked_row(tracked_job({**SIZE, "dp": 2}))
