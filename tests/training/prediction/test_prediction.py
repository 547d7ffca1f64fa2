import json
from dataclasses import replace
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError, PredictorError, StepsightError
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.training.prediction.ask_many import ask_many, predict_many
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor


def _job(hardware: str = "toy", **parallel: int) -> Job:
    return Job(
        model=ModelSpec(family="gpt", layers=2, hidden=128, heads=4, vocab=512, seq_len=64),
        parallel=ParallelSpec(**parallel),
        batch=BatchSpec(micro_batch=1, global_batch=4, precision="fp32"),
        cluster=ClusterSpec(hardware=hardware, devices_per_node=2, fabric="loopback"),
    )


def test_without_a_predictor_it_says_so_and_is_wide() -> None:
    prediction = predict(_job("local-cpu", dp=2))
    assert "roofline from hardware facts alone" in prediction.source
    assert prediction.low_s < 0.5 * prediction.iteration_time_s < 2 * prediction.iteration_time_s < prediction.high_s


def test_hardware_that_is_neither_measured_nor_a_preset_is_refused() -> None:
    with pytest.raises(JobError, match=r"hardware must be one of .*a100-sxm-80gb.*, got 'toy'.*\.toml file"):
        predict(_job())


def test_a_predictor_for_another_hardware_is_refused(predictor: Predictor) -> None:
    with pytest.raises(PredictorError, match="serves its own hardware"):
        predict(_job("local-cpu"), predictor)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"dp": 2, "zero_stage": 3}])
def test_the_breakdown_adds_up_and_json_is_plain(predictor: Predictor, parallel: dict[str, int]) -> None:
    prediction = predict(_job(**parallel), predictor)
    assert sum(prediction.breakdown.values()) == pytest.approx(prediction.iteration_time_s)
    assert prediction.low_s < prediction.iteration_time_s < prediction.high_s
    assert json.loads(json.dumps(prediction.to_dict()))["memory"]["fits"] is True


def test_an_interval_takes_no_coverage(predictor: Predictor) -> None:
    with pytest.raises(StepsightError, match=r"without must be the name of a source, got 0\.9"):
        predict(_job(dp=2), predictor).interval(0.9)  # type: ignore[arg-type]


def test_what_was_never_measured_is_named(predictor: Predictor) -> None:
    prediction = predict(_job(dp=2), predictor)
    assert any("no embedding was measured" in reason for reason in prediction.unsupported)


def test_more_busy_devices_than_measured_are_named_and_widen_the_interval(predictor: Predictor) -> None:
    job = _job(dp=2)
    crowded = replace(
        job,
        cluster=replace(job.cluster, devices_per_node=8),
        parallel=replace(job.parallel, dp=8),
        batch=replace(job.batch, global_batch=16),
    )
    prediction = predict(crowded, predictor)
    assert prediction.unsupported[0] == "8 devices of a node compute at once: measured with 1 to 2"
    few = predict(job, predictor)
    assert prediction.high_s / prediction.iteration_time_s > few.high_s / few.iteration_time_s


def test_asking_for_many_is_asking_for_each(predictor: Predictor) -> None:
    jobs = [_job(dp=2), _job(tp=2)]
    many = predict_many(jobs, predictor)
    assert [p.iteration_time_s for p in many] == [predict(job, predictor).iteration_time_s for job in jobs]


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden": 2**24, "ffn": 2**24, "heads": 2**10, "vocab": 2**24},
        {"seq_len": 2**24, "heads": 2**6, "head_dim": 64, "vocab": 2**18},
        {"seq_len": 2**20, "fused_attention": False, "layers": 500},
        {"experts": 2**10, "experts_per_token": 8, "ffn": 2**20, "imbalance": 2**10},
    ],
)
def test_the_largest_jobs_that_the_rules_allow_are_answered(sizes: dict[str, Any]) -> None:
    """Nothing overflows on the way."""
    usual = {"family": "llama", "layers": 4, "hidden": 2**12, "heads": 32, "vocab": 2**16, "seq_len": 2**12}
    job = Job(
        model=ModelSpec(**{**usual, **sizes}),
        parallel=ParallelSpec(tp=8, sequence_parallel=True, zero_stage=1),
        batch=BatchSpec(micro_batch=1, global_batch=16),
        cluster=ClusterSpec(hardware="a100-sxm-80gb", nodes=2, devices_per_node=8),
    )
    answer = predict(job)
    assert answer.iteration_time_s > 0 and json.dumps(answer.to_dict(), allow_nan=False)


def _nemo(**parallel: Any) -> Job:
    return Job.from_dict(
        {
            "framework": "nemo",
            "model": {"family": "llama", "layers": 8, "hidden": 4096, "heads": 32, "vocab": 32000, "seq_len": 2048},
            "parallel": {"tp": 2, "pp": 4, **parallel},
            "batch": {"micro_batch": 1, "global_batch": 32},
            "cluster": {"hardware": "h100-sxm-80gb", "nodes": 2, "devices_per_node": 8},
        }
    )


def test_silence_about_virtual_stages_is_answered_both_ways() -> None:
    """Where the framework usually interleaves: the interval holds both jobs', and a warning says so."""
    open_job, one, finest = _nemo(), _nemo(virtual_stages=1), _nemo(virtual_stages=2)
    assert open_job == one and open_job.interleaved is not None and one.interleaved is None
    answers = [predict(job) for job in (open_job, one, finest)]
    assert answers[0].iteration_time_s == answers[1].iteration_time_s
    assert answers[0].low_s == min(answers[1].low_s, answers[2].low_s) < answers[1].low_s
    assert answers[0].high_s == max(answers[1].high_s, answers[2].high_s)
    other = answers[2].iteration_time_s
    assert "1 is taken; 2 would take" in " ".join(answers[0].warnings) and not answers[1].warnings
    assert answers[0].to_dict()["open"] == {
        "virtual_stages": [1, 2],
        "iteration_time_s": [answers[0].iteration_time_s, other],
    }
    many = [replace(open_job, batch=replace(open_job.batch, global_batch=32 * size)) for size in range(1, 10)]
    together = ask_many(many)
    assert (together.low_s[0], together.high_s[0]) == pytest.approx((answers[0].low_s, answers[0].high_s))


def test_a_job_asks_for_the_kernels_of_a_software() -> None:
    """By a part of its name; a name that nobody measured is refused with those that are known."""
    tables = _nemo(virtual_stages=1).to_dict()
    times = [
        predict({**tables, "execution": {"kernels": name}}).iteration_time_s for name in ("", "tensorrt", "sglang")
    ]
    assert times[1] < times[0] == times[2]
    with pytest.raises(PredictorError, match=r"software that this predictor knows \(SGLang .*TensorRT-LLM.*got 'cud'"):
        predict({**tables, "execution": {"kernels": "cud"}})
    eight = {**tables, "batch": {**tables["batch"], "precision": "fp8"}}
    rowwise = {**eight, "batch": {**eight["batch"], "fp8_scaling": "rowwise"}}
    assert predict(rowwise).iteration_time_s > 1.05 * predict(eight).iteration_time_s
