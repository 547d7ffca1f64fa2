"""Layers per stage: the dynamic program is exact, and uneven stages are never slower than even ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from stepsight import Job, OtherDevices, predict
from stepsight.dataset.base.errors import JobError
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.experiments.search.stage_layers import (
    best_stage_layers,
    least_bottleneck,
    part_seconds,
    with_uneven_stages,
)


def job(layers: int = 8, pp: int = 4, vocab: int = 128000, **parallel: object) -> Job:
    model = {"family": "llama", "layers": layers, "hidden": 1024, "heads": 8, "vocab": vocab, "seq_len": 1024}
    return Job.from_dict(
        {
            "model": model,
            "parallel": {"pp": pp, **parallel},
            "batch": {"micro_batch": 1, "global_batch": 4 * pp, "precision": "fp16"},
            "cluster": {"hardware": "a100-sxm-80gb", "nodes": pp, "devices_per_node": 1},
        }
    )


def shares(layers: int, parts: int) -> list[tuple[int, ...]]:
    return [counts for counts in product(range(layers + 1), repeat=parts) if sum(counts) == layers]


@pytest.mark.parametrize("seed", range(10))
def test_the_dynamic_program_is_exact(seed: int) -> None:
    random = np.random.default_rng(seed)
    intercept, slope = random.uniform(0, 5, 4), random.uniform(0.5, 2, 4)
    least, most = [0, 1, 1, 0], random.integers(3, 9, 4).tolist()
    found = least_bottleneck(intercept, slope, 9, least, most)
    legal = [
        counts
        for counts in shares(9, 4)
        if all(low <= count <= high for low, count, high in zip(least, counts, most, strict=True))
    ]
    longest = [float((intercept + slope * np.array(counts)).max()) for counts in legal]
    assert sum(found) == 9 and found in legal
    assert float((intercept + slope * np.array(found)).max()) == min(longest)


def test_limits_that_cannot_be_kept_give_nothing() -> None:
    assert least_bottleneck(np.zeros(2), np.ones(2), 5, [0, 0], [2, 2]) == ()


def test_no_share_of_layers_is_faster_than_the_one_found() -> None:
    asked = job()
    found = best_stage_layers(asked, "roofline")
    times = {
        counts: predict(replace(asked, parallel=replace(asked.parallel, stage_layers=counts)), "roofline")
        for counts in shares(8, 4)
        if min(counts[1:3]) > 0
    }
    assert found.best.iteration_time_s == pytest.approx(min(p.iteration_time_s for p in times.values()), rel=0.01)
    assert found.gain_percent > 5
    assert found.job.parallel.stage_layers[-1] < 2  # the head takes the time of layers
    assert found.predictions < len(times) / 2


def test_a_small_vocabulary_leaves_even_stages() -> None:
    found = best_stage_layers(job(vocab=512), "roofline")
    assert found.gain_percent >= 0
    assert set(found.job.parallel.stage_layers or (2,)) == {2}


def test_a_slower_node_gets_fewer_layers() -> None:
    asked = job(layers=16, vocab=512)
    mixed = (OtherDevices(nodes=(1,), hardware="v100-sxm-32gb"),)
    found = best_stage_layers(replace(asked, cluster=replace(asked.cluster, mixed=mixed)), "roofline")
    counts = found.job.parallel.stage_layers
    assert counts[1] < min(counts[0], counts[2], counts[3]) and found.gain_percent > 10
    assert part_seconds(predict(found.job, "roofline")).shape == (4,)


def test_virtual_stages_are_shared_out_too() -> None:
    found = best_stage_layers(job(layers=16, virtual_stages=2), "roofline")
    assert found.gain_percent >= 0 and len(found.job.parallel.stage_layers or (2,) * 8) == 8


def test_a_search_is_refined() -> None:
    prediction = predict(job(), "roofline")
    seconds = prediction.iteration_time_s, prediction.low_s, prediction.high_s
    memory = prediction.memory
    even = Choice(prediction.job, memory.peak_bytes, memory.capacity_bytes, seconds, lambda _: prediction)
    refined = with_uneven_stages(SearchResult([even], 1, 1, even), "roofline")
    assert refined.best.seconds is not None and refined.best.seconds[0] < seconds[0]
    assert refined.choices[1] is even and refined.best.prediction is not None
    assert refined.best.prediction.iteration_time_s == refined.best.seconds[0]


def test_a_job_without_a_pipeline_is_refused() -> None:
    with pytest.raises(JobError, match="need a pipeline"):
        best_stage_layers(job(pp=1))
