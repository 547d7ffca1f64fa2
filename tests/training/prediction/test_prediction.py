from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError, PredictorError, StepsightError
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.experiments.reports.job_texts import prediction_report
from stepsight.training.corrections.intervals import interval_text, seconds_text
from stepsight.training.prediction.ask_many import ask_many, predict_many
from stepsight.training.prediction.prediction import Prediction, predict
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
    assert prediction.extrapolated and " extrapolated, " in repr(prediction)
    assert prediction_report(crowded, prediction)["text"].startswith("extrapolated: 100 % of the time")
    few = predict(job, predictor)
    assert prediction.high_s / prediction.iteration_time_s > few.high_s / few.iteration_time_s


def test_a_job_without_room_for_the_allocators_slack_says_so(predictor: Predictor) -> None:
    job = _job(dp=2)
    need = predict(job, predictor).memory.stages[0].tensors
    hardware = replace(predictor.hardware, memory_bytes=1.02 * need, fragmentation=0.5, reserved_bytes=1e3)
    few = predict(job, replace(predictor, hardware=hardware))
    assert few.memory.tight and "; tight: " in prediction_report(job, few)["text"]


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
    """Where the framework usually interleaves: as usual; the interval holds one chunk's time, and a warning says so."""
    open_job, one, usual = _nemo(), _nemo(virtual_stages=1), _nemo(virtual_stages=2)
    assert open_job == usual and open_job.uninterleaved == one and one.uninterleaved is None
    answers = [predict(job) for job in (open_job, one, usual)]
    assert answers[0].iteration_time_s == answers[2].iteration_time_s
    other = answers[1].iteration_time_s
    assert answers[0].low_s == min(answers[2].low_s, other)
    assert answers[0].high_s == max(answers[2].high_s, other)
    assert "2 is taken" in " ".join(answers[0].warnings) and not answers[1].warnings
    assert answers[0].to_dict()["open"] == {
        "virtual_stages": [2, 1],
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
    assert times[1] != times[0] == times[2]
    with pytest.raises(
        PredictorError, match=r"software that this predictor knows \(.*SGLang .*TensorRT-LLM.*got 'cud'"
    ):
        predict({**tables, "execution": {"kernels": "cud"}})
    eight = {**tables, "batch": {**tables["batch"], "precision": "fp8"}}
    rowwise = {**eight, "batch": {**eight["batch"], "fp8_scaling": "rowwise"}}
    assert predict(rowwise).iteration_time_s > 1.05 * predict(eight).iteration_time_s


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predict(
        {
            "model": {
                "family": "gpt",
                "name": "m" * 80,
                "layers": 8,
                "hidden": 1024,
                "heads": 8,
                "vocab": 1024,
                "seq_len": 512,
            },
            "parallel": {"pp": 4},
            "batch": {"micro_batch": 1, "global_batch": 32},
            "cluster": {"hardware": "a100-sxm-80gb", "nodes": 2, "devices_per_node": 4},
        }
    )


def test_repr_is_one_short_line(prediction: Prediction) -> None:
    """However long the names are."""
    text = repr(prediction)
    assert len(text) < 120 and "\n" not in text
    assert text.startswith("Prediction(") and "on 8 x a100-sxm-80gb)" in text
    assert repr(replace(prediction.job, model=replace(prediction.job.model, name=""))).startswith("Job(gpt-8L-1024h ")


def test_interval_states_a_unit_once() -> None:
    assert interval_text(19.119, 23.616) == "19.12 to 23.62 s"
    assert interval_text(11e-6, 31e-6) == "11.0 to 31.0 us"
    assert interval_text(0.9, 1.1) == "900.0 ms to 1.10 s"


def test_frame_has_one_row_with_the_breakdown(prediction: Prediction) -> None:
    """The breakdown's columns add up to the time, and no figure differs from ``to_dict``."""
    frame, value = prediction.to_frame(), json.loads(json.dumps(prediction.to_dict()))
    assert len(frame) == 1
    row = frame.iloc[0]
    causes = [f"{cause}_s" for cause in value["breakdown"]]
    assert row[causes].sum() == pytest.approx(row["iteration_time_s"])
    for key in ("job", "hardware", "iteration_time_s", "low_s", "high_s", "mfu", "tokens_per_s"):
        assert row[key] == value[key]
    assert row["memory_bytes"] == value["memory"]["peak_bytes"] and row["devices"] == 8


def test_plot_draws_on_given_or_new_axes(prediction: Prediction, tmp_path: Path) -> None:
    """A bar for each cause that shows; a figure can be written without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = prediction.plot()
    assert {label.get_text() for label in axes.get_yticklabels()} >= {"compute", "bubble"}
    axes.figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size
    given = pyplot.subplots()[1]
    assert prediction.plot(given) is given
    pyplot.close("all")


def test_a_job_is_taken_in_three_forms(prediction: Prediction, tmp_path: Path) -> None:
    """A ``Job``, its tables and its file have the same answer."""
    job = prediction.job
    file = tmp_path / "job.json"
    file.write_text(job.to_json())
    for form in (job, job.to_dict(), file, str(file)):
        assert predict(form).iteration_time_s == prediction.iteration_time_s
    with pytest.raises(ValueError, match=r"a job must be a Job, a dict of its tables or the path of a job file, got 3"):
        Job.of(3)  # type: ignore[arg-type]


def test_html_holds_the_answer_and_no_markup_of_names(prediction: Prediction) -> None:
    """A notebook shows time, interval, memory and causes; names cannot bring markup of their own."""
    text = prediction._repr_html_()
    assert text.count("<tr>") == sum(s > 1e-3 * prediction.iteration_time_s for s in prediction.breakdown.values())
    assert "per iteration, 90 % interval" in text and "compute" in text and " GB" in text
    named = replace(prediction.job, model=replace(prediction.job.model, name="<script>"))
    assert "<script>" not in replace(prediction, job=named)._repr_html_()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.0 ms"), (9e-5, "90.0 us"), (1e-4, "0.1 ms"), (2.0, "2.00 s"), (1e300, "1e+300 s")]
)
def test_times_keep_their_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
