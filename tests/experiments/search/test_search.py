"""The search finds what enumeration finds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.search import search
from stepsight.experiments.search.search_report import search_report
from stepsight.experiments.search.settings import Space
from stepsight.experiments.search.strategies import Grid, legal_degrees, strategies

SMALL = Space(schedules=(("1f1b", 1),), zero_stages=(0, 1), recompute=("none", "full"), micro_batches=(1, 2))


@pytest.fixture
def job() -> Job:
    return Job.from_dict(
        {
            "model": {"family": "gpt", "layers": 8, "hidden": 1024, "heads": 8, "vocab": 1024, "seq_len": 512},
            "batch": {"micro_batch": 1, "global_batch": 32},
            "cluster": {"hardware": "a100-sxm-80gb", "nodes": 2, "devices_per_node": 4},
        }
    )


def test_same_best_as_enumeration(job: Job) -> None:
    """The search by bounds finds the best of all strategies, asks about some of them, and says that it is optimal."""
    found, reference = search(job, space=SMALL), search(job, space=SMALL, sampler="enumerate")
    assert found.evaluated < reference.evaluated == found.legal == reference.legal
    assert found.best.seconds == pytest.approx(reference.best.seconds)
    assert found.gap_percent == reference.gap_percent == 0 and found.proof == "optimal"
    assert found.best.prediction is not None
    assert found.best.prediction.iteration_time_s == pytest.approx(found.best.seconds[0])
    assert found.best.prediction.memory.peak_bytes == found.best.peak_bytes == found.best.memory.peak_bytes


def test_the_best_few_are_proved(job: Job) -> None:
    """With ``top`` the first rows are those of the enumeration, not the best of what happened to be asked about."""
    few, reference = search(job, space=SMALL, top=12), search(job, space=SMALL, sampler="enumerate")
    times = [[choice.timed[0] for choice in one.choices[:12]] for one in (few, reference)]
    assert times[0] == pytest.approx(times[1]) and few.evaluated < reference.evaluated
    with pytest.raises(StepsightError, match="top must be >= 1"):
        search(job, space=SMALL, top=0)


def test_a_gap_is_kept_and_limits_are_told(job: Job) -> None:
    """With a gap fewer are asked about, and the best is within it; a search that was cut short says what it knows."""
    exact, near = search(job, space=SMALL), search(job, space=SMALL, gap=50)
    assert near.evaluated <= exact.evaluated
    assert near.best.seconds[0] <= 1.5 * exact.best.seconds[0] and 0 <= near.gap_percent <= 50
    for cut in (search(job, space=SMALL, trials=2), search(job, space=SMALL, timeout_s=1e-9)):
        assert cut.evaluated in (0, 2) and cut.best.seconds[0] >= exact.best.seconds[0]
        assert cut.best.seconds[0] / exact.best.seconds[0] <= 1 + cut.gap_percent / 100


def test_tpe_comes_close(job: Job) -> None:
    """With fewer trials than strategies, TPE is within 10 % of the best."""
    found, reference = search(job, space=SMALL, trials=40, sampler="tpe"), search(job, space=SMALL, sampler="enumerate")
    assert found.best.prediction.iteration_time_s <= 1.1 * reference.best.prediction.iteration_time_s


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_every_trial_is_another_strategy(job: Job, sampler: str) -> None:
    """No trial repeats one, until there are none left; the same seed asks the same."""
    legal = search(job, space=SMALL, sampler="enumerate").legal
    once, again = (search(job, space=SMALL, trials=legal - 5, sampler=sampler, seed=3) for _ in range(2))
    assert once.evaluated == len({choice.job for choice in once.choices}) == legal - 5
    assert [choice.job for choice in once.choices] == [choice.job for choice in again.choices]
    assert search(job, space=SMALL, trials=legal + 50, sampler=sampler).evaluated == legal


def test_parameters_name_a_strategy(job: Job) -> None:
    grid = Grid(job, SMALL)
    assert grid.index(grid.params(7)) == 7 and grid.index({"layout": "tp9"}) is None


def test_strategies_are_legal_and_distinct(job: Job) -> None:
    """Everything suggested uses all devices and keeps model, batch and cluster."""
    jobs = list(strategies(job))
    assert len(set(jobs)) == len(jobs) > 50
    for candidate in jobs:
        parallel = candidate.parallel
        assert parallel.tp * parallel.pp * parallel.dp == 8 and parallel.tp <= 4
        assert (candidate.model, candidate.batch.global_batch) == (job.model, 32)


def test_memory_is_a_constraint(job: Job) -> None:
    """A model too large for one device is only placed where it fits; too large for all is an error."""
    large = replace(job, model=replace(job.model, layers=64, hidden=8192, heads=64, ffn=32768, kv_heads=64))
    found = search(large, space=SMALL, sampler="enumerate")
    assert not any(choice.fits for choice in found.choices) and found.gap_percent is None
    proved = search(large, space=SMALL)
    assert proved.proof.startswith(f"no strategy fits in memory: all {found.legal} legal ones are too large; ")
    assert proved.choices[0].peak_bytes == min(choice.peak_bytes for choice in found.choices)  # and how far it is said
    assert not proved.undecided
    assert [choice for choice in found.choices if choice.prediction] == [found.own]  # what was asked about is answered
    with pytest.raises(StepsightError, match="no strategy fits"):
        _ = found.best


def test_what_was_not_evaluated_is_not_said_to_be_too_large(job: Job) -> None:
    """A search that is stopped before it has found a strategy that fits says that others may."""
    model = replace(job.model, layers=32, hidden=4096, heads=32, ffn=16384, kv_heads=32)
    one = replace(job, model=model, parallel=replace(job.parallel, tp=1, pp=1, dp=8, zero_stage=0))
    stopped = search(one, trials=1)
    assert not stopped.choices[0].fits and stopped.gap_percent is None and stopped.undecided > 0
    with pytest.raises(StepsightError, match=r"none of the 1 strategies evaluated fits .* may fit were not evaluated"):
        _ = stopped.best
    whole = search(one)
    assert whole.best.fits and whole.gap_percent == 0 and whole.undecided == 0


@pytest.mark.parametrize("option", [{"gap": "x"}, {"trials": 1.5}, {"timeout_s": "a"}, {"top": True}])
def test_options_of_another_type_are_refused(job: Job, option: dict[str, Any]) -> None:
    with pytest.raises(StepsightError, match=f"{next(iter(option))} must be a"):
        search(job, **option)


def test_bad_input(job: Job) -> None:
    """Unknown samplers and impossible spaces are refused."""
    with pytest.raises(StepsightError, match="got 0"):
        search(job, trials=0)
    with pytest.raises(StepsightError, match="sampler"):
        search(job, sampler="magic")
    with pytest.raises(StepsightError, match="no legal strategy"):
        search(job, space=Space(micro_batches=(64,)))
    assert legal_degrees(job, Space(max_tp=1)) == [(1, 1, pp, 1, 8 // pp) for pp in (1, 2, 4, 8)]


def test_foreign_files_and_unanswerable_jobs_are_left_alone(job: Job, tmp_path: Path) -> None:
    """A file that is no journal keeps its content; unknown hardware and seeds below 0 are refused at once."""
    path = tmp_path / "notes.txt"
    path.write_text("hi")
    with pytest.raises(StepsightError, match="journal"):
        search(job, space=SMALL, trials=1, storage=str(path))
    assert path.read_text() == "hi"
    with pytest.raises(StepsightError, match=r"preset|fabric"):
        search(replace(job, cluster=replace(job.cluster, hardware="abacus")), space=SMALL, trials=1)
    with pytest.raises(StepsightError, match="seed"):
        search(job, space=SMALL, trials=1, seed=-1)


@pytest.mark.parametrize("sampler", ["auto", "tpe", "random"])
def test_the_own_strategy_is_tried_first(job: Job, sampler: str) -> None:
    """So one trial returns it, and more return nothing slower."""
    own = replace(job, parallel=replace(job.parallel, tp=4, dp=2), batch=replace(job.batch, micro_batch=2))
    (choice,) = search(own, space=SMALL, trials=1, sampler=sampler).choices
    assert choice.job == own
    found = search(own, space=SMALL, trials=5, sampler=sampler)
    assert found.own is not None and found.best.seconds <= found.own.seconds and found.evaluated == 5


def test_what_goes_with_the_job_bounds_the_space(job: Job) -> None:
    """What is offloaded is not computed again; a framework's pipelines are its own, for a job of one stage too."""
    offloaded = replace(job, parallel=replace(job.parallel, offload_activations=True))
    assert {found.parallel.recompute for found in strategies(offloaded, SMALL)} == {"none"}
    piped = [found.parallel for found in strategies(replace(job, framework="bloom"), SMALL) if found.parallel.pp > 1]
    assert piped and {(p.runtime, p.schedule, p.virtual_stages) for p in piped} == {("deepspeed", "1f1b", 1)}


def test_a_strategy_outside_of_the_space_is_kept(job: Job) -> None:
    """What the space does not hold can still be best: it is no worse for that."""
    own = replace(job, parallel=replace(job.parallel, pp=4, dp=2, zero_stage=2, stage_layers=(1, 3, 3, 1)))
    worse = Space(max_tp=1, micro_batches=(1,), schedules=(("gpipe", 1),), zero_stages=(3,), recompute=("full",))
    found = search(own, space=worse, sampler="enumerate")
    assert found.evaluated == found.legal == len(found.choices) - 1 and found.own in found.choices
    assert Grid(own, worse).find(own) is None


def test_what_does_not_fit_is_not_timed(job: Job) -> None:
    """Only strategies that fit are predicted, beside the job itself."""
    large = replace(job, model=replace(job.model, layers=32, hidden=4096, heads=32, ffn=16384, kv_heads=32))
    found = search(large, space=SMALL, sampler="enumerate")
    fit = [choice.job for choice in found.choices if choice.fits]
    assert 0 < len(fit) < found.evaluated and {c.job for c in found.choices if c.seconds} == {large, *fit}
    report = search_report(large, found, found.evaluated)
    assert report["too_large"] == found.evaluated - len(fit) and "too large for the devices' memory" in report["text"]


def test_what_is_the_same_is_tried_once(job: Job) -> None:
    """Selective recomputation frees nothing of fused attention, and one micro-batch has one order."""
    recompute = {candidate.parallel.recompute for candidate in strategies(job)}
    assert recompute == {"none", "full"}
    unfused = replace(job, model=replace(job.model, fused_attention=False))
    assert "selective" in {candidate.parallel.recompute for candidate in strategies(unfused)}
    gpipe = [c for c in strategies(job) if c.parallel.schedule == "gpipe"]
    assert gpipe and all(candidate.num_micro_batches > 1 for candidate in gpipe)


def test_deepspeed_has_one_schedule(job: Job) -> None:
    """A search suggests nothing that its runtime refuses."""
    own = replace(job, parallel=replace(job.parallel, runtime="deepspeed"))
    assert {(c.parallel.schedule, c.parallel.virtual_stages) for c in strategies(own)} == {("1f1b", 1)}


def test_warnings_are_shown(job: Job) -> None:
    """What looks like a mistake in the job concerns its search too."""
    links = {"bandwidth_gbytes_per_s": 4800.0, "latency_us": 5.0}
    odd = replace(job, cluster=replace(job.cluster, fabric={"intra_node": links, "inter_node": links}))
    text = search_report(odd, search(odd, space=SMALL, trials=1), 1)["text"]
    assert odd.warnings and all(f"warning: {warning}" in text for warning in odd.warnings)
