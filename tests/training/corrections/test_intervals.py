"""Intervals of predictors from public tables: as wide as errors on other sources' published runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.job.job import Job
from stepsight.simulator.durations.latency_model import preset_latency
from stepsight.training.corrections.calibration import Calibration, JobCorrection, fit_scale
from stepsight.training.corrections.intervals import (
    LEAST_EXCESS,
    ROOFLINE_LOG,
    UNSUPPORTED_LOG,
    HeldBackErrors,
    Intervals,
    JobClass,
    NodeDoubts,
    Widths,
    class_of,
    conformal_quantile,
    fit_doubts,
    fit_intervals,
    job_class,
    published_widths,
)
from stepsight.training.prediction.ask_many import ask_many
from stepsight.training.prediction.prediction import ROOFLINE, predict
from stepsight.training.prediction.work_doubts import interval_ends

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt3-175b-1024.toml"
JOB = Job.from_file(EXAMPLE)


LIKE = class_of(JOB, 0.5)


def offs(error: float, count: int) -> tuple[tuple[JobClass, float], ...]:
    """Runs as much slower as faster than predicted."""
    return tuple((LIKE, (-1) ** index * error) for index in range(count))


def test_errors_of_the_own_source_do_not_count() -> None:
    widths = Widths({"a": offs(0.1, 40), "b": offs(0.1, 40), "c": offs(0.5, 400)})
    alone = Widths({name: rows for name, rows in widths.sources.items() if name != "c"})
    assert widths.ends_of(LIKE, without="c") == pytest.approx(alone.ends_of(LIKE))
    assert max(alone.ends_of(LIKE)) < 0.15 < 0.35 < min(widths.ends_of(LIKE))


def test_wider_by_what_is_not_at_the_peak_by_kind_and_by_little_evidence() -> None:
    """In proportion to the logarithm of the time over that of the FLOP at the peak; wider with unfused attention, and
    for kinds of models and chips that few sources ran.
    """
    widths = Widths({name: offs(0.1, 30) for name in "abcdef"})
    known = np.array(widths.ends_of(LIKE))
    assert widths.ends_of(class_of(JOB, 0.25)) == pytest.approx(2 * known)
    assert widths.ends_of(class_of(JOB, 1.5)) == pytest.approx(LEAST_EXCESS / math.log(2) * known)
    for kind in (("mixture", *LIKE.kind[1:]), (*LIKE.kind[:2], "x9")):
        assert np.array(widths.ends_of(replace(LIKE, kind=kind))) == pytest.approx(1.5 / (1 + 0.5 / 7) * known)
    unfused = np.array(widths.ends_of(replace(LIKE, kind=("dense", "unfused", LIKE.kind[2]))))
    assert unfused == pytest.approx((1.3 + 0.5 / 7) / (1 + 0.5 / 7) * known)
    assert job_class(False, True, "gb200-sxm-186gb", 0.5).kind[2] == "b2"


def test_an_interval_reaches_further_where_runs_are_slower_than_predicted() -> None:
    rows = tuple((like, max(2 * error, error)) for like, error in offs(0.1, 60))
    down, up = Widths({"a": rows}).ends_of(LIKE)
    assert up == pytest.approx(2 * down)


def test_the_preset_is_read_as_it_was_written() -> None:
    for widths in (published_widths(), published_widths(of_facts=True)):
        assert Widths.from_dict(widths.to_dict()) == widths
        assert len(widths.sources) >= 5
        for rows in widths.sources.values():
            assert all(like.excess > 0 and abs(error) < 2 for like, error in rows)


def test_a_shipped_predictor_is_narrower_than_a_roofline() -> None:
    """By default, and whatever source is left out."""
    answer, facts = predict(JOB), predict(JOB, ROOFLINE)
    assert 1.0 < answer.high_s / answer.iteration_time_s < facts.high_s / facts.iteration_time_s
    for name in published_widths().sources:
        low, high = answer.interval(without=name)
        assert low < answer.iteration_time_s < high


def test_facts_of_a_device_alone_are_too_fast_rather_than_too_slow() -> None:
    """By their errors on published runs; facts of a CPU are within a factor of three."""
    job = replace(JOB, cluster=replace(JOB.cluster, hardware="mi325x-256gb"))
    found, together = predict(job, ROOFLINE), ask_many([job], ROOFLINE)
    assert 0.8 < found.low_s / found.iteration_time_s < 1.0 < 1.5 < found.high_s / found.iteration_time_s < 3.0
    assert (together.low_s[0], together.high_s[0]) == pytest.approx(found.interval())
    latency = preset_latency("local-cpu", JOB.fabric)
    assert latency is not None
    assert interval_ends(None, JOB, JobCorrection(0.0, ()), 0.0, 0.4, latency) == (ROOFLINE_LOG, ROOFLINE_LOG)


def test_more_experts_are_less_certain() -> None:
    """Fewer sources have published runs of mixtures, and none do on some chips."""
    model = replace(JOB.model, family="llama", experts=8, experts_per_token=2, expert_ffn=4096)
    like = class_of(replace(JOB, model=model), 0.5)
    assert like.kind[0] == "mixture" != LIKE.kind[0]
    assert published_widths().ends_of(like) > published_widths().ends_of(LIKE)


def test_own_intervals_grow_with_the_devices_beyond_a_node() -> None:
    """By 5 % with each doubling beyond eight; a width that no run gave does not."""
    judged = Intervals(0.1, num_runs=20)
    widths = [judged.half_width(0.0, devices) for devices in (1, 8, 16, 1024)]
    assert widths == pytest.approx([0.1, 0.1, 0.105, 0.135])
    assert Intervals(0.1).half_width(0.0, 1024) == 0.1


def test_intervals_hold_what_they_promise_on_exchangeable_runs() -> None:
    rng = np.random.default_rng(0)
    held = [abs(rng.normal()) <= fit_intervals(rng.normal(size=14), 0.0).half_width_log for _ in range(2000)]
    assert 0.88 <= np.mean(held) <= 0.97


def test_an_interval_is_never_narrower_than_the_measurements_spread() -> None:
    assert fit_intervals(np.zeros(20), 0.04).half_width_log == 0.04


def test_few_runs_give_wider_intervals() -> None:
    residuals = np.array([0.05, -0.04, 0.03])
    assert fit_intervals(residuals, 0.0).half_width_log > 0.05
    assert fit_intervals(np.zeros(0), 0.0) == Intervals()


def test_what_was_never_measured_widens_the_interval() -> None:
    assert Intervals(0.1).half_width(unsupported_share=0.5) == pytest.approx(0.1 + UNSUPPORTED_LOG / 2)


def test_a_common_bias_is_corrected_but_shrunk() -> None:
    predicted = np.linspace(1, 2, 12)
    scale = fit_scale(predicted, predicted * 1.1).scale
    assert 1.05 < scale < 1.1


def test_noise_is_not_corrected() -> None:
    rng = np.random.default_rng(3)
    assert fit_scale(np.ones(12), np.exp(rng.normal(0, 0.05, 12) * np.tile([1, -1], 6))) == Calibration()


def test_the_quantile_holds_nine_of_ten_new_ones() -> None:
    """Over many draws of few scores."""
    rng = np.random.default_rng(0)
    held = [abs(rng.normal()) <= conformal_quantile(np.abs(rng.normal(size=25)).tolist()) for _ in range(4000)]
    assert 0.88 < np.mean(held) < 0.95
    assert conformal_quantile([0.1] * 5) > 0.1  # too few for the aim
    assert conformal_quantile([]) == ROOFLINE_LOG
    assert conformal_quantile([0.1] * 5, too_few=3.0) == 3.0 and conformal_quantile([0.1] * 9, too_few=3.0) == 0.1


def _runs(count: int, seed: int = 0, shared: float = 0.0) -> list[HeldBackErrors]:
    """Errors of products are a tenth, those of additions a third."""
    rng = np.random.default_rng(seed)
    stds = np.array([0.1, 0.3] * 40)
    weights = np.full(80, 1 / 80)
    return [
        HeldBackErrors(("linear", "add") * 40, ("forward",) * 80, stds * rng.normal(size=80) + shared * each, weights)
        for each in rng.normal(size=count)
    ]


def test_intervals_of_kinds_hold_nine_of_ten_nodes_of_other_runs() -> None:
    doubts = fit_doubts(_runs(60))
    assert 2 < doubts.half("add", "forward") / doubts.half("linear", "forward") < 4
    for kind, own in (("linear", slice(0, None, 2)), ("add", slice(1, None, 2))):
        inside = [np.abs(run.logs[own]) <= doubts.half(kind, "forward") for run in _runs(50, seed=1)]
        assert 0.85 < np.mean(inside) < 0.95


@pytest.mark.parametrize(("count", "most"), [(4, 1.0), (20, 0.97)])
def test_few_runs_that_differ_hold_nine_of_ten_nodes_too(count: int, most: float) -> None:
    """On average over draws, although the nodes of a run are off by what it has in common."""
    inside = [
        np.abs(run.logs) <= np.where(np.arange(80) % 2, doubts.half("add", "forward"), doubts.half("linear", "forward"))
        for seed in range(20)
        for doubts in [fit_doubts(_runs(count, seed, shared=1.0))]
        for run in _runs(20, seed=100 + seed, shared=1.0)
    ]
    assert 0.89 < np.mean(inside) < most


def test_a_kind_of_few_runs_has_the_interval_of_all() -> None:
    few = HeldBackErrors(("copy",), ("forward",), np.array([2.0]), np.ones(1))
    doubts = fit_doubts([*_runs(8), few])
    assert doubts.half("copy") == doubts.half("sort", "backward") == doubts.halves[""]
    assert NodeDoubts({}).half("copy") == ROOFLINE_LOG


def test_what_runs_share_does_not_average_out() -> None:
    apart, together = fit_doubts(_runs(30)).shared, fit_doubts(_runs(30, shared=0.5)).shared
    assert apart < 0.1 and together > 0.7
    shares, halves = np.full(100, 0.01), np.full(100, 0.2)
    assert NodeDoubts({}, 0.0).of_sum(shares, halves) == pytest.approx(0.02)
    assert NodeDoubts({}, 1.0).of_sum(shares, halves) == pytest.approx(0.2)


def test_doubts_are_saved_and_wild_ones_refused() -> None:
    doubts = fit_doubts(_runs(5))
    assert NodeDoubts.from_dict(doubts.to_dict()) == doubts
    with pytest.raises(ValueError, match="doubts must lie from 0"):
        NodeDoubts.from_dict({"halves": {"": -1.0}, "shared": 0.5})


def test_intervals_of_recommendation_models_are_wide() -> None:
    """Their time is lookups and messages, hardly any of it FLOP at the peak."""
    found = predict(Job.from_file(EXAMPLE.with_name("dlrm-dcnv2-64h100.toml")))
    assert found.hfu < 0.2 and found.high_s / found.low_s > 1.3


def test_bytes_of_lookups_are_as_certain_as_flop() -> None:
    """Intervals of recommendation models are narrower than by their FLOP alone, also of several at once."""
    job = Job.from_file(EXAMPLE.with_name("dlrm-dcnv2-64h100.toml"))
    found = predict(job)
    by_flop = published_widths().ends_of(class_of(job, found.hfu))
    assert math.log(found.high_s / found.iteration_time_s) < 0.7 * by_flop[1]
    together = ask_many([job])
    assert (together.low_s[0], together.high_s[0]) == pytest.approx(found.interval())
