"""What-if against the truth: a made-up sharded job, traced as it is and as it would be with the change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stepsight.dataset.graph.program import Program
from stepsight.dataset.traces.read_rank import read_rank
from stepsight.simulator.replay import changes
from stepsight.simulator.replay.replay import replay
from tests.dataset.sharded_job import ShardedJob

Change = Callable[[list[Program]], list[Program]]


def faster(what: str, factor: float) -> Change:
    return lambda graphs: changes.faster(graphs, changes.Tally(), what, factor)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("truth", "change"),
    [
        ({}, lambda graphs: graphs),
        ({"communication": 0.5}, faster("communication", 2.0)),
        ({"communication": 2.0}, faster("communication", 0.5)),
        ({"products": 0.5}, faster("gemm", 2.0)),
        ({"products": 2.0}, faster("gemm", 0.5)),
        ({"host": 0.5}, faster("host", 2.0)),
    ],
    ids=["nothing", "communication/2", "communication*2", "products/2", "products*2", "host/2"],
)
def test_the_answer_is_what_the_changed_job_takes(
    tmp_path: Path, seed: int, truth: dict[str, float], change: Change
) -> None:
    """Without sync events: waits are inferred."""
    graph = read_rank(ShardedJob(seed).run().file.write(tmp_path / "t.json"))
    changed = ShardedJob(seed, **truth).run()
    assert replay(change([graph])).replayed_s == pytest.approx(changed.mean_step_us * 1e-6, rel=0.02)
