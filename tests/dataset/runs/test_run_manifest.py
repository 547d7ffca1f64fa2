"""Boxes: what they are called, what is refused, and the cluster that a job sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.job.specs import SlowLink
from stepsight.dataset.runs.run_manifest import HARDWARE, Box, read_box

EXAMPLE = Path(__file__).parents[3] / "examples" / "boxes" / "slow-link.toml"


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("4x1@200mbit", Box(4, 1, (200.0,) * 4)),
        ("2x2@1gbit", Box(2, 2, (1000.0,) * 2)),
        ("1x3@0x", None),
        ("8x2@12.5mbit", Box(8, 2, (12.5,) * 8)),
    ],
)
def test_a_box_in_a_word(text: str, box: Box | None) -> None:
    if box is None:
        with pytest.raises(JobError, match=r"as in 4x1@200mbit, or a \.toml file, got '1x3@0x'"):
            read_box(text)
        return
    assert read_box(text) == box == Box.from_dict(box.to_dict())
    assert read_box(box.name) == box
    assert box.num_ranks == box.nodes * box.ranks_per_node


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "box.toml"
    path.write_text(text)
    return str(path)


def test_a_box_in_a_file(tmp_path: Path) -> None:
    """A number holds for every node; a list has one for each."""
    sizes = "nodes = 3\nranks_per_node = 2\n"
    assert read_box(_file(tmp_path, sizes + "mbits_per_s = 100")) == Box(3, 2, (100,) * 3)
    uneven = read_box(_file(tmp_path, sizes + "mbits_per_s = [100, 50, 100]\nlatency_ms = 0.5"))
    assert uneven == Box(3, 2, (100, 50, 100), (0.5, 0.5, 0.5)) == Box.from_dict(uneven.to_dict())
    assert uneven.name == "3x2@100mbit-1slow-0.5ms"
    assert uneven.links.inter_node.latency_s == pytest.approx(650e-6)
    assert read_box(str(EXAMPLE)).mbits_per_s == (200, 200, 50, 200)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes = 2\nranks_per_node = 1", "a box has nodes, ranks_per_node, mbits_per_s and maybe latency_ms"),
        (
            "nodes = 0\nranks_per_node = 1\nmbits_per_s = 9",
            "nodes of a box must be a whole number from 1 to 250, got 0",
        ),
        ("nodes = 2\nranks_per_node = true\nmbits_per_s = 9", "ranks_per_node of a box must be a whole number"),
        ("nodes = 0\nranks_per_node = 1\nmbits_per_s = ['9']", "got 0; mbits_per_s of a box must hold numbers"),
        ("nodes = 2\nranks_per_node = 1\nmbits_per_s = [9]", "one number per node, got 1 for 2"),
        ("nodes = 2\nranks_per_node = 1\nmbits_per_s = 0.5", "numbers from 1 to 100,000, got [0.5, 0.5]"),
        ("nodes = 2\nranks_per_node = 1\nmbits_per_s = ['9', 9]", "numbers from 1 to 100,000"),
        ("nodes = 2\nranks_per_node = 1\nmbits_per_s = 9\nlatency_ms = -1", "latency_ms of a box must hold numbers"),
        ("nodes = 2\nranks_per_node = 1\nmbits_per_s = 9\ncolour = 1", "a box has nodes"),
        ("nodes =", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(JobError) as caught:
        read_box(_file(tmp_path, text))
    assert says in str(caught.value) and "box.toml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "4x1", "4x1@200", "x1@200mbit", "4x1@200mbit ", "0x1@200mbit", "4x1@0mbit", "no.toml"]
)
def test_what_is_no_box_is_refused(text: str) -> None:
    with pytest.raises(JobError):
        read_box(text)


def _job(**cluster: Any) -> Job:
    return Job(
        model=ModelSpec(family="gpt", layers=2, hidden=256, heads=16, vocab=2048, seq_len=128),
        parallel=ParallelSpec(dp=4),
        batch=BatchSpec(micro_batch=1, global_batch=4, precision="fp32"),
        cluster=ClusterSpec(**{"hardware": "local-cpu", "devices_per_node": 4, **cluster}),
    )


def test_a_job_on_a_box_has_its_ranks_and_links() -> None:
    """Ranks of a node share its link; a slow node's link is a slow link of the job's cluster."""
    held = Box(2, 2, (200.0, 50.0)).holds(_job())
    assert (held.cluster.hardware, held.cluster.nodes, held.cluster.devices_per_node) == (HARDWARE, 2, 2)
    assert held.fabric.inter_node.bandwidth_bytes_per_s == pytest.approx(200e6 / 8 / 2)
    assert held.cluster.slow_links == (SlowLink(node=1, slowdown=4.0),)
    assert Job.from_dict(held.to_dict()) == held


def test_a_job_of_more_ranks_is_refused() -> None:
    with pytest.raises(JobError, match="4"):
        read_box("2x1@200mbit").holds(_job())
