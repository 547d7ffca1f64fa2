"""Which runs a study of boxes has, and what may train."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.job.specs import ParallelSpec
from stepsight.dataset.runs.run_manifest import read_box
from stepsight.experiments.studies.box_cases import (
    MODELS,
    box_cases,
    case,
    collectives_of,
    parallel_specs,
    profiled_boxes,
    sleeping,
    strategy_name,
    training_folders,
)
from stepsight.training.measured.planning import sleeps_of


def test_every_strategy_of_every_size_is_there() -> None:
    names = {found.name for found in box_cases()}
    assert len(names) == len(box_cases())
    assert len(list(parallel_specs(MODELS["gpt2"], 16))) == 14
    assert len(list(parallel_specs(MODELS["bert"], 16))) == 12  # four layers, so no eight or sixteen stages
    for ranks in (4, 8, 16):
        for parallel in parallel_specs(MODELS["gpt2"], ranks):
            assert f"box/gpt2/{strategy_name(parallel)}" in names


def test_names_say_what_differs() -> None:
    spec = MODELS["gpt2"]
    flat, pair = read_box("8x1@100mbit"), read_box("4x2@200mbit")
    assert case("m", spec, flat, ParallelSpec(tp=2, pp=2)).name == "box/m/2M2P2D"
    assert case("m", spec, flat, ParallelSpec(pp=4, schedule="gpipe")).name == "box/m/1M4P2D-gpipe"
    assert case("m", spec, flat, ParallelSpec(bucket_mbytes=2.0)).name == "box/m/1M1P8D-b2"
    assert case("m", spec, pair, ParallelSpec(zero_stage=3)).name == "box/m/1M1P8D-fsdp-4x2@200mbit"


@pytest.mark.parametrize(("stages", "expected"), [(1, 4), (4, 8), (8, 16), (16, 16)])
def test_micro_batches_fill_the_pipeline(stages: int, expected: int) -> None:
    found = case("m", replace(MODELS["gpt2"], layers=16), read_box("16x1@100mbit"), ParallelSpec(pp=stages))
    assert found.job.num_micro_batches == expected


def test_every_case_can_be_slept() -> None:
    for found in box_cases()[::7]:
        sleeps = sleeps_of(found.job, sleeping(found.box))
        assert len(sleeps["paces"]) == found.job.cluster.num_devices


def test_a_slow_rank_sleeps_longer_and_a_slow_link_is_in_the_job() -> None:
    by_name = {found.name: found for found in box_cases()}
    slow = by_name["box/bert/1M1P8D-slow-rank"]
    assert sleeps_of(slow.job, sleeping(slow.box))["paces"] == [1.0, 1.0, 1.0, 1.5, 1.0, 1.0, 1.0, 1.0]
    link = by_name["box/bert/1M4P2D-8x1@100mbit-1slow"]
    assert [(way.node, way.slowdown) for way in link.job.cluster.slow_links] == [(3, 4.0)]


def test_what_judges_lives_apart(tmp_path: Path) -> None:
    for found in box_cases():
        assert (found.folder(tmp_path).parent.name == "judge") == (found.job.cluster.num_devices > 4)
        assert "/" not in found.file_name
    assert max(box.num_ranks for box in profiled_boxes()) == 4
    assert all(work.group_size <= 4 for box in profiled_boxes() for work in collectives_of(box))


def test_a_larger_box_among_those_that_train_is_refused(tmp_path: Path) -> None:
    for name, text in (("small", "4x1@200mbit"), ("large", "8x1@200mbit")):
        folder = tmp_path / "profile" / name
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps({"box": read_box(text).to_dict()}))
    with pytest.raises(CollectError, match="at most 4 ranks may train, got 8"):
        training_folders(tmp_path)
