"""A prediction shows itself in one line, one row and one plot, with the figures of ``to_dict``."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stepsight.dataset.job.job import Job
from stepsight.training.prediction.prediction import Prediction, predict
from stepsight.training.prediction.prediction_views import interval_text, seconds_text


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
