"""Which software a prediction stands for, and what it says of versions that it does not know."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.job.frameworks import FRAMEWORKS
from stepsight.dataset.job.job import Job
from stepsight.training.corrections.releases import TAUGHT, drift_of, rate_of
from stepsight.training.prediction.ask_many import predict, predict_many
from stepsight.training.predictor.software_used import SPREAD_LOG, software_change

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama3-70b-fsdp-512.toml"


def job_with(precision: str = "bf16", hardware: str = "h100-sxm-80gb", **execution: str) -> Job:
    """A small job whose execution states software."""
    return Job.from_dict(
        {
            "model": {"family": "llama", "layers": 2, "hidden": 1024, "heads": 8, "vocab": 32000, "seq_len": 2048},
            "batch": {"micro_batch": 1, "global_batch": 8, "precision": precision},
            "cluster": {"hardware": hardware, "devices_per_node": 8},
            "execution": execution,
        }
    )


def test_the_answer_names_whose_kernels_it_took() -> None:
    """With the version of its table; another software gives another time."""
    usual, other = predict(job_with()), predict(job_with(kernels="TensorRT-LLM"))
    flash = "SGLang (FlashAttention-3) 0.5.14"
    assert usual.to_dict()["software"]["kernels"] == {"gemm": "SGLang (torch) 0.5.14", "attention": flash}
    assert other.software_used.kernels == dict.fromkeys(("gemm", "attention"), "TensorRT-LLM 1.3.0rc20")
    assert usual.iteration_time_s != other.iteration_time_s and not other.software_used.doubts
    same = predict(job_with(kernels="TensorRT-LLM 1.3.0rc20"))
    assert same.iteration_time_s == other.iteration_time_s


def test_unknown_versions_of_kernels_are_refused() -> None:
    """The error names the version that was measured."""
    with pytest.raises(PredictorError, match=r"TensorRT-LLM was measured in 1\.3\.0rc20, got 'TensorRT-LLM 0.20'"):
        predict(job_with(kernels="TensorRT-LLM 0.20"))
    with pytest.raises(PredictorError, match=r"knows \(.*TensorRT-LLM.*attention_kernels"):
        predict(job_with(kernels="cudnn"))


def test_software_that_ran_other_ops_is_in_doubt() -> None:
    """DeepGEMM was measured in 8 bits alone: in bf16 the predictor's own kernels answer, with a warning."""
    found = predict(job_with(hardware="b200-sxm-180gb", kernels="DeepGEMM"))
    assert any("DeepGEMM were not measured for all ops: gemm by Transformer Engine" in text for text in found.warnings)
    eight = predict(job_with("fp8", "b200-sxm-180gb", kernels="DeepGEMM"))
    assert eight.software_used.kernels["gemm/fp8"] == "DeepGEMM"


def test_stated_versions_change_no_time_and_the_answer_says_so() -> None:
    """A version of NCCL that the model does not describe is a warning."""
    plain, job = predict(job_with()), job_with(cuda="12.4", nccl="2.29.2", container="my/image")
    found = predict(job)
    assert found.iteration_time_s == plain.iteration_time_s and not found.software_used.doubts
    assert [text.split(":")[0] for text in found.software_used.unused] == [
        "container my/image",
        "cuda 12.4 does not change the answer",
    ]
    old = predict(replace(job, execution=replace(job.execution, nccl="2.8.4")))
    assert any("execution.nccl is 2.8.4" in text for text in old.warnings)
    assert not predict(job, "roofline").software_used.doubts


def test_a_date_before_its_container_is_in_doubt() -> None:
    nemo = "nvcr.io/nvidia/nemo:24.07"
    early, same = (predict(job_with(container=nemo, date=date), "roofline") for date in ("2019-01", "2024"))
    assert not same.warnings and not same.software_used.unused
    assert any("before the release of container" in text for text in early.warnings)


@pytest.mark.parametrize(
    "image", ["foo:24.07", "pytorch:24.07-py3", "my-container:24.07", "foo@sha256:24.07", "nemo-x:24"]
)
def test_a_container_of_unknown_name_is_told(image: str) -> None:
    asked = predict(nemo("2024-07"), "roofline", container=f"nvcr.io/nvidia/{image}")
    told = [text for text in asked.warnings if "is no known image of nemo" in text]
    assert len(told) == (not image.startswith("nemo"))
    assert all("only its month, 2024-07, counts" in text for text in told)


RATE_LOG = FRAMEWORKS["nemo"].drift_log  # a month


def nemo(date: str) -> Job:
    return Job.of(EXAMPLE, {"framework": "nemo", "execution.date": date})


def test_a_later_release_is_faster_and_doubted_by_the_months_between() -> None:
    change = software_change(nemo("2025-01"), nemo("2025-05"))
    assert change.log_factor == pytest.approx(4 * RATE_LOG) and change.log_factor < 0
    assert change.doubt_log == pytest.approx(2 * SPREAD_LOG)
    back = software_change(nemo("2025-05"), nemo("2025-01"))
    assert (back.log_factor, back.doubt_log) == (-change.log_factor, change.doubt_log)


def test_outside_of_the_dated_runs_the_drift_stands_still_and_the_doubt_grows() -> None:
    last, later, latest = (software_change(nemo("2025-01"), nemo(date)) for date in ("2026-05", "2027-01", "2029-01"))
    assert later.doubt_log > last.doubt_log
    assert latest.log_factor == later.log_factor and latest.doubt_log > later.doubt_log


@pytest.mark.parametrize(
    ("hardware", "precision", "new"),
    [
        ("b200-sxm-180gb", "fp8", True),
        ("gb300-sxm-279gb", "nvfp4", True),
        ("b300-sxm-270gb", "bf16", False),
        ("h100-sxm-80gb", "fp8", False),
    ],
)
def test_narrow_types_of_new_chips_drift_faster(hardware: str, precision: str, new: bool) -> None:
    """Software for 8 and 4 bits of Blackwell improves by more a month, from the middle of the months of its runs."""
    there = {"cluster.hardware": hardware, "cluster.fabric": "", "batch.precision": precision, "framework": "nemo"}
    usual, later = (Job.of(EXAMPLE, {**there, "execution.date": date}) for date in ("2025-12", "2026-04"))
    change = software_change(usual, later)
    assert (change.log_factor < 2 * 4 * RATE_LOG) == new and change.log_factor <= 4 * RATE_LOG
    assert (rate_of(usual)[1] == "2025-12") == new == (drift_of(usual) == 0.0)


def test_another_profile_of_the_software_brings_its_facts_and_the_drift() -> None:
    change = software_change(nemo("2025-01"), nemo("2026-06"))
    assert change.log_factor == pytest.approx(17 * RATE_LOG) and "profile nemo-2026-06 instead of nemo" in change.text


def test_a_stated_release_changes_the_time_of_shipped_predictors_alone() -> None:
    """The same job with the date of the profile takes as long as without a date; a roofline knows of no releases."""
    plain, usual = Job.of(EXAMPLE, {"framework": "nemo"}), nemo(FRAMEWORKS["nemo"].drift_from)
    later, early = nemo("2025-08"), nemo("2024-03")
    base = predict(plain).iteration_time_s
    assert predict(usual).iteration_time_s == base and not predict(usual).software_used.release
    assert predict(later).iteration_time_s == pytest.approx(base * math.exp(4 * RATE_LOG))
    assert "2025-08" in predict(later).software_used.release
    first = predict(nemo(TAUGHT[0])).iteration_time_s
    assert predict(early).iteration_time_s == first > base
    assert predict_many([later, plain])[0].iteration_time_s == pytest.approx(predict(later).iteration_time_s)
    assert predict(later, "roofline").iteration_time_s == predict(plain, "roofline").iteration_time_s


def test_software_without_dated_runs_keeps_its_time() -> None:
    usual = Job.of(EXAMPLE)
    change = software_change(usual, Job.of(EXAMPLE, {"execution.date": "2025-05"}))
    assert change.log_factor == 0 and ("names no framework" in change.text or "states no date" in change.text)
    torchtitan = [
        Job.of(EXAMPLE, {"framework": "torchtitan", "execution.date": date}) for date in ("2025-01", "2025-05")
    ]
    change = software_change(*torchtitan)
    assert change.log_factor == 0 and change.doubt_log > 0 and "no pairs of dated runs" in change.text


def test_predict_answers_for_a_date_and_for_a_container() -> None:
    usual = nemo("2025-01")
    now, later = predict(usual), predict(usual, date="2025-05")
    assert later.iteration_time_s == pytest.approx(now.iteration_time_s * math.exp(4 * RATE_LOG))
    assert later.high_s / later.iteration_time_s > now.high_s / now.iteration_time_s
    assert later.to_dict()["software"]["change"]["log_factor"] < 0 and "change" not in now.to_dict()["software"]
    assert sum(later.breakdown.values()) == pytest.approx(later.iteration_time_s)
    boxed = predict(usual, container="nvcr.io/nvidia/nemo:25.05")
    assert boxed.iteration_time_s == pytest.approx(later.iteration_time_s)
    assert replace(boxed.job.execution, container="", date="2025-01") == usual.execution
