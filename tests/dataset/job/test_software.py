"""Stated software: versions, dates, containers, and the profile that they choose."""

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.frameworks import find_framework, framework_in
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.software import attention_of, plain_version, release_month, version_numbers

TABLES = {
    "model": {"name": "llama3-8b"},
    "batch": {"micro_batch": 1, "global_batch": 64},
    "cluster": {"hardware": "h100-sxm-80gb", "devices_per_node": 8},
}


@pytest.mark.parametrize(
    ("framework", "container", "date", "profile"),
    [
        ("nemo", "nvcr.io/nvidia/nemo:26.06.01", "", "nemo-2026-06"),
        ("nemo", "nvcr.io/nvidia/nemo:24.07", "", "nemo"),
        ("torchtitan", "nvcr.io/nvidia/nemo:26.06", "", "torchtitan"),
        ("DeepSpeed", "", "2021-04", "deepspeed-2021"),
        ("deepspeed", "nvcr.io/nvidia/pytorch:21.04-py3", "", "deepspeed-2021"),
        ("deepspeed", "nvcr.io/nvidia/pytorch:21.04-py3", "2023-01", "deepspeed"),
        ("Megatron-LM", "", "2022-05", "megatron-lm-2022"),
        ("bloom", "", "2022", "bloom"),
        ("", "nvcr.io/nvidia/nemo:25.04", "", "nemo"),
        ("", "my/image", "", "generic"),
    ],
)
def test_container_and_date_choose_among_the_profiles_of_a_framework(
    framework: str, container: str, date: str, profile: str
) -> None:
    """They never replace the framework that is named."""
    assert framework_in(framework, container, date).name == profile


def test_job_takes_the_framework_of_its_container() -> None:
    """Where it names none; its open keys are those of the profile."""
    job = Job.from_dict({**TABLES, "execution": {"container": "nvcr.io/nvidia/nemo:26.06"}})
    assert job.framework == "nemo-2026-06" and job.profile == find_framework("nemo-2026-06")
    assert Job.from_dict(job.to_dict()) == job
    assert Job.from_dict({**TABLES, "execution": {"container": "my/image"}}).profile is None


def test_versions_and_dates_that_cannot_be_are_refused() -> None:
    """With the key, the form and the value."""
    for key, value, rule in (
        ("cuda", "twelve", "cuda must be a version"),
        ("nccl", "2.x", "nccl must be"),
        ("date", "July", "execution.date must be a year or a month"),
    ):
        with pytest.raises(JobError, match=rule):
            Job.from_dict({**TABLES, "execution": {key: value}})
    stated = {"cuda": "12.4", "cublas": "12.4.5.8", "nccl": "2.27.3-1", "date": "2024-07-31"}
    assert Job.from_dict({**TABLES, "execution": stated}).execution.nccl == "2.27.3-1"


@pytest.mark.parametrize(
    ("text", "generation"),
    [
        ("unfused", "unfused"),
        ("FlashAttention-2", "flash-2"),
        ("flash-attn 2.5.8", "flash-2"),
        ("flash_attn v1.0.5", "flash-1"),
        ("FA3", "flash-3"),
        ("cuDNN 9.1", "flash-3"),
        ("cudnn", "flash-3"),
        ("triton", "flash-1"),
        ("sdpa", "flash-2"),
    ],
)
def test_attention_by_library(text: str, generation: str) -> None:
    """A library's name and version mean a generation of kernels."""
    assert attention_of(text) == generation


@pytest.mark.parametrize("text", ["flash-attn 4.0", "cuDNN 8.9", "xformers", "flash-attn"])
def test_unknown_attention_is_refused(text: str) -> None:
    """Neither an unknown version nor an unknown library is taken for its like."""
    with pytest.raises(JobError, match="attention must be unfused, FlashAttention 1 to 3"):
        attention_of(text)


def test_numbers_of_versions() -> None:
    """Versions compare by number, and tags of containers have the month of their release."""
    assert version_numbers("2.9.1") < version_numbers("2.27.3")
    assert release_month("nvcr.io/nvidia/pytorch:23.10-py3") == "2023-10" and release_month("mine:latest") == ""


@pytest.mark.parametrize("text", ["2.21.5", "NCCL 2.21.5", "nccl-2.21.5", "v2.21.5", " nccl v2.21.5 "])
def test_a_version_may_follow_the_name_of_its_library(text: str) -> None:
    assert plain_version(text) == "2.21.5"
    assert plain_version("banana") == "banana"
